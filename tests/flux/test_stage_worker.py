"""One worker's share of a plan as a state machine: events in, effects out, no socket and no sleep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import flux
from controller.dag import compile_plan
from flux.api import Flow, Source
from flux.control import PartitionFinished, TableSeen
from flux.errors import Fenced, QueryFailed, RefusedError, UserCodeError
from flux.messages import Ack, Data, Hello, OrdersSeen, PartitionSeen, Refuse, Reset, Resume
from flux.plan import Plan
from flux.replica import UNCOMMITTED_MAX
from flux.settings import Settings
from flux.stage_worker import UNDECODABLE_MAX, StageWorker, ToConnection, ToController
from partitioning.table import ReplicaAt, Table

SCHEMA = pa.schema([("x", pa.int64())])
SECRET = b"s"


class Kept(flux.Operator):
    """A sink that keeps its batches."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.batches: list[list[int]] = []

    def process(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch.column("x").to_pylist())


class Split(flux.Operator):
    """One batch of output per row."""

    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Any:
        for row in range(batch.num_rows):
            yield batch.slice(row, 1)


class Alarmed(Kept):
    """Notes when its timer fires: a second after the last rows, or as ``again`` says after itself."""

    again = 0.0

    def process(self, batch: pa.RecordBatch) -> None:
        super().process(batch)
        self.context.set_timer(self.context.now + 1)

    def on_timer(self, name: str) -> None:
        self.batches.append([self.context.now])
        if self.again:
            self.context.set_timer(self.context.now + self.again)


class Bad(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None:
        for number, x in enumerate(batch.column("x").to_pylist()):
            if x < 0:
                raise ValueError(f"row {number} is negative")


def planned(*stages: Any, source: Source | None = None, **options: Any) -> Plan:
    """A chain of stages behind one source that Spark reads, or the source given."""
    flow: Any = source or Source("rows", dataframe=SCHEMA)
    for each in stages:
        flow = each(flow)
    assert isinstance(flow, Flow)
    settings = replace(Settings.of(), **options)
    return compile_plan([flow], settings, lambda schema: schema, "q", SECRET)


def table(plan: Plan, epoch: int = 0, worker: int = 0, others: dict[tuple[int, int], int] | None = None) -> Table:
    """Everything on one worker but for ``others``: (stage, partition) -> worker."""
    stages = tuple(
        tuple((ReplicaAt((others or {}).get((stage.id, p), worker), 0),) for p in range(stage.partitions))
        for stage in plan.stages
    )
    sources = tuple((worker,) * (source.partitions or 0) for source in plan.sources)
    return Table(epoch, stages, sources, {worker: "", **dict.fromkeys((others or {}).values(), "")})


def worker(plan: Plan, **more: Any) -> StageWorker:
    core = StageWorker(plan, 0)
    core.on_table(table(plan, **more), 0.0)
    return core


def rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


class Feeder:
    """The producer of stream 0.0, seen from the worker that consumes it with one partition."""

    def __init__(self, core: StageWorker, connection: str = "feeder", incarnation: int = 0, producer: int = 0) -> None:
        self.core, self.connection, self.incarnation, self.producer = core, connection, incarnation, producer
        self.nonce, self.number, self.first = -1, 0, 0

    def hello(self, epoch: int = 0) -> list[Any]:
        self.core.on_data_plane(self.connection, Hello(0, self.producer, self.incarnation, epoch), [], 0.0)
        answers = self.answers()
        if answers and isinstance(answers[-1], Resume):
            self.nonce, self.number, self.first = answers[-1].nonce, 0, answers[-1].next[0][1]
        return answers

    def send(self, sequence: int, *values: int, last: bool = False) -> list[Any]:
        n = len(values)
        some = [[0], [n], [1]] if n else [[], [], []]
        message = Data(0, self.producer, self.nonce, self.number, self.first, sequence, *some, 100, last)
        self.number, self.first = self.number + 1, sequence + 1
        self.core.on_data_plane(self.connection, message, [rows(*values)] if n else [], 0.0)
        return self.answers()

    def answers(self, now: float = 0.0) -> list[Any]:
        effects = list(self.core.poll(now))
        return [e.message for e in effects if isinstance(e, ToConnection) and e.connection == self.connection]


def kept(core: StageWorker, stage: int = 0, partition: int = 0) -> list[list[int]]:
    operator = core.replicas[stage, partition].operator
    assert isinstance(operator, Kept)
    return operator.batches


def work(core: StageWorker, now: float = 0.0) -> int:
    steps = 0
    while core.work(now):
        steps += 1
    return steps


SINK = flux.stage(partitions=1)(Kept)


def test_rows_are_taken_applied_and_acked() -> None:
    core = worker(planned(SINK, ack_interval=0.005))
    feeder = Feeder(core)
    (resume,) = feeder.hello()
    assert (resume.next, resume.through, resume.shown) == ([(0, 0)], -1, [])
    assert feeder.send(0, 1, 2) == []
    assert work(core) == 1
    assert kept(core) == [[1, 2]]
    assert feeder.answers(0.001) == []  # acks wait for company, but not for long
    (ack,) = feeder.answers(0.006)
    assert isinstance(ack, Ack)
    assert (ack.through, ack.nonce) == (0, resume.nonce)


def test_small_slices_are_put_together_into_one_step() -> None:
    core = worker(planned(SINK, step_max_rows=3))
    feeder = Feeder(core)
    feeder.hello()
    for sequence, values in enumerate([(1,), (2, 3), (4,), (5, 6, 7, 8)]):
        feeder.send(sequence, *values)
    assert work(core) == 3
    assert kept(core) == [[1, 2, 3], [4], [5, 6, 7, 8]]


def test_a_producer_that_has_heard_of_a_newer_table_is_answered_when_that_table_comes() -> None:
    plan = planned(SINK)
    core = worker(plan)
    feeder = Feeder(core)
    assert feeder.hello(epoch=1) == []
    core.on_table(table(plan, epoch=1), 0.0)
    (resume,) = feeder.answers()
    assert (resume.epoch, resume.next) == (1, [(0, 0)])


def test_a_worker_without_a_table_keeps_greetings_and_only_the_newest_of_each_stream() -> None:
    plan = planned(SINK)
    core = StageWorker(plan, 0)
    assert Feeder(core, "broken").hello() == []
    assert Feeder(core, "second").hello() == []
    assert Feeder(core, "other", producer=1).hello() == []
    core.on_table(table(plan), 0.0)
    effects = list(core.poll(0.0))
    assert [e.connection for e in effects if isinstance(e, ToConnection)] == ["second", "other"]


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(9, 0, 0, 0), "edge"),
        (Hello(0, -1, 0, 0), "edge"),
    ],
)
def test_streams_that_do_not_exist_are_refused_and_change_nothing(hello: Hello, code: str) -> None:
    core = worker(planned(SINK))
    core.on_data_plane("stranger", hello, [], 0.0)
    (effect,) = (e for e in core.poll(0.0) if isinstance(e, ToConnection))
    assert isinstance(effect.message, Refuse)
    assert (effect.message.code, core.counters.refused, core.held_bytes) == (code, 1, 0)


def test_an_older_life_of_a_producer_is_refused_when_a_newer_has_come() -> None:
    core = worker(planned(SINK))
    old, new = Feeder(core, "old", incarnation=1), Feeder(core, "new", incarnation=2)
    old.hello()
    old.send(0, 1)
    (resume,) = new.hello()
    assert resume.next == [(0, 1)]
    (reset,) = old.send(1, 2)
    assert isinstance(reset, Reset)
    (refuse,) = old.hello()
    assert (refuse.code, work(core), kept(core)) == ("stale", 1, [[1]])


def test_data_on_a_connection_that_has_not_greeted_is_answered_by_a_reset() -> None:
    core = worker(planned(SINK))
    feeder = Feeder(core)
    feeder.hello()
    feeder.connection = "after the break"
    (reset,) = feeder.send(0, 1)
    assert isinstance(reset, Reset)
    (resume,) = feeder.hello()
    assert resume.next == [(0, 0)]
    feeder.send(0, 1)
    assert work(core) == 1


def test_a_stage_finishes_when_every_stream_of_a_complete_edge_has_ended() -> None:
    core = worker(planned(SINK))
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 1)
    feeder.send(1, last=True)
    work(core)
    assert not core.replicas[0, 0].finished  # there may be more producers
    core.on_edge_complete(0, [0, 1])
    assert work(core) == 0
    second = Feeder(core, "second", producer=1)
    second.hello()
    second.send(0, last=True)
    work(core)
    assert [e.message for e in core.poll(0.0) if isinstance(e, ToController)] == [
        PartitionFinished(node=0, stage=0, partition=0)
    ]


def test_a_complete_edge_without_any_producer_ends_the_stage_at_once() -> None:
    core = worker(planned(SINK))
    core.on_edge_complete(0, [])
    assert work(core) == 1
    assert core.replicas[0, 0].finished


def test_what_a_worker_sends_to_itself_takes_the_same_way_without_leaving_it() -> None:
    source = flux.source(lambda p: iter(()), SCHEMA, 2, "numbers")
    core = worker(planned(flux.stage(partitions=2)(Split), SINK, source=source))
    for partition in (0, 1):
        core.on_source(0, partition, rows(partition, 10 + partition), 0.0)
        core.on_source(0, partition, None, 0.0)
    effects: list[Any] = []
    for tick in range(50):
        work(core)
        effects += core.poll(tick * 0.01)
    assert sorted(x for batch in kept(core, 1) for x in batch) == [0, 1, 10, 11]
    assert [type(effect.message) for effect in effects] == [TableSeen, PartitionFinished]
    assert (core.log_meter.bytes, core.held_bytes) == (0, 0)


def test_output_that_does_not_fit_into_the_log_waits_within_its_step() -> None:
    plan = planned(flux.stage(partitions=1)(Split), SINK, log_max_bytes=1)
    core = worker(plan, others={(1, 0): 5})
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 1, 2, 3)
    (producer,) = core.producers.values()
    core.on_answer(5, Resume(1, 0, 1, 0, [(0, 0)], -1, [], 1 << 20), 0.0)
    sent: list[int] = []
    acked: list[int] = []
    for sequence in range(3):
        work(core)
        assert len(producer.log) == 1, "the bound and one batch"
        for effect in core.poll(sequence):
            if isinstance(effect.message, Data):
                sent.append(effect.message.sequence)
            elif isinstance(effect.message, Ack):
                acked.append(sequence)
        core.on_answer(5, Ack(1, 0, 1, 0, sequence, [], 1 << 20), 0.0)
    assert sent == [0, 1, 2]
    assert acked == [2], "a step is acked when all of its output is in the log"


def test_a_replica_that_is_dropped_in_the_middle_of_a_step_gives_back_the_credit_of_its_rows() -> None:
    """A move drops a primary on a worker that lives on, also while its step waits for room in the log."""
    plan = planned(flux.stage(partitions=1)(Split), SINK, log_max_bytes=1)
    core = worker(plan, others={(1, 0): 5})
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 1, 2, 3)
    work(core)
    assert not core.replicas[0, 0].between_steps
    assert core.held_bytes > 0
    elsewhere = table(plan, epoch=1, others={(0, 0): 5, (1, 0): 5})
    core.on_table(elsewhere, 0.0)
    assert (core.replicas, core.held_bytes) == ({}, 0)


def test_a_source_is_read_only_while_its_log_has_room() -> None:
    source = flux.source(lambda p: iter(()), SCHEMA, 1, "numbers")
    core = worker(planned(SINK, source=source, log_max_bytes=1), others={(0, 0): 5})
    core.on_answer(5, Resume(0, 0, 1, 0, [(0, 0)], -1, [], 1 << 20), 0.0)
    assert core.wants(0, 0)
    core.on_source(0, 0, rows(1), 0.0)
    assert not core.wants(0, 0)


def test_a_source_is_not_read_before_anybody_waits_for_its_rows() -> None:
    source = flux.source(lambda p: iter(()), SCHEMA, 1, "numbers")
    core = worker(planned(SINK, source=source), others={(0, 0): 5})
    assert not core.wants(0, 0)
    list(core.poll(0.0))
    assert not core.wants(0, 0), "a greeting is no answer"
    core.on_answer(5, Resume(0, 0, 1, 0, [(0, 0)], -1, [], 1 << 20), 0.0)
    assert core.wants(0, 0)


# ---- timers


ALARMED = flux.stage(partitions=1)(Alarmed)


def turns(core: StageWorker, until: float, now: float = 0.0) -> list[tuple[float, int]]:
    """What the loop does that sleeps as long as it may: (when it wakes up, steps applied then)."""
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
    core = StageWorker(plan, 0)
    core.on_table(before, 0.0)
    replica = core.replicas[0, 0]
    replica.context.set_timer(1.0)
    assert sum(steps for _, steps in turns(core, 2.0)) == 0
    core.on_table(Table(1, (((ReplicaAt(0, 0),),),), (), {0: ""}), 2.0)
    assert work(core, 2.0) == 1
    assert kept(core) == [[2.0]]


def test_ticks_that_wait_for_commits_go_on_when_these_come() -> None:
    plan = planned(flux.stage(partitions=1, replicas=2)(type("Always", (Alarmed,), {"again": -1.0})))
    core = StageWorker(plan, 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0), ReplicaAt(5, 0)),),), (), {0: "", 5: ""}), 0.0)
    replica = core.replicas[0, 0]
    replica.context.set_timer(1.0)
    done = work(core, 1.0)
    assert done == UNCOMMITTED_MAX + 1
    core.on_answer(5, OrdersSeen([PartitionSeen(0, 0, 0, replica.leads_since, done, done, 0, 0)]), 1.0)
    assert work(core, 1.0) == UNCOMMITTED_MAX + 1


def test_ticks_that_wait_for_a_slow_secondary_go_on_when_it_has_applied_some() -> None:
    plan = planned(flux.stage(partitions=1, replicas=2)(type("Always", (Alarmed,), {"again": -1.0})))
    core = StageWorker(plan, 0)
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


def test_an_error_in_user_code_names_stage_partition_stream_and_row() -> None:
    core = worker(planned(flux.stage(partitions=1)(Bad)))
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 1, 2, -3, 4)
    with pytest.raises(
        UserCodeError,
        match=r"stage Bad, partition 0: process\(\) raised ValueError: row 2 is negative "
        r"\(at stream 0\.0 sequence 0; first bad row is number 2 of the step: \{'x': -3\}\)",
    ):
        core.work(0.0)


def spoil(feeder: Feeder, sequence: int) -> list[Any]:
    """A batch comes, and its payload cannot be decoded."""
    message = Data(0, 0, feeder.nonce, feeder.number, feeder.first, sequence, [0], [1], [1], 100)
    feeder.core.on_undecodable(feeder.connection, message, "no such type")
    return feeder.answers()


def test_a_batch_that_is_damaged_on_the_way_is_asked_for_again() -> None:
    core = worker(planned(SINK))
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 7)
    for _ in range(UNDECODABLE_MAX - 1):
        (answer,) = spoil(feeder, 1)
        assert isinstance(answer, Reset)
        assert feeder.send(2, 9) == []  # of a connection where something is missing
        feeder.hello()
    feeder.send(1, 8)
    work(core)
    assert kept(core) == [[7, 8]]
    spoil(feeder, 2)  # another batch has another count


def test_a_batch_that_never_can_be_decoded_ends_the_query_with_its_stream() -> None:
    core = worker(planned(SINK))
    feeder = Feeder(core)
    feeder.hello()
    for _ in range(UNDECODABLE_MAX - 1):
        spoil(feeder, 0)
        spoil(feeder, 0)  # a repetition under the same nonce is old
        feeder.hello()
    with pytest.raises(
        QueryFailed,
        match=r"stream 0\.0 \(from partition 0 of rows\): batch 0 cannot be decoded by worker 0, 5 times in a row: no such "
        r"type\. Its columns are x int64",
    ):
        spoil(feeder, 0)


def test_a_refusal_by_another_worker_is_an_error() -> None:
    plan = planned(flux.stage(partitions=1)(Split), SINK)
    core = worker(plan, others={(1, 0): 5})
    with pytest.raises(RefusedError):
        core.on_answer(5, Refuse(1, 0, "edge", "no such edge"), 0.0)


def test_an_answer_for_a_stream_of_someone_else_changes_nothing() -> None:
    core = worker(planned(SINK))
    core.on_answer(5, Ack(7, 7, 1, 0, 3, [], 0), 0.0)
    assert np.isfinite(core.due())


def test_a_table_that_is_not_newer_is_ignored() -> None:
    plan = planned(SINK)
    core = worker(plan, epoch=4)
    before = dict(core.replicas)
    core.on_table(table(plan, epoch=3, worker=9), 0.0)
    assert (core.epoch, core.replicas) == (4, before)


def test_a_replica_that_the_newest_table_does_not_list_is_discarded() -> None:
    plan = planned(SINK)
    core = worker(plan)
    newer = table(plan, epoch=1, worker=9)
    core.on_table(msgspec.structs.replace(newer, endpoints={0: "at 0", 9: "at 9"}), 0.0)
    assert core.replicas == {}


def test_a_worker_that_the_newest_table_does_not_know_is_fenced() -> None:
    plan = planned(SINK)
    core = worker(plan)
    with pytest.raises(Fenced):
        core.on_table(table(plan, epoch=1, worker=9), 0.0)
