"""The contract of an operator's tentative results (design: shadow).

A shadow stands beside a replica and asks for results that the replica's operator would give if the watermark rose. The stable
operator gives them without any change of its state (peek), or a clone of it does (fork). A shadow does not know which of the two
it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from flux.replica.step_queue import ReplicaStep
from partitioning.ids import StreamId


class OverlayRows(NamedTuple):
    """Tentative rows of one mark of an input."""

    #: The number of the input.
    input: int
    batch: pa.RecordBatch
    #: The mark: event time in microseconds up to which the rows are results.
    through: int
    #: The stream that they come from; None: it is the only one.
    stream: StreamId | None = None


class TentativeOperator(Protocol):
    """The tentative results of one replica's operator.

    Law: no method changes the state of the stable operator, and the memory of a call is proportional to its result."""

    @property
    def reach(self) -> int | None:
        """Microseconds of event time behind its mark for which a tentative row has a part in results: the longest window. 0: a
        row is in results of its own mark alone. None: there is no limit."""

    @property
    def aligned(self) -> bool:
        """Whether results come at multiples of the quantum alone, as those of windows that are no sessions."""

    @property
    def nbytes(self) -> int:
        """The bytes that it holds beyond the stable state."""

    def stable(self, step: ReplicaStep) -> None:
        """Take a step that the replica has just applied."""

    def mark(self, after: int, through: int, overlay: Sequence[OverlayRows]) -> list[pa.RecordBatch] | None:
        """Return the results of watermark ``through`` beyond those of watermark ``after``, where the overlay's rows count as
        applied: each row for the marks from its own on. ``after`` is the stable watermark, or an earlier mark.

        The overlay has all rows that stand and whose mark is at most ``through``, in the order of their marks; rows of marks up
        to ``after`` were in results before. A mark may be asked for again. None: this operator cannot give it again."""

    def output_watermark(self, watermark: int) -> int:
        """Return the watermark of the output that would be stated if the watermark of the input were ``watermark``."""

    def forget(self) -> None:
        """Note that tentative rows that may have been in results are void, because stable ones take their place."""

    def close(self) -> None:
        """Release everything. Called once."""
