"""Versions of a plan: the results of changes, changes that do not fit, and shares of the log at birth."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

import pyarrow as pa
import pytest
from cloudpickle import cloudpickle as by_value

from flux.dataflow.plan import ById, EdgePlan, FromDataFrame, FromStage, Plan, StagePlan
from flux.dataflow.plan import DataFrameSourcePlan as Source
from flux.dataflow.plan_change import (
    STREAM_BYTES_MIN,
    PlanChange,
    PlanVersions,
    change_since,
    decode_change,
    encode_change,
)
from flux.errors import ProtocolError, UsageError
from flux.settings import Settings
from partitioning.table import FIRST_EPOCH, ReplicaAt, Table, change_between, changed_by

SCHEMA = pa.schema([("key", pa.int64())])
SETTINGS = Settings.of()


def stage(id_: int, edges_in: tuple[int, ...], edges_out: tuple[int, ...] = (), replicas: int = 2) -> StagePlan:
    return StagePlan(
        id_, f"Stage{id_}", 4, replicas, ("key",), object, (SCHEMA,) * len(edges_in), SCHEMA, edges_in, edges_out
    )  # type: ignore[arg-type]


def between(id_: int, origin: int, consumer: int) -> EdgePlan:
    return FromStage(id_, consumer, 0, (0,), SCHEMA, 4, 4, stage=origin)


FIRST = Plan(
    "q",
    ById([Source(0, "rows", SCHEMA)]),
    ById([stage(0, (0,), (1,)), stage(1, (1,))]),
    ById([FromDataFrame(0, 0, 0, (0,), SCHEMA, 4, 3, source=0), between(1, 0, 1)]),
    SETTINGS,
)
ADD = PlanChange(1, stages=(stage(2, (2,)),), edges=(between(2, 0, 2),))
REMOVE = PlanChange(2, removed_stages=(2,), removed_edges=(2,))


def test_a_new_stage_reads_a_running_one() -> None:
    second = ADD.applied_to(FIRST)
    assert second.version == 1
    assert second.stages[0].edges_out == (1, 2)
    assert (second.stages[2].since, second.edges[2].since) == (1, 1)
    assert (second.stages[0].since, second.edges[1].since) == (0, 0)
    assert [each.name for each in second.terminal] == ["Stage1", "Stage2"]


def test_an_id_is_never_used_again() -> None:
    third = REMOVE.applied_to(ADD.applied_to(FIRST))
    assert [(each.id, each.edges_out, each.edges_at_birth) for each in third.stages] == [(0, (1,), (1,)), (1, (), ())]
    assert third.next_ids() == (1, 3, 3)
    with pytest.raises(ValueError, match="must ascend from 3 on"):
        replace(ADD, version=3).applied_to(third)


def form(plan: Plan) -> Any:
    stages = [(each.id, each.since, each.edges_in, each.edges_out, each.edges_at_birth) for each in plan.stages]
    return plan.version, stages, [(each.id, each.since) for each in plan.edges], plan.next_ids()


@pytest.mark.parametrize("seed", range(20))
def test_one_change_leads_from_any_version_to_the_newest_one(seed: int) -> None:
    """Leave out parts that came and went. Two changes, by a version between, lead to the same plan."""
    rng, plans = random.Random(f"versions {seed}"), [FIRST]
    for version in range(1, rng.randint(2, 12)):
        plan = plans[-1]
        ends = [each for each in plan.stages if not each.edges_out and each.since]
        if ends and rng.random() < 0.45:
            gone = rng.choice(ends)
            change = PlanChange(version, removed_stages=(gone.id,), removed_edges=gone.edges_in)
        else:
            origin, (_, new, edge) = rng.choice(list(plan.stages)), plan.next_ids()
            change = PlanChange(version, stages=(stage(new, (edge,)),), edges=(between(edge, origin.id, new),))
        plans.append(change.applied_to(plan))
    newest = plans[-1]
    for plan in plans[:-1]:
        change = change_since(newest, plan.version, newest.version)
        assert {part.id for part in change.stages} <= {part.id for part in newest.stages}
        assert form(change.applied_to(plan)) == form(newest)
        middle = rng.randint(plan.version, newest.version)
        if plan.version < middle < newest.version:
            there = change_since(newest, plan.version, middle).applied_to(plan)
            assert form(change_since(newest, middle, newest.version).applied_to(there)) == form(newest)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (replace(ADD, version=2), "a change to version 2 does not fit a plan of version 0"),
        (replace(ADD, stages=()), "edge 2 does not lead"),
        (replace(ADD, edges=()), "Stage2 names edge 2"),
        (replace(ADD, edges=(between(2, 7, 2),)), "edge 2 does not lead"),
        (replace(ADD, edges=(between(2, 2, 2),)), "edge 2 leads from stage 2"),
        (replace(ADD, stages=(), edges=(between(2, 0, 1),)), "edge 2 does not lead"),
        (PlanChange(1, removed_stages=(5,)), "the plan has no stage 5"),
        (PlanChange(1, removed_stages=(1,)), "edge 1 does not lead"),
        (PlanChange(1, removed_edges=(1,)), "Stage1 names edge 1"),
    ],
)
def test_a_change_that_does_not_fit_is_named(change: PlanChange, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        change.applied_to(FIRST)


def test_the_log_of_old_streams_stays_as_it_was_and_new_streams_get_a_part_of_the_rest() -> None:
    shares = {edge.id: FIRST.log_share(edge, 3) for edge in FIRST.edges}
    left = FIRST.log_left(3)
    change = ADD.with_log_shares(FIRST, 3)
    second = change.applied_to(FIRST)
    assert {edge.id: second.log_share(edge, 3) for edge in FIRST.edges} == shares
    assert second.log_share(second.edges[2], 3) == left // 64 // 8 == second.log_share(second.edges[2], 99)
    assert second.log_left(3) == left - left // 64 // 8 * 8
    third = REMOVE.applied_to(second)
    assert {edge.id: third.log_share(edge, 3) for edge in third.edges} == shares
    assert third.log_left(3) == left


def test_streams_for_which_there_is_no_log_are_refused() -> None:
    small = replace(FIRST, settings=replace(SETTINGS, log_max_bytes=8 * STREAM_BYTES_MIN - 1))
    with pytest.raises(UsageError, match=r"8 new streams.*need 64 KB of log each, and 511 KB are left"):
        ADD.with_log_shares(small, 1)
    assert ADD.with_log_shares(small, 2).edges[0].log_bytes == STREAM_BYTES_MIN


def test_a_change_travels_with_a_code_of_the_query() -> None:
    data = encode_change(ADD, b"secret")
    assert decode_change(data, b"secret") == ADD
    for wrong in (data[:-1], data[:10], b"", data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(ProtocolError, match="without the code"):
            decode_change(wrong, b"secret")
    with pytest.raises(ProtocolError):
        decode_change(data, b"another")


class Tone(Enum):
    LOW = 1


class Base:
    shared: dict[str, int] = {}


class OfProgram(Base):
    measures: dict[str, int] = {}
    tone = Tone.LOW

    def kinds(self) -> tuple[type, type]:
        return Tone, Base


class Breaks:
    broken = True

    def __reduce__(self) -> Any:
        return _break, ()


def _break() -> str:
    if Breaks.broken:
        raise ImportError("no module named alarms")
    return "whole"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a change with a class, as ``__main__`` of a driver has it, for a process that has not seen the class."""

    def sent(*kinds: type) -> bytes:
        data = encode_change(replace(ADD, stages=(replace(ADD.stages[0], make=kinds),)), b"")  # type: ignore[arg-type]
        ids, of = by_value._DYNAMIC_CLASS_TRACKER_BY_ID, by_value._DYNAMIC_CLASS_TRACKER_BY_CLASS
        for kind in (OfProgram, Base, Tone):
            if kind in of and ids.get(of[kind]) is kind:
                del ids[of[kind]]
        return data

    for each in (OfProgram, OfProgram.kinds, Base, Tone):
        monkeypatch.setattr(each, "__module__", "__main__")
    yield sent
    for kind in (OfProgram, Base, Tone):
        by_value._DYNAMIC_CLASS_TRACKER_BY_CLASS.pop(kind, None)


def made_of(data: bytes) -> Any:
    return decode_change(data, b"").stages[0].make


def test_a_class_of_the_program_stays_as_it_is_when_it_comes_again(elsewhere: Any) -> None:
    (kind,) = made_of(elsewhere(OfProgram))
    assert kind is not OfProgram
    tone, base = kind().kinds()
    before = {each: dict(vars(each)) for each in (kind, tone, base)}
    assert (tone(1), base) == (kind.tone, kind.__base__)
    again, other = made_of(elsewhere(OfProgram, Base))
    assert (again, other) == (kind, base)
    for each, attributes in before.items():
        assert all(vars(each)[name] is value for name, value in attributes.items() if not name.startswith("__"))
    assert kind().kinds() == (tone, base)


def test_a_class_that_came_half_is_set_when_it_comes_again(elsewhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfProgram, "tone", Breaks())
    data = elsewhere(OfProgram)
    with pytest.raises(ImportError, match="alarms"):
        made_of(data)
    monkeypatch.setattr(Breaks, "broken", False)
    (kind,) = made_of(data)
    assert (kind.tone, kind.measures, kind.shared) == ("whole", {}, {})


def test_a_stage_that_cannot_be_pickled_or_is_too_long_is_refused() -> None:
    import threading

    kept = threading.Lock()
    with pytest.raises(UsageError, match="Stage2 cannot be sent"):
        encode_change(replace(ADD, stages=(replace(ADD.stages[0], make=lambda: kept),)), b"")  # type: ignore[arg-type]
    large = bytes(5 << 20)
    with pytest.raises(UsageError, match="too long"):
        encode_change(replace(ADD, stages=(replace(ADD.stages[0], make=lambda: large),)), b"")  # type: ignore[arg-type]


def test_versions_come_in_order_and_earlier_ones_are_forgotten() -> None:
    versions = PlanVersions(FIRST)
    assert not versions.take(REMOVE), "version 1 is missing"
    assert versions.take(ADD)
    assert versions.take(ADD), "it came twice"
    assert versions.take(REMOVE)
    assert [plan.version for plan in map(versions.of, range(3)) if plan] == [0, 1, 2]
    assert versions.of(3) is None
    versions.go_by(2)
    assert versions.of(1) is None
    assert versions.newest is versions.of(2)


def test_a_version_that_was_taken_back_is_passed_over() -> None:
    other = replace(ADD, version=2, base=0, stages=(replace(ADD.stages[0], name="Other"),))
    for first in ([], [ADD]):
        versions = PlanVersions(FIRST)
        assert all(map(versions.take, [*first, other]))
        assert versions.newest.stages[2].name == "Other"
        assert versions.newest.stages[0].edges_out == (1, 2)
        assert versions.of(1) is None
        assert versions.take(ADD), "it is late"
        assert versions.newest.version == 2


def test_stages_come_and_go_in_changes_of_the_table() -> None:
    one, other = (ReplicaAt(0, FIRST_EPOCH),), (ReplicaAt(1, 1),)
    tables = [
        Table(0, ((one,),), ((0,),), {0: ""}),
        Table(1, ((one,), (), (other, one)), ((0,), (0, 1)), {0: "", 1: ""}, 1, {2: 1}),
        Table(2, ((one,), (), (other, one)), ((0,), ()), {0: "", 1: ""}, 2, {2: 1}),
        Table(3, ((one,), (), ()), ((0,), ()), {0: "", 1: ""}, 3),
    ]
    for before, after in zip(tables, tables[1:], strict=False):
        assert changed_by(before, change_between(before, after)) == after
    assert tables[1].birth(2) == 1
    assert tables[1].birth(0) == FIRST_EPOCH
    assert tables[3].row(2, 0) == tables[3].row(9, 0) == ()
