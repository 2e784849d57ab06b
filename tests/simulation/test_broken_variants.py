"""The checkers can fail: each deliberately broken variant of the exchange is caught, and the unbroken code is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation import broken_rules as rules
from tests.simulation.run import Result, run
from tests.simulation.variants import VARIANTS, Variant

#: Tried when the seeds in the table no longer show it, so that a change elsewhere costs seconds and not the test.
MORE = range(200)


def first_caught(variant: Variant) -> Result | None:
    with pytest.MonkeyPatch.context() as patch:
        variant.break_it(patch)
        results = (run(seed, variant.mix) for seed in (*variant.seeds, *MORE))
        return next((result for result in results if not result.ok), None)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_broken_variant_is_caught(variant: Variant) -> None:
    caught = first_caught(variant)
    assert caught is not None, f"it got through; python -m tests.simulation.catch {variant.name} looks for other seeds"
    assert caught.law in variant.laws, str(caught)
    assert run(caught.seed, variant.mix).ok, "the unbroken code keeps the laws under the same seed"


@pytest.mark.parametrize("alone", [rules.secondaries_hold_credit, rules.lets_nothing_in_beyond_credit])
def test_either_of_two_rules_is_enough_where_runs_without_both_are_stuck(
    alone: Callable[[pytest.MonkeyPatch], None],
) -> None:
    both = next(variant for variant in VARIANTS if variant.break_it is rules.secondaries_hold_credit_for_ever)
    stuck = first_caught(both)
    assert stuck is not None
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        assert run(stuck.seed, both.mix).ok
