"""Lookups in tables that are read anew: the operator against a model in plain Python, the plan, and the driver's readings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from controller.planning.checks import check_ends
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from controller.planning.relations.lookups import refreshed_lookup
from flux.dataflow.plan import FromMicroBatches, Plan, StreamSourcePlan
from flux.dataflow.relations.join_flow import Joining, JoinInput, ResolvedJoin
from flux.dataflow.relations.lookups import VERSION
from flux.dataflow.source import DataFrameSource
from flux.errors import UsageError
from flux.expressions.steps import RowSteps, Select
from flux.expressions.tree import Column
from flux.joins.join import Join
from flux.joins.join_spec import JoinSpec
from flux.operators.tentative import TentativeRows
from flux.settings import Settings
from flux.vault.location import Folder
from flux.windows.window import END_OF_TIME, FIRST_VERSION, NEVER
from spark_integration.streaming import table_refresh
from spark_integration.streaming.table_versions import (
    KeptVersions,
    RefreshSchedule,
    key_twice,
    others_ended,
    with_number,
)
from spark_integration.tasks.entry_points import PartitionReached
from tests.flux.peeked import PeekedLine, table_of
from tests.flux.stepped import CHECKPOINT, Stepped, events

LONG, TIME = pa.int64(), pa.timestamp("us", "UTC")
LEFT = pa.schema([("item", LONG), ("n", LONG)])
TABLE = pa.schema([("id", LONG), ("price", LONG)])
RIGHT = TABLE.append(VERSION)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


def made(how: str = "left_outer", rows: Any = ()) -> Any:
    outputs = (("item", 0), ("n", 1)) if how.endswith(("semi", "anti")) else (("item", 0), ("n", 1), ("price", 3))
    spec = JoinSpec(how, ((0,), (0,)), outputs)
    resolved = ResolvedJoin((None, None), (("item",), ("id",)), spec, partial(Join, spec, LEFT, TABLE), None, None)
    return refreshed_lookup(resolved, LEFT, table(rows), "prices", 600_000_000)


def table(rows: Any) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [[], []]
    return pa.table([pa.array(each, LONG) for each in columns], schema=TABLE)


def batch(schema: pa.Schema, rows: Any) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [[] for _ in schema]
    return pa.record_batch([pa.array(each, LONG) for each in columns], schema=schema)


def stepped(how: str = "left_outer", rows: Any = ()) -> Stepped:
    return Stepped(made(how, rows), [LEFT, RIGHT], ("item",))


KEYS = st.sampled_from([0, 1, 2, None])
TABLES = st.dictionaries(st.integers(0, 2), st.integers(10, 99), max_size=3)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), how=st.sampled_from(["inner", "left_outer", "left_semi", "left_anti"]))
def test_each_row_meets_the_version_that_was_in_force_before_its_step(data: Any, how: str) -> None:
    first = data.draw(TABLES)
    ours, versions, sent, told = stepped(how, list(first.items())), {0: first}, 0, 0
    steps = data.draw(st.integers(1, 14))
    for number, event in enumerate(data.draw(events(steps))):
        ours.happen(event)
        match data.draw(st.integers(0, 3)):
            case 0:  # all rows of the next version, cut anywhere, before it counts
                sent += 1
                versions[sent] = data.draw(TABLES)
                rows = [(*row, FIRST_VERSION + sent) for row in versions[sent].items()]
                cut = data.draw(st.integers(0, len(rows)))
                assert ours.give(batch(RIGHT, rows[:cut]), 1) == ours.give(batch(RIGHT, rows[cut:]), 1) == []
            case 1 if told < sent:  # versions may be passed over
                told = data.draw(st.integers(told + 1, sent))
                assert ours.move(NEVER, FIRST_VERSION + told + 1) == []
            case _:
                rows = [(key, number) for key in data.draw(st.lists(KEYS, max_size=5))]
                assert ours.give(batch(LEFT, rows)) == expected(how, rows, versions[told])
    ours.move(NEVER, END_OF_TIME)  # perhaps in the middle of a version
    assert ours.give(batch(LEFT, [(0, 0)])) == expected(how, [(0, 0)], versions[told])


def expected(how: str, rows: Any, prices: dict[int, int]) -> list[tuple]:
    if how in ("left_semi", "left_anti"):
        return [row for row in rows if (row[0] in prices) == (how == "left_semi")]
    return [(*row, prices.get(row[0])) for row in rows if how == "left_outer" or row[0] in prices]


def test_a_version_without_rows_of_a_partition_counts_there_too() -> None:
    ours = stepped(rows=[(1, 10)])
    assert ours.give(batch(LEFT, [(1, 0)])) == [(1, 0, 10)]
    ours.move(NEVER, FIRST_VERSION + 1)
    assert ours.give(batch(LEFT, [(1, 0)])) == [(1, 0, 10)], "the version with which the query began"
    ours.move(NEVER, FIRST_VERSION + 2)
    assert ours.give(batch(LEFT, [(1, 0)])) == [(1, 0, None)]


def test_a_tentative_row_meets_the_version_in_force() -> None:
    line = PeekedLine(made("left_outer", [(1, 10)]), ("item",), [LEFT, RIGHT], "append")
    line.rows(1, batch(RIGHT, [(1, 20, FIRST_VERSION + 1)]))
    overlay = [TentativeRows(0, batch(LEFT, [(1, 0)])), TentativeRows(1, batch(RIGHT, [(1, 30, FIRST_VERSION + 2)]))]
    assert table_of(line.peek(50, overlay)) == [["1", "0", "10"]]
    line.watermarks([NEVER, FIRST_VERSION + 2])
    assert table_of(line.peek(50, overlay)) == [["1", "0", "20"]]


def test_changes_have_a_version_once() -> None:
    ours = stepped()
    ours.happen(CHECKPOINT)
    ours.give(batch(RIGHT, [(key, key, FIRST_VERSION + 1) for key in range(1000)]), 1)
    ours.move(NEVER, FIRST_VERSION + 2)
    assert ours.operator.changes()["rows"].num_rows == 1000
    ours.give(batch(LEFT, [(1, 0)]))
    assert ours.operator.changes()["rows"] is None


# ---- the plan

BIDS = pa.schema([("item", LONG), ("n", LONG), ("at", TIME)])


def to_join(left: JoinInput, right: JoinInput, joining: Joining, behind: Any) -> ResolvedJoin:
    """Join ``item`` with ``id``, of which the columns of the right side are chosen anew."""
    outputs = tuple((name, at) for at, name in enumerate([*left.schema.names, "id", "price"]))
    made = JoinSpec(joining.how, ((0,), (0,)), outputs)
    chosen = Select(tuple((name, Column(name, right.schema.field(name).type)) for name in ("id", "price")))
    before = None, RowSteps.of(right.schema, [chosen])
    make = partial(Join, made, left.schema, before[1].output)
    return ResolvedJoin(before, (("item",), ("id",)), made, make, None, None)


class Keep(flux.Sink):
    def write(self, position: Any, batch: Any) -> None: ...


def prices(more: Any = ()) -> Any:
    columns = pa.schema([("unused", pa.string()), *TABLE, *more])
    return flux.lookup(DataFrameSource("prices", columns), refresh="10 minutes", name="prices")


def compiled(*flows: Any, rows: Any = ()) -> Plan:
    def to_table(flow: Any) -> pa.Table:
        made = table(rows)
        return pa.table({"unused": pa.array(["u"] * len(made)), "id": made["id"], "price": made["price"]})

    return compile_plan(
        flows, Settings.of(), lambda schema: schema, "q", b"", to_join=to_join, to_table=to_table if rows else None
    )


def bids(endless: bool = False) -> Any:
    def read(partition: int) -> Any:
        return iter(())

    read.endless = endless  # type: ignore[attr-defined]
    return flux.source(read, BIDS, 1, "bids").withWatermark("at", "1 second")


def test_it_is_a_stage_that_keeps_event_time_and_gets_versions_as_micro_batches() -> None:
    @flux.stage(key="price", window=flux.window("at", "1 hour"))
    class Counts(flux.Aggregate):
        n = flux.count()

    plan = compiled(Counts(bids().join(prices(), "item")).to(Keep()), rows=[(1, 10)])
    source = plan.sources[1]
    assert isinstance(source, StreamSourcePlan)
    assert source.schema.names == ["id", "price", VERSION.name]
    assert source.columns == (1, 2, 3), "others are not read anew"
    looked_up, counts = plan.stages
    assert looked_up.name == "bids.join.prices"
    assert looked_up.timed_inputs == (0, 1)
    assert counts.timed_inputs == (0,)
    _, edge = (plan.edges[number] for number in looked_up.edges_in)
    assert isinstance(edge, FromMicroBatches)
    assert edge.states
    assert edge.schema.names == ["id", "price", VERSION.name]
    assert [edge.schema.names[at] for at in edge.key] == ["id"]
    text = explain(plan)
    assert "a table, read anew every 10 minutes and sent to the stage that looks rows up in it" in text
    assert "look up id in table prices, which is read anew every 10 minutes" in text


def test_it_ends_with_the_rows_that_look_it_up() -> None:
    plan = compiled(bids().join(prices(), "item").to(Keep()))
    check_ends(plan, goes_on=True)
    assert not any(source.endless for source in plan.sources)

    def ended(pauses: Any) -> bool:
        member = SimpleNamespace(stats={"pauses": pauses})
        board: Any = SimpleNamespace(
            phase="running", complete={}, members=SimpleNamespace(workers={0: member, 1: SimpleNamespace(stats={})})
        )
        return others_ended(plan, board)

    assert not ended([])
    assert not ended([(0, 0, 3, False)])
    assert ended([(0, 0, 3, True)])


def also_alone(table: Any) -> Plan:
    return compiled(
        bids().join(table, "item").to(Keep()), flux.stage(lambda rows: rows, schema=TABLE)(table).to(Keep())
    )


MISTAKES = {
    "alone": (lambda: compiled(flux.stage(lambda rows: rows, schema=TABLE)(prices()).to(Keep())), "right side of a join"),
    "as well": (lambda: also_alone(prices()), "right side of a join"),
    "columns": (lambda: bids().join(prices().where("price > 1"), "item"), r"flux.lookup\(df.where\(...\).select\(...\), refr"),
    "ttl": (lambda: bids().join(prices(), "item", ttl="1 day"), "leave ttl out"),
    "right": (lambda: bids().join(prices(), "item", "right"), "Use inner, left, left_semi or left_anti"),
    "refresh": (lambda: flux.lookup(DataFrameSource("x", TABLE), refresh="1 ms"), "expected numbers with units"),
    "short": (lambda: flux.lookup(DataFrameSource("x", TABLE), refresh="10 milliseconds"), "at least 1 second"),
    "source": (lambda: flux.lookup(bids(), refresh="1 hour"), "expected a batch DataFrame"),
    "twice": (lambda: compiled(bids().join(prices(), "item").to(Keep()), rows=[(1, 10), (1, 11)]), "have id = 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_answered_with_what_to_write(name: str) -> None:
    write, words = MISTAKES[name]
    with pytest.raises(UsageError, match=words):
        write()


# ---- the driver's readings


def test_a_key_that_is_there_twice_makes_no_version() -> None:
    plan = compiled(bids().join(prices(), "item").to(Keep()))

    def version(ids: list[int]) -> Any:
        return with_number(table(list(zip(ids, ids, strict=True))), plan.sources[1].schema, 1)

    assert key_twice(plan, 1, version([1, 2, 3])) == ""
    assert key_twice(plan, 1, version([])) == ""
    assert key_twice(plan, 1, version([1, 2, 1])) == "several rows have id in table prices = 1"
    semi = compiled(bids().join(prices(), "item", "semi").to(Keep()))
    assert key_twice(semi, 1, version([1, 2, 1])) == ""


def test_a_version_that_was_begun_is_there_after_a_restart_and_the_one_before_it_goes(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        KeptVersions(Folder(tmp_path), "a/b").keep(with_number(table([(number, number)]), RIGHT, number))
    after = KeptVersions(Folder(tmp_path), "a/b")
    found = after.kept(3)
    assert found is not None
    assert found.rows.to_pylist() == [{"id": 3, "price": 3, VERSION.name: FIRST_VERSION + 3}]
    assert found.rows.schema.equals(RIGHT)
    assert after.kept(4) is None, "its document is that of another version"
    assert after.kept(1) is None
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / ".table-a%2Fb-1").write_bytes(b"torn")
    with pytest.raises((OSError, pa.ArrowInvalid)):
        after.kept(3)


def test_a_reading_that_fails_is_made_again_at_the_next_time() -> None:
    schedule = RefreshSchedule(600.0, 600.0, 0.0)
    text = schedule.failed(610.0, "it cannot be read: no such table")
    assert text == (
        "it cannot be read: no such table. Rows are looked up in the table of 610 s ago, and it is read again every 600 s"
    )
    assert schedule.due_at == 1210.0
    assert schedule.failed(1210.0, "it cannot be read: no such table") == "", "each warning once"
    assert "too large" in schedule.failed(1220.0, "it is too large")
    assert schedule.due_at == 1820.0
    assert "the table of an earlier start, and" in RefreshSchedule(600.0, 0.0, None).failed(1.0, "it is too large")
    schedule.read(1300.0)
    assert (schedule.read_at, schedule.due_at) == (1300.0, 1900.0)
    assert schedule.failed(1900.0, "it is too large"), "it was read in between"


class Driver:
    """The readings of a table in the place of its thread, with jobs that send a version at once."""

    def __init__(self, location: Any, *readings: int) -> None:
        """Prepare a table. ``readings`` are the prices of the readings to come, after which the query ends."""
        #: Acts of the jobs, in order: the prices of a version that was sent, the number to which the watermark was
        #: raised, and the end of the table or of the query.
        self.happened: list[Any] = []
        self.failures, self.at_job = 0, lambda: None
        self._readings, self._rows = list(readings), 0
        self.table = table_refresh.TableRefresh(
            compiled(bids().join(prices(), "item").to(Keep())), 1, self.read, location, self
        )  # type: ignore[arg-type]
        self.table._schedule.due_at = 0.0
        self.table._context, self.table._rendezvous = self, None  # type: ignore[assignment]

    def run(self) -> list[Any]:
        self.table._run()
        return self.happened

    def read(self) -> pa.Table:
        if not self._readings:
            self.table.end(0.0)
            raise UsageError("it ends")
        self.table._schedule.every_s = 0.0
        return table([(1, self._readings.pop(0))])

    # ---- jobs

    def broadcast(self, rows: bytes) -> Any:
        self.sent = pa.ipc.open_stream(rows).read_all()["price"].to_pylist()
        return SimpleNamespace(destroy=lambda: None)

    def parallelize(self, *_: Any) -> Any:
        return self

    def mapPartitions(self, _: Any) -> Any:  # noqa: N802
        return self

    def collect(self) -> list[PartitionReached]:
        self.at_job()
        if self.failures:
            self.failures -= 1
            raise ValueError("no executor")
        self.happened.append(self.sent)
        self._rows += len(self.sent)
        return [PartitionReached(0, self._rows, [self._rows], NEVER, 0)]

    def setJobGroup(self, *_: Any, **__: Any) -> None:  # noqa: N802
        pass

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802
        pass

    # ---- the controller

    def edge_watermark(self, edge: int, watermark: int) -> None:
        self.happened.append(watermark - FIRST_VERSION)

    def edge_complete(self, edge: int, producers: list[int]) -> None:
        self.happened.append("complete")

    def job_failed(self, what: str, reason: str) -> None:
        self.happened.append(f"{what} failed: {reason}")

    def warn(self, text: str) -> None:
        self.happened.append(text)


def test_a_version_counts_when_all_have_it_and_not_before() -> None:
    assert Driver(None, 10, 20).run() == [1, [10], 2, [20], 3]


def test_a_driver_that_starts_again_sends_the_newest_version_again_and_reads_the_table_at_once(tmp_path: Path) -> None:
    Driver(Folder(tmp_path), 10, 20).run()
    after = Driver(Folder(tmp_path), 30)
    assert after.table._schedule.read_at is None
    assert after.run() == [1, [20], 3, [30], 4]


def test_a_version_that_was_begun_is_sent_by_the_next_driver_whatever_the_table_has_by_then(tmp_path: Path) -> None:
    dies = Driver(Folder(tmp_path), 10, 20)

    def job() -> None:
        if dies.sent == [20]:
            dies.table.end(0.0)
            dies.failures = 1

    dies.at_job = job
    assert dies.run() == [1, [10], 2]
    assert Driver(Folder(tmp_path), 30).run() == [1, [20], 3, [30], 4]


def test_a_job_that_fails_is_made_again_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_refresh, "AGAIN_S", 0.0)
    once = Driver(None, 10)
    once.failures = 1
    _, warning, *others = once.run()
    assert "version 1 could not be sent, and is sent again: no executor" in warning
    assert others == [[10], 2]
    ever = Driver(None, 10)
    ever.failures = table_refresh.TRIES
    assert ever.run()[-1] == "table prices failed: version 1 cannot be sent: no executor"


def test_a_version_that_is_being_sent_is_applied_before_the_table_ends() -> None:
    driver = Driver(None, 10, 20)
    driver.at_job = driver.table.complete
    assert driver.run() == [1, [10], 2, "complete"]


def test_a_location_that_cannot_be_written_ends_the_query(tmp_path: Path) -> None:
    class Full(Folder):
        def write(self, name: str, data: bytes) -> None:
            if name.startswith("stream-"):
                raise OSError("no space left on device")
            super().write(name, data)

    assert Driver(Full(tmp_path), 10).run() == ["table prices failed: no space left on device"]
