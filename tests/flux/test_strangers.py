"""Connections that have proved nothing are few, short and say little."""

from __future__ import annotations

import random

from flux.wire.handshake import STRANGER_BYTES_MAX, STRANGER_S, STRANGERS_MAX, Strangers

#: Strangers that a process admits at most, if it may have 1,024 files open.
AT_MOST = 128


def test_there_are_as_many_as_a_process_has_room_for() -> None:
    assert [Strangers(n).at_most for n in (4, 1024, 2048, 1 << 20)] == [1, AT_MOST, 256, STRANGERS_MAX]


def test_who_sends_much_or_stays_long_has_to_go() -> None:
    strangers = Strangers()
    for connection in (3, 4, 5):
        assert strangers.came(connection, 0.0) == []
    sent = {3: STRANGER_BYTES_MAX, 4: STRANGER_BYTES_MAX + 1, 5: 0}
    assert strangers.too_much(sent.__getitem__, 1.0) == [4]
    assert strangers.cut_off([4]) == [4]
    assert strangers.too_much(sent.__getitem__, STRANGER_S + 1) == [3, 5]


def test_who_has_proved_the_secret_meanwhile_may_stay() -> None:
    strangers = Strangers()
    strangers.came(3, 0.0)
    much = strangers.too_much(lambda _: 1 << 30, 1.0)
    strangers.left(3)
    assert strangers.cut_off(much) == []
    assert (bool(strangers), strangers.cut) == (False, 0)


def test_one_more_than_there_may_be_takes_the_place_of_any() -> None:
    strangers = Strangers(1024, draw=lambda n: n - 2)
    gone = [went for connection in range(AT_MOST + 3) for went in strangers.came(connection, 0.0)]
    assert gone == [AT_MOST - 2, AT_MOST - 1, AT_MOST]
    assert strangers.cut == 3
    assert len(strangers.too_much(lambda _: 1 << 30, 1.0)) == AT_MOST


def test_who_opens_connections_as_fast_as_he_can_does_not_keep_others_out() -> None:
    drawn = random.Random(7)
    there = 0
    for _ in range(200):
        strangers = Strangers(1024, drawn.randrange)
        strangers.came(-1, 0.0)
        for connection in range(2 * AT_MOST):  # while the true one shows its proof
            strangers.came(connection, 0.0)
        there += -1 in strangers
    assert there > 50


def test_a_number_that_is_used_again_is_another_connection() -> None:
    strangers = Strangers()
    strangers.came(3, 0.0)
    strangers.came(3, 20.0)
    assert strangers.too_much(lambda _: 0, STRANGER_S + 1) == []
