"""``flux.sql``: from a text and flows to a flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from flux.dataflow.flow import Flow, is_input, node
from flux.dataflow.relations.lookups import table_of
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.source import Source
from flux.errors import UsageError
from spark_integration.query.declarations import session_of, sources_of
from spark_integration.query.start import check_columns, schema_of, unchecked
from spark_integration.settings import is_case_sensitive
from spark_integration.sql.accepted_nodes import NameScope, TextSize, check, named_relations
from spark_integration.sql.analysis import text_session
from spark_integration.sql.relations import Relation, Relations
from spark_integration.sql.text import QueryText
from spark_integration.sql.trees import class_of, listed


def sql_flow(sql_query: Any, args: Any, flows: Mapping[str, Any]) -> Flow:
    """Return the flow of a text over flows. UsageError, with its place: a part of the text is not accepted."""
    given = _inputs(args, flows)
    if not isinstance(sql_query, str) or not sql_query.strip():
        raise UsageError(f"flux.sql: expected a text, as in 'SELECT * FROM bids', got {sql_query!r:.100}")
    try:
        sql_query.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"flux.sql: character {error.start + 1} of the text is half a character (a surrogate)"
        ) from error
    nodes = {name: node(each) for name, each in given.items()}
    spark = session_of(sources_of([RowFlow(flow, ()) for flow in nodes.values()]))
    names = NameScope(frozenset(nodes), is_case_sensitive(spark))
    if len(names.names) < len(nodes):
        raise UsageError(f"flux.sql: names of flows differ by more than capitals; got {', '.join(nodes)}")
    text, session = QueryText(sql_query), text_session(spark)
    parsed = session.parsed(text)
    check(text, parsed, names)
    known = {names.key(name): Relation(flow, session.empty(_columns_of(flow))) for name, flow in nodes.items()}
    relations = Relations(text, session, names)
    try:
        with unchecked():  # each method would compile all before it
            made = _flow(relations.of(parsed, known))
        check_columns(made)
        return made
    except UsageError:
        return _flow(relations.of(parsed, known))  # checked part by part, the error has the place of its part


def names_read(sql_query: str, spark: SparkSession) -> list[str]:
    """Return the names of the flows that a text reads, in its order. UsageError, with its place: the text does not parse, or is
    one that reads none and is not accepted."""
    text, nothing = QueryText(sql_query), NameScope(frozenset(), is_case_sensitive(spark))
    parsed = text_session(spark).parsed(text)
    names = list(dict.fromkeys(_names_in(parsed, nothing)))
    if not names:
        check(text, parsed, nothing)
    return names


def _names_in(relation: Any, known: NameScope) -> Iterator[str]:
    """Yield the names of the relations that a part of a text reads, but for ``known`` ones, which are those of WITH."""
    kind = class_of(relation)
    if kind == "UnresolvedRelation":
        name = ".".join(map(str, listed(relation.multipartIdentifier())))
        if name not in known:
            yield name
    if kind == "UnresolvedWith":
        for name, below in named_relations(relation):
            yield from _names_in(below, known)
            known = known.with_name(name, TextSize())
    for below in listed(relation.children()):
        yield from _names_in(below, known)


def _columns_of(flow: Flow | Source) -> StructType:
    """Return the columns of a flow; those of a table that is read anew are its DataFrame's."""
    table = table_of(flow)
    if table is None:
        return schema_of(flow)
    dataframe: Any = table.dataframe
    columns: StructType = dataframe.schema
    return columns


def _flow(relation: Relation) -> Flow:
    assert isinstance(relation.flow, Flow), (
        "each table of a text has its name as an alias, which makes a flow of a source"
    )
    return relation.flow


def _inputs(args: Any, flows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flows by name."""
    if args is not None and not isinstance(args, Mapping):
        raise UsageError(f"flux.sql: args maps names to flows, as in {{'bids': bids}}; got {type(args).__name__}")
    twice = sorted(set(args or ()) & set(flows))
    if twice:
        raise UsageError(f"flux.sql: {twice[0]!r} is in args and among the keywords: give each flow once")
    given = {**(args or {}), **flows}
    for name, each in given.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"flux.sql: a flow has a name, which is text; got {name!r:.100}")
        if not is_input(each):
            raise UsageError(
                f"flux.sql: {name} must be a flow, a source or a DataFrame, got {type(each).__name__}. Values stand in the "
                "text: it has no parameters"
            )
    if not given:
        raise UsageError(
            "flux.sql: name the flows that the text reads, as in flux.sql('SELECT * FROM bids', bids=bids)"
        )
    return given
