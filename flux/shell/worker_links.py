"""Data links to other workers: opened when there is something to send, closed when nothing needs them (design: links)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flux.errors import ProtocolError, QueryFailed
from flux.exchange.producer import ToWorker
from flux.shell.transport import Frames, Link, Sockets
from flux.wire.codec import decode_answer, encode_batches
from flux.wire.frames import encode
from flux.worker.effects import UnneededLinks
from partitioning.table import Table


class WorkerLinks:
    """The links to the workers of the newest table."""

    def __init__(self, sockets: Sockets, message_max_bytes: int) -> None:
        self._sockets = sockets
        self._message_max_bytes = message_max_bytes
        self._links: dict[int, Link] = {}
        self._worker_of: dict[Link, int] = {}
        self._endpoints: dict[int, str] = {}
        self._unneeded = UnneededLinks()
        self.malformed = 0

    def follow(self, table: Table) -> None:
        self._endpoints = dict(table.endpoints)
        for worker in [worker for worker in self._links if worker not in table.endpoints]:
            self._close(worker)

    def close_unneeded(self, needed: set[int], now: float) -> None:
        """Close the links to workers that have not been ``needed`` for a while."""
        for worker in self._unneeded.look(self._links, needed, now):
            self._close(worker)

    def _close(self, worker: int) -> None:
        link = self._links.pop(worker)
        del self._worker_of[link]
        self._sockets.close_link(link)

    def send(self, effects: Iterable[ToWorker]) -> None:
        """Send all effects. All frames are made before the first is sent: most of the cost of sending is waking the thread that
        sends. Messages to a worker that the newest table has no more are lost, as on a connection that is closed: a loan, or
        tentative rows, may have been made for it in the turn in which the table came."""
        messages: dict[int, list[Frames]] = {}
        for effect in effects:
            if effect.worker not in self._endpoints:
                continue
            messages.setdefault(effect.worker, []).append(self._frames(effect))
        for worker, several in messages.items():
            self._to(worker).send_all(several)

    def _to(self, worker: int) -> Link:
        link = self._links.get(worker)
        if link is None:
            link = self._sockets.link(self._endpoints[worker])
            self._links[worker] = link
            self._worker_of[link] = worker
        return link

    def _frames(self, effect: ToWorker) -> Frames:
        frames = encode_batches(effect.batches)
        for frame in frames:
            if frame.size > self._message_max_bytes:
                # The other end would cut the connection, and would cut it again after each repeated attempt.
                raise QueryFailed(
                    f"a message of {frame.size:,} bytes is larger than spark.flux.message.maxBytes "
                    f"({self._message_max_bytes:,}): "
                    "rows this large need a higher limit"
                )
        if effect.payload is not None:
            frames.append(effect.payload)
        return [encode(effect.message), *frames]

    def answers(self, link: Any) -> Iterator[tuple[int, Any]]:
        """Yield the answers of a worker. Unreadable ones are left out and counted."""
        worker = self._worker_of[link]
        for frames in link.receive():
            try:
                answer = decode_answer(frames[0])
            except ProtocolError:
                self.malformed += 1
                continue
            yield worker, answer

    def newly_malformed(self) -> int:
        """Return the number of unreadable answers since the last call."""
        count, self.malformed = self.malformed, 0
        return count

    def __contains__(self, link: object) -> bool:
        return link in self._worker_of
