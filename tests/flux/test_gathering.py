"""How long a worker with small batches leaves lying what comes."""

from __future__ import annotations

import pytest

from flux.host.gathering import REST_MAX_S, SHARE, SMALL_ROWS, Gathering


def test_it_rests_in_proportion_to_its_work_and_never_for_long() -> None:
    gathering = Gathering()
    gathering.worked(0.0003, rows=50, steps=2)
    gathering.worked(0.0002, rows=0, steps=0)  # receiving
    assert gathering.rest() == pytest.approx(SHARE * 0.0005)
    assert gathering.rest() == 0, "it has done nothing since"
    gathering.worked(1.0, rows=50, steps=2)
    assert gathering.rest() == REST_MAX_S


def test_large_steps_and_turns_without_any_lead_to_no_rest() -> None:
    gathering = Gathering()
    gathering.worked(0.01, rows=SMALL_ROWS * 3 + 1, steps=3)
    assert gathering.rest() == 0
    gathering.worked(0.01, rows=0, steps=0)
    assert gathering.rest() == 0
