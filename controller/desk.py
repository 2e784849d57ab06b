"""Where people's requests are answered from the controller's state (DESIGN 8). No I/O: frames in, a frame and orders out.

The desk decides nothing about replicas: it reads, and hands what is to be done to the controller, which may refuse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from controller.load import Loads, Move, ReplicaLoad, Suggestion
from controller.membership import Membership
from controller.metrics import Metrics
from controller.repairs import Repairs
from controller.replication import levels
from controller.requests import (
    Accepted,
    AnyRequest,
    DrainWorker,
    FailWorker,
    GetHistory,
    GetMetrics,
    GetPartitions,
    GetStatus,
    History,
    MetricsText,
    MoveStatus,
    Partitions,
    Refused,
    RepairStatus,
    ReplicaStatus,
    SetWorkers,
    StageStatus,
    StartMoves,
    Status,
    Suggest,
    Suggested,
    WantedMove,
    WorkerStatus,
    decode_request,
)
from controller.rounds import Rounds
from controller.state import Tell
from flux.codec import encode
from flux.errors import FluxError, ProtocolError, UsageError
from flux.plan import Plan
from partitioning.table import ReplicaAt, Table

log = logging.getLogger("flux")


class Core(Protocol):
    """What the desk asks of ``controller.state.Controller``."""

    plan: Plan
    phase: str
    error: FluxError | None
    table: Table | None
    members: Membership
    repairs: Repairs
    rounds: Rounds

    def loads(self) -> Loads: ...
    def suggest(self, policy: str, now: float) -> Suggestion: ...
    def move(self, moves: list[Move], why: str, now: float) -> list[Tell]: ...
    def drain(self, worker: int, now: float) -> list[Tell]: ...
    def fail(self, worker: int, now: float) -> list[Tell]: ...
    def scale(self, workers: int, now: float) -> list[Tell]: ...
    def moves_pending(self) -> list[Move]: ...
    def missing_slots(self) -> list[int]: ...


@dataclass(frozen=True)
class About:
    """Who the query is; ``metrics``: address at which its metrics are served. It ``started`` at this time of the wall
    clock, and ``began`` at this one of the controller's; None: the same."""

    id: str
    name: str | None
    application: str
    pid: int
    started: float
    metrics: str = ""
    began: float | None = None

    def uptime_s(self, now: float) -> float:
        return round(max(now - (self.started if self.began is None else self.began), 0.0), 3)


class Desk:
    """``report``: the newest progress report, None before the first. ``observe`` renews ``metrics`` from the state."""

    def __init__(
        self,
        core: Core,
        about: About,
        report: Callable[[], dict[str, Any] | None],
        metrics: Metrics,
        observe: Callable[[], None],
    ) -> None:
        self.refused = 0
        self._core = core
        self._about = about
        self._report = report
        self._metrics = metrics
        self._observe = observe

    def handle(self, frames: Sequence[Any], now: float) -> tuple[bytes, list[Tell]]:
        """The answer to a request of somebody who has proved the operators' secret, and the orders that it leads to."""
        try:
            request = decode_request(frames)
        except ProtocolError as error:
            self.refused += 1
            return encode(Refused(kind="request", reason=str(error))), []
        answer, effects = self.answer(request, now)
        return encode(msgspec.structs.replace(answer, number=request.number)), effects

    def answer(self, request: AnyRequest, now: float) -> tuple[Any, list[Tell]]:
        """The same without frames, for somebody who need not prove anything."""
        try:
            match request:
                case StartMoves():
                    moves = [self._meant(wanted) for wanted in request.moves]
                    effects = self._running().move(moves, request.why, now)
                    return Accepted(moves=[self._move(move) for move in moves]), effects
                case DrainWorker():
                    return Accepted(), self._running().drain(request.worker, now)
                case FailWorker():
                    return Accepted(), self._running().fail(request.worker, now)
                case SetWorkers():
                    return Accepted(), self._running().scale(request.workers, now)
            return self._look(request, now), []
        except UsageError as error:
            return Refused(kind="usage", reason=str(error)), []
        except FluxError as error:
            return Refused(kind="failed", reason=str(error)), []

    def _look(self, request: AnyRequest, now: float) -> Any:
        try:
            match request:
                case GetStatus():
                    return self._status(now)
                case GetPartitions():
                    return self._partitions(request.stage)
                case GetHistory():
                    return self._history(request.stage)
                case GetMetrics():
                    self._observe()
                    return MetricsText(text=self._metrics.text())
                case Suggest():
                    policy = request.policy or self._core.plan.settings.balance_policy
                    suggestion = self._running().suggest(policy, now)
                    moves = [self._move(move) for move in suggestion.moves]
                    return Suggested(policy=policy, moves=moves, notes=suggestion.notes)
        except FluxError:
            raise
        except Exception as error:
            # Looking changes nothing, so a mistake in it must not end a query that runs well.
            log.exception("a request could not be answered: %r", request)
            return Refused(kind="failed", reason=f"{type(error).__name__}: {error}")
        raise AssertionError(request)

    def _running(self) -> Core:
        if self._core.phase != "running":
            raise UsageError(f"the query is {self._core.phase}: its replicas can be changed only while it is running")
        return self._core

    # ---- status

    def _status(self, now: float) -> Status:
        core, about = self._core, self._about
        report = self._report() or {}
        backlog = report.get("backlog", {})
        return Status(
            id=about.id,
            name=about.name,
            application=about.application,
            pid=about.pid,
            phase=core.phase,
            error=None if core.error is None else str(core.error),
            started=about.started,
            uptime_s=about.uptime_s(now),
            epoch=-1 if core.table is None else core.table.epoch,
            rows_in=report.get("totalInputRows", 0),
            rows_per_s=report.get("processedRowsPerSecond", 0.0),
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
                    stage=self._name(a.stage), partition=a.partition, worker=a.worker, phase=a.phase, why=a.why
                )
                for a in core.repairs.under_way.values()
                if getattr(a, "source", None) is None
            ],
            missing_slots=core.missing_slots(),
            balancing=core.rounds.on,
            evening_out=core.rounds.evening_out,
            copies_on=report.get("copiesOn", ""),
        )

    def _stages(self, report: dict[str, Any]) -> list[StageStatus]:
        core = self._core
        counted = report.get("stages") or [{}] * len(core.plan.stages)
        rows = []
        for plan, level, stats in zip(
            core.plan.stages, levels(core.plan, core.table, core.repairs.keeps_up), counted, strict=True
        ):
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
                )
            )
        return rows

    def _workers(self, report: dict[str, Any]) -> list[WorkerStatus]:
        loads = self._core.loads()
        busy = loads.of_workers()
        rates = {worker["id"]: worker["rowsPerSecond"] for worker in report.get("workers", ())}
        rows = []
        for _, member in sorted(self._core.members.workers.items()):
            stats, load = member.stats, loads.workers.get(member.node)
            mine = [primary for worker, primary in self._placed() if worker == member.node]
            rows.append(
                WorkerStatus(
                    worker=member.node,
                    slot=member.about.index,
                    host=member.about.host,
                    pid=member.about.pid,
                    executor=member.about.executor,
                    primaries=sum(mine),
                    replicas=len(mine),
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

    def _placed(self) -> list[tuple[int, bool]]:
        """Worker of every replica, and whether it is a primary."""
        if self._core.table is None:
            return []
        return [
            (replica.worker, number == 0)
            for partitions in self._core.table.stages
            for replicas in partitions
            for number, replica in enumerate(replicas)
        ]

    def _pending(self) -> list[MoveStatus]:
        """The controller's list of moves, with the phase that the addition of each has reached."""
        rows = []
        for move in self._core.moves_pending():
            addition = self._core.repairs.under_way.get((move.stage, move.partition))
            begun = addition is not None and addition.worker == move.target
            rows.append(self._move(move, addition.phase if begun and addition is not None else "waiting"))
        return rows

    # ---- partitions

    def _partitions(self, stage: str | None) -> Partitions:
        core = self._core
        wanted = None if stage is None else self._stage(stage)
        loads = core.loads()
        known = {(load.stage, load.partition, load.worker): load for load in loads.replicas}
        rows = []
        for number, partitions in enumerate(core.table.stages if core.table else ()):
            if wanted is None or number == wanted:
                for partition, replicas in enumerate(partitions):
                    for place, replica in enumerate(replicas):
                        load = known.get((number, partition, replica.worker))
                        rows.append(self._replica(number, partition, place, replica, load))
        return Partitions(replicas=rows, seconds=loads.seconds)

    def _replica(
        self, stage: int, partition: int, place: int, replica: ReplicaAt, load: ReplicaLoad | None
    ) -> ReplicaStatus:
        load = load or ReplicaLoad(stage, partition, replica.worker, movable=False)
        return ReplicaStatus(
            stage=self._name(stage),
            partition=partition,
            worker=replica.worker,
            role="primary" if place == 0 else "secondary" if replica.live else "new",
            safe=self._core.repairs.is_safe(stage, partition, replica),
            load=round(load.busy, 4),
            queued=load.queued,
            state_bytes=load.state_bytes,
            rows_per_s=round(load.rows_per_s, 1),
            movable=load.movable,
        )

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
            source=move.source,
            target=move.target,
            gain=round(move.gain, 4),
            cost=move.cost,
            phase=phase,
        )

    def _meant(self, wanted: WantedMove) -> Move:
        """A move by name as one by number; where no source is given, it is the primary's worker."""
        stage = self._stage(wanted.stage)
        table = self._running().table
        assert table is not None
        rows = table.stages[stage]
        if wanted.partition >= len(rows):
            raise UsageError(
                f"stage {wanted.stage} has the partitions 0 to {len(rows) - 1}, there is no {wanted.partition}"
            )
        source = rows[wanted.partition][0].worker if wanted.source is None else wanted.source
        cost = next(
            (
                load.state_bytes
                for load in self._core.loads().replicas
                if (load.stage, load.partition, load.worker) == (stage, wanted.partition, source)
            ),
            0,
        )
        return Move(stage, wanted.partition, source, wanted.target, cost=cost)

    def _name(self, stage: int) -> str:
        return self._core.plan.stages[stage].name

    def _stage(self, name: str) -> int:
        for stage in self._core.plan.stages:
            if stage.name == name:
                return stage.id
        known = ", ".join(stage.name for stage in self._core.plan.stages)
        raise UsageError(f"there is no stage {name}; there are {known}")
