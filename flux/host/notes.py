"""What a worker's loop notes of itself, in a piece of memory that a thread without the interpreter reads (design: pulse)."""

from __future__ import annotations

from collections.abc import MutableSequence
from enum import IntEnum
from typing import NamedTuple

#: Places in the memory: the first ends the thread, the others travel.
OVER, TURNS, KIND, WHAT, PARTITION, STEP = range(6)
Note = MutableSequence[int]


class Kind(IntEnum):
    """What a worker's loop is at."""

    #: It waits for messages.
    WAITS = 0
    #: Something that is soon done.
    TURNS = 1
    #: Code of the user's: a step of stage ``what``.
    STEP = 2
    #: The next batch of source ``what``.
    READ = 3


#: Looked up often.
WAITS, TURN, IN_STEP, READS = Kind.WAITS.value, Kind.TURNS.value, Kind.STEP.value, Kind.READ.value


class Pulse(NamedTuple):
    """A loop that has turned so often is at this: ``kind`` of ``what`` (stage or source) and ``partition``."""

    turns: int
    kind: int
    what: int
    partition: int
    step: int

    @property
    def busy(self) -> bool:
        return self.kind != WAITS


def no_note() -> list[int]:
    """For a loop that nobody watches."""
    return [0] * (STEP + 1)
