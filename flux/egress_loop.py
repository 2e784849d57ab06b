"""The loop of one egress task: fetches the collected output of a partition from whoever has it now (DESIGN 2).

Where that is only the controller knows, and it changes when a worker is lost: so every attempt asks it first, and again
whenever an answer does not come. Copies hold the same batches in the same order, but not the same bytes: what another
copy is asked for begins at the start again, and the batches that were handed on already are left out.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pyarrow as pa

from flux.codec import decode_data, encode
from flux.control import NewTable, RegisterAgain, Welcome
from flux.errors import ProtocolError, QueryFailed, QueryTimeout
from flux.messages import Chunk, Fetch
from flux.shell import ControllerLink, Rendezvous, refuse_rejected, register
from flux.transport import Link, Sockets
from partitioning.table import Table

#: A request that is not answered for so long is repeated, to the worker that the newest table names.
ASK_EVERY_S = 0.5
#: How long nothing may come before the task gives up (and Spark starts it again, if it may).
SILENCE_MAX_S = 30.0


class Egress:
    """Output of ``partition`` of the collecting stage ``stage``. To be used once, by one thread."""

    def __init__(
        self, rendezvous: Rendezvous, stage: int, partition: int, controller_timeout: float, ordered: bool = True
    ) -> None:
        self._rendezvous = rendezvous
        self._stage = stage
        self._partition = partition
        self._ordered = ordered
        self._sockets = Sockets(rendezvous.keys, rendezvous.secret)
        self._control = ControllerLink(self._sockets, rendezvous, controller_timeout)
        self._attempt = 0
        self._table: Table | None = None
        self._link: Link | None = None

    def batches(self, attempt: int) -> Iterator[pa.RecordBatch]:
        """All of them, each once. QueryTimeout, QueryFailed, or Stopped where the query has ended."""
        self._attempt = attempt
        given = 0
        try:
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
                            "a worker was lost while its output was fetched, and copies that are not ordered "
                            "(spark.flux.replicas.ordered=false) differ"
                        ) from None
        finally:
            self._sockets.close()

    def fetch(self, offset: int) -> tuple[Chunk, bytes] | None:
        """Bytes from ``offset`` on; None: another worker has the output now, begin again."""
        request = encode(Fetch(self._stage, self._partition, offset))
        end = time.monotonic() + SILENCE_MAX_S
        while time.monotonic() < end:
            assert self._link is not None
            self._link.send([request])
            answer = self._answer(offset)
            if answer is not None:
                return answer
            if self._locate() and offset:
                return None
        assert self._link is not None
        raise QueryTimeout(
            f"worker at {self._link.endpoint} did not send the output of partition {self._partition} within "
            f"{SILENCE_MAX_S:g} s"
        )

    def _answer(self, offset: int) -> tuple[Chunk, bytes] | None:
        end = time.monotonic() + ASK_EVERY_S
        while (left := end - time.monotonic()) > 0:
            if self._link not in self._sockets.wait(left):
                continue
            assert self._link is not None
            for frames in self._link.receive():
                try:
                    answer = decode_data(frames[0])
                except ProtocolError:
                    continue
                if isinstance(answer, Chunk) and answer.offset == offset and len(frames) == 2:
                    return answer, bytes(frames[1])
        return None

    def _locate(self) -> bool:
        """Ask the controller for the newest table. Whether another worker has the output than before."""
        _, orders = register(
            self._sockets, self._control, self._rendezvous, role="egress", index=self._partition, attempt=self._attempt
        )
        known = None
        while known is None:
            for order in orders:
                refuse_rejected(order)
                if isinstance(order, NewTable):
                    known = order.table
                elif not isinstance(order, Welcome | RegisterAgain):
                    raise QueryFailed(f"the controller told an egress task to {type(order).__name__}")
            self._control.check(time.monotonic())
            if known is None and self._control.link in self._sockets.wait(ASK_EVERY_S):
                orders = list(self._control.orders())
        return self._follow(known)

    def _follow(self, table: Table) -> bool:
        if self._table is None or table.epoch > self._table.epoch:
            self._table = table
        endpoint = self._table.endpoints[self._table.stages[self._stage][self._partition][0].worker]
        if self._link is not None and self._link.endpoint == endpoint:
            return False
        if self._link is not None:
            self._sockets.close_link(self._link)
        self._link = self._sockets.link(endpoint)
        return True


class RemoteFile(io.RawIOBase):
    """The collected output of one partition, read in order in chunks. ``moved``: it cannot be read to its end here."""

    def __init__(self, egress: Egress) -> None:
        super().__init__()
        self._egress = egress
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
        found = self._egress.fetch(self._offset)
        if found is None:
            self.moved = True
            raise OSError("another worker has this output now")
        chunk, self._rest = found
        self._offset += len(self._rest)
        self._ended = self._offset >= chunk.total
        return bool(self._rest)
