"""A program that declares all flows of a plan that has grown gets the plan that the checkpoint location knows, part by part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from resolved import to_steps

import flux
from controller.course.removals import removal
from controller.planning.additions import compiled_addition
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.compiler import compiled_plan
from controller.planning.steps import Resolvers
from flux.dataflow.flow import Flow
from flux.dataflow.plan import Plan
from flux.dataflow.sink import FlowTo
from flux.errors import UsageError
from flux.expressions.tree import Literal
from flux.settings import Settings

location = pytest.importorskip("spark_integration.query.checkpoint_location")
regrown = pytest.importorskip("spark_integration.growing.regrown")

ROWS = pa.schema([("k", pa.int64()), ("x", pa.int64())])
FOUND = Resolvers(lambda schema: schema, to_steps)
WORKERS = 3


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Shown(flux.Sink):
    def __init__(self, place: str | None = None) -> None:
        self.place = place

    def destination(self) -> str | None:
        return self.place

    def write(self, batch: pa.RecordBatch, position: Any) -> None: ...


def ticks(partition: int) -> Iterator[pa.RecordBatch]:
    return iter(())


@flux.stage(key="k", partitions=4, replicas=2)
class Totals(flux.Aggregate):
    x = flux.sum("x")


class World:
    """A running query that gets flows and loses stages, and the program that would be started again."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder, self.count = random.Random(f"regrown {seed}"), folder, 0
        self.settings = replace(Settings.of(), on_failure="query")
        #: The flows that give rows, by name, each with the way to declare it anew from the flows before it.
        self.made: dict[str, Any] = {}
        #: The ends, each with its flow, and its sink or folder.
        self.ends: list[tuple[str, str, str]] = []
        self.place = location.CheckpointLocation.open(folder / "kept")
        names = [self.declare("source")]
        names.append(self.declare(names[0]))
        given = [self.end(names[1]), *([self.end(names[1])] if self.rng.random() < 0.5 else [])]
        flows = self.program(given)[0]
        compiled = compiled_plan(flows, self.settings, FOUND, "q", b"s")
        self.live = compiled.with_plan(replace(compiled.plan, durable=True, began_with=WORKERS))
        self.handles: dict[str, Flow] = dict(self._flows)
        self.place = self.place.take(self.live.plan)

    # ---- declarations

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def declare(self, origin: str) -> str:
        """Declare a source, or a stage behind an origin."""
        if origin == "source":
            name = self.name("source")
            self.made[name] = (None, partial(flux.source, ticks, ROWS, self.rng.choice([1, 2]), name))
            return name
        kinds = ["totals", "plain"] if origin.startswith("source") else ["totals", "plain", "chained", "rows"]
        if origin.endswith(".rows"):
            kinds.remove(
                "rows"
            )  # a running stage has the first conditions, and both together are a flow that it does not know
        kind = self.rng.choice(kinds)
        if kind == "rows":
            name = f"{origin}.rows" if origin + ".rows" not in self.made else self.name("unused")
            self.made[name] = (origin, lambda flow: flow.where(Literal(True, pa.bool_())))
            return name
        name = self.name(kind)
        self.made[name] = (origin, partial(staged, kind, name))
        return name

    def end(self, name: str) -> tuple[str, str, str]:
        made = (name, self.rng.choice(["sink", "sink", "files"]), self.name("place"))
        self.ends.append(made)
        return made

    def program(self, ends: Any) -> tuple[list[Any], dict[str, Any]]:
        """Write the program anew: the flows of these ends."""
        self._flows: dict[str, Any] = {}
        return [self.ended(self.flow(name), kind, place) for name, kind, place in ends], self._flows

    def flow(self, name: str) -> Any:
        if name not in self._flows:
            origin, make = self.made[name]
            self._flows[name] = make() if origin is None else make(self.flow(origin))
        return self._flows[name]

    def ended(self, flow: Any, kind: str, place: str) -> FlowTo:
        if isinstance(flow, flux.Source) or kind == "files":
            return flow.to_parquet(str(self.folder / place))
        return flow.to(Shown(place))

    # ---- the running query

    def add(self) -> None:
        # Nothing goes on from a flow into which another one was chained: the stage gives the rows of that one.
        given = {id(flow) for flow in self.live.flows.values()}
        given |= {id(source) for source in self.live.sources.values()}
        running = [name for name in self.made if id(self.handles.get(name)) in given]
        origin = self.rng.choice([*running, "source"])
        name = self.declare(origin)
        if origin == "source" or self.rng.random() < 0.3:
            name = self.declare(name)
        self._flows = dict(self.handles)
        there = {stage.name for stage in self.live.plan.stages}
        # Conditions behind conditions are one step in a program, and two behind a handle on a stage of conditions.
        if origin in there and not origin.endswith(".rows") and self.rng.random() < 0.5:
            self._flows[origin] = self.live.stage(origin, lambda: self.live)
        ends = [self.end(name)]
        if self.rng.random() < 0.3 and origin in self.handles and not origin.startswith("source"):
            ends.append(self.end(origin))
        flows = [self.ended(self.flow(each), kind, place) for each, kind, place in ends]
        addition = compiled_addition(flows, self.live, FOUND).with_log_shares(WORKERS)
        self.handles |= {each: flow for each, flow in self._flows.items() if each not in self.handles}
        self.live = addition.made
        self.place = self.place.keep(self.live.plan, addition.facts)

    def remove(self) -> None:
        plan = self.live.plan
        stage = self.rng.choice(list(plan.stages))
        try:
            change = removal(plan, plan.version + 1, stage.name, True)
        except UsageError:
            return  # no stage would be left
        self.live = self.live.with_plan(change.applied_to(plan))
        self.place = self.place.keep(self.live.plan, {})

    # ---- the start of the program

    def ends_that_live(self) -> list[tuple[str, str, str]]:
        places = {stage.sink.destination() for stage in self.live.plan.stages if stage.sink is not None}
        return [end for end in self.ends if end[2] in {Path(place or "").name for place in places}]

    def started_again(self) -> CompiledPlan:
        flows, _ = self.program(self.ends_that_live())
        names = {id(flow): name for name, flow in self.handles.items()}
        for stage in self.live.plan.stages:
            if not stage.edges_out and stage.sink is None:  # its readers are gone
                flows.append(self.flow(names[id(self.live.flows[stage.id])]))
        compiled, _ = regrown.compiled_again(flows, self.place, self.settings, b"s", FOUND, 0, WORKERS)
        return compiled


def staged(kind: str, name: str, flow: Any) -> Any:
    if kind == "totals":
        return Totals(flow).withStage(name=name)
    made = flux.stage(name=name, partitions=2)(same)
    made.chained = kind == "chained"
    return made(flow)


def form(plan: Plan) -> dict[str, Any]:
    """Return the parts that have to be the same in each life, by id."""
    return {
        "version": (plan.version, plan.used, plan.first_streams),
        "sources": {each.id: (each.name, each.since) for each in plan.sources},
        "stages": {
            each.id: (each.name, each.since, each.partitions, each.edges_in, each.edges_out, each.edges_at_birth, each.for_sink,
                      each.sink is None or each.sink.destination())
            for each in plan.stages
        },
        "edges": {
            each.id: (each.consumer, each.input, each.key, each.schema, each.since, each.log_bytes, type(each).__name__,
                      plan.origin(each).name, each.producers)
            for each in plan.edges
        },
    }  # fmt: skip


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 60))])
def test_the_same_plan_is_made_of_the_whole_program(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)
    world = World(seed, tmp_path)
    for _ in range(world.rng.randint(1, 12)):
        world.remove() if world.rng.random() < 0.4 else world.add()
        if world.live.plan.version:
            again = world.started_again()
            assert form(again.plan) == form(world.live.plan)
            world.place.check(replace(again.plan, durable=True, began_with=WORKERS))
