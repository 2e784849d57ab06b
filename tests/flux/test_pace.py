"""The interval at which a worker with small batches asks its sources."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_worker import planned
from scripted import Plain

import flux
from flux.worker import pacing as gathering
from flux.worker.core import WorkerCore
from flux.worker.pacing import (
    BUSY,
    EASED,
    FULL,
    GATHER_MAX_S,
    IDLE,
    INTERVALS_S,
    OLD,
    ORDER_MAX_S,
    ORDER_SHARE,
    REST_MAX_S,
    SMALL_ROWS,
    WINDOW_S,
    YOUNG,
    Pacing,
    next_multiple,
)


def after(pace: Pacing, share: float, windows: int = 1, rows: int = 100, steps: int = 10, age_s: float = 1.0) -> float:
    """Return the interval after ``windows`` in which the worker was busy for this share of the time, with rows of this
    age."""
    for _ in range(windows):
        pace.turn(share * WINDOW_S * 1.01, (1 - share) * WINDOW_S * 1.01, rows, steps, age_s * steps)
    return pace.interval_s


def test_a_worker_that_small_steps_keep_busy_asks_less_and_less_often_up_to_a_bound() -> None:
    pace = Pacing()
    assert [after(pace, FULL + 0.1) for _ in INTERVALS_S] == [*INTERVALS_S[1:], INTERVALS_S[-1]]


def test_only_one_that_is_full_comes_to_the_longest_interval_and_only_until_it_has_time() -> None:
    pace = Pacing()
    assert after(pace, BUSY + 0.1, windows=9) == INTERVALS_S[-2]
    assert after(pace, FULL + 0.1) == INTERVALS_S[-1]
    assert after(pace, EASED + 0.1, windows=9) == INTERVALS_S[-1]
    assert after(pace, EASED - 0.05, windows=9) == INTERVALS_S[-2], "it is not idle yet"


def test_what_has_come_gathers_and_rests_are_longer_at_intervals_only_and_not_for_long() -> None:
    pace = Pacing()
    found = [(pace.gather_s, pace.rest_max_s)]
    for _ in INTERVALS_S[1:]:
        after(pace, 1.0)
        found.append((pace.gather_s, pace.rest_max_s))
    assert found[0] == (0.0, gathering.IDLE_REST_MAX_S)
    assert [gather for gather, _ in found] == [0.0, 0.001, 0.002, 0.004, GATHER_MAX_S]
    assert found[-1][1] == REST_MAX_S
    after(pace, 0.1, windows=9)
    assert (pace.gather_s, pace.rest_max_s) == (0.0, gathering.IDLE_REST_MAX_S)


def test_one_that_has_time_asks_at_once_again_and_one_between_goes_on_as_it_does() -> None:
    pace = Pacing()
    slow = after(pace, BUSY + 0.1, windows=2)
    assert after(pace, (BUSY + IDLE) / 2, windows=9) == slow
    assert after(pace, IDLE - 0.1, windows=9) == 0


@pytest.mark.parametrize("at", range(1, len(INTERVALS_S)))
def test_no_interval_is_longer_than_rows_are_old_anyway(at: int) -> None:
    pace = Pacing()
    assert after(pace, 1.0, windows=9, age_s=OLD * INTERVALS_S[at] - 1e-4) == INTERVALS_S[at - 1]
    assert after(pace, 1.0, windows=9, age_s=OLD * INTERVALS_S[at] + 1e-4) == INTERVALS_S[at]
    assert after(pace, 1.0, windows=9, age_s=YOUNG * INTERVALS_S[at] + 1e-4) == INTERVALS_S[at], "not much younger"
    assert after(pace, 1.0, age_s=YOUNG * INTERVALS_S[at] - 1e-4) == INTERVALS_S[at - 1]


@pytest.mark.parametrize(("rows", "steps"), [(SMALL_ROWS * 10 + 1, 10), (0, 0)])
def test_large_steps_and_none_at_all_lead_to_no_interval(rows: int, steps: int) -> None:
    pace = Pacing()
    after(pace, 1.0, windows=2)
    assert after(pace, 1.0, windows=9, rows=rows, steps=steps) == 0


def test_orders_wait_where_large_steps_leave_no_time_and_rows_are_old_and_only_there() -> None:
    pace = Pacing()
    large = {"rows": SMALL_ROWS * 10 + 1, "steps": 10}
    found = []
    for share, steps, age_s in [
        (FULL + 0.1, large, 1.0), (FULL + 0.1, large, 0.01), (FULL - 0.1, large, 1.0), (FULL + 0.1, {}, 1.0),
    ]:  # fmt: skip
        after(pace, share, age_s=age_s, **steps)
        found.append(pace.order_s)
    assert found == [ORDER_MAX_S, pytest.approx(ORDER_SHARE * 0.01), 0.0, 0.0]


def test_short_turns_are_judged_together() -> None:
    pace = Pacing()
    for _ in range(8):
        pace.turn(WINDOW_S / 10, 0.0, rows=10, steps=1, aged_s=1.0)
    assert pace.interval_s == 0, "not long enough to tell"
    for _ in range(4):
        pace.turn(WINDOW_S / 10, 0.0, rows=10, steps=1, aged_s=1.0)
    assert pace.interval_s == INTERVALS_S[1]


@given(st.sampled_from(INTERVALS_S[1:]), st.floats(1.7e9, 1.9e9))
def test_workers_whose_clocks_agree_read_at_the_same_time(interval_s: float, wall: float) -> None:
    at = next_multiple(interval_s, wall)
    assert wall < at + 1e-6
    assert at <= wall + interval_s + 1e-6
    assert min(abs(at - next_multiple(shorter, at - shorter / 2)) for shorter in INTERVALS_S[1:]) < 1e-6, "all meet"


def test_a_worker_goes_at_the_pace_that_it_is_told_but_waits_for_no_less_than_its_settings_say() -> None:
    core = WorkerCore(planned(flux.stage(partitions=1)(Plain), ack_interval=0.005, resend_timeout=0.8), 0)
    least_s = core.order_exchange.patience_s
    pace = Pacing()
    for order_s, ack_s, waits in ((0.0, 0.0, (least_s, 0.005)), (9.0, 0.05, (9.0, 0.05)), (0.0, 9.0, (least_s, 0.1))):
        pace.interval_s, pace.gather_s, pace.order_s, pace.ack_s = 0.008, 0.004, order_s, ack_s
        core.set_pace(pace)
        assert (core.reading.interval_s, core.turns.gather_s) == (0.008, 0.004)
        assert (core.order_exchange.patience_s, core.subscriptions.ack_s) == waits
