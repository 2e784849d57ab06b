"""``make test`` draws a share of the random examples of each property."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import conftest


@pytest.mark.parametrize(
    ("examples", "derandomized", "share", "drawn"),
    [(60, False, 0.4, 24), (12, False, 0.4, 6), (4, False, 0.4, 4), (60, True, 0.4, 60), (60, False, 1.0, 60)],
)
def test_a_share_of_the_examples_is_drawn_unless_they_are_few_or_fixed(
    examples: int, derandomized: bool, share: float, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    @settings(max_examples=examples, derandomize=derandomized, database=None, deadline=None)
    @given(st.integers())
    def law(number: int) -> None:
        numbers.append(number)

    monkeypatch.setattr(conftest, "EXAMPLES_SHARE", share)
    conftest.draw_a_share(law)
    law()
    assert len(numbers) == drawn


@pytest.mark.parametrize("function", [len, None])
def test_other_tests_are_left_alone(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "EXAMPLES_SHARE", 0.4)
    conftest.draw_a_share(function)
