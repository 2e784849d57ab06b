"""The phases of a connection: every way through them comes back to dialling, and a step that is not in the table cannot
happen."""

from __future__ import annotations

from itertools import product

import pytest

from flux.shell.transport import STEPS, LinkEvent, LinkPhase, after


def test_every_event_of_every_phase_is_in_the_table_or_a_mistake() -> None:
    for phase, event in product(LinkPhase, LinkEvent):
        if (phase, event) in STEPS:
            assert after(phase, event) is STEPS[phase, event]
        else:
            with pytest.raises(AssertionError, match=f"{event.name} of a connection in phase {phase}"):
                after(phase, event)


def test_a_connection_that_has_ended_is_closed_before_it_is_dialled_again() -> None:
    assert [event for phase, event in STEPS if STEPS[phase, event] is LinkPhase.MEETING] == [LinkEvent.DIALLED]
    assert {phase for phase, event in STEPS if event is LinkEvent.DIALLED} == {LinkPhase.WAITING}


def test_what_comes_after_the_end_does_not_bring_a_connection_back() -> None:
    late = {after(LinkPhase.ENDED, event) for event in (LinkEvent.ENDED, LinkEvent.ACCEPTED)}
    assert late == {LinkPhase.ENDED}
