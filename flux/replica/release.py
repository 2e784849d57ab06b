"""Release policies: the moment at which a replica's output may leave it (design: release-rule).

The output of a step goes into the logs at once, behind a mark, which says where in each log the output of a step that may not
leave yet begins. A copy of the state takes the marks along. The kind of a replica gives it its policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from flux.exchange.log import NEVER

if TYPE_CHECKING:
    from flux.replica.output import EdgeOutput


class ReleasePolicy(Protocol):
    """The release of one replica's output, in the order of its steps."""

    def hold_back(self, step: int) -> None:
        """Note that a step begins. Its output is released by a later call of ``through``, if not before."""

    def through(self, committed: int) -> None:
        """Note that the steps below ``committed`` are committed: their output is released."""

    def marks(self) -> list[tuple[int, list[int]]]:
        """Return each step whose output is held back, in order, with the beginning of its output in the log of each outlet."""

    def adopt(self, marks: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Go on with the marks of a copied replica, before any step of one's own."""

    def open(self) -> None:
        """Note that the last outlet has just begun, with an empty log."""

    def close(self, place: int) -> None:
        """Note that the outlet at a place goes."""

    def validate(self, begun: int, committed: int) -> None:
        """Check the invariants that hold between any two events, when ``begun`` steps have begun. AssertionError names the
        broken one."""


class CommittedOnly:
    """The policy that holds output back until its step is committed."""

    def __init__(self, outlets: Sequence[EdgeOutput]) -> None:
        self._marks: deque[tuple[int, list[int]]] = deque()
        self._outlets = outlets

    def marks(self) -> list[tuple[int, list[int]]]:
        # Copies: another thread writes them down, and an outlet may close meanwhile.
        return [(step, list(starts)) for step, starts in self._marks]

    def adopt(self, marks: Iterable[tuple[int, Sequence[int]]]) -> None:
        self._marks.extend((step, list(starts)) for step, starts in marks)

    def hold_back(self, step: int) -> None:
        """Hold back the output of the step that begins now, behind that of the steps before it, until its commit."""
        starts = [outlet.producer.next_sequence for outlet in self._outlets]
        self._marks.append((step, starts))
        if len(self._marks) == 1:
            for outlet, start in zip(self._outlets, starts, strict=True):
                outlet.producer.release_from = start

    def open(self) -> None:
        """Hold back the last outlet from its beginning on, if any step is held back: the outlet begins behind that step."""
        for _, starts in self._marks:
            starts.append(0)
        if self._marks:
            self._outlets[-1].producer.release_from = 0

    def close(self, place: int) -> None:
        for _, starts in self._marks:
            del starts[place]

    def through(self, committed: int) -> None:
        """Release the output of the steps below ``committed``."""
        while self._marks and self._marks[0][0] < committed:
            self._marks.popleft()
        starts = self._marks[0][1] if self._marks else [NEVER] * len(self._outlets)
        for outlet, start in zip(self._outlets, starts, strict=True):
            producer = outlet.producer
            # Only a producer whose output was held back has something new to send.
            producer.dirty |= producer.release_from < min(start, producer.next_sequence)
            producer.release_from = start

    def validate(self, begun: int, committed: int) -> None:
        """Check the invariants that hold between any two events, when ``begun`` steps have begun. AssertionError names the
        broken one."""
        held = begun - committed if begun > committed else 0
        assert len(self._marks) == held, f"{held} steps are not committed, {len(self._marks)} are held back"
        assert not held or self._marks[0][0] == committed, (
            f"held back from step {self._marks[0][0]} on, not {committed}"
        )
        for place, outlet in enumerate(self._outlets):
            given, start = outlet.producer.release_from, self._marks[0][1][place] if held else NEVER
            assert given == start, f"stream {outlet.producer.stream} is held back from {given} on, not {start}"
