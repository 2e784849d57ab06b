"""Entries of a log on their way to one worker: alone, or small ones together as a run (design: run)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from flux.stream.consumers import Ranks
from flux.stream.cursor import Cursor
from flux.stream.elements import Rows
from flux.stream.log import LogEntry
from flux.stream.runs import RUN_BYTES, RUN_CELLS, RUN_LEAST, SMALL_ROWS, Part, pack
from flux.wire.messages import RUN_BATCHES, Data
from partitioning.cluster import Clustered
from partitioning.ids import StreamId

#: Credit for a message beside its rows, so that credit also bounds the number of small messages.
MESSAGE_BYTES = 256

Sent = tuple[Data, tuple[pa.RecordBatch, ...]]


class Outgoing:
    """From ``add`` and at last ``rest`` come messages, in the order of the entries. ``nbytes`` of what is still kept, which
    is no more than the credit allows."""

    def __init__(self, stream: StreamId, cursor: Cursor, ranks: Ranks, run_max_rows: int) -> None:
        """``run_max_rows``: of one run; 0: every entry travels alone."""
        self.nbytes = 0
        self._stream = stream
        self._cursor = cursor
        self._ranks = ranks
        self._run_max_rows = run_max_rows
        self._kept: list[tuple[LogEntry, np.ndarray]] = []
        self._rows = self._touched = 0

    def add(self, entry: LogEntry, mine: np.ndarray) -> Iterator[Sent]:
        """``mine``: which of the partitions that the entry touches this worker has."""
        rows = entry.element.data.batch.num_rows if isinstance(entry.element, Rows) else -1
        touched = int(np.count_nonzero(mine))
        small = 0 <= rows <= min(SMALL_ROWS, self._run_max_rows) and entry.nbytes <= RUN_BYTES // RUN_LEAST
        if self._kept and not (small and self._takes(rows, touched, entry.nbytes)):
            yield from self.rest()
        if small:
            self._kept.append((entry, mine))
            self._rows += rows
            self._touched += touched
            self.nbytes += entry.nbytes + MESSAGE_BYTES  # as if each went alone, which a new table may lead to
        else:
            yield self._alone(entry, mine)

    def _takes(self, rows: int, touched: int, nbytes: int) -> bool:
        """Whether one more fits into the run."""
        several = len(self._kept) + 1
        return (
            several <= RUN_BATCHES
            and self._rows + rows <= self._run_max_rows
            and several * (self._touched + touched) <= RUN_CELLS
            and self.nbytes + nbytes <= RUN_BYTES
        )

    def rest(self) -> Iterator[Sent]:
        kept, self._kept, self._rows, self._touched, self.nbytes = self._kept, [], 0, 0, 0
        if len(kept) < RUN_LEAST:
            for entry, mine in kept:
                yield self._alone(entry, mine)
            return
        parts: list[Part] = []
        for entry, mine in kept:
            part = self._part(entry, mine)
            if part is None:  # clustered by a table before this one
                yield from self._together(parts)
                parts = []
                yield self._alone(entry, mine)
            else:
                parts.append(part)
        yield from self._together(parts)

    def _together(self, parts: list[Part]) -> Iterator[Sent]:
        if not parts:
            return
        packed, last = pack(parts), parts[-1]
        partitions = self._ranks.by_rank[packed.ranks].tolist()
        message = self._message(
            last.sequence, partitions, packed.rows, [len(partitions)], sum(part.nbytes for part in parts), Rows.kind,
            last.checksum, min(part.created for part in parts), [part.sequence for part in parts], packed.counts,
            last.mark,
        )  # fmt: skip
        yield message, (packed.batch,)

    def _part(self, entry: LogEntry, mine: np.ndarray) -> Part | None:
        """What this worker gets of an entry; None: its rows lie in another order than those of its neighbours."""
        assert isinstance(entry.element, Rows)
        data = entry.element.data
        places = np.flatnonzero(mine)
        ranks = self._ranks.rank_of[data.by_rank[places]].tolist()
        if any(rank > after for rank, after in pairwise(ranks)):
            return None
        rows = (data.offsets[places + 1] - data.offsets[places]).tolist()
        batches = [batch for _, batch in _pieces(data, places)]
        nbytes = entry.nbytes * sum(rows) // data.batch.num_rows
        counts = list(zip(ranks, rows, strict=True))
        return Part(entry.sequence, counts, batches, nbytes, entry.checksum, entry.created, entry.mark)

    def _alone(self, entry: LogEntry, mine: np.ndarray) -> Sent:
        partitions: list[int] = []
        rows: list[int] = []
        pieces: list[tuple[int, pa.RecordBatch]] = []
        nbytes = 0
        if isinstance(entry.element, Rows):
            data = entry.element.data
            places = np.flatnonzero(mine)
            partitions = data.by_rank[places].tolist()
            rows = (data.offsets[places + 1] - data.offsets[places]).tolist()
            pieces = _pieces(data, places)
            nbytes = entry.nbytes * sum(rows) // data.batch.num_rows
        message = self._message(
            entry.sequence, partitions, rows, [several for several, _ in pieces], nbytes, entry.element.kind,
            entry.checksum, entry.created, [], [], entry.mark,
        )  # fmt: skip
        return message, tuple(batch for _, batch in pieces)

    def _message(
        self, sequence: int, partitions: list[int], rows: list[int], runs: list[int], nbytes: int, *more: Any
    ) -> Data:
        cursor = self._cursor
        assert cursor.nonce is not None
        nbytes += MESSAGE_BYTES
        message = Data(
            *self._stream, cursor.nonce, cursor.number, cursor.first, sequence, partitions, rows, runs, nbytes, *more
        )  # fmt: skip
        cursor.number += 1
        cursor.sent_bytes += nbytes
        cursor.first = sequence + 1
        return message


def _pieces(data: Clustered, places: np.ndarray) -> list[tuple[int, pa.RecordBatch]]:
    """Slices whose rows lie next to each other are one: of how many partitions, and their rows."""
    if int(places[-1]) - int(places[0]) == len(places) - 1:
        begin, end = int(data.offsets[places[0]]), int(data.offsets[places[-1] + 1])
        return [(len(places), data.batch.slice(begin, end - begin))]
    breaks = (np.flatnonzero(places[1:] != places[:-1] + 1) + 1).tolist()
    pieces = []
    for low, high in pairwise([0, *breaks, len(places)]):
        begin, end = int(data.offsets[places[low]]), int(data.offsets[places[high - 1] + 1])
        pieces.append((high - low, data.batch.slice(begin, end - begin)))
    return pieces
