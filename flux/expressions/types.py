"""Spark's types as Arrow types, and their names.

An expression's type is the Arrow type in which Spark itself hands columns of that type to Python: ``timestamp[us,
UTC]`` for TIMESTAMP in every session, ``timestamp[us]`` for TIMESTAMP_NTZ, ``duration[us]`` for day-time intervals.
Intervals of months, which have no such type of their own, are calendar intervals with months alone: they occur as
literals alone (``CALENDAR``).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as is_

TIMESTAMP = pa.timestamp("us", "UTC")
TIMESTAMP_NTZ = pa.timestamp("us")
DATE = pa.date32()
DAY_TIME = pa.duration("us")
#: A calendar interval: months, days and nanoseconds. Intervals of years and months are such with months alone.
CALENDAR = pa.month_day_nano_interval()
STRING = pa.string()

_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    STRING: "STRING",
    pa.binary(): "BINARY",
    DATE: "DATE",
    TIMESTAMP: "TIMESTAMP",
    TIMESTAMP_NTZ: "TIMESTAMP_NTZ",
    DAY_TIME: "INTERVAL DAY TO SECOND",
    CALENDAR: "INTERVAL",
    pa.null(): "VOID",
}


def spark_name(type_: pa.DataType) -> str:
    """Return the name of a type in Spark's DDL, as messages and the text form have it."""
    if is_.is_decimal(type_):
        return f"DECIMAL({type_.precision},{type_.scale})"
    if is_.is_list(type_):
        return f"ARRAY<{spark_name(type_.value_type)}>"
    if is_.is_map(type_):
        return f"MAP<{spark_name(type_.key_type)}, {spark_name(type_.item_type)}>"
    if is_.is_struct(type_):
        return f"STRUCT<{', '.join(f'{field.name}: {spark_name(field.type)}' for field in type_)}>"
    return _NAMES.get(type_, str(type_))


def bounds(type_: pa.DataType) -> tuple[int, int]:
    """Return the least and the greatest value of an integer type, both included."""
    half = 1 << (type_.bit_width - 1)
    return -half, half - 1
