"""Turns on a worker that has more to do than it can: partitions, stages, and its sources."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.settings import Settings
from flux.worker.core import WorkerCore
from flux.worker.pacing import BATCHES, READ_MAX_S, READ_S, STARVED_S, ReadTurn
from flux.worker.step_scheduler import STEPS_IN_TURN
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table

SCHEMA = pa.schema([("x", pa.int64())])
#: One step of an operator that takes long.
SLOW_S = 0.04


class Passed(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch


class Sink(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


def overloaded(batches: int, behind: int = 0) -> WorkerCore:
    """Make a worker with three partitions of a stage, and one partition of the stage behind it. ``batches`` steps wait
    for each of the three, and ``behind`` steps for the one behind them."""
    source = flux.source(lambda p: iter(()), SCHEMA, 1, "rows")
    flow = flux.stage(partitions=1)(Sink)(flux.stage(partitions=3)(Passed)(source))
    plan = compile_plan([flow], Settings.of(step_max_rows=1), lambda schema: schema, "q", b"s")
    core = WorkerCore(plan, 0)
    stages = tuple((ReplicaAt(0, 0),) for _ in range(3)), ((ReplicaAt(0, 0),),)
    core.on_table(Table(0, stages, ((0,),), {0: ""}), 0.0)
    list(core.poll(0.0))
    fed = 0
    while fed < 3 * batches + behind:  # one after the other, to each partition in rotation
        core.on_source(0, 0, pa.record_batch({"x": pa.array([fed], pa.int64())}), 0.0)
        fed += 1
    list(core.poll(0.0))
    for _ in range(behind):
        assert core.work(0.0)
    list(core.poll(0.0))
    return core


def applied(core: WorkerCore, now: float) -> tuple[int, int]:
    """Apply the next step, and return its stage and partition."""
    before = {key: replica.applied for key, replica in core.replicas.items()}
    assert core.work(now)
    (key,) = [key for key, replica in core.replicas.items() if replica.applied != before[key]]
    return key


def test_a_partition_applies_several_quick_steps_before_the_next_one_has_its_turn() -> None:
    core = overloaded(2 * STEPS_IN_TURN)
    turns = [applied(core, 0.0)[1] for _ in range(3 * STEPS_IN_TURN)]
    assert sorted(set(turns)) == [0, 1, 2]
    assert all(turns[n] == turns[n - n % STEPS_IN_TURN] for n in range(len(turns)))


def test_a_partition_whose_steps_take_long_gives_way_after_each() -> None:
    core = overloaded(4)
    turns = [applied(core, step * SLOW_S)[1] for step in range(6)]
    assert turns[:3] == turns[3:]
    assert sorted(turns[:3]) == [0, 1, 2]


def test_the_stage_behind_has_every_other_turn_however_many_partitions_keep_the_first_one_busy() -> None:
    """Give the stage behind these turns, because rows of all workers go through it."""
    core = overloaded(8, behind=6)
    stages = [applied(core, 1.0 + step * SLOW_S)[0] for step in range(12)]
    assert stages.count(1) == 6
    assert all(one != next_ for one, next_ in zip(stages, stages[1:], strict=False))


class Closes(flux.Operator):
    """An operator that gives a million rows in one step, as a large window does that ends, and few in others."""

    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for _ in range(16 if batch.column("x")[0].as_py() == 0 else 1):
            yield pa.RecordBatch.from_arrays([pa.nulls(1 << 16, pa.int64())], schema=SCHEMA)


def test_a_step_with_much_output_lets_other_partitions_go_first() -> None:
    source = flux.source(lambda p: iter(()), SCHEMA, 1, "rows")
    flow = flux.stage(partitions=1)(Sink)(flux.stage(partitions=2)(Closes)(source))
    core = WorkerCore(compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"s"), 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0),),) * 2, ((ReplicaAt(0, 0),),)), ((0,),), {0: ""}), 0.0)
    list(core.poll(0.0))
    for number in range(2):  # one for each partition
        core.on_source(0, 0, pa.record_batch({"x": pa.array([number], pa.int64())}), 0.0)
    list(core.poll(0.0))
    first, other = (core.replicas[PartitionKey(0, partition)] for partition in (0, 1))
    now, given = 0.0, []
    while not (first.applied and other.applied):
        now += SLOW_S
        assert core.work(now)
        list(core.poll(now))
        given.append((first.under_way is not None, other.applied))
    assert (True, 1) in given, "the other was applied in the middle of the long step"
    assert first.output.rows == 1 << 20


def test_who_has_nothing_to_do_takes_no_turn() -> None:
    core = overloaded(1)
    assert sorted(applied(core, step * SLOW_S) for step in range(3)) == [(0, 0), (0, 1), (0, 2)]
    assert not core.work(9.0), "what they gave has not been delivered yet"
    list(core.poll(9.0))
    assert [applied(core, 9.0) for _ in range(3)] == [(1, 0)] * 3
    assert not core.work(9.0)


# ---- sources


def batches_read(turn: ReadTurn, start: float, each_s: float) -> int:
    """Return the number of batches that a turn which has begun reads, if each takes ``each_s``."""
    batches = 0
    while turn.goes_on(batches, start + batches * each_s):
        batches += 1
    return batches


def test_what_has_come_is_applied_before_more_is_read() -> None:
    turn = ReadTurn()
    assert turn.begins(idle=True, now=10.0)
    assert not turn.begins(idle=False, now=10.0 + STARVED_S / 2)
    assert turn.begins(idle=True, now=10.0 + STARVED_S / 2)


@pytest.mark.parametrize("step_s", [0.0001, 0.002, 0.04])
def test_sources_are_read_at_most_one_step_late_however_much_there_is_to_apply(step_s: float) -> None:
    turn = ReadTurn()
    assert turn.begins(idle=True, now=10.0)
    read = [10.0]
    for step in range(1, round(2 / step_s)):
        if turn.begins(idle=False, now=10.0 + step * step_s):
            read.append(10.0 + step * step_s)
    assert len(read) > 4
    waits = [later - sooner for sooner, later in zip(read, read[1:], strict=False)]
    assert max(waits) <= STARVED_S + step_s + 1e-9


def test_several_large_batches_are_read_when_there_is_nothing_else_to_do_and_one_when_there_is() -> None:
    turn = ReadTurn()
    assert turn.begins(idle=True, now=10.0)
    assert batches_read(turn, 10.0, each_s=2 * READ_S) == BATCHES
    assert turn.begins(idle=False, now=11.0)
    assert batches_read(turn, 11.0, each_s=2 * READ_S) == 1


def test_small_batches_are_read_for_a_while_however_many_they_are() -> None:
    """Read for a while: one batch for each slow step would be too few for a source that has a hundred a second."""
    turn = ReadTurn()
    assert turn.begins(idle=False, now=11.0)
    assert batches_read(turn, 11.0, each_s=READ_S / 16) == pytest.approx(16, abs=1)


def test_who_is_behind_with_small_batches_reads_for_longer_each_time_but_for_half_of_the_time_at_most() -> None:
    turn = ReadTurn()
    now, took = 10.0, []
    for _ in range(8):
        assert turn.begins(idle=False, now=now)
        batches = batches_read(turn, now, each_s=READ_S / 8)
        took.append(batches * READ_S / 8)
        turn.ended(behind=True)
        assert not turn.begins(idle=False, now=now + took[-1] + READ_S / 8)
        now += max(STARVED_S, 2 * took[-1] + READ_S)
    assert took == pytest.approx([READ_S, 2 * READ_S, 4 * READ_S] + [READ_MAX_S] * 5, abs=READ_S / 8)
    turn.ended(behind=False)
    assert turn.begins(idle=True, now=now)
    assert batches_read(turn, now, each_s=READ_S / 8) == pytest.approx(8, abs=1), "it has caught up"
