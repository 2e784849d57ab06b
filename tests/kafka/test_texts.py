"""The text of rows in one pass: Python's own text for the same values, and none where quotes are not enough."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.connectors.kafka.formats.text_encode import lines, objects, row_texts

KINDS = (pa.int64(), pa.int32(), pa.string(), pa.float64())
PLAIN = st.one_of(st.none(), st.text("ab ß☃'-;", max_size=6))
ROWS = st.lists(
    st.tuples(
        st.one_of(
            st.none(), st.sampled_from([-(2**63), 2**63 - 1, 0, -1, 9, 10, 10**18]), st.integers(-(2**63), 2**63 - 1)
        ),
        st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
        PLAIN,
        st.one_of(st.none(), st.sampled_from([0.5, -2.25])),
    ),
    max_size=20,
)


def arrays(rows: list[tuple[Any, ...]], skip: int) -> list[pa.Array]:
    """Make a column of each kind, sliced behind the first ``skip`` rows."""
    return [pa.array([row[i] for row in rows], kind)[skip:] for i, kind in enumerate(KINDS)]


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(0, 3))
def test_objects_are_what_python_writes(rows: list[tuple[Any, ...]], skip: int) -> None:
    names = ["a", 'b"', "ü", "d"]
    expected = [
        json.dumps(dict(zip(names, row, strict=True)), separators=(",", ":"), ensure_ascii=False) for row in rows[skip:]
    ]
    assert objects(arrays(rows, skip), names).to_pylist() == expected


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(0, 3))
def test_lines_have_nothing_for_null_and_quotes_for_nothing(rows: list[tuple[Any, ...]], skip: int) -> None:
    def field(value: Any) -> str:
        return "" if value is None else '""' if value == "" else str(value)

    expected = [",".join(map(field, row)) for row in rows[skip:]]
    assert lines(arrays(rows, skip), list("abcd")).to_pylist() == expected


@pytest.mark.parametrize(
    ("text", "as_json"),
    [
        ('a"b', True),
        ("a\\b", True),
        ("a\nb", True),
        ("\x01", True),
        ('a"b', False),
        ("a,b", False),
        ("\r", False),
        ("a\nb", False),
    ],
)
def test_text_with_more_to_do_is_left_to_others(text: str, as_json: bool) -> None:
    given = [pa.array([1, 2]), pa.array(["plain", text])]
    assert row_texts(given, ("", ",", ""), "", as_json, lambda column: column) is None
    assert row_texts([column[:1] for column in given], ("", ",", ""), "", as_json, lambda column: column) is not None
