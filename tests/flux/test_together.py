"""Operators of several partitions in one call give the same results as each alone with its own rows (design:
together)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_worker import Kept, kept, planned, work, worker

import flux
from controller.planning.compiler import compile_plan
from flux.errors import UserCodeError
from flux.exchange.producer import Producer
from flux.operators.operator import Chained, Context, JointOutput
from flux.replica import batched_steps as together
from flux.replica.output import EdgeOutput
from flux.settings import Settings
from flux.wire.checksum import extend
from flux.wire.pulse import PARTITION
from flux.worker.core import WorkerCore
from partitioning.clustering import Clustered
from partitioning.errors import FailedPartition
from partitioning.ids import PartitionKey, StreamId

SCHEMA = pa.schema(
    [("k", pa.int32()), ("word", pa.string()), ("i", pa.int16()), ("u", pa.uint64()), ("f", pa.float32())]
)
KEYS = {"one word": ("k",), "a string": ("word",), "several": ("k", "word")}


class All(flux.Aggregate):
    rows = flux.count()
    some, words = flux.count("i"), flux.count("word")
    total, mean, least, most = flux.sum("i"), flux.mean("i"), flux.min("i"), flux.max("i")
    unsigned, greatest = flux.min("u"), flux.max("u")
    reals, average, low, high = flux.sum("f"), flux.mean("f"), flux.min("f"), flux.max("f")


def made(key: Sequence[str], partitions: int, mode: str = "update") -> list[Any]:
    operators = [All() for _ in range(partitions)]
    for partition, operator in enumerate(operators):
        operator.open(Context("all", partition, partitions, tuple(key), (SCHEMA,), mode))
    return operators


def batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, t) for c, t in zip(columns, SCHEMA.types, strict=True)], schema=SCHEMA
    )


ROW = st.tuples(
    st.none() | st.integers(-3, 200),
    st.none() | st.sampled_from(["", "a", "b" * 30, "é"]),
    st.none() | st.integers(-100, 100),
    st.none() | st.integers(0, 2**64 - 1),
    st.none() | st.floats(width=32),
)
#: Steps: rows of each of three partitions, or of one of them alone; or the state of one of them is copied.
STEP = st.lists(st.lists(ROW, min_size=1, max_size=20), min_size=3, max_size=3) | st.integers(0, 2)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(STEP, max_size=8), st.sampled_from(sorted(KEYS)), st.sampled_from(["update", "complete"]), st.booleans()
)
def test_state_and_results_are_those_of_each_partition_alone(steps: list[Any], key: str, mode: str, told: bool) -> None:
    ours, theirs = made(KEYS[key], 3, mode), made(KEYS[key], 3, mode)
    assert all(operator.processes_many for operator in ours)
    if told:
        for operator in (*ours, *theirs):
            operator.changes()
    for step in steps:
        if isinstance(step, int):
            ours[step].restore(ours[step].snapshot())
            theirs[step].restore(theirs[step].snapshot())
            some = batch([(7, "alone", 1, 1, 1.0)])
            ours[step].process(some)
            theirs[step].process(some)
            continue
        parts = [batch(rows) for rows in step]
        # Behind a row of another batch, because kernels read by address.
        behind = pa.concat_batches([batch([(1, "x", 1, 1, 1.0)]), *parts]).slice(1)
        found = ours[0].process_many(ours, behind, [part.num_rows for part in parts])
        expected = [operator.process(part) for operator, part in zip(theirs, parts, strict=True)]
        if mode == "complete":
            assert found is None
            continue
        assert found is not None
        begins = [0, *found.ends]
        for begin, end, (results,) in zip(begins, found.ends, expected, strict=False):
            assert same(found.batch.slice(begin, end - begin), results)
    for our, their in zip(ours, theirs, strict=True):
        assert same(our.snapshot(), their.snapshot())
        assert [same(a, b) for a, b in zip(our.finish() or [], their.finish() or [], strict=True)].count(False) == 0
        if told:
            a, b = our.changes(), their.changes()
            assert (a is None) == (b is None)
            assert a is None or (np.array_equal(a["slots"], b["slots"]) and same(a["state"], b["state"]))


def same(a: Any, b: Any) -> bool:
    """Compare bit by bit: NaN is NaN, and -0.0 is not 0.0."""
    return bool(a.schema.equals(b.schema)) and repr(a.to_pydict()) == repr(b.to_pydict())


def test_state_that_has_grown_is_found_where_it_is_now() -> None:
    """Grow state: tables and accumulators move when they double, and so do marks."""
    ours, theirs = made(("k",), 2), made(("k",), 2)
    for size in (1, 60, 300, 5, 900, 4000):
        parts = [batch([(n + 7 * p, "w", 1, n, 0.5) for n in range(size)]) for p in range(2)]
        found = ours[0].process_many(ours, pa.concat_batches(parts), [size, size])
        assert found is not None
        expected = [operator.process(part)[0] for operator, part in zip(theirs, parts, strict=True)]
        assert found.batch.equals(pa.concat_batches(expected))


class Reals(flux.Aggregate):
    total, average = flux.sum("x"), flux.mean("x")


def test_a_result_that_is_no_number_has_the_same_bits_whoever_lies_beside_it() -> None:
    """Compute with the same bits, because replicas compare bits: a null anywhere in a batch leads to another loop, in
    which the sum of two NaN has other bits."""
    schema = pa.schema([("k", pa.int64()), ("x", pa.float64())])
    ours, theirs = [Reals(), Reals()], Reals()
    for operator in (*ours, theirs):
        operator.open(Context("reals", key=("k",), schemas=(schema,), output_mode="update"))
    x = pa.array([np.inf, -np.inf, np.nan], pa.float64())
    mine = pa.record_batch([pa.array([1, 1, 1]), x], schema=schema)
    other = pa.record_batch([pa.array([1]), pa.array([None], pa.float64())], schema=schema)
    found = ours[0].process_many(ours, pa.concat_batches([mine, other]), [3, 1])
    (alone,) = theirs.process(mine)
    assert found is not None
    assert extend(0, found.batch.slice(0, 1)) == extend(0, alone)


class Plain(flux.Aggregate):
    n = flux.count()


class Own(flux.Aggregate):
    n = flux.count()

    def process(self, batch: pa.RecordBatch) -> Any:
        return super().process(batch)


class Texts(flux.Aggregate):
    first = flux.min("word")


class Decimals(flux.Aggregate):
    total = flux.sum("d")


@pytest.mark.parametrize(
    ("kind", "key", "goes"),
    [
        (Plain, ("k",), True),
        (Own, ("k",), False),
        (Texts, ("k",), False),
        (Decimals, ("k",), False),
        (Plain, (), False),
    ],
)
def test_only_plain_aggregates_with_a_key_go_together(kind: Any, key: tuple[str, ...], goes: bool) -> None:
    schema = SCHEMA.append(pa.field("d", pa.decimal128(5, 2)))
    operator = kind()
    operator.open(Context("some", key=key, schemas=(schema,), output_mode="update"))
    assert operator.processes_many is goes
    operator.process(pa.record_batch([[1], ["a"], [1], [1], [1.0], [Decimal(1)]], schema=schema))


class Sums(flux.Aggregate):
    total = flux.sum("x")


def test_a_sum_that_does_not_fit_names_the_partition() -> None:
    operators = [Sums() for _ in range(3)]
    schema = pa.schema([("k", pa.int64()), ("x", pa.int64())])
    for partition, operator in enumerate(operators):
        operator.open(Context("sums", partition, 3, ("k",), (schema,), "update"))
    rows = pa.record_batch([[1, 1, 1, 1], [1, 2**63 - 1, 1, 1]], schema=schema)
    with pytest.raises(FailedPartition) as raised:
        Sums.process_many(operators, rows, [1, 2, 1])
    assert raised.value.at == 1
    assert "sum of column 'x'" in str(raised.value.error)


# ---- in a worker


PAIRS = pa.schema([("k", pa.int64()), ("x", pa.int64())])


class Newest(Kept):
    def process(self, batch: pa.RecordBatch) -> None:
        self.batches.append([tuple(row.values()) for row in batch.to_pylist()])


def run(
    kind: Any,
    batches: list[pa.RecordBatch],
    partitions: int = 6,
    sinks: int = 1,
    schema: pa.Schema | None = None,
    began: Callable[[WorkerCore], None] = lambda core: None,
    **options: Any,
) -> tuple[list[Any], Any]:
    """Run an aggregate, and return the rows that arrive behind it, and the worker. ``began`` is called with the worker before the
    first step."""
    source = flux.source(lambda p: iter(batches), PAIRS, 1)
    behind = flux.stage(key="k" if sinks > 1 else None, partitions=sinks)(Newest)
    first = flux.stage(key="k", partitions=partitions, output_mode="update", name="Sums")(Sums)
    plan = planned(first, behind, source=source, **options)
    if kind is not Sums:
        schema = Numbered.schema if schema is None else schema
        stages = plan.stages.with_part(replace(plan.stages[0], make=kind, output_schema=schema))
        edges = plan.edges.with_part(replace(plan.edges[1], schema=schema))
        plan = replace(plan, stages=stages, edges=edges)
    core = worker(plan)
    began(core)
    for now in range(200):
        list(core.poll(float(now)))
        while core.read(True, float(now)):
            pass
        list(core.poll(float(now)))
        work(core, float(now))
    return [row for sink in range(sinks) for rows in kept(core, 1, sink) for row in rows], core


def pairs(*rows: tuple[int, int]) -> pa.RecordBatch:
    return pa.record_batch([[k for k, _ in rows], [x for _, x in rows]], schema=PAIRS)


def watch(monkeypatch: pytest.MonkeyPatch, note: Any) -> None:
    right = flux.Aggregate.process_many.__func__

    def watched(cls: Any, operators: Any, batch: pa.RecordBatch, rows: Sequence[int]) -> Any:
        note(operators, batch)
        return right(cls, operators, batch, rows)

    monkeypatch.setattr(flux.Aggregate, "process_many", classmethod(watched))


@pytest.mark.parametrize("batch_max_rows", [3, 65536])
def test_partitions_of_a_worker_are_applied_in_one_call_and_give_what_they_should(
    batch_max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    watch(monkeypatch, lambda operators, batch: calls.append(len(operators)))
    rng = np.random.default_rng(0)
    batches = [pairs(*zip(rng.integers(0, 40, 3), rng.integers(-9, 9, 3), strict=True)) for _ in range(200)]
    arrived, core = run(Sums, batches, batch_max_rows=batch_max_rows)
    expected: Counter[int] = Counter()
    for each in batches:
        for k, x in zip(*each.to_pydict().values(), strict=True):
            expected[k] += x
    assert dict(arrived) == dict(expected), "the newest of each key"
    assert max(calls) > 2
    assert core.rows_in == 600 + len(arrived)
    core.validate()
    for replica in core.replicas.values():
        replica.validate()


def test_partitions_that_feed_other_edges_than_each_other_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a secondary begin a new edge with some partitions. It has not got the orders of the others (design:
    edge-begins)."""
    calls: list[set[int]] = []
    watch(monkeypatch, lambda operators, batch: calls.append({each.context.partition for each in operators}))
    later: dict[int, Producer] = {}

    def began(core: WorkerCore) -> None:
        for partition in (2, 4):
            replica = core.replicas[PartitionKey(0, partition)]
            edge = replace(replica.outlets[0].edge, id=9)
            producer = later[partition] = Producer(StreamId(9, partition), 0, edge.partitions, 1 << 20, 1.0)
            producer.by_rank = np.arange(edge.partitions, dtype=np.int32)
            replica.output.open(EdgeOutput(producer, edge), 0, 0)
            replica.version = 1

    rng = np.random.default_rng(0)
    batches = [pairs(*zip(rng.integers(0, 40, 9), rng.integers(-9, 9, 9), strict=True)) for _ in range(20)]
    arrived, core = run(Sums, batches, sinks=2, began=began, step_max_rows=9)
    expected: Counter[int] = Counter()
    for each in batches:
        for k, x in zip(*each.to_pydict().values(), strict=True):
            expected[k] += x
    assert dict(arrived) == dict(expected)
    assert any(of_call & {2, 4} and of_call - {2, 4} for of_call in calls)
    for partition, producer in later.items():
        assert producer.rows == core.replicas[PartitionKey(0, partition)].output.rows > 0


#: Partitions of each call of ``Latest.process_many``.
CALLS: list[int] = []


class Latest(flux.Operator):
    """An operator of a user's own that takes several partitions in one call."""

    schema = PAIRS
    wrong: ClassVar[str] = ""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.sums: Counter[int] = Counter()

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if 13 in batch.column("k").to_pylist():
            raise ValueError("13")
        for k, x in zip(*batch.to_pydict().values(), strict=True):
            self.sums[k] += x
        given = dict.fromkeys(batch.column("k").to_pylist())
        return pairs(*[(k, self.sums[k]) for k in given])

    @classmethod
    def process_many(cls, operators: Sequence[Latest], batch: pa.RecordBatch, rows: Sequence[int]) -> JointOutput:
        CALLS.append(len(operators))
        if cls.wrong == "raises":
            raise RuntimeError("of all")
        start, parts = 0, []
        for at, (operator, more) in enumerate(zip(operators, rows, strict=True)):
            try:
                parts.append(operator.process(batch.slice(start, more)))
            except ValueError as error:
                raise FailedPartition(at, error) from error
            start += more
        ends = list(accumulate(part.num_rows for part in parts))
        output = pa.concat_batches(parts)
        if cls.wrong == "column":
            output = output.rename_columns(["k", "y"])
        return JointOutput(output, ends[:-1] if cls.wrong == "ends" else ends)


class OwnProcess(Latest):
    def process(self, batch: pa.RecordBatch) -> Any:
        return super().process(batch)


def test_an_operator_of_ones_own_takes_several_partitions_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    batches = [pairs(*zip(rng.integers(20, 60, 9), rng.integers(-9, 9, 9), strict=True)) for _ in range(60)]
    CALLS.clear()
    ours, core = run(Latest, batches, schema=PAIRS)
    assert core.replicas[0, 0].goes_together
    assert max(CALLS) > 2
    monkeypatch.setattr("flux.worker.step_scheduler.TOGETHER_MAX", 1)
    theirs, _ = run(Latest, batches, schema=PAIRS)
    assert sorted(ours) == sorted(theirs)
    operator = OwnProcess()
    operator.open(Context("own", key=("k",), schemas=(PAIRS,)))
    assert not operator.processes_many, "its process is not that of the class with process_many"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", r"partition {13}: process\(\) raised ValueError: 13 \(at stream 0.0"),
        ("raises", r"process_many\(\) raised RuntimeError: of all"),
        ("ends", r"the output of \d partitions must have \d ends, ascending up to its \d rows; got"),
        (
            "column",
            r"output of stage Sums: declared \(k int64, x int64\), got \(k int64, y int64\): column 'x' is missing",
        ),
    ],
)
def test_a_mistake_in_one_call_for_several_partitions_is_told(
    wrong: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Latest, "wrong", wrong)
    with pytest.raises(UserCodeError, match=message.replace("{13}", str(home(13)))):
        run(Latest, [pairs((1, 1), (2, 1), (3, 1), (4, 1), (13, 1) if not wrong else (5, 1))], schema=PAIRS)


class Numbered(flux.Operator):
    """A second operator with a state of its own."""

    schema = pa.schema([("k", pa.int64()), ("total", pa.int64()), ("n", pa.int64())])

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.given = 0

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if 13 in batch.column("k").to_pylist():
            raise ValueError("13")
        numbers = pa.array(range(self.given, self.given + batch.num_rows), pa.int64())
        self.given += batch.num_rows
        return batch.append_column("n", numbers)


def chained() -> Any:
    return Chained(Sums(), Numbered(), pa.schema([("k", pa.int64()), ("total", pa.int64())]))


def test_what_they_give_goes_through_a_second_operator_partition_by_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    batches = [pairs(*zip(rng.integers(20, 60, 9), rng.integers(-9, 9, 9), strict=True)) for _ in range(60)]
    ours, core = run(chained, batches)
    assert core.replicas[0, 0].goes_together
    monkeypatch.setattr("flux.worker.step_scheduler.TOGETHER_MAX", 1)
    theirs, _ = run(chained, batches)
    assert {(k, n) for k, _, n in ours} == {(k, n) for k, _, n in theirs}
    assert sorted(ours) == sorted(theirs)


def test_an_error_of_the_second_operator_names_the_partition() -> None:
    with pytest.raises(
        UserCodeError, match=rf"partition {home(13)}: process\(\) raised ValueError: 13 \(at stream 0.0"
    ):
        run(chained, [pairs((1, 1), (2, 1), (3, 1), (4, 1), (13, 1))])


def test_rows_in_much_memory_are_applied_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    watch(monkeypatch, lambda operators, batch: calls.append(batch.nbytes))
    monkeypatch.setattr(together, "BYTES_MAX", 1000)
    run(Sums, [pairs(*[(k, 1) for k in range(2000)])])
    assert calls == []
    run(Sums, [pairs(*[(k, 1) for k in range(20)])])
    assert calls


def test_what_text_takes_of_a_log_does_not_depend_on_who_lies_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[tuple[StreamId, int]]] = []
    append = Producer.append

    def watched(self: Producer, data: Clustered, *more: Any) -> None:
        if self.stream.edge == 1:
            sizes[-1].append((self.stream, data.nbytes))
        append(self, data, *more)

    monkeypatch.setattr(Producer, "append", watched)
    schema = pa.schema([("k", pa.string()), ("x", pa.int64())])
    rows = pa.record_batch([[f"{k}" * (k % 9 + 1) for k in range(60)], [k or None for k in range(60)]], schema=schema)
    for most in (64, 1):
        monkeypatch.setattr("flux.worker.step_scheduler.TOGETHER_MAX", most)
        sizes.append([])
        source = flux.source(lambda p: iter([rows] * 3), schema, 1)
        first = flux.stage(key="k", partitions=6, output_mode="update")(Sums)
        core = worker(planned(first, flux.stage(key="k", partitions=2)(Newest), source=source))
        for now in range(20):
            list(core.poll(float(now)))
            while core.read(True, float(now)):
                pass
            work(core, float(now))
    assert sorted(sizes[0]) == sorted(sizes[1])
    assert len(sizes[0]) >= 6


class Endings(flux.Aggregate):
    total = flux.sum("x")
    at: list[tuple[int, int, str]]
    transient = ("at",)  # the test looks at the calls of all partitions

    def open(self, context: flux.Context) -> None:
        super().open(context)
        context.set_timer(0.0, "once")

    def on_timer(self, name: str) -> None:
        self.at.append((at_work[0].note[PARTITION], self.context.partition, "timer"))

    def finish(self) -> Any:
        self.at.append((at_work[0].note[PARTITION], self.context.partition, "finish"))
        return super().finish()


at_work: list[Any] = []


def test_timers_and_ends_are_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply timers and ends one by one: they are code of the user's, which may take long, and the watch of steps has to
    name the partition."""
    Endings.at = []
    apply = WorkerCore._apply

    def watched(self: WorkerCore, *given: Any) -> None:
        at_work[:] = [self]
        apply(self, *given)

    monkeypatch.setattr(WorkerCore, "_apply", watched)
    source = flux.source(lambda p: iter([pairs(*[(k, 1) for k in range(40)])] * 6), PAIRS, 1)
    flow = flux.stage(key="k", partitions=6, output_mode="complete")(Endings), flux.stage(partitions=1)(Newest)
    core = worker(planned(*flow, source=source))
    for now in range(40):
        list(core.poll(float(now)))
        while core.read(True, float(now)):
            pass
        work(core, float(now))
    assert len(Endings.at) == 12
    assert all(noted == partition for noted, partition, _ in Endings.at)


def test_whose_rows_failed_is_said_as_if_it_had_been_alone() -> None:
    far = [pairs((1, 2**62), (2, 1), (3, 1), (4, 1), (5, 1))] * 2
    with pytest.raises(UserCodeError) as alone:
        run(Sums, far, 1)
    with pytest.raises(UserCodeError) as several:
        run(Sums, far, 6)
    text = str(several.value)
    assert text.split("process() raised")[1].split(" (at")[0] in str(alone.value)
    assert "stage Sums, partition" in text
    assert "stream 0.0 sequence 1" in text


def test_output_of_a_small_share_does_not_keep_that_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy a small share: a log counts the rows of its own partition, and the shared batch that it holds must not be a
    large multiple of them."""
    held: list[tuple[int, int]] = []
    monkeypatch.setattr("flux.exchange.producer.Producer._evict", lambda self: None)
    push = flux.exchange.producer.Producer.append

    def watched(self: Any, data: Clustered, *more: Any) -> None:
        if self.stream.edge == 1:
            held.append((data.batch.num_rows, data.batch.column(0).buffers()[1].size // 8))
        push(self, data, *more)

    monkeypatch.setattr("flux.exchange.producer.Producer.append", watched)
    many = [(k, 1) for k in range(400)]
    ones = [next((k, 1) for k in range(1000, 2000) if home(k) == 5)]
    run(Sums, [pairs(*[row for row in many if home(row[0]) != 5], *ones)], sinks=2)
    assert any(rows == 1 for rows, _ in held)
    for rows, kept_rows in held:
        assert kept_rows <= rows / together.LEAST_SHARE * 6, (rows, kept_rows)
    assert any(kept_rows > rows > 1 for rows, kept_rows in held), "most share"


def test_what_waits_for_a_sink_is_its_own() -> None:
    """Copy batches that wait for a sink: the bound is that of a partition, and a stuck one must not hold rows of
    others."""
    source = flux.source(lambda p: iter([pairs(*[(k, 1) for k in range(100)])]), PAIRS, 1)
    flow = flux.stage(key="k", partitions=6, output_mode="update")(Sums)(source).to(Stuck())
    core = worker(compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"s"))
    for now in range(20):
        list(core.poll(float(now)))
        while core.read(True, float(now)):
            pass
        work(core, float(now))
    held = [kept for replica in core.replicas.values() for kept in replica.output.exit.state()[2]]  # type: ignore[union-attr]
    assert len(held) > 3
    for _, _, batch in held:
        assert batch.column(0).buffers()[1].size < 8 * batch.num_rows + 64


class Stuck(flux.Sink):
    def write(self, partition: int, batches: Any) -> None:
        raise AssertionError("nobody calls it here")


def home(key: int) -> int:
    from partitioning.clustering import cluster_by_key

    return int(cluster_by_key(pairs((key, 1)), [0], 6).by_rank[0])
