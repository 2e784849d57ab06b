"""Offsets of a consumer group, for tools that show its lag: about once a second, up to what every consumer has applied.

Law: nobody waits for it, and nothing depends on it. Where a query goes on, its checkpoints say. What cannot be committed is
logged once, and tried again until it can be.

One thread commits for all partitions of a source that a process reads. It begins with the first of them, and ends with the last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from flux.kafka.client import Address, Client
from flux.kafka.security import Security

log = logging.getLogger("flux.kafka")

TopicPartition = tuple[str, int]

EVERY_S = 1.0
#: All again, though nothing is new: brokers forget offsets of groups that are silent for days, and a worker that was given up
#: may have committed older ones.
AGAIN_S = 60.0
#: Of one commit; of the last, for which nobody should wait long.
_LIMIT_S, _LAST_LIMIT_S = 5.0, 2.0
#: Between attempts that fail: twice as long each time. A wrong login every second may lock an account.
_PAUSE_MAX_S = 30.0


class Committer:
    def __init__(self, bootstrap: Sequence[Address], security: Security, group: str) -> None:
        self._bootstrap, self._security, self._group = bootstrap, security, group
        self._changed = threading.Condition()
        self._applied: dict[TopicPartition, Callable[[], int | None]] = {}
        self._left: dict[TopicPartition, int] = {}  # of partitions that are not read here any more
        self._runs = False

    def add(self, which: TopicPartition, applied: Callable[[], int | None]) -> None:
        """From now on commit what ``applied`` says, which is called in another thread; None: nothing yet."""
        with self._changed:
            self._applied[which] = applied
            self._left.pop(which, None)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name=f"flux-kafka-group-{self._group}", daemon=True).start()

    def remove(self, which: TopicPartition) -> None:
        """What it said last is still committed, at once or never."""
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
                except Exception as error:  # whatever it is, rows must flow
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
        """What is to be committed then, and whether nothing comes after it."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or not self._applied, seconds)
            last = not self._applied
            self._runs = not last
            # One attempt: soon another worker commits for them.
            asked, wanted, self._left = dict(self._applied), self._left, {}
        for which, applied in asked.items():
            offset = applied()
            if offset is not None:
                wanted[which] = offset
        return wanted, last
