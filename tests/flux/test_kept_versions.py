"""Versions of a plan in a checkpoint location: written as a whole, given up at a start, begun anew after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.course.plan_requests import BirthsToKeep, LocationOrder, VersionToKeep
from controller.course.removals import removal
from controller.planning.additions import compiled_addition
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.compiler import compiled_plan
from controller.planning.steps import Resolvers
from flux.dataflow.plan import Plan
from flux.errors import UsageError
from flux.settings import Settings
from flux.wire.control import EdgeStored
from flux.wire.messages import Mark

location = pytest.importorskip("spark_integration.query.checkpoint_location")
regrown = pytest.importorskip("spark_integration.growing.regrown")
keeping = pytest.importorskip("spark_integration.growing.plan_keeper")

ROWS = pa.schema([("k", pa.int64()), ("x", pa.int64())])
FOUND = Resolvers(lambda schema: schema)
SETTINGS = Settings.of()
#: Seconds that a thread of a test may take.
LIMIT_S = 20.0


class Lost(BaseException):
    """The process is gone."""


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Shown(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: Any) -> None: ...

    def prepare(self, partitions: int, kept: Any) -> Any:
        return {"id": 1}


def ticks(partition: int) -> Iterator[pa.RecordBatch]:
    return iter(())


def stage(name: str, given: Any) -> Any:
    return flux.stage(name=name, partitions=2)(same)(given)


class Program:
    """Delays of flights, an alarm behind them, and the alarm's reader."""

    def __init__(self) -> None:
        self.delays = stage("Delays", flux.source(ticks, ROWS, 2, "flights"))
        self.alarm = stage("Alarm", self.delays)
        self.page = stage("Page", self.alarm)
        #: A second consumer of the source, if there is one.
        self.other: Any = None

    def start(self, *names: str) -> list[Any]:
        return [getattr(self, name).to(Shown()) for name in names]


def durable(plan: Plan) -> Plan:
    return replace(plan, durable=True, began_with=3)


def begun(place: Path) -> tuple[CompiledPlan, Any]:
    made = compiled_plan(Program().start("delays"), SETTINGS, FOUND, "q", b"s")
    made = made.with_plan(durable(made.plan))
    return made, location.CheckpointLocation.open(place).take(
        made.plan, {"sources": {}, "sinks": {"Delays": {"id": 0}}}
    )


def added(live: CompiledPlan, *names: str) -> CompiledPlan:
    """Add stages behind each other, the last with a sink."""
    flow: Any = live.stage("Delays", lambda: live)
    for name in names:
        flow = stage(name, flow)
    return compiled_addition([flow.to(Shown())], live, FOUND).with_log_shares(3).made


def again(found: Any, *names: str) -> Plan:
    """Start the program on a location, as far as the plan goes."""
    compiled, taken = regrown.compiled_again(Program().start(*names), found, SETTINGS, b"s", FOUND, 0, 3)
    plan = durable(compiled.plan)
    taken.check(plan)
    taken.take(plan, {"sources": {}, "sinks": {}})
    return plan


def crashing_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the process at the call of this number to the operating system that a write makes."""
    calls = iter(range(1000))

    def lost(whole: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            if next(calls) == number:
                raise Lost
            return whole(*given, **options)

        return call

    for module, name in ((os, "open"), (os, "fsync"), (os, "rename"), (Path, "rename")):
        monkeypatch.setattr(module, name, lost(getattr(module, name)))


@pytest.mark.parametrize("number", range(12))
def test_a_version_is_there_or_not_wherever_the_process_is_lost(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, found = begun(tmp_path)
    grown = added(live, "Alarm")
    with monkeypatch.context() as patch, contextlib.suppress(Lost):
        crashing_at(number, patch)
        found.keep(grown.plan, {"sinks": {"Alarm": {"id": 1}}})
    left = location.CheckpointLocation.open(tmp_path)
    if left.has_grown:
        plan = again(left, "delays", "alarm")
        assert [each.name for each in plan.stages] == ["Delays", "Alarm"]
        assert left.kept["sinks"] == {"Delays": {"id": 0}, "Alarm": {"id": 1}}
    else:
        left.take(live.plan)
        assert left.kept["sinks"] == {"Delays": {"id": 0}}
        left = location.CheckpointLocation.open(tmp_path)
        assert left.keep(grown.plan, {}).has_grown, "it can be added once more"


def test_the_crash_comes_on_both_sides_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = []
    for number in range(12):
        live, found = begun(tmp_path / str(number))
        with monkeypatch.context() as patch, contextlib.suppress(Lost):
            crashing_at(number, patch)
            found.keep(added(live, "Alarm").plan, {})
        grown.append(location.CheckpointLocation.open(tmp_path / str(number)).has_grown)
    assert grown == sorted(grown)
    assert len({*grown}) == 2


def test_a_version_that_is_taken_back_leaves_the_one_before(tmp_path: Path) -> None:
    live, found = begun(tmp_path)
    before = json.loads((tmp_path / "flux.json").read_text())
    facts = {"sinks": {"Alarm": {"id": 1}}}
    found.keep(added(live, "Alarm").plan, facts).keep(live.plan, facts)
    assert json.loads((tmp_path / "flux.json").read_text()) == before


def test_facts_of_a_removed_stage_go_with_it(tmp_path: Path) -> None:
    live, found = begun(tmp_path)
    grown = added(live, "Alarm")
    found = found.keep(grown.plan, {"sinks": {"Alarm": {"id": 1}}})
    found = found.keep(removal(grown.plan, 2, "Alarm", False).applied_to(grown.plan), {})
    assert found.kept["sinks"] == {"Delays": {"id": 0}}
    assert again(location.CheckpointLocation.open(tmp_path), "delays").version == 2


def test_another_program_that_has_written_meanwhile_is_left_alone(tmp_path: Path) -> None:
    live, found = begun(tmp_path)
    location.CheckpointLocation.open(tmp_path).keep(added(live, "Page").plan, {})
    with pytest.raises(UsageError, match="another program has written to checkpointLocation="):
        found.keep(added(live, "Alarm").plan, {})
    assert "Page" in location.CheckpointLocation.open(tmp_path).about["plan"]["stages"]


# ---- the start


def test_stages_that_the_program_lacks_are_named_and_can_be_given_up(tmp_path: Path) -> None:
    live, found = begun(tmp_path)
    grown = added(added(live, "Alarm", "Page"), "Other")
    found.keep(grown.plan, {})
    with pytest.raises(
        UsageError, match=r"stages 'Alarm', 'Page', 'Other' are not there.*removed=\['Alarm', 'Page', 'Other'\]"
    ):
        again(location.CheckpointLocation.open(tmp_path), "delays")
    left = location.CheckpointLocation.open(tmp_path).given_up(["Alarm", "Other", "Never"])
    plan = again(left, "delays")
    assert (plan.version, [each.name for each in plan.stages], plan.used) == (3, ["Delays"], grown.plan.next_ids())
    assert plan.stages[0].edges_out == ()
    assert plan.stages[0].edges_at_birth == (), "the edges to the others came later"
    left = location.CheckpointLocation.open(tmp_path)
    assert left.given_up(["Alarm", "Other"]) is left, "they are given up already"
    assert again(left, "delays").version == 3


def test_stages_of_the_first_start_can_be_given_up_too(tmp_path: Path) -> None:
    program = Program()
    flows = program.start("delays", "page")
    made = compiled_plan(flows, SETTINGS, FOUND, "q", b"s")
    location.CheckpointLocation.open(tmp_path).take(durable(made.plan))
    with pytest.raises(UsageError, match="no stage would be left"):
        location.CheckpointLocation.open(tmp_path).given_up(["Delays"])
    plan = again(location.CheckpointLocation.open(tmp_path).given_up(["Alarm"]), "delays")
    assert [each.name for each in plan.stages] == ["Delays", "Delays.sink"], "as it was beside the other reader"
    assert plan.stages[0].edges_at_birth == made.plan.stages[0].edges_out
    assert plan.first_streams == made.plan.counted_streams()


def test_a_location_of_an_earlier_release_gives_up_nothing(tmp_path: Path) -> None:
    begun(tmp_path)
    about = json.loads((tmp_path / "flux.json").read_text())
    del about["versions"]
    (tmp_path / "flux.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match=r"removed=\['Delays'\]: an earlier release of Flux has written"):
        location.CheckpointLocation.open(tmp_path).given_up(["Delays"])


def test_a_stage_that_the_location_lacks_is_to_be_added_later(tmp_path: Path) -> None:
    live, found = begun(tmp_path)
    found.keep(added(live, "Alarm").plan, {})
    with pytest.raises(
        UsageError, match=r"has no stage Page: start the query without it, and add it to the running query"
    ):
        again(location.CheckpointLocation.open(tmp_path), "delays", "alarm", "page")


def test_a_stage_that_has_failed_begins_anew_with_another_number(tmp_path: Path) -> None:
    live, found = begun(tmp_path)
    grown = added(live, "Alarm")
    found = found.keep(grown.plan, {})
    gone = removal(grown.plan, 2, "Alarm", False).applied_to(grown.plan)
    found.keep(gone, {}, ["Alarm"])
    plan = again(location.CheckpointLocation.open(tmp_path), "delays", "alarm")
    assert (plan.version, [(each.id, each.name, each.since) for each in plan.stages]) == (
        3, [(0, "Delays", 0), (2, "Alarm", 3)],
    )  # fmt: skip
    assert all(plan.edges[edge].log_bytes for edge in plan.stages[2].edges_in)
    assert location.CheckpointLocation.open(tmp_path).versions.failed == []
    assert again(location.CheckpointLocation.open(tmp_path), "delays", "alarm").version == 3


def behind_the_source(place: Path) -> tuple[CompiledPlan, Any, Any]:
    """Add a stage behind the running source: the grown plan, the location without it, and the program."""
    program = Program()
    made = compiled_plan(program.start("delays"), SETTINGS, FOUND, "q", b"s")
    live = made.with_plan(durable(made.plan))
    found = location.CheckpointLocation.open(place).take(live.plan)
    program.other = stage("Other", program.delays.inputs[0])
    grown = compiled_addition(program.start("other"), live, FOUND).with_log_shares(3).made
    return grown, found, program


def born(edge: int, producer: int, number: int) -> EdgeStored:
    mark = Mark(number - 1, 1 << 40, number - 2, b"\x00at", 1, -5, 2, 1, 7)
    return EdgeStored(edge=edge, producer=producer, number=number, mark=mark)


def test_a_stage_behind_a_running_source_keeps_its_births(tmp_path: Path) -> None:
    grown, found, program = behind_the_source(tmp_path)
    (edge,) = grown.plan.stages[1].edges_in
    births = [born(edge, 0, 7), born(edge, 1, 3)]
    found = found.keep(grown.plan, {})
    assert location.CheckpointLocation.open(tmp_path).births == [], "it begins anew after a loss at this moment"
    found = found.keep_births(births[:1]).keep_births([births[1], born(99, 0, 1)])
    left = location.CheckpointLocation.open(tmp_path)
    assert (left.births, left.about) == (births, found.about), "and none of a stream that the plan lacks"
    compiled, taken = regrown.compiled_again(program.start("delays", "other"), left, SETTINGS, b"s", FOUND, 0, 3)
    assert compiled.plan.stages[1].edges_in == (edge,)
    assert compiled.plan.edges[edge].since == 1
    taken.take(durable(compiled.plan))
    left = location.CheckpointLocation.open(tmp_path)
    assert left.births == births
    assert left.given_up(["Other"]).births == []


@pytest.mark.parametrize("number", range(12))
def test_births_are_there_or_not_wherever_the_process_is_lost(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown, found, _ = behind_the_source(tmp_path)
    (edge,) = grown.plan.stages[1].edges_in
    found = found.keep(grown.plan, {}, births=[born(edge, 0, 7)])
    with monkeypatch.context() as patch, contextlib.suppress(Lost):
        crashing_at(number, patch)
        found.keep_births([born(edge, 1, 3)])
    left = location.CheckpointLocation.open(tmp_path)
    assert left.births in ([born(edge, 0, 7)], [born(edge, 0, 7), born(edge, 1, 3)])
    assert left.about["plan"] == found.about["plan"]


def test_births_outlive_a_removal_that_is_taken_back(tmp_path: Path) -> None:
    grown, found, _ = behind_the_source(tmp_path)
    (edge,) = grown.plan.stages[1].edges_in
    births = [born(edge, 0, 7)]
    found = found.keep(grown.plan, {}, births=births)
    gone = found.keep(removal(grown.plan, 2, "Other", False).applied_to(grown.plan), {}, births=births)
    assert gone.births == []
    assert gone.keep(grown.plan, {}, births=births).births == births


def test_a_failed_stage_behind_a_source_that_goes_on_begins_there_anew(tmp_path: Path) -> None:
    grown, found, program = behind_the_source(tmp_path)
    (edge,) = grown.plan.stages[1].edges_in
    found = found.keep(grown.plan, {}, births=[born(edge, 0, 7)])
    found.keep(removal(grown.plan, 2, "Other", False).applied_to(grown.plan), {}, ["Other"])
    left = location.CheckpointLocation.open(tmp_path)
    compiled, taken = regrown.compiled_again(program.start("delays", "other"), left, SETTINGS, b"s", FOUND, 0, 3)
    (anew,) = compiled.plan.stages[2].edges_in
    assert anew != edge
    assert compiled.plan.edges[anew].since == 3 > compiled.plan.sources[0].since
    assert taken.births == [], "its reader reports another birth"


def test_versions_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    begun(tmp_path)
    about = json.loads((tmp_path / "flux.json").read_text())
    about["versions"]["used"] = "many"
    (tmp_path / "flux.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match=r"the versions of the plan in the checkpoint location cannot be read: .*used"):
        _ = location.CheckpointLocation.open(tmp_path).has_grown


# ---- the thread that writes


def test_orders_are_carried_out_one_after_the_other_and_answered(tmp_path: Path) -> None:
    live, found = begun(tmp_path)
    keeper, done, told = keeping.PlanKeeper(found), threading.Semaphore(0), []

    def answer(order: LocationOrder, error: str) -> None:
        told.append((order, error))
        done.release()

    keeper.start(answer)
    keeper.settle({"sinks": {"Alarm": {"id": 1}}})
    orders: list[LocationOrder] = [
        VersionToKeep(1, added(live, "Alarm").plan), BirthsToKeep((born(0, 0, 5),)), VersionToKeep(1, live.plan)
    ]  # fmt: skip
    for order in orders:
        keeper.keep(order)
    assert all(done.acquire(timeout=LIMIT_S) for _ in orders)
    assert told == [(order, "") for order in orders]
    left = location.CheckpointLocation.open(tmp_path)
    assert not left.has_grown
    assert left.births == [born(0, 0, 5)]
    (tmp_path / "flux.json").unlink()
    keeper.keep(orders[0])
    assert done.acquire(timeout=LIMIT_S)
    assert told[3][0] is orders[0]
    assert told[3][1]
    keeper.end(LIMIT_S)


def test_a_location_that_its_vault_has_written_again_gets_its_newest_version(tmp_path: Path) -> None:
    live, found = begun(tmp_path)
    as_it_began = (tmp_path / "flux.json").read_bytes()
    newest = found.keep(added(live, "Alarm").plan, {})
    (tmp_path / "flux.json").write_bytes(as_it_began)  # as ``Folder.put_back`` does
    newest.put_back(found)
    assert location.CheckpointLocation.open(tmp_path).about == newest.about
    other = location.CheckpointLocation.open(tmp_path).keep(added(live, "Page").plan, {})
    newest.put_back(found)
    assert location.CheckpointLocation.open(tmp_path).about == other.about, "another program goes on there"
