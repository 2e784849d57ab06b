"""Growing columns: they give the appended values back, for every type."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.joins.arena import PieceColumn, growing

VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [1, None, 3, -4]),
    (pa.int16(), [1, 2, 3]),
    (pa.float32(), [1.5, None]),
    (pa.bool_(), [True, None, False]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [None, date(2026, 1, 1)]),
    (pa.timestamp("us", "UTC"), [None, datetime(2026, 1, 1, tzinfo=UTC)]),
    (pa.decimal128(20, 2), [Decimal("1.10"), None, Decimal("-2.00")]),
    (pa.string(), ["a", None, "", "xyz"]),
    (pa.large_string(), ["a", "bc"]),
    (pa.binary(), [b"a", None]),
    (pa.binary(3), [b"abc", None, b"xyz"]),
    (pa.struct([("a", pa.int64()), ("b", pa.string())]), [{"a": 1, "b": None}, None, {"a": None, "b": "x"}]),
    (pa.struct([("a", pa.list_(pa.int64()))]), [{"a": [1]}, {"a": None}]),
    (pa.list_(pa.int64()), [[1], None, [], [2, 3]]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None]),
    (pa.null(), [None, None]),
]


@pytest.mark.parametrize(("type_", "values"), VALUES, ids=lambda given: str(given)[:20])
def test_rows_are_taken_as_they_were_appended_and_kept(type_: pa.DataType, values: list[Any]) -> None:
    random, column, expected = Random(1), growing(type_), []
    for turn in range(60):
        array = pa.array([random.choice(values) for _ in range(random.randint(0, 9))], type_)
        cut = array.slice(random.randint(0, len(array)))
        column.append(cut)
        expected += cut.to_pylist()
        if turn % 9 == 8:
            kept = np.flatnonzero([random.random() < 0.7 for _ in expected])
            column, expected = column.kept(kept), [expected[at] for at in kept]
        assert column.rows == len(expected)
        rows = [random.choice([None, random.randrange(len(expected))]) for _ in range(7)] if expected else []
        taken = column.take(pa.array(rows, pa.int64()))
        taken.validate(full=True)
        assert taken.type == type_
        assert taken.to_pylist() == [None if at is None else expected[at] for at in rows]


def test_a_column_in_pieces_has_few_and_holds_no_batch_that_it_was_cut_from() -> None:
    column = growing(pa.list_(pa.int64()))
    assert isinstance(column, PieceColumn)
    large = pa.array([[1, 2, 3]] * 10_000)
    for at in range(200):
        column.append(large.slice(at, 1))
    assert len(column._pieces) < 9
    assert column.rows == 200
    assert sum(piece.get_total_buffer_size() for piece in column._pieces) < 20_000
