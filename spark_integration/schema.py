"""Schemas as users give them (DDL, StructType, pyarrow, a DataFrame's own) and as the exchange needs them (pyarrow)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from flux.errors import SchemaError


def to_arrow(spark: SparkSession, declared: Any) -> pa.Schema:
    """Return the pyarrow schema. SchemaError names the accepted kinds."""
    if isinstance(declared, pa.Schema):
        return declared
    # mapInArrow passes timestamps in the session's time zone
    timezone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    if isinstance(declared, DataFrame):
        return struct_to_arrow(declared.schema, timezone)
    if isinstance(declared, str):
        try:
            declared = StructType.fromDDL(declared)
        except Exception as error:
            raise SchemaError(f"cannot read the schema {declared!r}: {error}") from error
    return struct_to_arrow(declared, timezone)


def struct_to_arrow(declared: Any, timezone: str) -> pa.Schema:
    """Convert a StructType. SchemaError names the column that pyarrow has no type for."""
    if not isinstance(declared, StructType):
        raise SchemaError(
            f"a schema must be a DDL string such as 'user STRING, n BIGINT', a StructType or a pyarrow schema; got {declared!r}"
        )
    fields: list[pa.Field] = []
    for field in declared.fields:
        try:
            fields += to_arrow_schema(StructType([field]), timezone=timezone).remove_metadata()
        except Exception as error:
            kind = field.dataType.simpleString()
            raise SchemaError(
                f"column {field.name!r} of type {kind} cannot be taken: {error}; cast it first"
            ) from error
    return pa.schema(fields)


def for_spark(schema: pa.Schema, what: str) -> tuple[StructType, pa.Schema]:
    """Return the columns as a DataFrame has them, and the types in which Spark reads them. SchemaError names the first column
    that Spark has no type for. ``what`` is the owner of the columns, for the message."""
    struct, fields = StructType(), []
    for field in schema:
        try:
            (found,) = from_arrow_schema(pa.schema([field])).fields
            fields += to_arrow_schema(StructType([found]), timezone="UTC").remove_metadata()
        except Exception as error:
            raise SchemaError(
                f"{what}: Spark has no type for column {field.name!r} of type {field.type}; cast it in the stage that gives it"
            ) from error
        struct.add(found)
    return struct, pa.schema(fields)


def recast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Cast a batch to the types of ``for_spark``: a type that Spark does not read is replaced by one that it reads, as
    large_list by list. Nanoseconds are cut off, as Spark does."""
    if batch.schema.equals(schema):
        return batch
    columns = [column.cast(type_, safe=False) for column, type_ in zip(batch.columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
