"""Pulses over a lifeline: they go on while the interpreter is kept, and end with the connection."""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import LIMIT_S

from flux.shell.lifeline import Lifeline, Lifelines
from flux.shell.liveness_thread import LivenessThread, parse, records, warm_up
from flux.wire.pulse import IN_STEP, KIND, STEP, TURNS, LoopActivity, Pulse

SECRET = b"the secret of this query"
EVERY_S = 0.02


@pytest.fixture
def lifelines() -> Iterator[Lifelines]:
    opened = Lifelines("127.0.0.1", SECRET)
    yield opened
    opened.close()


@pytest.fixture
def heart() -> Iterator[LivenessThread]:
    warm_up()
    made = LivenessThread(EVERY_S)
    yield made
    made.stop()


def within(look: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def heard(lifelines: Lifelines) -> list[tuple[int, Pulse]]:
    assert lifelines.poll() == []
    return lifelines.pulses()


def named(lifelines: Lifelines, heart: LivenessThread | None = None) -> Lifeline:
    lifeline = Lifeline(lifelines.endpoint, SECRET, 7, heart)
    end = time.monotonic() + LIMIT_S
    while not lifelines._named:
        lifelines.poll()
        if select.select([lifeline.raw], [], [], 0)[0]:
            lifeline.hear()
        assert time.monotonic() < end
    return lifeline


def beats_in_one_call(lifelines: Lifelines) -> int:
    """Count the beats during one call of C code. A machine under load may have no time for beats during one call, but
    not during every one."""
    heard(lifelines)
    ctypes.PyDLL(None).usleep(400_000)
    return heard(lifelines).count((7, Pulse(3, LoopActivity.STEP, 0, 0, 12)))


def test_the_process_beats_while_one_call_keeps_the_interpreter(lifelines: Lifelines, heart: LivenessThread) -> None:
    lifeline = named(lifelines, heart)
    within(lambda: heard(lifelines))
    heart.note[TURNS], heart.note[KIND], heart.note[STEP] = 3, IN_STEP, 12
    within(lambda: beats_in_one_call(lifelines) > 5)
    lifeline.close()


def test_the_end_of_the_connection_is_the_end_of_a_worker_that_has_beaten(
    lifelines: Lifelines, heart: LivenessThread
) -> None:
    lifeline = named(lifelines, heart)
    within(lambda: heard(lifelines))
    lifeline.close()
    assert within(lifelines.poll) == [7]
    assert lifelines.reset() == []


def test_a_connection_that_is_reset_is_not_taken_for_closed(lifelines: Lifelines) -> None:
    connection = named(lifelines)._connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()  # resets it
    closed: list[int] = []
    assert within(lambda: closed.extend(lifelines.poll()) or lifelines.reset()) == [7]
    assert not closed


def test_a_heart_notices_that_its_connection_is_lost(heart: LivenessThread) -> None:
    lifelines = Lifelines("127.0.0.1", SECRET)
    lifeline = named(lifelines, heart)
    assert heart.beats
    lifelines.close()
    within(lambda: not heart.beats)
    assert not lifeline.hear()
    lifeline.close()


def test_pulses_may_come_in_pieces(lifelines: Lifelines) -> None:
    pulses = [Pulse(number, LoopActivity.STEP, 1, 2, 3) for number in range(4)]
    data = b"".join(records(*pulses))
    assert parse(data[:-5]) == (pulses[:3], data[len(data) * 3 // 4 : -5])
    lifeline = named(lifelines)
    lifeline._connection.sendall(data[:50])
    found = within(lambda: heard(lifelines))
    lifeline._connection.sendall(data[50:])
    found += within(lambda: heard(lifelines))
    assert found == [(7, pulse) for pulse in pulses]
    lifeline.close()
