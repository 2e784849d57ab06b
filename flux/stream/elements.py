"""The elements of a stream: rows, or a word for every partition of the consumer (design: element, end-of-stream).

All elements are numbered, logged, sent, acked and ordered alike. Only the two ends of a stream look into them: the owner of the
producer, and the replica that applies them. ``WORDS`` lists the elements without rows. A new one needs a class, a line there,
and its meaning for a replica.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from flux.wire.messages import ElementKind
from partitioning.cluster import Clustered


class Rows(msgspec.Struct, frozen=True):
    """A batch, clustered by partition. It goes to the partitions that have rows in it."""

    data: Clustered
    kind: ClassVar[ElementKind] = ElementKind.ROWS


class End(msgspec.Struct, frozen=True):
    """The end of the stream."""

    kind: ClassVar[ElementKind] = ElementKind.END


Element = Rows | End
Word = End

#: Elements without rows, which go to every partition.
WORDS: dict[ElementKind, Word] = {End.kind: End()}
