"""The time for which a worker leaves small batches lying, to gather more."""

from __future__ import annotations

import pyarrow as pa
import pytest
from one_worker import SCHEMA, Feeder, Kept, kept, planned, work

import flux
from flux.wire.messages import OrderEntry, OrdersSeen, PartitionSeen
from flux.worker.core import WorkerCore
from flux.worker.pacing import IDLE_REST_MAX_S, SHARE, SMALL_ROWS, GatherRest
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table


def test_it_rests_in_proportion_to_its_work_and_never_for_long() -> None:
    gathering = GatherRest()
    gathering.worked(0.0003, rows=50, steps=2)
    gathering.worked(0.0002, rows=0, steps=0)  # receiving
    assert gathering.rest() == pytest.approx(SHARE * 0.0005)
    assert gathering.rest() == 0, "it has done nothing since"
    gathering.worked(1.0, rows=50, steps=2)
    assert gathering.rest() == IDLE_REST_MAX_S


def test_large_steps_and_turns_without_any_lead_to_no_rest() -> None:
    gathering = GatherRest()
    gathering.worked(0.01, rows=SMALL_ROWS * 3 + 1, steps=3)
    assert gathering.rest() == 0
    gathering.worked(0.01, rows=0, steps=0)
    assert gathering.rest() == 0


class First(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


def test_what_a_worker_sends_to_itself_while_it_sends_is_work_that_is_left() -> None:
    """Let a commit send rows to the next stage on the same worker, which must not rest before it has applied them."""
    plan = planned(flux.stage(partitions=1, replicas=2)(First), flux.stage(partitions=1)(Kept))
    core = WorkerCore(plan, 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0), ReplicaAt(1, 0)),), ((ReplicaAt(0, 0),),)), (), {0: "", 1: ""}), 0.0)
    work(core)
    list(core.poll(0.0))
    feeder = Feeder(core)
    feeder.hello()
    core.on_answer(1, OrdersSeen([PartitionSeen(0, 0, 0, 0, 0, 0, 0, 0)]), 0.0)
    feeder.send(0, 1, 2, 3)
    work(core)
    list(core.poll(0.0))
    assert (kept(core, 1), core.has_work) == ([], False), "the step is not committed"
    core.on_answer(
        1, OrdersSeen([PartitionSeen(0, 0, 0, 0, core.replicas[PartitionKey(0, 0)].order.end, 0, 0, 0)]), 0.0
    )
    assert not core.work(0.0)
    list(core.poll(0.0))
    assert core.has_work
    assert core.work(0.0)
    assert kept(core, 1) == [[1, 2, 3]]


def gathering(operator: type[flux.Operator]) -> tuple[WorkerCore, Feeder]:
    """Make a worker on which small slices wait for others."""
    core = WorkerCore(planned(flux.stage(partitions=1)(operator)), 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0),),),), (), {0: ""}), 0.0)
    core.turns.gather_s = 0.004
    feeder = Feeder(core)
    feeder.hello()
    return core, feeder


def test_small_slices_wait_for_others_and_are_applied_in_one_step() -> None:
    core, feeder = gathering(Kept)
    feeder.send(0, 1, now=1.0)
    assert (core.work(1.0), core.has_work) == (False, False), "it may rest meanwhile"
    assert core.due() <= 1.004
    feeder.send(1, 2, now=1.003)
    assert not core.work(1.0039)
    assert core.work(1.0041)
    assert kept(core) == [[1, 2]]
    feeder.send(2, *range(SMALL_ROWS + 1), now=1.01)
    assert core.work(1.01), "many rows wait for nothing"
    feeder.send(3, 3, now=1.02)
    core.turns.wake_all(core.replicas)
    assert not core.work(1.02), "whatever wakes it"
    core.turns.gather_s = 0.0
    assert core.work(1.03), "also when nothing gathers any more"
    assert kept(core)[2] == [3]


def test_a_slice_that_an_ordered_step_has_waited_for_does_not_wait() -> None:
    """Apply the slice at once: its order came from a primary that is lost, and this replica leads now."""
    plan = planned(flux.stage(partitions=1, replicas=2)(First), flux.stage(partitions=1)(Kept))
    core = WorkerCore(plan, 0)
    here, there = ReplicaAt(0, 0), ReplicaAt(1, 0)
    core.on_table(Table(0, (((there, here),), ((here,),)), (), {0: "", 1: ""}), 0.0)
    core.turns.gather_s = 0.004
    core.replicas[PartitionKey(0, 0)].order.on_orders(0, 0, [OrderEntry(1.0, 0.0, [(0, 0, 0)], rows=1)], 1, 0)
    core.on_table(Table(1, (((here,),), ((here,),)), (), {0: ""}), 0.0)
    feeder = Feeder(core)
    feeder.hello(epoch=1)
    feeder.send(0, 1, now=1.0)
    assert core.work(1.0)
    feeder.send(1, 2, now=1.0)
    assert not core.work(1.0)
    assert core.work(1.0041)


def test_who_has_gathered_and_waits_for_its_turn_does_not_gather_again() -> None:
    """Let the replica take its turn: one that small slices never leave alone would else never come to its turn on a
    busy worker."""
    core, feeder = gathering(Kept)
    feeder.send(0, 1, now=1.0)
    for replica in core.turns.gathered(1.005):
        core.turns.wake(replica.key)
    feeder.send(1, 2, now=1.005)
    assert core.work(1.005)
    assert kept(core) == [[1, 2]]


def test_operators_with_timers_do_not_wait() -> None:
    class Timed(Kept):
        def on_timer(self, name: str) -> None:
            pass

    core, feeder = gathering(Timed)
    feeder.send(0, 1, now=1.0)
    assert core.work(1.0)
