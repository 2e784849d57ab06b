"""The vault: a worker without operators that keeps a standby of every partition in a directory (design: vault).

A query goes on from the vault when all workers are lost, or the driver. To other processes the vault is a worker like any other:
primaries send it orders and checkpoints, producers hear its acks. Its answers leave when they are durable, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from typing import Any

import pyarrow as pa

from flux.dataflow.plan import Plan
from flux.durable.handing import Handing
from flux.durable.journal import INLINE_BYTES, Journal
from flux.host.effects import Effect
from flux.host.stage_worker import StageWorker
from flux.replicas.parts import Limits
from flux.replicas.standby import Standby
from flux.stream.producer import ToWorker
from flux.wire.messages import Installed, Restore
from partitioning.ids import PartitionKey
from partitioning.table import Table


class Vault(StageWorker):
    """The state machine of a vault. Its effects are held until the journal is durable."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        journal: Journal,
        clock: Callable[[], float] = lambda: 0.0,
        workers: int = 1,
        limits: Limits | None = None,
    ) -> None:
        # A checkpoint that becomes a file is written in another thread: the acks of all workers wait for this loop, and a busy
        # disk may take a tenth of a second to flush a file.
        super().__init__(plan, worker, clock, workers, limits or Limits(inline_bytes=INLINE_BYTES), journal)
        self.journal = journal
        parts = (limits or Limits()).within(plan.settings.message_max_bytes)
        self._handing = Handing(plan.secret, plan.settings.resend_timeout, parts)
        self._early: dict[PartitionKey, Restore] = {}  # requests of workers whose newer table has not come here yet
        self._held: list[Effect] = []
        self._flush_at = inf
        self._look_s = min(journal.look_s, plan.settings.journal_timeout / 3)
        self._look_at = 0.0

    @property
    def written(self) -> tuple[int, int, int]:
        return self.journal.bytes, self.journal.order_bytes, self.journal.order_slices

    @property
    def reaches(self) -> set[int]:
        return self._handing.workers

    def on_table(self, table: Table, now: float) -> None:
        if table.epoch > self.epoch:
            self.journal.see(table.epoch)
            self._handing.follow(table)
        super().on_table(table, now)
        early, self._early = self._early, {}
        for message in early.values():
            self._on_restore(message, now)

    def on_data_plane(self, connection: Hashable, message: Any, batches: Sequence[pa.RecordBatch], now: float) -> None:
        if isinstance(message, Restore):
            self._on_restore(message, now)
        else:
            super().on_data_plane(connection, message, batches, now)

    def _on_restore(self, message: Restore, now: float) -> None:
        key = PartitionKey(message.stage, message.partition)
        if message.incarnation > self.epoch and self._exists(key):
            # A worker follows a table when it comes, and this one's may be next in the queue. If the request were forgotten, the
            # partition would stand still for a resend time-out.
            before = self._early.get(key)
            if before is None or before.incarnation <= message.incarnation:
                self._early[key] = message
            return
        standby = self.followers.get(key)
        known = self.table is not None and message.worker in self.table.endpoints
        if not known or not isinstance(standby, Standby) or not self._handing.ask(standby, message, now):
            self.counters.stale += 1  # the worker asks again if it still waits

    def _exists(self, key: PartitionKey) -> bool:
        stages = self.plan.stages
        return 0 <= key.stage < len(stages) and 0 <= key.partition < stages[key.stage].partitions

    def on_answer(self, worker: int, message: Any, now: float) -> None:
        if isinstance(message, Installed):
            self._handing.on_installed(worker, message, now)
        else:
            super().on_answer(worker, message, now)

    def due(self) -> float:
        return 0.0 if self._handing.waits else min(super().due(), self._flush_at)

    def poll(self, now: float) -> Iterator[Effect]:
        """Yield effects, all in order. They are held until the journal is flushed, as they may follow from records that are not
        durable yet."""
        self._held += super().poll(now)
        self._held += self._handing.poll(now)
        if self.journal.pending:
            self._flush_at = min(self._flush_at, now + self.plan.settings.journal_flush)
            if now < self._flush_at:
                return
            self.journal.flush()
            self._flush_at = inf
        elif now >= self._look_at:
            # While no rows come, nothing is flushed, and the loss of the place would not be noticed. The loop turns with each
            # heartbeat, so ``due`` need not tell the time of this check.
            self._look_at = now + self._look_s
            self.journal.check()
        held, self._held = self._held, []
        yield from filter(self._arrives, held)

    def _arrives(self, effect: Effect) -> bool:
        """Return False for an effect whose worker has left while the effect was held."""
        return not isinstance(effect, ToWorker) or self.table is None or effect.worker in self.table.endpoints
