"""Replay points, which an upstream replica gets in place of checkpoints (design: replay-point).

A replay point is a triple (r, s, n). Rows applied from step r on still matter; from step s on, the output of an operator that
began empty at step r is right; n is the number of the first output of step s, and all consumers have acked everything below.
Nothing of the state travels, and no output: a replica that takes over begins empty at r, throws away its output before s, and
numbers from n.

The operator says r (``Operator.needs_from``). The parts of a copy beside state and output are those of step r: positions, ended
streams, timers, time. So a primary notes its step boundaries, and goes back to the newest one that is early enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flux.exchange.inbound import Inbound
from flux.replica.replica import Replica
from flux.state.state_copy import OutputNow, Photograph, StreamPosition, positions_of

#: Step boundaries that are noted. Beyond this number, every second one is forgotten: rows are then kept for somewhat longer.
BOUNDARIES_MAX = 64


@dataclass(frozen=True)
class Boundary:
    """A replica between two steps, without its state and its output. ``step`` steps are applied."""

    step: int
    replica: dict[str, Any]
    positions: tuple[StreamPosition, ...]
    #: The rows that its operator has left out by then. The count is a part of the state, which begins empty at a replay point.
    left_out: tuple[int, int]


@dataclass(frozen=True)
class ReplayPoint:
    """A replay point. ``outputs`` has the number n for each outgoing edge, without any output; ``left`` is the n of a sink."""

    picture: Photograph
    left: int

    @property
    def outputs(self) -> tuple[OutputNow, ...]:
        return self.picture.outputs

    def acked(self, replica: Replica) -> bool:
        """Tell whether no consumer can ask for output that its primary has given before."""
        if replica.output.exit is not None and replica.output.exit.left < self.left:
            return False
        # An edge that began since has no output before the point.
        given = {output.edge: output.base for output in self.outputs}
        return all(outlet.producer.log.base >= given.get(outlet.edge.id, 0) for outlet in replica.outlets)


class ReplayPoints:
    """The replay points of one replica, while it leads."""

    def __init__(self) -> None:
        self._term = -1
        self._known: deque[Boundary] = deque()

    def make(self, replica: Replica, inbounds: Iterable[Inbound], after: int) -> ReplayPoint | None:
        """Make a replay point of a replica between two steps, of which the second is s. None: r is not later than ``after``."""
        if self._term != replica.leads_since:
            self._term = replica.leads_since
            self._known.clear()
        now = Boundary(replica.applied, replica.state(), positions_of(replica, inbounds), replica.left_out())
        needed = now.step if replica.finished else replica.guard.needs_from()
        self._note(now)
        if needed is None:
            return None
        while len(self._known) > 1 and self._known[1].step <= needed:
            self._known.popleft()
        first = self._known[0]
        return _point(replica, first, now) if after < first.step <= needed else None

    def _note(self, now: Boundary) -> None:
        """Note a step boundary, and forget every second one if there are too many."""
        if self._known and self._known[-1].step == now.step:
            return
        self._known.append(now)
        if len(self._known) > BOUNDARIES_MAX:
            self._known = deque(list(self._known)[::2])


def _point(replica: Replica, first: Boundary, now: Boundary) -> ReplayPoint:
    left = 0 if replica.output.exit is None else replica.output.exit.position
    outputs = tuple(OutputNow.after(outlet.producer) for outlet in replica.outlets)
    state = first.replica | {
        "checksum": now.replica["checksum"],
        "rows": now.replica["rows"],
        # One that is still repeating, itself from such a point, has given nothing since: its outputs are numbered from later on.
        "silent": max(now.step, now.replica["silent"]),
        "marks": [],
        # The outputs are those of now: an edge that begins between the two steps is there when they are repeated.
        **({"edges": now.replica["edges"], "version": now.replica["version"]} if "edges" in now.replica else {}),
        **({"left out before": list(first.left_out)} if any(first.left_out) else {}),
        "exit": None if replica.output.exit is None else (left, left, []),
        **_watermark(first, now, outputs),
    }
    return ReplayPoint(Photograph(replica.where, state, first.positions, outputs, None, ()), left)


def _watermark(first: Boundary, now: Boundary, outputs: Sequence[OutputNow]) -> dict[str, Any]:
    """Return the watermark of a replay point if edges have begun or gone between its two steps: that of the first step, with
    the statements for the outputs of the second one. A statement about fewer elements is true of all that are there by then.
    Empty: the edges are the same, so all is as it was at the first step."""
    if "watermark" not in first.replica or first.replica.get("edges") == now.replica.get("edges"):
        return {}
    watermark, stated, _ = first.replica["watermark"]
    _, _, said = now.replica["watermark"]
    ends = [output.base for output in outputs]
    return {"watermark": (watermark, [(step, at, ends) for step, at, _ in stated], said)}
