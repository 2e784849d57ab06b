"""Runs in which stages come and go as in ``growing``, in queries of all kinds: with sinks outside and readers, in front of which
stages come and go, too; with timers, upstream replicas, sources whose rows have numbers, a directory, moves by hand, and links
between workers that bring nothing for a while, so that rows are lent and read elsewhere.

The laws are those of ``growing_laws``, of sinks (``outside``) and of links (``reach_laws``).
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from flux.dataflow.flow import Flow
from flux.dataflow.plan import EdgePlan, Plan, SourcePlan, StagePlan
from flux.dataflow.sink import QueryReaders
from flux.settings import Settings
from tests.simulation import faults as faults_
from tests.simulation import flows, mixes
from tests.simulation.growing import GrowingFlow, GrowingSimulation, Grown, GrownGiving, drawn_faults, gives_rows
from tests.simulation.growing_readers import SOURCES
from tests.simulation.outside import Goes
from tests.simulation.stage_kinds import Delay, Giving, Sink, Watched

#: The share of queries with a directory, and the most lives of such a query.
LIVES_SHARE, LIVES_MAX = 0.4, 4
#: The shares of first flows with a sink outside, among these with a reader in place of the sink, with a stage that has timers,
#: and with stages that may have upstream replicas.
OUTSIDE_SHARE, READERS_SHARE, TIMED_SHARE, REPLAYING_SHARE = 0.6, 0.3, 0.4, 0.4
#: The share of last new stages that give their rows to a sink outside.
SINK_SHARE = 0.5


class WideFlow(GrowingFlow):
    """A dataflow of the beginning of any kind."""

    def __init__(self, seed: int, standbys: float, kind: str) -> None:
        super().__init__(seed, standbys, kind)
        self._wide = random.Random(f"growing wide {seed}")
        self._outside = self._wide.random() < OUTSIDE_SHARE
        self._room = self._wide.choice([1, 2_000, 1 << 27])
        self._pulled = self._wide.random() < READERS_SHARE
        self.timed = self._wide.random() < TIMED_SHARE
        self._replays = self._wide.random() < REPLAYING_SHARE

    def _last(self, builder: Any, node: flows.Node) -> flows.Node:
        wide = self._wide
        if self._replays:
            builder.replaying = wide
        if self.timed:
            node = builder._stage(Delay, [node], wide.choice([(), ("key",)]))
            builder.nodes.append(node)
        kind: type[Watched] = Giving if self._outside else Sink
        return builder._stage(kind, [node], wide.choice([(), ("key",)]), partitions=wide.choice([1, 1, 2]))  # type: ignore[no-any-return]

    def _ended(self, flow: Flow) -> Any:
        if not self._outside:
            return flow
        return flow.to(QueryReaders(self._room) if self._pulled else Goes())

    def _settings(self, drawn: Settings) -> Settings:
        return replace(drawn, sink_max_bytes=self._room)


class WideGrowing(GrowingSimulation):
    """A run with changes of the plan in a query of any kind."""

    _reach = True

    def _share_of_standbys(self, seed: int, mix: mixes.Mix) -> float:
        self._kinds = random.Random(f"growing wide kinds {seed}")
        return self._kinds.choice([0.0, 0.0, 0.5, 1.0])

    def _flow(self, seed: int, kind: str) -> GrowingFlow:
        self._sinks = random.Random(f"growing sinks {seed}")
        return WideFlow(seed, self._standbys, self._kinds.choice(["", *SOURCES]))

    def _faults(self, seed: int, mix: mixes.Mix) -> faults_.Faults:
        found = faults_.with_pair_cuts(random.Random(f"growing pair cuts {seed}"), drawn_faults(seed, mix))
        # A deviation of one replica ends a query with a directory, if the replica is lost before the deviation is noticed.
        return replace(found, divergences_per_s=0.0)

    def _stage(
        self,
        plan: Plan,
        stage: int,
        edge: int,
        origin: StagePlan | SourcePlan,
        kind: type[Watched],
        edges_out: tuple[int, ...] = (),
    ) -> tuple[StagePlan, EdgePlan]:
        goes = kind is Grown and self._sinks.random() < SINK_SHARE and gives_rows(origin)
        made, way = super()._stage(plan, stage, edge, origin, GrownGiving if goes else kind, edges_out)
        if goes:
            self.counts["sinks asked for"] += 1
            made = replace(made, sink=Goes())
        return made, way


def lives_of(seed: int) -> int:
    """Return the number of lives of a query; 0 for a query without a directory."""
    rng = random.Random(f"growing lives {seed}")
    return rng.randint(1, LIVES_MAX) if rng.random() < LIVES_SHARE else 0
