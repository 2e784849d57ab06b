"""Sources whose order is in a ledger, in real executors: files that keep coming, written, half written, copied and renamed, and
a streaming data source, while a worker is killed and the query is stopped and started again; and files of Spark's streaming sink.
Each row once."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from striking import rows_in, until
from ticks import TICKS, Ticks

import flux
from flux.connectors.files.errors import BadFile
from flux.dataflow.source_reader import SourceSettings

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

ROWS, FILES = 500, 36
TOTAL = ROWS * FILES


@flux.stage(key="n", partitions=4, replicas=2)
def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(partitions=2, replicas=2)
def also(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Writer(threading.Thread):
    """A writer of files up to a number that a test gives; file i has the rows from i * ROWS."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.wanted, self.written = folder, 0, 0
        self.told = threading.Condition()
        self.start()

    def tell(self, wanted: int) -> None:
        with self.told:
            self.wanted = wanted
            self.told.notify()

    def run(self) -> None:
        while self.written < FILES:
            with self.told:
                self.told.wait_for(lambda: self.wanted > self.written)
            self.write(self.written)
            self.written += 1

    def write(self, number: int) -> None:
        rows = pa.table({"n": range(number * ROWS, (number + 1) * ROWS)})
        hidden, shown = self.folder / f".{number}", self.folder / f"a file, {number % 7}-{number}.parquet"
        pq.write_table(rows, hidden, row_group_size=200)
        if number % 3 == 0:
            data = hidden.read_bytes()
            with shown.open("wb") as out:  # half written, and seen like that
                for start in range(0, len(data), 1000):
                    out.write(data[start : start + 1000])
                    out.flush()
                    threading.Event().wait(0.005)
            hidden.unlink()
            return
        if number % 3 == 1:
            os.utime(hidden, (number, number))  # an old file, moved here
        os.replace(hidden, shown)


def dataset(folder: Path) -> Any:
    return pyarrow.dataset.dataset(folder, pa.schema([("n", pa.int64())]), "parquet", exclude_invalid_files=True)


def rows_there(folder: Path) -> list[int]:
    return list(dataset(folder).to_table()["n"].to_pylist())


def count(folder: Path) -> int:
    """Count rows by the footers; not too often, because a count takes processor time from the workers."""
    time.sleep(0.2)
    return int(dataset(folder).count_rows()) if folder.exists() else 0


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    (tmp_path / "in").mkdir()
    writer = Writer(tmp_path / "in")
    yield writer
    writer.tell(FILES)
    writer.join(60)


@pytest.mark.usefixtures("nothing_left_behind")
def test_each_row_comes_once_whatever_happens_to_files_workers_and_the_query(
    slots: Any, tmp_path: Path, writer: Writer
) -> None:
    def started(workers: int) -> Any:
        files = echo(flux.files(tmp_path / "in", schema="n long", partitions=3, poll="50ms"))
        stream = also(flux.datasource(Ticks, options, stream=True, ledger=tmp_path / "ledger", poll="10ms"))
        return flux.start(
            files.to_parquet(tmp_path / "out", roll_every="200ms"),
            stream.to_parquet(tmp_path / "ticks", roll_every="200ms"),
            spark=slots, workers=workers, checkpointLocation=tmp_path / "location", progress_interval="100ms",
            checkpoint_interval="200ms",
        )  # fmt: skip

    options = {"began": time.time(), "gate": str(tmp_path / "gate")}
    query = started(3)
    try:
        writer.tell(FILES // 3)
        until(lambda: rows_in(query) > TOTAL // 6, "some of the rows")
        until(lambda: count(tmp_path / "ticks") > TICKS // 6, "some of the stream")
        reader = query._server.core.table.sources[1][0]  # the only one of the stream
        os.kill(query.members()[reader].about.pid, signal.SIGKILL)
        writer.tell(FILES // 2)
        until(lambda: reader not in query.members(), "the loss is noticed")
        until(lambda: rows_in(query) > TOTAL // 3, "more rows")
    finally:
        query.stop()
    read = sorted((tmp_path / "in").glob("*.parquet"))[0]
    os.rename(read, tmp_path / "in" / "another name.parquet")
    writer.tell(FILES)
    (tmp_path / "gate").touch()
    query = started(2)
    try:
        until(lambda: count(tmp_path / "out") >= TOTAL and count(tmp_path / "ticks") >= TICKS, "all rows")
    finally:
        query.stop()
    assert Counter(rows_there(tmp_path / "out")) == Counter(range(TOTAL))
    assert Counter(rows_there(tmp_path / "ticks")) == Counter(range(TICKS))
    assert len(list((tmp_path / "in" / "_flux").iterdir())) == 1, "the query may go on"


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_folder_that_spark_streams_to_is_read_while_it_does(spark: Any, tmp_path: Path) -> None:
    given, by_spark, out = tmp_path / "given", tmp_path / "spark", tmp_path / "out"
    spark.range(0, 600, 1, 4).withColumnRenamed("id", "n").write.parquet(str(given))
    (by_spark / "_spark_metadata").mkdir(parents=True)
    flow = one(flux.files(by_spark, schema="n long", ledger=tmp_path / "ledger", partitions=1))
    query = flow.to_parquet(out, roll_every="100ms").start(spark=spark, workers=1)
    try:
        stream = spark.readStream.schema("n long").option("maxFilesPerTrigger", 2).parquet(str(given)).writeStream
        streamed = stream.format("parquet").option("checkpointLocation", str(tmp_path / "location"))
        assert streamed.trigger(availableNow=True).start(str(by_spark)).awaitTermination(120)
        (by_spark / "part-of-a-task-that-failed.parquet").write_bytes(next(by_spark.glob("part-*")).read_bytes())
        until(lambda: count(out) >= 600, "all rows")
        assert query.isActive
    finally:
        query.stop()
    assert sorted(rows_there(out)) == list(range(600))
    assert not (by_spark / "_flux").exists()
    assert not list((tmp_path / "ledger").iterdir()), "nobody can start this query again"


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_bad_file_is_shown_ends_the_query_as_what_it_is_and_may_be_left_out(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_integration.query.source_setup.EVERY_S", 0.2)
    monkeypatch.setattr("flux.connectors.files.completion.SHOWN_S", 0.0)
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    pq.write_table(pa.table({"n": range(3)}), folder / "good.parquet")
    (folder / "bad.parquet").write_text("n\n1\n2\n3\n")

    def started(bad_after: str) -> Any:
        flow = one(flux.files(folder, schema="n long", partitions=1)).to_parquet(out, roll_every="100ms")
        location = tmp_path / "location"
        return flow.start(
            spark=spark, workers=1, checkpointLocation=location, files_bad_after=bad_after, progress_interval="100ms"
        )

    query = started("3s")
    try:
        incomplete = {"bad.parquet": "it has no footer of a parquet file"}
        shown = {"files": {"incomplete": {"count": 1, "files": incomplete}}}
        until(lambda: query.status.get("unreadFiles") == shown, "the status names it")
        until(lambda: count(out) == 3, "the others are read")
        with pytest.raises(
            flux.BadFile, match=r"source files, partition 0: .*bad\.parquet: it has no footer"
        ) as raised:
            query.awaitTermination(60)
        assert raised.value.traceback == "", "it is nobody's code"
    finally:
        query.stop()
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    query = started("500ms")
    try:
        shown = {"files": {"corrupt": {"count": 1, "files": incomplete}}}
        until(lambda: query.status.get("unreadFiles") == shown, "it is put aside")
        pq.write_table(pa.table({"n": range(3, 6)}), folder / "more.parquet")
        until(lambda: count(out) == 6, "the query goes on")
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")
        query.stop()
    for path in folder.glob("*.parquet"):
        path.unlink()  # their rows are out: nothing needs them any more
    pq.write_table(pa.table({"n": range(6, 9)}), folder / "last.parquet")
    query = started("10m")
    try:
        until(lambda: count(out) == 9, "rows behind files that are gone")
        assert "unreadFiles" not in query.status or "missing" not in query.status["unreadFiles"]["files"]
    finally:
        query.stop()
    assert sorted(rows_there(out)) == list(range(9))


@flux.stage(partitions=1)
def one(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.mark.parametrize("sensitive", ["false", "true"])
def test_names_of_columns_are_those_that_spark_finds(spark: Any, tmp_path: Path, sensitive: str) -> None:
    (tmp_path / "a.csv").write_text("NAME,v\nx,1\n")
    (tmp_path / "a.json").write_text('{"NAME": "x", "v": 1}\n')
    pq.write_table(pa.table({"NAME": ["x"], "v": [1]}), tmp_path / "a.parquet")
    schema = "name STRING, v BIGINT"
    for kind in ("json", "parquet", "csv"):
        options = {"pathGlobFilter": f"*.{kind}", **({"header": True} if kind == "csv" else {})}
        source = flux.files(tmp_path, kind, schema, settle=0, ledger=tmp_path / "ledger", **options)
        read = source.reader  # type: ignore[attr-defined]
        read.prepare(None)
        read.configure(SourceSettings(case_sensitive=sensitive == "true"))
        rows, found = read.read(0, None), None
        while found is None:
            found = next(rows)
        rows.close()
        spark.conf.set("spark.sql.caseSensitive", sensitive)
        try:
            # By default Spark takes the columns of a CSV file by their places, and does not look at names.
            there = spark.read.schema(schema).options(**options).format(kind).load(str(tmp_path))
            expected = [row.asDict() for row in there.collect()]
        finally:
            spark.conf.unset("spark.sql.caseSensitive")
        if (kind, sensitive) == ("csv", "true"):
            expected = [{"name": None, "v": 1}]
        assert found.batch.to_pylist() == expected, kind


def read_alone(source: Any, count: int) -> list[dict[str, Any]]:
    read = source.reader
    read.prepare(None)
    rows, found = read.read(0, None), []
    end = time.monotonic() + 30
    while len(found) < count and time.monotonic() < end:
        taken = next(rows)
        found += [] if taken is None else taken.batch.to_pylist()
    rows.close()
    return found


def test_numbers_and_times_are_read_as_spark_reads_and_writes_them(spark: Any, tmp_path: Path) -> None:
    for number, value in enumerate(["1", "-0", "1.0", "1e3", "9223372036854775808", '"5"']):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.json").write_text(f'{{"n": {value}}}\n')
        fits = [row.n for row in spark.read.schema("n BIGINT").json(str(folder)).collect()] != [None]
        source = flux.files(folder, "json", "n BIGINT", settle=0)
        if fits:
            assert read_alone(source, 1) == [{"n": int(value)}]
        else:
            with pytest.raises(BadFile):
                read_alone(source, 1)
    out = tmp_path / "int96"
    instants = (
        "select timestamp_micros(n) t, struct(timestamp_micros(n) t) s from values (253402300799999999), (0) as v(n)"
    )
    spark.sql(instants).coalesce(1).write.parquet(str(out))
    source = flux.files(out)
    assert source.declared.field("t").type == pa.timestamp("us", "UTC")
    found = [row["t"] for row in read_alone(source, 2)]
    assert [instant.replace(tzinfo=None) for instant in found] == [
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999),
        datetime.datetime(1970, 1, 1),
    ]
