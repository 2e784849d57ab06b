"""Fetching the collected output of one partition, wherever it is: the rules, without sockets and clock (design: fetch-anywhere).

Only the controller knows the place of the output, which changes when a worker is lost. So every attempt asks the controller
first, and asks again whenever an answer does not come. Replicas hold the same batches in the same order, but not as the same
bytes: from another replica the output is read from its start again, and the batches that were already handed on are left out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from flux.errors import QueryFailed, QueryTimeout
from flux.wire.messages import Chunk, Fetch
from partitioning.table import Table

#: Seconds after which a request without an answer is repeated, to the worker that the newest table names.
ASK_EVERY_S = 0.5
#: Seconds of silence of one worker after which the task gives up (and Spark starts it again, if it may).
SILENCE_MAX_S = 30.0


class FetchWay(Protocol):
    """The way to the controller and to workers. Each call waits; it raises Stopped if the query has ended."""

    def now(self) -> float:
        """Return the monotonic time, in seconds."""

    def newest_table(self) -> Table:
        """Return the controller's table."""

    def connect(self, endpoint: str) -> None:
        """Ask this worker from now on, and listen to no other."""

    def ask(self, request: Fetch, seconds: float) -> tuple[Chunk, bytes] | None:
        """Return the answer to a request; None: it has not come within this many seconds."""


class OutputFetch:
    """The fetch of output of ``partition`` of the collecting stage ``stage``. ``ordered``: replicas hold the same batches."""

    def __init__(self, way: FetchWay, stage: int, partition: int, ordered: bool = True) -> None:
        self._way = way
        self._stage = stage
        self._partition = partition
        self._ordered = ordered
        self._table: Table | None = None
        self._endpoint = ""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all batches, each once. QueryTimeout or QueryFailed if they cannot be had."""
        given = 0
        self._locate()
        while True:
            remote = RemoteFile(self)
            try:
                with pa.ipc.open_stream(pa.PythonFile(remote, mode="r")) as reader:
                    for number, batch in enumerate(reader):
                        if number >= given:
                            given += 1
                            yield batch
                return
            except Exception:
                if not remote.moved:
                    raise
                if given and not self._ordered:
                    raise QueryFailed(
                        "a worker was lost while its output was fetched, and replicas that are not ordered "
                        "(spark.flux.replicas.ordered=false) differ"
                    ) from None

    def fetch(self, offset: int) -> tuple[Chunk, bytes] | None:
        """Return bytes from ``offset`` on; None: another worker has the output now, begin again."""
        request = Fetch(self._stage, self._partition, offset)
        end = self._way.now() + SILENCE_MAX_S
        while self._way.now() < end:
            answer = self._way.ask(request, ASK_EVERY_S)
            if answer is not None:
                return answer
            if self._locate():
                if offset:
                    return None
                end = self._way.now() + SILENCE_MAX_S  # the new worker's silence begins now
        raise QueryTimeout(
            f"worker at {self._endpoint} did not send the output of partition {self._partition} within "
            f"{SILENCE_MAX_S:g} s"
        )

    def _locate(self) -> bool:
        """Ask the controller for the newest table. Return whether another worker has the output than before."""
        table = self._way.newest_table()
        if self._table is None or table.epoch > self._table.epoch:
            self._table = table
        endpoint = self._table.endpoints[self._table.stages[self._stage][self._partition][0].worker]
        if endpoint == self._endpoint:
            return False
        self._endpoint = endpoint
        self._way.connect(endpoint)
        return True


class RemoteFile(io.RawIOBase):
    """The collected output of one partition, read in order in chunks. ``moved``: it cannot be read to its end here."""

    def __init__(self, fetching: OutputFetch) -> None:
        super().__init__()
        self._fetching = fetching
        self._offset = 0
        self._rest = b""
        self._ended = False
        self.moved = False

    def readable(self) -> bool:
        return True

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(1 << 20), b""))

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return self.readall()
        parts: list[bytes] = []
        while size > 0:
            if not self._rest and not self._fill():
                break
            part, self._rest = self._rest[:size], self._rest[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _fill(self) -> bool:
        if self._ended:
            return False
        found = self._fetching.fetch(self._offset)
        if found is None:
            self.moved = True
            raise OSError("another worker has this output now")
        chunk, self._rest = found
        self._offset += len(self._rest)
        self._ended = self._offset >= chunk.total
        return bool(self._rest)
