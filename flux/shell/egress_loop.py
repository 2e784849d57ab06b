"""The loop of one egress task, with its sockets (design: egress). Its questions come from ``flux.host.fetching``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa

from flux.errors import ProtocolError, QueryFailed
from flux.host.fetching import ASK_EVERY_S, Fetching
from flux.shell.loop import ControllerLink, Rendezvous, refuse_rejected, register
from flux.shell.transport import Link, Sockets
from flux.wire.codec import decode_answer
from flux.wire.control import NewTable, RegisterAgain, Welcome
from flux.wire.frames import encode
from flux.wire.messages import Chunk, Fetch
from partitioning.table import Table


class Egress:
    """Reader of the output of ``partition`` of the collecting stage ``stage``. To be used once, by one thread."""

    def __init__(
        self, rendezvous: Rendezvous, stage: int, partition: int, controller_timeout: float, ordered: bool = True
    ) -> None:
        self._rendezvous = rendezvous
        self._partition = partition
        self._fetching = Fetching(self, stage, partition, ordered)
        self._sockets = Sockets(rendezvous.keys, rendezvous.secret)
        self._control = ControllerLink(self._sockets, rendezvous, controller_timeout)
        self._attempt = 0
        self._link: Link | None = None

    def batches(self, attempt: int) -> Iterator[pa.RecordBatch]:
        """Yield all batches, each once. Raises QueryTimeout, QueryFailed, or Stopped if the query has ended."""
        self._attempt = attempt
        try:
            yield from self._fetching.batches()
        finally:
            self._sockets.close()

    # ---- as ``Fetching`` wants its transport

    def now(self) -> float:
        return time.monotonic()

    def newest_table(self) -> Table:
        _, commands = register(
            self._sockets, self._control, self._rendezvous, role="egress", index=self._partition, attempt=self._attempt
        )
        known = None
        while known is None:
            for command in commands:
                refuse_rejected(command)
                if isinstance(command, NewTable):
                    known = command.table
                elif not isinstance(command, Welcome | RegisterAgain):
                    raise QueryFailed(f"the controller told an egress task to {type(command).__name__}")
            self._control.check(time.monotonic())
            if known is None and self._control.link in self._sockets.wait(ASK_EVERY_S):
                commands = list(self._control.commands())
        return known

    def connect(self, endpoint: str) -> None:
        if self._link is not None:
            self._sockets.close_link(self._link)
        self._link = self._sockets.link(endpoint)

    def ask(self, request: Fetch, seconds: float) -> tuple[Chunk, bytes] | None:
        assert self._link is not None
        self._link.send([encode(request)])
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready = self._sockets.wait(left)
            if self._control.link in ready:
                # An answer that came twice; if it stayed unread, it would end every wait at once.
                for command in self._control.commands():
                    refuse_rejected(command)
            if self._link not in ready:
                continue
            for frames in self._link.receive():
                try:
                    answer = decode_answer(frames[0])
                except ProtocolError:
                    continue
                if isinstance(answer, Chunk) and answer.offset == request.offset and len(frames) == 2:
                    return answer, bytes(frames[1])
        return None
