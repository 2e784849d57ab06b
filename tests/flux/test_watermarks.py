"""Watermarks from sources to windows in one worker: late rows, statements, idleness, steps that move the watermark (design:
watermark-statements)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import pyarrow as pa
import pytest

import flux
from flux.dataflow.availability import Availability
from flux.dataflow.plan import ById, EventTime, FromSource, Plan, Timed
from flux.dataflow.source_reader import FunctionReader, opened
from flux.errors import ProtocolError
from flux.exchange.producer import ToWorker
from flux.wire.messages import (
    Bound,
    Hello,
    OrderEntry,
    Orders,
    OrdersSeen,
    PartitionOrder,
    PartitionSeen,
    Reset,
    StepKind,
)
from flux.wire.statistics import ReaderState
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection
from flux.worker.report import silent
from flux.worker.report import stats as stats_of
from partitioning.ids import SourcePartition
from partitioning.table import ReplicaAt, Table
from tests.flux.one_worker import SINK, planned, table, worker

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us"))])
OUTPUT = pa.schema([("end", pa.int64()), ("rows", pa.int64())])


def rows(*times: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array([0] * len(times), pa.int64()), pa.array(times, pa.timestamp("us"))], schema=SCHEMA)


@flux.stage(key="key", partitions=2, window=flux.window("ts", "10 microseconds"))
class Counted(flux.Aggregate):
    n = flux.count()


class Kept(flux.Operator):
    """A sink that keeps its rows, and the watermarks that it is told."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.rows: list[dict[str, Any]] = []
        self.watermarks: list[int] = []

    def process(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.to_pylist()

    def on_watermark(self) -> None:
        self.watermarks.append(self.context.watermark)


class Script:
    """A source whose partitions give the items that a test has put in: batches, None for nothing, flux.SILENT."""

    def __init__(self, partitions: int = 1) -> None:
        self.given: list[list[Any]] = [[] for _ in range(partitions)]
        #: Partitions that get no answer from outside.
        self.silent: set[int] = set()

    def read(self, partition: int) -> Iterator[Any]:
        given = self.given[partition]
        while True:
            if not given:
                yield flux.SILENT if partition in self.silent else None
            elif (each := given.pop(0)) == "end":
                return
            else:
                yield each


def timed(
    plan: Plan,
    delay: int = 0,
    idle: int | None = None,
    advance: bool = False,
    drift: int = 0,
    may_be_silent: bool = False,
    availability: Availability | None = None,
) -> Plan:
    """Give the source of a plan an event time, whose on-time rows go to the first stage."""
    source = replace(plan.sources[0], event_time=EventTime("ts", 1, delay, idle, advance), may_be_silent=may_be_silent)
    first = plan.edges[0]
    assert isinstance(first, FromSource)
    edges = [replace(first, timed=Timed.ON_TIME, states=True, quantum=10)]
    edges += [replace(edge, states=True) for edge in list(plan.edges)[1:]]
    stages = [replace(stage, timed_inputs=(0,)) for stage in plan.stages]
    stages[0] = replace(stages[0], availability=availability)
    settings = replace(plan.settings, watermark_drift=drift / 1e6)
    return replace(plan, sources=ById([source]), stages=ById(stages), edges=ById(edges), settings=settings)


class Counting:
    """A reader that counts its pauses itself: the broker has answered as often that there is nothing."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.answers = batches, 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        return self.batches.pop(0) if self.batches else None

    def pauses(self) -> int:
        return self.answers


class Windows:
    """A worker with a script, the counts of its rows by window, and a stage behind that keeps them."""

    def __init__(self, partitions: int = 1, **options: Any) -> None:
        self.script = Script(partitions)
        source = flux.source(self.script.read, SCHEMA, partitions)
        self.plan = timed(planned(Counted, flux.stage(partitions=1)(Kept), source=source), **options)
        self.core = WorkerCore(self.plan, 0)
        self.core.on_table(table(self.plan), 0.0)
        self.now = 0.0

    def run(self, seconds: float = 0.2) -> None:
        end = self.now + seconds
        while self.now < end:
            while self.core.read(True, self.now):
                pass
            for _ in self.core.poll(self.now):
                pass
            while self.core.work(self.now):
                pass
            self.now += 0.005

    @property
    def kept(self) -> Kept:
        operator = self.core.replicas[1, 0].operator
        assert isinstance(operator, Kept)
        return operator

    @property
    def counts(self) -> dict[int, int]:
        return {int(row["window_end"].timestamp() * 1e6): row["n"] for row in self.kept.rows}


def test_a_window_closes_when_the_watermark_has_passed_it_and_no_row_of_it_is_missing() -> None:
    windows = Windows(delay=3)
    windows.script.given[0] += [rows(1, 5, 9), rows(12, 9)]
    windows.run()
    assert windows.counts == {}, "the watermark is 9"
    windows.script.given[0] += [rows(13)]
    windows.run()
    assert windows.counts == {10: 4}


@pytest.mark.parametrize(
    ("kind", "watermarks", "complains"),
    [
        (StepKind.WATERMARK, [5], False),
        (StepKind.WATERMARK, [], True),
        (StepKind.WATERMARK, [5, 5], True),
        (StepKind.TICK, [], False),
        (StepKind.TICK, [5], True),
    ],
)
def test_an_order_with_another_number_of_watermarks_than_inputs_is_malformed(
    kind: StepKind, watermarks: list[int], complains: bool
) -> None:
    core, entry = Windows().core, OrderEntry(1.0, 1.0, [], kind, watermarks=watermarks)
    orders = Orders([PartitionOrder(0, 0, 0, 1, 0, [OrderEntry(1.0, 1.0, []), entry], 0)])
    if complains:
        with pytest.raises(ProtocolError, match=r"^stage Counted, partition 0: step 1 of kind .* has . watermarks"):
            core.on_data_plane("peer", orders, [], 0.0)
    else:
        core.on_data_plane("peer", orders, [], 0.0)
    assert core.counters.stale == (not complains), "it is the primary itself"


def test_an_order_with_watermarks_for_a_stage_without_event_time_is_malformed() -> None:
    core = worker(planned(SINK))
    for watermarks in ([5], []):
        entry = OrderEntry(1.0, 1.0, [], StepKind.WATERMARK, watermarks=watermarks)
        with pytest.raises(ProtocolError, match="no event time"):
            core.on_data_plane("peer", Orders([PartitionOrder(0, 0, 0, 1, 0, [entry], 0)]), [], 0.0)
    core.on_data_plane("peer", Orders([PartitionOrder(77, 0, 0, 1, 0, [entry], 0)]), [], 0.0)
    assert core.counters.stale == 1


def test_a_worker_reports_before_its_first_table() -> None:
    core = WorkerCore(Windows().plan, 0)
    assert [stage["times"] for stage in stats_of(core)["stages"]] == [[], []]
    core.watermarks.note_all(0.0)
    core.watermarks.look(1.0)


def test_a_late_row_is_left_out_and_counted() -> None:
    windows = Windows(delay=3)
    windows.script.given[0] += [rows(1, 20), rows(16, 17), rows(40)]
    windows.run()
    assert windows.counts == {10: 1, 20: 1, 30: 1}
    (streams,) = windows.core.sources.values()
    assert streams.timed is not None
    assert streams.timed.late == 1


def test_a_window_ends_at_once_although_its_stage_is_to_look_again_later() -> None:
    """End the window at once, although a look for a watermark that ends no window is due 50 ms after the one before."""
    windows = Windows()
    for time, seconds in ((1, 0.2), (5, 0.01), (7, 0.01), (12, 0.02)):
        windows.script.given[0] += [rows(time)]
        windows.run(seconds)
    assert windows.counts == {10: 3}


def test_the_least_of_two_partitions_holds_the_watermark() -> None:
    windows = Windows(partitions=2)
    windows.script.given[0] += [rows(1, 55)]
    windows.run()
    assert windows.counts == {}
    windows.script.given[1] += [rows(2, 31)]
    windows.run()
    assert windows.counts == {10: 2}
    windows.script.given[1] += ["end"]
    windows.run()
    assert windows.counts == {10: 2, 40: 1}, "an ended stream holds nothing"


def test_an_idle_partition_holds_the_watermark_no_longer_and_a_silent_one_does() -> None:
    windows = Windows(partitions=2, idle=1_000_000)
    windows.script.given[0] += [rows(1, 55)]
    windows.script.silent.add(1)
    windows.run(1.5)
    assert windows.counts == {}
    windows.script.silent.clear()
    windows.run(0.9)
    assert windows.counts == {}, "the time of silence does not count"
    windows.run(0.3)
    assert windows.counts == {10: 1}


def test_the_watermark_of_a_stage_goes_to_the_next_one_behind_its_rows() -> None:
    windows = Windows()
    windows.script.given[0] += [rows(1, 12), rows(25)]
    windows.run()
    assert windows.counts == {10: 1, 20: 1}
    assert windows.kept.watermarks[-1] == 25
    windows.script.given[0] += ["end"]
    windows.run()
    assert windows.counts == {10: 1, 20: 1, 30: 1}
    assert windows.kept.watermarks[-1] == flux.END_OF_TIME


def test_a_worker_that_gets_nothing_but_statements_greets_anew_when_its_connection_is_gone() -> None:
    windows = Windows()
    bound = Bound(0, 0, 1, 0, 0, 0, 5)
    windows.core.on_data_plane("another connection", bound, [], 0.0)
    answers = [effect.message for effect in windows.core.poll(0.0) if isinstance(effect, ToConnection)]
    assert [answer for answer in answers if isinstance(answer, Reset)] == [Reset(0, 0, "say Hello first")]


def test_a_producer_that_goes_on_under_an_earlier_handshake_is_told_of_the_newest_one() -> None:
    """Repeat the Resume, which was lost, at the third statement: statements are not acked, and two of them may have
    been under way when the Resume was sent."""
    windows = Windows()
    windows.script.given[0] += [rows(1, 12)]
    windows.run()
    core, stream = windows.core, next(iter(windows.core.subscriptions.streams.values()))
    connection, before = stream.feed.connection, stream.feed.nonce
    core.on_data_plane(connection, Hello(*stream.stream, 0, 0, 0), [], windows.now)
    newest = stream.feed.nonce
    assert newest > before

    for watermark, due in ((5, False), (6, False), (7, True)):
        core.on_data_plane(connection, Bound(*stream.stream, before, 0, 0, 0, watermark), [], windows.now)
        assert stream.ack_due is due, watermark


def test_a_watermark_that_waits_for_a_slow_secondary_goes_on_when_it_has_applied_some() -> None:
    plan = timed(planned(flux.stage(partitions=1, replicas=2)(Kept), source=flux.source(Script().read, SCHEMA, 1)))
    plan = replace(plan, settings=replace(plan.settings, replicas_max_steps_behind=1))
    core = WorkerCore(plan, 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0), ReplicaAt(5, 0)),),), ((5,),), {0: "", 5: ""}), 0.0)
    replica, watermark, done = core.replicas[0, 0], 0, 0

    def go_on() -> int:
        nonlocal watermark
        watermark += 10
        assert replica.clock is not None
        replica.clock.offer([watermark], 0.0)
        core.turns.wake(replica.key)
        return core.work(0.0)

    def seen(applied: int) -> None:
        core.on_answer(5, OrdersSeen([PartitionSeen(0, 0, 0, replica.leads_since, done, applied, 0, 0)]), 0.0)

    seen(0)
    while go_on():
        done += 1
    assert done == 2
    seen(1)
    assert core.work(0.0), "nobody else wakes it"


def test_the_order_of_a_step_that_ends_a_window_waits_for_no_company_on_a_busy_worker() -> None:
    script = Script()
    counted = flux.stage(key="key", partitions=1, replicas=2, window=flux.window("ts", "10 microseconds"))(
        Counted.target
    )
    plan = timed(planned(counted, flux.stage(partitions=1)(Kept), source=flux.source(script.read, SCHEMA, 1)))
    core = WorkerCore(plan, 0)
    both, alone = (ReplicaAt(0, 0), ReplicaAt(5, 0)), (ReplicaAt(0, 0),)
    core.on_table(Table(0, ((both,), (alone,)), ((0,),), {0: "", 5: ""}), 0.0)
    replica = core.replicas[0, 0]
    core.on_answer(5, OrdersSeen([PartitionSeen(0, 0, 0, replica.leads_since, 0, 0, 0, 0)]), 0.0)

    def told(now: float) -> list[StepKind]:
        """Go on, and return the steps that worker 5 is told of while there is other work."""
        while core.read(True, now) or core.work(now):
            pass
        core.turns.wake(replica.key)
        orders = [each.message for each in core.poll(now) if isinstance(each, ToWorker) and each.worker == 5]
        return [
            entry.kind for each in orders if isinstance(each, Orders) for item in each.items for entry in item.entries
        ]

    script.given[0] += [rows(1)]
    while not replica.applied:
        told(0.0)
    assert told(1.0) != [], "these have waited for long"
    script.given[0] += [rows(12)]
    kinds = [kind for tick in range(1, 6) for kind in told(1.0 + tick / 1000)]
    assert kinds[-1:] == [StepKind.WATERMARK]


def test_the_watermark_of_sessions_is_below_the_last_instant_of_those_that_are_open() -> None:
    """Stay one instant below the watermark: a session whose end is the watermark is open, and its row will have the
    time before its end."""
    sessions = flux.stage(key="key", window=flux.session_window("ts", "5 microseconds"))(Counted.target)
    operator = sessions.make()
    context = flux.Context("s", key=("key",), schemas=(SCHEMA,), output_mode="append", watermarks=[25])
    operator.open(context)
    assert operator.output_watermark() == 24
    context.watermarks = [flux.END_OF_TIME]
    assert operator.output_watermark() == flux.END_OF_TIME


def test_the_watermark_of_an_idle_source_goes_on_with_the_clock_if_it_is_told_to() -> None:
    """Begin the worker's wall clock with the test, so that the last window ends after idle, delay and its own
    length."""
    windows = Windows(delay=100_000, idle=300_000, advance=True)
    windows.script.given[0] += [rows(1, 200_001)]
    windows.run(0.55)
    assert windows.counts == {10: 1}
    windows.run(0.3)
    assert windows.counts == {10: 1, 200_010: 1}


def test_a_reader_whose_broker_does_not_answer_is_not_idle() -> None:
    windows = Windows(partitions=2, idle=500_000)
    silent = Counting([])
    windows.script.read = lambda partition: silent if partition else iter(Counting([rows(1, 55)]))  # type: ignore[method-assign]
    windows.core.reading.open_reader = lambda about, partition, position: opened(
        FunctionReader(windows.script.read), partition, None
    )
    silent.answers = 3
    windows.run(1.0)
    assert windows.counts == {}, "the last answer came before the time was over"
    silent.answers = 4
    windows.run(0.1)
    assert windows.counts == {10: 1}
    streams = windows.core.sources[SourcePartition(0, 1)]
    assert streams.idle
    windows.run(5.1)
    assert not streams.idle
    silent.answers += 1
    windows.run(0.2)
    assert not streams.silent
    assert not streams.idle, "its time begins anew after silence"
    silent.answers += 1
    windows.run(0.6)
    assert not streams.idle
    silent.answers += 1
    windows.run(0.2)
    assert streams.idle


def test_a_reader_that_gets_no_answer_is_told_of_whether_or_not_it_may_be_idle() -> None:
    """Tell of a reader whose pauses have not risen since its last rows."""
    windows = Windows()
    counting = Counting([rows(1)])
    windows.script.read = lambda partition: iter(counting)  # type: ignore[method-assign]
    windows.core.reading.open_reader = lambda about, partition, position: opened(
        FunctionReader(windows.script.read), partition, None
    )

    def state() -> ReaderState:
        (time,) = windows.core.reading.times()
        return time.state

    windows.run(4.5)
    assert state() is ReaderState.READING
    windows.run(1.0)
    assert state() is ReaderState.SILENT
    counting.answers += 1
    windows.run(0.2)
    assert state() is ReaderState.READING
    windows.run(5.5)
    counting.batches.append(rows(2))
    windows.run(0.2)
    assert state() is ReaderState.READING


def silences(windows: Windows) -> list[tuple[int, float, str]]:
    return [(said.partition, said.since, said.reason) for said in silent(windows.core.reading)]


def test_silence_is_told_early_and_idleness_does_not_depend_on_it() -> None:
    """Tell of a reader without an answer after 300 ms; its being idle goes by five seconds, as without availability."""
    counting = Counting([rows(1)])
    for may_be_silent in (True, False):
        windows = Windows(idle=3_000_000, may_be_silent=may_be_silent)
        counting = Counting([rows(1)])
        windows.script.read = lambda partition, it=counting: iter(it)  # type: ignore[method-assign, misc]
        windows.core.reading.open_reader = lambda about, partition, position, script=windows.script: opened(
            FunctionReader(script.read), partition, None
        )
        windows.run(0.2)
        assert silences(windows) == []
        windows.run(0.5)
        assert len(silences(windows)) == may_be_silent
        if may_be_silent:
            ((_, since, why),) = silences(windows)
            assert since == pytest.approx(0.0, abs=0.15)
            assert why == "its reader has not come back since"
        for _ in range(40):  # an answer each 100 ms: that it has nothing
            counting.answers += 1
            windows.run(0.1)
        assert silences(windows) == []
        assert windows.core.sources[SourcePartition(0, 0)].idle
        windows.run(1.0)
        assert windows.core.sources[SourcePartition(0, 0)].idle, "short silence ends no idleness"


def test_a_reader_that_says_that_it_gets_no_answer_is_silent_until_it_has_one() -> None:
    windows = Windows(partitions=2, may_be_silent=True)
    windows.run(0.2)
    windows.script.silent.add(1)
    windows.run(0.6)
    ((partition, since, why),) = silences(windows)
    assert (partition, why) == (1, "it has said that it gets no answer")
    assert since == pytest.approx(0.2, abs=0.15)
    windows.script.silent.clear()
    windows.run(0.2)
    assert silences(windows) == []


def test_a_reader_whose_log_is_full_is_not_asked_so_it_is_not_silent() -> None:
    windows = Windows(may_be_silent=True)
    windows.run(0.1)
    windows.core.reading.stopped = True
    windows.run(1.0)
    assert silences(windows) == []


# ---- alignment


def state_of(windows: Windows, partition: int) -> ReaderState:
    return next(time.state for time in windows.core.reading.times() if time.partition == partition)


def test_a_reader_that_is_too_far_ahead_of_another_worker_waits() -> None:
    windows = Windows(partitions=2, drift=15)
    windows.core.reading.align(20)
    windows.script.given[0] += [rows(1, 55)]
    windows.run(0.05)
    assert state_of(windows, 0) is ReaderState.HELD
    windows.script.given[0] += [rows(60)]
    windows.run(0.05)
    assert len(windows.script.given[0]) == 1
    assert windows.core.reading.due(windows.now) < inf, "a partition without a watermark is read"
    windows.core.reading.align(40)
    windows.run(0.05)
    assert not windows.script.given[0]
    assert state_of(windows, 0) is ReaderState.HELD
    windows.core.reading.align(flux.NEVER)
    windows.run(0.05)
    assert state_of(windows, 0) is ReaderState.READING


def test_a_reader_that_is_too_far_ahead_of_another_one_of_its_worker_waits_and_that_one_does_not() -> None:
    windows = Windows(partitions=2, drift=15)
    windows.script.given[0] += [rows(1, 55)]
    windows.script.given[1] += [rows(20)]
    windows.run(0.05)
    assert [state_of(windows, at) for at in (0, 1)] == [ReaderState.HELD, ReaderState.READING]
    windows.script.given[0] += [rows(56)]
    for time in range(21, 40):
        windows.script.given[1] += [rows(time)]
        windows.run(0.03)
    assert [len(given) for given in windows.script.given] == [1, 0]
    windows.script.given[1] += ["end"]
    windows.run(0.05)
    assert not windows.script.given[0], "an ended partition holds no other back"


def test_a_reader_that_gives_rows_again_is_not_held_back() -> None:
    """Let the reader go on, because an ordered step may wait for these rows, and all watermarks with it."""
    windows = Windows(drift=15)
    windows.core.reading.align(20)
    windows.script.given[0] += [rows(55)]
    windows.run(0.05)
    windows.script.given[0] += [rows(60)]
    windows.run(0.05)
    assert len(windows.script.given[0]) == 1
    for producer in windows.core.sources[SourcePartition(0, 0)].producers:
        producer.earlier.front = 2
    assert state_of(windows, 0) is ReaderState.READING
    windows.run(0.05)
    assert not windows.script.given[0], "row 1 was given before"
    assert state_of(windows, 0) is ReaderState.HELD


def test_a_reader_that_is_held_back_is_not_idle() -> None:
    windows = Windows(partitions=2, idle=50_000, drift=15)
    windows.script.given[0] += [rows(1, 55)]
    windows.run(0.1)
    streams = windows.core.sources[SourcePartition(0, 0)]
    assert streams.idle
    windows.core.reading.align(20)
    windows.run(0.1)
    assert not streams.idle, "it may have rows for which it is not asked"
    windows.core.reading.align(flux.NEVER)
    windows.run(0.03)
    assert not streams.idle, "the time of being held back does not count"
    windows.run(0.1)
    assert streams.idle
