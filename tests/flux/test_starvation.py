"""Rows of an ordered step that do not come are looked for elsewhere, again and again within a bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from flux.reach.starvation import Starvation
from partitioning.ids import StreamId

STREAM = StreamId(0, 1)


def test_rows_that_stay_away_are_looked_for_elsewhere_every_eight_timeouts_at_least() -> None:
    starvation = Starvation(resend_s=1.0)
    starved: Any = SimpleNamespace(partition=0, primary=False, missing=lambda: [STREAM], waiting=dict)
    tries = [
        now
        for now in np.arange(0, 60, 0.25)
        if starvation.look([starved], lambda stream, partition: 7, float(now))[STREAM].elsewhere
    ]
    assert [later - earlier for earlier, later in zip([0, *tries], tries, strict=False)] == [2, 4, *[8] * 6]
