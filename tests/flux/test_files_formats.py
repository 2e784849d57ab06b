"""The rows of files of each format, read by their format alone: borders of blocks, files without rows, casts, INT96."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from flux.connectors.files import formats, text_streams
from flux.connectors.files.errors import BadFile
from flux.connectors.files.formats import CsvFormat, FileFormat, JsonFormat, ParquetFormat
from flux.operators.plain_columns import cast_exactly

LOCAL = fs.LocalFileSystem()
AB = pa.schema([("a", pa.string()), ("b", pa.string())])
N = pa.schema([("n", pa.int64())])


def read(format: FileFormat, path: Path, skip: int = 0) -> list[dict[str, Any]]:
    return [row for batch in format.read(LOCAL, str(path), skip) for row in batch.to_pylist()]


def crossing(block: int, at: int, value: bytes, encoding: str = "utf-8") -> tuple[bytes, str]:
    """Make a file of two rows, and the text of its first field. ``value`` is at the end of this text, ``at`` bytes
    behind the border of the first block."""
    text = "x" * (block + at - 1) + value.decode()
    return f'"{text}",first\r\nsecond,row\r\n'.encode(encoding), text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("breaks", [b"\r\n.", b"\r\r\n.", b"\n.", b"\r."])
def test_a_line_break_in_quotes_is_kept_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: bytes, encoding: str
) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", 200_000)
    for at in range(-4, 5):
        data, text = crossing(200_000, at, breaks, encoding)
        (tmp_path / "f").write_bytes(data)
        rows = read(CsvFormat(AB, multi_line=True, encoding=encoding), tmp_path / "f")
        assert rows == [{"a": text, "b": "first"}, {"a": "second", "b": "row"}], at


def test_a_line_break_at_the_border_of_a_whole_block_is_kept(tmp_path: Path) -> None:
    data, text = crossing(formats.BLOCK_BYTES, -1, b"\r\n.")
    (tmp_path / "f").write_bytes(data)
    assert data[formats.BLOCK_BYTES - 1 : formats.BLOCK_BYTES + 1] == b"\r\n"
    assert read(CsvFormat(AB, multi_line=True), tmp_path / "f")[0]["a"] == text


def test_a_row_ends_once_wherever_a_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", 100_000)
    for at in range(-3, 4):
        (tmp_path / "f").write_bytes(b"x" * (100_000 + at - 2) + b",1\r\n\r\ny,2\r\n")
        for multi_line in (False, True):
            assert [row["b"] for row in read(CsvFormat(AB, multi_line=multi_line), tmp_path / "f")] == ["1", "2"], at


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("text", ["", "\ufeff", "\n", "\r\n\n", "a,b", "\ufeffa,b", "a,b\n", "a,b\r", "a,b\n\n"])
@pytest.mark.parametrize("compressed", [False, True])
def test_csv_without_rows_has_none(tmp_path: Path, header: bool, text: str, compressed: bool) -> None:
    path = tmp_path / ("f.csv.gz" if compressed else "f.csv")
    data = text.encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    names = text.strip("\ufeff\r\n")
    assert read(CsvFormat(AB, header=header), path) == ([{"a": "a", "b": "b"}] if names and not header else [])


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\t\n ", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\n" * 200_000])
@pytest.mark.parametrize("compressed", [False, True])
def test_json_without_rows_has_none(tmp_path: Path, data: bytes, compressed: bool) -> None:
    path = tmp_path / ("f.json.gz" if compressed else "f.json")
    for behind in (b"", b'{"n": 1}'):
        path.write_bytes(gzip.compress(data + behind) if compressed else data + behind)
        assert read(JsonFormat(N), path) == ([{"n": 1}] if behind else [])


@pytest.mark.parametrize("data", [b"null", b"\xef\xbb\xbf null\n", b'{"n": 1}\nnull\n', b'{"n": 1}\n{"n": 1}\n null'])
@pytest.mark.parametrize("first_bytes", [1, 7, 64 << 10])
def test_a_json_row_that_is_null_is_an_error_and_no_death_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, first_bytes: int
) -> None:
    monkeypatch.setattr(text_streams, "_FIRST_BYTES", first_bytes)
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(BadFile, match="a row is null, and an object is expected in each line"):
        read(JsonFormat(N), tmp_path / "f")


@pytest.mark.parametrize("block_bytes", [40, 64, 1 << 20])
def test_null_inside_a_json_row_is_a_missing_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", block_bytes)
    (tmp_path / "f").write_bytes(b'{"n": null, "o": "} null"}\n{"n":null}\n' * 20)
    assert read(JsonFormat(N), tmp_path / "f") == [{"n": None}] * 40


def test_a_compressed_file_that_is_cut_off_is_no_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "f.csv.gz"
    path.write_bytes(gzip.compress(b"1\n" * 10_000)[:-9])
    with pytest.raises(BadFile, match=r"f\.csv\.gz: cannot be read"):
        read(CsvFormat(N), path)


@pytest.mark.parametrize("format", [CsvFormat(N), JsonFormat(N)])
def test_a_row_that_is_too_long_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: FileFormat
) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", 100_000)
    row = b'{"n": 1, "o": "%s"}\n' if isinstance(format, JsonFormat) else b'"%s"\n'
    (tmp_path / "f").write_bytes(row % (b"x" * 300_000))
    with pytest.raises(BadFile, match=r"a row is longer than 100,000 bytes\. Mend"):
        read(format, tmp_path / "f")


DAY = datetime.date(2026, 1, 2)
NOON = datetime.datetime(2026, 1, 2, 12)
MIDNIGHT = datetime.datetime(2026, 1, 2)
#: Errors of this project, or of Arrow.
NO_CAST = (
    "would become|no cast|may change|[Cc]ould not|[Ii]nvalid|lose data|not in range|loss|out of bounds|truncated|parse"
)
#: Values, their type in a file, the type in the schema, and the values that are read; None: refused, because the value
#: would change.
CASTS: list[tuple[Any, Any, Any, Any]] = [
    (0.5, pa.float64(), pa.float32(), 0.5),
    (0.1, pa.float64(), pa.float32(), None),
    (1e39, pa.float64(), pa.float32(), None),
    (float("inf"), pa.float64(), pa.float32(), float("inf")),
    (MIDNIGHT, pa.timestamp("us"), pa.date32(), DAY),
    (NOON, pa.timestamp("us"), pa.date32(), None),
    (NOON, pa.timestamp("us", "UTC"), pa.date32(), None),
    (DAY, pa.date32(), pa.timestamp("us"), MIDNIGHT),
    (NOON, pa.timestamp("us"), pa.time64("us"), None),
    (1_000_001, pa.timestamp("ns"), pa.timestamp("us"), None),
    (1_000_001, pa.timestamp("us"), pa.timestamp("ms"), None),
    (5, pa.int64(), pa.bool_(), None),
    (1, pa.int64(), pa.bool_(), True),
    (2.0, pa.float64(), pa.bool_(), None),
    (5, pa.int64(), pa.timestamp("us"), None),
    (5, pa.int32(), pa.date32(), None),
    (DAY, pa.date32(), pa.int32(), None),
    (300, pa.int64(), pa.int8(), None),
    (1.5, pa.float64(), pa.int64(), None),
    (2.0, pa.float64(), pa.int64(), 2),
    (2**53 + 1, pa.int64(), pa.float64(), None),
    (0.125, pa.float64(), pa.decimal128(10, 2), None),
    (0.25, pa.float64(), pa.decimal128(10, 2), decimal.Decimal("0.25")),
    (decimal.Decimal("0.125"), pa.decimal128(10, 3), pa.decimal128(10, 2), None),
    (decimal.Decimal("12345678901234567890.12"), pa.decimal128(38, 2), pa.float64(), None),
    (decimal.Decimal("0.25"), pa.decimal128(10, 2), pa.float64(), 0.25),
    (7, pa.int8(), pa.int64(), 7),
    ("7", pa.string(), pa.int64(), 7),
    ("x", pa.string(), pa.int64(), None),
    (b"x", pa.binary(), pa.string(), "x"),
    (b"\xff", pa.binary(), pa.string(), None),
]


@pytest.mark.parametrize(("value", "there", "wanted", "becomes"), CASTS)
def test_a_cast_changes_no_value(value: Any, there: pa.DataType, wanted: pa.DataType, becomes: Any) -> None:
    column = pa.array([None, value, None], there)
    nested = {
        "list": (pa.ListArray.from_arrays([0, 0, 3], column), pa.list_(wanted), [[], [None, becomes, None]]),
        "struct": (
            pa.StructArray.from_arrays([column], ["s"]),
            pa.struct([("s", wanted)]),
            [{"s": v} for v in (None, becomes, None)],
        ),
        "map": (
            pa.MapArray.from_arrays([0, 3], ["a", "b", "c"], column),
            pa.map_(pa.string(), wanted),
            [[("a", None), ("b", becomes), ("c", None)]],
        ),
        "column": (column, wanted, [None, becomes, None]),
        "part": (column.slice(1), wanted, [becomes, None]),
    }
    for rows, type_, expected in nested.values():
        if becomes is None:
            with pytest.raises(ValueError, match=NO_CAST):
                cast_exactly(rows, type_)
        else:
            made = cast_exactly(rows, type_)
            made.validate(full=True)
            assert made.to_pylist() == expected


def test_columns_inside_of_columns_are_found_by_name_and_nan_and_nulls_stay() -> None:
    made = cast_exactly(
        pa.array([{"b": 1, "a": float("nan"), "c": 2}, None, {"b": None, "a": 0.5, "c": 3}]),
        pa.struct([("a", pa.float32()), ("b", pa.int32()), ("missing", pa.string())]),
    )
    assert str(made.to_pylist()) == str(
        [{"a": float("nan"), "b": 1, "missing": None}, None, {"a": 0.5, "b": None, "missing": None}]
    )
    assert cast_exactly(pa.nulls(2), pa.list_(pa.int64())).to_pylist() == [None, None]
    assert cast_exactly(pa.array([[1], [2]], pa.list_(pa.int64(), 1)), pa.large_list(pa.int8())).to_pylist() == [
        [1],
        [2],
    ]
    assert cast_exactly(pa.array(["x", None]).dictionary_encode(), pa.large_string()).to_pylist() == ["x", None]


def test_a_file_whose_values_would_change_is_named_with_the_first_of_them(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": [0.5, 0.1], "s": [{"T": NOON}] * 2}), tmp_path / "f")
    told = r"f: cannot be read behind row 0: column v is double, not float: 0\.1 would become 0\.10000000149"
    with pytest.raises(BadFile, match=told):
        read(ParquetFormat(pa.schema([("v", pa.float32())])), tmp_path / "f")
    inner = pa.schema([("s", pa.struct([("t", pa.date32())]))])
    with pytest.raises(BadFile, match=r"field t is timestamp.*12:00:00 would become 2026-01-02"):
        read(ParquetFormat(inner), tmp_path / "f")
    whole = pa.schema([("s", pa.struct([("t", pa.timestamp("us"))]))])
    assert read(ParquetFormat(whole), tmp_path / "f") == [{"s": {"t": NOON}}] * 2
    assert read(ParquetFormat(whole, case_sensitive=True), tmp_path / "f") == [{"s": {"t": None}}] * 2


@pytest.mark.parametrize("day", ["0001-01-01", "1600-02-29", "1969-12-31", "2262-04-12", "9999-12-31"])
def test_int96_is_an_instant_in_microseconds(tmp_path: Path, day: str) -> None:
    """Write the instant byte by byte: pyarrow itself cannot write one after 2262."""
    instant = datetime.datetime.fromisoformat(f"{day}T23:59:59.999999+00:00")
    table = pa.table({"t": pa.array([0], pa.timestamp("ns")), "l": pa.array([[0]], pa.list_(pa.timestamp("ns")))})
    out = io.BytesIO()
    options = {
        "use_deprecated_int96_timestamps": True,
        "use_dictionary": False,
        "compression": "none",
        "store_schema": False,
    }
    pq.write_table(table, out, write_statistics=False, **options)
    epoch = (0).to_bytes(8, "little") + (2_440_588).to_bytes(4, "little")
    microseconds = (instant - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1)
    days, rest = divmod(microseconds, 86_400_000_000)
    data = out.getvalue()
    assert data.count(epoch) == 2
    written = (rest * 1000).to_bytes(8, "little") + (2_440_588 + days).to_bytes(4, "little")
    (tmp_path / "f").write_bytes(data.replace(epoch, written))
    schema = ParquetFormat(N).schema_of(LOCAL, str(tmp_path / "f"))
    assert schema.types == [pa.timestamp("us", "UTC"), pa.list_(pa.timestamp("us", "UTC"))]
    assert read(ParquetFormat(schema), tmp_path / "f") == [{"t": instant, "l": [instant]}]


@pytest.mark.parametrize("text", ["1.0", "1e3", "9223372036854775808", "-0.0"])
def test_whole_numbers_in_json_are_written_as_such_as_spark_wants_them(tmp_path: Path, text: str) -> None:
    """Spark 4.3 takes none of these for a BIGINT either (tests/spark/test_files_that_come.py compares)."""
    (tmp_path / "f").write_text(f'{{"n": {text}}}\n')
    with pytest.raises(BadFile, match="parse"):
        read(JsonFormat(N), tmp_path / "f")
    assert read(JsonFormat(pa.schema([("n", pa.float64())])), tmp_path / "f") == [{"n": float(text)}]
