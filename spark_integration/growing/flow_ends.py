"""The flows that a query was given, from which stages that have failed begin anew (design: restart-of-a-stage)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from controller.course.plan_requests import FailedStage
from controller.planning.compiled_plan import CompiledPlan
from controller.text import some
from flux.dataflow.flow import Flow
from flux.dataflow.plan import Plan
from flux.dataflow.relations.running_flow import RunningStage
from flux.dataflow.sink import FlowTo, flow_of
from flux.errors import UsageError

#: Failed stages that a message names.
NAMED = 8


class FlowEnds:
    """The flows of one query by the ids of the stages where they end. Flows whose stages are removed are forgotten when others
    come, those of failed stages are not."""

    def __init__(self) -> None:
        self._ends: dict[int, Flow | FlowTo] = {}

    def take(self, flows: Sequence[Flow | FlowTo], compiled: CompiledPlan, failed: Collection[int] = ()) -> None:
        """Take flows that were compiled into a plan. ``failed``: stages that are not in it because they have failed."""
        stages = compiled.plan.stages
        self._ends = {end: flow for end, flow in self._ends.items() if end in stages or end in failed}
        for given in flows:
            if isinstance(given, FlowTo):
                ends = [stage for stage, sink in compiled.sinks.items() if sink is given.sink]
            else:
                ends = [stage for stage, flow in compiled.flows.items() if flow is given]
            if ends:
                self._ends[max(ends)] = given

    def anew(self, failed: Collection[int], plan: Plan) -> list[Flow | FlowTo]:
        """Return the flows that end in failed stages, as they are added to a plan: behind the declarations of failed stages where
        they were behind handles on these."""
        made: dict[int, Flow] = {}

        def renewed(flow: Flow) -> Flow:
            if id(flow) not in made:
                made[id(flow)] = self._renewed(flow, plan, renewed)
            return made[id(flow)]

        found: list[Flow | FlowTo] = []
        for end, given in self._ends.items():
            if end in failed:
                flow = renewed(flow_of(given))
                found.append(FlowTo(flow, given.sink) if isinstance(given, FlowTo) else flow)
        return found

    @staticmethod
    def _renewed(flow: Flow, plan: Plan, renewed: Callable[[Flow], Flow]) -> Flow:
        if isinstance(flow, RunningStage):
            return flow if flow.number in plan.stages else renewed(flow.declared)
        inputs = [renewed(given) if isinstance(given, Flow) else given for given in flow.inputs]
        same = all(one is other for one, other in zip(inputs, flow.inputs, strict=True))
        return flow if same else flow.copied(inputs)


def failed_with(name: str, failed: Mapping[str, FailedStage]) -> list[int]:
    """Return the ids of a stage that has failed and of those that went with it."""
    stage = failed.get(name)
    if stage is None:
        there = f"; failed: {some(list(failed), NAMED)}" if failed else "; none has failed"
        raise UsageError(
            f"stage {name!r:.100} has not failed{there}. query.add() adds a flow, also one that was removed"
        )
    if stage.because_of != name and stage.because_of in failed:
        raise UsageError(f"stage {name} depends on {stage.because_of}, which has failed: restart {stage.because_of}")
    return [each.stage for each in failed.values() if each.because_of == stage.because_of]
