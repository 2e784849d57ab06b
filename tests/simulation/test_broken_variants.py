"""The checkers can fail: each deliberately broken variant of the exchange is caught, and the unbroken code is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from zlib import crc32

import pytest

from tests.simulation import broken_rules as rules
from tests.simulation import run as run_
from tests.simulation.many import SOURCE
from tests.simulation.mixes import Mix
from tests.simulation.run import Result, run
from tests.simulation.runs import LONG
from tests.simulation.variants import VARIANTS, Variant

#: Seeds tried when those of the file no longer show a variant, so that a change elsewhere costs time and not the test.
MORE = range(200)
BY_KEY = {variant.key: variant for variant in VARIANTS}


#: The law of stuck runs. A variant that may break it, and the unbroken code under the same seed, count as stuck after this
#: virtual time without progress: the cost of a run grows with the wait.
STUCK, STUCK_S = "every run comes to its end", 10.0


def limit_of(variant: Variant) -> float:
    return STUCK_S if STUCK in variant.laws else run_.LIMIT_S


#: In ``make test``, one of this number of variants has a run of the unbroken code, and each change chooses other ones; all have
#: it in ``make test-long``. The seeds of the other tests show, too, that the code keeps the laws.
CONTROLLED_EACH = 3


def is_controlled(variant: Variant) -> bool:
    return LONG or crc32(f"{variant.key} {SOURCE}".encode()) % CONTROLLED_EACH == 0


@cache
def unbroken(seed: int, mix: Mix, limit_s: float) -> Result:
    """Make the run of the code as it is, once for all variants that have the seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_, "LIMIT_S", limit_s)
        return run(seed, mix)


@cache
def first_caught(key: str) -> Result | None:
    """Make runs of a variant until a law breaks, once for all tests of it."""
    variant = BY_KEY[key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_, "LIMIT_S", limit_of(variant))
        variant.break_it(patch)
        results = (run(seed, variant.mix) for seed in (*variant.seeds, *MORE))
        caught = next((result for result in results if not result.ok), None)
    if caught is not None and caught.seed not in variant.seeds:
        warnings.warn(f"{variant.key} takes long: run make seeds VARIANT={variant.name}", stacklevel=2)
    return caught


@pytest.mark.timeout(1200)  # two seconds, unless no seed of the file shows it any more
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.key)
def test_a_broken_variant_is_caught(variant: Variant) -> None:
    caught = first_caught(variant.key)
    assert caught is not None, f"it got through; make seeds VARIANT={variant.name} looks for another seed"
    assert caught.law in variant.laws, str(caught)
    if is_controlled(variant):
        assert unbroken(caught.seed, variant.mix, limit_of(variant)).ok, (
            "the unbroken code keeps the laws under the same seed"
        )


@pytest.mark.parametrize("alone", [rules.secondaries_hold_credit, rules.lets_nothing_in_beyond_credit])
def test_either_of_two_rules_is_enough_where_runs_without_both_are_stuck(
    alone: Callable[[pytest.MonkeyPatch], None],
) -> None:
    both = next(variant for variant in VARIANTS if variant.break_it is rules.secondaries_hold_credit_for_ever)
    stuck = first_caught(both.key)
    assert stuck is not None
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        assert run(stuck.seed, both.mix).ok
