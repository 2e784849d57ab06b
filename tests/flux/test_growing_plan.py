"""A plan that grows while rows flow, in virtual time: an edge begins at a step, and an edge that is removed leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import EdgePlan, FromStage, Plan
from flux.dataflow.plan_change import PlanChange, encode_change
from flux.errors import ProtocolError, UserCodeError
from flux.settings import Settings
from flux.state.replay_points import Boundary, _point
from flux.wire.control import Failure, GetPlan, PartitionFinished, PlanChanged, PlanSeen
from flux.wire.messages import Hello, OrderEntry, Orders, PartitionOrder, Press, Refuse, StepKind
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection, ToController
from flux.worker.report import stats
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table
from tests.flux.one_worker import SCHEMA, SECRET, Kept, planned, worker
from tests.flux.virtual_workers import VirtualWorkers

#: Seconds between two rows of a source's partition.
PACE_S = 0.001


class Numbered(flux.Operator):
    """An operator that gives each row again, with the count of rows before it in its partition as ``x``, and the
    partition in ``by``."""

    schema = pa.schema([("x", pa.int64()), ("by", pa.int64())])

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.count = 0

    def process(self, batch: pa.RecordBatch) -> Any:
        for _ in range(batch.num_rows):  # one batch for each row, so that steps have several
            yield pa.record_batch({"x": [self.count], "by": [self.context.partition]}, schema=self.schema)
            self.count += 1


class Got(Kept):
    """A sink that keeps its rows."""

    def process(self, batch: pa.RecordBatch) -> None:
        self.batches.append(list(zip(*(column.to_pylist() for column in batch.columns), strict=True)))


class Growing:
    """Three workers, a source of two partitions, a stage with two replicas, and a sink."""

    def __init__(self, **options: Any) -> None:
        self.rest = False

        def read(partition: int) -> Iterator[pa.RecordBatch | None]:
            sent = 0
            while True:
                if self.rest or sent * PACE_S > self.workers.clock():
                    yield None
                    continue
                yield pa.record_batch({"x": [sent * 2 + partition]}, schema=SCHEMA)
                sent += 1

        numbered = flux.stage(key="x", partitions=2, replicas=2)(Numbered)
        plan = planned(
            numbered, flux.stage(partitions=1)(Got), source=flux.source(read, SCHEMA, partitions=2), **options
        )
        self.workers = VirtualWorkers(plan, 3)
        self.plan, self.table = plan, self.workers.table

    def run(self, seconds: float) -> None:
        self.workers.run(self.workers.clock() + seconds)
        for core in self.cores:
            core.validate()

    @property
    def cores(self) -> list[WorkerCore]:
        return list(self.workers.cores)

    @property
    def now(self) -> float:
        return self.workers.clock()

    def addition(self) -> PlanChange:
        """Return another sink behind stage 0."""
        _, stage, edge = self.plan.next_ids()
        sink = next(each for each in self.plan.stages if each.id > 0)
        way = self.plan.edges[sink.edges_in[0]]
        assert isinstance(way, FromStage)
        made: EdgePlan = replace(way, id=edge, consumer=stage, log_bytes=1 << 16)
        change = PlanChange(
            self.plan.version + 1, stages=(replace(sink, id=stage, name="More", edges_in=(edge,)),), edges=(made,)
        )
        self.plan = change.applied_to(self.plan)
        return change

    def tell(self, change: PlanChange, *cores: WorkerCore) -> None:
        for core in cores or self.cores:
            core.on_plan_changed(PlanChanged(version=change.version, change=encode_change(change, SECRET)), self.now)

    def show(self, *cores: WorkerCore, **changed: Any) -> None:
        if changed:
            self.table = replace_table(self.table, **changed)
        for core in cores or self.cores:
            core.on_table(self.table, self.now)

    def add(self, *cores: WorkerCore) -> int:
        """Show a table with one more sink to these workers, and return its stage."""
        stage, epoch = self.plan.next_ids()[1] - 1, self.table.epoch + 1
        rows = (*self.table.stages, ((ReplicaAt(2, epoch),),))
        self.show(*cores, stages=rows, plan=self.plan.version, born={**self.table.born, stage: epoch})
        return stage

    def lose(self, gone: int) -> None:
        """Show a table without the first worker of a partition of stage 0."""
        stages = tuple(tuple(tuple(r for r in row if r.worker != gone) for row in rows) for rows in self.table.stages)
        self.show(stages=stages)

    def got(self, stage: int) -> dict[int, list[int]]:
        """Return the rows at a sink, by the partition of stage 0 that they come from."""
        core = self.cores[next(r.worker for r in self.table.row(stage, 0))]
        found: dict[int, list[int]] = {}
        for batch in core.replicas[stage, 0].operator.batches:  # type: ignore[attr-defined]
            for number, by in batch:
                found.setdefault(by, []).append(number)
        return found

    def ends(self) -> dict[int, int]:
        """Return the number of rows that each partition of stage 0 has given."""
        return {key[1]: r.operator.count for core in self.cores for key, r in core.replicas.items() if key[0] == 0}  # type: ignore[attr-defined]


def replace_table(table: Table, **changed: Any) -> Table:
    import msgspec

    return msgspec.structs.replace(table, epoch=table.epoch + 1, **changed)


def test_a_new_stage_gets_each_row_behind_the_step_once_and_in_order() -> None:
    query = Growing()
    query.run(0.1)
    query.tell(query.addition())
    query.run(0.02)
    assert not any(stream.edge == 2 for core in query.cores for stream in core.producers), "no table names it yet"
    before = query.ends()
    stage = query.add()
    query.run(0.1)
    query.rest = True
    query.run(0.5)
    got, ends = query.got(stage), query.ends()
    assert set(got) == {0, 1}
    for by, numbers in got.items():
        assert before[by] <= numbers[0] < ends[by]
        assert numbers == list(range(numbers[0], ends[by]))
    assert {by: len(numbers) for by, numbers in query.got(1).items()} == ends
    versions = [r.version for core in query.cores for key, r in core.replicas.items() if key[0] == 0]
    assert versions == [1] * 4


def test_the_new_edge_goes_on_with_the_same_numbers_after_a_take_over() -> None:
    query = Growing()
    query.run(0.1)
    query.tell(query.addition())
    stage = query.add()
    query.run(0.05)
    query.lose(query.table.stages[0][0][0].worker if query.table.stages[0][0][0].worker != 2 else 0)
    query.run(0.1)
    query.rest = True
    query.run(0.5)
    got, ends = query.got(stage), query.ends()
    assert set(got) == {0, 1}
    for by, numbers in got.items():
        assert numbers == list(range(numbers[0], ends[by]))


def test_a_process_that_lacks_the_plan_asks_and_follows_the_table_later() -> None:
    query = Growing()
    late, *others = query.cores[::-1]
    change = query.addition()
    query.tell(change, *others)
    query.add()
    assert late.epoch == 0
    asked = [e.message for e in late.poll(query.now) if isinstance(e, ToController)]
    assert GetPlan(node=2, version=0) in asked
    query.run(0.05)
    query.tell(change, late)
    assert late.epoch == 1
    query.rest = True
    query.run(0.5)
    for by, numbers in query.got(2).items():
        assert numbers == list(range(numbers[0], query.ends()[by]))


def test_code_that_cannot_be_loaded_is_an_answer_and_not_the_end() -> None:
    query = Growing()
    core = query.cores[0]
    change = query.addition()

    def fails() -> Any:
        raise ModuleNotFoundError("No module named 'missing'")

    query.tell(replace(change, stages=(replace(change.stages[0], make=fails),)), core)
    core.on_plan_changed(PlanChanged(version=1, change=b"nonsense" * 8), 0.0)
    seen = [e.message for e in core.poll(0.0) if isinstance(e, ToController) and isinstance(e.message, PlanSeen)]
    assert [each.version for each in seen] == [1, 1]
    assert "missing" in seen[0].error
    assert "without the code" in seen[1].error
    query.tell(replace(change, version=2, base=0), core)
    (seen,) = [e.message for e in core.poll(0.0) if isinstance(e, ToController)]
    assert seen == PlanSeen(node=0, version=2)


class Unopened(Got):
    """A sink that cannot begin."""

    def open(self, context: flux.Context) -> None:
        raise OSError("no such table")


def test_an_added_stage_that_cannot_begin_fails_alone_where_stages_may() -> None:
    query = Growing(on_failure="stage")
    query.run(0.05)
    change = query.addition()
    query.tell(replace(change, stages=(replace(change.stages[0], make=Unopened),)))
    core = query.cores[2]
    list(core.poll(query.now))
    stage = query.add()
    failures = [
        e.message for e in core.poll(query.now) if isinstance(e, ToController) and isinstance(e.message, Failure)
    ]
    assert [(each.stage, each.kind) for each in failures] == [(stage, "UserCodeError")]
    assert "partition 0: open() raised OSError: no such table" in failures[0].message
    query.run(0.1)
    gone = PlanChange(2, removed_stages=(stage,), removed_edges=(2,))
    query.plan = gone.applied_to(query.plan)
    query.tell(gone)
    query.show(stages=(*query.table.stages[:2], ()), plan=2, born={})
    query.rest = True
    query.run(0.3)
    assert (stage, 0) not in core.awaited
    assert {by: len(numbers) for by, numbers in query.got(1).items()} == query.ends(), "the other stage goes on"


def test_an_added_stage_that_cannot_begin_ends_the_query_where_any_error_does() -> None:
    query = Growing()
    change = query.addition()
    query.tell(replace(change, stages=(replace(change.stages[0], make=Unopened),)))
    with pytest.raises(UserCodeError, match="no such table"):
        query.add()


def test_a_removed_stage_leaves_nothing() -> None:
    query = Growing(log_max_bytes=6 * 4096)
    query.run(0.05)
    query.tell(query.addition())
    query.add()
    query.run(0.05)
    change = PlanChange(2, removed_stages=(2,), removed_edges=(2,))
    query.plan = change.applied_to(query.plan)
    query.tell(change)
    query.show(stages=(*query.table.stages[:2], ()), plan=2, born={})
    query.run(0.3)
    for core in query.cores:
        assert not any(2 in (stream.edge,) for stream in (*core.producers, *core.subscriptions.streams))
        assert all(key[0] != 2 for key in (*core.replicas, *core.hosted.placed, *core.awaited))
        assert not core.hosted.of_stage.get(2)
        assert 2 not in core.latencies
        assert not any(s.edge == 2 for s in core.subscriptions.credit.stages.streams)
    query.rest = True
    query.run(0.5)
    assert {by: len(numbers) for by, numbers in query.got(1).items()} == query.ends(), "the other stage goes on"


def test_a_copy_that_is_still_to_be_written_keeps_what_a_removed_edge_had() -> None:
    """Another thread writes the copy, and a table may remove an edge meanwhile: the copy named it, and had no mark of it."""
    query = Growing()
    query.run(0.05)
    query.tell(query.addition())
    query.add()
    query.run(0.05)
    replica = next(r for core in query.cores for r in core.replicas.values() if len(r.outlets) == 2)
    output, step = replica.output, replica.applied
    output.hold_back(step)
    output.state_watermark(step, 7, step)
    copied = output.state()
    kept = deepcopy(copied)
    assert [len(starts) for _, starts in copied["marks"]] == [2]
    assert [len(ends) for _, _, ends in copied["watermark"][1]] == [2]
    output.close(replica.outlets[0].edge.id)
    assert copied == kept


def test_a_replay_point_has_watermarks_for_an_edge_that_began_since() -> None:
    """Such a point goes back to a step before the edge, and has the outputs of a later one."""
    query = Growing()
    query.run(0.05)
    replica = next(r for r in query.cores[0].replicas.values() if r.key.stage == 0 and r.primary)
    output = replica.output
    output.state_watermark(replica.applied, 7, 0)
    first = Boundary(replica.applied, replica.state(), (), (0, 0))
    query.tell(query.addition())
    query.add()
    query.run(0.05)
    assert [outlet.edge.id for outlet in replica.outlets] == [1, 2]
    now = Boundary(replica.applied, replica.state(), (), (0, 0))
    point = _point(replica, first, now)
    output.adopt(point.picture.replica | {"applied": first.step})
    output.release(replica.order.committed)
    assert output.watermark == 7


@pytest.mark.parametrize("method", ["opened", "read"])
def test_an_error_of_a_reader_ends_the_stages_behind_it_alone_where_stages_may(method: str) -> None:
    def fails(partition: int) -> Iterator[pa.RecordBatch]:
        if method == "opened":
            raise OSError("no such topic")
        return broken()

    def broken() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"x": [1]}, schema=SCHEMA)
        raise OSError("no such topic")

    def reads(partition: int) -> Iterator[pa.RecordBatch]:
        while True:
            yield pa.record_batch({"x": [partition]}, schema=SCHEMA)

    def read_all(core: WorkerCore, turns: int) -> None:
        for _ in range(turns):
            core.read(True, 1.0)

    first, second = (flux.source(read, SCHEMA, 1, name) for read, name in ((fails, "first"), (reads, "second")))
    sinks = [flux.stage(name=name)(Got) for name in ("one", "two", "three")]
    flows = [sinks[0](first), sinks[1](first), sinks[2](second)]
    for on_failure in ("query", "stage"):
        plan = compile_plan(flows, replace(Settings.of(), on_failure=on_failure), lambda schema: schema, "q", SECRET)
        core = worker(plan)
        list(core.poll(0.0))
        if on_failure == "query":
            with pytest.raises(UserCodeError, match=r"first, partition 0: .*no such topic"):
                read_all(core, 20)
            continue
        read_all(core, 20)
        failures = [e.message for e in core.poll(1.0) if isinstance(e, ToController) and isinstance(e.message, Failure)]
        assert [plan.stages[each.stage].name for each in failures] == ["one", "two"]
        assert all("first, partition 0" in each.message for each in failures)
        assert [streams.failed for streams in core.sources.values()] == [True, False]
        read = core.producers[StreamId(plan.edges_of_source(1)[0].id, 0)].rows
        read_all(core, 20)
        assert core.producers[StreamId(plan.edges_of_source(1)[0].id, 0)].rows > read, "the other source is read on"


class Complaining(flux.PartitionReader):
    """A reader of which one method fails."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _call(self, method: str, answer: Any) -> Any:
        if method == self._method:
            raise OSError("no such topic")
        return answer

    def next(self) -> Any:
        return None

    def pauses(self) -> int:
        return int(self._call("pauses", 1))

    def lag(self) -> tuple[int, int]:
        return self._call("lag", (1, 2))  # type: ignore[no-any-return]

    def bad_records(self) -> int:
        return int(self._call("bad_records", 3))


class Complaint(flux.SourceReader):
    """A source of ``Complaining`` readers."""

    schema, partitions, positions = SCHEMA, 1, False

    def __init__(self, method: str = "") -> None:
        self._method = method

    def read(self, partition: int, start: Any) -> flux.PartitionReader:
        return Complaining(self._method)


@pytest.mark.parametrize("method", ["pauses", "lag", "bad_records"])
@pytest.mark.parametrize("on_failure", ["query", "stage"])
def test_an_error_of_the_counts_of_a_reader_is_one_of_the_stages_behind_it(method: str, on_failure: str) -> None:
    first, second = flux.source(Complaint(method), name="first"), flux.source(Complaint(), name="second")
    sinks = [flux.stage(name=name)(Got) for name in ("one", "two", "three")]
    flows = [sinks[0](first), sinks[1](first), sinks[2](second)]
    plan = compile_plan(flows, replace(Settings.of(), on_failure=on_failure), lambda schema: schema, "q", SECRET)
    core = worker(plan)
    list(core.poll(0.0))

    def look() -> Any:
        for turn in range(8):
            core.read(True, 1.0 + turn)
        return stats(core)

    if on_failure == "query":
        with pytest.raises(UserCodeError, match=r"first, partition 0: .*no such topic"):
            look()
        return
    look()
    failures = [e.message for e in core.poll(9.0) if isinstance(e, ToController) and isinstance(e.message, Failure)]
    assert [plan.stages[each.stage].name for each in failures] == ["one", "two"]
    assert all("first, partition 0" in each.message for each in failures)
    said = stats(core)
    assert [(each.source, each.records) for each in said["bad_records"]] == [(1, 3)], "the other reader is asked on"
    assert [each.source for each in said["lags"]] == [1]


def test_a_removed_source_closes_its_reader_and_the_others_go_on() -> None:
    closed: list[int] = []

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        try:
            while True:
                yield pa.record_batch({"x": [partition]}, schema=SCHEMA)
        finally:
            closed.append(partition)

    kept = flux.stage(partitions=1)(Got)
    flows = [kept(flux.source(read, SCHEMA, partitions=2, name=name)) for name in ("first", "second")]
    plan = compile_plan(flows, Settings.of(), lambda schema: schema, "q", SECRET)
    core = worker(plan)
    list(core.poll(0.0))
    for turn in range(20):
        core.read(True, turn * 0.001)
    assert len(core.reading.open) == 4
    removed = {part: (getattr(plan, part)[1].id,) for part in ("sources", "stages", "edges")}
    change = PlanChange(1, **{f"removed_{part}": ids for part, ids in removed.items()})
    core.on_plan_changed(PlanChanged(version=1, change=encode_change(change, SECRET)), 0.0)
    assert core.table is not None
    before = core.table
    core.on_table(replace_table(before, stages=(before.stages[0], ()), sources=(before.sources[0], ()), plan=1), 0.0)
    core.validate()
    assert sorted(closed) == [0, 1], "both partitions of the second source"
    assert {key.source for key in core.sources} == {0}
    assert stats(core)
    assert core.reading.due(1.0) == 1.0, "the first source is still read"


def test_a_late_word_about_a_removed_edge_is_stale_and_no_attack() -> None:
    query = Growing()
    query.tell(query.addition())
    query.add()
    change = PlanChange(2, removed_stages=(2,), removed_edges=(2,))
    query.tell(change)
    query.show(stages=(*query.table.stages[:2], ()), plan=2, born={})
    core = query.cores[2]
    stale = core.counters.stale
    core.on_data_plane(0, Hello(2, 0, 0, 1, 0), [], 0.0)
    core.on_data_plane(0, Press(2, 0, [0]), [], 0.0)
    assert core.counters.stale == stale + 2
    assert core.counters.refused == 0
    core.on_data_plane(0, Hello(3, 0, 0, 1, 0), [], 0.0)
    refused = [e.message for e in core.poll(0.0) if isinstance(e, ToConnection) and isinstance(e.message, Refuse)]
    assert [(each.edge, each.code) for each in refused] == [(3, "edge")]


@pytest.mark.parametrize(
    "entry",
    [
        OrderEntry(1.0, 1.0, [], StepKind.CHANGE),
        OrderEntry(1.0, 1.0, [], StepKind.TICK, version=1),
        OrderEntry(1.0, 1.0, [(0, 0, 1)], StepKind.CHANGE, version=1),
    ],
)
def test_a_step_with_a_version_that_does_not_fit_is_refused(entry: OrderEntry) -> None:
    core = worker(planned(flux.stage(partitions=1)(Kept)))
    with pytest.raises(ProtocolError, match="version"):
        core.on_data_plane("other", Orders([PartitionOrder(0, 0, 0, 1, 0, [entry], 0)]), [], 0.0)


def test_a_finished_partition_ends_a_new_edge_where_it_begins() -> None:
    from tests.flux.one_worker import Feeder, work

    plan: Plan = planned(flux.stage(partitions=1)(Numbered), flux.stage(partitions=1)(Got))
    core = worker(plan)
    core.on_edge_complete(0, [0])
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 1)
    feeder.send(1, last=True)
    work(core)
    list(core.poll(0.0))
    work(core)
    assert core.replicas[0, 0].finished
    way, sink = plan.edges[1], plan.stages[1]
    change = PlanChange(
        1,
        stages=(replace(sink, id=2, name="More", edges_in=(2,)),),
        edges=(replace(way, id=2, consumer=2, log_bytes=999),),
    )
    core.on_plan_changed(PlanChanged(version=1, change=encode_change(change, SECRET)), 0.0)
    one = ((ReplicaAt(0, 0),),)
    core.on_table(Table(1, (one, one, ((ReplicaAt(0, 1),),)), ((),), {0: ""}, 1, {2: 1}), 0.0)
    for _ in range(4):
        work(core)
        list(core.poll(1.0))
        core.validate()
    assert core.producers[StreamId(2, 0)].drained
    assert core.replicas[2, 0].finished


def test_a_finished_partition_that_becomes_a_last_one_is_reported() -> None:
    """Report the partition once more: the query would wait for this report for ever."""
    from tests.flux.one_worker import Feeder, work

    core = worker(planned(flux.stage(partitions=1)(Numbered), flux.stage(partitions=1)(Got)))
    core.on_edge_complete(0, [0])
    feeder = Feeder(core)
    feeder.hello()
    feeder.send(0, 1)
    feeder.send(1, last=True)
    effects: list[Any] = []
    for _ in range(4):
        work(core)
        effects += core.poll(0.0)
    assert core.replicas[0, 0].complete
    change = PlanChange(1, removed_stages=(1,), removed_edges=(1,))
    core.on_plan_changed(PlanChanged(version=1, change=encode_change(change, SECRET)), 0.0)
    core.on_table(Table(1, (((ReplicaAt(0, 0),),), ()), ((),), {0: ""}, 1), 0.0)
    ended = [each.message for each in (*effects, *core.poll(1.0)) if isinstance(each, ToController)]
    assert [each.stage for each in ended if isinstance(each, PartitionFinished)] == [1, 0]
