"""``mapInArrow``: a function of the user's among conditions and columns, with a row for each row."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import flux
from controller.operate import connection_file
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.plan import EventTime, Plan
from flux.errors import SchemaError, UsageError, UserCodeError
from flux.expressions.tree import Column, FunctionCall, Literal
from flux.settings import Settings
from flux.shell.process import Rendezvous
from flux.vault.plan_without_code import for_a_vault
from spark_integration.query.same_plan import description, difference
from spark_integration.streaming import ingress_file
from tests.flux import harness
from tests.flux.resolved import to_steps

LONG, TIME = pa.int64(), pa.timestamp("us")
SCHEMA = pa.schema([("note", pa.string()), ("k", LONG), ("unread", LONG)])
PARSED = pa.schema([("ts", TIME), ("k", LONG), ("length", LONG)])
K = Column("k", LONG)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


def parsed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        times = pc.strptime(batch["note"], "%Y-%m-%d", "us")
        lengths = pc.cast(pc.utf8_length(batch["note"]), LONG)
        yield pa.RecordBatch.from_arrays([batch["k"], times, lengths], names=["k", "ts", "length"])


def above(limit: int, of: Any = K) -> Any:
    return FunctionCall("greater", (of, Literal(limit, LONG)), pa.bool_())


def source(read: Any = lambda partition, start: iter(())) -> Any:
    return flux.source(read, SCHEMA, 1, "rows")


def compiled(*flows: Any) -> Plan:
    return compile_plan(flows, Settings.of(), lambda schema: schema, "q", b"", to_steps=to_steps)


@flux.stage(partitions=1)
class Keep(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


class Counts(flux.Aggregate):
    n = flux.count()


def rows(*notes: str, first: int = 0) -> pa.RecordBatch:
    ids = pa.array(range(first, first + len(notes)), LONG)
    return pa.RecordBatch.from_arrays([pa.array(notes), ids, ids], schema=SCHEMA)


def steps_of(flow: Any) -> Any:
    (edge,) = compiled(Keep(flow)).edges
    return edge.steps


BATCH = rows("2024-01-01", "2024-01-02", "2024-01-03")


def test_a_function_gives_the_declared_columns_in_their_order() -> None:
    steps = steps_of(source().mapInArrow(parsed, PARSED))
    found, kept = steps.run(BATCH)
    assert (found.schema, kept) == (PARSED, None)
    assert found["ts"].to_pylist()[0] == datetime(2024, 1, 1)
    assert found["k"].to_pylist() == [0, 1, 2]
    assert pickle.loads(pickle.dumps(steps)).run(BATCH)[0].equals(found)
    assert steps.run(BATCH.slice(0, 0))[0].schema == PARSED


def test_conditions_and_columns_stand_in_front_and_behind() -> None:
    flow = source().where(above(0)).mapInArrow(parsed, PARSED).where(above(1)).select(("ts", Column("ts", TIME)))
    steps = steps_of(flow)
    assert str(steps).split("; ")[1].startswith("mapInArrow parsed as `ts` timestamp[us], `k` int64, `length` int64")
    assert [str(each)[:6] for each in steps.chain] == ["where ", "mapInA", "where ", "select"], (
        "none passes the function"
    )
    found, kept = steps.run(BATCH)
    assert found.to_pylist() == [{"ts": datetime(2024, 1, 3)}]
    assert kept.to_pylist() == [2]


def test_a_function_gets_all_columns_and_only_what_is_wanted_travels() -> None:
    (edge,) = compiled(flux.stage(key="k")(Counts)(source().mapInArrow(parsed, PARSED))).edges
    assert edge.columns is None
    assert edge.schema.names == ["k"]
    chosen = source().select(("note", Column("note", pa.string())), ("k", K)).mapInArrow(parsed, PARSED)
    (edge,) = compiled(flux.stage(key="k")(Counts)(chosen)).edges
    assert edge.columns == (0, 1), "a select in front says which columns are read"


def test_times_are_parsed_in_front_of_a_watermark() -> None:
    flow = source().mapInArrow(parsed, PARSED).withWatermark("ts", "1 second")
    window = flux.stage(key="k", window=flux.window("ts", "1 minute"))(Counts)
    plan = compiled(window(flow), Keep(flow.late))
    time = plan.sources[0].event_time
    assert isinstance(time, EventTime)
    assert (time.column, str(time.steps)[:17]) == ("ts", "mapInArrow parsed")
    behind = source(lambda partition, start: iter(())).mapInArrow(parsed, PARSED).withWatermark("ts", "1 second")
    with pytest.raises(UsageError, match="that of 'ts', which is not there any more"):
        compiled(window(behind.mapInArrow(parsed, PARSED)))


def test_a_plan_with_another_function_or_schema_does_not_go_on() -> None:
    def other(batches: Any) -> Any:
        yield from batches

    was, same, now = (
        description(compiled(Keep(source().mapInArrow(each, PARSED)))) for each in (parsed, parsed, other)
    )
    assert difference(was, same) == ""
    assert "mapInArrow parsed" in difference(was, now)


def test_a_vault_and_writers_of_a_stream_get_plans_that_travel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let a plan with a local function travel, which plain pickle does not know."""
    local = lambda batches: parsed(batches)  # noqa: E731
    flow = source().mapInArrow(local, PARSED)
    plan = compiled(
        Keep(flow.withWatermark("ts", "1 second")), Keep(flow.where(above(1))), Keep(source().where(above(1)))
    )
    vault = pickle.loads(pickle.dumps(for_a_vault(plan)))
    assert [edge.steps is None for edge in vault.edges] == [True, True, False]
    assert vault.sources[0].event_time.steps is None
    monkeypatch.setattr(connection_file, "folder", lambda: tmp_path)
    written = pickle.loads(ingress_file.write(plan, "q", Rendezvous("", None, b"")).read_bytes())
    assert written.plan.edges[1].steps.apply(BATCH)["k"].to_pylist() == [2]


def test_explain_names_the_function() -> None:
    assert "through mapInArrow parsed," in explain(compiled(Keep(source().mapInArrow(parsed, PARSED))))


def fewer(batches: Any) -> Any:
    for batch in batches:
        yield batch.slice(1)


def more(batches: Any) -> Any:
    for batch in batches:
        yield batch
        yield batch


def nothing(batches: Any) -> Any:
    yield from ()


def no_batches(batches: Any) -> Any:
    return next(batches)


def numbers(batches: Any) -> Any:
    yield from [1, 2]


def leaves(batches: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fewer, r"mapInArrow\(fewer\): expected a row for each of 3 rows, got 2.*where\(\).*@flux.stage"),
        (more, r"expected a row for each of 3 rows, got 6"),
        (nothing, r"expected a row for each of 3 rows, got 0"),
        (no_batches, "expected an iterator of batches, got RecordBatch: yield each batch"),
        (numbers, r"mapInArrow\(numbers\): expected a pyarrow.RecordBatch, got int"),
        (leaves, r"mapInArrow\(leaves\): it calls sys.exit\(\)"),
        (parsed, r"mapInArrow\(parsed\): declared \(.*got \("),
    ],
)
def test_another_number_of_rows_and_other_mistakes_end_the_query_with_their_place(function: Any, said: str) -> None:
    (edge,) = compiled(Keep(source().mapInArrow(function, SCHEMA))).edges
    with pytest.raises(UserCodeError, match=rf"the place: .*{said}"):
        edge.rows_of(BATCH, lambda: "the place")


def test_batches_may_be_cut_in_the_function() -> None:
    def halves(batches: Any) -> Any:
        for batch in batches:
            yield from (batch.slice(0, 1), batch.slice(1))

    assert steps_of(source().mapInArrow(halves, SCHEMA)).apply(BATCH).equals(BATCH)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((5, SCHEMA), "expected a function of an iterator of batches, got int"),
        ((lambda a, b: a, SCHEMA), r"must take one argument, the iterator of batches; got <lambda>\(a, b\)"),
        ((lambda batches: None, SCHEMA), "<lambda> returns nothing: yield a batch"),
        ((parsed, None), "the schema of the rows that the function gives is missing"),
        ((parsed, "k BIGINT, k BIGINT"), "column 'k' twice"),
        ((parsed,), "missing a required argument: 'schema'; it takes func, schema"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises((UsageError, SchemaError), match=said):
        source().mapInArrow(*arguments)


def test_a_query_gives_the_rows_that_a_function_has_made() -> None:
    def read(partition: int, start: int) -> Iterator[pa.RecordBatch]:
        for number in range(start, 20):
            yield rows(*[f"2024-01-{day:02}" for day in range(1, 11)], first=10 * number)

    seen = harness.Rows()
    flow = seen.stage(source(read).mapInArrow(parsed, PARSED).where(above(150)))
    with harness.ThreadQuery(flow, to_steps=to_steps) as query:
        query.wait()
    assert sorted(row["k"] for row in seen) == list(range(151, 200))
    assert all(row["length"] == 10 for row in seen)
