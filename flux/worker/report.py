"""Figures that a worker reports with its heartbeats.

``StageTurns`` shares the figures of many stages among heartbeats. ``DrainCounter`` counts how often the logs of the worker have
been emptied. ``StepAges`` has the percentiles of a stage's latency.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

import numpy as np

from flux.dataflow.plan import FromSource, StagePlan
from flux.dataflow.source_reader import SILENCE_TOLD_S
from flux.reach.loans import LentStream
from flux.replica.kinds import keeps_checkpoints
from flux.replica.replica import Replica
from flux.state.standby import Standby
from flux.wire.statistics import (
    TOLD_SHARE,
    BadRecords,
    Detour,
    FeedRows,
    Forfeited,
    KeptCheckpoint,
    Lag,
    LentRows,
    Load,
    LostRows,
    PartitionRead,
    Pauses,
    PrimaryRows,
    RelayedLink,
    ReplicaWork,
    SilentStream,
    SourceLag,
    StageStatistics,
    Statistics,
    Unapplied,
    lag_share,
)
from partitioning.ids import DISK

if TYPE_CHECKING:
    from flux.worker.core import WorkerCore
    from flux.worker.source_scheduler import OpenReader, SourceScheduler

#: The longest reason of silence that travels, in characters: that of an error may have a long path.
REASON_CHARS_MAX = 300
#: Stages with figures in one heartbeat, at most. The figures of 300 stages keep a worker busy for several milliseconds, ten times
#: a second, and the controller as long for each worker.
STAGES_TOLD = 32


class StageTurns:
    """The turns of the stages of one worker: the figures of the next ``STAGES_TOLD`` stages are in the next heartbeat (design:
    stages-in-turn)."""

    def __init__(self) -> None:
        #: The last stage whose turn has been.
        self._last = -1

    def next(self, stages: Collection[StagePlan]) -> Collection[StagePlan]:
        """Return the stages whose turn it is, of all stages by ascending ids."""
        if len(stages) <= STAGES_TOLD:
            return stages
        later = [stage for stage in stages if stage.id > self._last]
        told = [*later, *stages][:STAGES_TOLD]
        self._last = told[-1].id
        return told


def stats(core: WorkerCore, told: Iterable[StagePlan] | None = None) -> Statistics:
    """Return counts since the start, and the work that is pending now. ``told``: the stages to tell of; None: all."""
    return {
        "rows_in": core.rows_in,
        "source_rows": sum(source.rows for source in core.sources.values()),
        "sources": [
            PartitionRead(*key, streams.first, streams.elements, streams.rows)
            for key, streams in core.sources.items()
            if streams.first is not None
        ],
        "pauses": [Pauses(*key, streams.pauses, streams.ended) for key, streams in core.sources.items()],
        **of_readers(core),
        "not_compared": core.reading.not_compared(),
        "lost_rows": lost_rows(core),
        "times": core.reading.times(),
        **_of_shadows(core),
        "silent": silent(core.reading),
        "detours": detours(core),
        "lent": lent(core),
        **({"relays": relays} if (relays := relayed(core)) else {}),
        **({"feeds": feeds(core)} if core.subscriptions.feeds.counts else {}),
        "state_full": core.watermarks.limit.stops,
        "drained": core.drained.look([*(producer.log for producer in core.producers.values()), *core.leaving.exits()]),
        "behind": behind(core),
        "unapplied": unapplied(core),
        "log_bytes": core.log_meter.bytes,
        "peak_log_bytes": core.log_meter.peak,
        "held_bytes": core.subscriptions.held_bytes,
        "queued": sum(len(replica.waits) for replica in core.replicas.values()),
        "first_row_at": core.reading.first_row_at,
        "finished_at": core.leaving.finished_at,
        "counters": asdict(core.counters),
        "stages": _of_stages(core, core.plan.stages if told is None else told),
        "written_bytes": core.written[0],
        "order_bytes": core.written[1],
        "order_slices": core.written[2],
    }


def of_readers(core: WorkerCore) -> Statistics:
    """Return the counts that readers keep, which are the user's code. An error is one of the stages that read the source (design:
    stage-fails), and the others are asked all the same."""
    lags: list[SourceLag] = []
    bad: list[BadRecords] = []
    for key in list(core.reading.open):
        with core.failures.of_readers(core.plan, core.reading):
            lags += core.reading.lag(key)
            bad += core.reading.bad_records(key)
    return {"lags": lags, "bad_records": bad}


def _of_shadows(core: WorkerCore) -> Statistics:
    """Return the figures of shadows; empty: no stage has any."""
    if not core.shadows:
        return {}
    return {"tentative": list(core.shadows.reports(core.leaving.shown)), "ended_shadows": list(core.shadows.ended())}


def detours(core: WorkerCore) -> list[Detour]:
    """List the workers from which nothing came, each with the one that is read instead (design: owed-rows)."""
    found: dict[tuple[int, int], list[float]] = {}
    for (source, instead), since in core.subscriptions.owed.detours(core.subscriptions.streams):
        found.setdefault((source, instead), []).append(since)
    return [Detour(*way, round(min(times) + core.wall_ahead, 3), len(times)) for way, times in found.items()]


def lent(core: WorkerCore) -> list[LentRows]:
    """List the workers whose secondaries have lent rows to primaries here lately (design: borrowed-rows)."""
    found: dict[int, list[LentStream]] = {}
    for stream in core.subscriptions.borrower.lent:
        found.setdefault(stream.lender, []).append(stream)
    return [
        LentRows(
            lender, round(min(stream.since for stream in streams) + core.wall_ahead, 3), len(streams),
            sum(stream.slices for stream in streams),
        )
        for lender, streams in found.items()
    ]  # fmt: skip


def relayed(core: WorkerCore) -> list[RelayedLink]:
    """List the workers whose answers come over others (design: relayed-answers)."""
    return [RelayedLink(to, over, round(since + core.wall_ahead, 3)) for to, over, since in core.relays.links()]


def feeds(core: WorkerCore) -> list[FeedRows]:
    """List the workers that are read over feeds of which a stream may have several (design: feeds)."""
    return [
        FeedRows(source, counts.firsts, counts.repeated_bytes, counts.opened, counts.won)
        for source, counts in sorted(core.subscriptions.feeds.counts.items())
        if source >= 0
    ]


def silent(reading: SourceScheduler) -> list[SilentStream]:
    """List the partitions read here that results go on without, and that do not answer (design: silent-inputs)."""
    found = []
    for key, source in reading.open.items():
        if not reading.about(key).may_be_silent or reading.sources[key].ended:
            continue
        since, reason = _asked_in_vain_since(source)
        if since is not None and reading.looked_at >= since + SILENCE_TOLD_S:
            at = reading.looked_at_wall - (reading.looked_at - since)
            found.append(SilentStream(*key, round(at, 3), reason[:REASON_CHARS_MAX]))
    return found


def _asked_in_vain_since(source: OpenReader) -> tuple[float | None, str]:
    """Return the time since which a reader has been asked without an answer, None if there is no such time, and the reason.

    A reader that does not tell by itself has answered when its count of pauses rose. It counts as silent only up to the time at
    which it was asked last: a reader whose log is full is not asked."""
    reader = source.reader
    if (since := reader._asked_in_vain_since()) is not None:
        return since, reader._silence
    if source.silent_at is not None:
        return source.silent_at, "it has said that it gets no answer" if not reader._tells_silence else reader._silence
    if reader._tells_silence or source.quiet is None:
        return None, ""
    since = max(source.paused_at, source.quiet[0])
    return (since, reader._silence) if source.asked_at >= since + SILENCE_TOLD_S else (None, "")


def lost_rows(core: WorkerCore) -> list[LostRows]:
    """Return the rows of sources that primaries here have passed over because they are gone (design: rows-that-are-gone)."""
    found: dict[tuple[int, int], int] = {}
    for replica in core.replicas.values():
        for stream, rows in replica.lost.items():
            edge = core.plan.edges[stream.edge]
            if isinstance(edge, FromSource):
                found[edge.source, stream.producer] = found.get((edge.source, stream.producer), 0) + rows
    return [LostRows(*key, rows) for key, rows in found.items()]


def behind(core: WorkerCore) -> list[Lag]:
    """List live replicas that lag their primaries here (design: behind). A step is assumed to take its average time here.

    A replica that has received the whole order, and has committed steps to apply, is held up by no other replica. The exception
    is a primary here whose own logs are full: the replica may then wait for the same consumers. A replica that has applied
    nothing since the last report is listed even if it lacks few steps: producers keep their rows for it, and stand still with it
    when their logs are full."""
    settings, found = core.plan.settings, []
    for key, replica in core.replicas.items():
        for worker, peer in replica.order.peers.items():
            steps = replica.applied - peer.applied  # without steps that the primary itself has still to apply
            if not peer.live or not peer.greeted or not peer.kind.applies or replica.orders_itself or steps <= 0:
                continue
            seconds = steps * replica.step_s
            share = lag_share(steps, seconds, settings)
            stands, peer.applied_as_told = peer.applied == peer.applied_as_told, peer.applied
            if share > TOLD_SHARE or replica.held_back or stands:
                acked, committed = peer.acked or 0, replica.order.committed
                its_turn = acked >= replica.order.end and committed > peer.applied and not replica.output.room.full
                found.append(Lag(*key, worker, peer.incarnation, steps, round(seconds, 3), peer.applied, its_turn))
    return found


def unapplied(core: WorkerCore) -> list[Unapplied]:
    """List secondaries here that have received many steps that they have still to apply: stage, partition, incarnation. The
    report of their primary counts for more, but a silent primary reports nothing."""
    settings = core.plan.settings
    found = []
    for key, replica in core.replicas.items():
        steps = 0 if replica.primary else replica.order.end - replica.applied
        if lag_share(steps, steps * replica.step_s, settings) > TOLD_SHARE:
            found.append(Unapplied(*key, replica.incarnation))
    return found


def load(core: WorkerCore, now: float) -> Load:
    """Return the figures for the balance of load, which not every heartbeat carries: counts of each replica since it came to
    life, and its pending work."""
    return {
        "at": now,
        "replicas": [
            ReplicaWork(
                *key, replica.incarnation, round(replica.busy_s, 6), replica.rows_in, replica.slices,
                len(replica.waits), replica.state_bytes,
            )
            for key, replica in core.replicas.items()
        ] + [
            # Steps that a standby would have to repeat count as pending.
            ReplicaWork(*key, kept.incarnation, 0.0, 0, 0, len(kept.order), kept.checkpoint.nbytes)
            for key, kept in core.followers.items() if isinstance(kept, Standby)
        ],
    }  # fmt: skip


def _of_stages(core: WorkerCore, told: Iterable[StagePlan]) -> list[StageStatistics]:
    found: list[StageStatistics] = []
    logged = dict.fromkeys((stage.id for stage in core.plan.stages), 0)  # bytes of the rows that each stage consumes
    for stream, producer in core.producers.items():
        logged[core.plan.edges[stream.edge].consumer] += producer.log.bytes
    replicas: dict[int, dict[int, Replica]] = {}
    for (of, partition), replica in core.replicas.items():
        replicas.setdefault(of, {})[partition] = replica
    standbys: dict[int, list[Standby]] = {}
    for (of, _), follower in core.followers.items():
        if isinstance(follower, Standby):
            standbys.setdefault(of, []).append(follower)
    for stage in told:
        mine, kept = replicas.get(stage.id, {}), standbys.get(stage.id, [])
        exits = [replica.output.exit for replica in mine.values() if replica.output.exit is not None and replica.leads]
        found.append(
            {
                "stage": stage.id,
                "primaries": [
                    PrimaryRows(partition, replica.rows_in, replica.output.rows, int(replica.finished))
                    for partition, replica in mine.items()
                    if replica.leads
                ],
                "queued": sum(len(replica.waits) for replica in mine.values()),
                "busy_s": round(sum(replica.busy_s for replica in mine.values()), 6),
                "latency_ms": core.latencies[stage.id].percentiles_ms(),
                "sink_bytes": sum(out.bytes for out in exits),
                "sink_full": sum(not out.has_room for out in exits),
                "standbys": len(kept),
                "checkpoint_bytes": sum(standby.checkpoint.nbytes for standby in kept),
                "checkpoint_behind_s": round(max((standby.behind_s for standby in kept), default=0.0), 3),
                "checkpoints": [
                    KeptCheckpoint(standby.key.partition, standby.checkpoint.nbytes, round(standby.behind_s, 3))
                    for standby in kept
                ],
                "replay_s": round(max((_replay_s(replica, False) for replica in mine.values()), default=0.0), 3),
                "vault_replay_s": round(max((_replay_s(replica, True) for replica in mine.values()), default=0.0), 3),
                "kept_bytes": logged[stage.id],
                "times": core.watermarks.times(stage.id),
                "forfeits": [
                    Forfeited(partition, *replica.forfeits.spans[-1], replica.forfeits.rows)
                    for partition, replica in mine.items()
                    if replica.primary and replica.forfeits.spans
                ],
            }
        )
    return found


def _replay_s(replica: Replica, on_disk: bool) -> float:
    """Estimate the seconds that a take-over would repeat if the primary here were lost: by the standby that is farthest behind,
    or by the vault."""
    peers = [peer for peer in replica.order.peers.values() if peer.live and keeps_checkpoints(peer.kind)]
    steps = max((replica.applied - peer.applied for peer in peers if (peer.kind.name == DISK) == on_disk), default=0)
    return max(steps, 0) * replica.step_s


class StepAges:
    """The ages of the rows of a stage's last steps. Percentiles are found anew when one age in ``NEW`` is new: those of 4,096
    ages take a fifth of a millisecond, for each stage of each heartbeat."""

    #: The most ages that count.
    COUNT_MAX = 4096
    NEW = 8

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=self.COUNT_MAX)
        #: Ages since the percentiles were found.
        self._new = 0
        self._found: list[float] | None = None

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._new += 1

    def __len__(self) -> int:
        return len(self._seconds)

    def percentiles_ms(self) -> list[float] | None:
        """Return median and 99th percentile, by nearest rank; None before the first step."""
        count = len(self._seconds)
        if self._new and self._new * self.NEW >= count:
            ranks = [math.ceil(share * count) - 1 for share in (0.5, 0.99)]
            ordered = np.partition(np.fromiter(self._seconds, float, count), ranks)
            self._new, self._found = 0, [round(float(ordered[rank]) * 1e3, 3) for rank in ranks]
        return self._found


class DrainableLog(Protocol):
    """A log, or the kept output for a sink: numbers from ``base`` to ``end``."""

    @property
    def base(self) -> int: ...
    @property
    def end(self) -> int: ...
    def __len__(self) -> int: ...


class DrainCounter:
    """A count of the times at which everything has left a worker's logs that was in them at one moment.

    Rows leave the log of a stream when every replica of their consumer has applied them. Once the count of a worker has grown by
    two since some moment, its logs have nothing left of their content at that moment; one is not enough, because the first of the
    two may have been marked before. To know that rows are through, ``controller.operate.all_available`` asks all workers for this
    count, once for each stage on the way. Logs are looked at with each heartbeat; nothing is done on the data path."""

    def __init__(self) -> None:
        self.times = 0
        #: Logs that have to be emptied up to a sequence number.
        self._marks: dict[int, tuple[DrainableLog, int]] = {}

    def look(self, logs: Iterable[DrainableLog]) -> int:
        """Return the count. ``logs``: all present logs. The content of a log that is gone is no longer this worker's to hand
        on."""
        mine = {id(log): log for log in logs}
        self._marks = {key: (log, end) for key, (log, end) in self._marks.items() if key in mine and log.base < end}
        if not self._marks:
            self.times += 1
            self._marks = {key: (log, log.end) for key, log in mine.items() if len(log)}
        return self.times
