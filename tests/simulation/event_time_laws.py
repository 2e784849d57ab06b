"""The laws of event time, by their letters, checked with bookkeeping of the simulation's own (design: watermark-statements).

(a) ordered watermarks hold            when a watermark is ordered, no row behind the ordered positions of any stream of its
                                       input, in any life, is below it, unless a source of the stream may fall idle
(b) a watermark never falls            through take-overs and total losses
(c) replicas agree on the watermark    each replica that takes a step has the same watermark behind it, in each life
(d) no row is behind the watermark     unless a source before it may fall idle
(e) each window of a key is given once
(f) a watermark comes to all           while sources stand still, every partition knows the least watermark in time
(g) the answer is that of a batch      over the rows that are not late. If rows were left out after idleness, results lack exactly
                                       the rows that were counted
(h) late rows are the same             in every schedule: the rows that a plain judgement of each partition finds, each once
(i) shown results are shown again      after a total loss: by the laws of streams and of the outside, and by (b) and (c), whose
                                       books are kept over all lives
(j) replicas agree on the version      of a table that is read anew, behind each step, in each life; and versions go forwards
(l) a due watermark goes first         a primary orders at most one step of rows before a watermark that it has to order
(m) a rank goes to better rows only    if ranks are without a window; so replicas may not forget rows

Late rows and the answer are judged in plain Python (``timed_rows``); rows and streams, by the batches that producers give out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from flux.arguments import MARKS
from flux.dataflow.plan import EdgePlan, FromSource, FromStage
from flux.exchange.log import LogEntry, Rows
from flux.joins.join import Join
from flux.joins.refreshed_lookup import RefreshedLookup
from flux.marks.canonical import mark_step
from flux.operators.aggregate import Aggregate
from flux.operators.operator import chain_of
from flux.operators.windowed_groups import WindowedGroups
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.windows.statements import StreamBound, least
from flux.windows.window import END_OF_TIME, NEVER, SessionWindow
from flux.wire.messages import StepKind
from flux.worker.core import WorkerCore
from partitioning.ids import StreamId
from tests.simulation import timed_kinds as kinds
from tests.simulation.process import TURN_S
from tests.simulation.step_watch import watch_steps
from tests.simulation.timed_relations import ONCE_IN, OPERATORS, DedupSink, LookupSink, lacking
from tests.simulation.timed_rows import RIGHT_TIME, TIME, WINDOW_TIME
from tests.simulation.violation import Key, Violation

if TYPE_CHECKING:
    from tests.simulation.checkers import Ledger
    from tests.simulation.run import Simulation
    from tests.simulation.timed_flows import EventTimeFlow, TimedData, TimedNode

#: Turns of a worker between the arrival of a message and its answer.
TURNS = 10

HOLDS = "(a) ordered watermarks hold"
FALLS = kinds.FALLS
AGREE = "(c) replicas agree on the watermark"
COMES = "(f) a watermark comes to everybody"
ANSWER = "(g) the answer is that of a batch"
LATE = "(h) late rows are the same"
VERSIONS = "(j) replicas agree on the version of a table"
IN_FRONT = "(l) a due watermark goes before pending rows"


class EventTimeLaws:
    """The laws of event time over all lives of a query."""

    def __init__(self, flow: EventTimeFlow) -> None:
        self.flow = flow
        #: By partition and step: the watermarks behind committed steps.
        self._official: dict[Key, dict[int, tuple[int, ...]]] = defaultdict(dict)
        #: By partition and step: the version of the table for lookups behind committed steps.
        self._versions: dict[Key, dict[int, int]] = defaultdict(dict)
        #: By stream and partition: positions at which watermarks were ordered, ascending, and the watermarks.
        self._claims: dict[tuple[StreamId, int], list[tuple[int, int]]] = defaultdict(list)
        #: By stream and partition: the least time of each batch that was given, by its number.
        self._times: dict[tuple[StreamId, int], dict[int, int]] = defaultdict(dict)
        self._idles: dict[str, bool] = {}
        #: By stage and partition: the count of left-out rows behind the newest step that has such a count. A stage that ended in
        #: an earlier life has no replica that knows it.
        self.left_behind: dict[tuple[str, int], int] = {}

    def begin(self, ledger: Ledger) -> None:
        """Begin a life."""
        self._ledger, self._plan = ledger, ledger.plan

    # ---- idleness

    def may_be_behind(self, edge: EdgePlan) -> bool:
        """Tell whether rows of an edge may be behind a watermark, because a source before it may fall idle."""
        if isinstance(edge, FromSource):
            event_time = self._plan.sources[edge.source].event_time
            return event_time is not None and event_time.idle is not None
        assert isinstance(edge, FromStage)
        return any(self.may_be_behind(self._plan.edges[each]) for each in self._plan.stages[edge.stage].edges_in)

    def behind(self, stage: str, detail: str) -> None:
        """Note that a row has come behind the watermark of a stage."""
        self._ledger.counts["rows behind a watermark"] += 1
        about = next(each for each in self._plan.stages if each.name == stage)
        if not any(self.may_be_behind(self._plan.edges[each]) for each in about.edges_in):
            raise Violation(kinds.LEFT_OUT, detail)

    # ---- streams

    def given(self, stream: StreamId, entry: LogEntry) -> None:
        """Take a batch that a stream gives out for the first time."""
        edge = self._plan.edges[stream.edge]
        if not edge.states or not isinstance(entry.element, Rows):
            return
        data = entry.element.data
        for partition in entry.touches.tolist():
            time = _least_time(data.rows_of(partition), edge)
            if time is not None:
                self._note(stream, partition, entry.sequence, time)

    def given_row(self, stream: StreamId, partitions: tuple[int, ...], number: int, row: Any) -> None:
        """Take a numbered row that a stream gives out for the first time."""
        edge = self._plan.edges[stream.edge]
        if edge.states and isinstance(row, dict) and (column := _time_of(edge)) is not None and row[column] is not None:
            time = pa.scalar(row[column], pa.timestamp("us")).cast(pa.int64()).as_py()
            for partition in partitions:
                self._note(stream, partition, number, time)

    def _note(self, stream: StreamId, partition: int, number: int, time: int) -> None:
        self._times[stream, partition][number] = time
        for position, watermark in self._claims[stream, partition]:
            if position < number and time < watermark:
                self._not_held(stream, partition, number, time, position, watermark)

    def _claim(self, stream: StreamId, partition: int, position: int, watermark: int) -> None:
        claims = self._claims[stream, partition]
        if not claims or claims[-1][1] < watermark:
            claims.append((position, watermark))
        for number, time in self._times[stream, partition].items():
            if number > position and time < watermark:
                self._not_held(stream, partition, number, time, position, watermark)

    def _not_held(
        self, stream: StreamId, partition: int, number: int, time: int, position: int, watermark: int
    ) -> None:
        edge = self._plan.edges[stream.edge]
        if not self.may_be_behind(edge):
            stage = self._plan.stages[edge.consumer]
            raise Violation(
                HOLDS,
                f"stage {stage.name}, partition {partition} ordered watermark {watermark} behind {position} of stream "
                f"{stream}, and {number} of it has a row of {time}",
            )

    # ---- replicas

    def watch(self, core: WorkerCore, replica: Replica) -> None:
        if replica.stage.timed_inputs:
            _ReplicaWatch(self, core, replica)

    def committed(self, replica: Replica, step: int, watermarks: tuple[int, ...]) -> None:
        """Take the watermarks behind a committed step of a replica."""
        if replica.orders_itself:  # replicas have no steps in common
            return
        official = self._official[replica.stage.id, replica.partition]
        if official.setdefault(step, watermarks) != watermarks:
            raise Violation(AGREE, f"{replica.where}, step {step}: {watermarks} after {official[step]}")
        for other in (step - 1, step + 1):
            if other in official:
                low, high = sorted((step, other))
                if any(after < before for before, after in zip(official[low], official[high], strict=True)):
                    raise Violation(FALLS, f"{replica.where}, step {high}: {official[high]} after {official[low]}")

    def committed_version(self, replica: Replica, step: int, version: int) -> None:
        """Take the version of a table that is in force behind a committed step of a replica."""
        official = self._versions[replica.stage.id, replica.partition]
        if official.setdefault(step, version) != version:
            raise Violation(VERSIONS, f"{replica.where}, step {step}: {version} after {official[step]}")

    # ---- (f)

    def check_known(self, sim: Simulation) -> None:
        """Check law (f) while sources stand still: each partition has the least watermark of its input."""
        for core in sim.hosts():
            for replica in core.replicas.values():
                if not replica.stage.timed_inputs or replica.finished:
                    continue
                expected = {
                    number: self._expected(sim, replica.stage.edges_in[number]) for number in replica.stage.timed_inputs
                }
                known = {number: _watermark_of(replica, number) for number in expected}
                sim.counts["watermarks that everybody knew"] += 1
                sim.counts["watermarks that had to come"] += min(expected.values()) > NEVER
                if any(not self._is_known(replica, number, known[number], expected[number]) for number in known):
                    role = "primary" if replica.primary else "secondary"
                    raise Violation(
                        COMES,
                        f"{replica.where}, {role} on worker {core.worker}: {known}, and sources stand at {expected}",
                    )

    def _is_known(self, replica: Replica, number: int, known: int, expected: int) -> bool:
        """Tell whether a replica has the expected watermark of an input, or a later one if sources may fall idle: a stream that
        has ended may have brought the watermark further than the idle streams that are left."""
        edge = self._plan.edges[replica.stage.edges_in[number]]
        return known == expected or (known > expected and self.may_be_behind(edge))

    def _expected(self, sim: Simulation, number: int) -> int:
        edge = self._plan.edges[number]
        if isinstance(edge, FromStage):
            stage = self._plan.stages[edge.stage]
            known = min(self._expected(sim, stage.edges_in[at]) for at in stage.timed_inputs)
            # A session ends when the watermark is above its end: the time of a result may be the last moment before that.
            window = getattr(stage.make(), "_flux_window", None)
            sessions = isinstance(window, SessionWindow)
            if sessions and stage.order == MARKS and NEVER < known < END_OF_TIME:
                known = known // mark_step(window) * mark_step(window)
            operator = chain_of(stage.make())[0]
            if isinstance(operator, Join) and NEVER < known < END_OF_TIME:
                return known - max(operator.spec.held_back(side) or 0 for side in operator.spec.sides_of_time)
            return known - 1 if sessions and NEVER < known < END_OF_TIME else known
        assert isinstance(edge, FromSource)
        return least(self._bounds(sim, edge))

    def _bounds(self, sim: Simulation, edge: FromSource) -> Iterator[StreamBound]:
        data: TimedData = self.flow.sources[edge.source]
        for partition in range(len(data.batches)):
            if has_ended(sim, edge.source, partition):
                yield StreamBound(ended=True)
            else:
                newest = data.newest(partition) if edge.states else None
                bound = NEVER if newest is None or data.delay is None else newest - data.delay
                yield StreamBound(bound, data.idle is not None and edge.states)

    # ---- the answer

    def wrong(self, sim: Simulation, partly: bool) -> str | None:
        """Compare the rows at the sinks with the answer of a batch. ``partly``: the query has ended early. Return the first
        difference."""
        for sink in self.flow.sinks:
            states = sim.end._states_so_far(sink.name) if partly else sim.end.states(sink.name)
            found = self._found(sim, sink, states)
            expected = Counter(sink.rows())
            sim.counts["rows at sinks of runs that were lost" if partly else "rows at sinks"] += found.total()
            sim.counts["late rows at sinks"] += found.total() if sink.late else 0
            sim.counts["results of windows at sinks"] += found.total() if sink.windowed else 0
            if sink.kind is LookupSink:
                self._check_looked_up(sink, found, partly)
                continue
            if sink.kind is DedupSink:
                self._check_once(sink, list(found.elements()), partly)
                continue
            if sink.some:
                self._check_some(sink, found, expected, partly)
                continue
            if found == expected:
                continue
            missing, extra = expected - found, found - expected
            if partly and (self._is_early(sink, found, expected) or (sink.windowed and self._left_out(sim, sink))):
                continue
            if sink.windowed and not partly and self._left_out(sim, sink):
                wrong = self._wrong_sums(sim, sink, found, expected)
                if wrong is None:
                    continue
                raise Violation(ANSWER, wrong)
            detail = f"{sink.name}: missing {list(missing.items())[:3]}, too many {list(extra.items())[:3]}"
            raise Violation(LATE if sink.late else ANSWER, detail)
        return None

    @staticmethod
    def _check_looked_up(sink: TimedNode, found: Counter[Any], partly: bool) -> None:
        """Check that each row was given once, with a row of the table that has the same key."""
        given, expected = Counter(row[:-1] for row in found.elements()), Counter(sink.rows())
        if given - expected or (not partly and given != expected):
            raise Violation(ANSWER, f"{sink.name}: missing {expected - given}, too many {given - expected}")
        assert sink.inputs[0].table is not None
        keys = {row[0]: row[1] for row in sink.inputs[0].table.all()}
        if wrong := [row for row in found if row[-1] is not None and keys[row[-1]] != row[1]]:
            raise Violation(ANSWER, f"{sink.name}: {wrong[0]} has a row of key {keys[wrong[0][-1]]}")

    @staticmethod
    def _check_once(sink: TimedNode, found: list[Any], partly: bool) -> None:
        given = sink.inputs[0]
        if not partly and (detail := lacking(found, given.rows(), given.ttl)):
            raise Violation(ONCE_IN, f"{sink.name}: {detail}")

    @staticmethod
    def _check_some(sink: TimedNode, found: Counter[Any], expected: Counter[Any], partly: bool) -> None:
        """Check rows whose choice depends on the order in which they meet: each exists and comes once, and no key is left out."""
        lost = set() if partly else {row[1] for row in expected} - {row[1] for row in found}
        if found - expected or lost:
            raise Violation(
                ANSWER, f"{sink.name}: too many {list((found - expected).items())[:3]}, lost are keys {lost}"
            )

    def _found(self, sim: Simulation, sink: TimedNode, states: list[dict[str, Any]]) -> Counter[Any]:
        if sink.kind is kinds.NewestSink:
            return Counter((*window, *newest) for state in states for window, newest in state["newest"].items())
        if sink.kind is kinds.PlaceSink:
            return Counter(row for state in states for row in state["newest"].values())
        outside = sim.outside.rows_of(sink.name)
        in_state = bool(states) and "rows" in states[0]  # a query that lost all replicas has no states
        return Counter([row for state in states for row in state["rows"]] if in_state else outside)

    @staticmethod
    def _is_early(sink: TimedNode, found: Counter[Any], expected: Counter[Any]) -> bool:
        """Tell whether a query that ended early has given only rows that belong to the whole answer."""
        if sink.kind is kinds.PlaceSink:
            places = sink.inputs[0].places
            assert places is not None
            best = {places.place(row): places.order(row) for row in expected}
            return all(places.place(row) in best and places.order(row) >= best[places.place(row)] for row in found)
        if sink.kind is not kinds.NewestSink:
            return not found - expected
        counts = {row[:-2]: row[-2] for row in expected}
        return all(row[-2] <= counts.get(row[:-2], 0) for row in found)

    def _windowed_stages(self, sink: TimedNode) -> list[TimedNode]:
        """Return the stages with windows before a sink, the nearest first."""
        found, node = list[Any](), sink.inputs[0]
        while issubclass(node.kind or object, Aggregate):
            found.append(node)
            node = node.inputs[0]
        return found

    def _left_out(self, sim: Simulation, sink: TimedNode) -> int:
        """Count the rows that were left out behind watermarks before a sink. A query that ended early does not know all."""
        return sum(left_out(sim, node.name) for node in self._windowed_stages(sink))

    def _wrong_sums(self, sim: Simulation, sink: TimedNode, found: Counter[Any], expected: Counter[Any]) -> str | None:
        """Compare counts after rows were left out because of idleness, and return the first difference."""
        sim.counts["answers that lack rows after idleness"] += 1
        stages = self._windowed_stages(sink)
        rows, least_rows = (sum(row[-2] * times for row, times in each.items()) for each in (expected, found))
        left = left_out(sim, stages[0].name)
        if least_rows > rows:
            return f"{sink.name}: {least_rows} rows in windows, and {rows} are there"
        if len(stages) == 1 and stages[0].fold and rows - least_rows != left * stages[0].fold:
            return (
                f"{sink.name}: {rows - least_rows} rows are missing in windows, and {left} were left out of {stages[0].fold} "
                "windows each"
            )
        return None

    def check_late_counts(self, sim: Simulation) -> None:
        """Check, at the end of a query that went well, that readers have counted the late rows of their partitions."""
        for core in sim.hosts():
            for (source, partition), streams in core.sources.items():
                data = self.flow.sources[source]
                counted = late_count(streams)
                if data.delay is not None and counted is not None and streams.ended:
                    late = len(data.judged(partition)[1])
                    sim.counts["late rows counted"] += late
                    if counted != late:
                        raise Violation(
                            LATE, f"partition {partition} of {data.name}: {counted} counted, {late} are late"
                        )


class _ReplicaWatch:
    """The watermarks of one replica."""

    def __init__(self, laws: EventTimeLaws, core: WorkerCore, replica: Replica) -> None:
        self._laws, self._core, self._replica = laws, core, replica
        self._behind: dict[int, tuple[int, ...]] = {}
        #: By step: the version of the table behind it, in a lookup.
        self._versions: dict[int, int] = {}
        self._final = replica.applied
        self._before = _watermarks_of(replica)
        #: Steps of rows that were ordered in succession while there was a watermark to order.
        self._rows_first = 0
        #: By stream: the last number that is applied.
        self._applied: dict[StreamId, int] = {}
        for stream, inbound in core.subscriptions.streams.items():
            if stream.edge in replica.stage.edges_in:
                self._applied[stream] = inbound.next_to_apply(replica.partition) - 1
        watch_steps(replica, lambda now: None, self._ends)
        append = replica.order.append

        def watched_append(entry: Any) -> int:
            step = append(entry)
            self._ordered(entry)
            return step

        replica.order.append = watched_append  # type: ignore[method-assign]

    def _ordered(self, entry: Any) -> None:
        """Check law (a) for an entry that the primary has just ordered."""
        watermarks = ordered_watermarks(entry)
        if watermarks is None:
            self._check_rows_first(entry)
            return
        self._rows_first = 0
        replica, positions = self._replica, dict(self._applied)
        self._laws._ledger.counts["watermarks ordered"] += 1
        for each in replica.order.since(replica.applied):
            for edge, producer, through in each.slices:
                stream = StreamId(edge, producer)
                positions[stream] = max(positions.get(stream, -1), through)
        for number in replica.stage.timed_inputs:
            edge, watermark = replica.stage.edges_in[number], watermarks[number]
            if self._laws._plan.edges[edge].states and watermark > NEVER:
                for producer in range(self._laws._plan.edges[edge].producers):
                    stream = StreamId(edge, producer)
                    self._laws._claim(stream, replica.partition, positions.get(stream, -1), watermark)

    def _check_rows_first(self, entry: Any) -> None:
        """Check law (l). No watermark is ordered while other replicas are too far behind."""
        replica = self._replica
        due = replica.watermark_offered and replica.waits._may_add(replica.order)
        self._rows_first = (self._rows_first + (entry.kind is StepKind.SLICES)) if due else 0
        if self._rows_first > 1:
            raise Violation(IN_FRONT, f"{replica.where}: {self._rows_first} steps of rows in succession")

    def _ends(self, step: ReplicaStep, applied: bool | None) -> None:
        if not applied:
            return
        replica, laws = self._replica, self._laws
        for edge, producer, through in step.entry.slices:
            self._applied[StreamId(edge, producer)] = through
        watermarks = _watermarks_of(replica)
        if any(after < before for before, after in zip(self._before, watermarks, strict=True)):
            raise Violation(FALLS, f"{replica.where}, step {step.number}: {watermarks} after {self._before}")
        laws._ledger.counts["watermarks that secondaries took"] += watermarks != self._before and not replica.primary
        self._before = self._behind[step.number] = watermarks
        if isinstance(operator := chain_of(replica.operator)[0], RefreshedLookup):
            self._versions[step.number] = operator.version
        while self._final < min(replica.applied, replica.order.committed):
            if self._final in self._behind:
                laws.committed(replica, self._final, self._behind.pop(self._final))
            if self._final in self._versions:
                laws.committed_version(replica, self._final, self._versions.pop(self._final))
            self._final += 1
        self._check_left_out(step)

    def _check_left_out(self, step: ReplicaStep) -> None:
        groups = groups_of(self._replica)
        operator = chain_of(self._replica.operator)[0]
        behind = 0 if groups is None else groups.behind_watermark
        if isinstance(operator, OPERATORS):
            behind = operator._flux_left_out()[0]
        if behind:
            stage = self._replica.stage
            if not any(self._laws.may_be_behind(self._laws._plan.edges[each]) for each in stage.edges_in):
                raise Violation(
                    kinds.LEFT_OUT,
                    f"{self._replica.where}, step {step.number}: {behind} rows are left out",
                )
            self._laws._ledger.counts["steps behind which rows were left out"] += 1
            self._laws.left_behind[stage.name, self._replica.partition] = behind


# ---- names of the product


def _time_of(edge: EdgePlan) -> str | None:
    """Return the column of event time of an edge, if it travels."""
    return next((name for name in (WINDOW_TIME, TIME, RIGHT_TIME) if name in edge.schema.names), None)


def _least_time(rows: pa.RecordBatch, edge: EdgePlan) -> int | None:
    column = _time_of(edge)
    times = [] if column is None else rows.column(column).cast(pa.int64()).drop_null().to_pylist()
    return min(times, default=None)


def ordered_watermarks(entry: Any) -> Any:
    """Return the watermark of each input that an entry orders; None if the entry orders none."""
    return getattr(entry, "watermarks", None) or None


def _watermarks_of(replica: Replica) -> tuple[int, ...]:
    return tuple(replica.context.watermarks) or (NEVER,) * max(len(replica.stage.schemas), 1)


def _watermark_of(replica: Replica, number: int) -> int:
    return _watermarks_of(replica)[number]


def groups_of(replica: Any) -> WindowedGroups | None:
    """Return the windows of a replica's operator, if it has any."""
    operator = chain_of(replica.operator)[0]
    groups = getattr(operator, "_flux_groups", None)
    return groups if isinstance(groups, WindowedGroups) else None


def left_out(sim: Simulation, name: str) -> int:
    """Count the rows behind the watermark that the partitions of a stage have left out."""
    stage = next(stage for stage in sim.plan.stages if stage.name == name)
    count = 0
    for partition in range(stage.partitions):
        found: list[Any] = sim.ledger.replicas_of(stage.id, partition)
        done = [replica for replica in found if replica.complete] or found
        groups = groups_of(max(done, key=lambda replica: replica.applied)) if done else None
        earlier = sim.ledger.event_time.left_behind.get((name, partition), 0)
        count += earlier if groups is None else groups.behind_watermark
    return count


def late_count(streams: Any) -> int | None:
    """Return the number of late rows that a reader has counted, in all lives; None if the reader does not judge rows."""
    return None if streams.timed is None else int(streams.timed.late)


def has_ended(sim: Simulation, source: int, partition: int) -> bool:
    """Tell whether a partition of a source has come to its end, in this life or before."""
    if sim.life is not None and sim.life.had_ended(sim, source, partition):
        return True
    return any(
        streams.ended
        for core in sim.hosts()
        for (number, at), streams in core.sources.items()
        if (number, at) == (source, partition)
    ) or any(job.source == source and partition in job.done for job in sim.spark.jobs)


def stands_for_s(sim: Simulation) -> float:
    """Return the virtual seconds after which each partition must know the least watermark, while sources stand still."""
    settings, faults = sim.plan.settings, sim.faults
    interval = getattr(settings, "watermark_interval", 0.05)
    way = 10 * faults.delay_s + 2 * settings.ack_interval + TURNS * TURN_S * faults.slowness
    idle = max((data.idle or 0 for data in sim.ledger.event_time.flow.sources), default=0) / 1e6
    return idle + len(sim.plan.stages) * (2 * interval + 2 * settings.resend_timeout + 3 * way) + 0.1


class StandStill:
    """A pause of the sources of lingering flows: they come to their end only after law (f) was checked."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._since: float | None = None
        self._state: Any = None
        self.over = False

    def may_end(self, source: int, partition: int) -> bool:
        """Tell whether a partition of a source may come to its end. Each partition that has given all its rows asks."""
        sim = self._sim
        laws = sim.ledger.event_time
        if laws is not None and partition in laws.flow.sources[source].lasting:
            return self._others_ended()
        if self.over or laws is None or not laws.flow.lingers or sim.controller.phase != "running":
            return True
        if partition in laws.flow.sources[source].early:
            return True
        state = self._standing()
        now = sim.world.now
        if state is None or state != self._state:
            self._since, self._state = (None if state is None else now), state
        elif self._since is not None and now - self._since >= stands_for_s(sim):
            laws.check_known(sim)
            sim.counts["runs whose sources stood still"] += 1
            self.over = True
        return self.over

    def _others_ended(self) -> bool:
        sources = zip(self._sim.plan.sources, self._sim.dataflow.sources, strict=True)
        return all(
            has_ended(self._sim, source.id, partition)
            for source, data in sources
            for partition in range(len(data.batches))
            if partition not in data.lasting  # type: ignore[attr-defined]
        )

    def _standing(self) -> Any:
        """Return a value that stays the same while nothing but watermarks moves; None while anything else does."""
        sim = self._sim
        hosts = sim.hosts()
        if not sim.network.calm or not sim.settled or sim.world.now < sim.network.disturbed_until or not sim.all_in:
            return None
        held = {key for process in sim.by_node.values() if not process.dead for key in process._held_back}
        worker_read = [
            (source.id, partition) for source in sim.plan.sources for partition in range(source.worker_partitions)
        ]
        if any(key not in held and not has_ended(sim, *key) for key in worker_read):
            return None
        replicas = [replica for core in hosts for replica in core.replicas.values()]
        if any(replica.waits or replica.order.committed < replica.order.end for replica in replicas):
            return None
        table = sim.controller.table
        done = tuple(sorted((job.source, len(job.done)) for job in sim.spark.jobs))
        return None if table is None else (table.epoch, done, sum(replica.rows_in for replica in replicas))
