"""The vault: a worker without operators that keeps a standby of every partition in a directory (design: vault).

A query goes on from the vault when all workers are lost, or the driver. To other processes the vault is a worker like any other:
primaries send it orders and checkpoints, producers hear its acks. Its answers leave when they are durable, and not before.

``HandedCopies`` gives copies of standbys to workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from flux.dataflow.plan import Plan
from flux.exchange.producer import ToWorker
from flux.state import standby as image
from flux.state.receiver import sign
from flux.state.standby import Standby
from flux.vault.journal import INLINE_BYTES, Journal
from flux.wire.messages import Install, Installed, Restore
from flux.wire.parts import PartLimits, StateParts
from flux.worker.core import WorkerCore
from flux.worker.effects import Effect
from partitioning.ids import PartitionKey
from partitioning.table import Table

#: The number of copies on their way at the same time: each is in memory as a whole.
AT_ONCE = 4


class HandedReplica(NamedTuple):
    """A replica that is to be primary, and its worker."""

    key: PartitionKey
    worker: int
    incarnation: int


def _leads(table: Table, to: HandedReplica) -> bool:
    return any((r.worker, r.incarnation) == (to.worker, to.incarnation) for r in table.row(*to.key)[:1])


@dataclass
class _CopyInParts:
    """A copy on its way, in parts."""

    number: int
    parts: StateParts


class HandedCopies:
    """The copies of standbys that the vault gives to workers, for partitions of which no other replica is left (design: restore):
    on their way, or waiting for their turn. A state machine without I/O.

    The worker that is to be the primary asks until the copy comes. From its first request on, the vault heeds no earlier primary
    of the partition: entries that the vault still acked for an earlier primary would be missing in the copy of the next one."""

    def __init__(self, secret: bytes, again_s: float, limits: PartLimits | None = None) -> None:
        self._secret = secret
        self._again_s = again_s
        self._limits = limits or PartLimits()
        self._number = 0
        self._waiting: dict[HandedReplica, Standby] = {}
        self._given: dict[HandedReplica, _CopyInParts] = {}

    @property
    def workers(self) -> set[int]:
        """Return the workers to which a copy is on its way."""
        return {to.worker for to in (*self._given, *self._waiting)}

    @property
    def waits(self) -> bool:
        """Return whether one more copy may begin."""
        return bool(self._waiting) and len(self._given) < AT_ONCE

    def ask(self, standby: Standby, asked: Restore, now: float) -> bool:
        """Accept a worker's request for the content of a standby. False: a later primary is known."""
        if asked.incarnation < standby.order.term:
            return False
        standby.fence(asked.incarnation)
        to = HandedReplica(standby.key, asked.worker, asked.incarnation)
        if to not in self._given:
            self._waiting[to] = standby
        return True

    def _begin(self, to: HandedReplica, standby: Standby, now: float) -> None:
        self._number += 1
        data = image.encode(standby)
        signature = sign(self._secret, (*to.key, to.incarnation, self._number, -1), data)
        self._given[to] = _CopyInParts(self._number, StateParts(data, signature, heard=now))

    def follow(self, table: Table) -> None:
        """Drop the copies for replicas that the table does not name as primary any more."""
        self._given = {to: given for to, given in self._given.items() if _leads(table, to)}
        self._waiting = {to: standby for to, standby in self._waiting.items() if _leads(table, to)}

    def poll(self, now: float) -> Iterator[ToWorker]:
        if self.waits:
            to = next(iter(self._waiting))  # one in each turn: other workers wait for answers of this process
            self._begin(to, self._waiting.pop(to), now)
        for to, given in self._given.items():
            for offset, payload in given.parts.due(now, self._again_s, self._limits):
                message = Install(*to.key, to.incarnation, given.number, offset, given.parts.total, to.incarnation)
                yield ToWorker(to.worker, message, payload=payload)

    def on_installed(self, worker: int, answer: Installed, now: float) -> None:
        to = HandedReplica(PartitionKey(answer.stage, answer.partition), worker, answer.incarnation)
        given = self._given.get(to)
        if given is None or given.number != answer.copy:
            return
        given.parts.on_received(answer.received_bytes, now)
        if answer.done:
            del self._given[to]


class Vault:
    """The part of a vault that other workers do not have (``WorkerExtension``), and the ``core`` that it extends.

    Effects of the core are held until the journal is durable, as they may follow from records that are not durable yet."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        journal: Journal,
        clock: Callable[[], float] = lambda: 0.0,
        workers: int = 1,
        limits: PartLimits | None = None,
    ) -> None:
        self.journal = journal
        # A checkpoint that becomes a file is written in another thread: the acks of all workers wait for this loop, and a busy
        # disk may take a tenth of a second to flush a file.
        limits_in = limits or PartLimits(inline_bytes=INLINE_BYTES)
        self.core = WorkerCore(plan, worker, clock, workers, limits_in, journal, self)
        self._plan = plan
        parts = (limits or PartLimits()).within(plan.settings.message_max_bytes)
        self._handing = HandedCopies(plan.secret, plan.settings.resend_timeout, parts)
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

    def on_table(self, table: Table) -> None:
        self.journal.see(table.epoch)
        self._handing.follow(table)

    def on_followed(self, now: float) -> None:
        self.journal.keep_only(self._exists)
        early, self._early = self._early, {}
        for message in early.values():
            self._on_restore(message, now)

    def on_message(self, message: Any, now: float) -> bool:
        if not isinstance(message, Restore):
            return False
        self._on_restore(message, now)
        return True

    def _on_restore(self, message: Restore, now: float) -> None:
        core, key = self.core, PartitionKey(message.stage, message.partition)
        if message.incarnation > core.epoch and self._exists(key):
            # A worker follows a table when it comes, and this one's may be next in the queue. If the request were forgotten, the
            # partition would stand still for a resend time-out.
            before = self._early.get(key)
            if before is None or before.incarnation <= message.incarnation:
                self._early[key] = message
            return
        standby = core.followers.get(key)
        known = core.table is not None and message.worker in core.table.endpoints
        if not known or not isinstance(standby, Standby) or not self._handing.ask(standby, message, now):
            core.counters.stale += 1  # the worker asks again if it still waits

    def _exists(self, key: PartitionKey) -> bool:
        stages = self.core.plan.stages
        return key.stage in stages and 0 <= key.partition < stages[key.stage].partitions

    def on_installed(self, worker: int, answer: Installed, now: float) -> None:
        self._handing.on_installed(worker, answer, now)

    def due(self) -> float:
        return 0.0 if self._handing.waits else self._flush_at

    def passed(self, effects: Iterator[Effect], now: float) -> Iterator[Effect]:
        self._held += effects
        self._held += self._handing.poll(now)
        if self.journal.pending:
            self._flush_at = min(self._flush_at, now + self._plan.settings.journal_flush)
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
        table = self.core.table
        return not isinstance(effect, ToWorker) or table is None or effect.worker in table.endpoints
