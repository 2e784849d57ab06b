"""Texts that ``flux.sql`` refuses: each with its place and a remedy, before anything is analysed. And the closed list against the
kinds of nodes that Spark's parser makes, and against all functions of Spark."""

from __future__ import annotations

import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pyspark
import pytest
from sql_flows import flows

import flux
from spark_integration.sql import accepted_nodes, functions, refusals
from spark_integration.sql.accepted_nodes import NameScope, check
from spark_integration.sql.analysis import TextSession
from spark_integration.sql.text import QueryText
from spark_integration.sql.trees import class_of, fields_of, listed

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

#: Texts, the part of each that the error shows, and words of the reason.
REFUSED = [
    # functions and names that could reach outside
    ("SELECT java_method('java.lang.System', 'getenv', 'HOME') FROM bids", "java_method", "reaches outside of the rows"),
    ("SELECT reflect('java.lang.System', 'exit', 1) FROM bids", "reflect", "reaches outside of the rows"),
    ("SELECT input_file_name() FROM bids", "input_file_name", "reaches outside of the rows"),
    ("SELECT system.builtin.upper(channel) FROM bids", "system.builtin", "a name in several parts"),
    ("SELECT * FROM parquet.`/etc/passwd`", "parquet.`/etc", "there is no flow"),
    ("SELECT * FROM `/etc/passwd`", "`/etc", "there is no flow"),
    ("SELECT * FROM spark_catalog.default.bids", "spark_catalog", "there is no flow"),
    ("SELECT * FROM read_files('/etc/passwd')", "read_files", "reads the flows that are given"),
    ("SELECT * FROM range(10)", "range", "reads the flows that are given"),
    ("SELECT TRANSFORM(price) USING 'cat' FROM bids", "SELECT TRANSFORM", "TRANSFORM runs a program"),
    ("SET spark.sql.ansi.enabled=false", "SET", "SetCommand is no part"),
    ("ADD JAR '/tmp/x.jar'", "ADD", "is no part"),
    ("CREATE TABLE t AS SELECT * FROM bids", "CREATE", "is no part"),
    ("CREATE TEMPORARY FUNCTION f AS 'java.lang.Object'", "CREATE", "is no part"),
    ("INSERT INTO t SELECT * FROM bids", "INSERT", "is no part"),
    ("INSERT OVERWRITE DIRECTORY '/tmp/x' USING csv SELECT * FROM bids", "INSERT", "is no part"),
    ("DROP VIEW bids", "DROP", "is no part"),
    ("DESCRIBE bids", "DESCRIBE", "is no part"),
    ("EXPLAIN SELECT * FROM bids", "EXPLAIN", "is no part"),
    ("BEGIN SELECT 1; END", "BEGIN", "a script"),
    ("SELECT secret() FROM bids", "secret", "Functions of the session are not called"),
    ("SELECT user FROM bids", "user", "CurrentUser"),
    ("SELECT * FROM bids VERSION AS OF 1", "VERSION", "a flow has its rows once"),
    ("SELECT * FROM bids WITH (path = '/etc')", "bids", "without STREAM and options"),
    ("WITH x AS (SELECT * FROM secrets) SELECT * FROM bids", "secrets", "there is no flow"),
    # relations
    ("SELECT price FROM bids ORDER BY price", "ORDER BY", "flux.top"),
    ("SELECT price FROM bids LIMIT 3", "LIMIT", "flux.top"),
    ("SELECT price FROM bids\nWHERE price > 1\nOFFSET 3", "OFFSET", "flux.top"),
    ("SELECT * FROM bids TABLESAMPLE (3 PERCENT)", "TABLESAMPLE", "WHERE over a key"),
    ("SELECT 1", "SELECT", "without FROM"),
    ("VALUES (1)", "VALUES", "give them as a DataFrame"),
    ("SELECT ts FROM bids EXCEPT SELECT ts FROM auctions", "SELECT ts FROM bids EXCEPT", "LEFT ANTI JOIN"),
    ("SELECT ts FROM bids INTERSECT SELECT ts FROM auctions", "SELECT ts FROM bids INTERSECT", "LEFT SEMI JOIN"),
    ("SELECT * FROM bids LATERAL VIEW explode(array(1)) AS x", "LATERAL VIEW", "several rows are made of one"),
    ("SELECT * FROM bids, LATERAL (SELECT bids.price + 1)", "FROM bids, LATERAL", "several rows are made of one"),
    ("SELECT * FROM bids PIVOT (count(*) FOR channel IN ('a'))", "PIVOT", "PIVOT"),
    ("SELECT /*+ BROADCAST(b) */ * FROM bids b", "/*+", "a hint"),
    ("SELECT * FROM bids DISTRIBUTE BY auction", "DISTRIBUTE BY", "withStage"),
    ("FROM bids |> WHERE price > 1", "", "the operator |>"),
    ("SELECT * FROM STREAM bids", "", "without STREAM"),
    ("SELECT * FROM bids WATERMARK ts DELAY OF INTERVAL 5 MINUTES", "WATERMARK", "withWatermark"),
    ("WITH RECURSIVE r AS (SELECT 1) SELECT * FROM bids", "WITH", "does not read its own result"),
    ("SELECT * FROM bids NATURAL JOIN auctions", "NATURAL", "USING"),
    ("SELECT bidder, count(*) FROM bids GROUP BY ROLLUP(bidder)", "GROUP BY ROLLUP", "UNION ALL between"),
    ("SELECT bidder, count(*) FROM bids GROUP BY bidder GROUPING SETS ((bidder), ())", "GROUP BY", "UNION ALL between"),
    ("SELECT bidder, count(*) FROM bids GROUP BY ALL", "ALL", "name the keys"),
    # expressions
    ("SELECT price FROM bids WHERE price IN (SELECT id FROM auctions)", "IN (SELECT", "LEFT SEMI JOIN"),
    ("SELECT price FROM bids WHERE EXISTS (SELECT 1 FROM auctions)", "SELECT", "LEFT SEMI JOIN"),
    ("SELECT (SELECT max(id) FROM auctions) FROM bids", "(SELECT max", "stands in FROM only"),
    ("SELECT row_number() OVER (ORDER BY ts) FROM bids", "row_number", "flux.top"),
    ("SELECT max(price) OVER w FROM bids WINDOW w AS (PARTITION BY auction)", "", "several rows"),
    ("SELECT filter(array(1), x -> x > 0) FROM bids", "filter", "not among the functions"),
    ("SELECT :price FROM bids", ":price", "no parameters"),
    ("SELECT ? FROM bids", "?", "no parameters"),
    ("SELECT channel LIKE ANY ('a%', 'b%') FROM bids", "LIKE ANY", "by itself"),
    ("SELECT channel COLLATE UTF8_LCASE FROM bids", "channel COLLATE", "COLLATE"),
    ("SELECT rand() FROM bids", "rand", "other values when rows are read again"),
    ("SELECT now() FROM bids", "now", "as the time of a window it is"),
    ("SELECT current_timestamp FROM bids", "current_timestamp", "CurrentTimestamp"),
    ("SELECT initcap(channel) FROM bids", "initcap", "not among the functions"),
    ("SELECT uper(channel) FROM bids", "uper", "did you mean 'upper'"),
    ("SELECT collect_list(price) FROM bids", "collect_list", "not among the functions"),
    ("SELECT explode(array(1, 2)) FROM bids", "explode", "several rows are made of one"),
    ("SELECT first(price) IGNORE NULLS FROM bids", "first", "not among the functions"),
    ("SELECT sum(*) FROM bids", "*", "name the columns"),
    ("SELECT upper(DISTINCT channel) FROM bids", "upper", "for aggregates"),
    # windows
    ("SELECT window(ts, '1 minute') FROM bids", "window", "a key of GROUP BY"),
    ("SELECT count(*) FROM bids GROUP BY window(ts, '1 minute').start", "window", "only as a whole"),
    ("SELECT window(ts, '2 minutes'), count(*) FROM bids GROUP BY window(ts, '1 minute')", "GROUP BY window(ts", "Multiple"),
    ("SELECT window_time(window), count(*) FROM bids GROUP BY window(ts, '1 minute')", "window_time", "the time of a longer"),
    ("SELECT count(*) FROM bids GROUP BY window(ts, '1 minute'), session_window(ts, '1 minute')", "", ""),
    ("SELECT count(*) FROM bids GROUP BY window(price, '1 minute')", "window(price", "TIMESTAMP"),
    ("SELECT count(*) FROM bids GROUP BY window(ts, '0 minutes')", "window", ""),
    ("SELECT count(*) FROM bids GROUP BY window(ts, 'soon')", "window", ""),
    ("SELECT count(*) FROM bids GROUP BY session_window(ts, concat(channel, ' minutes'))", "session_window", "a constant"),
    # names and types
    ("SELECT prise FROM bids", "prise", "`price`"),
    ("SELECT b.price FROM bids a", "b.price", "cannot be resolved"),
    ("SELECT a.ts FROM bids a\n  JOIN bids b ON a.bidder = b.bidder AND ts = b.ts", "ts =", "ambiguous"),
    ("SELECT price FROM bids GROUP BY auction", "GROUP BY", "not participating in the GROUP BY"),
    ("SELECT price FROM bids WHERE max(price) > 1", "SELECT", "WHERE condition"),
    ("SELECT price + INTERVAL 1 DAY FROM bids", "price + INTERVAL", "type"),
    ("SELECT abs(1, 2) FROM bids", "abs", "parameters"),
    ("SELECT price FROM bids HAVING price > 1", "", ""),
    # joins and duplicates
    ("SELECT 1 AS one FROM bids JOIN auctions", "JOIN auctions", "a join without a condition"),
    ("SELECT 1 AS one FROM bids JOIN auctions ON auction = id", "auction = id", "A text says bounds alone"),
    ("SELECT 1 AS one FROM bids b JOIN auctions a ON b.ts = a.ts + INTERVAL 1 MINUTE OR price = 1", "b.ts", "equality"),
    ("SELECT DISTINCT bidder FROM bids", "SELECT DISTINCT", "GROUP BY window"),
    # mistakes
    ("SELEC price FROM bids", "SELEC", "Syntax error"),
    ("SELECT price\nFROM bids WHERE price >", "", "Syntax error"),
    ("SELECT price FROM bids; SELECT 1", "SELECT 1", "Syntax error"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "part", "told"), REFUSED)
def test_a_text_is_refused_with_its_place(text: str, part: str, told: str) -> None:
    with pytest.raises(flux.UsageError) as raised:
        flux.sql(text, flows())
    message = str(raised.value)
    place = re.match(r"flux\.sql, line (\d+), position (\d+), at ", message)
    assert place, message
    assert told in message
    line, position = map(int, place.groups())
    lines = text.split("\n")
    assert lines[line - 1][position - 1 :].startswith(part.split("\n")[0]), message
    assert "SQLSTATE" not in message


_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_ODD = (
    "\0",
    "`",
    "'",
    "--",
    "/*",
    ";",
    "|>",
    "->",
    "::",
    "OVER",
    "LATERAL",
    "9" * 40,
    "1e999",
    "X'1F'",
    "${env:HOME}",
    "DEFAULT",
    "é",
)


def changed(draw: random.Random) -> str:
    """Return a text in which a few words are left out, replaced, or taken from another one."""
    texts = [*(text for text, *_ in REFUSED), *ACCEPTED.split("---")]
    words = _WORDS.findall(draw.choice(texts))
    for _ in range(draw.randint(1, 4)):
        at, other = draw.randrange(len(words) + 1), _WORDS.findall(draw.choice(texts))
        begin = draw.randrange(len(other))
        kinds = ([], [draw.choice(_ODD)], [draw.choice(other)], other[begin : begin + draw.randint(1, 8)])
        words[at : at + draw.randrange(2)] = draw.choice(kinds)
    return "".join(words)


def refused_or_a_flow(seeds: range) -> None:
    given = flows()
    for seed in seeds:
        text = changed(random.Random(seed))
        told = ""
        try:
            assert flux.sql(text, given).columns, text
        except flux.UsageError as error:
            told = str(error)
        assert told == "" or told.startswith("flux.sql"), text


def test_changed_texts_are_flows_or_refused() -> None:
    refused_or_a_flow(range(100))


@pytest.mark.long
def test_3000_changed_texts_are_flows_or_refused() -> None:
    refused_or_a_flow(range(100, 3_100))


@pytest.mark.parametrize(
    "text",
    [
        "(" * 3_000 + "1" + ")" * 3_000,
        "SELECT " + "+".join(["price"] * 20_000) + " FROM bids",
        "SELECT * FROM " + "(SELECT * FROM " * 150 + "bids" + ")" * 150,
        "SELECT price FROM bids --" + "x" * 100_000,
    ],
    ids=["parentheses", "sum", "subqueries", "length"],
)
def test_a_text_that_is_too_large_is_refused(text: str) -> None:
    with pytest.raises(flux.UsageError, match=r"flux\.sql"):
        flux.sql(text, flows())


#: A text for each accepted kind of node.
ACCEPTED = """
SELECT * EXCEPT (ts), *, a.b[0] AS x, s.f, -price, +price, ~price, price + 1 - 2 * 3 / 4 % 5, price DIV 2, price & 1 | 2 ^ 3,
    CAST(price AS STRING), upper(channel) || 'x', trim(BOTH 'x' FROM channel),
    trim(LEADING 'x' FROM channel), trim(TRAILING FROM channel),
    position('a' IN channel), substring(channel FROM 1 FOR 2), timestampadd(MINUTE, 1, ts), timestampdiff(DAY, ts, ts),
    (price, channel), struct(price)
FROM bids WHERE price = 1 AND NOT price <=> 2 OR price < 1 OR price <= 1 OR price > 1 OR price >= 1 OR price IS NULL
    OR price IS NOT NULL OR price IN (1, 2) OR channel LIKE 'a' OR channel ILIKE 'b' OR channel RLIKE 'c'
    OR CASE WHEN price = 1 THEN true END
---
WITH t(a, b) AS (SELECT DISTINCT auction, max(price) FROM bids GROUP BY 1 HAVING count(*) > 1)
SELECT a FROM t JOIN auctions AS x ON a = id UNION ALL SELECT a FROM (SELECT a FROM t)
"""


def test_every_accepted_kind_has_a_text_and_each_other_kind_of_the_parser_a_refusal(spark: Any) -> None:
    session, kinds = TextSession(spark), (set[str](), set[str]())
    for each in ACCEPTED.split("---"):
        text = QueryText(each)
        parsed = session.parsed(text)
        check(text, parsed, NameScope(frozenset(("bids", "auctions")), False))
        _collect(parsed, *kinds)
    assert set(accepted_nodes.RELATIONS) - kinds[0] == set()
    assert set(accepted_nodes.EXPRESSIONS) - kinds[1] == set()

    made = _made_by_the_parser()
    assert len(made) > 300
    assert {kind for kind in made if kind in accepted_nodes.RELATIONS or kind in accepted_nodes.EXPRESSIONS} <= kinds[
        0
    ] | kinds[1]
    for kind in made - kinds[0] - kinds[1]:
        assert len(refusals.of_relation(kind)) > 30
        wrong = accepted_nodes._wrong_with({"class": kind}, "Project", True)
        assert wrong is not None
        assert len(wrong) > 30
    named = set(refusals.RELATIONS) | set(refusals.EXPRESSIONS)
    if pyspark.__version__ >= "4.3":  # an older one lacks some
        assert named <= _classes_of_spark(), "a reason is for a class that Spark has"
    assert not named & (kinds[0] | kinds[1]), "a kind is accepted or has a reason against it"


def _collect(relation: Any, relations: set[str], expressions: set[str]) -> None:
    relations.add(class_of(relation))
    for expression in listed(relation.expressions()):
        expressions.update(fields["class"] for fields in fields_of(expression))
    below = listed(relation.children())
    if class_of(relation) == "UnresolvedWith":
        below += [each for _, each in accepted_nodes.named_relations(relation)]
    for each in below:
        _collect(each, relations, expressions)


_NODES = r"org/apache/spark/sql/(?:catalyst/(?:plans/logical|analysis|expressions)|execution)/(?:\w+/)*(\w+)"


def _jars(pattern: str) -> list[zipfile.ZipFile]:
    return [zipfile.ZipFile(path) for path in (Path(pyspark.__file__).parent / "jars").glob(pattern)]


def _classes_of_spark() -> set[str]:
    names = [name for jar in _jars("spark-*_2*.jar") for name in jar.namelist()]
    return {found.group(1) for name in names if (found := re.fullmatch(_NODES + r"\.class", name))}


def _made_by_the_parser() -> set[str]:
    """Return the classes of nodes that the code of Spark's parsers names."""
    found: set[str] = set()
    for jar in _jars("spark-*_2*.jar"):
        for name in jar.namelist():
            if re.search(r"/(AstBuilder|SparkSqlAstBuilder|DataTypeAstBuilder)(\$.*)?\.class$", name):
                found |= {each.decode() for each in re.findall(_NODES.encode(), jar.read(name))}
    return found


def test_every_function_of_spark_is_listed_or_refused_by_name(spark: Any) -> None:
    known = {
        str(each.getName())
        for each in spark._jvm.org.apache.spark.sql.api.python.PythonSQLUtils.listBuiltinFunctionInfos()
    }
    ours = functions.OF_ROWS | functions.AGGREGATES | functions.CASTS
    special = functions.WINDOWS | functions.CLOCKS | {functions.WINDOW_TIME}
    assert len(known) > 400
    assert ours | special <= known
    for name in known:
        wrong = accepted_nodes._wrong_with({"class": "UnresolvedFunction", "nameParts": f"[{name}]"}, "Project", True)
        assert (wrong is None) == (name in ours)
        assert wrong is None or name in wrong


def nested(levels: int) -> str:
    """Return a text whose relations name the one before twice."""
    parts = ["t0 AS (SELECT price FROM bids)"]
    parts += [
        f"t{each} AS (SELECT * FROM t{each - 1} UNION ALL SELECT * FROM t{each - 1})" for each in range(1, levels)
    ]
    return f"WITH {', '.join(parts)} SELECT * FROM t{levels - 1}"


def test_relations_count_as_often_as_they_are_named(spark: Any) -> None:
    session, names = TextSession(spark), NameScope(frozenset(("bids",)), False)
    few, many = QueryText(nested(5)), QueryText(nested(12))
    check(few, session.parsed(few), names)
    with pytest.raises(flux.UsageError, match="more than 1,000 relations"):
        check(many, session.parsed(many), names)


def test_parts_of_expressions_count_as_often_as_their_relation_is_named(spark: Any) -> None:
    """Spark's analyser takes a second for some thousands of them, and other texts wait."""
    session, names = TextSession(spark), NameScope(frozenset(("bids",)), False)

    def listed_in(values: int) -> str:
        return f"SELECT price FROM bids WHERE price IN ({', '.join(map(str, range(values)))})"

    few = QueryText(listed_in(accepted_nodes.PARTS_MAX - 10))
    assert accepted_nodes.PARTS_MAX - 10 < check(few, session.parsed(few), names).parts <= accepted_nodes.PARTS_MAX
    often = f"WITH t AS ({listed_in(accepted_nodes.PARTS_MAX // 3)}) {' UNION ALL '.join(['SELECT * FROM t'] * 4)}"
    for text in map(QueryText, (listed_in(accepted_nodes.PARTS_MAX), often)):
        with pytest.raises(flux.UsageError, match="more than 2,000 parts"):
            check(text, session.parsed(text), names)


def test_a_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(flux.UsageError, match="half a character"):
        flux.sql("SELECT '\ud800' FROM bids", flows())
