"""The newest plan of a running query, with the declarations of its parts (design: additions)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from controller.planning.compiled import CompiledPlan
from flux.dataflow.plan import ById, Plan


class RunningPlan:
    """The newest plan of a running query. Additions of the program replace it; parts that are removed, by the program or from the
    command line, are left out from then on."""

    def __init__(self, compiled: CompiledPlan, by_controller: Callable[[], Plan]) -> None:
        """``by_controller`` returns the plan that the controller goes by. It may be called in any thread."""
        self._compiled, self._by_controller = compiled, by_controller

    @property
    def compiled(self) -> CompiledPlan:
        """The newest plan that is known to be confirmed, together with its declarations."""
        held, newest = self._compiled, self._by_controller()
        if newest.version <= held.plan.version:
            return held
        return held.with_plan(without_removed(held.plan, newest))

    @property
    def plan(self) -> Plan:
        return self.compiled.plan

    def take(self, compiled: CompiledPlan) -> None:
        """Replace the plan by a later version, which every process has confirmed."""
        self._compiled = compiled


def without_removed(plan: Plan, newest: Plan) -> Plan:
    """Return a plan, with its code, as a later version of it without that code has left it: without removed parts."""
    outlets = {stage.id: stage.edges_out for stage in newest.stages}
    return replace(
        plan,
        version=newest.version,
        used=newest.used,
        first_streams=newest.first_streams,
        sources=ById(each for each in plan.sources if each.id in newest.sources),
        stages=ById(
            replace(each, edges_out=tuple(to for to in outlets[each.id] if to in plan.edges))
            for each in plan.stages
            if each.id in outlets
        ),
        edges=ById(each for each in plan.edges if each.id in newest.edges),
    )
