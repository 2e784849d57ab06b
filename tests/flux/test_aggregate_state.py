"""State of aggregates that an earlier version has kept, in the form of 0.4.0 before groups were an object of their own."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import flux
from flux.operators.attributes import open_operator
from flux.operators.operator import Context
from flux.replica.snapshot import decode_snapshot, encode_snapshot

KEPT = msgspec.msgpack.decode((Path(__file__).parent / "data" / "aggregate_state.msgpack").read_bytes())
SCHEMA = pa.schema([
    ("k", pa.int64()), ("word", pa.string()), ("x", pa.int32()), ("f", pa.float64()), ("d", pa.decimal128(9, 2))
])  # fmt: skip


class Kept(flux.Aggregate):
    rows, words = flux.count(), flux.count("word")
    total, low, high, middle = flux.sum("x"), flux.min("x"), flux.max("x"), flux.mean("f")
    money, cheapest = flux.sum("d"), flux.min("d")
    first, last = flux.min("word"), flux.max("word")


class Noting(Kept):
    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.seen = 0

    def process(self, batch: pa.RecordBatch) -> Any:
        self.seen += batch.num_rows
        return super().process(batch)


def rows(first: int, end: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "k": None if i % 7 == 0 else i % 11,
                "word": None if i % 5 == 0 else f"w{i % 13}",
                "x": i - 50 if i % 3 else None,
                "f": i / 4,
                "d": Decimal(i * 37 - 900) / 100,
            }
            for i in range(first, end)
        ],
        SCHEMA,
    )


def opened(kind: type[Kept], key: tuple[str, ...]) -> Kept:
    operator = kind()
    open_operator(operator, Context("kept", key=key, schemas=(SCHEMA,), output_mode="update"))
    return operator


@pytest.mark.parametrize(
    ("name", "kind", "key", "later"),
    [
        ("one", Kept, ("k",), [(60, 63)]),
        ("two", Kept, ("k", "word"), [(60, 63), (200, 202)]),
        ("none", Kept, (), []),
        ("attributes", Noting, ("k",), [(60, 63)]),
    ],
)
def test_a_state_of_an_earlier_version_goes_on(
    name: str, kind: type[Kept], key: tuple[str, ...], later: list[tuple[int, int]]
) -> None:
    """Restore a kept snapshot of rows 0 to 59, with the kept changes of the rows in ``later``."""
    ours, expected = opened(kind, key), opened(kind, key)
    ours.restore(decode_snapshot(KEPT[name]["snapshot"], classes=()))
    expected.process(rows(0, 60))
    if KEPT[name]["changes"] is not None:
        ours.apply_changes(decode_snapshot(KEPT[name]["changes"], classes=()))
        for part in later:
            expected.process(rows(*part))
    (mine,), (theirs,) = ours.process(rows(0, 99)) or (), expected.process(rows(0, 99)) or ()
    assert mine.equals(theirs)
    assert mine.num_rows == {"one": 12, "two": 90, "none": 1, "attributes": 12}[name]
    assert vars(ours).get("seen") == vars(expected).get("seen")


@pytest.mark.parametrize("name", ["one", "two", "none"])
def test_a_snapshot_has_the_bytes_that_it_had(name: str) -> None:
    key = {"one": ("k",), "two": ("k", "word"), "none": ()}[name]
    operator = opened(Kept, key)
    operator.process(rows(0, 60))
    assert bytes(encode_snapshot(operator.snapshot(), "kept", classes=())) == KEPT[name]["snapshot"]
