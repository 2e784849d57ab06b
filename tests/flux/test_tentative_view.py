"""``flux.TentativeView`` against a model in plain Python: a dictionary of keys, and a list of tentative rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.errors import UsageError
from partitioning.errors import KeyTypeError

WINDOW = pa.struct([("start", pa.int64()), ("end", pa.int64())])
SCHEMA = pa.schema([("window", WINDOW), ("site", pa.string()), ("n", pa.int64())])
#: A row: start of its window, site, and value.
Row = tuple[int, "str | None", int]


def batch(rows: list[Row]) -> pa.RecordBatch:
    listed = [{"window": {"start": start, "end": start + 1}, "site": site, "n": n} for start, site, n in rows]
    return pa.RecordBatch.from_pylist(listed, schema=SCHEMA)


def rows_of(found: pa.RecordBatch | pa.Table) -> list[Row]:
    return [(each["window"]["start"], each["site"], each["n"]) for each in found.to_pylist()]


class PlainView:
    """The law of ``flux.tentative_view``, word by word."""

    def __init__(self) -> None:
        self.stable: dict[Any, Row] = {}
        self.shown: list[tuple[int, int, Row]] = []
        self.calls = 0

    def table(self) -> dict[Any, tuple[Row, bool]]:
        found: dict[Any, tuple[Row, bool]] = {key: (row, False) for key, row in self.stable.items()}
        for _, _, row in sorted(self.shown, key=lambda each: each[:2]):
            found[row[:2]] = (row, True)
        return found

    def write(self, rows: list[Row]) -> None:
        self.stable |= {row[:2]: row for row in rows}

    def tentative(self, rows: list[Row], through: int) -> None:
        for row in rows:
            self.calls += 1
            self.shown.append((through, self.calls, row))

    def undo(self, start: int | None, end: int | None) -> None:
        self.shown = [
            each for each in self.shown if not ((start is None or start < each[0]) and (end is None or each[0] <= end))
        ]


ROWS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b", None]), st.integers(0, 99)), max_size=5)
BOUND = st.one_of(st.none(), st.integers(0, 5))
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), ROWS),
        st.tuples(st.just("tentative"), ROWS, st.integers(1, 5)),
        st.tuples(st.just("undo"), BOUND, BOUND),
        st.tuples(st.just("corrected"), st.integers(0, 5)),
    ),
    max_size=12,
)


def expect_changes(found: flux.ViewChanges, before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Compare the changes that a call has told with those of the table: keys may be told again, and no change is left out."""
    told = {row[:2]: (row, mark) for row, mark in zip(rows_of(found.rows), found.tentative.to_pylist(), strict=True)}
    removed = {(each["window"]["start"], each["site"]) for each in found.removed.to_pylist()}
    assert len(told) == found.rows.num_rows, "each key is told once"
    assert len(removed) == found.removed.num_rows
    assert all(after[key] == value for key, value in told.items())
    assert removed <= before.keys() - after.keys()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed <= told.keys() | removed


@settings(max_examples=40, deadline=None)
@given(CALLS)
def test_a_view_has_the_rows_of_the_model_and_tells_each_change(calls: list[Any]) -> None:
    view, model = flux.TentativeView(["window", "site"]), PlainView()
    for name, *given_ in calls:
        before = model.table()
        told = [batch(given_[0]), *given_[1:]] if name in ("write", "tentative") else given_
        found = getattr(view, name)(*told)
        model.undo(None, *given_) if name == "corrected" else getattr(model, name)(*given_)
        after = model.table()
        expect_changes(found, before, after)
        table = view.table()
        marks = table.column("tentative").to_pylist()
        shown = {row[:2]: (row, mark) for row, mark in zip(rows_of(table), marks, strict=True)} if after else {}
        assert shown == after
        assert view._shown or not view._shown_bytes


def test_undo_gives_the_last_stable_row_again_or_says_that_there_is_none() -> None:
    view = flux.TentativeView("site")
    view.write(batch([(0, "a", 1)]))
    shown = view.tentative(batch([(1, "a", 2), (1, "b", 3)]), 10)
    assert (rows_of(shown.rows), shown.tentative.to_pylist()) == ([(1, "a", 2), (1, "b", 3)], [True, True])
    found = view.undo(0, 10)
    assert (rows_of(found.rows), found.tentative.to_pylist()) == ([(0, "a", 1)], [False])
    assert found.removed.to_pydict() == {"site": ["b"]}


def test_memory_is_bounded_old_stable_rows_go_first_and_tentative_ones_are_never_forgotten() -> None:
    bound = 400_000
    view = flux.TentativeView("k", max_bytes=bound)
    schema = pa.schema([("k", pa.int64()), ("text", pa.string())])

    def many(first: int) -> pa.RecordBatch:
        keys = np.arange(first, first + 1000)
        return pa.record_batch([pa.array(keys), pa.array([f"{key:020}" for key in keys])], schema=schema)

    view.write(many(0))
    view.tentative(many(0), 10)
    for first in range(1000, 50_000, 1000):
        view.write(many(first))
        assert view.nbytes < 2 * bound
    assert view.forgotten > 20_000
    back = view.undo(None, None)
    assert back.rows.equals(many(0)), "the stable rows of keys with tentative rows are not forgotten"
    assert back.removed.num_rows == 0
    assert view.table().column("k").to_pylist()[-1] == 49_999
    shown = [view.tentative(many(first), 20).rows.num_rows for first in range(0, 20_000, 1000)]
    assert (shown[0], shown[-1]) == (1000, 0)
    assert view.left_out == 1000 * shown.count(0)
    assert view.nbytes < 2 * bound
    back = view.undo(None, None)
    assert back.rows.num_rows + back.removed.num_rows == sum(shown), "each row that was shown is taken back"


def nested(kind: pa.DataType) -> pa.RecordBatch:
    return pa.record_batch([pa.nulls(1, kind)], names=["k"])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: flux.TentativeView([]), "wants the names of its key columns"),
        (lambda: flux.TentativeView(3), "wants the names of its key columns, got 3"),  # type: ignore[arg-type]
        (lambda: flux.TentativeView("k").write(pa.table({"k": [1]})), "expected a pyarrow.RecordBatch, got Table"),  # type: ignore[arg-type]
        (lambda: flux.TentativeView("k").write(nested(pa.struct([]))), "no field in the structs of its key columns, k"),
        (lambda: flux.TentativeView("site").tentative(batch([]), None), "wants the time .*, through, .* got None"),  # type: ignore[arg-type]
        (lambda: flux.TentativeView("k").tentative([], 1), "expected a pyarrow.RecordBatch, got list"),  # type: ignore[arg-type]
        (lambda: flux.TentativeView("k", max_bytes=0), "max_bytes must be a number of bytes above zero"),
        (lambda: flux.TentativeView("k").write(batch([])), "no column 'k' in window, site, n"),
    ],
)
def test_mistakes_are_told(make: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        make()


def test_rows_of_another_schema_are_refused() -> None:
    view = flux.TentativeView("site")
    view.write(batch([(0, "a", 1)]))
    with pytest.raises(UsageError, match="expected rows of"):
        view.tentative(pa.record_batch({"site": ["a"]}), 1)


def test_a_view_whose_first_rows_cannot_have_keys_says_so_again() -> None:
    within = pa.list_(pa.int8())
    for kind, name in ((within, "k"), (pa.struct([("at", within)]), r"k\.at")):
        view = flux.TentativeView("k")
        for _ in range(2):
            with pytest.raises(KeyTypeError, match=f"column '{name}' of type list"):
                view.write(nested(kind))
