"""Schemas as users give them (DDL, StructType, pyarrow, a DataFrame's own) and as the exchange needs them (pyarrow)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from flux.errors import SchemaError


def to_arrow(spark: SparkSession, declared: Any) -> pa.Schema:
    """The pyarrow schema; SchemaError says what is accepted."""
    if isinstance(declared, pa.Schema):
        return declared
    if isinstance(declared, DataFrame):
        declared = declared.schema
    try:
        if isinstance(declared, str):
            declared = StructType.fromDDL(declared)
        if isinstance(declared, StructType):
            # mapInArrow hands timestamps over in the session's time zone
            return to_arrow_schema(declared, timezone=spark.conf.get("spark.sql.session.timeZone")).remove_metadata()
    except Exception as error:
        raise SchemaError(f"cannot read the schema {declared!r}: {error}") from error
    raise SchemaError(
        f"a schema must be a DDL string such as 'user STRING, n BIGINT', a StructType or a pyarrow schema; got {declared!r}"
    )


def to_spark(schema: pa.Schema) -> StructType:
    return from_arrow_schema(schema)
