"""``flux.asof_join``: each left row with the newest right row at or before its time (design: as-of)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flux.arguments import checked
from flux.dataflow.flow import node
from flux.dataflow.relations.ranking import RankFlow, Ranking, RankInput, ResolvedRanking, ToOrder, needed_key, ranked
from flux.errors import UsageError
from flux.windows.durations import microseconds, words

#: The kinds of as-of joins, in the spellings of PySpark; True: left rows without a partner are given, too.
KINDS = {"inner": False, "left": True, "leftouter": True, "left_outer": True}


@dataclass(frozen=True)
class AsOf(Ranking):
    """A call of ``flux.asof_join``."""

    on: tuple[str, ...]
    #: Microseconds.
    tolerance: int | None
    outer: bool
    name: str = field(default="asof_join", init=False)
    takes = "two flows"

    def resolved(self, inputs: Sequence[RankInput], to_order: ToOrder | None) -> ResolvedRanking:
        from flux.joins.as_of import AsOfJoin, AsOfSpec  # it loads kernels, which importing flux does not

        left, right = (given.time("flux.asof_join") for given in inputs)
        spec = AsOfSpec((left, right), self.tolerance, self.outer)
        return ResolvedRanking(partial(AsOfJoin, spec), self.on, (None, None))

    def __repr__(self) -> str:
        said = "" if self.tolerance is None else f", tolerance={words(self.tolerance)!r}"
        return f"asof_join(on={list(self.on)}{said}, how={'left' if self.outer else 'inner'!r})"


@checked("flux.asof_join")
def asof_join(left: Any, right: Any, *, on: Any, tolerance: str | None = None, how: str = "inner") -> RankFlow:
    """Join each left row with the newest right row that has the same key and is at or before its time, as an order with the price
    that held then.

    A left row is given when the watermark of both inputs is above its time: until then a right row may come that is newer. So the
    result is the same in every run. It has the event time of the left row. Among right rows with one key and one time, the last
    one by all columns counts.

    left, right  flows, sources or DataFrames, both with event time (``withWatermark``)
    on           column or columns with the same names and types on both sides; null equals nothing
    tolerance    such as "1 hour": an older right row is no partner, and keys without newer ones are forgotten. Without it the
                 newest row of each key stays
    how          "inner", or "left": a left row without a partner is given with nulls"""
    names = needed_key(on, "flux.asof_join: on must name the columns that are equal on both sides", "on='item'", "on")
    if not isinstance(how, str) or how.lower() not in KINDS:
        raise UsageError(
            f"flux.asof_join: how must be 'inner' or 'left', got {how!r:.100}; for the rows of the other side exchange them"
        )
    longest = None
    if tolerance is not None:
        longest = microseconds(tolerance, "flux.asof_join, tolerance")
        if longest < 0:
            raise UsageError(f"flux.asof_join, tolerance: expected a duration of zero or more, got {tolerance!r:.100}")
    return ranked(AsOf(names, longest, KINDS[how.lower()]), node(left), node(right))
