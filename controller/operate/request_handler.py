"""Answers to people's requests from the controller's state (design: people), and the way of a reader outside the query to the
output that is kept for it (design: readers-secret)."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from controller.balance.load import LoadTable, Move, ReplicaLoad, Suggestion
from controller.balance.rounds import Rounds
from controller.course.beginnings import incomplete
from controller.decide.board import Board, Tell
from controller.decide.driver_events import DriverEvents
from controller.decide.plan_changes import PlanChanges
from controller.decide.request_book import Asked
from controller.decide.user_requests import UserRequests
from controller.operate.plan_answers import begin_addition, failed_stages, plan_versions
from controller.operate.requests import (
    Accepted,
    AddFlow,
    AnyRequest,
    Carried,
    DrainWorker,
    FailWorker,
    Follow,
    Followed,
    GetHistory,
    GetMetrics,
    GetOutput,
    GetPartitions,
    GetPlanStatus,
    GetStatus,
    History,
    KeptStatus,
    MetricsText,
    MoveStatus,
    OutputPlace,
    Partitions,
    ProtectStage,
    Refusal,
    RemoveStage,
    RepairStatus,
    ReplicaStatus,
    RequestStatus,
    RestartStage,
    SetWorkers,
    StageStatus,
    StartMoves,
    Status,
    Suggest,
    Suggested,
    UnreadFiles,
    WantedMove,
    WorkerStatus,
    decode_request,
)
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.membership import Membership
from controller.replicas.moves import MovePhase
from controller.replicas.replica_safety import Life
from controller.report.feeds import told_feeds
from controller.report.links import lent, relayed, told
from controller.report.metrics import Metrics
from controller.report.progress import Level
from flux.dataflow.plan import Plan
from flux.dataflow.sink import offered
from flux.errors import FluxError, ProtocolError, UsageError
from flux.operators.user_code import described, text_of
from flux.replica.kinds import keeps_checkpoints, kind_of
from flux.wire.frames import encode
from partitioning.ids import PartitionKey
from partitioning.table import Table

NONCE_BYTES = 32


@dataclass(frozen=True)
class Reach:
    """The address at which the controller listens for readers, the secret of the connection file, and the keys of the query; no
    keys: it is not encrypted."""

    endpoint: str
    shared: bytes = field(repr=False)
    public_key: bytes = b""
    private_key: bytes = field(default=b"", repr=False)


def output_place(plan: Plan, name: str | None, reach: Reach | None, stage: str | None) -> OutputPlace:
    """Describe the output of a stage and the way to it. UsageError: there is none.

    Workers let in processes with the secret of the query, so a reader needs it. It is given only to a reader that has
    proved the secret of the connection file, and masked with that: a listener on the way learns nothing."""
    found = offered(plan, stage)
    if reach is None or found.output_schema is None:
        raise UsageError("the output of this query cannot be read from outside")
    nonce = secrets.token_bytes(NONCE_BYTES)
    return OutputPlace(
        id=plan.query,
        name=name,
        stage=found.id,
        stage_name=found.name,
        partitions=found.partitions,
        schema=found.output_schema.serialize().to_pybytes(),
        endpoint=reach.endpoint,
        nonce=nonce,
        masked=masked(plan.secret, reach.shared, nonce),
        public_key=reach.public_key,
        private_key=reach.private_key,
        silence_max_s=plan.settings.controller_timeout,
    )


def masked(secret: bytes, shared: bytes, nonce: bytes) -> bytes:
    """Mask the secret for one answer, so that only a holder of ``shared`` can read it. Masking it again gives the secret back."""
    mask = hashlib.shake_256(b"output" + len(shared).to_bytes(4, "big") + shared + nonce).digest(len(secret))
    return bytes(one ^ other for one, other in zip(secret, mask, strict=True))


log = logging.getLogger("flux")

#: Partitions of one answer about replicas: making it takes the controller's thread some 30 ms.
PAGE = 1024


class Core(Protocol):
    """The part of ``controller.decide.controller.Controller`` that the ``RequestHandler`` uses."""

    repairs: AdditionTracker
    board: Board
    people: UserRequests
    plans: PlanChanges

    @property
    def plan(self) -> Plan: ...
    @property
    def wished(self) -> Plan: ...
    @property
    def phase(self) -> str: ...
    @property
    def error(self) -> FluxError | None: ...
    @property
    def table(self) -> Table | None: ...
    @property
    def members(self) -> Membership: ...
    @property
    def rounds(self) -> Rounds: ...
    @property
    def driver(self) -> DriverEvents: ...
    def load_table(self) -> LoadTable | None: ...
    def levels(self) -> list[Level]: ...
    def suggest(self, policy: str, now: float) -> Suggestion: ...
    def next_request(self) -> int: ...
    def request(self, number: int) -> Asked: ...
    def open_requests(self) -> list[Asked]: ...
    def move(self, moves: list[Move], why: str, now: float, request: int) -> list[Tell]: ...
    def drain(self, worker: int, now: float, request: int) -> list[Tell]: ...
    def fail(self, worker: int, now: float, request: int) -> list[Tell]: ...
    def scale(self, workers: int, now: float, request: int) -> list[Tell]: ...
    def protect(
        self, stage: int, replicas: int | None, recovery: str | None, now: float, request: int
    ) -> list[Tell]: ...
    def moves_pending(self) -> list[Move]: ...


@dataclass(frozen=True)
class About:
    """Name and process of the query. ``metrics`` is the address of its metrics; ``started`` its start by the wall clock;
    ``began`` the same moment by the controller's clock, None: the same number."""

    id: str
    name: str | None
    application: str
    pid: int
    started: float
    metrics: str = ""
    began: float | None = None

    def uptime_s(self, now: float) -> float:
        return round(max(now - (self.started if self.began is None else self.began), 0.0), 3)


class RequestHandler:
    """Handler of the requests to one query. ``report`` is the newest progress report, None before the first. ``observe``
    renews ``metrics`` from the state.

    No I/O: frames in, a frame and commands out. The handler decides nothing about replicas: it reads the state, and passes
    changes to the controller, which may refuse them."""

    def __init__(
        self,
        core: Core,
        about: About,
        report: Callable[[], dict[str, Any] | None],
        metrics: Metrics,
        observe: Callable[[], None],
    ) -> None:
        self.refused = 0
        self.reach: Reach | None = None  # for readers of output
        #: Has the program of the query add a flow, given as MODULE:FLOW, and returns when it is added; None: it adds none.
        self.add_flow: Callable[[str], None] | None = None
        #: Has the program begin a failed stage anew, given by its name.
        self.restart_stage: Callable[[str], None] | None = None
        self._core = core
        self._about = about
        self._report = report
        self._metrics = metrics
        self._observe = observe

    def handle(self, frames: Sequence[Any], now: float) -> tuple[bytes, list[Tell]]:
        """Answer a request on a connection that has proved the secret. Return the answer, and the commands that the request
        leads to."""
        try:
            request = decode_request(frames)
        except ProtocolError as error:
            self.refused += 1
            return encode(Refusal(kind="request", reason=text_of(error))), []
        answer, effects = self.answer(request, now)
        return encode(msgspec.structs.replace(answer, number=request.number)), effects

    def answer(self, request: AnyRequest, now: float) -> tuple[Any, list[Tell]]:
        """Answer a request of the query's own process, without frames."""
        core = self._core
        try:
            match request:
                case StartMoves():
                    loads = self._running().load_table()
                    assert loads is not None
                    moves = [self._meant(wanted, loads) for wanted in request.moves]
                    number = core.next_request()
                    effects = self._running().move(moves, request.why, now, number)
                    return Accepted(request=number, moves=[self._move(move) for move in moves]), effects
                case DrainWorker():
                    number = core.next_request()
                    return Accepted(request=number), self._running().drain(request.worker, now, number)
                case FailWorker():
                    number = core.next_request()
                    return Accepted(request=number), self._running().fail(request.worker, now, number)
                case SetWorkers():
                    number = core.next_request()
                    return Accepted(request=number), self._running().scale(request.workers, now, number)
                case ProtectStage():
                    stage, wish = self._stage(request.stage), (request.replicas, request.recovery)
                    number = core.next_request()
                    return Accepted(request=number), self._running().protect(stage, *wish, now, number)
                case AddFlow():
                    return Accepted(request=self._add_flow("addition", request.target, self.add_flow)), []
                case RestartStage():
                    return Accepted(request=self._add_flow("restart", request.name, self.restart_stage)), []
                case RemoveStage():
                    number = core.next_request()
                    self._running().people.remove(request.name, request.cascade, now, number)
                    return Accepted(request=number), core.board.take()
            return self._look(request, now), []
        except UsageError as error:
            return Refusal(kind="usage", reason=text_of(error)), []
        except FluxError as error:
            return Refusal(kind="failed", reason=text_of(error)), []

    def _add_flow(self, what: str, target: str, add: Callable[[str], None] | None) -> int:
        """Begin to add a flow, or that of a failed stage, and return the number of the request."""
        if add is None:
            raise UsageError("the program of this query adds no flows for others: call query.add() there")
        core = self._running()
        core.plans.newest()  # refuses where nothing can be added
        number = core.next_request()
        core.people.book.flow(number, begin_addition(what, target, add))
        return number

    def _look(self, request: AnyRequest, now: float) -> Any:
        try:
            match request:
                case GetStatus():
                    return self._status(now)
                case GetPartitions():
                    return self._partitions(request)
                case GetHistory():
                    return self._history(request.stage)
                case GetPlanStatus():
                    return plan_versions(self._core.plan, self._core.plans)
                case Follow():
                    return self._followed(request.request)
                case GetMetrics():
                    self._observe()
                    return MetricsText(text=self._metrics.text())
                case GetOutput():
                    return output_place(self._core.plan, self._about.name, self.reach, request.stage)
                case Suggest():
                    policy = request.policy or self._core.plan.settings.balance_policy
                    suggestion = self._running().suggest(policy, now)
                    moves = [self._move(move) for move in suggestion.moves]
                    return Suggested(policy=policy, moves=moves, notes=suggestion.notes)
        except FluxError:
            raise
        except Exception as error:
            # A question changes nothing in the query, so a defect here must not end a query that runs well.
            log.exception("a request could not be answered: %r", request)
            return Refusal(kind="failed", reason=described(error))
        raise AssertionError(request)

    def _running(self) -> Core:
        if self._core.phase != "running":
            raise UsageError(f"the query is {self._core.phase}: its replicas can be changed only while it is running")
        return self._core

    # ---- status

    def _status(self, now: float) -> Status:
        core, about = self._core, self._about
        report = self._report() or {}
        backlog, available = report.get("backlog", {}), report.get("availability", {})
        return Status(
            id=about.id,
            name=about.name,
            application=about.application,
            pid=about.pid,
            phase=str(core.phase),
            error=None if core.error is None else str(core.error),
            started=about.started,
            uptime_s=about.uptime_s(now),
            epoch=-1 if core.table is None else core.table.epoch,
            rows_in=report.get("totalInputRows", 0),
            rows_per_s=report.get("inputRowsPerSecond", 0.0),
            backlog_slices=backlog.get("slices", 0),
            backlog_bytes=backlog.get("bytes", 0),
            take_overs=core.repairs.take_overs,
            repairs=core.repairs.done,
            moves=self._metrics.happened("move"),
            stall_ms_max=self._metrics.stall_ms_max,
            metrics=about.metrics,
            stages=self._stages(report),
            workers=self._workers(report),
            moves_pending=self._pending(),
            repairs_under_way=[
                RepairStatus(
                    stage=self._name(a.stage), partition=a.partition, worker=a.worker, phase=str(a.phase), why=a.why
                )
                for a in core.repairs.under_way.values()
                if a.from_worker is None
            ],
            missing_slots=core.driver.missing_slots(),
            balancing=core.rounds.on,
            evening_out=core.rounds.evening_out,
            copies_on=report.get("copiesOn", ""),
            requests=[_stands(asked) for asked in core.open_requests()],
            plan=core.plan.version,
            plan_changes=core.plans.in_words(),
            failed=failed_stages(core.plans),
            checkpoint=_kept(report.get("checkpoint")),
            missing=available.get("message", ""),
            links=_links(report),
            incomplete=incomplete(report.get("stages", ())),
            tentative=available.get("stages", []),
            source_lags={s["name"]: s["lag"]["records"] for s in report.get("sources", ()) if "lag" in s},
            lag_units={s["name"]: s["lag"]["unit"] for s in report.get("sources", ()) if "unit" in s.get("lag", ())},
            late_rows={s["name"]: s["eventTime"]["lateRows"] for s in report.get("sources", ()) if "eventTime" in s},
            bad_records={s["name"]: s["badRecords"] for s in report.get("sources", ()) if "badRecords" in s},
            not_read={s["name"]: s["notRead"] for s in report.get("sources", ()) if "notRead" in s},
            unread_files={
                s["name"]: {kind: UnreadFiles(**files) for kind, files in s["unreadFiles"].items()}
                for s in report.get("sources", ())
                if "unreadFiles" in s
            },
        )

    def _stages(self, report: dict[str, Any]) -> list[StageStatus]:
        core = self._core
        counted = {entry["name"]: entry for entry in report.get("stages", ())}  # it may be older than the plan
        rows = []
        for plan, level in zip(core.wished.stages, core.levels(), strict=True):
            stats = counted.get(plan.name, {})
            p50, p99 = stats.get("latencyMs") or (None, None)
            rows.append(
                StageStatus(
                    name=plan.name,
                    partitions=plan.partitions,
                    finished=stats.get("finished", 0),
                    replicas=level.wanted,
                    safe=level.safe,
                    short=level.short,
                    rows_in=stats.get("rowsIn", 0),
                    rows_out=stats.get("rowsOut", 0),
                    rows_per_s=stats.get("rowsPerSecond", 0.0),
                    queued=stats.get("queued", 0),
                    p50_ms=p50,
                    p99_ms=p99,
                    sink=stats.get("sink", ""),
                    sink_bytes=stats.get("sinkBytes", 0),
                    wait_for_sink=stats.get("waitForSink", 0),
                    recovery=plan.recovery,
                    checkpoint_bytes=stats.get("checkpointBytes", 0),
                    checkpoint_behind_s=stats.get("checkpointBehindSeconds", 0.0),
                    replay_s=stats.get("replaySeconds", 0.0),
                    active=level.active,
                    standbys=level.standbys,
                    kept_bytes=stats.get("keptBytes", 0),
                    loss_s=stats.get("lossSeconds"),
                    **_event_time(stats),
                )
            )
        return rows

    def _workers(self, report: dict[str, Any]) -> list[WorkerStatus]:
        table = self._core.load_table()
        busy = {} if table is None else table.of_workers()
        primaries, replicas = ({}, {}) if table is None else table.columns.placed()
        rates = {worker["id"]: worker["rowsPerSecond"] for worker in report.get("workers", ())}
        rows = []
        for _, member in sorted(self._core.members.workers.items()):
            stats, load = member.stats, table.workers.get(member.node) if table else None
            rows.append(
                WorkerStatus(
                    worker=member.node,
                    slot=member.about.index,
                    host=member.about.host,
                    pid=member.about.pid,
                    executor=member.about.executor,
                    primaries=primaries.get(member.node, 0),
                    replicas=replicas.get(member.node, 0),
                    rows_in=int(stats.get("rows_in", 0)),
                    rows_per_s=rates.get(member.node, 0.0),
                    queued=int(stats.get("queued", 0)),
                    load=round(busy.get(member.node, 0.0), 4),
                    cpu=round(load.cpu, 4) if load else 0.0,
                    rss_bytes=int(stats.get("rss_bytes", 0)),
                    log_bytes=int(stats.get("log_bytes", 0)),
                    leaving=bool(load and load.leaving),
                )
            )
        return rows

    def _pending(self) -> list[MoveStatus]:
        """List the controller's moves, with the phase that the addition of each has reached."""
        rows = []
        for move in self._core.moves_pending():
            addition = self._core.repairs.under_way.get(move.key)
            begun = addition is not None and addition.worker == move.target
            rows.append(self._move(move, str(addition.phase) if begun and addition is not None else "waiting"))
        return rows

    def _followed(self, number: int) -> Followed:
        core = self._core
        asked = core.request(number)
        moves = [
            Carried(move=self._move(job.move, str(job.phase)), done=job.phase == MovePhase.DONE, event=job.ended)
            for job in asked.jobs
        ]
        error = None if core.error is None else str(core.error)
        return Followed(asked=_stands(asked), moves=moves, phase=str(core.phase), error=error)

    # ---- partitions

    def _partitions(self, request: GetPartitions) -> Partitions:
        wanted = None if request.stage is None else self._stage(request.stage)
        loads = self._core.load_table()
        if loads is None:
            return Partitions(replicas=[], seconds=0.0)
        if request.heaviest is not None:
            found, following = loads.heaviest(wanted, request.heaviest), None
        else:
            first, end = loads.columns.rows_of(wanted)
            first = min(first + request.first, end)
            page = min(first + PAGE, end)
            found, following = loads.replicas(first, page), request.first + PAGE if page < end else None
        behind: dict[int, dict[PartitionKey, float]] = {}
        return Partitions(
            replicas=[self._replica(load, behind) for load in found],
            seconds=loads.seconds,
            following=following,
            total=loads.columns.replicas_of(wanted),
        )

    def _replica(self, load: ReplicaLoad, behind: dict[int, dict[PartitionKey, float]]) -> ReplicaStatus:
        """Describe one replica. ``behind`` caches the lags of checkpoints by worker, from replica to replica."""
        repairs, table = self._core.repairs, self._core.table
        assert table is not None
        replicas = table.replicas(load.stage, load.partition)
        replica = next(replica for replica in replicas if replica.worker == load.worker)
        lag = repairs.safety.lags.beyond(Life(load.stage, load.partition, replica.worker, replica.incarnation))
        heir = repairs.safety.is_safe(load.stage, load.partition, replica)
        return ReplicaStatus(
            stage=self._name(load.stage),
            partition=load.partition,
            worker=load.worker,
            role="primary" if load.primary else kind_of(replica).role if replica.live else "new",
            safe=heir and lag is None,
            load=round(load.busy, 4),
            queued=load.queued,
            state_bytes=load.state_bytes,
            rows_per_s=round(load.rows_per_s, 1),
            movable=load.movable,
            behind=lag.steps if heir and lag is not None else 0,
            kind=replica.kind,
            checkpoint_behind_s=self._behind(load, behind) if keeps_checkpoints(kind_of(replica)) else None,
        )

    def _behind(self, load: ReplicaLoad, known: dict[int, dict[PartitionKey, float]]) -> float | None:
        """Return the seconds by which the newest checkpoint of a standby is behind, by the last report of its worker; None:
        there is no report of it yet."""
        if load.worker not in known:
            member = self._core.members.workers.get(load.worker)
            reports = member.stats.get("stages", ()) if member is not None else ()
            known[load.worker] = {
                PartitionKey(report.get("stage", -1), partition): behind_s
                for report in reports
                for partition, _, behind_s in report.get("checkpoints", ())
            }
        return known[load.worker].get(PartitionKey(load.stage, load.partition))

    # ---- history

    def _history(self, stage: str | None) -> History:
        if stage is not None:
            self._stage(stage)
        kept = self._core.repairs.history
        events = [event for event in kept if stage in (None, event.stage)]
        return History(events=events, kept=kept.maxlen or len(kept))

    # ---- moves and names

    def _move(self, move: Move, phase: str = "waiting") -> MoveStatus:
        return MoveStatus(
            stage=self._name(move.stage),
            partition=move.partition,
            source=move.from_worker,
            target=move.target,
            gain=round(move.gain, 4),
            cost=move.cost,
            phase=phase,
        )

    def _meant(self, wanted: WantedMove, loads: LoadTable) -> Move:
        """Turn a wanted move into a move, with the number of its stage instead of the name. Without a source, the primary's
        worker is the source."""
        stage = self._stage(wanted.stage)
        table = self._core.table
        assert table is not None
        rows = table.stages[stage]
        if wanted.partition >= len(rows):
            raise UsageError(
                f"stage {wanted.stage} has the partitions 0 to {len(rows) - 1}, there is no {wanted.partition}"
            )
        source = rows[wanted.partition][0].worker if wanted.source is None else wanted.source
        row = loads.columns.row(PartitionKey(stage, wanted.partition))
        held = loads.replicas(row, row + 1)
        cost = next((load.state_bytes for load in held if load.worker == source), 0)
        return Move(stage, wanted.partition, source, wanted.target, cost=cost)

    def _name(self, stage: int) -> str:
        return self._core.plan.stages[stage].name

    def _stage(self, name: str) -> int:
        for stage in self._core.plan.stages:
            if stage.name == name:
                return stage.id
        known = ", ".join(stage.name for stage in self._core.plan.stages)
        raise UsageError(f"there is no stage {name}; there are {known}")


def _kept(report: dict[str, Any] | None) -> KeptStatus | None:
    if report is None:
        return None
    return KeptStatus(bytes=report["bytes"], behind_s=report["behindSeconds"], replay_s=report["replaySeconds"])


def _event_time(stats: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a stage's status about its event time."""
    told = stats.get("eventTime", {})
    return {
        "watermark": told.get("watermark"),
        "watermark_lag_s": told.get("lagSeconds"),
        "held_back_by": told.get("heldBackBy", ""),
        "rows_behind_watermark": told.get("rowsBehindWatermark", 0),
    }


def _stands(asked: Asked) -> RequestStatus:
    standing = asked.standing
    return RequestStatus(
        request=asked.number,
        what=asked.what,
        state=str(standing.state),
        why=standing.why,
        left=standing.left,
        done=standing.done,
        total=standing.total,
    )


def _links(report: dict[str, Any]) -> list[str]:
    """Put the links between workers in a progress report into words."""
    return [
        *map(told, report.get("links", ())),
        *map(lent, report.get("loans", ())),
        *map(relayed, report.get("relays", ())),
        *told_feeds(report.get("feeds", ())),
    ]
