"""A query with a stream-stream join, a fixed table and one that is read anew, on a checkpoint location: a worker is killed, the
query is stopped, and started again."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from pyspark.sql import functions as F  # noqa: N812
from striking import WAIT_S, strike, until

import flux
from flux.dataflow.plan import StreamSourcePlan
from flux.errors import UsageError
from spark_integration.query.query import Query
from spark_integration.streaming.table_refresh import TableReader

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
KEYS, PARTITIONS = 20, 2
#: Seconds between two looks at the gate.
LOOK_S = 0.02
ROWS = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
ON = "c.key = v.key AND c.ts BETWEEN v.ts AND v.ts + INTERVAL 2 SECONDS"


def round_of(partition: int, number: int) -> pa.RecordBatch:
    """Return a row of each key of the partition, at second ``number``."""
    keys = np.arange(KEYS) * PARTITIONS + partition
    seconds = pa.array(np.full(KEYS, number * 1_000_000)).cast(pa.timestamp("us")).cast(ROWS.field("ts").type)
    return pa.record_batch([pa.array(keys), pa.array(np.full(KEYS, number)), seconds], schema=ROWS)


def permitted(gate: Path, every: int) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Read each ``every``-th round below the number in the file ``gate``. The source ends there if the number has a full stop."""
    gate_path = str(gate)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        number, said, looked = start * every, "0", 0.0
        while True:
            if time.monotonic() - looked > LOOK_S:  # the worker asks a thousand times a second
                looked = time.monotonic()
                with open(gate_path) as file:
                    said = file.read()
            if number < int(said.rstrip(".")):
                yield round_of(partition, number)
                number += every
            elif said.endswith("."):
                return
            else:
                yield None

    return read


class Gate:
    """The number of rounds that sources may read."""

    def __init__(self, folder: Path) -> None:
        self.path, self.rounds = folder / "gate", 0
        self.open(20)

    def open(self, more: int, end: str = "") -> None:
        self.rounds += more
        self.path.with_suffix(".new").write_text(f"{self.rounds}{end}")
        self.path.with_suffix(".new").rename(self.path)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Let rows flow until a condition holds."""

        def flowing() -> object:
            self.open(1)  # more of them make the answer of a slow machine large
            time.sleep(0.1)
            return condition()

        until(flowing, what)


def write_price(file: Path, price: int) -> None:
    """Let the table have another price. A negative one is there twice for key 0."""
    file.with_suffix(".new").write_text(str(price))
    file.with_suffix(".new").rename(file)


def prices(spark: Any, file: Path) -> Any:
    """Return a DataFrame that reads the file whenever it is read."""
    path = str(file)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            with open(path) as opened:
                price = int(opened.read())
            keys = [*range(KEYS - 1), *([0] if price < 0 else [])]
            columns = {"key": keys, "price": [price] * len(keys), "unread": ["unread"] * len(keys)}
            yield pa.RecordBatch.from_pydict(columns)

    return spark.range(1, numPartitions=1).mapInArrow(read, "key long, price long, unread string")


def started(spark: Any, tmp_path: Path, label: str) -> Query:
    clicks, views = (
        flux.source(permitted(tmp_path / "gate", every), ROWS, PARTITIONS, name).withWatermark("ts", "1 second")
        for name, every in (("clicks", 1), ("views", 5))
    )
    names = spark.range(KEYS).selectExpr("id AS key", f"concat('{label} ', id) AS name", "'unread' AS unread")
    table = flux.lookup(prices(spark, tmp_path / "price"), refresh="1 second", name="prices")
    seen = clicks.alias("c").join(views.alias("v"), F.expr(ON)).select("c.key", "c.n", F.col("v.n").alias("view"))
    flow = seen.join(names, "key").join(table, "key", "left").select("key", "n", "view", "name", "price")
    return flow.to_parquet(str(tmp_path / "rows"), roll_every="200ms").start(
        spark=spark, workers=3, checkpointLocation=tmp_path / "location", checkpoint_interval="200ms",
        progress_interval="100ms",
    )  # fmt: skip


def found(tmp_path: Path) -> list[dict[str, Any]]:
    if not (tmp_path / "rows").exists():
        return []
    rows: list[dict[str, Any]] = (
        pyarrow.dataset.dataset(tmp_path / "rows", format="parquet", exclude_invalid_files=True).to_table().to_pylist()
    )
    return rows


def prices_are(tmp_path: Path, price: int) -> Callable[[], bool]:
    """Look for a row with the price in the files that have come since the last look: they become many while it waits."""
    seen: set[Path] = set()

    def look() -> bool:
        new = {*(tmp_path / "rows").glob("part-*.parquet")} - seen
        seen.update(new)
        return any(price in pyarrow.parquet.read_table(file)["price"].to_pylist() for file in new)

    return look


def expected(spark: Any, label: str, rounds: int) -> list[tuple]:
    """Return Spark's batch answer, without prices."""
    clicks, views = (
        spark.createDataFrame(
            pa.Table.from_batches([round_of(p, n) for p in range(PARTITIONS) for n in range(0, rounds, every)])
        )
        for every in (1, 5)
    )
    names = spark.range(KEYS).selectExpr("id AS key", f"concat('{label} ', id) AS name")
    seen = clicks.alias("c").join(views.alias("v"), F.expr(ON)).select("c.key", "c.n", F.col("v.n").alias("view"))
    return sorted(map(tuple, seen.join(names, "key").collect()))


@pytest.mark.usefixtures("nothing_left_behind")
def test_rows_and_versions_are_those_of_one_run(slots: Any, tmp_path: Path) -> None:
    rows_are_those_of_one_run(slots, tmp_path, executor=False, again=False)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.costs_an_executor
@pytest.mark.parametrize("again", [False, True])
def test_rows_and_versions_are_those_of_one_run_where_an_executor_is_killed(
    cluster: Any, tmp_path: Path, again: bool
) -> None:
    rows_are_those_of_one_run(cluster, tmp_path, executor=True, again=again)


def rows_are_those_of_one_run(spark: Any, tmp_path: Path, executor: bool, again: bool) -> None:
    """Kill a worker of the join, or its executor, between two versions of the table. ``again``: stop the query and start it
    again afterwards."""
    write_price(tmp_path / "price", 1)
    gate = Gate(tmp_path)
    query = started(spark, tmp_path, "first")
    try:
        gate.until(prices_are(tmp_path, 1), "rows with the first prices")
        strike(query, signal.SIGKILL, executor=executor, stage=1)
        write_price(tmp_path / "price", 2)
        gate.until(prices_are(tmp_path, 2), "rows with the second prices")
        if again:
            query = stopped_and_started(query, spark, tmp_path, gate)
        gate.open(5, end=".")
        assert query.awaitTermination(WAIT_S), "the table ends with the rows that look it up"
    finally:
        query.stop()
    rows, prices = found(tmp_path), {1, 2, 3, 4} if again else {1, 2}
    assert sorted((row["key"], row["n"], row["view"], row["name"]) for row in rows) == expected(
        spark, "first", gate.rounds
    )
    assert {row["price"] for row in rows} == {None, *prices}
    assert {row["key"] for row in rows if row["price"] is None} == {KEYS - 1}, "the key that no version has"
    last = max(row["n"] for row in rows)
    assert {row["price"] for row in rows if row["n"] == last} == {None, max(prices)}


def stopped_and_started(query: Query, spark: Any, tmp_path: Path, gate: Gate) -> Query:
    """Give the table a key twice, and another price when a warning has come. Stop the query then, and start it again with another
    fixed table, which does not count, and another price, which does."""
    write_price(tmp_path / "price", -1)
    gate.until(
        lambda: any("several rows have key in table prices = 0" in str(event) for event in query.events()),
        "a warning that the table stays as it is",
    )
    write_price(tmp_path / "price", 3)
    gate.until(prices_are(tmp_path, 3), "rows with the third prices")
    query.stop()
    write_price(tmp_path / "price", 4)
    query = started(spark, tmp_path, "second")
    try:
        gate.until(prices_are(tmp_path, 4), "rows with the fourth prices")
    except BaseException:
        query.stop()
        raise
    return query


def test_a_table_whose_files_are_gone_is_not_an_empty_one(slots: Any, tmp_path: Path) -> None:
    folders = tmp_path / "names", tmp_path / "others"

    def write(folder: Path, file: str, keys: list[int]) -> None:
        folder.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pa.table({"key": keys}), folder / file)

    for folder, keys in zip(folders, ([1, 2], [3]), strict=True):
        write(folder, "a.parquet", keys)
    names, others = (slots.read.parquet(str(folder)) for folder in folders)
    plan: Any = SimpleNamespace(
        sources=[StreamSourcePlan(0, "names", pa.schema([("key", pa.int64())]), refresh_us=1)],
        settings=SimpleNamespace(lookup_max_bytes=1 << 20),
    )
    read = TableReader(plan, 0, names.union(others).union(slots.range(9, 10)))
    assert sorted(read()["key"].to_pylist()) == [1, 2, 3, 9]
    write(folders[0], "b.parquet", [4])
    assert sorted(read()["key"].to_pylist()) == [1, 2, 3, 4, 9]
    shutil.rmtree(folders[0])
    for _ in range(2):
        with pytest.raises(UsageError, match="it cannot be read: its files are gone"):
            read()
    write(folders[0], "c.parquet", [5])
    assert sorted(read()["key"].to_pylist()) == [3, 5, 9]
