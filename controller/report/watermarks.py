"""Event time in reports: the watermark of each stage, the source partition that holds it back, late rows, and warnings (design:
watermarks-seen).

A stage is as far as its partition that is farthest behind. That partition names the stream that it waits for; a stream of a stage
leads to the stage before, and so on to a partition of a source, whose reader tells its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from flux.dataflow.plan import FromMicroBatches, FromSource, FromStage, Plan, SourcePlan, WorkerSourcePlan
from flux.windows.durations import words
from flux.windows.window import FIRST_VERSION, NEVER
from flux.wire.statistics import Forfeited, ReaderState, SourceTime, StageTime

Key = TypeVar("Key")

#: Least number of late rows, and their share of all rows since the last look, at which a partition is told of.
LATE_ROWS, LATE_SHARE = 100, 0.5


class MicroBatchTime(NamedTuple):
    """Event time of a source behind its applied micro-batches, which come from tasks of Spark."""

    watermark: int
    #: Late rows in all batches.
    late: int


@dataclass
class Standstill:
    """A watermark of a stage, and the time since which it has been the same while rows came."""

    watermark: int
    since: float
    #: The rows that the stage had applied by then.
    rows: int
    told: bool = False


@dataclass
class EventTimes:
    """Event time of one query, by the newest reports of its workers."""

    plan: Plan
    #: By source.
    micro_batches: dict[int, MicroBatchTime] = field(default_factory=dict)
    #: By source and partition.
    _sources: dict[tuple[int, int], SourceTime] = field(default_factory=dict)
    #: By stage and partition.
    _stages: dict[tuple[int, int], StageTime] = field(default_factory=dict)
    _stands: dict[int, Standstill] = field(default_factory=dict)
    #: By source and partition: rows and late rows at the last look.
    _late: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _told_late: set[tuple[int, int]] = field(default_factory=set)
    #: By stage and partition: windows that were closed without some inputs.
    _forfeits: dict[tuple[int, int], Forfeited] = field(default_factory=dict)
    #: By stage: the starts of the times that were told.
    _told_forfeits: dict[int, int] = field(default_factory=dict)
    #: The state of a worker is beyond its limit, so that the other inputs stand still; and that was told.
    _full = _told_full = False

    def follow(self, plan: Plan) -> None:
        """Go by another version of the plan, and forget stages and sources that are gone."""
        self.plan = plan
        for of_source in (self._sources, self._late):
            _keep(of_source, lambda key: key[0] in plan.sources)
        for of_stage in (self._stages, self._forfeits):
            _keep(of_stage, lambda key: key[0] in plan.stages)
        for by_stage in (self._stands, self._told_forfeits):
            _keep(by_stage, lambda stage: stage in plan.stages)
        _keep(self.micro_batches, lambda source: source in plan.sources)
        self._told_late = {key for key in self._told_late if key[0] in plan.sources}

    def note(self, workers: Iterable[Mapping[str, Any]]) -> None:
        """Take the newest statistics of each worker. While a partition passes to another worker, both may report it; the one that
        is farther counts. While it is on none, its last report stands."""
        sources: dict[tuple[int, int], SourceTime] = {}
        stages: dict[tuple[int, int], StageTime] = {}
        told_by = list(workers)
        for stats in told_by:  # a worker may go by an older plan than this one
            for told in stats.get("times", ()):
                time = SourceTime(*told)
                if time.source not in self.plan.sources:
                    continue  # the worker does not go by the newest plan yet
                known = sources.setdefault((time.source, time.partition), time)
                if time.watermark > known.watermark:
                    sources[time.source, time.partition] = time
            for counts in self._known(stats):
                for told in counts.get("times", ()):
                    at, stage = StageTime(*told), counts.get("stage", -1)
                    before = stages.setdefault((stage, at.partition), at)
                    if at.watermark > before.watermark:
                        stages[stage, at.partition] = at
        self._sources |= sources
        self._stages |= stages
        missing = any(time.state == ReaderState.SILENT for time in sources.values())
        self._full = missing and any(stats.get("state_full") for stats in told_by)
        for stats in told_by:
            for counts in self._known(stats):
                for told in counts.get("forfeits", ()):
                    forfeited = Forfeited(*told)
                    key = counts.get("stage", -1), forfeited.partition
                    if key not in self._forfeits or forfeited[2:] >= self._forfeits[key][2:]:
                        self._forfeits[key] = forfeited

    def _known(self, stats: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield a worker's reports about stages of the plan."""
        return (counts for counts in stats.get("stages", ()) if counts.get("stage", -1) in self.plan.stages)

    # ---- sources

    def of_source(self, source: int) -> dict[str, Any]:
        """Return the entry of a source; empty: it has no event time, or no report has come."""
        if (batches := self.micro_batches.get(source)) is not None:
            return {"eventTime": {"watermark": shown(batches.watermark), "lateRows": batches.late}}
        mine = self._of_source(source)
        if not mine:
            return {}
        return {
            "eventTime": {
                "watermark": shown(min(time.watermark for time in mine)),
                "lateRows": sum(time.late for time in mine),
                "partitions": {
                    self._partition_name(source, time.partition): {
                        "watermark": shown(time.watermark),
                        "lateRows": time.late,
                        "state": ReaderState(time.state).name.lower(),
                    }
                    for time in mine
                },
            }
        }

    def _of_source(self, source: int) -> list[SourceTime]:
        return [time for (of, _), time in sorted(self._sources.items()) if of == source]

    def _partition_name(self, source: int, partition: int) -> str:
        about = self.plan.sources[source]
        if isinstance(about, WorkerSourcePlan):
            return str(about.reader.partition_name(partition))
        return str(partition)

    # ---- stages

    def of_stage(self, stage: int, wall: float) -> dict[str, Any]:
        """Return the entry of a stage; empty: it has no event time, or no report has come. ``wall``: the time by the clock."""
        mine = self._of_stage(stage)
        if not mine:
            return {}
        least = min(time.watermark for time in mine)
        entry: dict[str, Any] = {
            "watermark": shown(least),
            "lagSeconds": round(wall - least / 1e6, 3) if NEVER < least < FIRST_VERSION else None,
            "rowsBehindWatermark": sum(time.behind for time in mine),
            "rowsWithoutTime": sum(time.without_time for time in mine),
        }
        if least < FIRST_VERSION and (holder := self._holder(stage)):
            entry["heldBackBy"] = holder
        if forfeits := self._forfeits_of(stage):
            entry["incomplete"] = {
                "from": shown(min(each.start for each in forfeits)),
                "to": shown(max(each.through for each in forfeits)),
            }
            entry["forfeitedRows"] = sum(each.rows for each in forfeits)
        return {"eventTime": entry}

    def _forfeits_of(self, stage: int) -> list[Forfeited]:
        return [each for (of, _), each in self._forfeits.items() if of == stage]

    def _of_stage(self, stage: int) -> list[StageTime]:
        return [time for (of, _), time in sorted(self._stages.items()) if of == stage]

    def _holder(self, stage: int) -> str:
        """Name the partition of a source that holds the watermark of a stage back, and say why; empty: it is not known."""
        for _ in self.plan.stages:  # a path through the dataflow is no longer
            last = min(self._of_stage(stage), key=lambda time: time.watermark, default=None)
            if last is None:
                return ""
            if last.edge < 0:
                return self._batches(stage)
            edge = self.plan.edges[last.edge]
            if isinstance(edge, FromSource):
                return self._reason(edge, last.producer)
            assert isinstance(edge, FromStage)
            stage = edge.stage
        return ""

    def _batches(self, stage: int) -> str:
        """Name the micro-batches that a stage waits for."""
        for number in self.plan.stages[stage].edges_in:
            edge = self.plan.edges[number]
            if isinstance(edge, FromMicroBatches) and edge.states:
                return f"source {self.plan.origin(edge).name}: its watermark rises when a micro-batch has been applied"
        return ""

    def _reason(self, edge: FromSource, partition: int) -> str:
        source: SourcePlan = self.plan.sources[edge.source]
        where = f"partition {self._partition_name(edge.source, partition)} of source {source.name}"
        time = self._sources.get((edge.source, partition))
        if not edge.states:
            return f"{where}: it states no watermark before its end"
        if time is None:
            return f"{where}: no worker reads it now"
        match time.state:
            case ReaderState.HELD:
                return f"{where}: held by alignment, at {shown(time.watermark)}: others are farther behind"
            case ReaderState.SILENT:
                return f"{where}: no answer from outside"
            case ReaderState.IDLE:
                return f"{where}: idle, and its rows are still on their way"
        if time.watermark == NEVER:
            return f"{where}: no row since the start"
        return f"{where}: it is the farthest behind, at {shown(time.watermark)}"

    # ---- warnings

    def warnings(self, rows_in: Mapping[int, int], after_s: float, now: float) -> list[tuple[str, str]]:
        """Return warnings, each with the name of its stage or empty: of watermarks that have stood still for this time while rows
        came, and of partitions of which most rows are late. Each is given once. ``rows_in``: by stage, the applied rows."""
        found = [("", text) for text in self._late_partitions()]
        found += self._overflows()
        for stage in self.plan.stages:
            mine = self._of_stage(stage.id) if stage.timed_inputs else []
            if not mine:
                continue
            least, rows = min(time.watermark for time in mine), rows_in[stage.id]
            stands = self._stands.get(stage.id)
            if stands is None or stands.watermark != least:
                self._stands[stage.id] = Standstill(least, now, rows)
            elif not stands.told and least < FIRST_VERSION and now >= stands.since + after_s and rows > stands.rows:
                stands.told = True
                found.append((stage.name, self._advice(stage.id, now - stands.since)))
        return found

    def _advice(self, stage: int, seconds: float) -> str:
        holder = self._holder(stage)
        return (
            f"its watermark has not moved for {seconds:.0f} s, though rows come, so nothing that waits for it is given, such as "
            "results of windows"
            + (f"; held back by {holder}" if holder else "")
            + ". If a partition may be without rows for long, say after which time the others go on without it: "
            "withWatermark(..., idle='1 minute')"
        )

    def _overflows(self) -> Iterable[tuple[str, str]]:
        """Yield warnings of state beyond ``spark.flux.availability.maxState``."""
        for stage in self.plan.stages:
            forfeits = self._forfeits_of(stage.id)
            start = max((each.start for each in forfeits), default=NEVER)
            if forfeits and self._told_forfeits.get(stage.id) != start:
                self._told_forfeits[stage.id] = start
                behind = [self.plan.stages[self.plan.edges[edge].consumer].name for edge in stage.edges_out]
                yield (
                    stage.name,
                    f"windows from {shown(start) or 'the first one'} on are closed without inputs that do not answer, because "
                    "the state of a worker is beyond spark.flux.availability.maxState: these results are incomplete for good"
                    + (f", and so are those of {', '.join(behind)}" if behind else "")
                    + ", and rows that come for them later are left out (forfeitedRows)",
                )
        if self._full and not self._told_full:
            yield (
                "",
                "the state of a worker is beyond spark.flux.availability.maxState while an input is missing: the other inputs "
                "stand still until it is back. With availability_overflow='forfeit' windows would close without it",
            )
        self._told_full = self._full

    def _late_partitions(self) -> Iterable[str]:
        for key, time in self._sources.items():
            rows, late = self._late.get(key, (0, 0))
            more, more_late = time.rows - rows, time.late - late
            if more < 0:  # another reader
                self._late[key] = time.rows, time.late
                continue
            if more_late < LATE_ROWS:
                continue
            self._late[key] = time.rows, time.late
            if more_late > LATE_SHARE * more and key not in self._told_late:
                self._told_late.add(key)
                yield self._too_late(key, time, more_late, more)

    def _too_late(self, key: tuple[int, int], time: SourceTime, late: int, rows: int) -> str:
        event_time = self.plan.sources[key[0]].event_time
        assert event_time is not None
        return (
            f"{late} of {rows} rows of partition {self._partition_name(*key)} of source {self.plan.sources[key[0]].name} were "
            f"late: its newest time is {shown(time.watermark + event_time.delay)}, and the last late row has "
            f"{shown(time.late_time)}, with a delay of {words(event_time.delay)}. A time from the future makes all later rows "
            "late: withWatermark(..., maxAhead='1 hour') does not believe it; or allow a longer delay"
        )


def _keep(known: dict[Key, Any], wanted: Callable[[Key], bool]) -> None:
    for key in [key for key in known if not wanted(key)]:
        del known[key]


def shown(time: int) -> str | None:
    """Return a time as text; None: there is none yet, or nothing comes any more. Numbers of versions are no times."""
    if time == NEVER or time >= FIRST_VERSION:
        return None
    try:
        return datetime.fromtimestamp(time / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):  # Python has no dates before the year 1 and behind 9999
        return f"{time} us"
