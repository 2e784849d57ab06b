"""Reports of a worker about its load, and its work when another worker reads its sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import ById
from flux.dataflow.source import WorkerSource
from flux.errors import UserCodeError
from flux.operators.collect import Collect
from flux.operators.operator import Context
from flux.settings import Settings
from flux.state.standby import Checkpoint
from flux.wire.codec import decode_report
from flux.wire.control import Heartbeat, TableSeen
from flux.wire.frames import encode
from flux.wire.messages import OrderEntry, PartitionOrder
from flux.worker.core import WorkerCore
from flux.worker.effects import ToController
from flux.worker.report import STAGES_TOLD, StageTurns
from flux.worker.report import load as load_of
from flux.worker.report import stats as stats_of
from partitioning.ids import ACTIVE, DISK, STANDBY, StreamId
from partitioning.table import ReplicaAt, Table

SCHEMA = pa.schema([("x", pa.int64())])


class Sized(flux.Operator):
    """A sink that says how large it is."""

    size = 0

    def process(self, batch: pa.RecordBatch) -> None:
        self.size += 8 * batch.num_rows

    def state_bytes(self) -> int:
        if self.size > 1000:
            raise KeyError("too much")
        return self.size


class Unsized(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...

    def snapshot(self) -> bytes:
        return b"x" * 500

    def restore(self, snapshot: bytes) -> None: ...


def hosting(operator: Any, seeks: bool = False) -> WorkerCore:
    """Make a worker with one partition of a stage and the two partitions of its source."""
    read = (lambda partition, start: iter(())) if seeks else (lambda partition: iter(()))
    source = WorkerSource("rows", read, 2, SCHEMA, seeks)
    flow = flux.stage(partitions=1, key="x")(operator)(source)
    plan = compile_plan([flow], replace(Settings.of()), lambda schema: schema, "q", b"s")
    core = WorkerCore(plan, 0, clock=iter(range(1000)).__next__)
    core.on_table(Table(0, (((ReplicaAt(0, 0),),),), ((0, 0),), {0: "", 1: ""}), 0.0)
    return core


def read(core: WorkerCore, partition: int, *values: int) -> None:
    core.on_source(0, partition, pa.record_batch({"x": pa.array(values, pa.int64())}), 0.0)
    for _ in range(4):
        list(core.poll(0.0))
        while core.work(0.0):
            pass


def test_rows_that_a_replica_has_applied_elsewhere_are_not_counted_here() -> None:
    """Leave such rows out. The count of a replica travels with its state: after a move a worker seemed to do several
    times the work of all workers together."""
    core = hosting(Sized)
    read(core, 0, 1, 2, 3)
    core.replicas[0, 0].rows_in += 1_000_000  # as a copy of state brings it
    read(core, 1, 4)
    assert stats_of(core)["rows_in"] == 4


def test_load_is_counts_of_each_replica_since_it_came_to_life() -> None:
    core = hosting(Sized)
    read(core, 0, 1, 2, 3)
    read(core, 1, 4)
    load = load_of(core, 7.5)
    assert load["at"] == 7.5
    # stage, partition, incarnation, busy seconds, rows, slices, queued, bytes of state
    assert [tuple(each) for each in load["replicas"]] == [(0, 0, 0, 2.0, 4, 2, 0, 32)]


def test_load_fits_into_a_message() -> None:
    core = hosting(Sized)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(load_of(core, 1.0)))["replicas"]


def test_an_operator_that_does_not_say_how_large_it_is_counts_as_its_last_copy() -> None:
    core = hosting(Unsized)
    replica = core.replicas[0, 0]
    assert replica.state_bytes == 0
    replica.copy_bytes = 640
    assert load_of(core, 0.0)["replicas"][0][-1] == 640


@pytest.mark.parametrize(("said", "reported"), [(1.5, 1), (-7, 0), (np.int64(8), 8), (None, 0)])
def test_whatever_number_an_operator_says_its_worker_can_report(said: Any, reported: int) -> None:
    core = hosting(Unsized)
    core.replicas[0, 0].operator.state_bytes = lambda: said  # type: ignore[method-assign]
    load = load_of(core, 0.0)
    heartbeat = decode_report(encode(Heartbeat(node=0, progress=1, stats={"load": load})))
    assert isinstance(heartbeat, Heartbeat)
    assert heartbeat.stats["load"]["replicas"][0].state_bytes == reported


def test_an_error_in_state_bytes_names_the_partition_like_any_other() -> None:
    core = hosting(Sized)
    read(core, 0, *range(200))
    with pytest.raises(UserCodeError, match=r"stage Sized, partition 0: state_bytes\(\) raised KeyError"):
        load_of(core, 0.0)


def test_collected_output_is_as_large_as_it_will_be_fetched() -> None:
    made = Collect(1 << 20)
    made.open(Context("c", schemas=(SCHEMA,)))
    assert made.state_bytes() == 0
    made.process(pa.record_batch({"x": pa.array(range(1000))}))
    growing = made.state_bytes()
    made.finish()
    assert 8000 < growing < made.state_bytes() == len(made.snapshot()["data"])
    made.close()


# ---- sources


def test_what_was_read_of_each_partition_is_in_every_heartbeat() -> None:
    core = hosting(Sized)
    read(core, 0, 1, 2, 3)
    read(core, 0, 4)
    read(core, 1, 5)
    # source, partition, first batch, batches, rows
    assert stats_of(core)["sources"] == [(0, 0, 0, 2, 4), (0, 1, 0, 1, 1)]


def test_a_source_that_has_not_been_placed_yet_has_nothing_to_count_from() -> None:
    core = hosting(Sized, seeks=True)
    core.on_table(Table(1, core.table.stages, ((0, 1),), {0: "", 1: ""}), 0.0)
    core.on_table(Table(2, core.table.stages, ((0, 0),), {0: "", 1: ""}), 0.0)
    assert [key for _, key, *_ in stats_of(core)["sources"]] == [0]


def test_a_partition_that_another_worker_reads_by_now_is_let_go_with_all_that_is_in_its_log() -> None:
    core = hosting(Sized)
    list(core.poll(0.0))  # it answers its own greetings
    core.on_source(0, 1, pa.record_batch({"x": pa.array([1], pa.int64())}), 0.0)
    assert core.log_meter.bytes > 0
    assert core.wants(0, 1)
    core.on_table(Table(1, core.table.stages, ((0, 1),), {0: "", 1: ""}), 0.0)
    assert not core.wants(0, 1)
    assert core.wants(0, 0)
    assert list(core.sources) == [(0, 0)]
    assert StreamId(0, 1) not in core.producers
    assert core.log_meter.bytes == 0


def test_it_may_come_back_and_begins_as_another_life() -> None:
    core = hosting(Sized)
    for epoch, reader in ((1, 1), (2, 0)):
        core.on_table(Table(epoch, core.table.stages, ((0, reader),), {0: "", 1: ""}), 0.0)
    assert core.producers[StreamId(0, 1)].incarnation == 2
    list(core.poll(0.0))
    assert core.wants(0, 1)


# ---- protection of a stage, and the cost of a loss


def protected(kind: str, worker: int = 0) -> WorkerCore:
    """Make one of two workers: worker 0 has the primary, worker 1 another replica of this kind."""
    plan = hosting(Sized).plan
    core = WorkerCore(plan, worker, clock=iter(range(1000)).__next__)
    replicas = (ReplicaAt(0, 0), ReplicaAt(1, 0, kind=kind))
    core.on_table(Table(0, ((replicas,),), ((0, 0),), {0: "", 1: ""}), 0.0)
    return core


@pytest.mark.parametrize(("kind", "costs"), [(STANDBY, "replay_s"), (DISK, "vault_replay_s"), (ACTIVE, "")])
def test_what_would_be_repeated_is_told_by_the_kind_of_who_would_repeat_it(kind: str, costs: str) -> None:
    core = protected(kind)
    core.replicas[0, 0].order.on_seen(1, 0, 0, 0)  # it has answered, and has nothing
    read(core, 0, 1, 2, 3)
    (stage,) = stats_of(core)["stages"]
    assert {name: stage[name] > 0 for name in ("replay_s", "vault_replay_s")} == {
        "replay_s": costs == "replay_s", "vault_replay_s": costs == "vault_replay_s",
    }  # fmt: skip


def test_rows_in_logs_are_told_by_the_stage_that_is_to_get_them() -> None:
    core = protected(STANDBY)
    assert stats_of(core)["stages"][0]["kept_bytes"] == 0
    read(core, 0, 1, 2, 3)
    assert stats_of(core)["stages"][0]["kept_bytes"] == core.log_meter.bytes > 0


def test_each_checkpoint_is_told_with_its_size_and_what_it_lacks() -> None:
    core = protected(STANDBY, worker=1)
    assert stats_of(core)["stages"][0]["checkpoints"] == [(0, 0, 0.0)]
    core.followers[0, 0].on_orders(
        PartitionOrder(0, 0, 0, 1, 0, [OrderEntry(1.0, 1.0, []), OrderEntry(3.5, 3.5, [])], 2)
    )
    core.followers[0, 0].take(Checkpoint(step=1, data=memoryview(b"state"), term=1, number=0, at=1.0))
    assert stats_of(core)["stages"][0]["checkpoints"] == [(0, 5, 2.5)]


def test_each_heartbeat_tells_of_some_stages_and_all_have_their_turn() -> None:
    """Tell of some stages in each heartbeat: figures of 300 stages kept a worker for several milliseconds, ten times a
    second."""
    core, turns = hosting(Sized), StageTurns()
    (stage,) = core.plan.stages
    many = ById(replace(stage, id=number) for number in range(0, 4 * STAGES_TOLD, 2))
    ids = [[each.id for each in turns.next(many)] for _ in range(4)]
    assert ids == [[*range(0, 64, 2)], [*range(64, 128, 2)], [*range(0, 64, 2)], [*range(64, 128, 2)]]
    fewer = ById(each for each in many if each.id % 4 == 0 or each.id > 100)
    seen = {each.id for _ in range(2) for each in turns.next(fewer)}
    assert seen == {each.id for each in fewer}
    assert [*turns.next(core.plan.stages)] == [stage]
    assert [each["stage"] for each in stats_of(core, [stage])["stages"]] == [stage.id]


def test_the_report_that_a_table_is_followed_need_not_wait_for_rows_and_acks() -> None:
    """Report the table first: with many stages rows and acks took longer, and a change of the plan waited for the
    report."""
    core = hosting(Sized)
    (report,) = core.reports()
    assert report.message == TableSeen(node=0, epoch=0)
    left = list(core.poll(0.0))
    assert not any(isinstance(effect, ToController) for effect in left)
    assert core.reports() == []
