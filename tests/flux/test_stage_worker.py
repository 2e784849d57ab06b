"""One worker's share of a plan as a state machine: events in, effects out, no socket and no sleep."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from one_worker import SCHEMA, SINK, Feeder, Split, kept, planned, rows, table, work, worker

import flux
from flux.errors import Fenced, QueryFailed, RefusedError, UserCodeError
from flux.wire.control import PartitionFinished, TableSeen
from flux.wire.messages import Ack, Data, ElementKind, Hello, Refuse, Reset, Resume
from flux.wire.parts import PartLimits
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection, ToController
from flux.worker.subscriptions import UNDECODABLE_MAX


class Bad(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None:
        for number, x in enumerate(batch.column("x").to_pylist()):
            if x < 0:
                raise ValueError(f"row {number} is negative")


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


def test_a_producer_that_goes_by_a_table_from_before_the_first_here_is_not_answered() -> None:
    """Leave the greeting without an answer: by the older table the replica may be a standby, to which the producer
    sends no rows."""
    plan = planned(SINK)
    core = WorkerCore(plan, 0)
    core.on_table(table(plan, epoch=1), 0.0)
    feeder = Feeder(core)
    assert feeder.hello(epoch=0) == []
    assert core.counters.stale == 1
    (resume,) = feeder.hello(epoch=1)
    assert resume.next == [(0, 0)]


def test_a_worker_without_a_table_keeps_greetings_and_only_the_newest_of_each_stream() -> None:
    plan = planned(SINK)
    core = WorkerCore(plan, 0)
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
    assert (effect.message.code, core.counters.refused, core.subscriptions.held_bytes) == (code, 1, 0)


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


@pytest.mark.parametrize("edge", [-1, 1, 77])
def test_data_of_a_stream_that_does_not_exist_is_answered_by_a_reset(edge: int) -> None:
    core = worker(planned(SINK))
    message = Data(edge, 0, 7, 0, 0, 0, [], [], [], 100, ElementKind.ROWS)
    core.on_data_plane("somebody", message, [], 0.0)
    assert isinstance(Feeder(core, "somebody").answers()[0], Reset)


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
        core.on_source_ended(0, partition, 0.0)
    effects: list[Any] = []
    for tick in range(50):
        work(core)
        effects += core.poll(tick * 0.01)
    assert sorted(x for batch in kept(core, 1) for x in batch) == [0, 1, 10, 11]
    assert [type(effect.message) for effect in effects] == [TableSeen, PartitionFinished]
    assert (core.log_meter.bytes, core.subscriptions.held_bytes) == (0, 0)


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
    """Drop a primary on a worker that lives on, as a move does, also while its step waits for room in the log."""
    plan = planned(flux.stage(partitions=1)(Split), SINK, log_max_bytes=1)
    core = worker(plan, others={(1, 0): 5})
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 1, 2, 3)
    work(core)
    assert not core.replicas[0, 0].between_steps
    assert core.subscriptions.held_bytes > 0
    elsewhere = table(plan, epoch=1, others={(0, 0): 5, (1, 0): 5})
    core.on_table(elsewhere, 0.0)
    assert (core.replicas, core.subscriptions.held_bytes) == ({}, 0)


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
    """Give the worker a batch whose payload cannot be decoded, and return its answers."""
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


def test_parts_of_a_copy_are_no_larger_than_a_port_accepts() -> None:
    """Bound parts by messages: the port cut the connection, again and again, and the repair never came to its end."""
    assert worker(planned(SINK, message_max_bytes=1 << 16))._state_sender._limits.part_bytes == 1 << 16
    assert worker(planned(SINK))._state_sender._limits.part_bytes == PartLimits().part_bytes
