"""Times of requests, and the partitions that one request asks for, by the clock of the test. No thread, no broker."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from flux.connectors.kafka.read.fetch_schedule import (
    ASKED,
    GATHER_MAX_S,
    GATHER_S,
    GONE,
    LATE_S,
    LOOKED_UP,
    LOST,
    PAUSE_MAX_S,
    PAUSE_S,
    READY,
    STALE_S,
    TRANSITIONS,
    WAIT_S,
    WORKED_OFF,
    FetchedPartition,
    FetchPhase,
    FetchRequest,
    FetchSchedule,
)
from flux.connectors.kafka.read.fetch_thread import LOOK_S, ThreadCrowding

HERE, THERE = ("here", 9092), ("there", 9092)
RETRY_S = 100.0


def reading(
    fetching: FetchSchedule, *numbers: int, broker: tuple[str, int] = HERE, now: float = 0.0
) -> list[FetchedPartition]:
    """Add partitions whose leader is known."""
    parts = [FetchedPartition(f"reader {number}", "clicks", number, 0, now) for number in numbers]
    for part in parts:
        fetching.add(part)
    assert {*fetching.lookups(now)} == {*parts}
    for part in parts:
        fetching.found(part, broker, now)
    return parts


def asked(fetching: FetchSchedule, now: float) -> list[list[int]]:
    return [[part.number for part in ask.parts] for ask in fetching.asks(now)]


def one(fetching: FetchSchedule, now: float) -> FetchRequest:
    (ask,) = fetching.asks(now)
    return ask


def nothing_came(fetching: FetchSchedule, ask: FetchRequest, now: float) -> None:
    for part in fetching.answered(ask, now):
        fetching.goes_on(part, part.offset, now, lags=False)


def test_all_partitions_of_a_broker_are_in_one_request_and_each_in_one_only() -> None:
    fetching = FetchSchedule()
    reading(fetching, 0, 1, 2)
    reading(fetching, 3, broker=THERE)
    assert asked(fetching, 0.0) == [[0, 1, 2], [3]]
    assert asked(fetching, 0.0) == []
    assert fetching.due() == inf


def test_a_leader_is_looked_up_once_at_a_time() -> None:
    fetching = FetchSchedule()
    part = FetchedPartition("reader", "clicks", 0, 0, 0.0)
    fetching.add(part)
    assert fetching.due() == 0.0
    assert fetching.lookups(0.0) == [part]
    assert fetching.lookups(0.0) == []
    assert fetching.due() == inf


def test_who_waits_for_a_lookup_that_is_under_way_is_no_reason_to_turn() -> None:
    """Before, the thread turned without a pause and took a whole core while a broker did not answer."""
    fetching = FetchSchedule()
    fetching.add(FetchedPartition("first", "clicks", 0, 0, 0.0))
    fetching.lookups(0.0)
    fetching.add(FetchedPartition("second", "clicks", 1, 0, 0.0))
    assert fetching.due(looking_up=True) == inf
    assert fetching.due() == 0.0


def test_who_was_held_up_here_for_long_is_not_given_up_for_what_passes() -> None:
    fetching = FetchSchedule()
    (part,) = reading(fetching, 0)
    ask = one(fetching, 0.0)
    fetching.answered(ask, 0.0)
    fetching.works_off(part, 0.0)
    fetching.pauses(part, 2 * RETRY_S)
    fetching.resumed(2 * RETRY_S)
    assert fetching.failed(part, 0, 2 * RETRY_S, RETRY_S) is None


def test_a_partition_whose_rows_are_worked_off_is_not_asked_for_and_holds_up_no_other() -> None:
    fetching = FetchSchedule()
    full, other = reading(fetching, 0, 1)
    for part in fetching.answered(one(fetching, 0.0), 1.0):
        fetching.works_off(part, 1.0)
    fetching.goes_on(other, 5, 1.0, lags=True)
    assert asked(fetching, 1.0) == [[1]]
    assert (other.offset, full.offset) == (5, 0)
    fetching.pauses(full, 3.0)
    assert fetching.due() == 3.0
    assert (fetching.resumed(2.9), fetching.resumed(3.0), fetching.resumed(3.0)) == ([], [full], [])


def test_who_has_all_that_the_log_has_does_not_ask_again_at_once() -> None:
    fetching = FetchSchedule()
    parts = reading(fetching, 0, 1)
    ask = one(fetching, 0.0)
    for part in fetching.answered(ask, 0.001):
        fetching.goes_on(part, 1, 0.001, lags=False)
    assert asked(fetching, 0.001) == []
    assert fetching.due() == GATHER_S
    assert asked(fetching, GATHER_S) == [[0, 1]]
    assert {part.phase for part in parts} == {ASKED}


def test_who_lags_asks_again_at_once_and_takes_the_others_along() -> None:
    fetching = FetchSchedule()
    first, second = reading(fetching, 0, 1)
    fetching.answered(one(fetching, 0.0), 0.001)
    fetching.goes_on(first, 0, 0.001, lags=False)
    fetching.goes_on(second, 9, 0.001, lags=True)
    assert asked(fetching, 0.001) == [[0, 1]]


def test_a_broker_is_asked_first_for_whom_nothing_came() -> None:
    """Brokers fill an answer in the order of the request, and may have room for the first partition only."""
    fetching = FetchSchedule()
    first, *rest = reading(fetching, 0, 1, 2)
    fetching.answered(one(fetching, 0.0), 1.0)
    fetching.works_off(first, 1.0)
    for part in rest:
        fetching.goes_on(part, 0, 1.0, lags=True)
    fetching.goes_on(first, 100, 1.0, lags=True)
    assert asked(fetching, 1.0) == [[1, 2, 0]]


def test_who_comes_late_waits_shortly_and_takes_a_second_connection() -> None:
    fetching = FetchSchedule()
    reading(fetching, 0)
    first = one(fetching, 0.0)
    (late,) = reading(fetching, 1, now=1.0)
    assert (first.slot.index, first.wait) == (0, WAIT_S[0])
    assert asked(fetching, 1.0) == [[1]], "a reader that begins does not wait"
    (third,) = reading(fetching, 2, now=2.0)
    assert fetching.due() == inf
    assert third.phase != ASKED
    nothing_came(fetching, first, 2.5)
    assert asked(fetching, 2.5) == [[2, 0]]
    assert late.phase == ASKED


def test_under_load_all_come_together_again() -> None:
    fetching = FetchSchedule()
    reading(fetching, 0)
    first = one(fetching, 0.0)
    reading(fetching, 1, now=1.0)
    second = one(fetching, 1.0)
    assert (second.slot.index, second.wait) == (1, WAIT_S[1])
    nothing_came(fetching, second, 1.01)
    assert fetching.due() == pytest.approx(1.01 + LATE_S)
    assert asked(fetching, 1.012) == []
    nothing_came(fetching, first, 1.014)
    assert asked(fetching, 1.014) == [[1, 0]]


def test_a_broker_that_wants_a_pause_gets_it_and_others_do_not() -> None:
    fetching = FetchSchedule()
    reading(fetching, 0)
    ask = one(fetching, 0.0)
    (part,) = fetching.answered(ask, 1.0, throttle_s=2.0)
    fetching.goes_on(part, 1, 1.0, lags=True)
    reading(fetching, 1, broker=THERE, now=1.0)
    assert asked(fetching, 1.0) == [[1]]
    assert fetching.due() == 3.0
    assert asked(fetching, 3.0) == [[0]]


def test_pauses_after_failures_get_longer_until_an_answer_comes() -> None:
    fetching = FetchSchedule()
    (part,) = reading(fetching, 0)
    (other,) = reading(fetching, 1, broker=THERE)
    now, pauses = 1.0, []
    for ask in [*fetching.asks(0.0)]:
        fetching.answered(ask, now)
    fetching.goes_on(other, 7, now, lags=True)
    for _ in range(7):
        assert fetching.failed(part, 0, now, RETRY_S) is None
        assert part.phase == LOST
        pauses.append(part.due - now)
        now = part.due
        assert fetching.lookups(now) == [part]
    assert pauses == pytest.approx([PAUSE_S * 2**i for i in range(5)] + [PAUSE_MAX_S] * 2)
    assert asked(fetching, 1.0) == [[1]], "the others go on"
    fetching.found(part, THERE, now)
    (ask,) = fetching.asks(now)
    fetching.answered(ask, now)
    fetching.works_off(part, now)
    fetching.failed(part, 3, now, RETRY_S)
    assert (part.due - now, part.offset) == (pytest.approx(PAUSE_S), 3)


def test_what_fails_for_too_long_is_told() -> None:
    fetching = FetchSchedule()
    (part,) = reading(fetching, 0, now=10.0)
    fetching.answered(one(fetching, 10.0), 11.0)
    assert fetching.failed(part, 0, 10.0 + RETRY_S - 1, RETRY_S) is None
    assert fetching.lookups(10.0 + RETRY_S) == [part]
    assert fetching.failed(part, 0, 10.0 + RETRY_S, RETRY_S) == RETRY_S


def test_nothing_comes_back_for_who_has_gone() -> None:
    fetching = FetchSchedule()
    gone, stays = reading(fetching, 0, 1)
    ask = one(fetching, 0.0)
    fetching.remove(gone)
    assert fetching.answered(ask, 1.0) == [stays]
    for late in (
        lambda: fetching.goes_on(gone, 1, 1.0, lags=True),
        lambda: fetching.pauses(gone, 2.0),
        lambda: fetching.found(gone, HERE, 1.0),
        lambda: fetching.failed(gone, 1, 1.0, RETRY_S),
        lambda: fetching.works_off(gone, 1.0),
        lambda: fetching.remove(gone),
    ):
        late()
        assert (gone.phase, fetching.due(), len(fetching)) == (GONE, inf, 1)


def test_a_partition_fails_and_goes_from_any_phase_and_comes_back_from_none() -> None:
    for phase in FetchPhase:
        assert GONE in TRANSITIONS[phase]
        assert (LOST in TRANSITIONS[phase]) == (phase is not GONE)


def test_a_phase_that_cannot_follow_is_an_error_that_names_both() -> None:
    part = FetchedPartition("reader", "clicks", 3, 0, 0.0)
    part.become(LOOKED_UP)
    part.become(READY)
    with pytest.raises(AssertionError, match="partition 3 of clicks was ready, and is worked off"):
        part.become(WORKED_OFF)


def test_who_is_to_be_asked_for_alone_is() -> None:
    """Brokers may cut off records that do not fit behind those of other partitions."""
    fetching = FetchSchedule()
    cut, other = reading(fetching, 0, 1)
    fetching.answered(one(fetching, 0.0), 1.0)
    assert cut.among
    fetching.goes_on(cut, 0, 1.0, lags=True, alone=True)
    fetching.goes_on(other, 1, 1.0, lags=True)
    assert asked(fetching, 1.0) == [[0], [1]]
    assert not cut.among


def test_a_partition_that_was_held_up_is_looked_up_again_where_topics_go_by_name() -> None:
    """Meanwhile its topic may have been made anew, and a request by name would not show this."""
    fetching = FetchSchedule()
    (part,) = reading(fetching, 0)
    asked(fetching, 5.0)
    assert not fetching.stale(part, 5.0 + STALE_S + 0.1), "a broker without ids"
    part.topic_id = "D4-tW9nLRp-hZXCGdyiVDg"
    assert not fetching.stale(part, 5.0 + STALE_S - 0.1)
    assert fetching.stale(part, 5.0 + STALE_S + 0.1)
    part.by_id = True
    assert not fetching.stale(part, 5.0 + STALE_S + 0.1)


def test_answers_are_fewer_where_processors_are_scarce() -> None:
    fetching = FetchSchedule()
    fetching.waited(0.5)
    assert fetching.gather_s == GATHER_S
    for _ in range(20):
        fetching.waited(0.7)
    assert fetching.gather_s == GATHER_MAX_S
    fetching.waited(0.5)
    assert fetching.gather_s == GATHER_MAX_S, "it stays as it is in between"
    for _ in range(20):
        fetching.waited(0.2)
    assert fetching.gather_s == GATHER_S


def test_a_thread_knows_how_long_it_has_waited_for_a_processor(tmp_path: Path) -> None:
    counted = tmp_path / "schedstat"
    counted.write_text("1000000 9000000 5\n")
    crowding = ThreadCrowding(counted)
    assert crowding.share(1.0) is None, "since when?"
    counted.write_text("31000000 99000000 9\n")
    assert crowding.share(1.1) is None, "it has looked just now"
    assert crowding.share(1.0 + LOOK_S) == 0.75
    assert crowding.share(1.0 + 2 * LOOK_S) is None, "nothing was to be done"
    counted.write_text("nothing")
    assert crowding.share(9.0) is None
    counted.write_text("91000000 159000000 9\n")
    assert crowding.share(99.0) is None, "a system that does not count is not asked again"
    assert ThreadCrowding(tmp_path / "no such file").share(1.0) is None


def test_a_partition_has_been_answered_once_a_broker_has_said_anything_about_it() -> None:
    """Also that there is nothing. A failure is no answer, and takes none back."""
    fetching = FetchSchedule()
    first, second = reading(fetching, 0, 1)
    ask = one(fetching, 0.0)
    for part in fetching.answered(ask, 0.0):
        assert fetching.failed(part, 0, 0.0, inf) is None
        assert not part.answered
    for part in fetching.lookups(PAUSE_S):
        fetching.found(part, HERE, PAUSE_S)
    ask = one(fetching, PAUSE_S)
    fetching.answered(ask, 1.0)
    fetching.goes_on(first, 0, 1.0, lags=False)
    fetching.works_off(second, 1.0)
    assert (first.answered, second.answered) == (True, True)
    assert fetching.failed(first, 0, 1e6, inf) is None
    assert first.answered
    assert fetching.failed(second, 0, 1e6, RETRY_S) == pytest.approx(1e6 - 1.0)
