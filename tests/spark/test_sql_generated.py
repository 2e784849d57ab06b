"""Random queries of ``flux.sql`` against DuckDB over the same rows: 2,100, of which ``make test`` has 31."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from in_process import rows_of
from sql_flows import batches, flows, tables
from sql_queries import Queries

import flux

duckdb = pytest.importorskip("duckdb")
pytestmark = pytest.mark.spark

SETS = 5
ALL = range(2_100)
#: The shortest of the first hundred in which each keyword, function, operator and kind of query of that hundred comes twice, or
#: once if the hundred has it once.
FEW = (
    2, 9, 14, 16, 23, 25, 26, 34, 37, 38, 40, 41, 48, 57, 65, 69, 71, 72, 73, 74, 78, 79, 82, 84, 90, 91, 94, 96, 97, 98, 99
)  # fmt: skip
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def plain(value: Any) -> Any:
    """Return a value as both sides have it: times in microseconds, doubles with twelve digits."""
    if isinstance(value, datetime.datetime):
        value = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        return (value - EPOCH) // datetime.timedelta(microseconds=1)
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Decimal):
        return int(value)
    return {name: plain(part) for name, part in value.items()} if isinstance(value, dict) else value


def counted(rows: Iterable[Iterable[Any]]) -> Counter[str]:
    return Counter(repr([plain(value) for value in row]) for row in rows)


class Oracle:
    """DuckDB over the rows of one set."""

    def __init__(self, number: int) -> None:
        self.rows = tables(number)
        self._connection = duckdb.connect()
        for name, table in self.rows.items():
            local = table.cast(pa.schema([each.with_type(pa.timestamp("us")) if pa.types.is_timestamp(each.type) else each
                                          for each in table.schema]))  # fmt: skip
            self._connection.register(name, local)

    def answer(self, text: str) -> Counter[str]:
        return counted(self._connection.sql(text).fetchall())


def compare(spark: Any, seeds: Iterable[int]) -> int:
    """Compare the answers of queries, and return the number of those with rows."""
    oracles, full = [Oracle(number) for number in range(SETS)], 0
    for seed in seeds:
        query, oracle = Queries(seed).query(), oracles[seed % SETS]
        found = rows_of(spark, flux.sql(query.spark, flows()), batches(oracle.rows, 5 + seed % 20))
        ours, theirs = (
            counted(zip(*(column.to_pylist() for column in found.columns), strict=True)),
            oracle.answer(query.duck),
        )
        assert ours == theirs, f"seed {seed}: {query.spark}\n{query.duck}\n{ours - theirs}\n{theirs - ours}"
        full += bool(ours)
    return full


def test_random_queries_give_the_answers_of_duckdb(spark: Any) -> None:
    assert compare(spark, FEW) > 25


@pytest.mark.long
def test_2000_random_queries_give_the_answers_of_duckdb(spark: Any) -> None:
    assert compare(spark, (seed for seed in ALL if seed not in FEW)) > 1_500
