"""The plan of a query as a checkpoint location remembers it, and the difference that forbids another plan to go on from it
(design: same-plan).

State, order and output in a location belong to numbered stages, partitions and streams. A plan may differ in everything on which
none of these depends. The effect of a function, and the code of an operator, are not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from flux.dataflow.event_time import told
from flux.dataflow.flow import FunctionOperator, StepsOperator
from flux.dataflow.plan import (
    EdgePlan,
    FromSource,
    Plan,
    SourcePlan,
    StagePlan,
    StreamSourcePlan,
    Timed,
    WorkerSourcePlan,
)
from flux.expressions.sql import steps_in_sql
from flux.operators.operator import Operator, chain_of
from flux.windows.durations import words
from flux.wire.safe_pickle import names_of

#: Stages that a sentence names.
NAMED = 4


def description(plan: Plan) -> dict[str, Any]:
    """Describe a plan, in what JSON can hold."""
    return {
        "sources": [_source(source) for source in plan.sources],
        "stages": {stage.name: _stage(plan, stage) for stage in plan.stages},
    }


def _source(source: SourcePlan) -> dict[str, Any]:
    partitions: Any = "those of each batch" if isinstance(source, StreamSourcePlan) else "those of the DataFrame"
    if isinstance(source, WorkerSourcePlan):
        partitions = source.partitions
    said = {"name": source.name, "schema": str(source.schema).splitlines(), "partitions": partitions}
    said |= {"positions": True} if source.positions else {}
    if source.event_time is not None:
        # Idleness is judged anew in each life, and makes no row late: it may be declared when a watermark is held back.
        time = replace(source.event_time, idle=None, advance=False)
        said |= {"event time": told(time, stable=True), "event time in words": told(time)}
    return said


def _stage(plan: Plan, stage: StagePlan) -> dict[str, Any]:
    operators = chain_of(stage.make())
    return {
        "number": stage.id,
        "operator": ", then ".join(map(_name, operators)),
        "state": _state(stage, operators),
        "partitions": stage.partitions,
        "key": list(stage.key),
        "output": str(stage.output_schema).splitlines(),
        "output mode": stage.output_mode,
        "reads": [_read(plan, plan.edges[edge]) for edge in stage.edges_in],
        "sink": stage.sink is not None,
        "destination": None if stage.sink is None else stage.sink.destination(),
    }


def _read(plan: Plan, edge: EdgePlan) -> dict[str, Any]:
    said = {"from": plan.origin(edge).name, "schema": str(edge.schema).splitlines()}
    if isinstance(edge, FromSource) and edge.timed is not Timed.ALL:
        said["rows"] = edge.timed.value
    return said if edge.steps is None else said | {"steps": str(edge.steps), "steps in words": steps_in_sql(edge.steps)}


def _name(operator: Operator) -> str:
    """Return the name of an operator's class: that of a class of Flux is the earliest, whatever module has it since."""
    name = ".".join(names_of(type(operator))[-1])
    return f"{name}({operator.steps})" if isinstance(operator, StepsOperator) else name


def _state(stage: StagePlan, operators: list[Operator]) -> dict[str, Any] | None:
    """Describe the state of a stage by its parts and its version. None: it has none."""
    if all(isinstance(each, FunctionOperator) for each in operators):
        return None
    said: dict[str, Any] = {} if operators[0].state_version is None else {"version": operators[0].state_version}
    return said | operators[0]._flux_meaning(stage.schemas)


def other_destinations(was: dict[str, Any], plan: Plan) -> dict[str, tuple[str, str]]:
    """Return by name the stages whose output goes elsewhere now, with both places."""
    found = {}
    for stage in plan.stages:
        before = was["stages"].get(stage.name, {}).get("destination")
        after = None if stage.sink is None else stage.sink.destination()
        if before is not None and after is not None and before != after:
            found[stage.name] = before, after
    return found


def missing(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the stages that are not there any more."""
    return [name for name in was["stages"] if name not in now["stages"]]


def dependants(plan: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return these stages of a described plan and all that depend on them."""
    gone = set(names)
    for name, stage in plan["stages"].items():  # each behind those that it reads
        if any(read["from"] in gone and read["from"] in plan["stages"] for read in stage["reads"]):
            gone.add(name)
    return [name for name in plan["stages"] if name in gone]


def without(plan: dict[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a described plan without these stages and without the sources that nothing reads then, and the names of these."""
    stages = {name: stage for name, stage in plan["stages"].items() if name not in set(names)}
    read = {each["from"] for stage in stages.values() for each in stage["reads"]}
    left = [source for source in plan["sources"] if source["name"] in read]
    return {**plan, "stages": stages, "sources": left}, [
        source["name"] for source in plan["sources"] if source["name"] not in read
    ]


def difference(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the difference that forbids to go on, in a sentence without its full stop; empty: there is none."""
    return next(_differences(was, now), "")


def _differences(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield differences, the most telling one first: if a stage is new, numbers and inputs of others differ only because of
    it."""
    gone = [f"{name!r}" for name in was["stages"] if name not in now["stages"]]
    new = [f"{name!r}" for name in now["stages"] if name not in was["stages"]]
    if gone or new:
        yield "; ".join([*_stages(gone, "not there any more"), *_stages(new, "new")])
    order = [list(each["stages"]) for each in (was, now)]
    if order[0] != order[1] and sorted(order[0]) == sorted(order[1]):
        yield f"the order of its stages was {', '.join(order[0])} and is {', '.join(order[1])}"
    yield from _of_sources(was["sources"], now["sources"])
    for name, stage in now["stages"].items():
        yield from (f"stage {name!r}: {each}" for each in _of_stage(was["stages"][name], stage))


def _stages(names: list[str], are: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    return [f"stage{'s' * (len(names) > 1)} {', '.join(names[:NAMED])}{more} {'are' if len(names) > 1 else 'is'} {are}"]


def _of_sources(was: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the differences of sources that forbid to go on, in words."""
    names = [[each["name"] for each in sources] for sources in (was, now)]
    if names[0] != names[1]:
        yield f"its sources were {', '.join(names[0])} and are {', '.join(names[1])}"
        return
    for one, other in zip(was, now, strict=True):
        for what in ("partitions", "positions"):
            if one.get(what) != other.get(what):
                yield f"source {one['name']!r}: its {what} were {one.get(what)!r} and are {other.get(what)!r}"
        times = [each.get("event time", "not declared") for each in (one, other)]
        if times[0] != times[1]:
            was, is_ = (each.get("event time in words", said) for each, said in zip((one, other), times, strict=True))
            yield f"source {one['name']!r}: its event time was {was} and is {is_}"


def _of_stage(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield the differences of a stage that forbid to go on, in words."""
    for what in ("number", "partitions", "key", "output mode"):
        if was[what] != now[what]:
            yield f"{what} was {was[what]!r} and is {now[what]!r}"
    yield from _of_inputs(was["reads"], now["reads"])
    both_stateless = "state" in was and was["state"] is None and now["state"] is None
    if was["operator"] != now["operator"] and not both_stateless:
        yield f"its operator was {was['operator']} and is {now['operator']}, which cannot go on with that state"
    yield from _of_state(was.get("state") or {}, now["state"] or {}, known="state" in was)
    # A sink may still keep rows that were made by the earlier plan. Rows of other stages are kept in the form that their
    # readers want.
    if now["sink"] and was["sink"] and was["output"] != now["output"]:
        yield f"its rows go into a sink, and were {_columns(was['output'])} and are {_columns(now['output'])}"


def _of_inputs(was: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[str]:
    origins = [[each["from"] for each in reads] for reads in (was, now)]
    if origins[0] != origins[1]:
        yield f"it read from {', '.join(origins[0])} and reads from {', '.join(origins[1])}"
        return
    for one, other in zip(was, now, strict=True):
        if one["schema"] != other["schema"]:
            yield f"it read {_columns(one['schema'])} from {one['from']} and reads {_columns(other['schema'])}"
        rows = [each.get("rows", "all") for each in (one, other)]
        if rows[0] != rows[1]:
            yield f"it read the rows of {one['from']} that are {rows[0]}, and reads those that are {rows[1]}"
        if one.get("steps") != other.get("steps"):
            given = [
                each.get("steps in words", each.get("steps", "no conditions and columns")) for each in (one, other)
            ]
            yield f"it read {one['from']} through {given[0]} and reads it through {given[1]}"


def _of_state(was: dict[str, Any], now: dict[str, Any], known: bool) -> Iterator[str]:
    """Yield differences of state. ``known``: the location was written by a release that remembers what state means."""
    version = was.get("version")
    if version is not None and version != now.get("version"):
        yield f"state_version was {version!r} and is {now.get('version')!r}"
    parts = [name for name in {**was, **now} if name != "version"] if known else []
    for name in parts:
        old, new = _in_words(was.get(name, "not there")), _in_words(now.get(name, "not there any more"))
        if old != new:
            yield f"{name} was {old} and is {new}"
    order = [[name for name in each if name != "version"] for each in (was, now)]
    if known and order[0] != order[1]:
        yield f"the order of its measures was {', '.join(order[0])} and is {', '.join(order[1])}"


def _in_words(text: str) -> str:
    """Return the text of a location that has lengths of time in microseconds, as they were written once, in today's words."""
    return re.sub(r"\b(\d+) us\b", lambda found: words(int(found[1])), text)


def _columns(schema: list[str]) -> str:
    return f"({', '.join(schema)})"
