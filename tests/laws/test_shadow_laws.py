"""Shadows: random schedules of a chain with tentative results keep all laws, and a model without any one rule breaks a law."""

from __future__ import annotations

import pytest

from tests.laws.shadow_model import WITHOUT, ShadowLawBroken, ShadowModel, without

#: For each rule, a schedule that breaks a law without it. ``python -m tests.laws.shadow_model --without RULE`` looks for others.
CAUGHT_AT = {
    "keeps tentative rows after stable ones came": 3,
    "takes tentative rows behind stable ones": 21,
    "purges state at a tentative mark": 0,
    "leaves gaps of the lane open": 67,
    "dates a gap by the later mark": 721,
    "believes rows beside stable elements": 194,
}


def test_schedules_keep_all_laws() -> None:
    counts = sum((ShadowModel(seed).run() for seed in range(1000, 1040)), ShadowModel(0).run())
    assert counts["tentative"] > 200
    assert counts["revised"] > 50
    assert counts["shadows lost"] > 10


@pytest.mark.long
def test_many_schedules_keep_all_laws() -> None:
    for seed in range(10_000, 11_000):
        ShadowModel(seed).run()


def test_each_rule_that_can_be_left_out_is_tried() -> None:
    assert CAUGHT_AT.keys() == WITHOUT.keys()


@pytest.mark.parametrize("rule", WITHOUT)
def test_a_model_without_a_rule_breaks_a_law(rule: str) -> None:
    with without(rule), pytest.raises(ShadowLawBroken):
        ShadowModel(CAUGHT_AT[rule]).run()
    ShadowModel(CAUGHT_AT[rule]).run()


def test_a_failure_costs_as_many_tentative_windows_as_the_formulas_say() -> None:
    """Silence one source of several for ten seconds, with X = 3 s: (D - 0.35) / b windows with process, (D - 0.9 X) / b with
    delay."""
    found = {}
    for policy in ("process", "delay", "suspend"):
        model = ShadowModel(1, 3.0, (policy, policy))
        model.silence(10.0)
        model.run()
        found[policy] = model.of_b[0].shadow.fired
    assert found["process"] == pytest.approx((10 - 0.35) / 0.1, rel=0.05)
    assert found["delay"] == pytest.approx((10 - 0.9 * 3) / 0.1, rel=0.05)
    assert found["suspend"] == 1
