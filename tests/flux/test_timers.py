"""Timers of operators, told as stories: their times and order, rows that wait for them, and calls that are not
allowed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from scripted import OTHER, Plain, alone, calls, feed, made, pair, scripted, told, work

import flux
from flux.errors import UserCodeError
from flux.operators.operator import TIMERS_MAX, Timers
from flux.replica.output_checksums import CHECKSUMS_KEPT
from flux.replica.step_queue import UNCOMMITTED_MAX
from flux.wire.messages import OrderEntry, StepKind
from partitioning.table import ReplicaAt


def in_a_second(context: flux.Context, *_: Any) -> None:
    context.set_timer(context.now + 1)


# ---- one replica


def test_a_timer_fires_once_in_a_step_of_its_own_when_its_time_has_come() -> None:
    replica = alone(on_rows=in_a_second)
    feed(replica, 0, 7)
    assert work(replica, 10.0) == 1
    assert replica.timer_at == 11.0
    assert work(replica, 10.9) == 0
    assert work(replica, 11.5) == 1
    assert work(replica, 99.0) == 0
    assert calls(replica) == [(10.0, [7]), (11.5, "")]
    assert replica.timer_at == math.inf


def test_a_timer_set_again_replaces_the_earlier_one_and_others_go_by_their_names() -> None:
    def rows(context: flux.Context, values: list[int]) -> None:
        context.set_timer(context.now + values[0], "a")
        context.set_timer(100.0, "b")

    replica = alone(on_rows=rows)
    for sequence, values in enumerate([(5,), (1,)]):
        feed(replica, sequence, *values)
        work(replica, 10.0)
    work(replica, 50.0)
    work(replica, 150.0)
    assert calls(replica)[2:] == [(50.0, "a"), (150.0, "b")]


def test_a_timer_that_is_cancelled_does_not_fire() -> None:
    replica = alone(
        on_rows=lambda context, values: context.set_timer(20.0) if values == [1] else context.cancel_timer()
    )
    feed(replica, 0, 1)
    work(replica, 10.0)
    feed(replica, 1, 2)
    work(replica, 11.0)
    assert work(replica, 30.0) == 0


def test_timers_due_together_fire_in_one_step_the_earliest_first() -> None:
    def rows(context: flux.Context, _: Any) -> None:
        for at, name in [(12.0, "b"), (11.0, "z"), (12.0, "a"), (99.0, "later")]:
            context.set_timer(at, name)

    replica = alone(on_rows=rows)
    feed(replica, 0, 7)
    work(replica, 10.0)
    assert work(replica, 20.0) == 1
    assert calls(replica)[1:] == [(20.0, "z"), (20.0, "a"), (20.0, "b")]


def test_a_timer_may_cancel_or_put_off_another_that_is_due_with_it() -> None:
    def rows(context: flux.Context, _: Any) -> None:
        for name in ("a", "b", "c", "d"):
            context.set_timer(11.0, name)

    def tick(context: flux.Context, name: str) -> None:
        if name == "a":
            context.cancel_timer("b")
            context.set_timer(30.0, "c")

    replica = alone(on_rows=rows, on_tick=tick)
    feed(replica, 0, 7)
    work(replica, 10.0)
    work(replica, 20.0)
    assert calls(replica)[1:] == [(20.0, "a"), (20.0, "d")]
    work(replica, 30.0)
    assert calls(replica)[3:] == [(30.0, "c")]


def test_a_time_that_has_passed_means_the_next_step() -> None:
    replica = alone(on_rows=lambda context, _: context.set_timer(-5))
    feed(replica, 0, *range(5000))
    feed(replica, 1, *range(5000))
    work(replica, 10.0)
    assert [what if isinstance(what, str) else "rows" for _, what in calls(replica)] == ["rows", "", "rows", ""]


def test_an_operator_can_ask_for_its_first_call_when_it_is_opened() -> None:
    replica = alone(on_start=lambda context: context.set_timer(context.now), on_tick=in_a_second)
    work(replica, 10.0)
    work(replica, 11.0)
    assert calls(replica) == [(10.0, ""), (11.0, "")]


def test_rows_that_wait_come_after_timers_that_are_due() -> None:
    """Fire timers first: an operator that looks at the time sees no row of a session that is over."""
    replica = alone(on_rows=in_a_second)
    feed(replica, 0, 1)
    work(replica, 10.0)
    feed(replica, 1, 2)
    work(replica, 11.0)
    assert calls(replica)[1:] == [(11.0, ""), (11.0, [2])]


def test_a_timer_that_is_always_due_lets_rows_and_the_end_through() -> None:
    replica = alone(on_rows=lambda context, _: context.set_timer(0), on_tick=lambda context, _: context.set_timer(0))
    for sequence in range(3):
        feed(replica, sequence, *range(5000))
    feed(replica, 3)
    work(replica, 10.0)
    assert replica.finished
    assert [what for _, what in calls(replica) if not isinstance(what, list)] == ["", "", "", "", "the end"]


def test_rows_that_go_between_two_ticks_are_of_the_time_of_the_first() -> None:
    """Give these rows the time of the first tick, so that also then no row comes at or after the time of a timer that
    was set in advance."""
    replica = alone(on_start=lambda context: context.set_timer(0), on_tick=in_a_second)
    work(replica, 10.0)
    work(replica, 13.0)
    feed(replica, 0, 7)
    assert work(replica, 15.0, most=2) == 2
    assert calls(replica) == [(10.0, ""), (13.0, ""), (13.0, [7]), (15.0, "")]


def test_what_is_due_fires_before_the_end_and_what_is_not_is_dropped() -> None:
    def rows(context: flux.Context, _: Any) -> None:
        context.set_timer(11.0, "due")
        context.set_timer(99.0, "not due")

    replica = alone(on_rows=rows)
    feed(replica, 0, 7)
    work(replica, 10.0)
    feed(replica, 1)
    work(replica, 20.0)
    assert calls(replica)[1:] == [(20.0, "due"), (20.0, "the end")]
    assert not replica.context.timers.pending
    assert work(replica, 200.0) == 0
    assert replica.timer_at == math.inf


def test_nothing_fires_after_the_end() -> None:
    replica = alone(on_end=in_a_second)
    feed(replica, 0)
    work(replica, 10.0)
    assert replica.finished
    assert replica.timer_at == math.inf
    assert work(replica, 20.0) == 0


def test_the_time_of_steps_does_not_go_back_with_the_clock() -> None:
    replica = alone()
    for sequence, now in enumerate([10.0, 8.0, 9.0, 12.0]):
        feed(replica, sequence, 1)
        work(replica, now)
    assert [now for now, _ in calls(replica)] == [10.0, 10.0, 10.0, 12.0]


def test_a_timer_waits_until_a_clock_that_was_set_back_is_where_it_was_and_rows_go_on() -> None:
    replica = alone(on_rows=lambda context, values: context.set_timer(11.0) if values == [1] else None)
    feed(replica, 0, 1)
    work(replica, 10.0)
    feed(replica, 1, 2)
    assert work(replica, 5.0) == 1
    assert work(replica, 10.9) == 0
    assert work(replica, 11.0) == 1
    assert calls(replica) == [(10.0, [1]), (10.0, [2]), (11.0, "")]


def test_a_full_log_holds_a_timer_up_like_rows() -> None:
    replica = made(scripted(on_rows=in_a_second, on_tick=in_a_second), log_bytes=1)
    feed(replica, 0, 7)
    work(replica, 10.0)
    assert work(replica, 11.0) == 1
    assert not replica.outlets[0].producer.has_room
    assert work(replica, 12.0) == 0


# ---- several replicas


def test_the_other_replica_fires_at_the_same_step_when_that_is_committed_and_not_by_its_own_clock() -> None:
    primary, secondary = pair(scripted(on_rows=in_a_second))
    for replica in (primary, secondary):
        feed(replica, 0, 7)
    work(primary, 10.0)
    told(primary, secondary)
    work(secondary, 50.0)
    assert secondary.timer_at == math.inf
    assert not secondary.ready(50.0)
    work(primary, 11.0)
    secondary.order.on_orders(0, 1, primary.order.since(1), primary.order.committed, secondary.applied)
    assert not secondary.ready(50.0), "the tick is not committed"
    assert primary.outlets[0].producer.release_from == 0, "and its output is held back"
    told(primary, secondary)
    work(secondary, 50.0)
    assert calls(secondary) == calls(primary) == [(10.0, [7]), (11.0, "")]
    assert secondary.output.checksum == primary.output.checksum != 0


def test_a_new_primary_fires_what_is_due_and_its_time_goes_on_from_that_of_the_one_before() -> None:
    primary, secondary = pair(scripted(on_rows=in_a_second, on_tick=in_a_second))
    for replica in (primary, secondary):
        feed(replica, 0, 7)
    work(primary, 10.0)
    told(primary, secondary)
    work(secondary, 10.0)
    secondary.lead(1, [])
    assert work(secondary, 8.0) == 0, "its clock is behind"
    feed(secondary, 1, 8)
    work(secondary, 8.5)
    work(secondary, 11.2)
    assert calls(secondary) == [(10.0, [7]), (10.0, [8]), (11.2, "")]


def test_a_new_primary_whose_clock_is_behind_goes_by_the_order_that_it_has_received() -> None:
    primary, secondary = pair(scripted())
    for sequence in range(2):
        for replica in (primary, secondary):
            feed(replica, sequence, sequence)
        work(primary, 10.0 + sequence)
    secondary.order.on_orders(0, 0, primary.order.since(0), 0, 0)
    secondary.lead(1, [])
    feed(secondary, 2, 2)
    work(secondary, 5.0)
    assert [now for now, _ in calls(secondary)] == [10.0, 11.0, 11.0]


def test_timers_and_time_travel_with_the_copy_of_a_state() -> None:
    def start(context: flux.Context) -> None:
        context.set_timer(0, "of a fresh operator")

    def rows(context: flux.Context, _: Any) -> None:
        context.set_timer(12.0, "mine")

    operator = scripted(on_start=start, on_rows=rows)
    first = made(operator, 2)
    feed(first, 0, 7)
    work(first, 10.0)
    assert first.context.timers.pending == {"mine": 12.0}
    state = first.state()
    work(first, 15.0)
    copy = made(operator, 2)
    copy.adopt(state)
    assert copy.context.timers.pending == {"mine": 12.0}, "as it was when it was copied"
    copy.lead(1, [])
    feed(copy, 1, 8)
    work(copy, 3.0)
    work(copy, 12.0)
    assert calls(copy) == [(10.0, [8]), (12.0, "mine")]


def test_nothing_is_ordered_ahead_of_a_timer_that_a_step_before_it_may_set() -> None:
    timed, untimed = made(scripted(on_rows=in_a_second), 2), made(Plain, 2)
    for replica in (timed, untimed):
        replica.lead(0, [ReplicaAt(OTHER, 0, True)])
        for sequence in range(3):
            feed(replica, sequence, *range(5000))
            replica.decide_ahead(10.0 + 2 * sequence)
    assert untimed.order.end == 3, "so that the other replica need not wait"
    timed.apply(timed.next_step(14.0))
    work(timed, 16.0)
    assert [(now, "" if what == "" else "rows") for now, what in calls(timed)] == [
        (14.0, "rows"), (16.0, ""), (16.0, "rows"), (16.0, "rows"),
    ]  # fmt: skip


def test_a_primary_that_nobody_hears_does_not_order_ticks_without_end() -> None:
    always = lambda context, *_: context.set_timer(0)  # noqa: E731
    primary, secondary = pair(scripted(on_start=always, on_tick=always))
    assert work(primary, 10.0, most=2 * UNCOMMITTED_MAX) == UNCOMMITTED_MAX + 1
    told(primary, secondary)
    work(secondary, 10.0, most=2 * UNCOMMITTED_MAX)
    told(primary, secondary)
    assert work(primary, 10.0, most=5) == 5


def test_a_secondary_that_does_not_keep_up_holds_back_ticks_but_no_rows() -> None:
    always = lambda context, *_: context.set_timer(0)  # noqa: E731
    primary, secondary = pair(scripted(on_start=always, on_tick=always))
    for _ in range(40):
        work(primary, 10.0)
        told(primary, secondary)
        work(secondary, 10.0, most=10)  # of a hundred
    assert primary.order.committed == primary.order.end, "it has the order, and is slow"
    assert primary.applied - secondary.applied <= 1024 + 1
    feed(primary, 0, 7)
    assert work(primary, 10.0, most=1) == 1
    assert calls(primary)[-1] == (10.0, [7])
    work(secondary, 10.0, most=200)
    told(primary, secondary)
    assert work(primary, 10.0, most=5) == 5, "ticks go on when it has caught up"


def test_a_secondary_is_compared_however_far_it_is_behind() -> None:
    primary, secondary = made(Plain, 2), made(Plain, 2)
    primary.lead(0, [ReplicaAt(OTHER, 0, True)])
    secondary.follow()
    for sequence in range(3 * CHECKSUMS_KEPT):
        feed(primary, sequence, sequence)
        work(primary, 10.0)
    for applied in (1, CHECKSUMS_KEPT // 2, 2 * CHECKSUMS_KEPT, 3 * CHECKSUMS_KEPT):
        assert primary.output.checksums.at(applied) is not None
    primary.order.peers[OTHER].checked = 2 * CHECKSUMS_KEPT
    feed(primary, 3 * CHECKSUMS_KEPT, 1)
    work(primary, 10.0)
    assert primary.output.checksums.at(2 * CHECKSUMS_KEPT) is None, "all have been compared there"
    assert primary.output.checksums.at(2 * CHECKSUMS_KEPT + 2) is not None


def test_for_a_copy_whose_state_is_still_to_be_taken_no_checksums_are_kept() -> None:
    primary = made(Plain, 2)
    primary.lead(0, [ReplicaAt(OTHER, 5, False)])
    for sequence in range(2 * CHECKSUMS_KEPT):
        feed(primary, sequence, sequence)
        work(primary, 10.0)
    assert primary.output.checksums.at(CHECKSUMS_KEPT) is None
    primary.order.note_copy(OTHER, primary.applied)
    for sequence in range(2 * CHECKSUMS_KEPT, 4 * CHECKSUMS_KEPT):
        feed(primary, sequence, sequence)
        work(primary, 10.0)
    assert primary.output.checksums.at(2 * CHECKSUMS_KEPT + 1) is not None, "from there on it will be compared"


# ---- errors


def test_an_error_in_a_timer_names_the_method_and_the_partition() -> None:
    def tick(context: flux.Context, name: str) -> None:
        raise ValueError(f"no {name}")

    replica = alone(on_rows=lambda context, _: context.set_timer(11.0, "luck"), on_tick=tick)
    feed(replica, 0, 7)
    work(replica, 10.0)
    with pytest.raises(UserCodeError, match=r"^stage Scripted, partition 0: on_timer\(\) raised ValueError: no luck\n"):
        work(replica, 11.0)


def raises(what: str) -> Any:
    def method(self: Any, *_: Any) -> None:
        raise ValueError(what)

    return method


def sets_an_event_timer(self: Any, batch: pa.RecordBatch) -> None:
    self.context.set_event_timer(5)


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("method", ["on_event_timer", "on_watermark", "finish"])
def test_an_error_where_the_watermark_moves_names_the_method_that_raised_it(method: str, at_the_end: bool) -> None:
    """Name the method also at the end of the input, which moves the watermark first."""
    methods = {"process": sets_an_event_timer, "on_event_timer": lambda *_: None, method: raises("no luck")}
    replica = made(type("Moved", (Plain,), methods))
    feed(replica, 0, 7)
    work(replica, 10.0)
    if at_the_end or method == "finish":
        feed(replica, 1)
    else:
        replica.order.append(OrderEntry(10.0, 10.0, [], StepKind.WATERMARK, watermarks=[5]))
    with pytest.raises(UserCodeError, match=rf"^stage Moved, partition 0: {method}\(\) raised ValueError: no luck\n"):
        work(replica, 10.0)


def test_output_of_other_columns_at_the_end_names_the_method_that_gave_it() -> None:
    def gives(self: Any) -> Any:
        yield pa.record_batch({"y": [1]})

    for method in ("on_watermark", "finish"):
        replica = made(type("Moved", (Plain,), {method: gives}))
        feed(replica, 0)
        with pytest.raises(UserCodeError, match=rf"^stage Moved, partition 0, {method}\(\): output of stage Moved"):
            work(replica, 10.0)


@pytest.mark.parametrize("method", ["on_key_timer", "on_key_event_timer"])
def test_an_error_in_a_timer_of_a_key_names_the_method_of_the_key(method: str) -> None:
    """Name the method of either timer. The timer by the clock is due at once, the other one at the end of the input."""

    class Totals(flux.KeyedOperator):
        schema = pa.schema([("x", pa.int64())])
        state_schema = "n BIGINT"

        def on_rows(self, key: tuple, rows: list[Any], state: Any) -> None:
            state.timer = self.context.now + (method != "on_key_timer")
            state.event_timer = 5

        def on_key_timer(self, key: tuple, state: Any) -> None: ...

        def on_key_event_timer(self, key: tuple, state: Any) -> None: ...

    replica = made(type("Totals", (Totals,), {method: raises("no luck")}), key="x")
    feed(replica, 0, 7)
    replica.apply(replica.next_step(10.0))
    feed(replica, 1)
    with pytest.raises(UserCodeError, match=rf"^stage Totals, partition 0: {method}\(\) raised ValueError: no luck\n"):
        work(replica, 10.0)


def test_an_operator_that_sets_a_timer_has_to_say_what_it_is_for() -> None:
    replica = made(Plain)
    feed(replica, 0, -1)
    with pytest.raises(UserCodeError, match=r"NotImplementedError: Plain sets a timer and must define on_timer"):
        work(replica, 10.0)


@pytest.mark.parametrize(
    ("at", "name", "expected"),
    [
        (math.nan, "", "expected a time in seconds since the epoch, got nan"),
        (math.inf, "", "expected a time in seconds since the epoch, got inf"),
        ("soon", "", "expected a time in seconds since the epoch, got 'soon'"),
        (None, "", "expected a time in seconds since the epoch, got None"),
        (1.0, 7, "the name of a timer must be a string, got 7"),
    ],
)
def test_what_is_no_time_or_no_name_is_refused(at: Any, name: Any, expected: str) -> None:
    context = flux.Context("s")
    with pytest.raises(flux.UsageError, match=expected):
        context.set_timer(at, name)
    assert context.timers.pending == {}


def test_a_timer_per_key_is_refused_with_advice() -> None:
    timers = Timers()
    for number in range(TIMERS_MAX):
        timers.set(1.0, str(number))
    timers.set(2.0, "0")
    with pytest.raises(flux.UsageError, match="one timer for the earliest"):
        timers.set(1.0, "one more")


def test_looking_for_the_bad_row_leaves_the_timers_alone() -> None:
    def rows(context: flux.Context, _: Any) -> None:
        context.set_timer(1.0, "by a row")
        raise ValueError

    replica = alone(on_start=lambda context: context.set_timer(context.now + 99.0), on_rows=rows)
    feed(replica, 0, 7)
    with pytest.raises(UserCodeError, match="first bad row is number 0"):
        work(replica, 10.0)
    assert replica.context.timers.pending == {"": 99.0, "by a row": 1.0}


# ---- the wire


@pytest.mark.parametrize(
    "entry",
    [
        OrderEntry(1.5, 1.0, [(0, 1, 2)]),
        OrderEntry(1.5, 1.5, [], StepKind.TICK),
        OrderEntry(1.5, 1.5, [], StepKind.FINISH),
    ],
)
def test_every_kind_of_step_comes_back_from_the_wire(entry: OrderEntry) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=OrderEntry) == entry


def test_a_step_of_no_known_kind_is_malformed() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([1.5, 1.5, [], 6]), type=OrderEntry)
