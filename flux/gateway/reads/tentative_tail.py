"""Tentative results of an output at a gateway, which all its readers share (design: output-tentative).

Changes and stable rows come to a reader in the order in which the sink got them: a change behind all stable rows that were there
before it, and before all that came later. A reader that is behind by more changes than are kept gets the rows that stand, behind
an ``undo`` of everything.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple

import msgspec
import pyarrow as pa

from flux.eventlog.log_store import open_log
from flux.gateway.answers import CorrectedEvent, TentativeEvent, UndoEvent
from flux.gateway.reads.ring import Positions
from flux.outputs.catalogue import OutputCatalogue, OutputDefinition
from flux.outputs.row_text import json_rows
from flux.outputs.tentative_channel import ChannelEnd, ChannelReader, ChannelRecord, ChannelRows, ChannelVoid
from flux.vault.location import Place

logger = logging.getLogger("flux.gateway")
#: Bytes of the newest changes of one output that stay in memory; the rows that stand come on top.
CHANGES_BYTES = 4 << 20
_CHANGE_BYTES = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TentativeChange(NamedTuple):
    """A change for readers."""

    #: Grows from change to change.
    number: int
    partition: int
    #: The position of the next stable row of the partition.
    at: int
    #: The kind of its event, and the content as JSON.
    kind: str
    data: bytes
    #: Microseconds of the event time of its rows, if it has some.
    through: int = 0

    @property
    def nbytes(self) -> int:
        return len(self.data) + _CHANGE_BYTES

    def is_due(self, positions: Positions) -> bool:
        """Return whether a reader at a place has all stable rows in front of it."""
        return positions[self.partition] >= self.at


def instant(time_us: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC and of one length, so that texts compare as times do; None: there is no such time."""
    try:
        made = None if time_us is None else _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:  # the end of time
        return None
    return None if made is None else made.isoformat(timespec="microseconds").replace("+00:00", "Z")


class TentativeTail:
    """The tentative rows of one output, as its side channels tell them. Calls come from any thread."""

    def __init__(self, place: Place, of: OutputDefinition) -> None:
        self._of, self._columns = of, of.columns()
        self._place = place
        #: Held while the channels are read, and while changes are.
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._channels: list[ChannelReader] = []
        self._closed = False
        #: Whether the last look at them has failed.
        self._failing = False
        self._changes: deque[TentativeChange] = deque()
        self._bytes = 0
        self._number = 0
        #: The rows that stand, and by partition the position of the newest change.
        self._standing: list[TentativeChange] = []
        self._at = [0] * of.partitions

    def poll(self) -> bool:
        """Read the channels. Return whether there was something."""
        with self._reading:
            if self._closed:
                return False
            try:
                made = self._read()
                self._failing = False
            except Exception as error:  # stable rows go on
                made = self._failed(error)
            with self._lock:
                for partition, record, kind, data in made:
                    self._take(partition, record, kind, data)
        return bool(made)

    def _read(self) -> list[tuple[int, ChannelRecord, str, bytes]]:
        """Return the next records of all channels, with their partitions and events."""
        if not self._channels:
            catalogue = OutputCatalogue(self._place)
            places = [catalogue.channel_place(self._of, partition) for partition in range(self._of.partitions)]
            self._channels = [ChannelReader(open_log(place)) for place in places]
        found = [(partition, each) for partition, channel in enumerate(self._channels) for each in channel.read()]
        return [(partition, each, *self._told(partition, each)) for partition, each in found]

    def _failed(self, error: Exception) -> list[tuple[int, ChannelRecord, str, bytes]]:
        """Return void ranges in place of rows that cannot be read, the first time; the next poll begins with all that stand."""
        for each in self._channels:
            each.close()
        self._channels = []
        if self._failing:
            return []
        self._failing = True
        logger.warning("tentative rows of output %s cannot be read: %s: %s", self._of.name, type(error).__name__, error)
        void = ChannelVoid(0)
        return [(partition, void, *self._told(partition, void)) for partition in range(self._of.partitions)]

    def _told(self, partition: int, record: ChannelRecord) -> tuple[str, bytes]:
        """Return the kind and the content of the event of a record."""
        if isinstance(record, ChannelRows):
            batch = pa.ipc.read_record_batch(pa.py_buffer(record.batch), self._columns)
            told = TentativeEvent(partition, instant(record.through), msgspec.Raw(json_rows(batch)))
            return "tentative", msgspec.json.encode(told)
        if isinstance(record, ChannelVoid):
            return "undo", msgspec.json.encode(UndoEvent(partition, instant(record.start), instant(record.end)))
        return "corrected", msgspec.json.encode(CorrectedEvent(partition, instant(record.through)))

    def _take(self, partition: int, record: ChannelRecord, kind: str, data: bytes) -> None:
        self._number += 1
        through = 0 if isinstance(record, ChannelVoid) else record.through
        made = TentativeChange(self._number, partition, record.at, kind, data, through)
        self._at[partition] = max(self._at[partition], record.at)
        if isinstance(record, ChannelVoid):
            self._standing = [
                each for each in self._standing if each.partition != partition or not record.reaches(each.through)
            ]
        elif not isinstance(record, ChannelEnd):
            self._standing.append(made)
        self._changes.append(made)
        self._bytes += made.nbytes
        while self._bytes > CHANGES_BYTES:
            self._bytes -= self._changes.popleft().nbytes

    def since(self, number: int) -> list[TentativeChange] | None:
        """Return the changes behind one; None: some of them are kept no more."""
        with self._lock:
            first = self._number - len(self._changes)
            return None if number < first else list(islice(self._changes, number - first, None))

    def standing(self) -> tuple[int, list[TentativeChange], Positions]:
        """Return the number of the newest change, the rows that stand behind it, and the place from which on they are true."""
        with self._lock:
            return self._number, list(self._standing), tuple(self._at)

    @property
    def number(self) -> int:
        """Return the number of the newest change."""
        return self._number

    def close(self) -> None:
        """Release files."""
        with self._reading:
            self._closed = True
            for each in self._channels:
                each.close()


class TentativeFollower:
    """One reader's way through the tentative rows of an output."""

    def __init__(self, tail: TentativeTail, partitions: int) -> None:
        self._tail = tail
        self._partitions = partitions
        #: The newest change that the reader has; None: it has still to get the rows that stand.
        self._seen: int | None = None
        #: The reader may show rows that are void, of an earlier connection.
        self._voids = True

    def skip(self) -> None:
        """Begin behind the changes that are known: the reader gets the rows that stand in another way."""
        self._seen, self._voids = self._tail.number, False

    def has_news(self, positions: Positions) -> bool:
        """Return whether something is due for a reader at a place."""
        if self._voids:
            return True
        if self._seen is None:
            return _is_behind(positions, self._tail.standing()[2])
        changes = self._tail.since(self._seen)
        return changes is None or (bool(changes) and changes[0].is_due(positions))

    def take(self, positions: Positions) -> list[TentativeChange]:
        """Return the changes that are due for a reader at a place."""
        due: list[TentativeChange] = []
        changes = None if self._seen is None else self._tail.since(self._seen)
        if changes is None:
            if self._voids or self._seen is not None:
                due += [_void(partition) for partition in range(self._partitions)]
            self._seen, self._voids = None, False
            number, standing, place = self._tail.standing()
            if _is_behind(positions, place):
                due += standing
                self._seen = number
            return due
        for each in changes:
            if not each.is_due(positions):
                break
            due.append(each)
            self._seen = each.number
        return due


def _is_behind(positions: Positions, place: Positions) -> bool:
    return all(here >= there for here, there in zip(positions, place, strict=True))


def _void(partition: int) -> TentativeChange:
    return TentativeChange(0, partition, 0, "undo", msgspec.json.encode(UndoEvent(partition, None, None)))
