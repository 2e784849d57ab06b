"""Commits of a consumer group, for tools that show its lag: about once a second, up to the offsets that every consumer has
applied.

Law: no reader waits for a commit, and nothing depends on it. The place where a query goes on is in its checkpoints. A
failed commit is logged once, and tried again until it succeeds.

One thread commits for all partitions of a source that a process reads. It begins with the first of them, and ends with the
last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from flux.connectors.kafka.client.cluster import Address, Client
from flux.connectors.kafka.client.security import Security

log = logging.getLogger("flux.kafka")

TopicPartition = tuple[str, int]

EVERY_S = 1.0
#: Interval after which all offsets are committed again, though none is new: brokers forget offsets of groups that are
#: silent for days, and a worker that was given up may have committed older ones.
AGAIN_S = 60.0
#: Limit of one commit, and of the last one, which the end of a reader should not hold up for long.
_LIMIT_S, _LAST_LIMIT_S = 5.0, 2.0
#: Longest pause between attempts that fail. It doubles each time, because a wrong login every second may lock an account.
_PAUSE_MAX_S = 30.0


class GroupCommit:
    """Committer of one consumer group, for all partitions of a source that a process reads."""

    def __init__(self, bootstrap: Sequence[Address], security: Security, group: str) -> None:
        self._bootstrap, self._security, self._group = bootstrap, security, group
        self._changed = threading.Condition()
        #: Functions that return the offset behind all applied records, for partitions that are read here.
        self._applied: dict[TopicPartition, Callable[[], int | None]] = {}
        self._left: dict[TopicPartition, int] = {}  # of partitions that are not read here any more
        self._runs = False

    def add(self, which: TopicPartition, applied: Callable[[], int | None]) -> None:
        """Commit the offsets that ``applied`` returns, from now on. It is called in another thread, and returns None before
        the first offset."""
        with self._changed:
            self._applied[which] = applied
            self._left.pop(which, None)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name=f"flux-kafka-group-{self._group}", daemon=True).start()

    def remove(self, which: TopicPartition) -> None:
        """End the commits for a partition. Its last offset is still committed, in one attempt."""
        with self._changed:
            applied = self._applied.pop(which, None)
            offset = None if applied is None else applied()
            if offset is not None:
                self._left[which] = offset
            self._changed.notify_all()

    def _run(self) -> None:
        client = Client(self._bootstrap, self._security)
        committed: dict[TopicPartition, int] = {}
        again_at, pause, last = time.monotonic() + AGAIN_S, EVERY_S, False
        try:
            while not last:
                wanted, last = self._wait(pause)
                if time.monotonic() >= again_at:
                    committed, again_at = {}, time.monotonic() + AGAIN_S
                news = {which: offset for which, offset in wanted.items() if committed.get(which) != offset}
                try:
                    if news:
                        client.commit(self._group, news, _LAST_LIMIT_S if last else _LIMIT_S)
                except Exception as error:  # rows must flow after any error
                    if pause == EVERY_S:
                        log.warning("offsets of group %r are not committed, it is tried again: %s", self._group, error)
                    pause = min(2 * pause, _PAUSE_MAX_S)
                    client.forget()
                else:
                    pause = EVERY_S
                    committed = wanted
        finally:
            client.close()

    def _wait(self, seconds: float) -> tuple[dict[TopicPartition, int], bool]:
        """Wait, and return the offsets to commit then, and whether no partition is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or not self._applied, seconds)
            last = not self._applied
            self._runs = not last
            # Removed partitions get one attempt: soon another worker commits for them.
            asked, wanted, self._left = dict(self._applied), self._left, {}
        for which, applied in asked.items():
            offset = applied()
            if offset is not None:
                wanted[which] = offset
        return wanted, last
