"""Micro-batches of a streaming query go on with the streams of the batches before, each row once (design: micro-batches)."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, SECRET, Rows, ThreadQuery
from hypothesis import given, settings
from hypothesis import strategies as st
from one_worker import SCHEMA, rows

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import EventTime, FromMicroBatches, Plan, StreamSourcePlan
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.row_operators import RowOperator
from flux.dataflow.source import StreamSource
from flux.errors import NonDeterministicInputError, QueryFailed, RefusedError, UsageError
from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound, RowSlice
from flux.expressions.tree import Column, FunctionCall, Literal
from flux.settings import Settings
from flux.shell.ingress_loop import Ingress
from flux.shell.process import Stopped
from flux.tasks.ingress import IngressTask
from flux.tasks.micro_batches import MicroBatch
from flux.vault.location import Folder
from flux.windows.window import NEVER
from flux.wire.messages import Data
from partitioning.clustering import cluster_by_key
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table
from spark_integration.streaming.stream_ends import StreamEnds, watermark_of
from spark_integration.tasks.entry_points import Reached
from tests.flux.resolved import to_steps

PARTITIONS = 3
HOSTED = list(range(PARTITIONS))
WORKERS = (10, 11)
#: Partition 0 on one worker, the others on another.
TABLE = Table(
    0, (((ReplicaAt(10, 0),), (ReplicaAt(11, 0),), (ReplicaAt(11, 0),)),), (), dict.fromkeys(WORKERS, "")
)  # fmt: skip
PLACED = {10: [0], 11: [1, 2]}


def kept(given: Any, key: str | None = "x") -> Any:
    return flux.stage(key=key, partitions=PARTITIONS, name="kept")(lambda batch: batch)(given)


def plan(key: str | None = "x", above: int = -1) -> Plan:
    """Compile a stage behind a source. With ``above``, the stage gets only the rows above this value."""
    source = flux.stream(SCHEMA)
    return compiled(kept(source if above < 0 else greater(source, above), key))


def greater(source: Any, limit: int) -> Any:
    return RowFlow(source, (RowOperator("where", (condition(limit),)),))


def condition(limit: int) -> Any:
    return FunctionCall("greater", (Column("x", pa.int64()), Literal(limit, pa.int64())), pa.bool_())


def compiled(*flows: Any) -> Plan:
    return compile_plan(flows, Settings.of(), lambda schema: schema, "q", SECRET, to_steps=to_steps)


class Consumers:
    """Two workers that read the stream of one partition of the source."""

    def __init__(self, key: str | None = "x", above: int = -1) -> None:
        self.plan = plan(key, above)
        self.inbounds = {worker: Inbound(StreamId(0, 0), 0, 1 << 30, numbered=True) for worker in WORKERS}
        for worker, inbound in self.inbounds.items():
            for at, partition in enumerate(PLACED[worker]):
                inbound.received.join(partition, 0, PLACED[worker][:at])
        self.got: list[int] = []
        self.attempts = itertools.count()
        self.applies = True

    def task(self, number: int, query: str = "a query", least: int = 0, sent: tuple[int, ...] = ()) -> IngressTask:
        """Begin an attempt at a batch, to which both workers have answered."""
        attempt = next(self.attempts)
        core = IngressTask(self.plan, 0, 0, attempt, MicroBatch(query, number, least, sent))
        core.on_table(TABLE, 0.0)
        list(core.poll(0.0))
        for worker, inbound in self.inbounds.items():
            inbound.greet(attempt, "here", 100 * attempt + worker)
            core.on_answer(worker, inbound.resume(0, PLACED[worker], front=self.front(inbound)), 0.0)
        assert core.find_start()
        return core

    def front(self, inbound: Inbound) -> int:
        return max(inbound.received[partition] for partition in PLACED[self.worker_of(inbound)])

    def worker_of(self, inbound: Inbound) -> int:
        return next(worker for worker, known in self.inbounds.items() if known is inbound)

    def give(self, core: IngressTask, *values: int) -> None:
        rest: Any = core.needed(rows(*values))
        while rest is not None and rest.num_rows:
            rest = core.append(rest, 0.0)
        self.send(core)

    def send(self, core: IngressTask) -> None:
        for effect in core.poll(0.0):
            if not isinstance(effect.message, Data):
                continue
            inbound, hosted = self.inbounds[effect.worker], PLACED[effect.worker]
            found = inbound.take(effect.message, effect.batches, hosted, (), Counters())
            assert isinstance(found, list)
            for partition, slice_ in found:
                assert isinstance(slice_, RowSlice)
                self.got += slice_.batch.column("x").to_pylist()
                inbound.applied(partition, slice_)
            inbound.validate()

    def acked(self, core: IngressTask) -> bool:
        for worker, inbound in self.inbounds.items():
            core.on_answer(worker, inbound.ack(0, PLACED[worker]), 0.0)
        for producer in core.producers.values():
            producer.validate()
        return core.drained


def whole(at: Consumers, number: int, *batches: list[int], before: Any = ()) -> IngressTask:
    """Send all rows of a batch with one task. ``before`` is the place of the partition by the count of the driver."""
    core = at.task(number, "a query", *before)
    for values in batches:
        at.give(core, *values)
    core.finish(0.0)
    assert at.acked(core)
    return core


def ended(at: Consumers, core: IngressTask, values: list[int]) -> None:
    at.give(core, *values)
    core.finish(0.0)


#: Per micro-batch: rows, and the attempts before the last: how many rows each sends, and the sizes of its batches.
BATCHES = st.lists(
    st.tuples(
        st.integers(0, 30), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=3), st.integers(1, 9)
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(BATCHES, st.sampled_from(["x", None]))
def test_every_row_comes_once_whatever_attempts_send_and_however_they_cut(
    batches: list[tuple[int, list[tuple[int, int]], int]], key: str | None
) -> None:
    at, begun = Consumers(key), 0
    for number, (count, tries, size) in enumerate(batches):
        values = list(range(begun, begun + count))
        for sends, cut in tries:
            core = at.task(number)
            for few in _cut(values[:sends], cut):
                at.give(core, *few)
        whole(at, number, *map(list, _cut(values, size)))
        begun += count
        assert sorted(at.got) == list(range(begun))


@settings(deadline=None, max_examples=60)
@given(BATCHES, st.sampled_from(["x", None]), st.integers(0, 60), st.booleans())
def test_rows_that_pass_come_once_though_the_last_of_a_batch_may_be_left_out(
    batches: list[tuple[int, list[tuple[int, int]], int]], key: str | None, limit: int, counted: bool
) -> None:
    """Send batches in attempts, some of which stop early. With ``counted``, the driver tells the place of the
    partition, as for ``flux.stream(streaming_df)``."""
    at, begun, wanted, before = Consumers(key, limit), 0, [], (0, ())
    for number, (count, tries, size) in enumerate(batches):
        values = [(37 * value) % 101 for value in range(begun, begun + count)]
        for sends, cut in tries:
            core = at.task(number, "a query", *before)
            for few in _cut(values[:sends], cut):
                at.give(core, *few)
        core = whole(at, number, *map(list, _cut(values, size)), before=before)
        if counted and count:
            before = core.end, tuple(core.sent)
            assert core.end == begun + count
        begun += count
        wanted += [value for value in values if value > limit]
        assert sorted(at.got) == sorted(wanted)


def test_a_state_without_the_last_rows_that_travelled_is_older_also_where_rows_are_left_out() -> None:
    at = Consumers(above=10)
    first = whole(at, 0, [1, 20, 30], [2, 3])
    assert (first.end, first.sent) == (5, [3])
    second = whole(at, 1, [4, 5], before=(5, (3,)))
    assert (second.end, second.sent) == (7, [3]), "nothing has travelled"
    third = whole(at, 2, [40, 6], before=(7, (3,)))
    assert (third.end, third.sent) == (9, [8])
    assert at.task(3, least=9, sent=(8,)).end == 9
    older = Consumers(above=10)
    whole(older, 0, [1, 20, 30], [2, 3])
    with pytest.raises(QueryFailed, match="has 3 rows of partition 0, and Spark has committed 8"):
        older.task(3, least=9, sent=(8,))


def test_what_spark_reads_of_a_streaming_dataframe_is_what_stages_look_at() -> None:
    class Counts(flux.Aggregate):
        n = flux.count()

    counts = flux.stage(key="k")(Counts)
    schema = pa.schema([("k", pa.int64()), ("x", pa.int64()), ("note", pa.string())])
    (read,) = compiled(counts(greater(StreamSource("ticks", schema, object()), 3))).sources  # type: ignore[arg-type]
    assert isinstance(read, StreamSourcePlan)
    assert (read.columns, read.schema.names) == ((0, 1), ["k", "x"])
    (written,) = compiled(counts(greater(flux.stream(schema), 3))).sources
    assert isinstance(written, StreamSourcePlan)
    assert (written.columns, written.schema.names) == (None, ["k", "x", "note"]), "a writer brings all columns"


def _cut(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def test_a_batch_that_was_applied_and_not_committed_is_repeated_without_a_trace() -> None:
    at = Consumers()
    whole(at, 0, [1, 2, 3], [4, 5])
    whole(at, 1, [6, 7])
    again = whole(at, 1, [6], [7])
    assert at.got.count(6) == at.got.count(7) == 1
    assert sorted(at.got) == [1, 2, 3, 4, 5, 6, 7]
    assert again.stats()["sources"][0].first <= 5 + 2
    whole(at, 2, [8])
    assert sorted(at.got) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_partition_that_some_batches_do_not_have_goes_on() -> None:
    at = Consumers()
    whole(at, 3, [1, 2])
    whole(at, 9, [3])
    assert sorted(at.got) == [1, 2, 3]


def test_a_worker_that_had_no_rows_of_the_batches_before_may_greet_again() -> None:
    """Answer a worker that asks for rows which are long gone, and were never for it."""
    at = Consumers()
    mine = [x for x in range(400) if not for_worker_10(at, x)]
    whole(at, 0, mine)
    assert at.inbounds[10].marks.newest.sequence == -1, "nothing came there"
    core = at.task(1)
    core.on_answer(10, at.inbounds[10].resume(0, PLACED[10]), 0.0)
    at.give(core, *range(1000, 1030))
    core.finish(0.0)
    assert at.acked(core)
    assert sorted(at.got) == sorted([*mine, *range(1000, 1030)])


def for_worker_10(at: Consumers, x: int) -> bool:
    return cluster_by_key(rows(x), at.plan.edges[0].key, PARTITIONS).rows_of(0).num_rows > 0


@pytest.mark.parametrize("other", [[1, 2, 30], [1, 2], []])
def test_other_rows_in_a_batch_that_is_repeated_are_refused(other: list[int]) -> None:
    at = Consumers()
    whole(at, 0, [0])
    core = at.task(1)
    at.give(core, 1, 2, 3)  # and Spark ends the task
    again = at.task(1)
    with pytest.raises(NonDeterministicInputError):
        ended(at, again, other)


def test_fewer_rows_than_were_applied_are_refused() -> None:
    at = Consumers()
    core = at.task(0)
    for x in range(6):
        at.give(core, x)
    assert not at.acked(core)
    again = at.task(0)
    with pytest.raises(NonDeterministicInputError):
        ended(at, again, [0])


def test_another_streaming_query_is_refused_and_so_is_a_task_of_long_ago() -> None:
    at = Consumers()
    whole(at, 4, [1])
    with pytest.raises(UsageError, match="rows of streaming query a query, and those of another, another one"):
        at.task(0, "another one")
    with pytest.raises(RefusedError, match="batch 3 of source stream is over: 4 has come"):
        at.task(3)


def test_a_state_that_is_older_than_the_checkpoint_of_spark_is_noticed(tmp_path: Path) -> None:
    at = Consumers()
    ends = StreamEnds(Folder(tmp_path), "a/b c")
    assert whole(at, 4, [1, 2], [3]).end == 3
    ends.note(
        4,
        [
            SimpleNamespace(partition=0, end=3, sent=[3], newest=NEVER, late=0),
            SimpleNamespace(partition=1, end=0, sent=[0], newest=NEVER, late=0),
        ],
    )
    ends = StreamEnds(Folder(tmp_path), "a/b c")
    assert ends.before(5) == {0: Reached(3, (3,))}
    assert ends.before(4) == {}, "Spark has not committed it, and repeats it"
    assert at.task(5, least=3).end == 3
    ends.note(5, [SimpleNamespace(partition=1, end=7, sent=[2], newest=NEVER, late=0)])
    assert StreamEnds(Folder(tmp_path), "a/b c").before(5) == {0: Reached(3, (3,))}
    assert StreamEnds(Folder(tmp_path), "a/b c").before(6) == {0: Reached(3, (3,)), 1: Reached(7, (2,))}
    older = Consumers()
    with pytest.raises(QueryFailed, match="has 0 rows of partition 0, and Spark has committed 3"):
        older.task(5, least=3)
    (path,) = tmp_path.iterdir()
    path.write_text('[5, {"0": 3}, {"0": 4}, [5, 1]]')
    assert StreamEnds(Folder(tmp_path), "a/b c").before(6) == {0: Reached(4)}, "as releases wrote that sent all rows"
    path.write_text("[")
    assert StreamEnds(Folder(tmp_path), "a/b c").before(9) == {}


def test_rows_of_a_batch_are_late_by_the_batches_before_it_in_every_attempt(tmp_path: Path) -> None:
    """Repeat a batch that was noted and not committed with the watermark that it had, as a restart does."""

    def row(newest: int, late: int = 0) -> SimpleNamespace:
        return SimpleNamespace(partition=0, end=3, sent=[3], newest=newest, late=late)

    def ends() -> StreamEnds:
        return StreamEnds(Folder(tmp_path), "a")

    assert ends().newest_before(4) == NEVER
    ends().note(4, [row(70), row(90), row(NEVER)])
    assert (ends().newest_before(4), ends().newest_before(5), ends().newest) == (NEVER, 90, 90)
    ends().note(5, [row(80, late=2), row(70, late=3)])
    assert (ends().newest_before(5), ends().newest_before(6)) == (90, 90), "it never falls"
    ends().note(6, [row(80, late=4)])
    again = ends()
    again.note(6, [row(80, late=4)])
    assert (again.late, ends().late) == (9, 9), "each batch counts once"
    assert watermark_of(EventTime("ts", 0, 15), 90) == 75
    assert watermark_of(EventTime("ts", 0, 15), NEVER) == watermark_of(None, 90) == NEVER


def test_a_batch_that_comes_again_in_other_partitions_is_refused(tmp_path: Path) -> None:
    """Refuse such a batch, because its rows may have gone into other streams, where they would count once more."""
    assert not StreamEnds(Folder(tmp_path), "a").begins(4, 2)
    assert StreamEnds(Folder(tmp_path), "a").begins(4, 2), "whoever has no rows this time asks whether there were some"
    with pytest.raises(QueryFailed, match="batch 4 comes again in 1 partitions, and was begun in 2"):
        StreamEnds(Folder(tmp_path), "a").begins(4, 1)
    ends = StreamEnds(Folder(tmp_path), "a")
    ends.note(4, [SimpleNamespace(partition=0, end=3, sent=[3], newest=NEVER, late=0)])
    assert not ends.begins(5, 1)
    assert StreamEnds(Folder(tmp_path), "a").before(5) == {0: Reached(3, (3,))}


def test_the_plan_of_a_stream() -> None:
    made = plan()
    assert isinstance(made.sources[0], StreamSourcePlan)
    assert isinstance(made.edges[0], FromMicroBatches)
    assert made.numbered(made.edges[0])


# ---- with sockets


def send(query: ThreadQuery, number: int, partition: int, batches: Any, attempt: int, name: str = "a query") -> None:
    Ingress(query.plan, query.rendezvous, 0, partition, MicroBatch(name, number)).run(iter(batches), attempt)


def test_batches_with_other_numbers_of_partitions_pass_a_query_and_the_input_ends() -> None:
    seen, others = Rows(key="x"), Rows()
    source = flux.stream(SCHEMA)
    with ThreadQuery(seen.stage(flux.stage(lambda batch: batch)(source)), others.stage(source)) as query:
        query.started()
        attempt, value, wanted = itertools.count(1), itertools.count(), 0
        for number, partitions in enumerate((2, 1, 3, 2)):
            for partition in range(partitions):
                given_rows = [rows(*itertools.islice(value, 5)) for _ in range(3)]
                wanted += 15
                send(query, number, partition, given_rows, next(attempt))
            last = partition, given_rows
        send(query, 3, *last, next(attempt))  # Spark repeats a task that had done its work
        with pytest.raises(UsageError, match="an input takes one streaming query"):
            send(query, 0, 0, [rows(0)], next(attempt), "another")
        for edge in query.plan.edges_of_source(0):
            query.server.edge_complete(edge.id, [])
        query.wait()
        assert query.server.core.inputs.total == wanted
    assert sorted(row["x"] for row in seen) == sorted(row["x"] for row in others) == list(range(wanted))


def test_stages_that_get_other_rows_of_the_same_batches_get_each_once() -> None:
    some, most, none = Rows(key="x"), Rows(), Rows()
    source = flux.stream(SCHEMA)
    flows = some.stage(greater(source, 50)), most.stage(greater(source, 10)), none.stage(greater(source, 999))
    before: dict[int, Any] = {}
    batches = [[60, 20, 5], [1, 2], [], [11, 12, 70, 3], [3, 13], [99, 4]]
    with ThreadQuery(*flows, to_steps=to_steps) as query:
        query.started()
        attempts = itertools.count(1)
        for number, values in enumerate(batches):
            for _ in range(2 if number % 2 else 1):  # Spark repeats a batch that it has not committed
                said = MicroBatch("a query", number, *before.get(0, ()))
                task = Ingress(query.plan, query.rendezvous, 0, 0, said)
                task.run(iter([rows(*values[:2]), rows(*values[2:])]), next(attempts))
            before[0] = task.end, tuple(task.sent)
        for edge in query.plan.edges_of_source(0):
            query.server.edge_complete(edge.id, [])
        query.wait()
    given = [value for values in batches for value in values]
    assert sorted(row["x"] for row in some) == sorted(value for value in given if value > 50)
    assert sorted(row["x"] for row in most) == sorted(value for value in given if value > 10)
    assert none == []
    end, sent = before[0]
    assert end == len(given)
    assert sent <= (len(given) - 1, len(given) - 1, 0), (
        "a batch that is repeated does not know of rows that it leaves out"
    )


def test_a_task_that_is_stopped_before_its_rows_are_applied_does_not_end_well() -> None:
    """Raise, because Spark would else commit the batch."""
    flow = Rows(key="x").stage(flux.stream(SCHEMA))
    with ThreadQuery(flow) as query:
        query.started()
        query.server.stop()
        with pytest.raises((Stopped, QueryFailed)):
            send(query, 0, 0, [rows(1)], 1)
        assert query.server.ended.wait(LIMIT_S)
