"""Deliberately broken variants of rules that only few interleavings need: each takes away one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import controller.losing
import flux.pairing
from controller.sweeping import Sweeping
from flux.messages import Data
from flux.producer import Producer
from flux.receiver import Inbound
from flux.replica import Replica
from flux.stage_worker import StageWorker
from flux.transfers import Transfers
from partitioning.table import Table

Patch = pytest.MonkeyPatch


# ---- producers and who reads from them


def takes_answers_of_an_older_table(patch: Patch) -> None:
    patch.setattr(Producer, "_outdated", lambda *given: False)


def serves_what_is_left_to_who_needs_more(patch: Patch) -> None:
    """A replica that needs what has left the log gets the rest."""
    patch.setattr(Producer, "_still_here", lambda *given: None)


def keeps_acks_of_an_earlier_life(patch: Patch) -> None:
    """When the table brings a new replica where there was one before."""
    on_table = Producer.on_table

    def broken(self: Producer, *given: Any) -> None:
        known = {worker: (cursor.hosts, cursor.acked) for worker, cursor in self._cursors.items()}
        on_table(self, *given)
        for worker, cursor in self._cursors.items():
            if worker in known:
                hosts, acked = known[worker]
                np.maximum(cursor.acked, acked, out=cursor.acked, where=cursor.hosts & hosts)
        self._settle()

    patch.setattr(Producer, "on_table", broken)


def begins_where_all_is_received(patch: Patch) -> None:
    """A source is read again from behind what workers have received, not from behind what they have applied."""
    floor = Producer.floor

    def broken(self: Producer) -> Any:
        acked = {worker: cursor.acked for worker, cursor in self._cursors.items()}
        for cursor in self._cursors.values():
            cursor.acked = np.maximum(cursor.acked, cursor.wanted_from - 1) if len(cursor.wanted_from) else cursor.acked
        try:
            return floor(self)
        finally:
            for worker, cursor in self._cursors.items():
                cursor.acked = acked[worker]

    patch.setattr(Producer, "floor", broken)


def resumes_who_does_not_know_the_new_replica(patch: Patch) -> None:
    """A producer that goes by a table without the new replica is asked to go on for it."""

    def broken(self: StageWorker, inbound: Inbound, incarnation: int) -> None:
        if inbound.connection is not None:
            self._subscribe(inbound, inbound.connection, inbound.incarnation, inbound.epoch, inbound.source)

    patch.setattr(StageWorker, "_ask_again", broken)


def reads_from_who_was_dropped(patch: Patch) -> None:
    """Replicas of a producer that are not in the table are welcome."""
    welcome, producers_of = StageWorker._welcome_replica, StageWorker._producers_of

    def broken(self: StageWorker, connection: Any, hello: Any, inbound: Inbound) -> None:
        listed = producers_of(self, inbound.stream)
        live = listed.get(hello.worker, (-1, True))[1]
        self._producers_of = lambda stream: listed | {hello.worker: (hello.incarnation, live)}  # type: ignore[method-assign]
        try:
            welcome(self, connection, hello, inbound)
        finally:
            del self._producers_of

    patch.setattr(StageWorker, "_welcome_replica", broken)


def takes_a_batch_that_skips_others(patch: Patch) -> None:
    """Messages are numbered, and that alone is looked at."""
    take = Inbound.take

    def broken(self: Inbound, message: Data, *given: Any) -> Any:
        return take(self, replace(message, first=0), *given)

    patch.setattr(Inbound, "take", broken)


def forgets_greetings_of_a_newer_table(patch: Patch) -> None:
    on_hello = StageWorker._on_hello

    def broken(self: StageWorker, connection: Any, hello: Any, now: float) -> None:
        on_hello(self, connection, hello, now)
        self._early = []

    patch.setattr(StageWorker, "_on_hello", broken)


def answers_who_does_not_know_new_replicas(patch: Patch) -> None:
    """A greeting that goes by a table before the newest replica here is answered."""
    on_hello = StageWorker._on_hello

    def broken(self: StageWorker, connection: Any, hello: Any, now: float) -> None:
        newest, self._newest = self._newest, dict.fromkeys(self._newest, -1)
        try:
            on_hello(self, connection, hello, now)
        finally:
            self._newest = newest

    patch.setattr(StageWorker, "_on_hello", broken)


# ---- credit


def secondaries_hold_credit(patch: Patch) -> None:
    """Slices that wait for a primary elsewhere count against the credit of their stream."""
    take = Inbound.take
    patch.setattr(
        Inbound,
        "take",
        lambda self, message, batches, hosted, secondary, *given: take(self, message, batches, hosted, (), *given),
    )


def a_step_under_way_keeps_its_credit(patch: Patch) -> None:
    """When its replica is dropped."""

    def broken(self: Replica) -> Any:
        return {stream: list(slices) for stream, slices in self._waiting.items()}

    patch.setattr(Replica, "waiting", broken)


def what_waits_keeps_its_credit(patch: Patch) -> None:
    """When its replica is dropped."""
    discard = Inbound.discard
    patch.setattr(Inbound, "discard", lambda self, partition, slices: discard(self, partition, ()))


# ---- copies


def copies_again_what_has_arrived(patch: Patch) -> None:
    on_copy_state = Transfers.on_copy_state

    def broken(self: Transfers, order: Any) -> None:
        replica = self._host.replicas.get((order.stage, order.partition))
        peer = None if replica is None else self._peer(replica, order)
        if peer is None:
            return
        acked, peer.acked = peer.acked, None
        on_copy_state(self, order)
        peer.acked = acked

    patch.setattr(Transfers, "on_copy_state", broken)


def forgets_what_a_copy_holds_back(patch: Patch) -> None:
    adopt = Replica.adopt
    patch.setattr(Replica, "adopt", lambda self, state: adopt(self, state | {"marks": []}))


# ---- order


def heeds_orders_for_another_life(patch: Patch) -> None:
    on_orders = flux.pairing.Pairing.on_orders

    def broken(self: Any, message: Any) -> Any:
        items = []
        for item in message.items:
            replica = self._replicas.get((item.stage, item.partition))
            items.append(item if replica is None else replace(item, incarnation=replica.incarnation))
        return on_orders(self, replace(message, items=items))

    patch.setattr(flux.pairing.Pairing, "on_orders", broken)


def never_reports_a_divergence(patch: Patch) -> None:
    on_seen = flux.pairing.on_seen

    def broken(*given: Any) -> Any:
        return [report for report in on_seen(*given) if not isinstance(report, flux.pairing.Diverged)]

    patch.setattr(flux.pairing, "on_seen", broken)


# ---- the controller


def who_joins_need_not_confirm(patch: Patch) -> None:
    """A worker that has come since an addition was listed need not go by that table."""
    confirm = Sweeping._confirm

    def broken(self: Sweeping, now: float) -> None:
        new = [member for member in self.members.processes() if member.epoch < 0 and not member.left]
        for member in new:
            member.left = True
        confirm(self, now)
        for member in new:
            member.left = False

    patch.setattr(Sweeping, "_confirm", broken)


def additions_outlive_their_primary(patch: Patch) -> None:
    """Where the primary is lost, what it was about to add goes on with its successor."""
    without_worker = controller.losing.without_worker

    def broken(table: Table, worker: int, safe: Any, readers: Any) -> Any:
        changed, lost = without_worker(table, worker, safe, readers)
        stages = []
        for stage, rows in enumerate(changed.stages):
            stages.append(
                tuple(
                    (
                        *replicas,
                        *(r for r in table.stages[stage][p] if replicas and r.worker != worker and r not in replicas),
                    )
                    for p, replicas in enumerate(rows)
                )
            )
        return Table(changed.epoch, tuple(stages), changed.sources, changed.endpoints), lost

    patch.setattr(controller.losing, "without_worker", broken)
