"""Requests for the state of replicas that will be primary here and whose state only the vault has (design: restore)."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from flux.host.hosted import Hosted
from flux.stream.producer import ToWorker
from flux.wire.messages import Restore
from partitioning.ids import DISK


class Reviving:
    """The requests of one worker, repeated until the state comes."""

    def __init__(self, hosted: Hosted, again_s: float) -> None:
        #: The vault's worker number; None while no replica here needs it.
        self.vault: int | None = None
        self._hosted = hosted
        self._again_s = again_s
        self._ask_at = inf

    def on_table(self) -> None:
        asking = self._hosted.begin_on_disk()
        self._ask_at = 0.0 if asking else inf
        self.vault = None
        if asking:
            assert self._hosted.table is not None
            row = self._hosted.table.replicas(*asking[0])
            self.vault = next((replica.worker for replica in row if replica.kind == DISK), None)

    def due(self) -> float:
        return self._ask_at

    def poll(self, now: float) -> Iterator[ToWorker]:
        if now < self._ask_at:
            return
        asking = self._hosted.begin_on_disk()
        self._ask_at = now + self._again_s if asking else inf
        if self.vault is not None:
            for key in asking:
                yield ToWorker(self.vault, Restore(*key, self._hosted.awaited[key], self._hosted.worker))
