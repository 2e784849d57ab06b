"""Registered queries as flows: the same stages, in whichever order they are registered, one by one or all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.planning.additions import compiled_addition
from controller.planning.compiled_plan import CompiledPlan
from flux.dataflow.flow import Flow
from flux.dataflow.sink import FlowTo
from flux.eventlog.streams import StreamCatalogue, StreamDefinition
from flux.outputs.sink import OutputLogSink
from flux.outputs.tentative_sink import TentativeOutputSink
from flux.registry.definitions import QueryDefinition
from flux.settings import Settings
from flux.vault.location import Folder
from spark_integration.query.declarations import compiled, resolvers
from spark_integration.query.lookup_tables import LookupTables
from spark_integration.query.same_plan import description
from spark_integration.service.flows import (
    EVENTS,
    late_flow,
    query_flow,
    stream_events,
    stream_flow,
    with_output,
    with_tentative_output,
)
from spark_integration.service.service_plan import parts_of

pytestmark = pytest.mark.spark

QUERIES = {
    "early": ("SELECT id, at FROM bids WHERE price < 10", ["bids"]),
    "sold": (
        "SELECT b.id, b.price, a.at FROM bids b JOIN asks a ON b.id = a.id AND a.at BETWEEN b.at AND b.at + INTERVAL 5 MINUTES",
        ["bids", "asks"],
    ),
    "counts": (
        "WITH both AS (SELECT id, at FROM bids UNION ALL SELECT id, at FROM asks) "
        "SELECT window.start AS since, id, count(*) AS n FROM both GROUP BY window(at, '1 minute'), id HAVING count(*) > 1",
        ["bids", "asks"],
    ),
    "missed": ("SELECT id, price FROM `bids.late`", ["bids.late"]),
    "behind": (
        "SELECT window(at, '1 hour').end AS until, max(price) AS best FROM sold GROUP BY window(at, '1 hour')",
        ["sold"],
    ),
    "soon": (
        "WITH both AS (SELECT id, at FROM bids UNION ALL SELECT id, at FROM asks) "
        "SELECT window.start AS since, count(*) AS n FROM both GROUP BY window(at, '1 minute')",
        ["bids", "asks"],
    ),
    "later": ("SELECT n FROM soon WHERE n > 1", ["soon"]),
}
#: The bounds of queries that have one.
BOUNDS = {"soon": "10s"}


class Declared:
    """Flows of the registered queries over a location."""

    def __init__(self, place: Folder) -> None:
        self.place, self.streams = place, StreamCatalogue(place)
        self.known: dict[str, Flow] = {}
        self.events: dict[str, Any] = {}

    def flows(self, name: str, running: CompiledPlan | None = None) -> list[FlowTo]:
        text, reads = QUERIES[name]
        inputs: dict[str, Flow] = {}
        if name in BOUNDS:
            inputs = {each: stream_events(str(self.place), self.streams.get(each), name) for each in reads}
            made = QueryDefinition(name=name, sql=text, availability=BOUNDS[name])
            self.known[name] = query_flow(made, inputs, ())
            return with_tentative_output(self.known[name], made, TentativeOutputSink(self.place, name))
        for each in reads:
            if running is not None and any(stage.name == each for stage in running.plan.stages):
                inputs[each] = running.stage(each, lambda: running)
                continue
            if each not in self.known:
                of = self.streams.get(each.removesuffix(".late"))
                source = of.name + EVENTS
                if running is not None and any(there.name == source for there in running.plan.sources):
                    self.events[of.name] = running.source(source, lambda: running)
                if of.name not in self.events:
                    self.events[of.name] = stream_events(str(self.place), of)
                self.known[each] = (stream_flow if each == of.name else late_flow)(of, self.events[of.name])
            inputs[each] = self.known[each]
        result = query_flow(QueryDefinition(name=name, sql=text), inputs, ())
        self.known[name] = result
        return [with_output(result, name, 1, 0, OutputLogSink(self.place, name))]


def forms(made: CompiledPlan) -> dict[str, Any]:
    """Describe the stages of a plan by name, without their numbers."""
    stages: dict[str, Any] = description(made.plan)["stages"]
    return {name: {key: value for key, value in each.items() if key != "number"} for name, each in stages.items()}


def test_the_same_definitions_give_the_same_stages(spark: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place = Folder(tmp_path)
    for name in ("bids", "asks"):
        StreamCatalogue(place).register(
            StreamDefinition(name=name, schema="id BIGINT, price DOUBLE, at TIMESTAMP", time="at", delay="10 seconds")
        )
    settings = Settings.of({}, partitions=1)
    at_once = Declared(place)
    whole = compiled(
        spark,
        [flow for name in QUERIES for flow in at_once.flows(name)],
        settings,
        "query",
        tables=LookupTables(settings.lookup_max_bytes),
    )
    wanted = forms(whole)
    assert {"bids", "asks", "sold", "sold/1", "sold/output", "counts/2", "behind/output"} <= wanted.keys()
    assert parts_of(whole.plan) == (
        {
            "early": {"bids"}, "sold": {"bids", "asks"}, "counts": {"bids", "asks"}, "missed": {"bids.late"}, "behind": {"sold"},
            "soon": set(), "later": {"soon"},
        },
        {"bids", "bids.late", "asks"},
    )  # fmt: skip
    bounded = [stage.name for stage in whole.plan.stages if stage.availability is not None]
    assert bounded == ["soon/2", "soon/output"]
    assert {source.name for source in whole.plan.sources if source.may_be_silent} == {
        f"soon/from/{stream}/events" for stream in ("bids", "asks")
    }
    for order in (
        ["counts", "missed", "soon", "sold", "behind", "later", "early"],
        ["soon", "missed", "sold", "early", "behind", "counts", "later"],
    ):
        tables = LookupTables(settings.lookup_max_bytes)
        grown = compiled(spark, Declared(place).flows(order[0]), settings, "query", tables=tables)
        for name in order[1:]:
            grown = compiled_addition(Declared(place).flows(name, grown), grown, resolvers(spark, tables)).made
        assert forms(grown) == wanted
