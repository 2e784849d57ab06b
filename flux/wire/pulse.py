"""Pulses: notes of a worker's loop about its activity, as a thread sends them to the controller (design: pulse).

The loop writes numbers into a piece of memory (``Note``), at the places named here. A thread without the interpreter sends
them; the controller reads a ``Pulse``.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from enum import IntEnum
from typing import NamedTuple

#: Places in the memory: the first ends the thread, the others are sent.
OVER, TURNS, KIND, WHAT, PARTITION, STEP = range(6)
Note = MutableSequence[int]


class LoopActivity(IntEnum):
    """The activity of a worker's loop."""

    #: It waits for messages.
    WAITS = 0
    #: It does something short.
    TURNS = 1
    #: It runs user code: a step of stage ``what``.
    STEP = 2
    #: It reads the next batch of source ``what``.
    READ = 3
    #: It opens an operator of stage ``what``.
    OPEN = 4


#: Kinds under module names, because they are looked up often.
WAITS, TURN, IN_STEP, READS, OPENS = (
    LoopActivity.WAITS.value,
    LoopActivity.TURNS.value,
    LoopActivity.STEP.value,
    LoopActivity.READ.value,
    LoopActivity.OPEN.value,
)


class Pulse(NamedTuple):
    """The notes of a loop at one moment."""

    #: Number of turns.
    turns: int
    #: A ``LoopActivity``.
    kind: int
    #: Number of the stage or source.
    what: int
    partition: int
    step: int

    @property
    def busy(self) -> bool:
        return self.kind != WAITS

    def opens_another_than(self, before: Pulse | None) -> bool:
        """Return whether the loop opens an operator that it did not open at a moment before."""
        return self.kind == OPENS and (before is None or self[1:4] != before[1:4])


def no_note() -> list[int]:
    """Return a note for a loop that no thread watches."""
    return [0] * (STEP + 1)
