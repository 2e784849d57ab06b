"""Release: a replica's output is held back until its steps are committed (design: release-rule).

The output of a step goes into the logs at once, and is not sent before the step is committed: it lies behind a mark, which says
where in each log the output of an uncommitted step begins. A copy of the state takes the marks along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flux.exchange.producer import NEVER
from flux.replica.output import EdgeOutput


class ReleaseRule:
    """The release of one replica's output. ``marks`` has, in order, each step that is not committed, and the beginning of its
    output in the log of each outlet."""

    def __init__(self, outlets: Sequence[EdgeOutput]) -> None:
        self.marks: deque[tuple[int, list[int]]] = deque()
        self._outlets = outlets

    def hold_back(self, step: int) -> None:
        """Hold back the output of the step that begins now, behind that of the steps before it, until its commit."""
        starts = [outlet.producer.next_sequence for outlet in self._outlets]
        self.marks.append((step, starts))
        if len(self.marks) == 1:
            for outlet, start in zip(self._outlets, starts, strict=True):
                outlet.producer.release_from = start

    def through(self, committed: int) -> None:
        """Release the output of the steps below ``committed``."""
        while self.marks and self.marks[0][0] < committed:
            self.marks.popleft()
        starts = self.marks[0][1] if self.marks else [NEVER] * len(self._outlets)
        for outlet, start in zip(self._outlets, starts, strict=True):
            producer = outlet.producer
            # Only a producer whose output was held back has something new to send.
            producer.dirty |= producer.release_from < min(start, producer.next_sequence)
            producer.release_from = start

    def validate(self, begun: int, committed: int) -> None:
        """Check the invariants that hold between any two events, when ``begun`` steps have begun. AssertionError names the
        broken one."""
        held = begun - committed if begun > committed else 0
        assert len(self.marks) == held, f"{held} steps are not committed, {len(self.marks)} are held back"
        assert not held or self.marks[0][0] == committed, f"held back from step {self.marks[0][0]} on, not {committed}"
        for place, outlet in enumerate(self._outlets):
            given, start = outlet.producer.release_from, self.marks[0][1][place] if held else NEVER
            assert given == start, f"stream {outlet.producer.stream} is held back from {given} on, not {start}"
