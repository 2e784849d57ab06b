"""The sink of a query with availability: stable results in the output log, tentative ones in its side channel (design:
output-tentative).

Calls about tentative rows come in order with those for stable ones, and readers get both in this order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa

from flux.dataflow.sink import Position, SinkContext
from flux.errors import QueryFailed
from flux.eventlog.log_store import LogStore, open_log
from flux.eventlog.records import packed_rows
from flux.outputs.catalogue import OutputCatalogue
from flux.outputs.sink import OutputLogSink
from flux.outputs.tentative_channel import SHOWN_BYTES, ChannelOwner

#: Seconds between two looks at the owner of a channel in an object store.
LOOK_REMOTE_S = 1.0


class TentativeOutputSink(OutputLogSink):
    """An output log whose readers may ask for tentative results, too. Arguments are those of ``OutputLogSink``."""

    _tentative = True
    _channel: ChannelOwner | None = None
    #: The time of the last look whether the channel is still this primary's.
    _kept_at = 0.0

    def open(self, context: SinkContext) -> None:
        """Take log and channel over: rows that earlier primaries have shown are void."""
        super().open(context)
        bytes_max = SHOWN_BYTES // context.partitions
        channel = self._channel = ChannelOwner(self._open_channel, self._place.flush_s > 0, bytes_max)
        channel.open()

    def write_joined(self, batches: Sequence[tuple[Position, pa.RecordBatch]]) -> None:
        super().write_joined(batches)
        if self._channel is not None and time.monotonic() - self._kept_at >= self._keep_s:
            self._kept_at = time.monotonic()
            self._channel.keep()

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self._shown.show(bytes(packed_rows(batch)), through, self._at)

    def undo(self, start: int | None, end: int | None) -> None:
        self._shown.void(start, end, self._at)

    def corrected(self, through: int) -> None:
        self._shown.corrected(through, self._at)

    def close(self) -> None:
        super().close()
        if self._channel is not None:
            self._channel.close()

    @property
    def _keep_s(self) -> float:
        """Return the seconds between two looks: in an object store each is a request, which stable rows would wait for."""
        return LOOK_REMOTE_S if self._place.flush_s else 0.0

    @property
    def _shown(self) -> ChannelOwner:
        assert self._channel is not None, "open() comes first"
        return self._channel

    @property
    def _at(self) -> int:
        """Return the position of the next stable row."""
        return self._opened().owner.next

    def _open_channel(self) -> LogStore:
        assert self._output is not None, "the log is open"
        try:
            return open_log(OutputCatalogue(self._place).channel_place(self._output, self._partition), writes=True)
        except FileNotFoundError as error:
            raise QueryFailed(
                f"tentative rows of {self!r} have no place any more: it was removed while a query wrote to it"
            ) from error
