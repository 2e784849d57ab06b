"""A worker wakes up for timers when they are due and not more often; no socket and no sleep."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from one_worker import SINK, Feeder, Kept, Split, kept, planned, rows, work, worker

import flux
from flux.replica.step_queue import UNCOMMITTED_MAX
from flux.wire.messages import Ack, OrdersSeen, PartitionSeen, Resume
from flux.worker.core import WorkerCore
from partitioning.table import ReplicaAt, Table


class Alarmed(Kept):
    """An operator that notes the times of its timer, which fires a second after the last rows."""

    #: Seconds from each firing of the timer to the next one; 0: none.
    again = 0.0

    def process(self, batch: pa.RecordBatch) -> None:
        super().process(batch)
        self.context.set_timer(self.context.now + 1)

    def on_timer(self, name: str) -> None:
        self.batches.append([self.context.now])
        if self.again:
            self.context.set_timer(self.context.now + self.again)


ALARMED = flux.stage(partitions=1)(Alarmed)


def turns(core: WorkerCore, until: float, now: float = 0.0) -> list[tuple[float, int]]:
    """Run a loop that sleeps as long as it may. Return pairs of the time at which it wakes up and the steps applied
    then."""
    course = []
    while now <= until:
        course.append((now, work(core, now)))
        list(core.poll(now))
        assert core.due() > now, "it must not spin"
        now = core.due()
    return course


def test_an_idle_worker_wakes_up_when_a_timer_is_due_and_not_more_often() -> None:
    core = worker(planned(flux.stage(partitions=1)(type("Again", (Alarmed,), {"again": 0.3}))))
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 7)
    course = turns(core, 2.0)
    assert [now for now, steps in course if steps] == pytest.approx([0.0, 1.0, 1.3, 1.6, 1.9])
    assert kept(core) == [[7], *([pytest.approx(now)] for now in (1.0, 1.3, 1.6, 1.9))]
    quiet = turns(worker(planned(ALARMED)), 2.0)
    assert len(course) <= len(quiet) + 5


def test_a_timer_that_rows_put_off_does_not_fire_at_its_first_time() -> None:
    core = worker(planned(ALARMED))
    feeder = Feeder(core)
    feeder.hello()
    for sequence, now in enumerate([0.0, 0.8]):
        feeder.send(sequence, sequence)
        work(core, now)
    assert work(core, 1.5) == 0
    assert work(core, 1.9) == 1


def test_a_timer_whose_output_has_no_room_does_not_keep_the_worker_awake() -> None:
    class Talks(Split):
        def on_timer(self, name: str) -> Any:
            return [rows(1)]

        def open(self, context: flux.Context) -> None:
            super().open(context)
            context.set_timer(1.0, "a")
            context.set_timer(2.0, "b")

    plan = planned(flux.stage(partitions=1)(Talks), SINK, log_max_bytes=1)
    core = worker(plan, others={(1, 0): 5})
    core.on_answer(5, Resume(1, 0, 1, 0, [(0, 0)], -1, [], 1 << 20), 0.0)
    assert sum(steps for _, steps in turns(core, 3.0)) == 1
    core.on_answer(5, Ack(1, 0, 1, 0, 0, [], 1 << 20), 3.0)
    assert work(core, 3.0) == 1


def test_a_secondary_sleeps_through_a_timer_and_fires_it_as_soon_as_it_leads() -> None:
    plan = planned(flux.stage(partitions=1, replicas=2)(Alarmed))
    before = Table(0, (((ReplicaAt(5, 0), ReplicaAt(0, 0)),),), (), {0: "", 5: ""})
    core = WorkerCore(plan, 0)
    core.on_table(before, 0.0)
    replica = core.replicas[0, 0]
    replica.context.set_timer(1.0)
    assert sum(steps for _, steps in turns(core, 2.0)) == 0
    core.on_table(Table(1, (((ReplicaAt(0, 0),),),), (), {0: ""}), 2.0)
    assert work(core, 2.0) == 1
    assert kept(core) == [[2.0]]


def test_ticks_that_wait_for_commits_go_on_when_these_come() -> None:
    plan = planned(flux.stage(partitions=1, replicas=2)(type("Always", (Alarmed,), {"again": -1.0})))
    core = WorkerCore(plan, 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0), ReplicaAt(5, 0)),),), (), {0: "", 5: ""}), 0.0)
    replica = core.replicas[0, 0]
    replica.context.set_timer(1.0)
    done = work(core, 1.0)
    assert done == UNCOMMITTED_MAX + 1
    core.on_answer(5, OrdersSeen([PartitionSeen(0, 0, 0, replica.leads_since, done, done, 0, 0)]), 1.0)
    assert work(core, 1.0) == UNCOMMITTED_MAX + 1


def test_ticks_that_wait_for_a_slow_secondary_go_on_when_it_has_applied_some() -> None:
    plan = planned(flux.stage(partitions=1, replicas=2)(type("Always", (Alarmed,), {"again": -1.0})))
    core = WorkerCore(plan, 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0), ReplicaAt(5, 0)),),), (), {0: "", 5: ""}), 0.0)
    replica = core.replicas[0, 0]
    replica.context.set_timer(1.0)
    done = work(core, 1.0)
    for applied in (0, 0, 7):
        seen = PartitionSeen(0, 0, 0, replica.leads_since, done, applied, 0, 0)
        core.on_answer(5, OrdersSeen([seen]), 1.0)
        more = work(core, 1.0)
        assert more == applied, "it has received all, and applied so much"
        done += more


def test_rows_are_read_also_while_timers_keep_the_worker_busy() -> None:
    core = worker(planned(flux.stage(partitions=1)(type("Always", (Alarmed,), {"again": -1.0}))))
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 7)
    core.work(0.0)
    assert not core.ticked
    core.work(1.0)
    core.work(1.0)
    assert core.ticked, "the loop goes by this"
