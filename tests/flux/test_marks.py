"""What a consumer keeps of a source's stream for whoever reads it again: few marks, and the right ones."""

from __future__ import annotations

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.errors import NonDeterministicInputError
from flux.exchange.marks import MARKS_MAX, Marks
from flux.exchange.producer import ToWorker
from flux.settings import Settings
from flux.wire.messages import Mark
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection
from partitioning.table import ReplicaAt, Table


def received(sequences: int, behind: int, every: int = 1) -> Marks:
    """After ``sequences`` batches, each applied ``behind`` batches after it came."""
    marks = Marks()
    for sequence in range(0, sequences, every):
        marks.newest = Mark(sequence, 1000 + sequence)
        if sequence >= marks.due:
            marks.keep(lambda sequence=sequence: sequence - behind)  # type: ignore[misc]
    return marks


def newest_below(marks: Marks, applied: int) -> int:
    return max(mark.sequence for mark in marks.shown() if mark.sequence < applied)


@pytest.mark.parametrize("behind", [0, 1, 5, 100, 5000, 60_000])
def test_few_marks_are_kept_and_one_is_not_far_below_what_is_applied(behind: int) -> None:
    for sequences in (behind + 100, 2 * behind + 100, 10 * behind + 100):
        marks = received(sequences, behind)
        assert len(marks.shown()) <= MARKS_MAX + 1
        applied = sequences - 1 - behind
        assert applied - newest_below(marks, applied) <= max(behind / 4, 4)


def test_the_newest_received_is_always_shown() -> None:
    for sequences in range(1, 200):
        assert received(sequences, 150).shown()[-1] == Mark(sequences - 1, 999 + sequences)


def test_marks_of_another_consumer_are_added_by_sequence() -> None:
    marks = received(3, 0)
    marks.merge([Mark(1, 1001), Mark(7, 1007)])
    assert marks.shown() == [Mark(0, 1000), Mark(1, 1001), Mark(2, 1002), Mark(7, 1007)]


def test_a_replica_that_begins_behind_all_marks_is_no_fault_of_theirs() -> None:
    marks = received(100, 0)
    with pytest.raises(AssertionError, match="no mark is below 0"):
        marks.validate(0)
    marks.come_from_behind()
    marks.validate(0)


# ---- the whole way: one worker reads a source, two others have long queues, and the reader is lost


SCHEMA = pa.schema([("x", pa.int64())])
QUEUE = 5000


class Sink(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


class Workers:
    """Worker 0 reads; the copies on workers 1 and 2 apply what comes, each in its own order."""

    def __init__(self) -> None:
        source = flux.source(lambda partition, start: iter(()), SCHEMA, 1, "numbers")
        flow = flux.stage(partitions=1, replicas=2)(Sink)(source)
        settings = Settings.of(
            step_max_rows=1, replicas_ordered=False, log_max_bytes="1g", source_log_bytes="1g", credit_max_bytes="4g"
        )
        plan = compile_plan([flow], settings, lambda schema: schema, "q", b"s")
        self.now = 0.0
        self.cores = {node: WorkerCore(plan, node) for node in (0, 1, 2)}
        self.tell(0, reader=0)

    def tell(self, epoch: int, reader: int) -> None:
        table = Table(epoch, (((ReplicaAt(1, 0), ReplicaAt(2, 0)),),), ((reader,),), dict.fromkeys(self.cores, ""))
        for core in self.cores.values():
            core.on_table(table, self.now)
        self.deliver()

    def deliver(self) -> None:
        self.now += 0.01
        busy = True
        while busy:
            busy = False
            for core in self.cores.values():
                for effect in core.poll(self.now):
                    if isinstance(effect, ToWorker) and effect.worker in self.cores:
                        busy = True
                        to = self.cores[effect.worker]
                        to.on_data_plane(core.worker, effect.message, effect.batches, self.now)
                    elif isinstance(effect, ToConnection) and effect.connection in self.cores:
                        busy = True
                        self.cores[effect.connection].on_answer(core.worker, effect.message, self.now)

    def read(self, reader: int, first: int, last: int, applies: tuple[int, ...] = (), changed: int = -1) -> None:
        for number in range(first, last):
            assert self.cores[reader].wants(0, 0)
            batch = pa.record_batch([[number + (number == changed)]], schema=SCHEMA)
            self.cores[reader].on_source(0, 0, batch, self.now)
            for node in applies:
                self.cores[node].work(self.now)
            if number % 50 == 49:
                self.deliver()
        self.deliver()


@pytest.fixture(scope="module")
def after_the_loss() -> Workers:
    workers = Workers()
    workers.read(0, 0, QUEUE)
    workers.read(0, QUEUE, 2 * QUEUE, applies=(1, 2, 2))
    assert len(workers.cores[1].replicas[0, 0].waits) == QUEUE
    del workers.cores[0]
    workers.tell(1, reader=1)
    return workers


def test_a_source_is_read_again_from_the_middle_though_thousands_of_batches_wait(after_the_loss: Workers) -> None:
    assert after_the_loss.cores[1].wants(0, 0)
    start = after_the_loss.cores[1].sources[0, 0].position
    assert 0.8 * QUEUE < start <= QUEUE


def test_the_second_reading_is_compared_from_its_first_batch_on(after_the_loss: Workers) -> None:
    start = after_the_loss.cores[1].sources[0, 0].position
    with pytest.raises(NonDeterministicInputError):
        after_the_loss.read(1, start, 2 * QUEUE, changed=start)
