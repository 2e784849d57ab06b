"""Readers whose rows bring their numbers, inside a worker: the numbers are checked, and cut with their rows (design:
row-numbers)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_worker import rows
from test_own_numbers import Ahead, reading, reading_of

import flux
from flux.errors import UserCodeError
from flux.worker.source_scheduler import IDLE_DONE_S


def test_a_batch_is_cut_with_its_numbers() -> None:
    numbers = np.array([3, 5, 6, 2**40, 2**40 + 1])
    core = reading([flux.Positioned(rows(*range(5)), 1, numbers)], batch_max_rows=2)
    (streams,) = core.sources.values()
    log = streams.producers[0].log
    assert [(entry.begin, entry.sequence) for entry in log.entries()] == [
        (3, 5), (6, 6), (2**40, 2**40), (2**40 + 1, 2**40 + 1), (-1, 2**40 + 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "numbers",
    [None, np.arange(2), np.array([3, 3, 4]), np.array([-1, 0, 1]), np.arange(3.0), np.array([1, 2, 1 << 62])],
)
def test_numbers_that_do_not_ascend_end_the_query_and_name_the_source(numbers: Any) -> None:
    with pytest.raises(UserCodeError, match=r"source log, partition 0.*3 numbers from 0 on were expected"):
        reading([flux.Positioned(rows(1, 2, 3), 1, numbers)])


def test_numbers_go_on_behind_those_of_the_batch_before() -> None:
    with pytest.raises(UserCodeError, match="1 numbers from 8 on were expected"):
        reading([flux.Positioned(rows(1), 1, np.array([7])), flux.Positioned(rows(1), 1, np.array([7]))])


def test_a_source_that_has_nothing_more_is_told_soon_what_all_have_applied() -> None:
    """Tell an idle source at once, because its log may lose rows meanwhile. Other sources are told once a second."""

    class Once(Ahead):
        told: list[Any] = []

        def done(self, position: Any) -> None:
            self.told.append(position)

    reader = Once()
    core = reading_of(reader)
    core.reading.tell_done()
    reader.rows = [flux.Positioned(rows(1), 1, np.array([7]))]
    core.reading._done_at = 3.0
    for now in (2.0, 2.0, 2.0 + IDLE_DONE_S / 2, 2.0 + IDLE_DONE_S, 2.1 + 2 * IDLE_DONE_S):
        while core.read(True, now):
            pass
        list(core.poll(now))
        while core.work(now):
            pass
        list(core.poll(now))
    assert now < 3.0
    assert reader.told == [1]
