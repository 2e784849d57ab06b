"""The time at which all elements that were in the logs at one time have left them, also while more come."""

from __future__ import annotations

import numpy as np

from flux.exchange.log import End, Log, LogEntry
from flux.worker.report import DrainCounter


def log(*sequences: int) -> Log:
    made = Log(1 << 20)
    for sequence in sequences:
        append(made, sequence)
    return made


def append(to: Log, sequence: int) -> None:
    to.append(LogEntry(sequence, End(), np.array([0]), 10, 0, 0.0))


def ack(of: Log, through: int) -> None:
    of.evict(np.array([through]))


def test_empty_logs_are_drained_at_every_look() -> None:
    drained = DrainCounter()
    assert [drained.look([log(), log()]) for _ in range(3)] == [1, 2, 3]


def test_what_was_there_must_leave_every_log_and_what_came_later_need_not() -> None:
    drained, one, other = DrainCounter(), log(0, 1), log(0)
    assert drained.look([one, other]) == 1
    ack(one, 1)
    assert drained.look([one, other]) == 1
    append(one, 2)
    ack(other, 0)
    append(other, 1)
    assert drained.look([one, other]) == 2, "the new ones are marked from here on"
    ack(one, 2)
    assert drained.look([one, other]) == 2
    ack(other, 1)
    assert drained.look([one, other]) == 3


def test_a_log_that_is_gone_holds_nothing_up() -> None:
    drained, dropped, kept = DrainCounter(), log(0), log(0)
    assert drained.look([dropped, kept]) == 1
    ack(kept, 0)
    assert drained.look([kept]) == 2
