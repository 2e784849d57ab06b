"""Where a reader of a source goes on, and which element of its streams that is (design: position).

A position belongs to the reader: code that keeps it, or gives it to a reader, knows nothing about its meaning. Today's
readers count their batches, and every batch is one element, so both numbers are the same. Only this module knows that,
so an offset of the reader's own can take its place.
"""

from __future__ import annotations

from typing import NewType

#: The second argument of ``read(partition, start)``.
ReaderPosition = NewType("ReaderPosition", int)


def position_before(sequence: int) -> ReaderPosition:
    """The position at which a reader has to begin so that element ``sequence`` of its streams comes first."""
    return ReaderPosition(sequence)
