"""Variants of the code in which joins, lookups, ranks and deduplication go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flux.joins.as_of import AsOfJoin
from flux.joins.join import Join
from flux.joins.join_spec import RIGHT
from flux.joins.refreshed_lookup import RefreshedLookup
from flux.ranks.best_rows import BestOrder
from flux.ranks.dedup import Dedup
from flux.windows.window import END_OF_TIME, NEVER
from tests.simulation.timed_rows import SECOND

Patch = pytest.MonkeyPatch
#: Microseconds by which a row without a match is given too early. This is more than the event time of most random flows: a few
#: seconds too early show seldom, because few rows come within them.
EARLY = 3600 * SECOND


def _forgetting(limit_of: Callable[[Join, int], int]) -> Callable[..., Iterator[Any]]:
    """Return a ``Join._forget`` that goes by another limit of the times that may still match rows of a side."""

    def broken(self: Join, everything: bool = False) -> Iterator[Any]:
        for side, watermark in enumerate(self.context.watermarks):
            self._watermarks[side] = max(self._watermarks[side], watermark)
        for side, waiting in enumerate(self._waiting):
            ended = everything or self._ended(1 - side)
            alone = waiting.forget(limit_of(self, side), self._until_limit(side), everything=ended)
            if self.spec.outer[side] and len(alone):
                yield self._alone(side, alone)
        self._tidy()

    return broken


def drops_rows_by_their_own_watermark(patch: Patch) -> None:
    """Keep a row of a join until the watermark of its own input, instead of the other one, has passed its bounds."""
    patch.setattr(Join, "_forget", _forgetting(lambda join, side: join._watermarks[side]))


def gives_outer_rows_too_early(patch: Patch) -> None:
    """Give a row without a match before its last match can have come."""

    def limit_of(join: Join, side: int) -> int:
        watermark = join._watermarks[1 - side]
        return watermark + EARLY if join.spec.outer[side] and NEVER < watermark < END_OF_TIME - EARLY else watermark

    patch.setattr(Join, "_forget", _forgetting(limit_of))


def gives_matched_rows_alone(patch: Patch) -> None:
    """Give a right row of an outer join that had a match at its arrival once more without a match, at the end of its wait."""
    keep = Join._keep

    def broken(self: Join, batch: Any, side: int, rows: Any, final: Any, matched: np.ndarray) -> None:
        keep(self, batch, side, rows, final, np.zeros_like(matched) if side == RIGHT else matched)

    patch.setattr(Join, "_keep", broken)


def joins_with_the_row_that_is_there(patch: Patch) -> None:
    """Join a left row of an as-of join when it comes, and not when its partner is certain."""
    process = AsOfJoin.process

    def broken(self: AsOfJoin, batch: Any) -> Iterator[Any]:
        yield from process(self, batch) or ()
        times = self._waiting[0].times
        if len(times):
            yield from self._join(int(times.max()) + 1)

    patch.setattr(AsOfJoin, "process", broken)


def forgets_keys_with_their_first_rows(patch: Patch) -> None:
    """Let a key come again when the watermark has passed the row that was given for it."""
    on_watermark = Dedup.on_watermark

    def broken(self: Dedup) -> Any:
        given, watermark = on_watermark(self), self.context.watermark
        for piece in self._first._pieces if watermark != NEVER else ():
            kept = piece._ends[: len(piece)] - self._spec.ttl >= watermark
            piece._move_together(np.flatnonzero(kept).astype(np.int32))
        return given

    patch.setattr(Dedup, "on_watermark", broken)


def ranks_equal_rows_by_arrival(patch: Patch) -> None:
    """Rank the first row to come as the best among rows that are equal in the order of the user."""
    patch.setattr(BestOrder, "whole", lambda self, columns: self.by)


def takes_the_newest_table(patch: Patch) -> None:
    """Keep the versions of a table beside the order: a replica takes the newest version that any replica of its partition has."""
    newest: dict[tuple[int, int], tuple[int, Any]] = {}
    process, put_in_force = RefreshedLookup.process, RefreshedLookup._put_in_force

    def process_with_newest(self: RefreshedLookup, batch: Any) -> Iterator[Any]:
        version, rows = newest.get((id(self.spec), self.context.partition), (self.version, None))
        if version > self.version:
            self.version = version
            self._use(rows)
        yield from process(self, batch)

    def put(self: RefreshedLookup, version: int) -> None:
        put_in_force(self, version)
        key = id(self.spec), self.context.partition
        if self.version > newest.get(key, (0, None))[0]:
            newest[key] = self.version, self._rows

    patch.setattr(RefreshedLookup, "process", process_with_newest)
    patch.setattr(RefreshedLookup, "_put_in_force", put)
