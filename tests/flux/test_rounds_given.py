"""The plain model of ``make soak-growing`` sees each kind of deviation."""

from __future__ import annotations

import pandas as pd
import pytest
from rounds_given import wrong_rows


def rounds(key: int, numbers: list[int], before: list[int] | None = None) -> pd.DataFrame:
    return pd.DataFrame({"key": key, "round": numbers, "before": before or numbers})


def groups(*rows: tuple[int, int, int]) -> pd.DataFrame:
    """Make rows of one key: first round, last round, and the number of rows."""
    return pd.DataFrame([(1, *row) for row in rows], columns=["key", "first", "last", "n"])


@pytest.mark.parametrize(
    ("given", "number", "said"),
    [
        (pd.DataFrame(), None, ""),
        (pd.DataFrame(), 8, "no row has come"),
        (pd.concat([rounds(1, [3, 4, 5]), rounds(2, [5, 4])]), None, ""),
        (rounds(1, [3, 4, 5]), 6, ""),
        (rounds(1, [3, 4, 5]), 8, "round 7, the last, is missing of 1 keys"),
        (rounds(1, [3, 5]), None, "lost or doubled, of keys [1]"),
        (rounds(1, [3, 4, 4, 5]), None, "lost or doubled"),
        (rounds(1, [3, 4, 4, 6]), None, "lost or doubled"),
        (rounds(1, [3, 4], [3, 3]), None, "behind lost, doubled or unordered rows"),
        (groups((3, 3, 1), (3, 7, 5)), 8, ""),
        (groups((3, 3, 1), (3, 7, 4)), None, "'last': 7, 'n': 4"),
        (groups((3, 3, 1), (4, 7, 4)), None, "'first': 4"),
        (groups((3, 3, 1), (3, 3, 1)), None, "not those of the rounds"),
        (groups((3, 6, 4)), 8, "round 7, the last, is missing"),
    ],
)
def test_rows_that_a_stage_may_not_give_are_named(given: pd.DataFrame, number: int | None, said: str) -> None:
    found = wrong_rows(given, number)
    assert said in found if said else not found
