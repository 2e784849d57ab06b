"""The laws about decisions of the controller: places of replicas, additions, and partitions that stand still (design: laws)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from controller.replicas.additions import LIMIT_S, Phase
from controller.replicas.kinds import counts
from partitioning.table import ReplicaAt
from tests.simulation.violation import Key, Violation
from tests.simulation.witness import WITNESS

if TYPE_CHECKING:
    from controller.replicas.additions import Addition
    from tests.simulation.checkers import Ledger


class TableLaws:
    """The laws about tables; ``check`` is called after each decision."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        #: Stage, partition and incarnation of replicas that are there by a move.
        self.moved: set[tuple[int, int, int]] = set()
        self._most: dict[int, int] = {}  # by stage: most replicas of a partition while the query was running
        self._seen = -1  # epoch of the table that was looked at last
        self._copies_at_first: dict[
            tuple[int, int, int], int
        ] = {}  # replicas when a target was listed, the target included
        self._stalled: dict[Key, float] = {}  # partition that stands still while its state is copied -> end of that

    def stall(self, stage: int, partition: int, now: float, seconds: float) -> None:
        """Note that the state of a partition is being copied. The worker that copies says so, not the order to copy."""
        self._stalled = {key: until for key, until in self._stalled.items() if until > now}
        self._stalled[stage, partition] = now + seconds
        if len(self._stalled) > self._ledger.plan.settings.repairs_at_once:
            raise Violation("partitions stalled at a time are limited", f"{sorted(self._stalled)}")

    def resume_all(self, stalled: Iterable[Key]) -> None:
        """Note that partitions stand still no more, because their process is dead."""
        for key in stalled:
            self._stalled.pop(key, None)

    def check_turns(self, now: float) -> None:
        """Check, after the controller has looked at its clock, that no addition waits long for its turn. A query that has
        finished has no more rows to keep."""
        if self._ledger.controller.phase != "running":
            return
        for key, addition in self._ledger.controller.repairs.under_way.items():
            if addition.phase == Phase.READY and now - addition.since > LIMIT_S[Phase.READY]:
                raise Violation("no rows are kept long for a turn", f"{key} waits for {now - addition.since:.3f} s")

    def check(self) -> None:
        table, repairs = self._ledger.controller.table, self._ledger.controller.repairs
        if table is None:
            return
        stages = {addition.stage for addition in repairs.under_way.values()}
        at_once = self._ledger.plan.settings.repairs_at_once
        copied = [key for key, addition in repairs.under_way.items() if addition.phase == Phase.COPY]
        if len(copied) > at_once:
            raise Violation("copies at a time are limited", f"{copied}")
        if len(stages) > 1:
            raise Violation("the sweep goes stage by stage", f"additions in stages {sorted(stages)}")
        leaving = self._ledger.controller.drains
        moved = [
            key for key, a in repairs.under_way.items() if a.from_worker is not None and a.from_worker not in leaving
        ]
        if len(moved) > at_once and self._ledger.controller.phase != "ended":  # no worker is emptied any more then
            raise Violation("moves at a time are limited", f"{moved}")
        self.moved |= {(*a.key, a.incarnation) for a in repairs.under_way.values() if a.from_worker is not None}
        wishes = self._ledger.controller.board.wishes
        if self._ledger.controller.phase == "running":  # at the end, additions under way stay beside the others
            self._most = {stage.id: wishes.most(stage) for stage in wishes.plan.stages}
        if table.epoch == self._seen:
            return
        self._seen = table.epoch
        for stage in self._ledger.plan.stages:
            for partition, replicas in enumerate(table.stages[stage.id]):
                workers = [replica.worker for replica in replicas]
                if len(set(workers)) < len(workers) or not set(workers) <= set(table.endpoints):
                    raise Violation("replicas are on different workers of the table", f"{stage.name}/{partition}")
                if replicas and not repairs.safety.is_safe(stage.id, partition, replicas[0]):
                    raise Violation("a primary is safe", f"{stage.name}/{partition}: {replicas}")
                if any(replica.kind == WITNESS for replica in replicas[:1]):
                    raise Violation("a witness never leads", f"{stage.name}/{partition}: {replicas}")
                addition = repairs.under_way.get((stage.id, partition))
                moving = addition is not None and addition.from_worker is not None
                most = self._most.get(stage.id, wishes.most(wishes.plan.stages[stage.id]))
                if len(replicas) > most + moving:
                    raise Violation("no more replicas than asked for", f"{stage.name}/{partition}: {replicas}")
                self._check_apart((stage.id, partition), replicas, addition)

    def _check_apart(self, key: Key, replicas: Sequence[ReplicaAt], addition: Addition | None) -> None:
        """Check that the loss of one executor takes one replica. Source and target of a move may share an executor, because
        only one of them stays."""
        if self._ledger.plan.settings.same_executor:
            return
        workers = [replica.worker for replica in replicas]
        if addition is not None and addition.from_worker is not None:
            alike = sum(replica.kind == addition.kind for replica in replicas)
            at_first = self._copies_at_first.setdefault((*key, addition.incarnation), alike)
            wanted = counts(self._ledger.controller.wished.stages[key[0]]).get(addition.kind, 0)
            if alike == at_first or alike > wanted:  # no replica was lost whose place the target takes instead
                workers = [worker for worker in workers if worker != addition.from_worker]
        members = self._ledger.controller.members.workers
        workers = [worker for worker in workers if worker in members]  # the loss that ends a query changes no table
        executors = [members[worker].about.executor for worker in workers]
        if len(set(executors)) < len(executors):
            at = dict(zip(workers, executors, strict=True))
            raise Violation(
                "copies are on different executors", f"{self._ledger.plan.stages[key[0]].name}/{key[1]}: {at}"
            )
