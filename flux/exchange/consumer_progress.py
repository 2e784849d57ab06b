"""The progress of a producer towards one worker, and the messages made of log entries for it (design: handshake, run)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from flux.exchange.consumer_map import ConsumersAt, Ranks
from flux.exchange.log import LogEntry, Rows
from flux.exchange.slices import RUN_BYTES, RUN_CELLS, RUN_LEAST, SMALL_BYTES, SMALL_ROWS, Span, pack, span
from flux.wire.messages import RUN_BATCHES, Data
from partitioning import kernels
from partitioning.ids import StreamId

#: Ack in a place without a replica: never the minimum.
NOBODY = np.iinfo(np.int64).max
#: Values of ``settled_at`` below all versions: it is not known whether the worker owes an ack; it owes one.
UNKNOWN, OWES = -1, -2


@dataclass(slots=True)
class ConsumerProgress:
    """The progress of a producer towards one worker (design: handshake, consumers-at)."""

    #: The replicas on the worker.
    at: ConsumersAt
    #: By replica: the element through which it has acked.
    acked: np.ndarray
    #: The epoch of the table that brought the last change of these replicas.
    epoch: int
    #: The worker has answered a greeting.
    answered: bool = False
    #: That of the last Resume; None: no data may be sent before the next one.
    nonce: int | None = None
    #: The number of the next message under the nonce.
    number: int = 0
    #: The next element of the log that is not sent yet.
    next: int = 0
    #: The first batch that no message under the nonce has covered yet.
    first: int = 0
    #: By replica: the first batch that it wants, by the last Resume.
    wanted_from: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    #: Elements below this may be wanted by some of the replicas only.
    catching_up_to: int = 0
    #: The worker waits to hear that no row below this number comes any more; 0: it has heard it, or does not ask.
    front: int = 0
    #: Payload sent under the nonce.
    sent_bytes: int = 0
    #: Payload that may be sent under the nonce.
    granted: int = 0
    #: Time of the next greeting.
    hello_due: float = 0.0
    #: Time at which the worker was last known to receive messages, or had nothing to ack.
    heard: float = 0.0
    #: Factor of the resend timeout until the next greeting.
    patience: float = 1.0
    #: Version of the stream at which the worker owed no ack; or UNKNOWN or OWES.
    settled_at: int = UNKNOWN


#: Credit for a message beside its rows, so that credit also bounds the number of small messages.
MESSAGE_BYTES = 256

_FROM_ANY, _ALL = np.zeros(0, np.int64), np.empty(0, bool)

Sent = tuple[Data, tuple[pa.RecordBatch, ...]]


class Spans:
    """The last span. The workers of a stream are often equally far, and then get runs of the same batches."""

    def __init__(self) -> None:
        self._key = (0, 0, 0)
        self._span: Span | None = None

    def of(self, entries: list[LogEntry]) -> Span:
        key = entries[0].sequence, entries[-1].sequence, len(entries)
        if self._span is None or self._key != key:
            self._key = key
            batches = [entry.element.data for entry in entries if isinstance(entry.element, Rows)]
            self._span = span(batches, [entry.sequence for entry in entries])
        return self._span

    def forget(self) -> None:
        self._span = None


class OutgoingEntries:
    """Messages made from entries of a log, for one worker: a large entry alone, small ones together as a run (design: run).

    ``add`` and at last ``rest`` give them, in the order of the entries.
    ``nbytes`` are those of entries still kept for a run, no more than the credit allows."""

    def __init__(
        self, stream: StreamId, cursor: ConsumerProgress, ranks: Ranks, run_max_rows: int, spans: Spans
    ) -> None:
        """Begin without entries. ``run_max_rows`` are the most rows of one run; 0: every entry travels alone."""
        self.nbytes = 0
        self._stream = stream
        self._cursor = cursor
        self._ranks = ranks
        self._small_rows = min(SMALL_ROWS, run_max_rows)
        self._run_max_rows = run_max_rows
        self._spans = spans
        self._kept: list[LogEntry] = []
        self._rows = 0

    def add(self, entry: LogEntry) -> Iterator[Sent]:
        rows = entry.element.data.batch.num_rows if isinstance(entry.element, Rows) else -1
        small = 0 <= rows <= self._small_rows and entry.nbytes <= SMALL_BYTES
        if self._kept and not (small and self._takes(rows, entry.nbytes)):
            yield from self.rest()
        if small:
            self._kept.append(entry)
            self._rows += rows
            self.nbytes += entry.nbytes + MESSAGE_BYTES  # as if each travelled alone, which a new table may lead to
        else:
            yield from self._alone(entry)

    def _takes(self, rows: int, nbytes: int) -> bool:
        """Tell whether one more entry fits into the run."""
        return (
            len(self._kept) < RUN_BATCHES
            and self._rows + rows <= self._run_max_rows
            and self.nbytes + nbytes <= RUN_BYTES
        )

    def rest(self) -> Iterator[Sent]:
        kept, self._kept, self._rows, self.nbytes = self._kept, [], 0, 0
        return self._together(kept)

    def _together(self, entries: list[LogEntry]) -> Iterator[Sent]:
        if len(entries) < RUN_LEAST:
            for entry in entries:
                yield from self._alone(entry)
            return
        at, wanted_from = self._cursor.at, _FROM_ANY
        if entries[0].sequence < self._cursor.catching_up_to:
            wanted_from = np.zeros(len(at.hosts), np.int64)
            wanted_from[at.partitions] = self._cursor.wanted_from
        packed = pack(self._spans.of(entries), at.hosts, wanted_from, self._ranks)
        if packed is None:
            return
        mine = [entries[at] for at in packed.which]
        if len(mine) < RUN_LEAST:
            yield from self._alone(mine[0])
        elif len(packed.counts) > RUN_CELLS:
            middle = len(entries) // 2
            yield from self._together(entries[:middle])
            yield from self._together(entries[middle:])
        else:
            last, width = mine[-1], len(packed.partitions)
            message = self._message(
                last.sequence, packed.partitions, packed.rows, [width], packed.nbytes, Rows.kind,
                last.checksum, min([entry.created for entry in mine]), [entry.sequence for entry in mine], packed.counts,
                last.mark,
            )  # fmt: skip
            yield message, (packed.batch,)

    def _wanted(self, entry: LogEntry) -> np.ndarray:
        """Mark the partitions of the entry that are on the worker and do not have it; empty: all that are on the worker."""
        cursor = self._cursor
        if entry.sequence >= cursor.catching_up_to:
            return _ALL
        mine: np.ndarray = cursor.at.hosts[entry.touches]
        wanted = cursor.wanted_from[np.searchsorted(cursor.at.partitions, entry.touches[mine])]
        mine[mine] = wanted <= entry.sequence
        return mine

    def _alone(self, entry: LogEntry) -> Iterator[Sent]:
        wanted, element = self._wanted(entry), entry.element
        partitions: list[int] = []
        rows: list[int] = []
        runs: list[int] = []
        pieces: tuple[pa.RecordBatch, ...] = ()
        nbytes = 0
        if isinstance(element, Rows):
            data = element.data
            # Rows of ``out``: for each slice its partition and its number of rows, then for each piece its slices, begin and end.
            out = np.empty((5, len(data.by_rank)), np.int64)
            found, several = kernels.choose_slices(data.by_rank, data.offsets, self._cursor.at.hosts, wanted, out)
            if not found:
                return
            partitions, rows = out[:2, :found].tolist()
            runs, begins, ends = out[2:, :several].tolist()
            pieces = tuple([data.batch.slice(begin, end - begin) for begin, end in zip(begins, ends, strict=True)])
            nbytes = entry.nbytes * sum(rows) // data.batch.num_rows
        elif not (wanted if wanted.size else self._cursor.at.hosts[entry.touches]).any():
            return
        message = self._message(
            entry.sequence, partitions, rows, runs, nbytes, element.kind,
            entry.checksum, entry.created, [], [], entry.mark,
        )  # fmt: skip
        yield message, pieces

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
