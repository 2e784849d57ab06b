"""Progress reports (``query.lastProgress``), made from the workers' reports.

Counts of bad records, of rows read and of lags, and the levels of replication, are kept by the classes of the same names,
for reports and metrics.
"""

from __future__ import annotations

import bisect
import json
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from controller.replicas.membership import Member, Membership
from controller.replicas.replica_safety import Life
from controller.replicas.table_index import TableIndex
from controller.report.failures import Availabilities
from controller.report.feeds import FeedRaces, feeds
from controller.report.links import LinksDown, links_down, loans, relays
from controller.report.silence import silent_streams
from controller.report.watermarks import EventTimes, MicroBatchTime
from flux.dataflow.plan import ById, FromSource, Plan, SourcePlan, StagePlan, WorkerSourcePlan
from flux.dataflow.sink import guarantee
from flux.operators.user_code import text_of
from flux.wire.statistics import BadRecords, Lag, SourceLag
from partitioning.ids import ACTIVE


class SourceCounts:
    """Counts of records of one sort, by source of a query: those that did not fit their format, were not compared, or were lost
    (design: bad-records). ``name``: that of the sort in the statistics.

    A reader counts from its beginning. So the count of a partition is the sum over its readers; a reader that begins again
    reports less than before, or is on another worker."""

    def __init__(self, sources: Container[int], name: str = "bad_records") -> None:
        self._sources, self._name = sources, name  # those that are there
        self._before: dict[int, int] = {}  # by source: counts of readers that have ended
        self._said: dict[tuple[int, int, int], int] = {}  # by worker, source and partition

    def follow(self, sources: Container[int]) -> None:
        """Count for these sources from now on."""
        self._sources = sources
        self._before = {source: records for source, records in self._before.items() if source in sources}
        self._said = {key: records for key, records in self._said.items() if key[1] in sources}

    def note(self, workers: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the newest statistics of each worker, by its number."""
        now: dict[tuple[int, int, int], int] = {}
        for worker, stats in workers.items():
            for said in stats.get(self._name, ()):
                told = BadRecords(*said)
                if told.source in self._sources:
                    now[worker, told.source, told.partition] = told.records
        for key, records in self._said.items():
            if now.get(key, -1) < records:
                self._before[key[1]] = self._before.get(key[1], 0) + records
        self._said = now

    def of(self, source: int) -> int:
        return self._before.get(source, 0) + sum(records for key, records in self._said.items() if key[1] == source)


#: Reports kept of each partition, to know the number of rows before a batch. A new reader begins at a batch that was
#: still in the log of the reader before, which is some seconds of its reports.
MARKS_KEPT = 256


class PartitionReading(NamedTuple):
    """One reading of a partition: the worker that reads, and its first batch."""

    reader: int
    start: int


class _Partition:
    """The rows of one partition of a source, counted once, and the rows before some batches, for readings that begin there."""

    def __init__(self) -> None:
        self.rows = 0
        self._batches = [0]  # numbers of batches, ascending
        self._rows = [0]  # the least number of rows before each of these batches
        self._before: dict[PartitionReading, int] = {}  # rows before the first batch of the reading

    def note(self, reader: int, start: int, end: int, rows: int) -> None:
        """Note that ``reader`` has read the batches ``start`` to ``end`` - 1, with ``rows`` rows in all."""
        reading = PartitionReading(reader, start)
        before = self._before.get(reading)
        if before is None:
            before = self._before[reading] = self._rows[bisect.bisect_right(self._batches, start) - 1]
        absolute = before + rows
        if end > self._batches[-1] and absolute >= self._rows[-1]:
            self._batches.append(end)
            self._rows.append(absolute)
            del self._batches[1:-MARKS_KEPT], self._rows[1:-MARKS_KEPT]
        self.rows = max(self.rows, absolute)


class InputRows:
    """The counts of the rows that the query has read, of all partitions of all sources: every row once, however often its
    partition is read (design: rows-once).

    A partition of a source is read again when its Spark task is retried, or by another worker when its reader is lost or
    leaves. The count of a partition is the highest count of any of its readers, from the first row on; the sum of these
    counts never falls. A reader that begins in the middle (a source that seeks) continues the reported count of the rows
    before its first batch. That count is never too high, so no row is counted twice; it may miss rows that came between two
    reports. Progress reports make up for these by the counts of the stages behind a source (``progress``)."""

    def __init__(self) -> None:
        self._partitions: dict[Any, _Partition] = {}
        #: By source, the partitions that workers have read to their ends.
        self._ended: dict[int, set[int]] = {}

    @property
    def total(self) -> int:
        return sum(partition.rows for partition in self._partitions.values())

    def of_sources(self) -> dict[int, int]:
        """Return the rows of each source whose readers are in the workers."""
        found: dict[int, int] = {}
        for (source, _), partition in self._partitions.items():
            if isinstance(source, int):
                found[source] = found.get(source, 0) + partition.rows
        return found

    def from_worker(self, worker: int, sources: Iterable[Sequence[int]]) -> None:
        """Take a worker's report on each partition that it reads: source, partition, first element, number of elements, rows."""
        for source, partition, start, batches, rows in sources:
            self._of((source, partition)).note(worker, start, start + batches, rows)

    def note_ends(self, pauses: Iterable[Sequence[int]]) -> None:
        """Take a worker's report on the pauses of each partition that it reads, which says whether the partition has ended."""
        for source, partition, _, ended in pauses:
            if ended:
                self._ended.setdefault(source, set()).add(partition)

    def have_ended(self, sources: Iterable[SourcePlan]) -> bool:
        """Tell whether all partitions that workers read have been reported as ended. Ingress tasks need no such report: the
        stages hear of the end of a Spark job after the goodbyes of its tasks, which come with their last counts."""
        return all(len(self._ended.get(source.id, ())) >= source.worker_partitions for source in sources)

    def from_ingress(self, edges: Sequence[int], partition: int, rows: int) -> None:
        """Take the report of an attempt of a Spark task, which reads its partition from the start."""
        counted = self._of((tuple(edges), partition))
        counted.rows = max(counted.rows, rows)

    def _of(self, key: Any) -> _Partition:
        return self._partitions.setdefault(key, _Partition())


@dataclass(frozen=True, slots=True)
class Level:
    """The replication of one stage, for reports and metrics."""

    #: Replicas of each partition.
    wanted: int
    #: Safe replicas of the partition that has the fewest.
    safe: int
    #: Partitions with fewer replicas than wanted.
    short: int
    #: Active replicas of all partitions.
    active: int = 0
    #: Standbys of all partitions.
    standbys: int = 0


def levels(
    plan: Plan, columns: TableIndex | None, doubtful: Iterable[Life], low: Mapping[int, Sequence[int]]
) -> list[Level]:
    """Compute the level of each stage.

    ``columns`` are those of the table, None before the first; ``doubtful`` are replicas that are not safe yet or do not keep up;
    ``low`` has, by id of each stage, the partitions with too few replicas."""
    if columns is None:
        return [Level(stage.replicas, 0, stage.partitions) for stage in plan.stages]
    safe = columns.count(columns.without(columns.live & columns.safe, doubtful))
    fewest = columns.by_stage(np.minimum, safe)
    listed = columns.by_stage(np.add, columns.count(columns.listed))
    active = columns.by_stage(np.add, columns.count(columns.applies))
    return [
        Level(
            stage.replicas, fewest[stage.id], len(low[stage.id]), active[stage.id],
            listed[stage.id] - active[stage.id],
        )
        for stage in plan.stages
    ]  # fmt: skip


class SourceLags:
    """The lags of all sources of a query: distances of partitions from their ends, by the last reports of the workers that
    read them (design: lag-of-sources).

    Only readers with a ``lag`` report one (see ``flux.source``). While a partition has no reader, because its worker was
    lost, its last report stands: the records that wait there have not gone."""

    def __init__(self, sources: ById[SourcePlan]) -> None:
        self._said: dict[int, dict[int, SourceLag]] = {}
        self.follow(sources)

    def follow(self, sources: ById[SourcePlan]) -> None:
        """Report on these sources from now on."""
        self._sources = sources
        self._names = {source.id: _names(source) for source in sources}
        self._units = {
            source.id: source.reader.lag_unit if isinstance(source, WorkerSourcePlan) else "" for source in sources
        }
        self._said = {source.id: self._said.get(source.id, {}) for source in sources}

    def report(self, workers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Take the newest statistics of each worker, and make one entry for each source."""
        self._note(SourceLag(*lag) for stats in workers for lag in stats.get("lags", ()))
        return [{"name": source.name} | self._lag(source.id) for source in self._sources]

    def _note(self, lags: Iterable[SourceLag]) -> None:
        """Keep one lag of each partition. While it passes to another worker, both may report it; the farther one reads it now."""
        new: dict[tuple[int, int], SourceLag] = {}
        for lag in lags:
            if lag.source in self._said and 0 <= lag.partition < len(self._names[lag.source]):
                known = new.setdefault((lag.source, lag.partition), lag)
                if lag.position > known.position:
                    new[lag.source, lag.partition] = lag
        for (source, partition), lag in new.items():
            self._said[source][partition] = lag

    def _lag(self, number: int) -> dict[str, Any]:
        said, names = self._said[number], self._names[number]
        if not said:
            return {}
        partitions = {names[partition]: max(lag.end - lag.position, 0) for partition, lag in sorted(said.items())}
        unit = self._units[number]
        return {
            "lag": {"records": sum(partitions.values()), "partitions": partitions} | ({"unit": unit} if unit else {})
        }


def _names(source: SourcePlan) -> list[str]:
    if not isinstance(source, WorkerSourcePlan):
        return []
    return [str(source.reader.partition_name(partition)) for partition in range(source.partitions)]


class QueryProgress(dict[str, Any]):
    """One progress report: a dictionary with the properties of pyspark's ``StreamingQueryProgress``. As there, ``id`` and
    ``runId`` are strings as items and UUIDs as properties, and ``str`` gives the report as indented JSON."""

    @property
    def id(self) -> uuid.UUID:
        return uuid.UUID(self["id"])

    @property
    def runId(self) -> uuid.UUID:  # noqa: N802
        return uuid.UUID(self["runId"])

    @property
    def name(self) -> str | None:
        name: str | None = self["name"]
        return name

    @property
    def timestamp(self) -> str:
        return str(self["timestamp"])

    @property
    def numInputRows(self) -> int:  # noqa: N802
        return int(self["numInputRows"])

    @property
    def inputRowsPerSecond(self) -> float:  # noqa: N802
        return float(self["inputRowsPerSecond"])

    @property
    def processedRowsPerSecond(self) -> float:  # noqa: N802
        return float(self["processedRowsPerSecond"])

    @property
    def sources(self) -> list[dict[str, Any]]:
        return list(self["sources"])

    @property
    def json(self) -> str:
        """The report as JSON in one line."""
        return json.dumps(self, separators=(",", ":"))

    @property
    def prettyJson(self) -> str:  # noqa: N802
        """The report as indented JSON."""
        return json.dumps(self, indent=2)

    def __str__(self) -> str:
        return self.prettyJson

    __repr__ = __str__


class Totals(NamedTuple):
    """Rows of a stage, and its finished partitions."""

    rows_in: int
    rows_out: int
    finished: int


class PartitionCounts:
    """Rows that the primaries of a stage have counted. Workers do not report at the same moment: when a partition
    passes from one to the other, both reports may have it, or neither. The counts travel with a replica's state, so the
    highest count ever reported of a partition is the newest."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        # By partition: rows in, rows out, 1 when finished.
        self._highest = np.zeros((3, partitions), np.int64)

    def add(self, reports: Iterable[Sequence[Sequence[int]]]) -> None:
        """Take a report about primaries: for each, its partition, rows in, rows out, 1 when finished."""
        rows = chain.from_iterable(reports)
        said = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, 4)
        # One column at a time, because maximum.at takes thirty times as long for rows of an array.
        for column in range(3):
            np.maximum.at(self._highest[column], said[:, 0], said[:, 1 + column])

    def totals(self) -> Totals:
        return Totals(*self._highest.sum(axis=1).tolist())


#: Files of each kind that a report names.
FILES_SHOWN = 20


@dataclass
class Progress:
    """Maker of progress reports. It keeps the previous counts, so that rates are averages of the last interval."""

    plan: Plan
    query_id: str
    name: str | None
    run_id: str = ""
    _then: float | None = None
    _counts: dict[str, float] = field(default_factory=dict)
    _by_stage: dict[int, PartitionCounts] = field(init=False)
    _lags: SourceLags = field(init=False)
    _bad_records: SourceCounts = field(init=False)
    _not_compared: SourceCounts = field(init=False)
    _lost_rows: SourceCounts = field(init=False)
    _event_times: EventTimes = field(init=False)
    _availabilities: Availabilities = field(init=False)
    _links: LinksDown = field(default_factory=LinksDown)
    _races: FeedRaces = field(default_factory=FeedRaces)

    def __post_init__(self) -> None:
        self._by_stage = {}
        self._lags = SourceLags(self.plan.sources)
        self._bad_records = SourceCounts(self.plan.sources)
        self._not_compared = SourceCounts(self.plan.sources, "not_compared")
        self._lost_rows = SourceCounts(self.plan.sources, "lost_rows")
        self._event_times = EventTimes(self.plan)
        self._availabilities = Availabilities(self.plan)
        self._go_by(self.plan)

    def follow(self, plan: Plan) -> None:
        """Go by another version of the plan. Counts of stages and sources that stay are kept."""
        if plan.version == self.plan.version:
            return
        for counts in (self._bad_records, self._not_compared, self._lost_rows):
            counts.follow(plan.sources)
        self._lags.follow(plan.sources)
        self._event_times.follow(plan)
        self._availabilities.follow(plan)
        self._go_by(plan)

    def _go_by(self, plan: Plan) -> None:
        self.plan = plan
        known = self._by_stage
        self._by_stage = {
            stage.id: known.get(stage.id) or PartitionCounts(stage.partitions) for stage in self.plan.stages
        }
        inputs = {stage.id: [self.plan.edges[edge] for edge in stage.edges_in] for stage in self.plan.stages}
        #: Stages whose only input is a source, and that source.
        self._behind = [
            (stage, edges[0].source)
            for stage, edges in inputs.items()
            if len(edges) == 1 and isinstance(edges[0], FromSource)
        ]

    def make(
        self,
        members: Membership,
        rows: int,
        epoch: int,
        now: float,
        wall: float | None = None,
        wished: Plan | None = None,
        read: Mapping[int, int] | None = None,
        over: bool = False,
    ) -> dict[str, Any]:
        """Make a report.

        ``rows`` are those read by the query since its start, each counted once. ``now`` is for rates, ``wall`` (the wall clock)
        for the timestamp. ``wished`` is the plan with the replicas that stages are to have by now. ``read`` has the part of
        ``rows`` of each source that workers read, if the stages behind it have counted the same rows from the first one on.
        ``over``: all output is there, so no row waits, even if the workers' last reports say otherwise."""
        if wished is not None:
            self.follow(wished)
        by_slot = sorted(members.workers.values(), key=lambda member: member.about.index)
        workers = [(member, member.stats) for member in by_slot]
        ingress = [member.stats for member in members.ingress.values()]
        everyone = [stats for _, stats in workers] + ingress
        logged = Counter[int]()  # bytes of rows for each stage, in logs of ingress tasks
        for member in members.ingress.values():
            # The task keeps the same rows for all its edges. One for edges that are removed is about to end.
            for edge in [edge for edge in member.about.edges if edge in self.plan.edges][:1]:
                logged[self.plan.edges[edge].consumer] += int(member.stats.get("log_bytes", 0))
        self._event_times.note(stats for _, stats in workers)
        silent = silent_streams(self.plan, members, now, wall or now)
        self._availabilities.note([stats for _, stats in workers], silent, wall or now)
        reports = [stats for _, stats in workers]
        of_stages = _by_stage(reports)
        stages = [
            self._stage(stage, reports, of_stages.get(stage.id, []), logged[stage.id], now)
            | self._event_times.of_stage(stage.id, wall or now)
            for stage in (wished or self.plan).stages
        ]
        rows += self._missed(stages, read or {})
        before = self._counts.get("input", 0)
        shown = datetime.fromtimestamp(wall or now, UTC)
        result = {
            "id": self.query_id,
            "runId": self.run_id,
            "name": self.name,
            "timestamp": shown.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "epoch": epoch,
            "numInputRows": int(rows - before),
            "totalInputRows": rows,
            "inputRowsPerSecond": self._rate("input", rows, now),
            "processedRowsPerSecond": self._rate("processed", sum(stage["rowsIn"] for stage in stages), now),
            "backlog": {
                "slices": 0 if over else int(_total(everyone, "queued")),
                "bytes": 0 if over else int(_total(everyone, "log_bytes")),
            },
            "firstRowAt": _extreme(min, everyone, "first_row_at"),
            "finishedAt": _extreme(max, everyone, "finished_at"),
            "peakLogBytes": max([int(stats.get("peak_log_bytes", 0)) for stats in everyone], default=0),
            "sources": self._sources({member.node: stats for member, stats in workers}),
            "stages": stages,
            "workers": [self._worker(member, stats, now) for member, stats in workers],
        } | self._availabilities.report(stages)
        links, raced = links_down(members), feeds(members)
        self._links.note(links, wall or now)
        self._races.note(raced, wall or now)
        shown_if_any = ("links", links), ("loans", loans(members)), ("relays", relays(members)), ("feeds", raced)
        result |= {name: entry for name, entry in shown_if_any if entry}
        if members.vault is not None:
            result["checkpoint"] = self._kept(members.vault.stats, [stats for _, stats in workers])
        if over:
            for stage in stages:
                stage["queued"] = stage["keptBytes"] = 0
        self._then = now
        return result

    def micro_batches_applied(self, source: int, watermark: int, late: int) -> None:
        """Take the event time of a source behind its applied micro-batches."""
        self._event_times.micro_batches[source] = MicroBatchTime(watermark, late)

    def warnings(self, report: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
        """Return warnings that follow from a report, each once, with the name of its stage or empty."""
        rows_in = self._rows_in(report["stages"])
        found = self._event_times.warnings(rows_in, self.plan.settings.watermark_warn_after, now)
        return found + self._availabilities.warnings()

    def _rows_in(self, entries: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Return the applied rows of each stage, by its id, out of the entries of a report."""
        return {stage.id: int(entry["rowsIn"]) for stage, entry in zip(self.plan.stages, entries, strict=True)}

    def failures(self) -> list[tuple[str, float]]:
        """Return the text of each failure of inputs that has ended since the last call, and how long it lasted in seconds."""
        return self._availabilities.ended()

    def links_up(self, wall: float) -> Iterator[tuple[str, float]]:
        """Yield the text of each link that was down and is up again, and of races that second feeds have won, with their
        seconds."""
        yield from self._links.over(wall)
        yield from self._races.over(wall)

    def _worker(self, member: Member, stats: Mapping[str, Any], now: float) -> dict[str, Any]:
        return {
            "id": member.node,
            "slot": member.about.index,
            "host": member.about.host,
            "rowsIn": int(stats.get("rows_in", 0)),
            "rowsPerSecond": self._rate(f"worker {member.node}", stats.get("rows_in", 0), now),
            "sourceRows": int(stats.get("source_rows", 0)),
            "queued": int(stats.get("queued", 0)),
            "logBytes": int(stats.get("log_bytes", 0)),
            "heldBytes": int(stats.get("held_bytes", 0)),
            "rssBytes": int(stats.get("rss_bytes", 0)),
            "cpuSeconds": round(stats.get("cpu_s", 0.0), 3),
            "counters": stats.get("counters", {}),
        }

    def ends_are_told(self, members: Membership) -> bool:
        """Tell whether the primaries of all partitions have reported their ends. A report of an end has the last counts."""
        of_stages = _by_stage(member.stats for member in members.workers.values())
        for stage, counts in self._by_stage.items():
            counts.add(each["primaries"] for each in of_stages.get(stage, ()))
            if counts.totals().finished < counts.partitions:
                return False
        return True

    def _missed(self, stages: Sequence[Mapping[str, Any]], read: Mapping[int, int]) -> int:
        """Return how many rows the readers of sources have not counted. A reader that takes over in the middle knows the rows
        before its first batch by the last report of its predecessor alone (``inputs``). The rows that a stage has applied are
        rows of its source, and their count is exact, because it travels with the state."""
        applied, rows_in = dict(read), self._rows_in(stages)
        for stage, source in self._behind:
            if source in applied:
                applied[source] = max(applied[source], rows_in[stage])
        return sum(applied.values()) - sum(read.values())

    def _sources(self, workers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Report on each source, given the newest statistics of each worker, by its number."""
        self._bad_records.note(workers)
        self._not_compared.note(workers)
        self._lost_rows.note(workers)
        sources = self._lags.report(workers.values())
        for source, entry in zip(self.plan.sources, sources, strict=True):
            if bad := self._bad_records.of(source.id):
                entry["badRecords"] = bad
            if left_out := self._not_compared.of(source.id):
                entry["notCompared"] = left_out
            if lost := self._lost_rows.of(source.id):
                entry["lostRows"] = lost
            entry |= self._event_times.of_source(source.id)
        return sources

    @staticmethod
    def _kept(vault: dict[str, Any], workers: list[dict[str, Any]]) -> dict[str, Any]:
        """Report on the checkpoint location: its content, and the estimated time to repeat the steps after it."""
        kept = vault.get("stages", [])
        again = [stage.get("vault_replay_s", 0.0) for stats in workers for stage in stats.get("stages", [])]
        return {
            "bytes": int(_total(kept, "checkpoint_bytes")),
            "behindSeconds": max((stage.get("checkpoint_behind_s", 0.0) for stage in kept), default=0.0),
            "replaySeconds": max(again, default=0.0),
            "writtenBytes": int(vault.get("written_bytes", 0)),
            "orderBytesPerSlice": round(vault.get("order_bytes", 0) / max(vault.get("order_slices", 0), 1), 1),
        }

    def _stage(
        self, plan: StagePlan, reports: list[dict[str, Any]], mine: list[dict[str, Any]], logged: int, now: float
    ) -> dict[str, Any]:
        """Report on one stage. ``plan`` is as it is wished now; ``mine`` are its statistics in the ``reports`` of workers;
        ``logged`` are the bytes in logs of ingress tasks."""
        stage = plan.id
        self._by_stage[stage].add(report["primaries"] for report in mine)
        totals = self._by_stage[stage].totals()
        sink: dict[str, Any] = {}
        if plan.sink is not None:
            sink = {
                "sink": f"{text_of(plan.sink, repr)}, {guarantee(plan.sink)}",
                "sinkBytes": int(_total(mine, "sink_bytes")),
            }
            sink["waitForSink"] = int(_total(mine, "sink_full"))
        if plan.recovery != ACTIVE or _total(mine, "standbys"):
            sink |= {
                "checkpointBytes": int(_total(mine, "checkpoint_bytes")),
                "checkpointBehindSeconds": max((stats.get("checkpoint_behind_s", 0.0) for stats in mine), default=0.0),
                "replaySeconds": max((stats.get("replay_s", 0.0) for stats in mine), default=0.0),
            }
        return sink | {
            "name": plan.name,
            "partitions": plan.partitions,
            "replicas": plan.replicas,
            "recovery": plan.recovery,
            "lossSeconds": self._loss_s(plan, reports, mine),
            "keptBytes": logged + int(_total(mine, "kept_bytes")),
            "finished": totals.finished,
            "rowsIn": totals.rows_in,
            "rowsOut": totals.rows_out,
            "rowsPerSecond": self._rate(f"stage {stage}", totals.rows_in, now),
            "queued": int(_total(mine, "queued")),
            "busySeconds": round(_total(mine, "busy_s"), 3),
            # The slowest worker counts: percentiles of percentiles would mean nothing.
            "latencyMs": max((stats["latency_ms"] for stats in mine if stats.get("latency_ms")), default=None),
        }

    def _loss_s(self, plan: StagePlan, reports: list[dict[str, Any]], mine: list[dict[str, Any]]) -> float | None:
        """Estimate the work, in seconds, that would be repeated if a primary of the stage were lost now; None: the query
        would not survive it. Active replicas go on at once, unless they lag."""
        if plan.replicas == 1:
            again = max((stats.get("vault_replay_s", 0.0) for stats in mine), default=0.0)
            return again if self.plan.durable else None
        if plan.recovery != ACTIVE:
            return max((stats.get("replay_s", 0.0) for stats in mine), default=0.0)
        lags = chain.from_iterable(stats.get("behind", ()) for stats in reports)
        return max((Lag(*lag).seconds for lag in lags if lag[0] == plan.id), default=0.0)

    def _rate(self, what: str, count: float, now: float) -> float:
        before = self._counts.get(what, 0)
        self._counts[what] = count
        if self._then is None or now <= self._then:
            return 0.0
        # A sum can fall: the counts of a lost worker are gone, and a new worker begins at 0.
        return round(max(count - before, 0) / (now - self._then), 1)


def _total(reports: list[dict[str, Any]], key: str) -> float:
    total: float = sum(stats.get(key, 0) for stats in reports)
    return total


def _extreme(choose: Callable[[list[float]], float], reports: list[dict[str, Any]], key: str) -> float | None:
    """Choose among the reported times, in seconds since 1970; None if no process reports one."""
    known = [stats[key] for stats in reports if stats.get(key) is not None]
    return choose(known) if known else None


def unread_files(files: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Count the files of each kind, and name some of them with their reasons."""
    return {
        kind: {"count": len(named), "files": dict(sorted(named.items())[:FILES_SHOWN])}
        for kind, named in files.items()
        if named
    }


def _by_stage(reports: Iterable[Mapping[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the statistics of each stage in the reports of workers. A worker whose plan is older than a stage has none of it."""
    found: dict[int, list[dict[str, Any]]] = {}
    for stats in reports:
        for each in stats.get("stages", ()):
            found.setdefault(each.get("stage", -1), []).append(each)
    return found
