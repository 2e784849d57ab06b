"""The phases of a copy of state: every way through them ends, and a step that is not in the tables cannot happen."""

from __future__ import annotations

from itertools import product

import pytest

from flux.state.phases import IN_STEPS, OUT_STEPS, InEvent, InPhase, OutEvent, OutPhase, after_in, after_out


def test_every_event_of_every_phase_is_in_the_table_or_a_mistake() -> None:
    for out in product(OutPhase, OutEvent):
        if out in OUT_STEPS:
            assert after_out(*out) is OUT_STEPS[out]
        else:
            with pytest.raises(AssertionError, match=f"{out[1].name} of a copy in phase {out[0]}"):
                after_out(*out)
    for came in product(InPhase, InEvent):
        if came in IN_STEPS:
            assert after_in(*came) is IN_STEPS[came]
        else:
            with pytest.raises(AssertionError, match=f"{came[1].name} of a copy in phase {came[0]}"):
                after_in(*came)


def test_a_state_that_is_being_read_is_read_to_the_end() -> None:
    assert [event for phase, event in OUT_STEPS if phase is OutPhase.COPYING] == [OutEvent.COPIED]


def test_each_end_of_a_copy_comes_to_its_end_without_a_circle() -> None:
    for steps, ends in ((OUT_STEPS, {OutPhase.OVER}), (IN_STEPS, {InPhase.ALIVE, InPhase.FORGOTTEN})):
        order = list(type(next(iter(ends))))
        assert all(order.index(phase) < order.index(after) for (phase, _), after in steps.items())
        assert {phase for phase, _ in steps} == set(order) - ends
