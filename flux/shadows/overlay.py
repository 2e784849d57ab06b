"""The overlay of a shadow: tentative rows of upstream shadows, by stream and mark (design: overlay).

Law: rows that stand in the overlay are in no stable row that the replica has applied. So a result over both counts no row twice.

Rules, as in the messages and tests: a mark at or below the stream's stable bound is dropped (T2); of each mark of a stream the
highest life and revision stands, and a new life voids the marks of older ones (T3), so that duplicates, reordering and loss do no
harm; a stable bound voids the marks that it has reached (T4). Stable rows may be applied before the bound behind them is known:
an entry says how many elements of its stream were stable when it was made, and a later stable element with rows voids its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from flux.shadows.tentative_operator import OverlayRows
from flux.windows.window import NEVER
from partitioning.ids import StreamId

#: The most marks of one stream: a bound for the list of those without rows.
ENTRIES_MAX = 4096


@dataclass
class TentativeRoom:
    """The bytes that all shadows of a worker hold together (rule T7)."""

    bytes_max: int
    bytes: int = 0
    #: Entries whose rows were given up for want of room.
    dropped: int = 0

    @property
    def full(self) -> bool:
        return self.bytes > self.bytes_max


@dataclass
class TentativeEntry:
    """The tentative rows of one mark of one stream for one partition."""

    stream: StreamId
    input: int
    #: Life of the upstream shadow, and revision within it: the highest pair counts.
    life: int
    revision: int
    #: The mark before this one in the upstream shadow.
    after: int
    through: int
    #: Elements of the stream below this were stable when the rows were made.
    sequence: int
    #: The date of the mark.
    created: float
    batch: pa.RecordBatch | None
    nbytes: int = 0

    @property
    def version(self) -> tuple[int, int]:
        return self.life, self.revision


@dataclass
class StreamOverlay:
    """The tentative marks of one stream."""

    life: int = -1
    entries: dict[int, TentativeEntry] = field(default_factory=dict)
    #: The newest mark of which the stream has told; it stays when rows are void.
    newest: int = NEVER
    #: Date of the newest mark; infinite before the first.
    dated: float = float("inf")


class Overlay:
    """The overlay of one shadow."""

    def __init__(self, room: TentativeRoom) -> None:
        self._room = room
        self._streams: dict[StreamId, StreamOverlay] = {}
        #: Tentative marks that were refused: at or below the stable bound, of an older life, or not newer.
        self.stale = 0
        #: Bytes of the rows that stand.
        self.bytes = 0

    def __len__(self) -> int:
        return sum(len(each.entries) for each in self._streams.values())

    def newest(self, stream: StreamId) -> int:
        """Return the newest mark that a stream has told."""
        known = self._streams.get(stream)
        return NEVER if known is None else known.newest

    def told(self, stream: StreamId) -> float:
        """Return the date of that mark; infinite: there is none."""
        known = self._streams.get(stream)
        return float("inf") if known is None else known.dated

    def end_of(self, stream: StreamId, bound: int) -> int:
        """Return the event time up to which a stream has told all its marks, one behind the other, from its stable bound on."""
        known = self._streams.get(stream)
        for entry in () if known is None else sorted(known.entries.values(), key=lambda entry: entry.through):
            if entry.after > bound:
                break
            bound = max(bound, entry.through)
        return bound

    def take(self, entry: TentativeEntry, bound: int, applied: int) -> list[int] | None:
        """Take a tentative mark. ``bound``: the stable one of its stream; ``applied``: the newest element with rows of the stream
        that the replica has applied. Return the marks that have other rows now; None: the entry is of no use."""
        known = self._streams.setdefault(entry.stream, StreamOverlay())
        if not self._is_news(entry, known, bound):
            self.stale += 1
            return None
        changed: list[int] = []
        if entry.life > known.life:
            known.life, known.newest, known.dated = entry.life, NEVER, float("inf")
            changed += self._remove(known, list(known.entries))
        changed += self._remove(known, [entry.through])
        if entry.batch is not None and applied >= entry.sequence:
            entry.batch = None
        known.entries[entry.through] = entry
        if entry.through > known.newest:
            known.newest, known.dated = entry.through, entry.created
        if entry.batch is not None:
            entry.nbytes = int(entry.batch.nbytes)
            self._count(entry.nbytes)
            changed.append(entry.through)
        return [*changed, *self._make_room(known)]

    def _is_news(self, entry: TentativeEntry, known: StreamOverlay, bound: int) -> bool:
        """Tell whether a mark is not stable yet, and newer than what stands."""
        if entry.through <= bound or entry.life < known.life:
            return False
        stands = known.entries.get(entry.through)
        return stands is None or entry.version > stands.version

    def void(self, stream: StreamId, bound: int) -> bool:
        """Void the marks of a stream that are stable by now. Return whether any had rows."""
        known = self._streams.get(stream)
        return known is not None and bool(self._remove(known, [at for at in known.entries if at <= bound]))

    def applied(self, stream: StreamId, sequence: int) -> list[int]:
        """Void rows beside which the replica has applied a stable element of their stream. Return their marks, which are kept
        without rows: the stream has told them all the same."""
        known, changed = self._streams.get(stream), []
        for entry in () if known is None else known.entries.values():
            if entry.batch is not None and sequence >= entry.sequence:
                self._empty(entry)
                changed.append(entry.through)
        return changed

    def rows(self, through: int) -> list[OverlayRows]:
        """Return the rows that stand of marks up to this one, in the order of marks and streams."""
        found = [
            entry for each in self._streams.values() for entry in each.entries.values() if entry.through <= through
        ]
        found.sort(key=lambda entry: (entry.through, entry.stream))
        return [
            OverlayRows(each.input, each.batch, each.through, each.stream) for each in found if each.batch is not None
        ]

    def clear(self) -> None:
        for known in self._streams.values():
            self._remove(known, list(known.entries))
        self._streams.clear()

    # ---- room

    def _remove(self, known: StreamOverlay, marks: list[int]) -> list[int]:
        """Remove entries, and return the marks of those that had rows."""
        changed = []
        for mark in marks:
            entry = known.entries.pop(mark, None)
            if entry is not None and entry.batch is not None:
                self._empty(entry)
                changed.append(mark)
        return changed

    def _empty(self, entry: TentativeEntry) -> None:
        self._count(-entry.nbytes)
        entry.batch, entry.nbytes = None, 0

    def _count(self, nbytes: int) -> None:
        self.bytes += nbytes
        self._room.bytes += nbytes

    def _make_room(self, newest: StreamOverlay) -> list[int]:
        """Give up the rows of the oldest marks while the worker's shadows hold too much, and old entries beyond their number."""
        if len(newest.entries) > ENTRIES_MAX:
            return self._remove(newest, sorted(newest.entries)[: len(newest.entries) - ENTRIES_MAX])
        changed: list[int] = []
        while self._room.full and self.bytes:
            oldest = min(
                (
                    entry
                    for each in self._streams.values()
                    for entry in each.entries.values()
                    if entry.batch is not None
                ),
                key=lambda entry: entry.through,
            )
            self._empty(oldest)
            self._room.dropped += 1
            changed.append(oldest.through)
        return changed
