"""Changes of the plan of a running query: additions, removals, and stages that fail (design: change-of-plan, removal,
stage-fails).

The driver compiles an addition and gives it with its encoded form, which only workers read. A change goes through the phases of
``controller.course.plan_phases``, one change at a time. Until the table that names it, all that it makes is in its request alone:
a refusal leaves nothing behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from controller.course.newborns import grown_table
from controller.course.plan_phases import LIMIT_S, STORE_MAX_S, PlanEvent, PlanPhase
from controller.course.plan_requests import (
    BirthsToKeep,
    FailedStage,
    LocationOrder,
    PlanHasChanged,
    PlanRequest,
    PlanVersion,
    VersionToKeep,
    WorkersAreMissing,
)
from controller.course.query_phases import QueryPhase
from controller.course.removals import dependants, removal, without
from controller.course.source_births import SourceBirths, stream_of
from controller.decide.board import Board, StageFailure
from controller.replicas.membership import Member
from controller.text import count, duration, some
from flux.dataflow.plan import FromSource, Plan, SourcePlan, StagePlan
from flux.dataflow.plan_change import PlanChange, change_since, encode_change, in_one
from flux.errors import FluxError, QueryFailed, UsageError
from flux.operators.user_code import text_of
from flux.vault.plan_without_code import change_for_a_vault
from flux.wire.control import EdgeBorn, EdgeStored, GetPlan, PlanChanged, PlanSeen, Stop

#: Seconds until a change is repeated to the processes that have not confirmed it: it may be lost with a connection.
REPEAT_S = 2.0
#: Seconds for which the answer to an addition waits at most for the beginnings of streams of running sources.
BORN_S = 10.0
#: Stages, or processes, that a sentence names; further ones are only counted.
NAMED = 8
#: Changes that may wait for their turn.
WAITING_MAX = 1000
#: Newest changes that are told as they were made. A process that lacks an earlier one gets the plan as it is.
TOLD_KEPT = 64
#: Versions that reports list.
VERSIONS_KEPT = 1000
#: Failed stages that are remembered.
FAILED_KEPT = 1000


class PlanChanges:
    """The changes of the plan. ``follow(request)`` is called with the plan before the table goes out, so that all parts go by it;
    ``forget`` before that, with the stages that are gone; ``workers``: the number with which the query began; ``wanted``: returns
    the number of workers that the query is to have now.

    Law: a version that a table names is had by every process that takes part, and the number of a version is used once."""

    def __init__(
        self,
        board: Board,
        workers: int,
        forget: Callable[[Sequence[int], int, float], None],
        follow: Callable[[Plan], None],
        published: Callable[[float], None],
        wanted: Callable[[], int],
    ) -> None:
        self._board = board
        self.workers = workers
        self._forget = forget
        self._follow = follow
        self._published = published
        self._wanted = wanted
        #: The births of streams that come to running sources.
        self.births = SourceBirths(board.plan.durable)
        self.sealed = False
        self.current: PlanRequest | None = None
        self.waiting: deque[PlanRequest] = deque()
        #: Time at which the last change was over.
        self.quiet_since = 0.0
        self.failed: dict[str, FailedStage] = {}
        self.versions: list[PlanVersion] = []
        self._last = board.plan.version  # the newest number that was given to a version
        self._told: list[PlanChanged] = []  # versions that tables have named
        self._changes: list[PlanChange] = []  # the same, not encoded
        self._at_once: dict[int, PlanChanged | None] = {}  # by earlier version: all changes since then in one
        self._cannot: set[tuple[int, int]] = set()  # nodes with versions that they cannot take, which are noted
        self._keep: list[LocationOrder] = []

    # ---- asking

    @property
    def under_way(self) -> bool:
        """A change is under way, or waits for its turn."""
        return self.current is not None or bool(self.waiting)

    @property
    def keeps_versions(self) -> bool:
        """Versions and births are kept in the checkpoint location, by a shell that takes ``to_keep``."""
        return self.births.keeps

    def keep_versions(self, births: Iterable[EdgeStored]) -> None:
        """Keep versions and births in a checkpoint location, which has these ``births``."""
        self.births.keeps = True
        self.births.begin(births)

    def newest(self) -> tuple[Plan, int]:
        """Return the plan to compile an addition by, and the number of its version. UsageError: nothing can be added."""
        self._require_open("add to the query")
        return self._board.plan, self._last + 1

    def add(self, change: PlanChange, encoded: bytes, now: float, request: int = 0) -> PlanRequest:
        """Add stages and sources, all or none. UsageError, and nothing changes: that is impossible. PlanHasChanged: compile it
        again."""
        self._require_open("add to the query")
        names = _names(change.stages, change.sources)
        asked = PlanRequest(f"addition of {some(names, NAMED)}", lambda _, __: change, now, request, encoded=encoded)
        self._made(asked)
        return self._ask(asked, now)

    def remove(self, name: str, cascade: bool, now: float, request: int = 0) -> PlanRequest | None:
        """Remove a stage or a source; ``cascade``: with all that depends on it. UsageError, and nothing changes: that is
        impossible. None: it was a stage that has failed, which is not listed any more."""
        self._board.require_running("remove a stage")
        if self._is_gone(name):
            self._delist(name)
            return None
        asked = PlanRequest(
            f"removal of {name}", lambda plan, version: removal(plan, version, name, cascade), now, request, name
        )
        if not (name in self.failed and self.failed[name].stage in self._board.plan.stages):  # else it is about to go
            self._made(asked)
        return self._ask(asked, now)

    def _is_gone(self, name: str) -> bool:
        """Tell whether a stage has failed, and no stage has its name."""
        return name in self.failed and all(stage.name != name for stage in self._board.plan.stages)

    def _delist(self, name: str) -> str:
        """List a stage that has failed no more, nor those that went with it: they cannot be begun anew without it. Returns the
        name of the stage whose failure it was."""
        because = self.failed.pop(name).because_of
        if because == name:
            self.failed = {other: each for other, each in self.failed.items() if each.because_of != name}
        return because

    def give_up(self, asked: PlanRequest, limit_s: float, now: float) -> bool:
        """Give up a change whose time is over. False: a table has named it already, or it is over."""
        if asked in self.waiting:
            self.waiting.remove(asked)
            before = "" if self.current is None else f", which is {self.current.phase}"
            self._refuse(asked, f"it waited for {duration(limit_s)} for the change before it{before}", now)
        elif asked is self.current and asked.phase in (PlanPhase.STORING, PlanPhase.TOLD):
            self._too_late(asked, limit_s, now)
        else:
            return False
        self.look(now)
        return True

    def seal(self) -> None:
        """Accept no more additions, so that the query finishes when all its stages have."""
        self.sealed = True

    def _require_open(self, what: str) -> None:
        self._board.require_running(what)
        if self.sealed:
            raise UsageError(f"cannot {what}: it was sealed (query.seal()), so that it finishes")

    def _ask(self, asked: PlanRequest, now: float) -> PlanRequest:
        if len(self.waiting) >= WAITING_MAX:
            raise UsageError(f"{asked.what}: {WAITING_MAX} changes of the plan wait already")
        asked.at = now
        self.waiting.append(asked)
        self.look(now)
        return asked

    def _made(self, asked: PlanRequest) -> tuple[PlanChange, Plan]:
        """Make a change by the newest plan, and the plan behind it. UsageError: it is impossible."""
        plan = self._board.plan
        change = asked.make(plan, self._last + 1)
        if asked.encoded and (change.changes, change.version) != (plan.version, self._last + 1):
            raise PlanHasChanged(
                f"{asked.what}: it was compiled by version {change.changes} of the plan, and the newest is {plan.version}"
            )
        try:
            made = change.applied_to(plan)
        except ValueError as error:
            raise UsageError(f"{asked.what}: {error}") from error
        self._check(change, plan, made)
        return change, made

    def _check(self, change: PlanChange, plan: Plan, made: Plan) -> None:
        """Check that names are new, that each new stream has a share of the log, and that workers can hold the replicas."""
        assert all(edge.log_bytes is not None for edge in change.edges), "shares are given at birth"
        for kind, known, new in (("stage", plan.stages, change.stages), ("source", plan.sources, change.sources)):
            taken = {part.name for part in known}
            for part in new:
                if part.name in taken:
                    raise UsageError(f"the query has a {kind} {part.name} already: give the new one another name")
        table = self._board.table
        if table is not None and change.stages:
            try:
                grown_table(table, made, change, self._board.placement())
            except QueryFailed as error:
                raise self._no_place(error) from error

    def _no_place(self, error: QueryFailed) -> UsageError:
        """Make the error of an addition whose replicas the workers cannot hold."""
        members = self._board.members
        here, wanted = len(members.workers) - len(members.leaving), self._wanted()
        if here >= wanted:
            return UsageError(text_of(error))
        there = f"{here} of {count(wanted, 'worker')} {'is' if here == 1 else 'are'} there: others were lost, or are to come"
        return WorkersAreMissing(f"{text_of(error)}. {there}. Add it again later")

    # ---- the next step

    def look(self, now: float) -> None:
        """Go on with the change under way as far as possible, and begin the next one."""
        board = self._board
        self._keep_births(now)
        for failure in board.take_failures():
            self._stage_failed(failure, now)
        if board.phase == QueryPhase.ENDED:
            return
        while self._step(now):
            pass

    def _step(self, now: float) -> bool:
        """Take one step of the change under way. False: it waits."""
        board, asked = self._board, self.current
        if asked is None:
            return self._begin(now)
        if asked.phase == PlanPhase.LISTED:
            if board.table is None or not board.is_confirmed(asked.epoch) or not self._are_born(asked, now):
                return False
            listed_at = asked.at
            asked.on(PlanEvent.SEEN, now)
            self._over(asked, now - listed_at, now)
            return True
        if asked.phase in (PlanPhase.STORING, PlanPhase.TOLD) and board.phase != QueryPhase.RUNNING:
            return self._refuse(asked, f"the query is {board.phase}", now)
        if now - asked.at > LIMIT_S[asked.phase]:
            return self._too_late(asked, LIMIT_S[asked.phase], now)
        if asked.phase == PlanPhase.TOLD:
            late = self._late(asked)
            if not late:
                return self._list(asked, now)
            if now >= asked.repeat_at:
                asked.repeat_at = now + REPEAT_S
                for member in late:
                    self._tell_change(member, self._message(asked), asked.change)
        return False

    def _begin(self, now: float) -> bool:
        if not self.waiting:
            return False
        asked = self.waiting[0]
        if self._board.phase == QueryPhase.STARTING and asked.failure is not None:
            return False
        self.current = self.waiting.popleft()
        if self._board.phase != QueryPhase.RUNNING:
            return self._refuse(asked, f"the query is {self._board.phase}", now)
        if self._is_gone(asked.removes):
            asked.on(PlanEvent.GONE, now)
            self.current, self.quiet_since = None, now
            because = self._delist(asked.removes)
            self._board.note(f"{asked.what}, which went with the failure of {because}", now, "plan", asked.request)
            return True
        try:
            asked.change, asked.plan = self._made(asked)
            asked.encoded = asked.encoded or encode_change(asked.change, self._board.plan.secret)
        except FluxError as error:
            if isinstance(error, UsageError):
                asked.refusal = type(error)
            return self._refuse(asked, text_of(error), now)
        if asked.failure is not None:
            self._note_failed(asked.change.removed_stages, *asked.failure, now)  # with stages that came meanwhile
            if not asked.plan.stages:  # all others have failed or were removed since it was asked for
                self._board.end(asked.failure[0])
                return False
        self._last = asked.version
        asked.on(PlanEvent.TURN, now)
        if self.keeps_versions:
            self._order(asked)
        else:
            self._tell(asked, now)
        return True

    def to_keep(self) -> list[LocationOrder]:
        """Return the orders to the checkpoint location since the last call."""
        orders, self._keep = self._keep, []
        return orders

    def _order(self, asked: PlanRequest, before: Plan | None = None) -> None:
        """Order the checkpoint location to have the plan of a change as the newest one, or the plan ``before`` it again."""
        plan = before or asked.plan
        assert plan is not None
        asked.order = VersionToKeep(asked.version, plan, tuple(self.failed), self.births.known)
        self._keep.append(asked.order)

    def kept(self, order: LocationOrder, now: float, error: str = "") -> None:
        """Take the end of an order to the checkpoint location; ``error``: it could not be carried out. An order that comes to its
        end too late concerns nothing any more: the one that takes it back is carried out behind it."""
        if isinstance(order, BirthsToKeep):
            self._tell_births(self.births.kept(order, error))
            self.look(now)
            return
        asked = self.current
        if asked is None or asked.order is not order:
            return
        if asked.phase == PlanPhase.STORING and error:
            self._refuse(asked, f"the checkpoint location cannot keep it: {error}", now)
        elif asked.phase == PlanPhase.STORING:
            self._tell(asked, now)
        elif asked.phase == PlanPhase.REVOKING:
            asked.why += _not_forgotten(error) if error else ""
            self._forgotten(asked, now)
        self.look(now)

    def _tell(self, asked: PlanRequest, now: float) -> None:
        asked.on(PlanEvent.KEPT, now)
        asked.repeat_at = now + REPEAT_S
        for member in self._board.members.processes:
            self._tell_change(member, self._message(asked), asked.change)

    def _message(self, asked: PlanRequest) -> PlanChanged:
        return PlanChanged(version=asked.version, change=asked.encoded)

    def _tell_change(self, member: Member, message: PlanChanged, change: PlanChange | None) -> None:
        """Tell a process a change. The vault gets it without code: it runs none, and may not find the modules."""
        if member.about.role == "vault" and change is not None:
            encoded = encode_change(change_for_a_vault(change), self._board.plan.secret)
            message = PlanChanged(version=message.version, change=encoded)
        self._board.tell(member, message)

    def _late(self, asked: PlanRequest) -> list[Member]:
        """Return the processes that have not confirmed the change. An ingress task that has done its work need not."""
        return [member for member in self._board.members.processes if not member.left and member.plan < asked.version]

    # ---- the table

    def _list(self, asked: PlanRequest, now: float) -> bool:
        """Let all parts go by the plan, and publish the table that names it."""
        board, change, plan = self._board, asked.change, asked.plan
        assert board.table is not None
        assert change is not None
        assert plan is not None
        try:
            table = grown_table(board.table, plan, change, board.placement())
        except QueryFailed as error:
            refusal = self._no_place(error)
            asked.refusal = type(refusal)
            return self._refuse(asked, text_of(refusal), now)
        before = board.plan
        asked.on(PlanEvent.CONFIRMED, now)
        self._told.append(self._message(asked))
        self._changes.append(change)
        self._at_once.clear()
        del self._told[:-TOLD_KEPT], self._changes[:-TOLD_KEPT]
        self._forget(change.removed_stages, table.epoch, now)
        board.follow(plan)
        self._follow(plan)
        self._note_version(before, change)
        self.births.forget(change.removed_edges)
        anew = [stage.name for stage in change.stages]
        by_hand = [before.stages[stage].name for stage in change.removed_stages if asked.failure is None]
        for name in anew + by_hand:
            self.failed.pop(name, None)
        self._dismiss_ingress(plan)
        board.publish(table)
        asked.epoch = table.epoch
        self._published(now)
        return True

    def _note_version(self, before: Plan, change: PlanChange) -> None:
        stages = map(before.stages.__getitem__, change.removed_stages)
        removed = _names(stages, map(before.sources.__getitem__, change.removed_sources))
        self.versions.append(PlanVersion(change.version, 0.0, _names(change.stages, change.sources), removed))
        del self.versions[:-VERSIONS_KEPT]

    def _dismiss_ingress(self, plan: Plan) -> None:
        """End the Spark tasks that feed nothing any more."""
        members = self._board.members
        for member in list(members.ingress.values()):
            if not any(edge in plan.edges for edge in member.about.edges):
                self._board.tell(member, Stop(reason="nothing reads its source any more"))
                members.forget(member)

    # ---- the end of a change

    def _over(self, asked: PlanRequest, followed_s: float, now: float) -> None:
        board = self._board
        self.current, self.quiet_since = None, now
        event = board.note(
            f"version {asked.version}: {asked.what}", now, "plan", asked.request, seconds=now - asked.since
        )
        self.versions[-1] = replace(self.versions[-1], at=event.at, followed_s=followed_s)

    def _too_late(self, asked: PlanRequest, limit: float, now: float) -> bool:
        if asked.phase == PlanPhase.TOLD:
            names = some([member.name for member in self._late(asked)], NAMED)
            return self._refuse(asked, f"{names} did not confirm it within {duration(limit)}", now)
        if asked.phase == PlanPhase.STORING:
            return self._refuse(asked, f"the checkpoint location did not keep it within {duration(limit)}", now)
        asked.why += _not_forgotten(f"no answer came within {duration(limit)}")
        return self._forgotten(asked, now)

    def _refuse(self, asked: PlanRequest, why: str, now: float) -> bool:
        """Refuse a change that no table has named."""
        revokes = asked.phase != PlanPhase.REQUESTED
        asked.on(PlanEvent.REFUSED, now)
        asked.why = why
        if revokes and self.keeps_versions:
            self._order(asked, self._board.plan)
            return True
        if revokes:
            return self._forgotten(asked, now)
        self._ended(asked, now)
        return True

    def _forgotten(self, asked: PlanRequest, now: float) -> bool:
        asked.on(PlanEvent.FORGOTTEN, now)
        self._ended(asked, now)
        return True

    def _ended(self, asked: PlanRequest, now: float) -> None:
        if asked is self.current:
            self.current, self.quiet_since = None, now
        self._board.note(f"{asked.what}: {asked.why}", now, "plan refused", asked.request, seconds=now - asked.since)
        if asked.failure is not None and asked.change is not None:
            self.waiting.appendleft(PlanRequest(asked.what, asked.make, now, at=now, failure=asked.failure))

    # ---- reports of processes

    def hears(self, member: Member, message: PlanSeen | GetPlan | EdgeBorn, now: float) -> None:
        match message:
            case PlanSeen():
                self._seen(member, message, now)
            case GetPlan():
                self._show(member, message)
            case EdgeBorn():
                self._begin_edge(member, message, now)

    def _seen(self, member: Member, message: PlanSeen, now: float) -> None:
        """Take the answer of a process to a change."""
        asked = self.current
        if not message.error:
            member.plan = max(member.plan, message.version)
        elif asked is not None and asked.phase == PlanPhase.TOLD and asked.version == message.version:
            self._refuse(asked, f"{member.name} cannot take it: {message.error}", now)
        elif message.version <= self._board.plan.version and (member.node, message.version) not in self._cannot:
            self._cannot.add((member.node, message.version))
            why = f"cannot take part: version {message.version} of the plan cannot be had there: {message.error}"
            self._board.note_worker("plan refused", member, why, now)
        self.look(now)

    def _show(self, member: Member, message: GetPlan) -> None:
        """Tell a process the versions that it lacks."""
        member.plan = max(member.plan, message.version)
        plan, version = self._board.plan, message.version
        if version < plan.version and (member.about.role == "vault" or version < self._changes[0].changes):
            self._show_plan(member, version, plan.version)
        else:
            lacking = [told for told in self._told if told.version > version]
            at_once = self._changes_at_once(version) if lacking else None
            for told in lacking if at_once is None else [at_once]:
                self._board.tell(member, told)
        self._show_current(member)

    def _show_plan(self, member: Member, first: int, last: int) -> None:
        """Tell a process the parts of the plan that came after version ``first``, up to ``last``, and those that are gone: in one
        message, or in several if one cannot hold them."""
        plan = self._board.plan
        change = change_since(plan, first, last)
        try:
            self._tell_change(member, PlanChanged(version=last, change=encode_change(change, plan.secret)), change)
        except UsageError:
            between = sorted({stage.since for stage in plan.stages if first < stage.since < last})
            if not between:
                raise
            middle = between[len(between) // 2]
            self._show_plan(member, first, middle)
            self._show_plan(member, middle, last)

    def _changes_at_once(self, version: int) -> PlanChanged | None:
        """Return all changes since a version in one, without parts that came and went: a module of theirs may be gone. None:
        there are no such parts, or one message cannot hold the change."""
        if version not in self._at_once:
            plan = self._board.plan
            change = in_one([each for each in self._changes if each.version > version], plan)
            message = None
            if change is not None and change.changes == version:
                with suppress(UsageError):
                    message = PlanChanged(version=plan.version, change=encode_change(change, plan.secret))
            self._at_once[version] = message
        return self._at_once[version]

    def greeted(self, connection: Hashable) -> None:
        """Tell a process that has registered of the change under way: it may have joined, or missed it."""
        member = self._board.members.by_connection(connection)
        if member is not None:
            self._show_current(member)
            for birth in self.births.stored:
                self._board.tell(member, birth)

    def _show_current(self, member: Member) -> None:
        asked = self.current
        if asked is not None and asked.phase == PlanPhase.TOLD and member.plan < asked.version:
            self._tell_change(member, self._message(asked), asked.change)

    def _begin_edge(self, member: Member, message: EdgeBorn, now: float) -> None:
        """Take the row or batch with which a stream of a running source begins. The first report counts, if it comes from the
        reader of the partition: a former one may be anywhere in the rows. Later readers begin the stream there."""
        edge = next((each for each in self._board.plan.edges if each.id == message.edge), None)
        if not isinstance(edge, FromSource):
            return
        birth = EdgeStored(edge=edge.id, producer=message.producer, number=message.number, mark=message.mark)
        known = self.births.of(stream_of(birth))
        if known is not None:
            self._board.tell(member, known)  # its answer was lost
        elif self._reader(edge.source, message.producer) == message.node:
            self._tell_births(self.births.report(birth, now))
            self.look(now)

    def _tell_births(self, births: Iterable[EdgeStored]) -> None:
        """Tell all processes births that are stored."""
        for birth in births:
            self._board.tell_all(birth)

    def _keep_births(self, now: float) -> None:
        """Order the checkpoint location to keep births, and fail stages whose births it does not keep: a stage that begins
        elsewhere after the loss of everything would be another one."""
        order = self.births.next_order()
        if order is not None:
            self._keep.append(order)
        plan = self._board.plan
        for stream in self.births.take_late(STORE_MAX_S, now):
            edge = plan.edges[stream.edge]
            assert isinstance(edge, FromSource)
            name, source = plan.stages[edge.consumer].name, plan.sources[edge.source].name
            why = self.births.error or "no answer came"
            error = (
                f"the checkpoint location did not keep within {duration(STORE_MAX_S)} with which row of source {source}"
            )
            self._board.fail(QueryFailed(f"{error} stage {name} begins: {why}"), [edge.consumer])

    def _are_born(self, asked: PlanRequest, now: float) -> bool:
        """Tell whether all streams that an addition takes from running sources have begun, so that rows which come after the
        answer are in them. A failure does not wait: the stage that has failed may be in the way of a beginning. A birth that the
        checkpoint location has still to keep has the time of a version."""
        failing = bool(self.waiting) and self.waiting[0].failure is not None
        if asked.change is None or failing:
            return True
        plan = self._board.plan
        edges = {
            edge.id: plan.sources[edge.source].worker_partitions
            for edge in asked.change.edges
            if isinstance(edge, FromSource) and plan.sources[edge.source].since < asked.version
        }
        if now - asked.at > BORN_S:
            return not any(map(self.births.awaits, edges))
        return all(self.births.has_all(edge, partitions) for edge, partitions in edges.items())

    def _reader(self, source: int, partition: int) -> int:
        """Return the worker that reads a partition of a source by the newest table; -1: none does."""
        table = self._board.table
        readers = table.sources[source] if table is not None and source < len(table.sources) else ()
        return readers[partition] if partition < len(readers) else -1

    # ---- stages that fail

    def _stage_failed(self, failure: StageFailure, now: float) -> None:
        """Take the stages that have failed, and all that depends on them, out of the plan. They stay listed with the error."""
        board = self._board
        plan = board.plan
        gone = dependants(plan, [stage for stage in failure.stages if stage in plan.stages])
        if not gone or board.phase == QueryPhase.ENDED:
            return
        if len(gone) == len(plan.stages):
            board.end(failure.error)
            return
        listed = [self.failed.get(plan.stages[stage].name) for stage in gone]
        if all(each is not None and each.stage == stage for each, stage in zip(listed, gone, strict=True)):
            return  # each replica tells of the same error, and the stages are about to go
        because = plan.stages[gone[0]].name
        self._note_failed(gone, failure.error, because, now)
        what = f"removal of {some([plan.stages[stage].name for stage in gone], NAMED)}, which failed"
        asked = PlanRequest(what, partial(_failed_out, gone), now, at=now, failure=(failure.error, because))
        self.waiting.appendleft(asked)

    def _note_failed(self, gone: Iterable[int], error: FluxError, because: str, now: float) -> None:
        """List stages as failed. The first error of each counts."""
        for stage in gone:
            name = self._board.plan.stages[stage].name
            if name not in self.failed:
                summary = text_of(error, lambda failed: failed.summary)
                why = summary if name == because else f"it depends on {because}, which has failed"
                event = self._board.note(why, now, "stage failed", stage=name)
                trace = getattr(error, "traceback", "")
                self.failed[name] = FailedStage(name, stage, event.at, because, summary, trace)
        for name in list(self.failed)[: max(len(self.failed) - FAILED_KEPT, 0)]:
            del self.failed[name]

    def in_words(self) -> list[str]:
        """Describe the changes that are not over, such as "addition of Alarm: being confirmed"."""
        under_way = [] if self.current is None else [self.current]
        return [f"{asked.what}: {asked.phase}" for asked in (*under_way, *self.waiting)]

    def report(self) -> dict[str, Any]:
        """Make the part of ``lastProgress`` about the plan."""
        failed = [
            {"stage": each.name, "becauseOf": each.because_of, "error": each.error} for each in self.failed.values()
        ]
        return {"version": self._board.plan.version, "changes": self.in_words(), "failedStages": failed}

    def validate(self) -> None:
        """Check that one change is under way, and that its version is above all that tables have named."""
        self.births.validate()
        asked = self.current
        assert asked is None or not asked.phase.over
        assert all(each.phase == PlanPhase.REQUESTED for each in self.waiting)
        newest = self._board.plan.version
        assert not self._told or self._told[-1].version == newest, "the newest version that a table has named"
        assert asked is None or asked.change is None or asked.version <= self._last
        if asked is not None and asked.phase in (PlanPhase.STORING, PlanPhase.TOLD):
            assert asked.version > newest, "no table names a version that is not confirmed"
        table = self._board.table
        if table is not None:
            assert table.plan == self._board.plan.version
            there = {stage.id for stage in self._board.plan.stages}
            for stage, rows in enumerate(table.stages):
                assert bool(rows) == (stage in there), f"stage {stage} in the plan and in the table"


def _names(stages: Iterable[StagePlan], sources: Iterable[SourcePlan]) -> list[str]:
    return [*(stage.name for stage in stages), *(source.name for source in sources)]


def _not_forgotten(why: str) -> str:
    return (
        f"; and the checkpoint location did not forget it ({why}): if the query is started there again and lacks its stages, "
        "give them up with removed=[...]"
    )


def _failed_out(failed: Iterable[int], plan: Plan, version: int) -> PlanChange:
    gone = dependants(plan, [stage for stage in failed if stage in plan.stages])
    if not gone:
        raise UsageError("its stages are gone already")
    return without(plan, version, gone)
