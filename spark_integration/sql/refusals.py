"""Reasons for parts of a text that are not accepted, each with the nearest form that is."""

from __future__ import annotations

from flux.arguments import nearest
from spark_integration.sql.functions import AGGREGATES, CASTS, CLOCKS, OF_ROWS, WINDOW_TIME, WINDOWS

#: The parts of a text, for errors about all others.
ACCEPTED = (
    "Accepted are SELECT, DISTINCT, FROM, JOIN, WHERE, GROUP BY, HAVING, UNION ALL, WITH and subqueries in FROM "
    "(docs/sql.md)"
)
_LIMIT = "LIMIT: rows of a flow have no end. flux.top(flow, n, within='window', by='price DESC') gives the best of each window"
_VALUES = (
    "rows in the text: give them as a DataFrame, as in flux.sql('SELECT * FROM t', t=spark.sql('VALUES (1), (2)'))"
)
_PARTITIONS = "the text does not say how rows are partitioned: flow.withStage(partitions=...) does"
_ROWS_OF_ONE = (
    "several rows are made of one: a stage does that, @flux.stage over a function of batches, in front of the text"
)
_JOINED = "a subquery stands in FROM only: LEFT SEMI JOIN keeps rows with a match, LEFT ANTI JOIN those without"
_PIVOT = "an aggregate for each value gives its column, as in sum(n) FILTER (WHERE kind = 'a') AS a"
_SETS = "each grouping is a SELECT of its own, with UNION ALL between them"
_RANKS = "functions with OVER look at several rows: GROUP BY window(...) counts in windows, and flux.top(flow, n, ...) ranks rows"
_LIKE = "write each pattern by itself, as in name LIKE 'a%' OR name LIKE 'b%'"
_PARAMETER = "a text has no parameters: write the value"

#: Reasons by Spark's classes of relations and statements.
RELATIONS = {
    "Sort": "ORDER BY: rows of a flow have no end to be sorted by. flux.top(flow, n, within='window', by='price DESC') ranks the "
    "rows of each window",
    **dict.fromkeys(("GlobalLimit", "LocalLimit", "LimitAll", "Offset", "Tail"), _LIMIT),
    "OneRowRelation": "a SELECT without FROM has one row and no flow: name a flow after FROM",
    "Except": "EXCEPT: LEFT ANTI JOIN keeps the rows of one flow without a match in another",
    "Intersect": "INTERSECT: LEFT SEMI JOIN keeps the rows of one flow with a match in another",
    **dict.fromkeys(("LocalRelation", "UnresolvedInlineTable", "ResolvedInlineTable"), _VALUES),
    **dict.fromkeys(
        ("UnresolvedTableValuedFunction", "UnresolvedTVFAliases", "Range"),
        "a function as a table: a text reads the flows that are given to it, and neither functions nor files",
    ),
    **dict.fromkeys(("Generate", "LateralJoin"), _ROWS_OF_ONE),
    "WithWindowDefinition": _RANKS,
    "Pivot": f"PIVOT: {_PIVOT}",
    "Unpivot": f"UNPIVOT: {_ROWS_OF_ONE}",
    "Transpose": f"TRANSPOSE: {_ROWS_OF_ONE}",
    "Sample": "TABLESAMPLE gives other rows each time; a WHERE over a key gives the same, as in WHERE pmod(id, 10) = 0",
    "ScriptTransformation": "TRANSFORM runs a program: @flux.stage over a function of batches does, in front of the text",
    **dict.fromkeys(("UnresolvedHint", "ResolvedHint"), f"a hint: leave it out; {_PARTITIONS}"),
    **dict.fromkeys(("Repartition", "RepartitionByExpression", "RebalancePartitions"), _PARTITIONS),
    "UnresolvedEventTimeWatermark": "WATERMARK: a source says it, as in bids.withWatermark('ts', '10 seconds'), before the text",
    "NamedStreamingRelation": "STREAM: a flow is named as it is, without STREAM",
    "PipeOperator": "the operator |>: write the same as SELECT ... FROM (SELECT ...)",
    "CompoundBody": "a script: a text is one SELECT, and each result may be given to the next text",
    "RelationTimeTravel": "a version of a table: a flow has its rows once",
    "RelationChanges": "changes of a table: a flow has its rows once",
    "AsOfJoin": "an as-of join: flux.asof_join(orders, prices, on='item')",
    "NearestByJoin": "a join by nearness: flux.asof_join(orders, prices, on='item') takes the nearest time before",
}
#: Reasons by Spark's classes of expressions.
EXPRESSIONS = {
    **dict.fromkeys(("ScalarSubquery", "InSubquery", "Exists", "ListQuery", "LateralSubquery"), _JOINED),
    "FunctionTableSubqueryArgumentExpression": _JOINED,
    **dict.fromkeys(("WindowExpression", "UnresolvedWindowExpression", "WindowSpecDefinition"), _RANKS),
    **dict.fromkeys(
        ("LambdaFunction", "UnresolvedNamedLambdaVariable"), "a function of elements: a stage of Python does that"
    ),
    **dict.fromkeys(("NamedParameter", "PosParameter"), _PARAMETER),
    **dict.fromkeys(
        ("ExpressionWithUnresolvedIdentifier", "PlanWithUnresolvedIdentifier"), "IDENTIFIER(...): write the name itself"
    ),
    **dict.fromkeys(("GroupingSets", "Rollup", "Cube", "GroupingAnalytics"), _SETS),
    **dict.fromkeys(("LikeAny", "LikeAll", "NotLikeAny", "NotLikeAll"), _LIKE),
    "MultiAlias": "several names for one expression: each column has its own, as in s.a AS a, s.b AS b",
    "NamedArgumentExpression": "an argument by name: arguments stand by position",
    **dict.fromkeys(
        ("Collate", "UnresolvedCollation"), "COLLATE: texts are compared as they are; upper(name) leaves case out"
    ),
    "SemiStructuredExtract": "a part of a VARIANT: parse it in front of the text, in a function for mapInArrow",
}
_REACHING = """
java_method reflect try_reflect input_file_name input_file_block_start input_file_block_length current_catalog
current_database current_schema current_user session_user user version current_timezone raise_error read_files
"""
#: Functions that reach code, files or settings outside of the rows.
_OUTSIDE = frozenset(_REACHING.split())
_UNREPEATABLE = frozenset(
    ("rand", "randn", "random", "uuid", "shuffle", "randstr", "uniform", "monotonically_increasing_id", "curdate")
)
_RANKING = frozenset(
    ("row_number", "rank", "dense_rank", "percent_rank", "ntile", "cume_dist", "lag", "lead", "nth_value")
)
_SETS_OF = frozenset(("grouping", "grouping_id"))
_MANY = frozenset(
    ("explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer", "stack", "json_tuple")
)


def of_relation(kind: str) -> str:
    """Return the reason for a relation or statement of one of Spark's classes."""
    return RELATIONS.get(kind, f"{_words(kind)} is no part of SQL over flows. {ACCEPTED}")


def of_expression(kind: str) -> str:
    """Return the reason for an expression of one of Spark's classes."""
    return EXPRESSIONS.get(
        kind,
        f"{_words(kind)} cannot be computed of rows of a flow. A function for mapInArrow, in front of the text, can",
    )


def of_function(name: str) -> str:
    """Return the reason for a function."""
    if name in _OUTSIDE:
        return f"{name}() reaches outside of the rows, and texts may look at rows alone: compute it in the program"
    if name in _UNREPEATABLE or name in CLOCKS:
        clock = (
            "; as the time of a window it is, GROUP BY window(current_timestamp(), '10 minutes')"
            if name in CLOCKS
            else ""
        )
        return f"{name}() gives other values when rows are read again, so it is not accepted{clock}"
    if name in _RANKING:
        return f"{name}(): {_RANKS}"
    if name in _SETS_OF:
        return f"{name}(): {_SETS}"
    if name in _MANY:
        return f"{name}(): {_ROWS_OF_ONE}"
    if name in WINDOWS or name == WINDOW_TIME:
        return of_window(name)
    known = sorted(OF_ROWS | AGGREGATES | CASTS)
    what = "a name in several parts" if ", " in name else "not among the functions"
    return (
        f"{name.replace(', ', '.')}() is {what} that flows compute{nearest(name, known)}; docs/sql.md lists them. Functions of "
        "the session are not called from a text: a function for mapInArrow, in front of it, does the same"
    )


def of_window(name: str) -> str:
    """Return the reason for a window that is no key."""
    if name == WINDOW_TIME:
        return "window_time() is the time of a longer window, as in GROUP BY window(window_time(window), '1 hour')"
    return (
        f"{name}(...) is a key of GROUP BY, and only as a whole, as in SELECT {name}.start, count(*) FROM bids GROUP BY "
        f"{name}(ts, '10 minutes')"
    )


def _words(kind: str) -> str:
    return kind.removeprefix("Unresolved")
