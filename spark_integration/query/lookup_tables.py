"""Tables in every worker: read from their DataFrames when a query starts, and kept in its checkpoint location (design: lookup).

Law: a query that goes on from a checkpoint location has the tables that it began with, whatever their DataFrames give by then:
steps that are repeated would give other rows otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame

from flux.dataflow.relations.join_flow import LookupFlow
from flux.dataflow.relations.lookups import RefreshedFlow
from flux.errors import UsageError
from flux.operators.user_code import text_of
from flux.vault.location import Place
from spark_integration.query.checkpoint_location import CheckpointLocation
from spark_integration.tasks.jobs import reason_of

_MIB = 1 << 20
#: The end of the file of a table, behind the CRC-32 of all before it; and the schema in Spark's words, in the metadata.
_MAGIC, _SCHEMA = b"FLUXTAB1", b"spark.schema"


class LookupTables:
    """The tables of a query that is being started. ``location``: its checkpoint location; None: it has none."""

    def __init__(self, bytes_max: int, location: CheckpointLocation | None = None) -> None:
        self._bytes_max = bytes_max
        self._place: Place | None = None if location is None else location.place
        self._goes_on = location is not None and location.about is not None
        #: Each flow with the rows of its table, by its id, in the order in which the compiler asks for them.
        self._rows: dict[int, tuple[LookupFlow | RefreshedFlow, pa.Table]] = {}

    def rows(self, flow: LookupFlow | RefreshedFlow) -> pa.Table:
        """Return the rows of a table. UsageError: there are too many, they cannot be read, or the location has lost them."""
        if id(flow) not in self._rows:
            number = len(self._rows)
            self._rows[id(flow)] = flow, self._kept(number, flow) if self._goes_on else self._read(flow)
        return self._rows[id(flow)][1]

    def keep(self) -> None:
        """Write the tables of a new query into its checkpoint location: before the location is that of the query, so that there
        is none without its tables. A name that begins with a dot does not
        make a location one of a query."""
        if self._place is None or self._goes_on:
            return
        for number, (flow, rows) in enumerate(self._rows.values()):
            told = rows.replace_schema_metadata({_SCHEMA: _schema_of(flow)})
            try:
                self._place.write(_name(number), file_of(told))
            except OSError as error:
                raise UsageError(f"checkpointLocation={str(self._place)!r} cannot be written: {error}") from error

    def _kept(self, number: int, flow: LookupFlow | RefreshedFlow) -> pa.Table:
        assert self._place is not None
        try:
            rows = table_of_file(self._place.read(_name(number)))
        except (OSError, pa.ArrowInvalid) as error:
            raise UsageError(
                f"checkpointLocation={str(self._place)!r}: the table of {flow.stage.name}, with which the query began, cannot be "
                f"read ({_name(number)}): {text_of(error)}. Start the query anew in another directory"
            ) from error
        began, now = rows.schema.metadata[_SCHEMA].decode(), _schema_of(flow)
        if began != now:
            raise UsageError(
                f"join {flow.stage.name}: the query goes on with the table with which it began, {began}, and the DataFrame is "
                f"{now} by now. Give it the same columns and types, or start the query anew in another directory"
            )
        return rows.replace_schema_metadata(None)

    def _read(self, flow: LookupFlow | RefreshedFlow) -> pa.Table:
        where = f"join {flow.stage.name}: the table"
        if isinstance(flow, RefreshedFlow):
            return read_table(flow.dataframe, self._bytes_max, where, OR_RAISE)
        return read_table(flow.dataframe, self._bytes_max, where, OR_JOIN)


#: Remedies for tables that are too large.
OR_RAISE = "df.where(...).select(...); or raise the limit"
OR_JOIN = (
    "flux.batch(df).where(...).select(...); or raise the limit; or say ttl=None for a join that keeps rows of both sides, spread "
    "over partitions"
)


def read_table(
    df: DataFrame, bytes_max: int, where: str, remedy: str, columns: Sequence[int] | None = None
) -> pa.Table:
    """Read these columns of a DataFrame, by position; None: all. Each of its partitions stops when it alone is too large.
    UsageError: it cannot be read, or has more bytes; ``remedy``: what else to do then."""
    try:
        names = [f"c{position}" for position in range(len(df.columns))]
        read = range(len(names)) if columns is None else columns
        plain = df.toDF(*names).select([names[at] for at in read])
        rows = plain.mapInArrow(partial(up_to, bytes_max=bytes_max), plain.schema).toArrow()
    except Exception as error:
        raise UsageError(f"{where} cannot be read: {reason_of(error)}") from error
    if rows.nbytes > bytes_max:
        raise UsageError(
            f"{where} has {rows.nbytes / _MIB:.1f} MiB or more, and spark.flux.lookup.maxBytes allows {bytes_max / _MIB:g} MiB "
            f"in every worker. Choose rows and columns of it first, as with {remedy}"
        )
    return rows.rename_columns([df.columns[at] for at in read])


def up_to(batches: Iterator[pa.RecordBatch], bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Yield batches until they have more than these bytes."""
    given = 0
    for batch in batches:
        yield batch
        given += batch.nbytes
        if given > bytes_max:
            return


def file_of(table: pa.Table) -> bytes:
    """Return the content of the file of a table, with its metadata."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    data: bytes = out.getvalue().to_pybytes()
    return data + _end(data)


def table_of_file(content: bytes) -> pa.Table:
    """Return the table of a file. OSError, ArrowInvalid: it is damaged."""
    end = len(content) - len(_end(b""))
    data = memoryview(content)[: max(end, 0)]
    if content[max(end, 0) :] != _end(data):
        raise OSError("it is damaged")
    return pa.ipc.open_stream(data).read_all()


def _schema_of(flow: LookupFlow | RefreshedFlow) -> str:
    return str(flow.dataframe.schema.simpleString())


def _end(data: bytes | memoryview) -> bytes:
    """Return the bytes behind those of a table."""
    return zlib.crc32(data).to_bytes(4, "little") + _MAGIC


def _name(number: int) -> str:
    return f".table-{number:04d}"
