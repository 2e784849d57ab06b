"""Parquet files as a sink: every row once, in files that end by size and time, with any number of lost writers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import LIMIT_S, ThreadQuery, dataframe
from outside_store import ALONE, SCHEMA, batches, lose, same, slowly, until

import flux
from flux.connectors.files.parquet_sink import ParquetFiles
from flux.operators.batches import logical_bytes, split

ONE = pa.record_batch([pa.array([1])], schema=SCHEMA)


def test_files_have_each_row_once_and_end_by_size(tmp_path: Path) -> None:
    flow = same(dataframe(SCHEMA)).to_parquet(str(tmp_path), roll_bytes=8000, roll_every=LIMIT_S)
    with ThreadQuery(flow, step_max_rows=10, **ALONE) as query:
        query.started().feed([batches(1005)])
        query.wait()
    files = sorted(tmp_path.iterdir())
    assert sorted(pq.read_table(tmp_path).column("x").to_pylist()) == list(range(1005))
    sizes = [pq.read_metadata(file).num_rows for file in files]
    assert len(files) > 3
    assert max(sizes) < 1000, sizes


def test_a_file_ends_when_its_time_is_over(tmp_path: Path) -> None:
    ends = threading.Event()

    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        yield from batches(20)
        while not ends.is_set():
            yield None

    with ThreadQuery(
        same(flux.source(read, SCHEMA, 1)).to_parquet(str(tmp_path), roll_every="100ms"), **ALONE
    ) as query:
        query.started()
        until(lambda: list(tmp_path.glob("*.parquet")), "a file, though more rows may come")
        until(lambda: pq.read_table(tmp_path).num_rows == 20, "all rows are in files")
        ends.set()
        query.wait()


def test_files_are_the_same_after_a_take_over(tmp_path: Path) -> None:
    flow = same(dataframe(SCHEMA)).to_parquet(str(tmp_path), roll_bytes=800, partitions=2)
    with ThreadQuery(flow, **ALONE) as query:
        query.started().feed([slowly(batches(4000))])
        until(lambda: len(list(tmp_path.glob("*.parquet"))) > 3, "files come")
        assert query.server.core.table is not None
        lose(query, query.server.core.table.stages[1][0][0].worker)
        query.wait()
    assert sorted(pq.read_table(tmp_path).column("x").to_pylist()) == list(range(4000))


WIDE = pa.schema([("x", pa.int64()), ("s", pa.string())])
NARROW = {"sink_max_bytes": "32k", "batch_max_bytes": "2k"}


@flux.stage(schema=WIDE, replicas=2, partitions=1)
def widened(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch([batch.column("x"), pa.array(["w" * 100] * batch.num_rows)], schema=WIDE)


def test_a_step_that_is_larger_than_all_room_goes_into_several_files(tmp_path: Path) -> None:
    """Let the sink write the first files while the rest of the step waits for room."""
    flow = widened(dataframe(SCHEMA)).to_parquet(str(tmp_path), roll_bytes="4k")
    with ThreadQuery(flow, **(ALONE | NARROW | {"batch_max_rows": 5000})) as query:
        query.started().feed([batches(3000, 3000)])
        query.wait()
    assert sorted(pq.read_table(tmp_path).column("x").to_pylist()) == list(range(3000))
    assert len(list(tmp_path.glob("*.parquet"))) > 30


def test_batches_of_one_row_fill_files_with_what_they_cost_to_keep(tmp_path: Path) -> None:
    flow = same(dataframe(SCHEMA)).to_parquet(str(tmp_path), roll_bytes="8k", roll_every="1h")
    with ThreadQuery(flow, step_max_rows=1, **(ALONE | NARROW)) as query:
        query.started().feed([batches(400, 1)])
        query.wait()
    assert sorted(pq.read_table(tmp_path).column("x").to_pylist()) == list(range(400))


def test_two_writers_of_a_file_leave_one_whole_file_and_nothing_hidden(tmp_path: Path) -> None:
    one, other = ParquetFiles(str(tmp_path), 0), ParquetFiles(str(tmp_path), 0)
    for each in (one, other):
        each.open(flux.SinkContext("q", 0, "last", 0, 1))
        assert each.committed(0) == 0
        assert each.write(ONE, flux.Position(0, 0)) == 0
    for each in (one, other):
        assert each.write(ONE.slice(1), flux.Position(0, 1)) is None
    assert [file.name for file in tmp_path.iterdir()] == ["part-00000-q-0-0000000000-0000000002.parquet"]
    (tmp_path / ".part-00000-q-0-0000000002-0000000004.parquet.abc").write_bytes(b"of a writer that was lost")
    (tmp_path / ".part-00001-q-0-0000000002-0000000004.parquet.abc").write_bytes(b"of another partition")
    assert one.committed(0) == 2
    assert sorted(file.name[:11] for file in tmp_path.iterdir()) == [".part-00001", "part-00000-"]


def test_a_file_that_was_removed_is_noticed_by_the_next_primary(tmp_path: Path) -> None:
    flow = same(dataframe(SCHEMA)).to_parquet(str(tmp_path), roll_bytes=400)
    with ThreadQuery(flow, **ALONE) as query:
        query.started().feed([slowly(batches(6000))])
        until(lambda: len(list(tmp_path.glob("*.parquet"))) > 4, "files come")
        sorted(tmp_path.glob("*.parquet"))[1].unlink()
        assert query.server.core.table is not None
        lose(query, query.server.core.table.stages[1][0][0].worker)
        assert "is missing" in query.error().summary


def test_each_start_writes_files_of_its_own(tmp_path: Path) -> None:
    for start in range(2):
        with ThreadQuery(same(dataframe(SCHEMA)).to_parquet(str(tmp_path)), **ALONE) as query:
            query.started().feed([batches(10)])
            query.wait()
        for file in tmp_path.glob("*-q-*"):  # as if it had had another id
            file.rename(file.with_name(file.name.replace("-q-", f"-{start}-")))
    assert pq.read_table(tmp_path).num_rows == 20


def test_the_size_of_values_does_not_depend_on_how_they_lie_in_memory() -> None:
    rows = pa.record_batch(
        {
            "n": pa.array([1, None, 3, 4], pa.int32()),
            "s": pa.array(["a", None, "ccc", ""]),
            "l": pa.array([["x"], [], None, ["yy", "z"]]),
            "m": pa.array([[("k", 1)], None, [], [("kk", 2), ("l", 3)]], pa.map_(pa.string(), pa.int64())),
            "t": pa.array([{"a": "q", "b": [1]}, None, {"a": None, "b": None}, {"a": "", "b": []}]),
            "f": pa.array([[1, 2]] * 4, pa.list_(pa.int8(), 2)),
            "b": pa.array([True, None, False, True]),
            "z": pa.nulls(4),
        }
    )
    again = pa.Table.from_batches([rows.slice(0, 3), rows.slice(3)]).combine_chunks().to_batches()[0]
    assert logical_bytes(again) == logical_bytes(rows) > 0
    parts = [rows.slice(at, 1) for at in range(4)]
    copied = [pa.record_batch(part.to_pydict(), schema=rows.schema) for part in parts]
    assert [logical_bytes(part) for part in parts] == [logical_bytes(part) for part in copied]


@pytest.mark.parametrize("column", [pa.array([True, None] * 500), pa.array([None, 3] * 500, pa.int8())])
def test_the_same_rows_are_cut_alike_however_they_lie_in_memory(column: pa.Array) -> None:
    """Cut by content alone: replicas get rows from a neighbour, or through a message, and positions mean nothing if two
    replicas cut differently."""
    part = pa.record_batch({"x": column}).slice(7, 800)
    copy = pa.record_batch({"x": pa.array(part.column("x").to_pylist(), column.type)})
    assert part.nbytes != copy.nbytes
    assert [b.num_rows for b in split(part, 1000, 90)] == [b.num_rows for b in split(copy, 1000, 90)]


def test_two_flows_of_a_query_can_write_to_one_folder(tmp_path: Path) -> None:
    flows = [same(dataframe(SCHEMA, name)).to_parquet(tmp_path) for name in ("one", "other")]
    with ThreadQuery(*flows, **ALONE) as query:
        query.started().feed([batches(50)])
        query.feed([batches(50)], source=1)
        query.wait()
    assert sorted(pq.read_table(tmp_path).column("x").to_pylist()) == sorted([*range(50), *range(50)])


@pytest.mark.parametrize("type_", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()])
def test_bytes_of_strings_are_those_of_the_rows_alone(type_: pa.DataType) -> None:
    """Count 4 bytes and the length of each string, and none that lie before a slice, behind it, or under a null."""
    column = pa.array(["", "a", "bcd", None, "ef"]).cast(type_)
    for start in range(6):
        for rows in range(6 - start):
            part = column.slice(start, rows)
            expected = sum(4 + len(each or "") for each in part.to_pylist())
            assert logical_bytes(pa.record_batch({"s": part})) == expected, (start, rows)
    none = pa.Array.from_buffers(type_, 0, [None, pa.py_buffer(b""), pa.py_buffer(b"")])
    tags = pa.ListArray.from_arrays(pa.array([0, 0, 0], pa.int32()), none)
    assert logical_bytes(pa.record_batch({"tags": tags})) == 8, "no strings, and not one offset"


def test_output_whose_rows_are_gone_leaves_an_empty_file_in_its_place(tmp_path: Path) -> None:
    """Write a batch without rows in place of such output, because the next start looks for files that follow each
    other."""
    sink = ParquetFiles(str(tmp_path), 0)
    sink.open(flux.SinkContext("q", 0, "last", 0, 1))
    for position, batch in enumerate([ONE.slice(0, 0), ONE, ONE.slice(0, 0), ONE.slice(0, 0)]):
        sink.write(batch, flux.Position(0, position))
    assert sink.committed(0) == 4
    assert pq.read_table(tmp_path).num_rows == ONE.num_rows
