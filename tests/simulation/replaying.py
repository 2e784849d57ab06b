"""Operators of the simulation that say from which step on their rows matter, so that a stage may have upstream replicas.

The stamps on their rows follow from the step, and not from a state: a replica that begins empty stamps the same.
"""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa

import flux
from tests.simulation.stage_kinds import Double, Filter, Giving, Row, Shatter, Watched, make_batch

#: Share of the stages that are of this kind, among those that may be.
REPLAYING_SHARE = 0.9
#: More rows than a step gives.
STEP_ROWS = 1_000_000
#: Steps with rows that ``Lately`` remembers.
REMEMBERED = 3


class Replaying(Watched):
    """An operator that remembers only the rows seen since it began, to check their order."""

    transient = ("_seen", "_stamped")

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self._seen, self.state = self.state["seen"], {}
        self._stamped = (-1, 0)  # a step, and the number of rows given in it

    def process(self, batch: pa.RecordBatch) -> Any:
        self.state["seen"] = self._seen
        output = super().process(batch)
        del self.state["seen"]
        return output

    def stamped(self, rows: list[Row], elsewhere: int = 0) -> pa.RecordBatch:
        step, given = self.context.step, self._stamped[1] if self._stamped[0] == self.context.step else 0
        self._stamped = (step, given + len(rows))
        return make_batch(rows, self.context.partition + elsewhere, step * STEP_ROWS + given)

    def needs_from(self) -> int | None:
        return self.context.step + 1


class Lately(Replaying):
    """An operator that gives each row at once. The number of batches depends on whether it knows of enough steps before."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["lately"] = []

    def through(self, rows: list[Row]) -> Any:
        lately, step = self.state["lately"], self.context.step
        full = len(lately) == REMEMBERED
        self.state["lately"] = [*lately, step][-REMEMBERED:]
        return [self.stamped([row]) for row in rows] if full else [self.stamped(rows)]

    def needs_from(self) -> int | None:
        return min(self.state["lately"], default=self.context.step + 1)

    def finish(self) -> Any:
        self.state["lately"] = []


class ReplayingGiving(Replaying):
    """A replaying stage whose rows are kept only outside."""

    def through(self, rows: list[Row]) -> Any:
        return [self.stamped(rows)]


def perhaps_replaying(kind: type, rng: random.Random | None) -> type:
    """Return a kind of stage that replays in place of the given one, or the given one."""
    if rng is None or kind not in (Watched, Filter, Double, Shatter, Giving) or rng.random() >= REPLAYING_SHARE:
        return kind
    if kind is Giving:
        return ReplayingGiving
    if kind is Watched and rng.random() < 0.5:
        return Lately
    return type(f"Replaying{kind.__name__}", (Replaying, kind), {})
