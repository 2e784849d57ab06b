"""Requests for checkpoints: if rows are kept only for checkpoints, the primaries are asked for new ones (design: press).

A standby acks a stream through the position in its checkpoint, and its producer keeps all later rows. Nothing here waits for a
timer while rows are held back: a producer that is short of room, or has come to the end of its stream, asks at once, and again
after a while, because the request or the checkpoint may be lost. Standbys are asked as well, for their acks: they read nothing,
so a lost ack of theirs would not be noticed otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flux.stream.consumers import Consumers
from flux.stream.cursor import NOBODY
from flux.stream.log import Log
from flux.wire.messages import Press
from partitioning.ids import StreamId

#: A log that is fuller than this part of its bound asks for checkpoints.
PRESSED_SHARE = 1 / 2


@dataclass
class CheckpointRequest:
    """One request. ``below`` is the position of the partition's checkpoint at that time; ``due`` the time of the next request."""

    below: int
    due: float


class CheckpointRequests:
    """The requests for checkpoints of one stream."""

    def __init__(self, stream: StreamId, again_s: float) -> None:
        self._stream = stream
        self._again_s = again_s
        self._asked: dict[int, CheckpointRequest] = {}

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
        by_worker: dict[int, list[int]] = {}
        for partition in np.flatnonzero((held < wanted) & (held < applied)).tolist():
            asked = self._asked.get(partition)
            if asked is None or asked.below != held[partition] or now >= asked.due:
                self._asked[partition] = CheckpointRequest(int(held[partition]), now + self._again_s)
                for worker in consumers.asked(partition):
                    by_worker.setdefault(worker, []).append(partition)
        for worker, partitions in by_worker.items():
            yield worker, Press(*self._stream, partitions)
