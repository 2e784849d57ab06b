"""The place of one log, as its owner and its readers use it: a directory, or a prefix of an object store.

``flux.vault.directory_store.Directory`` and ``flux.vault.object_store.Bucket`` are such places if they are opened with
``keeps``. A place is claimed for a generation when it is opened for writing; earlier owners find that out in ``check``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, cast

from flux.vault.location import Place

#: Generation of the owner that has begun the segment, and its number among the segments of that owner.
SegmentId = tuple[int, int]


class LogStore(Protocol):
    """A place of segments. OSError: it cannot be read or written."""

    @property
    def generation(self) -> int:
        """Return the number of this opening; 0: it only reads."""

    def had_segments(self) -> bool:
        """Return whether any owner has begun a segment here, removed or not."""

    def segments(self) -> list[SegmentId]:
        """Return all segments that are there, ascending."""

    def read(self, segment: SegmentId, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes of a segment, from ``start`` to before ``end``, published or not. FileNotFoundError: it is not there."""

    def published(self, segment: SegmentId) -> int:
        """Return the bytes of a segment that are durable, and were when its owner still was the only one. It may say less."""

    def secure(self, segment: SegmentId) -> None:
        """Make all bytes that can be read in a segment of an earlier owner durable."""

    def begin(self, data: bytes) -> None:
        """Begin the next segment of this owner with this data, durable when the call returns. TakenOver: another one has claimed
        the place."""

    def append(self, data: bytes) -> None:
        """Append to the segment that was begun last."""

    def sync(self) -> None:
        """Make appended data durable."""

    def check(self) -> None:
        """Raise TakenOver if another owner has claimed the place, and LocationGone if it was moved or removed."""

    def publish(self, segment: SegmentId, size: int) -> None:
        """Tell readers that the first ``size`` bytes of a segment are durable and owned."""

    @property
    def crowded(self) -> bool:
        """Return whether the newest segment has too many pieces, and another one should begin."""

    def drop(self, segments: Collection[SegmentId]) -> None:
        """Remove segments, if they are there."""

    def close(self) -> None:
        """Release files. The claim stays."""


def open_log(place: Place, writes: bool = False) -> LogStore:
    """Open the place of a log. ``writes``: as its owner; all earlier owners find out."""
    return cast(LogStore, place.store(writes, keeps=True))  # Directory and Bucket are both kinds of store
