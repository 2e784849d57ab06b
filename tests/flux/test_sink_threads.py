"""Sinks are called in threads of the worker: once for each batch, patiently, and by the primary of the partition."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from harness import LIMIT_S, ThreadQuery, dataframe
from outside_store import ALONE, SCHEMA, HeldTable, StrictTable, Table, batches, lose, same, slowly, until

import flux
from controller.balance.load import Move
from flux.errors import QueryFailed, SchemaError, UsageError, UserCodeError
from flux.settings import Settings
from flux.shell.sink_threads import SinkThreads


def test_all_output_goes_to_the_sink_once_and_the_query_ends_when_it_is_there() -> None:
    with ThreadQuery(same(dataframe(SCHEMA)).to(Table("all")), **ALONE) as query:
        query.started().feed([batches(500)])
        query.wait()
        assert Table.stores["all"].rows() == list(range(500))
    assert sorted(Table.stores["all"].calls) == [("close", None)] * 2 + [("open", 0), ("open", 1)]


def test_a_take_over_goes_on_where_the_outside_is() -> None:
    """Lose the primary in the middle of a write, which lands all the same."""
    held, entered = threading.Event(), threading.Event()

    def before(position: flux.Position) -> None:
        if position == (0, 3) and not entered.is_set():
            entered.set()
            held.wait(LIMIT_S)

    store = Table.stores["taken over"]
    with ThreadQuery(same(dataframe(SCHEMA)).to(HeldTable("taken over", before)), **ALONE) as query:
        query.started().feed([batches(2000)])
        assert entered.wait(LIMIT_S)
        table = query.server.core.table
        assert table is not None
        lose(query, table.stages[0][0][0].worker)
        until(lambda: len(store.batches[0]) > 10, "the successor goes on while the write of the lost one is under way")
        held.set()
        query.wait()
    assert store.rows() == list(range(2000))
    assert store.again >= 1, "the late write came to nothing"


def test_an_outside_that_refuses_a_late_write_ends_nothing() -> None:
    """Move a partition away from a worker that lives on, while its write is under way."""
    held, entered = threading.Event(), threading.Event()

    def before(position: flux.Position) -> None:
        if position == (0, 3) and not entered.is_set():
            entered.set()
            held.wait(LIMIT_S)

    store = Table.stores["strict"]
    with ThreadQuery(same(dataframe(SCHEMA)).to(StrictTable("strict", before)), workers=3, **ALONE) as query:
        query.started().feed([batches(2000)])
        assert entered.wait(LIMIT_S)
        table = query.server.core.table
        assert table is not None
        replicas = [replica.worker for replica in table.stages[0][0]]
        (free,) = {0, 1, 2} - set(replicas)
        move = Move(0, 0, replicas[0], free)
        query.server.command(lambda now: query.server.core.move([move], "asked for", now))
        until(lambda: len(store.batches[0]) > 10, "the successor goes on")
        held.set()
        query.wait()
    assert store.rows() == list(range(2000))
    assert store.again == 1


def test_an_outside_that_cannot_tell_gets_batches_again_under_the_same_positions() -> None:
    got: dict[flux.Position, list[list[int]]] = defaultdict(list)

    class Again(flux.Sink):
        def __deepcopy__(self, memo: Any) -> Again:
            return self

        def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
            got[position].append(batch.column("x").to_pylist())

    with ThreadQuery(same(dataframe(SCHEMA)).to(Again()), **ALONE) as query:
        query.started().feed([slowly(batches(1000))])
        until(lambda: len(got) > 20, "rows flow")
        assert query.server.core.table is not None
        lose(query, query.server.core.table.stages[0][0][0].worker)
        query.wait()
    assert all(versions == [versions[0]] * len(versions) for versions in got.values())
    assert sorted(row for versions in got.values() for row in versions[0]) == list(range(1000))


def test_what_the_sink_calls_transient_is_tried_again() -> None:
    failed = []

    def before(position: flux.Position) -> None:
        if len(failed) < 3:
            failed.append(position)
            raise ConnectionResetError("the outside is restarted")

    with ThreadQuery(same(dataframe(SCHEMA)).to(HeldTable("patient", before)), **ALONE) as query:
        query.started().feed([batches(100)])
        query.wait()
    assert Table.stores["patient"].rows() == list(range(100))
    assert len(failed) == 3


@pytest.mark.parametrize(
    ("error", "options"), [(ValueError("no such column"), {}), (ConnectionError("gone"), {"sink_retry_timeout": 0.2})]
)
def test_any_other_error_ends_the_query_with_its_traceback(error: Exception, options: dict[str, Any]) -> None:
    def before(position: flux.Position) -> None:
        raise error

    with ThreadQuery(same(dataframe(SCHEMA)).to(HeldTable("failing", before)), **ALONE, **options) as query:
        query.started().feed([batches(100)])
        found = query.error()
    assert isinstance(found, UserCodeError)
    assert str(error) in found.summary
    assert "sink HeldTable of stage same, partition" in found.summary
    assert "raise error" in found.traceback


def test_an_outside_with_positions_of_another_query_ends_this_one_before_rows_are_left_out() -> None:
    Table.stores["used"].batches[1].extend([[1], [2]])
    with ThreadQuery(same(dataframe(SCHEMA)).to(Table("used")), **ALONE) as query:
        query.started().feed([batches(500)])
        found = query.error()
    assert "has the first 2 batches before this query has written any" in found.summary


def test_an_outside_that_has_lost_rows_ends_the_query() -> None:
    class Forgetful(HeldTable):
        def __deepcopy__(self, memo: Any) -> Forgetful:
            return Forgetful(self.name, self.before)

        def committed(self, partition: int) -> int:
            return 0

    with ThreadQuery(same(dataframe(SCHEMA)).to(Forgetful("forgetful")), **ALONE) as query:
        query.started().feed([slowly(batches(5000))])
        until(lambda: len(Table.stores["forgetful"].batches[0]) > 50, "rows flow")
        time.sleep(0.3)  # the secondary has heard of it
        assert query.server.core.table is not None
        lose(query, query.server.core.table.stages[0][0][0].worker)
        found = query.error()
    assert isinstance(found, QueryFailed)
    assert "are lost there, and no replica keeps them any more" in found.summary


@pytest.mark.parametrize(("given", "said"), [(-1, "got -1"), (True, "got True"), ("3", "got '3'"), (99, "returned 99")])
def test_a_sink_that_returns_nonsense_is_named(given: Any, said: str) -> None:
    class Wrong(Table):
        def write(self, batch: pa.RecordBatch, position: flux.Position) -> Any:
            return given

    with ThreadQuery(same(dataframe(SCHEMA)).to(Wrong("wrong")), **ALONE) as query:
        query.started().feed([batches(100)])
        assert said in query.error().summary


def test_a_slow_sink_holds_back_its_stage_and_with_it_the_source() -> None:
    go_on = threading.Event()

    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        for number, batch in enumerate(batches(100_000, 100)):
            read_so_far.append(number)
            yield batch

    read_so_far: list[int] = []
    source = flux.source(read, SCHEMA, 1)
    few = {"sink_max_bytes": "8k", "log_max_bytes": "20k", "batch_max_bytes": "2k", "credit_max_bytes": "20k"}
    sink = HeldTable("slow", lambda position: bool(go_on.wait(LIMIT_S)))
    with ThreadQuery(same(source).to(sink), **(ALONE | few)) as query:
        query.started()
        until(lambda: read_so_far, "the source is read")
        known = -1
        while known != len(read_so_far):  # until it stands still
            known = len(read_so_far)
            time.sleep(1.0)
        assert known < 500, "1,000 batches of 800 bytes are more than all bounds together"
        until(
            lambda: query.server.progress and query.server.progress[-1]["stages"][0]["waitForSink"] == 2, "it is said"
        )
        said = query.server.progress[-1]["stages"][0]
        assert (said["sink"], said["sinkBytes"] > 8 << 10) == ("HeldTable, exactly once", True)
        go_on.set()
        query.wait()
    assert Table.stores["slow"].rows() == list(range(100_000))


def test_a_query_ends_though_a_sink_does_not() -> None:
    stuck, entered = threading.Event(), threading.Event()

    def before(position: flux.Position) -> None:
        entered.set()
        stuck.wait(LIMIT_S)

    with ThreadQuery(same(dataframe(SCHEMA)).to(HeldTable("stuck", before)), **ALONE) as query:
        query.started().feed([batches(100)])
        assert entered.wait(LIMIT_S)
        began = time.monotonic()
        query.stop()
        assert time.monotonic() - began < LIMIT_S / 2
        stuck.set()


class Direct(Table):
    """A ``HeldTable`` for tests without a query."""

    def __deepcopy__(self, memo: Any) -> Direct:
        return Direct(self.name, self.before)


def lines(sink: flux.Sink, partitions: int = 1, **options: Any) -> SinkThreads:
    """Start the threads of a sink, without a query."""
    stage = SimpleNamespace(id=0, name="last", partitions=partitions, sink=sink)
    plan = SimpleNamespace(query="q", stages=[stage], settings=Settings.of(**options), forgotten={}, location="/data/q")
    made = SinkThreads(plan, lambda: None)  # type: ignore[arg-type]
    for partition in range(partitions):
        made.begins(0, partition, 0, True)
    return made


ONE = pa.record_batch([pa.array([1])], schema=SCHEMA)


def test_after_a_call_that_failed_nothing_lands_behind_the_hole() -> None:
    failing = threading.Event()

    def before(position: flux.Position) -> None:
        if position.sequence == 1:
            failing.set()
            raise ValueError("once")

    made = lines(Direct("hole", before))
    for position in range(5):
        made.write(0, 0, position, ONE)
    assert failing.wait(LIMIT_S)
    made.write(0, 0, 5, ONE)
    until(lambda: not made._failed.empty(), "the failure is there")
    made.write(0, 0, 6, ONE)
    time.sleep(0.1)
    assert (made.has(0, 0), len(Table.stores["hole"].batches[0])) == (1, 1)
    with pytest.raises(UserCodeError, match="once"):
        made.check()
    made.close()


def test_a_failure_is_nothing_to_who_is_no_longer_primary_when_he_hears_of_it() -> None:
    def before(position: flux.Position) -> None:
        raise ValueError("refused")

    made = lines(Direct("late", before))
    made.write(0, 0, 0, ONE)
    until(lambda: not made._failed.empty(), "the failure is there, and the loop stands in a long step")
    made.ends(0, 0)
    made.check()
    made.close()


def test_partitions_take_turns_however_much_some_have_to_write() -> None:
    made = lines(Direct("turns", lambda position: time.sleep(0.001)), partitions=9)
    for position in range(300):
        for partition in range(9):
            made.write(0, partition, position, ONE)
    until(lambda: made.has(0, 8) > 20, "the ninth too")
    assert max(made.has(0, partition) for partition in range(8)) < 200
    made.close()


def test_a_sink_that_collects_more_than_there_will_ever_be_is_named() -> None:
    class Hoards(flux.Sink):
        def write(self, batch: pa.RecordBatch, position: flux.Position) -> int:
            return 0

    bounds = {"sink_max_bytes": "4k", "batch_max_bytes": "1k"}
    with ThreadQuery(same(dataframe(SCHEMA)).to(Hoards()), **(ALONE | bounds)) as query:
        query.started().feed([batches(5000)])
        assert "say in traits = flux.SinkTraits(holds_bytes=...) how much is collected" in query.error().summary


class Stored:
    """A pair of functions for ``foreach_batch`` that keep rows and position together. The third batch fails twice
    before it is there."""

    def __init__(self, number: type = int) -> None:
        self.number = number  # a table may give numbers of numpy's
        self.next: dict[tuple[str, int], int] = {}
        self.rows: list[int] = []
        self.failures = 2

    def __deepcopy__(self, memo: Any) -> Stored:
        return self

    def committed(self, context: flux.SinkContext) -> int:
        return self.number(self.next.get((context.query, context.partition), 0))  # type: ignore[no-any-return]

    def write(self, batch: pa.RecordBatch, position: flux.Position, context: flux.SinkContext) -> None:
        if position.sequence == 2 and self.failures:
            self.failures -= 1
            raise LookupError("a server that starts")
        assert self.committed(context) == position.sequence
        self.rows += batch.column("x").to_pylist()
        self.next[context.query, position.partition] = position.sequence + 1


@pytest.mark.parametrize("number", [int, np.int64])
def test_functions_that_keep_positions_are_exactly_once(number: type) -> None:
    store = Stored(number)
    flow = same(dataframe(SCHEMA)).foreach_batch(store.write, committed=store.committed, transient=LookupError)
    with ThreadQuery(flow, **ALONE) as query:
        query.started().feed([slowly(batches(1000))])
        until(lambda: len(store.rows) > 200, "rows flow")
        assert query.server.core.table is not None
        lose(query, query.server.core.table.stages[0][0][0].worker)
        query.wait()
    assert flow.sink.traits.exactly_once
    assert sorted(store.rows) == list(range(1000))
    assert not store.failures


def test_an_error_that_nobody_calls_transient_ends_the_query() -> None:
    store = Stored()
    flow = same(dataframe(SCHEMA)).foreach_batch(store.write, committed=store.committed, transient=(KeyError,))
    with ThreadQuery(flow, **ALONE) as query:
        query.started().feed([batches(1000)])
        assert "a server that starts" in str(query.error())


# ---- refusals


class Nothing(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda flow: flow.to(Table), r"make one: flow\.to\(Table\(\.\.\.\)\)"),
        (lambda flow: flow.to(print), r"flow\.foreach_batch\(function\) takes a function"),
        (lambda flow: flow.to(flux.Sink()), r"must define write\(self, batch, position\)"),
        (lambda flow: flow.foreach_batch(3), "wants a function"),
        (lambda flow: flow.foreach_batch(lambda batch: None), "must take two arguments"),
        (lambda flow: flow.foreach_batch(lambda a, b: None, committed=lambda c: 0), "must take three arguments"),
        (
            lambda flow: flow.foreach_batch(lambda a, b, c: None, committed=lambda: 0),
            "committed must take one argument, the context",
        ),
        (lambda flow: flow.foreach_batch(lambda a, b, c: None, committed=3), "committed must be a function"),
        (lambda flow: flow.foreach_batch(lambda a, b: None, transient=OSError("x")), "an exception class, or a tuple"),
        (lambda flow: flow.to_parquet(7), "wants the path of a folder, got 7"),
        (lambda flow: flow.to_parquet("/tmp/x", roll_bytes="many"), "roll_bytes: cannot read 'many'"),
        (lambda flow: flow.to_parquet("file:///tmp/u x"), "cannot write to 'file:///tmp/u x'"),
        (lambda flow: flow.to_parquet("/tmp/x", roll_every=0), "must be above zero"),
        (lambda flow: flow.to_parquet("/tmp/x").toDF(), r"has no toDF\(\): its output goes to parquet files in /tmp/x"),
        (lambda flow: flow.to_parquet("/tmp/x").to_parquet("/tmp/y"), r"Keep the flow in a variable"),
        (lambda flow: same(flow.to_parquet("/tmp/x")), "call this stage with the flow itself"),
        (lambda flow: dataframe(SCHEMA).to_parquet("/tmp/x"), r"my_stage\(source\)\.to_parquet"),
        (lambda flow: flow.to_parquet("/tmp/x", partitions=0), "from 1 to 4096, got 0"),
    ],
)
def test_what_is_no_sink_is_refused_with_what_to_do(make: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make(same(dataframe(SCHEMA)))


def test_sinks_that_do_not_fit_are_refused_before_anything_runs(tmp_path: Path) -> None:
    flow = same(dataframe(SCHEMA)).to_parquet(str(tmp_path), roll_bytes="200m")
    with pytest.raises(UsageError, match=r"more than spark\.flux\.sink\.maxBytes"):
        ThreadQuery(flow, **ALONE)
    nothing = flux.stage(Nothing)(dataframe(SCHEMA)).to(Table("nothing"))
    with pytest.raises(UsageError, match="has no output for a sink"):
        ThreadQuery(nothing, **ALONE)
    with pytest.raises(UsageError, match=r"needs spark\.flux\.replicas\.ordered=true"):
        ThreadQuery(same(dataframe(SCHEMA)).to(Table("unordered")), replicas_ordered=False, **ALONE)


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([]),
        pa.schema([("i", pa.month_day_nano_interval())]),
        pa.schema([("s", pa.struct([]))]),
    ],
    ids=["no columns", "intervals", "structs of nothing"],
)
def test_rows_that_no_file_can_hold_are_refused_before_anything_runs(schema: pa.Schema, tmp_path: Path) -> None:
    flow = flux.stage(lambda batch: batch)(dataframe(schema))
    with pytest.raises(SchemaError, match=f"its output cannot go to parquet files in {tmp_path}"):
        ThreadQuery(flow.to_parquet(str(tmp_path)), **ALONE)


def test_two_sinks_and_a_stage_can_take_the_same_output() -> None:
    flow = same(dataframe(SCHEMA))
    with ThreadQuery(
        flow.to(Table("first")), flow.to(Table("second")), same(flow).to(Table("third")), **ALONE
    ) as query:
        query.started().feed([batches(300)])
        query.wait()
    found = [Table.stores[name].rows() for name in ("first", "second", "third")]
    assert found == [list(range(300))] * 3


def test_batches_that_wait_are_written_as_one_where_the_sink_takes_it() -> None:
    held, calls = threading.Event(), []

    class Joining(flux.Sink):
        traits = flux.SinkTraits(joins_bytes=40)

        def __deepcopy__(self, memo: Any) -> Joining:
            return self

        def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
            calls.append((position.sequence, batch.num_rows))
            assert held.wait(LIMIT_S)

    made = lines(Joining())
    made.write(0, 0, 0, ONE)
    until(lambda: calls, "the first write is under way")
    for position in range(1, 8):
        made.write(0, 0, position, ONE)
    held.set()
    until(lambda: made.has(0, 0) == 8, "everything is outside")
    assert calls == [(0, 1), (1, 5), (6, 2)], "eight bytes a row, forty at once"
    made.close()
