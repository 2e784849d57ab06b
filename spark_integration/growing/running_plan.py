"""The newest plan of a running query, with the declarations of its parts (design: additions)."""

from __future__ import annotations

from collections.abc import Callable

from controller.planning.compiled_plan import CompiledPlan
from flux.dataflow.plan import Plan


class RunningPlan:
    """The newest plan of a running query. Additions of the program replace it; parts that are removed, by the program or from the
    command line, are left out from then on."""

    def __init__(self, compiled: CompiledPlan, by_controller: Callable[[], Plan]) -> None:
        """``by_controller`` returns the plan that the controller goes by. It may be called in any thread."""
        self._compiled, self._by_controller = compiled, by_controller

    @property
    def compiled(self) -> CompiledPlan:
        """The newest plan, together with its declarations."""
        held, newest = self._compiled, self._by_controller()
        return held if newest.version <= held.plan.version else held.with_plan(newest)

    @property
    def plan(self) -> Plan:
        return self.compiled.plan

    def take(self, compiled: CompiledPlan) -> None:
        """Replace the plan by a later version, which every process has confirmed."""
        self._compiled = compiled
