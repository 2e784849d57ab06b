"""Preparation of sources and sinks: facts that each settles once, in the program that starts a query, and finds again in its
checkpoint location (design: prepare).

A topic that is read from its latest offsets must begin at the same offsets in every life of the query, and a sink that
writes under an id must keep it. Both are known when the query starts for the first time, and not before.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

from flux.dataflow.plan import Plan, SourcePlan, StagePlan, WorkerSourcePlan
from flux.dataflow.sink import Sink
from flux.dataflow.source_reader import SourceSettings
from flux.dataflow.user_code import text_of
from flux.errors import UsageError

#: Settled facts, by name of source and of stage.
Kept = dict[str, dict[str, Any]]


def prepared(
    plan: Plan, kept: Kept | None, case_sensitive: bool = False, ignored_files: tuple[bool, bool] = (False, False)
) -> tuple[Plan, Kept]:
    """Return the plan with prepared sources and sinks, and the facts that they want to find again.

    ``kept`` is the result of the first start of the query. ``case_sensitive``: the session tells names apart by upper and
    lower case, for sources that find columns by name. ``ignored_files``: the session leaves out missing, and corrupt,
    files."""
    found: Kept = {"sources": {}, "sinks": {}}
    known = kept or {}

    settings = SourceSettings(case_sensitive, *ignored_files, plan.settings.files_bad_after)

    def source(given: SourcePlan) -> SourcePlan:
        if not isinstance(given, WorkerSourcePlan) or not given.reader.defines & {"configure", "prepare"}:
            return given
        reader = copy.deepcopy(given.reader)  # another query may be started with the same flow
        reader.configure(settings)
        if "prepare" in reader.defines:
            said = reader.prepare(known.get("sources", {}).get(given.name))
            found["sources"][given.name] = _can_be_kept(said, f"source {given.name}")
        return replace(given, reader=reader)

    def stage(given: StagePlan) -> StagePlan:
        if given.sink is None or type(given.sink).prepare is Sink.prepare:
            return given
        sink = copy.deepcopy(given.sink)
        said = sink.prepare(given.partitions, known.get("sinks", {}).get(given.name))
        found["sinks"][given.name] = _can_be_kept(said, f"sink {text_of(sink, repr)} of stage {given.name}")
        return replace(given, sink=sink)

    sources, stages = tuple(map(source, plan.sources)), tuple(map(stage, plan.stages))
    return replace(plan, sources=sources, stages=stages), found


def forget(plan: Plan) -> None:
    """Let sources forget their facts at the end of a query without a checkpoint location, which never goes on."""
    for source in plan.sources:
        if isinstance(source, WorkerSourcePlan):
            source.reader.forget()


def _can_be_kept(said: Any, whose: str) -> Any:
    try:
        return json.loads(json.dumps(said))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{whose}: prepare() must return what JSON can hold, None, numbers, text, lists and dicts; got "
            f"{text_of(said, repr):.100}: {error}"
        ) from None
