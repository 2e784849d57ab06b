"""The event time of a replica: the watermarks that its order has, and as primary the next ones (design: watermark-statements).

The primary writes watermarks into the order, and all replicas take them from there: each of them has heard something else of the
streams. Law: a watermark of the order never falls, and none is below one that an earlier primary has ordered.

``Forfeits`` are the times of which a partition has given results without some of its streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flux.dataflow.plan import StagePlan
from flux.errors import ProtocolError
from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.messages import OrderEntry, PartitionOrder, StepKind


class EventClock:
    """The watermarks of one replica, by input. Inputs without event time are at the end of time from the start."""

    def __init__(self, inputs: int, timed: Sequence[int]) -> None:
        #: The inputs whose watermarks count.
        self.timed = timed
        #: The newest watermarks in the order.
        self.ordered = [NEVER if number in timed else END_OF_TIME for number in range(inputs)]
        #: As primary: the watermarks to order next; None: they have not risen.
        self.offered: list[int] | None = None
        #: As primary: time of the last offer, by the monotonic clock.
        self.offered_at = float("-inf")
        #: As primary: the watermarks to order next go past streams that do not answer.
        self.forfeits = False

    @property
    def watermark(self) -> int:
        """The least of the newest watermarks in the order."""
        return min(self.ordered)

    def lead(self, known: Sequence[int], ordered: Iterable[OrderEntry]) -> None:
        """Go on behind the watermarks of the applied steps, and of those that are ordered and not applied."""
        self.offered = None
        self.ordered = list(known)
        for entry in ordered:
            if entry.watermarks:
                self.ordered = list(entry.watermarks)

    def offer(self, watermarks: Sequence[int], now: float, forfeits: bool = False) -> None:
        """Have watermarks ordered. They were true for all rows that are not ordered, and stay true for later ones, unless the
        partition ``forfeits`` those of streams that do not answer."""
        self.offered, self.offered_at, self.forfeits = list(watermarks), now, forfeits

    def take(self) -> list[int]:
        """Return the watermarks that are ordered now."""
        assert self.offered is not None
        self.ordered = [max(pair) for pair in zip(self.ordered, self.offered, strict=True)]
        self.offered = None
        return list(self.ordered)


def check_entries(stage: StagePlan, item: PartitionOrder) -> None:
    """Check that steps for watermarks have one for each input, that changes of the plan have a version, and that other steps have
    neither. ProtocolError: they have not; a replica that took them would end with an error of its own at the step, or as the next
    primary."""
    inputs = len(stage.edges_in) if stage.timed_inputs else 0
    for number, entry in enumerate(item.entries, item.first):
        moves, changes = entry.kind.moves_watermarks, entry.kind is StepKind.CHANGE
        if len(entry.watermarks) != (inputs if moves else 0) or (moves and not inputs):
            raise ProtocolError(
                f"stage {stage.name}, partition {item.partition}: step {number} of kind {entry.kind.name} has "
                f"{len(entry.watermarks)} watermarks; steps for watermarks have {inputs}, one for each input, or the stage "
                "has no event time, and others have none"
            )
        if (entry.version > 0) != changes or (changes and entry.slices):
            raise ProtocolError(
                f"stage {stage.name}, partition {item.partition}: step {number} of kind {entry.kind.name} has version "
                f"{entry.version} and {len(entry.slices)} slices; changes of the plan have a version alone, and others have none"
            )


#: Spans of event time that are kept, beyond which the oldest are joined.
SPANS_MAX = 16


class Forfeits:
    """The event time of which a partition has given results without some of its streams, and the rows that came for it later
    (design: forfeit).

    Law: all of it follows from the order, so it is the same on every replica at the same step. A row is forfeited if it is left
    out while the watermark is one that a forfeiting step has set: once a stream has come to that watermark by itself, it has
    brought all its rows before it."""

    def __init__(self) -> None:
        #: Spans of event time, from the watermark before to the one behind, ascending.
        self.spans: list[tuple[int, int]] = []
        self.rows = 0
        #: Rows that the operator had left out for any reason at the last look.
        self._left_out = 0

    def close(self, before: int, through: int, left_out: int) -> None:
        """Note that the watermark has moved without some streams. ``left_out``: the rows that were left out until then."""
        if self.spans and through <= self.spans[-1][1]:
            return  # a repeated step
        if self.spans and self.spans[-1][1] == before:
            before = self.spans.pop()[0]
        self.spans.append((before, through))
        while len(self.spans) > SPANS_MAX:
            (start, _), (_, end), *others = self.spans
            self.spans = [(start, end), *others]
        self._left_out = left_out

    def counts(self, watermark: int) -> bool:
        """Tell whether rows that are left out now are forfeited."""
        return bool(self.spans) and watermark == self.spans[-1][1]

    def count(self, left_out: int) -> None:
        self.rows, self._left_out = self.rows + left_out - self._left_out, left_out

    def state(self) -> dict[str, Any]:
        """Return the state for a copy; empty: nothing was forfeited."""
        kept = {"spans": [list(span) for span in self.spans], "rows": self.rows, "left out": self._left_out}
        return {"forfeits": kept} if self.spans else {}

    def adopt(self, kept: Any) -> None:
        if kept:
            self.spans = [(int(start), int(end)) for start, end in kept["spans"]]
            self.rows, self._left_out = int(kept["rows"]), int(kept["left out"])
