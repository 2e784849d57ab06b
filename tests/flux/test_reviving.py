"""A worker that is to lead a partition of which only the vault has anything, between the two state machines (design: restore)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kept import LARGE, Memory, checkpoint, opened
from one_worker import Kept, planned, rows

import flux
from flux.dataflow.plan import Plan
from flux.exchange.producer import ToWorker
from flux.state.receiver import sign
from flux.state.sender import Aside
from flux.vault.journal import Journal
from flux.vault.vault import Vault
from flux.wire.messages import Data, Hello, Install, Orders, Restore, Resume
from flux.wire.parts import PartLimits
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection, ToController
from partitioning.ids import DISK
from partitioning.table import ReplicaAt, Table

FIRST, SECOND, VAULT, FEEDER = 0, 1, 9, "feeder"


class Slow(Kept):
    restores_in_background = True

    def snapshot(self) -> Any:
        return {"batches": self.batches}

    def restore(self, snapshot: Any) -> None:
        self.batches = snapshot["batches"]


def table(epoch: int, worker: int, incarnation: int) -> Table:
    row = ReplicaAt(worker, incarnation), ReplicaAt(VAULT, 0, kind=DISK)
    return Table(epoch, ((row,),), (), {worker: "", VAULT: ""})


class Both:
    """A worker and the vault. ``turn`` carries their messages to each other, and ``aside`` does their jobs aside."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0.0
        self.store = Memory()
        self.vault = Vault(plan, VAULT, opened(self.store), limits=PartLimits(inline_bytes=0)).core
        self.worker = WorkerCore(plan, FIRST)
        self.jobs: list[tuple[WorkerCore, Aside]] = []
        self.said: list[Any] = []
        self.reports: list[Any] = []  # to the controller
        self.orders: list[Orders] = []  # of the first primary

    def show(self, shown: Table) -> None:
        self.vault.on_table(shown, self.now)
        self.worker.on_table(shown, self.now)

    def turn(self, times: int = 20) -> None:
        for _ in range(times):
            self.now += 0.001
            while self.worker.work(self.now):
                pass
            for core, other in ((self.worker, self.vault), (self.vault, self.worker)):
                for effect in list(core.poll(self.now)):
                    self._carry(core, other, effect)

    def _carry(self, core: WorkerCore, other: WorkerCore, effect: Any) -> None:
        if isinstance(effect, Aside):
            self.jobs.append((core, effect))
        elif isinstance(effect, ToWorker) and effect.worker == other.worker:
            self.said.append(effect.message)
            if isinstance(effect.message, Install):
                other.on_install(core.worker, effect.message, effect.payload or b"", self.now)
            else:
                other.on_data_plane(core.worker, effect.message, effect.batches, self.now)
        elif isinstance(effect, ToConnection) and effect.connection == other.worker:
            other.on_answer(core.worker, effect.message, self.now)
        elif isinstance(effect, ToConnection):
            self.said.append(effect.message)
        elif isinstance(effect, ToController):
            self.reports.append(effect.message)

    def aside(self) -> None:
        while self.jobs:
            core, effect = self.jobs.pop(0)
            core.on_done(effect.token, effect.job(), self.now)
            self.turn(2)

    def feed(self, *batches: int) -> None:
        """Give the worker these batches, of one row each."""
        for number in batches:
            message = Data(0, 0, self.nonce, self.number, self.first, number, [0], [1], [1], 100)
            self.number, self.first = self.number + 1, number + 1
            self.worker.on_data_plane(FEEDER, message, [rows(number)], self.now)
            self.turn(3)

    def greet(self, incarnation: int, epoch: int) -> list[Any]:
        self.said.clear()
        self.worker.on_data_plane(FEEDER, Hello(0, 0, incarnation, epoch), [], self.now)
        self.turn(2)
        return self.resumed()

    def resumed(self) -> list[Any]:
        found = [said for said in self.said if isinstance(said, Resume)]
        if found:
            self.nonce, self.number, self.first = found[-1].nonce, 0, found[-1].next[0][1]
        return [list(said.next) for said in found]


@pytest.fixture
def both() -> Both:
    plan = replace(planned(flux.stage(partitions=1)(Slow), checkpoint_interval=0.001), durable=True)
    made = Both(plan)
    made.show(table(0, FIRST, 0))
    assert made.greet(0, 0) == [[(0, 0)]]
    made.feed(0, 1)
    made.aside()
    assert made.vault.followers[0, 0].checkpoint.step == 2  # type: ignore[attr-defined]
    made.feed(2)
    made.orders = [said for said in made.said if isinstance(said, Orders)]
    made.worker = WorkerCore(plan, SECOND, limits=PartLimits(inline_bytes=0))
    made.jobs.clear()
    made.said.clear()
    made.show(table(1, SECOND, 1))
    return made


def test_it_asks_and_goes_on_where_the_vault_says(both: Both) -> None:
    both.turn()
    both.aside()
    replica = both.worker.replicas[0, 0]
    assert (replica.primary, replica.applied, replica.order.end, replica.leads_since) == (True, 2, 3, 1)
    assert replica.operator.batches == [[0], [1]]  # type: ignore[attr-defined]
    kinds = [type(said) for said in both.said]
    assert kinds.count(Restore) == 1
    assert kinds.index(Restore) < kinds.index(Install)
    assert both.greet(1, 1) == [[(0, 2)]]
    both.feed(2)  # as it was ordered before
    assert (replica.applied, replica.order.committed) == (3, 3)


def test_a_source_that_greets_waits_until_it_is_known_where_to_read_on(both: Both) -> None:
    assert both.greet(1, 1) == []
    both.turn()
    while both.jobs and both.jobs[0][1].what != "restore":  # the state that has come is checked and decoded
        core, effect = both.jobs.pop(0)
        core.on_done(effect.token, effect.job(), both.now)
        both.turn(2)
    assert both.jobs, "the operator takes its state aside"
    assert both.greet(1, 1) == [], "also while the operator still takes its state"
    both.aside()
    assert both.resumed() == [[(0, 2)]]


def test_from_its_question_on_the_vault_heeds_no_earlier_primary(both: Both) -> None:
    late = both.orders[-1]
    assert both.vault.order_exchange.on_orders(late), "a primary that has been replaced may not know yet"
    both.turn()
    assert both.vault.order_exchange.on_orders(late) == []
    assert Journal(both.store).standbys[0, 0].order.term == 1, "nor after a loss of everything"  # type: ignore[index]


@pytest.mark.parametrize("between", [[], [table(2, SECOND, 1)]], ids=["the next table", "a later table"])
def test_who_asks_before_its_table_has_come_to_the_vault_is_answered_when_it_comes(
    both: Both, between: list[Table]
) -> None:
    """Answer then, and not a resend time-out later: the table may be on its way to the vault, alone or behind
    others."""
    third = table(3, FIRST, 3)
    both.worker = WorkerCore(both.plan, FIRST, limits=PartLimits(inline_bytes=0))
    both.worker.on_table(third, both.now)
    both.turn()
    assert [type(said) for said in both.said] == [Restore]
    for shown in [*between, third]:
        both.vault.on_table(shown, both.now)
        both.turn(2)
    both.turn()
    both.aside()
    assert both.now < both.plan.settings.resend_timeout
    assert both.worker.replicas[0, 0].leads_since == 3


def test_who_asks_for_what_is_not_in_the_plan_is_not_remembered(both: Both) -> None:
    made = both.vault._extension
    assert isinstance(made, Vault)
    for key in ((0, 7), (3, 0), (-1, 0)):
        both.vault.on_data_plane(SECOND, Restore(*key, 1 << 40, SECOND), [], both.now)
    assert both.vault.counters.stale == 3
    both.vault.on_data_plane(SECOND, Restore(0, 0, 1 << 40, SECOND), [], both.now)
    both.vault.on_data_plane(SECOND, Restore(0, 0, 9, SECOND), [], both.now)
    both.vault.on_table(table(2, SECOND, 1), both.now)
    assert len(made._early) == 1


def test_nobody_waits_while_a_checkpoint_is_written_into_a_file(both: Both) -> None:
    store = Memory()
    vault = Vault(both.plan, VAULT, opened(store)).core
    vault.on_table(table(0, FIRST, 0), 0.0)
    data = checkpoint(0, 0, 1, size=LARGE).data
    assert data is not None
    signature = sign(both.plan.secret, (0, 0, 0, 1, -1), data)
    for offset, part in ((0, data), (len(data), signature)):
        vault.on_install(FIRST, Install(0, 0, 0, 1, offset, len(data) + len(signature)), part, 0.0)
    jobs = [effect for effect in vault.poll(0.0) if isinstance(effect, Aside)]
    assert not store.files, "it is flushed, and everybody's acks would wait for the disk"
    for effect in jobs:
        vault.on_done(effect.token, effect.job(), 0.0)
    assert len(store.files) == 1


def test_a_partition_that_was_never_copied_begins_empty_and_repeats_its_order() -> None:
    plan = replace(planned(flux.stage(partitions=1)(Slow), checkpoint_interval=3600.0), durable=True)
    made = Both(plan)
    made.show(table(0, FIRST, 0))
    made.greet(0, 0)
    made.feed(0, 1)
    made.worker = WorkerCore(plan, SECOND, limits=PartLimits(inline_bytes=0))
    made.jobs.clear()
    made.show(table(1, SECOND, 1))
    made.turn()
    made.aside()
    assert made.greet(1, 1) == [[(0, 0)]]
    made.feed(0, 1)
    assert made.worker.replicas[0, 0].operator.batches == [[0], [1]]  # type: ignore[attr-defined]


def test_without_a_vault_a_live_replica_that_is_not_here_is_a_mistake() -> None:
    core = WorkerCore(planned(flux.stage(partitions=1)(Kept)), SECOND)
    with pytest.raises(AssertionError, match=r"the state of replica .* is lost"):
        core.on_table(table(1, SECOND, 1), 0.0)


def test_a_vault_looks_at_its_place_though_nothing_is_flushed(both: Both) -> None:
    store = Memory(look_s=4.0)
    settings = replace(both.plan.settings, journal_timeout=6.0)
    vault = Vault(replace(both.plan, settings=settings), VAULT, opened(store)).core
    looks = []
    for now in range(10):
        assert list(vault.poll(float(now))) == []
        looks.append(store.looks)
    assert looks == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5], "every third part of the time after which it does not answer"


def test_nothing_is_said_before_it_is_durable_and_what_waits_is_flushed_together(both: Both) -> None:
    """Flush at the interval ``spark.flux.journal.flush``."""
    settings = replace(both.plan.settings, journal_flush=0.01)
    journal = opened(both.store)
    vault = Vault(replace(both.plan, settings=settings), VAULT, journal).core
    flushes: list[float] = []
    flush = both.store.flush

    def counted() -> None:
        flushes.append(now)
        flush()

    both.store.flush = counted  # type: ignore[method-assign]
    now, said = 1.0, []
    vault.on_table(table(1, SECOND, 1), now)
    for _ in range(5):
        journal.see(journal.highest + 1)
        said += list(vault.poll(now))
        assert not said
        assert vault.due() <= 1.01
        now += 0.002
    now = 1.01
    said += list(vault.poll(now))
    assert said
    assert flushes == [1.01]
    assert list(vault.poll(now)) == []
    assert flushes == [1.01], "nothing was left to flush"
