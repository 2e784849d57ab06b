"""Python data sources inside workers, without a JVM: their rows are those that Spark makes of them, and a later life goes on at
any position."""

from __future__ import annotations

import datetime
import decimal
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    SimpleDataSourceStreamReader,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from pyspark.sql.worker.plan_data_source_read import records_to_arrow_batches

import flux
from controller.planning.compiler import compile_plan
from flux.connectors.ledger import LedgerBroken
from flux.settings import Settings
from spark_integration.datasource.rows import arrow_schema, batches
from spark_integration.query.source_setup import prepared

#: Readers run in threads.
LONG_S = 30.0
ROWS = 25_000


class Numbers(DataSource):
    """Three partitions of a third of the numbers each; streams of all numbers, whose end is random."""

    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "n long, text string"

    def reader(self, schema: StructType) -> Any:
        return Thirds(int(self.options.get("rows", ROWS)))

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        if self.options.get("simple") == "true":
            return super().streamReader(schema)
        return Stream()

    def simpleStreamReader(self, schema: StructType) -> Any:  # noqa: N802
        return Simple()


class Thirds(DataSourceReader):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(first) for first in range(3)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, str]]:
        """Yield rows, and keep the place in an attribute, as a reader may in a task of Spark's."""
        self.at = partition.value
        while self.at < self.rows:
            yield self.at, f"row {self.at}"
            self.at += 3


class Stream(DataSourceStreamReader):
    committed: list[Any] = []

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        self.end = {"n": 0}
        return self.end

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        self.end = getattr(self, "end", {})
        self.end["n"] = start["n"] + random.choice((0, 1, 5, 40))
        return self.end  # the same object each time

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        middle = (start["n"] + end["n"]) // 2
        return [InputPartition((start["n"], middle)), InputPartition((middle, end["n"]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        ns = range(*partition.value)
        yield pa.record_batch(
            [pa.array(ns, pa.int64()), pa.array([f"row {n}" for n in ns], pa.string())], names=["n", "text"]
        )

    def commit(self, end: dict[str, int]) -> None:
        self.committed.append(end)


class Simple(SimpleDataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"n": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[int, str]], dict[str, int]]:
        end = {"n": start["n"] + random.choice((0, 1, 5, 40))}
        return self.readBetweenOffsets(start, end), end

    def readBetweenOffsets(self, start: Any, end: Any) -> Iterator[tuple[int, str]]:  # noqa: N802
        return iter([(n, f"row {n}") for n in range(start["n"], end["n"])])


def taken(rows: Iterator[Any], count: int) -> list[tuple[int, Any]]:
    """Take at least ``count`` rows, each with the position behind its batch."""
    found: list[tuple[int, Any]] = []
    end = time.monotonic() + LONG_S
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} rows"
        try:
            given = next(rows)
        except StopIteration:
            break
        if given is None:
            time.sleep(0.002)
            continue
        assert given.batch.column("text").to_pylist() == [f"row {n}" for n in given.batch.column("n").to_pylist()]
        found += [(n, given.position) for n in given.batch.column("n").to_pylist()]
    rows.close()  # type: ignore[attr-defined]
    rows._thread.join(LONG_S)  # type: ignore[attr-defined]
    return found


def reader(kept: Any = None, **options: Any) -> Any:
    read = flux.datasource(Numbers, **options).reader  # type: ignore[attr-defined]
    read.prepare(kept)
    return read


def test_a_batch_source_is_read_whole_and_from_any_position() -> None:
    read = reader(partitions=2)
    assert read.partitions == 2
    open_ = [read.read(partition, None) for partition in range(2)]  # both at once
    found = [taken(rows, ROWS + 1) for rows in open_]
    assert [n for n, _ in found[0]] == [*range(0, ROWS, 3), *range(2, ROWS, 3)]
    assert [n for n, _ in found[1]] == [*range(1, ROWS, 3)]
    for rows in (1, 4999, 8334):
        again = taken(read.read(0, [0, rows]), ROWS + 1)
        assert [n for n, _ in again] == [n for n, _ in found[0]][rows:]
    assert taken(read.read(0, [2, 8333]), 1) == []


def test_what_was_planned_at_the_first_start_is_read_later() -> None:
    first = flux.datasource(Numbers, {"rows": 9}).reader  # type: ignore[attr-defined]
    first.planned = first.planned[:2]
    kept = first.prepare(None)
    assert [part.value for part in first.planned] == [0, 1]
    later = reader(kept, options={"rows": 9})
    assert [part.value for part in later.planned] == [0, 1]


def test_a_later_start_has_as_many_partitions_as_the_first() -> None:
    """Keep the number of partitions, although the data source plans others by then, and more of them are read at
    once."""
    first = flux.datasource(Numbers, {"rows": 9}, partitions=2).reader  # type: ignore[attr-defined]
    kept = first.prepare(None)
    assert len(first.planned) == 3
    source = flux.datasource(Numbers, {"rows": 9})
    source.reader.planned = [InputPartition(7)]  # type: ignore[attr-defined]
    flow = flux.stage(partitions=1, name="passed")(lambda batch: batch)(source)

    def compiled(**known: int) -> Any:
        plan = compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"", began_with=known)
        return prepared(plan, {"sources": {"numbers": kept}} if known else None)[0]

    assert compiled().edges[0].producers == 3
    plan = compiled(numbers=2)
    (about,) = plan.sources
    assert (about.partitions, about.reader.partitions, plan.edges[0].producers) == (2, 2, 2)
    rows = [n for partition in range(2) for n, _ in taken(about.reader.read(partition, None), 10)]
    assert sorted(rows) == list(range(9))
    with pytest.raises(
        flux.UsageError, match=r"planned at the first start cannot be read: .* another checkpointLocation"
    ):
        source.reader.prepare({"planned": "bm8="})  # type: ignore[attr-defined]


@pytest.mark.parametrize("simple", [False, True])
def test_a_stream_gives_the_same_rows_again_though_it_says_other_ends(tmp_path: Path, simple: bool) -> None:
    options = {"options": {"simple": simple}, "stream": True, "ledger": tmp_path, "poll": "1ms"}
    read = reader(**options)
    found = taken(read.read(0, None), 2000)
    assert [n for n, _ in found] == list(range(len(found)))
    positions = sorted({tuple(position) for _, position in found})
    assert len(positions) > 8
    later = reader({"ledger": read.id}, **options)
    for position in [None, *positions[:: len(positions) // 5]]:
        rest = [n for n, behind in found if position is None or tuple(behind) > position]
        assert [n for n, _ in taken(later.read(0, position), len(rest) + 1)][: len(rest)] == rest
    # A reader begins in the middle of a batch, too: behind a row that is not the last of its batch.
    batch, part, rows = next(position for position in positions if position[2] > 1)
    last = next(n for n, behind in reversed(found) if tuple(behind) == (batch, part, rows))
    assert taken(later.read(0, [batch, part, rows - 1]), 1)[0][0] == last
    read.forget()
    with pytest.raises(LedgerBroken, match="has 0 offsets, but batch"):
        taken(read.read(0, positions[-1]), 1)


def test_two_lives_at_once_agree_on_the_ends(tmp_path: Path) -> None:
    read = reader(stream=True, ledger=tmp_path, poll="1ms")
    lives = [read.read(0, None), read.read(0, None)]
    found = [taken(life, 300) for life in lives]
    short = min(map(len, found))
    assert [n for n, _ in found[0]][:short] == [n for n, _ in found[1]][:short] == list(range(short))
    first, second = (
        {tuple(position): n for n, position in life} for life in found
    )  # the last row before each position
    assert first
    assert all(second.get(position, n) == n for position, n in first.items())


def test_a_stream_commits_only_what_was_applied_and_only_if_told(tmp_path: Path) -> None:
    for commit in (False, True):
        Stream.committed.clear()
        rows = reader(stream=True, ledger=tmp_path, poll="1ms", commit=commit).read(0, None)
        end = time.monotonic() + LONG_S
        last = None
        while time.monotonic() < end and (last is None or last[0] < 5 or (commit and not Stream.committed)):
            given = next(rows)
            last = given.position if given is not None else last
            if last is not None and last[0] >= 5:
                rows.applied([4, 0, 1])
        rows.close()
        assert bool(Stream.committed) is commit
        assert all(offset == rows._offsets[3] for offset in Stream.committed)


EVERYTHING = StructType(
    [
        StructField("a", LongType()),
        StructField("s", StringType()),
        StructField("d", DoubleType()),
        StructField("o", BooleanType()),
        StructField("x", BinaryType()),
        StructField("t", TimestampType()),
        StructField("m", DecimalType(10, 2)),
        StructField("l", ArrayType(StringType())),
        StructField("k", MapType(StringType(), LongType())),
        StructField("r", StructType([StructField("i", LongType())])),
    ]
)
WHEN = datetime.datetime(2026, 5, 1, 12, 30, tzinfo=datetime.UTC)
FULL = (1, "ü", 2.5, True, b"\x00\xff", WHEN, decimal.Decimal("1.50"), ["a", None], {"k": 1}, Row(i=5))
VALUES: list[Any] = [
    [FULL, (None,) * 10, list(FULL)],
    [FULL, (2, 7, 1, False, bytearray(b"x"), WHEN, None, [], {}, (6,))],  # text that is a number, as Spark takes it
    [(1, True, *FULL[2:]), FULL],
    [Row(**dict(zip(EVERYTHING.names, FULL, strict=True)))],
    [FULL, Row(**dict(zip(reversed(EVERYTHING.names), reversed(FULL), strict=True)))],  # by name
    [FULL] * 10_001,
    [],
]


class Nothing(DataSource):
    pass


class OnlyStream(DataSource):
    @classmethod
    def name(cls) -> str:
        return "only stream"

    def schema(self) -> str:
        return "n long"

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        return Stream()


class OnlyBatch(OnlyStream):
    streamReader = DataSource.streamReader  # noqa: N815

    @classmethod
    def name(cls) -> str:
        return "only batch"

    def reader(self, schema: StructType) -> Any:
        return Thirds(9)


@pytest.mark.parametrize("rows", VALUES)
def test_rows_are_what_spark_makes_of_them(rows: list[Any]) -> None:
    ours = pa.Table.from_batches(batches(iter(rows), EVERYTHING, Nothing({})), arrow_schema(EVERYTHING))
    theirs = records_to_arrow_batches(iter(rows), 10_000, EVERYTHING, Nothing({}))
    assert ours.equals(pa.Table.from_batches(theirs, arrow_schema(EVERYTHING)))
    assert ours.num_rows == len(rows)


@pytest.mark.parametrize(
    "rows", [[(1,)], [FULL, FULL[:-1]], ["0123456789"], [Row(other=1)], [pa.record_batch({"a": [1]})], [5]]
)
def test_rows_that_do_not_fit_are_refused_as_spark_does(rows: list[Any]) -> None:
    with pytest.raises(PySparkRuntimeError) as theirs:
        list(records_to_arrow_batches(iter(rows), 10_000, EVERYTHING, Nothing({})))
    with pytest.raises(PySparkRuntimeError) as ours:
        list(batches(iter(rows), EVERYTHING, Nothing({})))
    assert str(ours.value) == str(theirs.value)


def test_what_is_no_iterator_is_refused() -> None:
    with pytest.raises(TypeError, match="must return an iterator, got list"):
        list(batches([FULL], EVERYTHING, Numbers({})))


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ("numbers", {}, "give the class"),
        (Numbers({}), {}, "wants a class"),
        (Numbers, {"options": [1]}, "must be a dict"),
        (Numbers, {"options": {"a": None}}, "text, numbers or booleans"),
        (Numbers, {"schema": 5}, "DDL or a StructType"),
        (Numbers, {"partitions": 0}, "1 to 4096"),
        (Numbers, {"ledger": "/x"}, "for stream=True"),
        (Numbers, {"stream": True}, "needs ledger"),
        (Nothing, {}, r"Nothing does not define schema\(\): define it, or say schema="),
        (Nothing, {"schema": "n long"}, r"Nothing cannot be read: it does not define reader\(schema\)$"),
        (
            Nothing,
            {"schema": "n long", "stream": True, "ledger": "/x"},
            "is no stream: it defines neither streamReader",
        ),
        (OnlyStream, {}, r"only stream cannot be read: .*; stream=True reads its streamReader"),
        (OnlyBatch, {"stream": True}, "only batch is no stream: .*; leave stream=True out"),
        (Numbers, {"stream": True, "ledger": "s3://x"}, "disk or network mount"),
        (Numbers, {"stream": True, "ledger": "/x", "partitions": 2}, "by one worker"),
        (Numbers, {"stream": True, "ledger": "/x", "poll": 0}, "above zero"),
    ],
)
def test_wrong_calls_are_refused_at_once(given: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(flux.UsageError, match=told):
        flux.datasource(given, **options)


def test_options_come_as_spark_hands_them_over() -> None:
    made = flux.datasource(Numbers, {"Rows": 3, "flag": True}).reader.made  # type: ignore[attr-defined]
    assert (made.options["rows"], made.options["FLAG"]) == ("3", "true")


class Raising(OnlyBatch):
    def reader(self, schema: StructType) -> Any:
        if self.options["in"] == "reader":
            raise ZeroDivisionError("by hand")
        return RaisingReader()


class RaisingReader(DataSourceReader):
    def partitions(self) -> Any:
        raise KeyError("nobody")

    def read(self, partition: InputPartition) -> Iterator[Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("reader", r"reader\(\) of .* raised ZeroDivisionError: by hand"),
        ("plan", r"partitions\(\) of .* KeyError: 'nobody'"),
    ],
)
def test_what_a_data_source_raises_before_anything_runs_is_the_users(where: str, told: str) -> None:
    with pytest.raises(flux.UserCodeError, match=told) as caught:
        flux.datasource(Raising, {"in": where})
    assert "test_datasource_rows.py" in caught.value.traceback


@pytest.mark.parametrize("wrong", [{"stream": "yes"}, {"commit": 1}, {"poll": 0}, {"poll": "soon"}])
def test_options_that_cannot_be_are_refused_where_the_flow_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(flux.UsageError, match=next(iter(wrong))):
        flux.datasource(OnlyBatch, **wrong)
