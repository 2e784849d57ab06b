"""What processes report of themselves with their heartbeats, by name and with bounds (design: bounded-decoding).

A heartbeat leaves out what there is nothing to say of. Rows of a table travel as lists, with their fields in this order.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from flux.wire.numbers import Id, Natural, Sequence


class PartitionRead(NamedTuple):
    """Of a source, by this worker: so many ``elements`` from the ``first`` on, with so many ``rows``. Elements are batches, or
    rows where these are numbered."""

    source: Id
    partition: Id
    first: Natural
    elements: Natural
    rows: Natural


class Pauses(NamedTuple):
    """How often a partition of a source had nothing just then."""

    source: Id
    partition: Id
    pauses: Natural
    ended: bool


class SourceLag(NamedTuple):
    """Of a partition of a source that is read here: the number of the record that is read next, and the one behind the last
    that there is, as its reader says (``lag`` in ``flux.source``)."""

    source: Id
    partition: Id
    position: Natural
    end: Natural


class BadRecords(NamedTuple):
    """Of a partition of a source: so many ``records`` did not fit their format since it is read here."""

    source: Id
    partition: Id
    records: Natural


class Lag(NamedTuple):
    """A live replica on ``worker`` is ``steps`` behind its primary, about ``seconds`` of work. It has ``applied`` so many;
    ``its_turn``: nobody but itself is in its way."""

    stage: Id
    partition: Id
    worker: Id
    incarnation: Sequence
    steps: Natural
    seconds: float
    applied: Natural
    its_turn: bool


class Unapplied(NamedTuple):
    """A secondary here has received much that it has still to apply."""

    stage: Id
    partition: Id
    incarnation: Sequence


class PrimaryRows(NamedTuple):
    """What a primary here has counted; ``finished``: 1 when its end is reached."""

    partition: Natural
    rows_in: Natural
    rows_out: Natural
    finished: Natural


class KeptCheckpoint(NamedTuple):
    """The newest checkpoint of a standby here: its ``size`` in bytes, and the seconds that it lacks."""

    partition: Natural
    size: Natural
    behind_s: float


class ReplicaWork(NamedTuple):
    """What a replica here has done since it came to life, and what waits for it now."""

    stage: Id
    partition: Id
    incarnation: Sequence
    busy_s: float
    rows: Natural
    slices: Natural
    queued: Natural
    state_bytes: Natural


class Load(TypedDict, total=False):
    """``at``: by the worker's own clock; ``rested_s``: seconds for which its thread has waited for something to do."""

    at: float
    replicas: list[ReplicaWork]
    rested_s: float


class StageStatistics(TypedDict, total=False):
    """``latency_ms``: median and 99th percentile of the last steps, None before the first; ``sink_bytes``: of output that
    the sink does not have yet; ``sink_full``: partitions that wait for it. Of the ``standbys`` here: ``checkpoint_bytes`` in all,
    ``checkpoint_behind_s`` of the one that lacks most, ``checkpoints`` of each; ``replay_s``: by estimate, what a standby of a
    primary here would need to repeat, ``vault_replay_s``: the same from a checkpoint location; ``kept_bytes``: rows for the
    stage in logs of producers here."""

    primaries: list[PrimaryRows]
    queued: Natural
    busy_s: float
    latency_ms: list[float] | None
    sink_bytes: Natural
    sink_full: Natural
    standbys: Natural
    checkpoint_bytes: Natural
    checkpoint_behind_s: float
    checkpoints: list[KeptCheckpoint]
    replay_s: float
    vault_replay_s: float
    kept_bytes: Natural


class Statistics(TypedDict, total=False):
    """Counts since the start, and what is waiting now. ``drained``: see ``flux.host.drained``; ``written_bytes``: to a disk, by
    a vault; ``order_bytes`` of them in journal frames that have nothing but orders, which are about ``order_slices``."""

    rows_in: Natural
    source_rows: Natural
    sources: list[PartitionRead]
    pauses: list[Pauses]
    lags: list[SourceLag]
    bad_records: list[BadRecords]
    drained: Natural
    behind: list[Lag]
    unapplied: list[Unapplied]
    log_bytes: Natural
    peak_log_bytes: Natural
    held_bytes: Natural
    queued: Natural
    first_row_at: float | None
    finished_at: float | None
    counters: dict[str, Natural]
    stages: list[StageStatistics]
    rss_bytes: Natural
    cpu_s: float
    written_bytes: Natural
    order_bytes: Natural
    order_slices: Natural
    load: Load
