"""Tentative results: the output that an operator would give if input that is missing had come (design: peek).

A shadow beside a replica asks for them while the watermark stands still. Law: a ``peek`` gives the output of a copy of the
operator that gets the same rows and the same watermark, and leaves the operator as it is. So nothing that is tentative can touch
the state that replicas share.

``ReadableOperator`` is the base of operators that need no copy of the whole state: they take out the part of the state that the
rows and the watermark reach, and do their ordinary work there. So the memory of a ``peek`` is that of its rows and its result,
and there is no second way to compute a result.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import pyarrow as pa

from flux.operators.batches import given_batches
from flux.operators.operator import BARRIER, FORK, PEEK, Operator, move_watermarks, never_gives
from flux.windows.window import NEVER

__all__ = ["BARRIER", "FORK", "PEEK", "ReadableOperator", "TentativeRows", "tentative_kind", "tentative_output"]


class TentativeRows(NamedTuple):
    """Rows of one input that may be taken back: they are tentative results of the stage before, and in no step."""

    #: As ``Context.input``.
    input: int
    batch: pa.RecordBatch
    #: The tentative watermark that gave them, in microseconds; ``NEVER``: before any other.
    through: int = NEVER


class ReadableOperator(Operator):
    """Base of operators whose state can be read for tentative results. A subclass defines ``_flux_part``."""

    def peek(self, watermark: int, overlay: Sequence[TentativeRows] = (), after: int = NEVER) -> list[pa.RecordBatch]:
        part = self._flux_part(watermark, overlay, after)
        return list(tentative_output(part, watermark, overlay, after))

    def _flux_aside(self) -> Self:
        """Return an operator with the same attributes, and a context of its own."""
        aside = copy.copy(self)
        object.__setattr__(aside, "context", self.context.aside())  # also where the class is frozen
        return aside


def tentative_output(
    operator: Operator, watermark: int, overlay: Sequence[TentativeRows], after: int = NEVER
) -> Iterator[pa.RecordBatch]:
    """Apply tentative rows and a watermark to an operator that is aside, and yield the output, as ``Operator.peek`` says."""
    if after != NEVER:
        for _ in _applied(operator, after, [rows for rows in overlay if rows.through <= after]):
            pass  # it was given before
        overlay = [rows for rows in overlay if rows.through > after]
    yield from _applied(operator, watermark, overlay)


def _applied(operator: Operator, watermark: int, overlay: Sequence[TentativeRows]) -> Iterator[pa.RecordBatch]:
    context = operator.context
    context._flux_method = "process"
    for rows in overlay:
        if rows.batch.num_rows:
            context.input = rows.input
            yield from given_batches(operator.process(rows.batch))
    yield from move_watermarks(operator, context, [max(each, watermark) for each in context.watermarks])


def tentative_kind(operator: Operator) -> str:
    """Return the way to tentative results of an operator. ``PEEK``: ``Operator.peek`` gives them. ``FORK``: a copy of the
    operator gives them, which gets the rows of all steps from then on. ``BARRIER``: there are none, because the operator gives
    nothing, or nothing that an event time decides."""
    sink = operator.schema is None and type(operator).output_schema is Operator.output_schema
    return BARRIER if sink or never_gives(operator) else operator._flux_tentative
