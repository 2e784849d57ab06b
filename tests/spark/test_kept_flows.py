"""Flows that a service keeps for its next start: the plan is the same as without, and Spark is not asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from controller.planning.explain import explain
from flux.errors import UsageError
from flux.eventlog.streams import StreamCatalogue, StreamDefinition
from flux.outputs.sink import OutputLogSink
from flux.registry.definitions import QueryDefinition, RegisteredQuery
from flux.registry.query_catalogue import QueryCatalogue
from flux.settings import Settings
from flux.vault.location import Folder
from spark_integration.expressions import analyser_answers
from spark_integration.expressions.analyser_answers import AnswerRecord, recorded
from spark_integration.query.declarations import compiled
from spark_integration.query.lookup_tables import LookupTables
from spark_integration.service.declared_flows import DeclaredFlows, FlowContext
from spark_integration.service.kept_flows import KeptFlows, NotKept

pytestmark = pytest.mark.spark

#: Texts of each kind of relation, some of which read the result of another one.
TEXTS = {
    "early": "SELECT user, upper(page) AS page, at FROM clicks WHERE user < 100 AND page LIKE '/a%'",
    "hours": "SELECT window.start AS hour, user, count(*) AS n, avg(amount) AS mean FROM clicks "
    "GROUP BY window(at, '1 hour'), user HAVING count(*) > 2",
    "visits": "SELECT user, count(*) AS n FROM clicks GROUP BY session_window(at, '5 minutes'), user",
    "met": "SELECT e.user, v.place FROM early e JOIN views v ON e.user = v.user "
    "AND v.at BETWEEN e.at AND e.at + INTERVAL 1 MINUTE",
    "both": "SELECT user, at FROM early UNION ALL SELECT user, at FROM views",
    "once": "SELECT DISTINCT user, at FROM views",
    "too_late": "SELECT user FROM `clicks.late`",
}


class Location:
    """A location with two streams and the queries of ``TEXTS``, none of which runs."""

    def __init__(self, spark: Any, folder: Path) -> None:
        folder.chmod(0o700)
        self.spark, self.place = spark, Folder(folder)
        self.streams = StreamCatalogue(self.place)
        for name, columns in (
            ("clicks", "user BIGINT, page STRING, amount DOUBLE"),
            ("views", "user BIGINT, place STRING"),
        ):
            self.streams.register(
                StreamDefinition(name=name, schema=f"{columns}, at TIMESTAMP", time="at", delay="1 second")
            )
        catalogue = QueryCatalogue(self.place)
        catalogue.claim()
        self.context = FlowContext(spark, str(folder), self.streams, frozenset(), self._sink)
        for name, text in TEXTS.items():
            definition = QueryDefinition(name=name, sql=text)
            made, _ = catalogue.begin(definition, self.context.read_by(definition), "user BIGINT")
            catalogue.note(made, "RUNNING")
        self.queries = list(catalogue.all().values())

    def _sink(self, query: RegisteredQuery) -> OutputLogSink:
        return OutputLogSink(self.place, query.name, query.definition.retain, query.definition.mode)

    def plan(
        self, kept: KeptFlows, record: AnswerRecord, queries: Iterable[RegisteredQuery]
    ) -> tuple[str, DeclaredFlows]:
        """Return the plan of queries in words, and their flows."""
        declared = DeclaredFlows(self.context, None, kept)
        flows = [flow for each in queries for flow in declared.output(each)]
        with recorded(record):
            made = compiled(self.spark, flows, Settings.of({}), tables=LookupTables(1 << 20)).plan
        columns = [(stage.name, stage.output_schema) for stage in made.stages]
        return f"{explain(made)}\n{columns}", declared

    def kept(self) -> KeptFlows:
        return KeptFlows.open(self.spark, self.streams)


def unasked(patch: pytest.MonkeyPatch) -> None:
    """Have each question to Spark fail."""

    def asked(*given: Any) -> Any:
        raise AssertionError(f"Spark is asked for {given[1:]}")

    for name in ("steps_of", "groups_of", "order_of", "join_of", "empty", "to_arrow"):
        patch.setattr(analyser_answers, name, asked)


def test_a_start_with_kept_flows_has_the_same_plan_and_asks_spark_nothing(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location(spark, tmp_path)
    first, record = location.kept(), AnswerRecord()
    expected, declared = location.plan(first, record, location.queries)
    assert [each.definition.name for each in declared.read_anew] == list(TEXTS)
    for each in declared.read_anew:
        first.keep(each, record.asked)

    again = location.kept()
    with monkeypatch.context() as patch:
        unasked(patch)
        found, declared = location.plan(again, again.answers, location.queries)
    assert declared.read_anew == []
    assert found == expected

    check_others_are_read_anew(location, monkeypatch)


def check_others_are_read_anew(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that no flow is used that follows from something else, or is damaged or gone."""

    def used(kept: KeptFlows, **changes: Any) -> set[str]:
        made = {name: QueryDefinition(name=name, sql=text, **changes) for name, text in TEXTS.items()}
        return {name for name, definition in made.items() if kept.of(definition) is not None}

    assert used(location.kept()) == set(TEXTS)
    assert used(location.kept(), partitions=2) == set()
    zone = location.spark.conf.get("spark.sql.session.timeZone")
    location.spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        assert used(location.kept()) == set()
    finally:
        location.spark.conf.set("spark.sql.session.timeZone", zone)
    with monkeypatch.context() as patch:
        patch.setattr("spark_integration.service.kept_flows._code", lambda: ("another release",))
        assert used(location.kept()) == set()
    _without(location, "views")
    location.streams.register(StreamDefinition(name="views", schema="user BIGINT, at TIMESTAMP", time="at"))
    assert used(location.kept()) == set(TEXTS) - {"met", "both", "once"}

    kept = location.kept()
    kept.forget_others(["early", "hours"])
    assert used(kept) == {"early", "hours"}
    folder = location.place.below("flows")
    for name in folder.names():
        folder.write(name, folder.read(name)[:-40])
    assert used(kept) == set()


def _without(location: Location, stream: str) -> None:
    with location.streams._entries.changing() as entries:
        del entries[stream]


def test_a_flow_that_cannot_be_read_is_told_apart(spark: Any, tmp_path: Path) -> None:
    """Expressions are kept as marks. A question about one has all texts read anew, as a damaged pickle has."""
    location = Location(spark, tmp_path)
    kept, record = location.kept(), AnswerRecord()
    _, declared = location.plan(kept, record, location.queries[:1])
    kept.keep(declared.read_anew[0], [])  # without answers
    again = location.kept()
    with pytest.raises((NotKept, UsageError)):
        location.plan(again, again.answers, location.queries[:1])
    found = again.of(location.queries[0].definition)
    assert found is not None
    inputs: Mapping[str, Any] = {}
    with pytest.raises(NotKept, match="cannot be read"):
        found.flow(inputs)
