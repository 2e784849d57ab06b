"""The settled point of a stream of numbered rows: no row before it is needed any more (design: needed-no-more).

``Settling`` knows the point, and ``CheckpointRequests`` asks for checkpoints if rows are kept only for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flux.exchange.consumer_map import Consumers
from flux.exchange.consumer_progress import NOBODY
from flux.exchange.log import Log
from flux.wire.messages import Mark, Press, Settled
from partitioning.ids import StreamId

#: A log that is fuller than this part of its bound asks for checkpoints.
PRESSED_SHARE = 1 / 2


@dataclass
class CheckpointRequest:
    """One request. ``below`` is the position of the partition's checkpoint at that time; ``due`` the time of the next request."""

    below: int
    due: float


class CheckpointRequests:
    """The requests for checkpoints of one stream: if rows are kept only for checkpoints, the primaries are asked for new ones
    (design: press).

    A standby acks a stream through the position in its checkpoint, and its producer keeps all later rows. Nothing here waits for
    a timer while rows are held back: a producer that is short of room, or has come to the end of its stream, asks at once, and
    again after a while, because the request or the checkpoint may be lost. Standbys are asked as well, for their acks: they read
    nothing, so a lost ack of theirs would not be noticed otherwise."""

    def __init__(self, stream: StreamId, again_s: float) -> None:
        self._stream = stream
        self._again_s = again_s
        self._asked: dict[int, CheckpointRequest] = {}
        #: Time of the next look for partitions that have not acked rows of an earlier life.
        self.idle_at = 0.0

    def look(
        self, log: Log, finished: bool, acks: np.ndarray, consumers: Consumers, now: float
    ) -> Iterator[tuple[int, Press]]:
        """Yield the messages to send, each with its worker. ``acks`` are those of each replica, see ``ConsumersAt.slots``."""
        if not consumers.kept or not log or not (finished or log.bytes >= log.bytes_max * PRESSED_SHARE):
            self._asked.clear()
            return
        kept, read = acks.copy(), acks.copy()
        kept[~consumers.keeps] = NOBODY
        read[consumers.keeps] = NOBODY
        held, applied = kept.min(axis=1), read.min(axis=1)
        # Half of the kept rows, so that the log is never full while a checkpoint is on its way.
        wanted = log.end - 1 if finished else log.base + len(log) // 2
        due: list[int] = []
        for partition in np.flatnonzero((held < wanted) & (held < applied)).tolist():
            asked = self._asked.get(partition)
            if asked is None or asked.below != held[partition] or now >= asked.due:
                self._asked[partition] = CheckpointRequest(int(held[partition]), now + self._again_s)
                due.append(partition)
        yield from presses(self._stream, due, consumers)

    def look_for_idle(
        self, acks: np.ndarray, last: np.ndarray, first: int, consumers: Consumers, now: float
    ) -> Iterator[tuple[int, Press]]:
        """Ask for checkpoints of partitions that get no rows in this life, which begins with ``first``. Their checkpoints may be
        older than rows of an earlier life that were for other partitions, and would never show that they need none of these."""
        self.idle_at = np.inf
        partitions = idle(acks, consumers.keeps, last, first) if first and consumers.kept else []
        if partitions:
            self.idle_at = now + self._again_s
        yield from presses(self._stream, partitions, consumers, anew=True)


def presses(
    stream: StreamId, partitions: list[int], consumers: Consumers, anew: bool = False
) -> Iterator[tuple[int, Press]]:
    """Yield requests for checkpoints of these partitions, each with its worker. ``anew``: see Press."""
    by_worker: dict[int, list[int]] = {}
    for partition in partitions:
        for worker in consumers.asked(partition):
            by_worker.setdefault(worker, []).append(partition)
    for worker, mine in by_worker.items():
        yield worker, Press(*stream, mine, anew)


def idle(acks: np.ndarray, keeps: np.ndarray, last: np.ndarray, first: int) -> list[int]:
    """Find the partitions without rows from ``first`` on whose checkpoints may lack rows before it, while the replicas that
    read have all of them. ``acks`` and ``keeps`` are by replica; ``last`` is the last row of each partition."""
    kept, read = np.where(keeps, acks, NOBODY).min(axis=1), np.where(keeps, NOBODY, acks).min(axis=1)
    found: list[int] = np.flatnonzero((last < first) & (kept < first - 1) & (read >= first - 1)).tolist()
    return found


class Settling:
    """The settled point of one stream, and the workers that have to be told.

    A partition that gets no rows has nothing to ack, so its consumers cannot tell by themselves how far the stream is applied.
    The producer can: each row that it gave has been acked by every replica of its partition, checkpoints included. It tells all
    consumers, again and again until they ack so themselves. Positions in copies and checkpoints then lie behind these rows, and
    no later life reads them.

    Left to others: the moment at which a point is settled (``source_streams``), and its effect on a consumer (``inbound``,
    ``flux.state.standby``).

    ``mark`` is the newest point; ``epoch`` that of the table whose replicas have all applied it. A replica that a later table has
    brought may have begun with an older state, and is told nothing until its own acks have been examined."""

    def __init__(self) -> None:
        #: Some point is settled.
        self.begun = False
        self.mark = Mark(-1, 0)
        self.epoch = -1
        #: The newest point through which all checkpoints have their rows, even if reading replicas lack some, and its epoch.
        #: It is for workers that keep checkpoints alone.
        self.kept = Mark(-1, 0)
        self._kept_epoch = -1
        self._again_at: dict[int, float] = {}  # by worker

    def begin(self, mark: Mark, epoch: int) -> None:
        self.begun, self.mark, self.epoch = True, mark, epoch
        self._again_at.clear()

    def begin_kept(self, mark: Mark, epoch: int) -> None:
        self.begun, self.kept, self._kept_epoch = True, mark, epoch
        self._again_at.clear()

    def due(self, worker: int, acked: np.ndarray, reads: bool, now: float) -> bool:
        """Tell whether a worker is to be told now. ``acked`` has the acks of its replicas; ``reads``: some of these read."""
        mark, _ = self._of(reads)
        return mark.sequence >= 0 and now >= self._again_at.get(worker, 0.0) and int(acked.min()) < mark.sequence

    def message(self, stream: StreamId, incarnation: int, worker: int, reads: bool, again_at: float) -> Settled:
        self._again_at[worker] = again_at
        mark, epoch = self._of(reads)
        return Settled(*stream, incarnation, epoch, mark)

    def _of(self, reads: bool) -> tuple[Mark, int]:
        if reads or self.mark.sequence >= self.kept.sequence:
            return self.mark, self.epoch
        return self.kept, self._kept_epoch
