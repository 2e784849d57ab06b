"""The compiled loops that producers of streams use, compared with plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from partitioning import kernels

NOBODY = np.iinfo(np.int64).max
PARTITIONS, WIDTH = 5, 3


@st.composite
def readers(draw: Any) -> dict[str, Any]:
    """Draw the readers of one worker: some partitions, one replica of each, in some column."""
    hosted = draw(st.lists(st.integers(0, PARTITIONS - 1), min_size=1, unique=True).map(sorted))
    each = lambda of: draw(st.lists(of, min_size=len(hosted), max_size=len(hosted)))  # noqa: E731
    marks = st.integers(-1, 9)
    cells = np.array(draw(st.lists(marks | st.just(NOBODY), min_size=15, max_size=15)), np.int64).reshape(
        PARTITIONS, WIDTH
    )
    columns, mine = each(st.integers(0, WIDTH - 1)), each(marks)
    cells[hosted, columns] = mine
    behind = draw(st.dictionaries(st.integers(0, len(hosted) - 1), marks))
    return {
        "marks": np.array(mine, np.int64),
        "to": draw(marks),
        "counts": np.array(each(st.booleans()), bool),
        "at": np.array(list(behind), np.int64),
        "instead": np.array(list(behind.values()), np.int64),
        "since": np.array(each(st.integers(0, 3)), np.int64),
        "epoch": draw(st.integers(0, 3)),
        "cells": cells,
        "rows": np.array(hosted, np.int64),
        "columns": np.array(columns, np.int64),
        "leaves_out": np.array(draw(st.lists(st.booleans(), min_size=15, max_size=15)), bool).reshape(PARTITIONS, WIDTH)
        if draw(st.booleans())
        else np.empty((0, 0), bool),
        "nobody": NOBODY,
        "least": np.full(PARTITIONS, -7, np.int64),
    }


@given(readers())
def test_marks_are_raised_where_the_ack_counts_and_never_fall(given_: dict[str, Any]) -> None:
    before = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in given_.items()}
    raised = kernels.raise_marks(*given_.values())
    instead = dict(zip(before["at"].tolist(), before["instead"].tolist(), strict=True))
    expected = []
    for reader, mark in enumerate(before["marks"].tolist()):
        said = instead.get(reader, before["to"] if before["counts"][reader] else -1)
        expected.append(max(mark, said) if before["since"][reader] <= before["epoch"] else mark)
    assert given_["marks"].tolist() == expected
    assert raised == (expected != before["marks"].tolist())
    cells = before["cells"]
    cells[before["rows"], before["columns"]] = expected
    assert np.array_equal(given_["cells"], cells)
    least = before["least"]
    if raised:
        for row in before["rows"].tolist():
            left_out = before["leaves_out"][row] if before["leaves_out"].size else [False] * WIDTH
            counted = [NOBODY if left_out[at] else cells[row, at] for at in range(WIDTH)]
            least[row] = -1 if min(counted) == NOBODY else min(counted)
    assert np.array_equal(given_["least"], least)


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=9), st.data())
def test_the_first_that_is_below_a_limit(values: list[int], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(values) - 1)))
    limit = data.draw(st.integers(-1, 6))
    found = kernels.first_below(np.array(values, np.int64), np.array(places, np.int32), limit)
    assert found == next((k for k, place in enumerate(places) if values[place] < limit), -1)


@given(st.permutations(range(6)), st.lists(st.integers(1, 4), max_size=6), st.data())
def test_slices_of_a_worker_are_its_partitions_and_pieces_are_as_long_as_can_be(
    order: list[int], sizes: list[int], data: st.DataObject
) -> None:
    by_rank = np.array(order[: len(sizes)], np.int32)
    offsets = np.cumsum([0, *sizes])
    hosts = np.array(data.draw(st.lists(st.booleans(), min_size=6, max_size=6)), bool)
    some = data.draw(st.none() | st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    wanted = np.array([] if some is None else some, bool)
    out = np.empty((5, len(sizes)), np.int64)
    found, pieces = kernels.choose_slices(by_rank, offsets, hosts, wanted, out)
    mine = [rank for rank, p in enumerate(by_rank.tolist()) if hosts[p] and (not some or some[rank])]
    assert out[0, :found].tolist() == [by_rank[rank] for rank in mine]
    assert out[1, :found].tolist() == [sizes[rank] for rank in mine]
    expected: list[list[int]] = []  # number of partitions, from, to
    for rank in mine:
        if expected and expected[-1][2] == offsets[rank]:
            expected[-1][0] += 1
            expected[-1][2] = int(offsets[rank + 1])
        else:
            expected.append([1, int(offsets[rank]), int(offsets[rank + 1])])
    assert out[2:, :pieces].T.tolist() == expected
