"""An edge that begins at a step has the same numbers on all copies of a partition, and each rule that this takes is needed."""

from __future__ import annotations

import pytest

from tests.laws import birth_model
from tests.laws.birth_model import BirthModel
from tests.laws.growing_model import WITHOUT, GrowingLawBroken, GrowingModel


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_an_edge_has_the_same_numbers_on_all_copies(first: int) -> None:
    for seed in range(first, first + 100):
        GrowingModel(seed).run()


@pytest.mark.parametrize("rule", WITHOUT)
def test_each_rule_is_needed(rule: str) -> None:
    for seed in range(200):
        try:
            GrowingModel(seed, [rule]).run()
        except GrowingLawBroken:
            return
    pytest.fail(f"no schedule is harmed by a model without {rule}")


@pytest.mark.parametrize("first", range(0, 400, 200))
def test_a_stream_of_a_running_source_begins_with_the_same_row_after_each_loss(first: int) -> None:
    for seed in range(first, first + 200):
        BirthModel(seed).run()


@pytest.mark.parametrize("rule", birth_model.WITHOUT)
def test_each_rule_of_births_is_needed(rule: str) -> None:
    for seed in range(400):
        try:
            BirthModel(seed, [rule]).run()
        except birth_model.BirthLawBroken:
            return
    pytest.fail(f"no schedule is harmed by a model without {rule}")
