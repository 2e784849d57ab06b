"""Variants of the code in which joins, ranks and deduplication go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flux.joins.join import Join
from flux.ranks.best_rows import BestOrder

Patch = pytest.MonkeyPatch


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
    """A row of a join waits until the watermark of its own input has passed its bounds."""
    patch.setattr(Join, "_forget", _forgetting(lambda join, side: join._watermarks[side]))


def ranks_equal_rows_by_arrival(patch: Patch) -> None:
    """Of rows that are equal in the order of the user, the first to come is the best."""
    patch.setattr(BestOrder, "whole", lambda self, columns: self.by)
