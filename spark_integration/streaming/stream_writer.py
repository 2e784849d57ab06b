"""``df.writeStream.format("flux")``: a streaming query of Spark that writes into an input of a running query (design:
micro-batches).

Its tasks are ingress tasks, as those of ``flux.stream(streaming_df)``. They end when all consumers have applied their rows,
so there is nothing left to do when Spark commits a batch, and nothing to take back when it fails: Spark repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructType

from flux.errors import SchemaError, UsageError
from spark_integration.schema import struct_to_arrow
from spark_integration.streaming import ingress_file
from spark_integration.tasks.entry_points import send_micro_batch

OPTIONS = ("query", "input")
#: Options for Spark itself, which it passes to the data source, too.
OF_SPARK = ("checkpointlocation", "queryname")


@dataclass
class AppliedPartition(WriterCommitMessage):  # type: ignore[misc]
    """Result of one partition of a batch, which all consumers have applied."""

    #: Rows that the partition had in all batches, if it has any in this one.
    end: int


class StreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """Writer of one micro-batch: ``write`` is called in its tasks. ``columns`` has the place of each column of the input in
    the rows."""

    def __init__(self, inputs: ingress_file.Inputs, source: int, columns: list[int]) -> None:
        self._inputs = inputs
        self._source = source
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = (batch.select(self._columns) for batch in iterator)
        return AppliedPartition(send_micro_batch(self._inputs.plan, self._inputs.rendezvous, self._source, rows)[0].end)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass


def writer_of(options: dict[str, str], schema: StructType) -> StreamWriter:
    """Make the writer. Option ``query`` is the name or id of a running query of this user on this host; ``input`` the name of
    the ``flux.stream`` in its flow, if it has several. UsageError and SchemaError list the choices."""
    given = {key.lower(): value for key, value in options.items()}
    unknown = sorted(given.keys() - {*OPTIONS, *OF_SPARK})
    if "path" in unknown:
        raise UsageError(
            "format('flux') writes to no path; leave the path of start() out. option('query', ...) says into which running query"
        )
    if unknown:
        raise UsageError(
            f"format('flux') has no option {unknown[0]!r}; it has {', '.join(OPTIONS)} and checkpointLocation"
        )
    if not given.get("query"):
        raise UsageError("format('flux') needs option('query', ...): the queryName, or the id, of a running Flux query")
    inputs = ingress_file.find(given["query"])
    source = inputs.source(given.get("input"))
    columns = columns_for(schema, source.schema, f"input {source.name!r} of query {inputs.name}")
    return StreamWriter(inputs, source.id, columns)


def columns_for(given: StructType, wanted: pa.Schema, what: str) -> list[int]:
    """Find the columns of the input in the streaming DataFrame: by name, in any order. Types must be those of the input; time
    zones may differ, they are those of the sessions."""
    columns = struct_to_arrow(given, "UTC")
    wrong = [f"it has no {name}" for name in wanted.names if name not in columns.names]
    for field in columns:
        if field.name not in wanted.names:
            wrong.append(f"{field.name} is too much")
        elif columns.names.count(field.name) > 1:
            wrong.append(f"{field.name} is there twice")
        elif _named(field.type) != _named(wanted.field(field.name).type):
            wrong.append(f"{field.name} has another type")
    if wrong:
        raise SchemaError(
            f"{what} takes the columns ({_shown(wanted)}), in any order; the streaming DataFrame has ({_shown(columns)}): "
            f"{', '.join(dict.fromkeys(wrong))}. Choose, rename and cast columns with df.select(...) before writeStream"
        )
    return [columns.names.index(name) for name in wanted.names]


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {_type_of_spark(field.type)}" for field in schema)


def _type_of_spark(type_: pa.DataType) -> str:
    try:
        return str(from_arrow_type(type_, prefer_timestamp_ntz=True).simpleString())
    except PySparkTypeError:  # it has none for this
        return str(type_)


def _named(type_: pa.DataType) -> str:
    """Describe the type without time zones, wherever they are in it, and without names of the elements of lists."""
    return re.sub(r"list<\w+: ", "list<", re.sub(r", tz=[^\]]*\]", ", tz]", str(type_)))
