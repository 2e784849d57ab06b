"""Copies of standbys that the vault gives to workers, for partitions of which no other replica is left (design: restore).

The worker that is to be the primary asks until the copy comes. From its first request on, the vault heeds no earlier primary of
the partition: entries that the vault still acked for an earlier primary would be missing in the copy of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flux.replicas import image
from flux.replicas.arrivals import sign
from flux.replicas.parts import Limits, Parts
from flux.replicas.standby import Standby
from flux.stream.producer import ToWorker
from flux.wire.messages import Install, Installed, Restore
from partitioning.ids import PartitionKey
from partitioning.table import Table

#: The number of copies on their way at the same time: each is in memory as a whole.
AT_ONCE = 4


class To(NamedTuple):
    """A replica that is to be primary, and its worker."""

    key: PartitionKey
    worker: int
    incarnation: int


def _leads(table: Table, to: To) -> bool:
    return any((r.worker, r.incarnation) == (to.worker, to.incarnation) for r in table.replicas(*to.key)[:1])


@dataclass
class _Given:
    """A copy on its way, in parts."""

    number: int
    parts: Parts


class Handing:
    """The copies of standbys that are on their way or wait for their turn. A state machine without I/O."""

    def __init__(self, secret: bytes, again_s: float, limits: Limits | None = None) -> None:
        self._secret = secret
        self._again_s = again_s
        self._limits = limits or Limits()
        self._number = 0
        self._waiting: dict[To, Standby] = {}
        self._given: dict[To, _Given] = {}

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
        to = To(standby.key, asked.worker, asked.incarnation)
        if to not in self._given:
            self._waiting[to] = standby
        return True

    def _begin(self, to: To, standby: Standby, now: float) -> None:
        self._number += 1
        data = image.encode(standby)
        signature = sign(self._secret, (*to.key, to.incarnation, self._number, -1), data)
        self._given[to] = _Given(self._number, Parts(data, signature, heard=now))

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
        to = To(PartitionKey(answer.stage, answer.partition), worker, answer.incarnation)
        given = self._given.get(to)
        if given is None or given.number != answer.copy:
            return
        given.parts.on_received(answer.received_bytes, now)
        if answer.done:
            del self._given[to]
