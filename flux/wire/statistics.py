"""Statistics that processes send with their heartbeats, by name and with bounds (design: bounded-decoding).

A heartbeat leaves out statistics without a value. Tuples travel as lists, with their fields in this order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypedDict

from flux.settings import Settings
from flux.windows.window import NEVER
from flux.wire.frames import Id, Natural, Reason, Sequence, Time

#: A worker reports a lag beyond this share of its bounds; one below it is reported only if the replica stands still. A replica
#: that was beyond the bounds has caught up once it is below this share.
TOLD_SHARE = 1 / 2


class PartitionRead(NamedTuple):
    """Progress of a worker that reads a partition of a source. Elements are batches, or rows of a source with numbered rows."""

    source: Id
    partition: Id
    #: The first element that this worker has read.
    first: Natural
    #: Elements read since.
    elements: Natural
    #: Rows in them.
    rows: Natural


class Pauses(NamedTuple):
    """Pauses of a partition of a source: how often it had no new row."""

    source: Id
    partition: Id
    pauses: Natural
    #: The partition has no more rows.
    ended: bool


class SourceLag(NamedTuple):
    """Distance of a reader from the newest record of its partition, as the reader says (``lag`` in ``flux.source``)."""

    source: Id
    partition: Id
    #: The number of the record that is read next.
    position: Natural
    #: Exclusive: one more than the number of the newest record.
    end: Natural


class BadRecords(NamedTuple):
    """Records of a partition of a source that did not fit their format, since this worker reads the partition."""

    source: Id
    partition: Id
    records: Natural


class NotCompared(NamedTuple):
    """Comparisons of a second reading with the first that were left out, because rows are gone, since this worker reads the
    partition."""

    source: Id
    partition: Id
    comparisons: Natural


class LostRows(NamedTuple):
    """Rows of a partition of a source that steps had to repeat and that are gone, passed over by primaries on this worker."""

    source: Id
    partition: Id
    rows: Natural


class ReaderState(IntEnum):
    """The state of the reader of a source with event time."""

    #: It may give rows.
    READING = 0
    #: It has had nothing for the time that ``withWatermark`` says.
    IDLE = 1
    #: It gets no answer from outside.
    SILENT = 2
    ENDED = 3
    #: It waits for others, because it is too far ahead of them.
    HELD = 4


class SourceTime(NamedTuple):
    """Event time of a partition of a source that this worker reads."""

    source: Id
    partition: Id
    #: The watermark behind the rows that were read; ``flux.NEVER``: none has come.
    watermark: Time
    #: Late rows until now, in all lives of the reader.
    late: Natural
    #: The time of the newest late row; ``flux.NEVER``: there is none in this life.
    late_time: Time
    #: Rows that were read in this life.
    rows: Natural
    state: ReaderState


class SilentStream(NamedTuple):
    """A partition of a source that results go on without (``availability``), and that does not answer."""

    source: Id
    partition: Id
    #: The time of the last answer, in seconds since the epoch.
    since: float
    #: As "its broker does not answer".
    reason: Reason


class Detour(NamedTuple):
    """Streams that a worker reads from another replica of their producer, because nothing came from the one before."""

    #: The worker from which nothing came.
    source: Id
    #: The worker from which they are read instead.
    instead: Id
    #: The time of the first change, in seconds since the epoch.
    since: float
    streams: Natural


class LentRows(NamedTuple):
    """Rows that primaries on a worker have got from their secondaries on another one, because their producer could not bring
    them."""

    #: The worker of the secondaries.
    lender: Id
    #: The time of the first of them, in seconds since the epoch.
    since: float
    streams: Natural
    #: The number of slices.
    slices: Natural


class RelayedLink(NamedTuple):
    """A worker whose answers do not come directly, but over another one."""

    to: Id
    over: Id
    #: The time of the first such answer, in seconds since the epoch.
    since: float


class FeedRows(NamedTuple):
    """Messages that a worker has got from the replicas of producers on one worker, of streams that may have several feeds."""

    #: The worker that was read.
    source: Id
    #: Messages that were first.
    firsts: Natural
    #: Bytes that had come over another feed, or over one that was closed meanwhile.
    repeated_bytes: Natural
    #: Second feeds that were opened from there, and races that a feed from there has won.
    opened: Natural
    won: Natural


def holds_back(time: SourceTime) -> bool:
    """Tell whether readers that are farther ahead wait for this one (design: alignment)."""
    return time.watermark > NEVER and time.state not in (ReaderState.IDLE, ReaderState.ENDED)


class StageTime(NamedTuple):
    """Event time of a primary on this worker."""

    partition: Natural
    #: The newest watermark in its order.
    watermark: Time
    #: Rows below the watermark of their step, which the stage has left out.
    behind: Natural
    #: Rows without a time, which it has left out.
    without_time: Natural
    #: The edge and the producer of the stream that holds the watermark back; -1: not looked for, or none does.
    edge: Id = -1
    producer: Id = -1


class TentativeState(IntEnum):
    """Whether the results of a partition are stable, by its shadow."""

    STABLE = 0
    #: An input is missing, and tentative results have been given.
    UP_FAILURE = 1
    #: All inputs move again, and tentative results are still to be corrected.
    STABILIZATION = 2


class TentativeReport(NamedTuple):
    """The shadow of a partition on this worker: told from its first tentative result on, and until its next failure with the last
    counts of this one."""

    stage: Id
    partition: Id
    state: TentativeState
    #: The time of its first tentative result in this failure, by the wall clock in seconds since 1970.
    since: float
    #: Ends of windows with tentative results that have no stable ones yet.
    windows: Natural
    #: Tentative rows that it has given in this failure.
    rows: Natural
    #: The part of ``rows`` for which another stable row, or none, has come.
    revised: Natural = 0


class EndedShadow(NamedTuple):
    """The shadow of a partition on this worker that has ended because of an error: there are no more tentative results."""

    stage: Id
    partition: Id
    #: By the wall clock, in seconds since 1970.
    at: float
    #: The error.
    reason: Reason


class Forfeited(NamedTuple):
    """Event time of which a primary on this worker has given results without some of its streams."""

    partition: Natural
    #: The newest span.
    start: Time
    through: Time
    #: Rows that came for any such time later, and were left out.
    rows: Natural


class Lag(NamedTuple):
    """Distance of a live replica from its primary, which reports it."""

    stage: Id
    partition: Id
    #: The worker with the replica.
    worker: Id
    #: That of the replica.
    incarnation: Sequence
    #: Steps that the primary has applied and the replica has not.
    steps: Natural
    #: Estimated time for these steps.
    seconds: float
    #: Steps that the replica has applied.
    applied: Natural
    #: Nothing but the replica itself keeps it from its next step.
    its_turn: bool


def lag_share(steps: int, seconds: float, settings: Settings) -> float:
    """Return a lag as a share of its bounds, ``spark.flux.replicas.maxStepsBehind`` and ``.maxReplay``; above 1 it is beyond one
    of them. One step is always on its way, because a replica's report of it travels with the next step: it does not count."""
    steps_share = steps / settings.replicas_max_steps_behind if steps > 1 else 0.0
    return max(steps_share, seconds / settings.replicas_max_replay)


class Unapplied(NamedTuple):
    """Report of a secondary on this worker that it has received many more steps than it has applied."""

    stage: Id
    partition: Id
    incarnation: Sequence


class PrimaryRows(NamedTuple):
    """Rows of a primary on this worker. The counts travel with its state."""

    partition: Natural
    rows_in: Natural
    rows_out: Natural
    #: 1 when the primary has reached its end, else 0.
    finished: Natural


class KeptCheckpoint(NamedTuple):
    """The newest checkpoint of a standby on this worker."""

    partition: Natural
    #: In bytes.
    size: Natural
    #: Time from the last step of the checkpoint to the last step that the standby knows of.
    behind_s: float


class ReplicaWork(NamedTuple):
    """Work of a replica on this worker since it came to life, and its queue."""

    stage: Id
    partition: Id
    incarnation: Sequence
    #: Time in its steps.
    busy_s: float
    rows: Natural
    slices: Natural
    #: Slices that are not applied yet; for a standby, the steps that it would have to repeat.
    queued: Natural
    #: For a standby, the size of its checkpoint.
    state_bytes: Natural


class Load(TypedDict, total=False):
    """Load of a worker and its replicas, for load-balance policies."""

    #: By the worker's own clock.
    at: float
    replicas: list[ReplicaWork]
    #: Time for which the worker's loop has waited for something to do.
    rested_s: float


class StageStatistics(TypedDict, total=False):
    """Statistics of the replicas of one stage on this worker."""

    #: The id of the stage.
    stage: Natural
    primaries: list[PrimaryRows]
    #: Slices that are not applied yet.
    queued: Natural
    #: Time in steps, of all replicas.
    busy_s: float
    #: Median and 99th percentile of the last steps; None before the first.
    latency_ms: list[float] | None
    #: Output that the sink does not have yet.
    sink_bytes: Natural
    #: Partitions that stand still until the sink takes more.
    sink_full: Natural
    #: The number of standbys.
    standbys: Natural
    #: Size of the checkpoints of all standbys.
    checkpoint_bytes: Natural
    #: ``behind_s`` of the standby that is farthest behind.
    checkpoint_behind_s: float
    checkpoints: list[KeptCheckpoint]
    #: For stages with event time.
    times: list[StageTime]
    forfeits: list[Forfeited]
    #: Estimated time that the standby farthest behind a primary of this worker would need to repeat its steps.
    replay_s: float
    #: As ``replay_s``, but from a checkpoint location after the loss of all workers.
    vault_replay_s: float
    #: Rows for this stage in the logs of producers on this worker.
    kept_bytes: Natural


class Statistics(TypedDict, total=False):
    """Statistics of one process: counts since its start, and sizes of its queues at the moment."""

    #: Rows that replicas have applied on this worker.
    rows_in: Natural
    #: Rows that this worker has read from sources.
    source_rows: Natural
    sources: list[PartitionRead]
    pauses: list[Pauses]
    lags: list[SourceLag]
    bad_records: list[BadRecords]
    not_compared: list[NotCompared]
    lost_rows: list[LostRows]
    #: Shadows of partitions here.
    tentative: list[TentativeReport]
    ended_shadows: list[EndedShadow]
    #: For sources with event time.
    times: list[SourceTime]
    silent: list[SilentStream]
    detours: list[Detour]
    lent: list[LentRows]
    relays: list[RelayedLink]
    #: Left out by a worker whose streams have one feed each.
    feeds: list[FeedRows]
    #: The state of replicas with availability is beyond its limit here, and the other inputs are to stand still.
    state_full: bool
    #: How often the logs have been emptied (``flux.worker.core``).
    drained: Natural
    #: Replicas elsewhere, by their primaries here.
    behind: list[Lag]
    #: Secondaries here.
    unapplied: list[Unapplied]
    log_bytes: Natural
    #: The most that ``log_bytes`` has been.
    peak_log_bytes: Natural
    #: Received payload that is not applied yet.
    held_bytes: Natural
    #: Slices that are not applied yet.
    queued: Natural
    first_row_at: float | None
    finished_at: float | None
    counters: dict[str, Natural]
    #: In the order of the plan.
    stages: list[StageStatistics]
    #: Memory of the process.
    rss_bytes: Natural
    #: Processor time of the process.
    cpu_s: float
    #: Bytes that a vault has written to the checkpoint location.
    written_bytes: Natural
    #: The part of ``written_bytes`` that is journal frames with nothing but orders.
    order_bytes: Natural
    #: Slices in these orders.
    order_slices: Natural
    #: Left out of most heartbeats.
    load: Load
