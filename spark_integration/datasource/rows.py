"""Rows and record batches of Python data sources, as record batches: exactly the values that Spark makes of them.

Rows are converted column by column. If a column has only values that Spark takes unchanged, no Python code looks at each of
them; all others go through Spark's own converters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import pyarrow as pa
from pyspark.sql.conversion import LocalDataToArrowConversion
from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructType
from pyspark.sql.worker.plan_data_source_read import records_to_arrow_batches

#: Rows of a batch, if the data source gives rows one by one.
ROWS = 10_000
#: Types of values that Spark's converter leaves unchanged, by type of the column.
_AS_IT_IS = {StringType: {str, type(None)}, BinaryType: {bytes, type(None)}}


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema of the batches that data sources give. It does not depend on the time zone of the session."""
    return to_arrow_schema(schema, timezone="UTC")


def batches(given: Any, schema: StructType, source: DataSource) -> Iterator[pa.RecordBatch]:
    """Convert ``given``, the result of ``read``, which has rows or record batches. Raises the errors of Spark for rows that do
    not fit."""
    rows = iter(_iterable(given, source))
    try:
        first = next(rows)
    except StopIteration:
        return
    rows = chain((first,), rows)
    if isinstance(first, pa.RecordBatch):
        yield from records_to_arrow_batches(rows, ROWS, schema, source)
        return
    convert = _converters(schema)
    columns_of = arrow_schema(schema)
    while some := list(islice(rows, ROWS)):
        if set(map(type, some)) <= {tuple, list} and set(map(len, some)) == {len(convert)}:
            # Not zip(*some), which makes an iterator for each row: the garbage collector looks at all of them again and
            # again, and that takes seven times as long.
            columns = [change(list(map(itemgetter(place), some))) for place, change in enumerate(convert)]
            yield pa.RecordBatch.from_arrays(columns, schema=columns_of)
        else:  # rows with names, or wrong ones: Spark handles both
            yield from records_to_arrow_batches(iter(some), ROWS, schema, source)


def _iterable(given: Any, source: DataSource) -> Iterable[Any]:
    if isinstance(given, Iterator):
        return given
    raise TypeError(f"read() of data source {source.name()} must return an iterator, got {type(given).__name__}")


def _converters(schema: StructType) -> list[Callable[[list[Any]], list[Any]]]:
    return [_converter(field.dataType) for field in schema.fields]


def _converter(kind: Any) -> Callable[[list[Any]], list[Any]]:
    if not LocalDataToArrowConversion._need_converter(kind):
        return lambda values: values
    convert, good = LocalDataToArrowConversion._create_converter(kind), _AS_IT_IS.get(type(kind), set())

    def column(values: list[Any]) -> list[Any]:
        return values if set(map(type, values)) <= good else [convert(value) for value in values]

    return column
