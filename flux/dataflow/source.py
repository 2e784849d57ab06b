"""Origins of rows, as a user declares them: DataFrames, readers that workers call, and Structured Streaming."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.arguments import checked
from flux.dataflow.row_operators import RowOperators
from flux.dataflow.source_reader import FunctionReader, SourceReader
from flux.errors import NoSuchAttribute, UsageError
from flux.operators.schema import check_columns
from flux.operators.user_code import named, signature, takes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flux.dataflow.row_flow import RowFlow

#: Refusal of ``late`` where there is no watermark.
NO_LATE = (
    "late rows are those of a source with a watermark: bids = source.withWatermark('ts', '10 seconds'), and bids.late is the "
    "flow of its late rows"
)


class Positioned(NamedTuple):
    """Rows of a source, with the position from which a reader goes on behind them."""

    batch: pa.RecordBatch
    #: A number, text, bytes, or lists and dicts of these. It comes back as it was, but with lists in place of tuples.
    position: Any
    #: int64 for each row, for readers with ``row_numbers`` (see ``source``).
    numbers: np.ndarray | None = None


class RowStart(NamedTuple):
    """The start of a reader whose rows bring their numbers."""

    #: The number of the first row that is wanted.
    number: int
    #: The newest position that was given before this row; None: there is none.
    position: Any = None
    #: The newest known position, which may lie behind rows that are to come again; None: there is none.
    newest: Any = None


class Source(RowOperators):
    """An origin of rows: a Spark DataFrame, or a Python function that workers call (``flux.source``)."""

    def __init__(self, name: str, declared: Any) -> None:
        """Name the source. ``declared`` tells its schema."""
        self.name = name
        self.declared = declared

    def __getattr__(self, name: str) -> Any:
        if name in (
            "to",
            "to_parquet",
            "to_kafka",
            "foreach_batch",
            "writeStream",
            "toDF",
            "start",
            "show",
            "collect",
            "withStage",
        ):
            raise NoSuchAttribute(
                f"a source has no {name}(): call a stage with it first, as in my_stage(source).{name}(...)"
            )
        if name == "late":
            raise NoSuchAttribute(NO_LATE)
        return self._column_or_error(name)

    def _with_watermark(self, *arguments: Any) -> RowFlow:
        from flux.dataflow.row_flow import RowFlow

        return RowFlow(self, ())._with_watermark(*arguments)

    def __repr__(self) -> str:
        return f"<flux source {self.name}>"


class DataFrameSource(Source):
    """A source that the tasks of a Spark job read."""

    def __init__(self, name: str, dataframe: DataFrame) -> None:
        super().__init__(name, dataframe)
        self.dataframe = dataframe


@dataclass(frozen=True)
class StreamOptions:
    """Options of the streaming query that feeds a source."""

    #: Spark's checkpoint location; None: beside that of the query itself.
    checkpoint: str | None = None
    #: As ``DataStreamWriter`` takes it, like ``output_mode``.
    trigger: tuple[tuple[str, Any], ...] = ()
    output_mode: str = "append"


class WorkerSource(Source):
    """A source that is read inside the workers; see ``source``. A function in place of ``reader`` is wrapped; only then ``seeks``
    and ``positions`` count."""

    def __init__(
        self,
        name: str,
        reader: SourceReader | Callable[..., Iterable[pa.RecordBatch | Positioned | None]],
        partitions: int,
        schema: Any,
        seeks: bool = False,
        positions: bool = False,
    ) -> None:
        super().__init__(name, schema)
        self.reader = reader if isinstance(reader, SourceReader) else FunctionReader(reader, seeks, positions)
        self.partitions = partitions


class StreamSource(Source):
    """Micro-batches of Spark's Structured Streaming (design: micro-batches); see ``stream``. Without a DataFrame, the user starts
    a streaming query that writes into the source."""

    def __init__(self, name: str, declared: Any, dataframe: DataFrame | None = None, how: StreamOptions | None = None):
        super().__init__(name, declared)
        self.dataframe = dataframe
        self.how = how or StreamOptions()


@checked("flux.source")
def source(
    read: SourceReader | Callable[..., Iterable[pa.RecordBatch | Positioned | None]],
    schema: Any = None,
    partitions: int | None = None,
    name: str | None = None,
    positions: bool = False,
) -> Source:
    """Make a source that is read inside the workers, of a ``flux.SourceReader`` or of a function: ``read(p)`` gives the batches
    of partition p, 0 <= p < partitions. A SourceReader may bring schema and partitions of its own, and says itself whether it
    has positions. ``docs/extending.md`` shows one; the rest of this text is about functions.

    ``read`` is shipped with the task and called once per life of the worker that reads the partition. It must not
    block: yield None for "no rows now". When that worker is lost, another calls ``read`` again and must get the
    same batches from the start; a function of two arguments, ``read(p, start)``, may leave out the first ``start``
    batches (not counting batches without rows), and its batches must stay within ``spark.flux.batch.*``. schema: DDL
    string, StructType or pyarrow schema of the batches.

    positions: ``read(p, start)`` has positions of its own, as a file or a topic has. It yields ``flux.Positioned(batch,
    position)``, where the position says from where a later reader goes on behind the batch; ``start`` is None, or a position that
    was given before. It must then give the same rows in the same order, but the batches may be cut elsewhere, and have any
    size. Some batches may come without a position, or with None: no reader begins behind them. A position behind a batch without
    rows is not kept.

    Rows are counted, so a source with positions must give them all again behind a position. A log that may lose rows, as by
    retention, sets the attribute ``row_numbers`` of ``read`` to true and gives ``flux.Positioned(batch, position, numbers)``: the
    number of each row, as its offset, of 64 bits and ascending, with or without gaps. A number stands for the same row in every
    life. ``start`` is then None or a ``flux.RowStart``: all rows from its number on that are still there are wanted. Steps that
    have to be repeated, and whose rows are gone, end the query with DataLost, or go on without these rows if an attribute
    ``goes_on_after_loss`` of ``read`` is true.

    ``read`` may be an object with a method ``prepare(kept)`` besides. It is called on a copy, in the program that starts the
    query, before it starts, and settles where all lives of the query begin. ``kept``: None, or the result of ``prepare`` when a
    query with the same ``checkpointLocation`` was started for the first time. The result must be data for JSON. ``forget()`` is
    called there when a query without a ``checkpointLocation`` has ended. ``partition_name(partition)`` is the name of a partition
    in reports.

    If ``read`` has an attribute ``may_grow`` that is true, a later start may have more partitions than the checkpoint location
    knows; the older partitions must keep their numbers, and ``kept`` is the result of the last start. If it has a method
    ``unread()``, this is called every few seconds in a thread of the program that started the query, and may take some seconds:
    it returns the names of things that have come meanwhile and are not read. ``lastProgress``, ``flux status`` and the log show
    them.

    ``endless``, an attribute that is true, says that the source never ends: calls that would wait for its end are refused. If
    ``keeps_partitions`` is true, a query that goes on from a checkpoint location has as many partitions as at its first start,
    whatever value ``partitions`` has by then, and ``prepare(kept)`` must ensure that these are the same.

    The iterator that ``read`` returns may have methods, too. All are called by the worker's thread and must not block:
      close()  no more batches are taken from it
      when_ready(ring)  called once, before the first batch is taken. ``ring`` is a function without arguments, which any thread
               may call and which does not wait. An iterator with this method must call ``ring`` whenever something has come after
               it has yielded None, also an error or the end; it is asked then, and only now and then otherwise
      pauses() the number of times that it had no rows until now. Without it, each None counts; a reader that reads ahead gives
               None also while rows are on their way, and ``processAllAvailable`` would not wait for them
      lag()    two whole numbers: that of the next record, and the one behind the last existing record. None: not known
               yet. ``lastProgress``, ``flux status`` and the metrics show the difference. An attribute ``lag_unit`` of ``read``
               names things other than records, in the singular, as "file"
      bad_records()  the number of records that this reader could not read and left out or put aside. ``lastProgress``,
               ``flux status`` and the metrics show the sum
      done(position)  called about once a second, if there is news: every replica of every consumer has applied all rows before
               this position, which the iterator has given. A later reader may be asked to begin somewhat before it"""
    reader = read if isinstance(read, SourceReader) else _function_reader(read, positions)
    if isinstance(read, SourceReader):
        schema = reader.schema if schema is None else schema
        partitions = reader.partitions if partitions is None else partitions
        _check_reader(reader, positions)
    if schema is None:
        raise UsageError("flux.source: the schema of the rows is missing: schema='user BIGINT, amount DOUBLE'")
    if not isinstance(partitions, int) or not 1 <= partitions <= 4096:
        raise UsageError(f"flux.source: partitions must be 1 to 4096, got {partitions!r}")
    called = str(name or (type(reader).__name__ if reader is read else getattr(read, "__name__", "source")))
    check_columns(f"source {called}", schema)
    return WorkerSource(called, reader, partitions, schema)


def _check_reader(reader: SourceReader, positions: bool) -> None:
    kind = type(reader).__name__
    if "read" not in reader.defines:
        raise UsageError(f"flux.source: {kind} must define read(self, partition, start)")
    if positions and not reader.positions:
        raise UsageError(f"flux.source: positions=True is for functions; {kind} says positions = False in its class")
    if reader.positions and not reader.seeks:
        raise UsageError(
            f"flux.source: {kind} says seeks = False: then it has no positions, and must say positions = False"
        )
    if reader.row_numbers and not reader.positions:
        raise UsageError(f"flux.source: {kind} says row_numbers = True, which needs positions = True")


def _function_reader(read: Any, positions: bool) -> FunctionReader:
    if isinstance(read, type) and issubclass(read, SourceReader):
        raise UsageError(f"flux.source: read must be a reader, got its class: make one, {read.__name__}(...)")
    if not callable(read):
        raise UsageError(
            f"flux.source: read must be a function of the partition number or a flux.SourceReader, got {type(read).__name__}"
        )
    said, seeks = signature(read), positions
    if said is not None:
        seeks = positions or len([p for p in said.parameters.values() if p.default is p.empty]) == 2
        if not takes(said, 2 if seeks else 1):
            raise UsageError(
                "flux.source: read must take the partition number, read(partition), or that and where to begin, "
                f"read(partition, start){', which positions=True needs' if positions else ''}; got {named(read)}{said}"
            )
        order = list(said.parameters)[:2]
        if seeks and len(order) == 2 and order[1].startswith("part") and not order[0].startswith("part"):
            raise UsageError(
                f"flux.source: read is called with the partition first, read(partition, start); got {named(read)}{said}: change "
                "the order of its arguments"
            )
    return FunctionReader(read, seeks, positions)


#: Kinds of ``DataStreamWriter.trigger``. ``continuous`` and ``realTime`` run no Python sink.
TRIGGERS = ("processingTime", "availableNow")
OUTPUT_MODES = ("append", "update", "complete")


@checked("flux.stream")
def stream(
    streaming: Any,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    trigger: dict[str, Any] | None = None,
    output_mode: str = "append",
    name: str | None = None,
) -> Source:
    """Make a source of the rows of a streaming query of Spark. Each row counts once: by batch, partition and row, also where
    Spark tries a task again, repeats a batch after a restart, or cuts batches into other numbers of partitions.

    streaming    a streaming DataFrame (``spark.readStream...``). It is started and stopped together with the flow. Or a
                 schema (DDL, StructType, pyarrow): then start a streaming query yourself that writes into the flow,
                 ``df.writeStream.format("flux").option("query", name of the flow's query)``
    checkpoint   Spark's checkpoint location of the streaming query. Default: in the ``checkpointLocation`` of the flow's query,
                 or without that a temporary one. The rows that it counts as done are in the state of the flow's query, so a
                 checkpoint that has batches already needs the ``checkpointLocation`` of the query that has read them
    trigger      as for ``DataStreamWriter.trigger``: {"processingTime": "1 second"} or {"availableNow": True}. Default: the next
                 batch begins when the one before has ended
    output_mode  "append", "update" or "complete", where the streaming DataFrame aggregates
    name         name of the source in reports, and for ``option("input", name)``"""
    called = _name(name)
    if _is_dataframe(streaming):
        if not streaming.isStreaming:
            raise UsageError(
                "flux.stream: expected a streaming DataFrame (spark.readStream), got a batch DataFrame: call the stage with it"
            )
        how = StreamOptions(
            _checkpoint(checkpoint), checked_trigger(trigger, "flux.stream, trigger"), _output_mode(output_mode)
        )
        return StreamSource(called, streaming, streaming, how)
    given = [what for what, value in (("checkpoint", checkpoint), ("trigger", trigger)) if value is not None]
    if given or output_mode != "append":
        raise UsageError(
            f"flux.stream: {' and '.join(given) or 'output_mode'} belongs to the streaming query that writes here: "
            "df.writeStream.format('flux') takes it"
        )
    if streaming is None or not (isinstance(streaming, str) or hasattr(streaming, "names")):
        raise UsageError(
            "flux.stream: expected a streaming DataFrame (spark.readStream...load()), or the schema of what a streaming query "
            f"will write; got {type(streaming).__name__}"
        )
    check_columns(f"source {called}", streaming)
    return StreamSource(called, streaming)


def _is_dataframe(given: Any) -> bool:
    return any(t.__name__ == "DataFrame" and t.__module__.startswith("pyspark.sql") for t in type(given).__mro__)


def _name(name: Any) -> str:
    if name is None:
        return "stream"
    if not isinstance(name, str) or not name.strip() or len(name) > 200 or not name.isprintable():
        raise UsageError(f"flux.stream: name must be printable text of up to 200 characters, got {name!r:.250}")
    return name


def _checkpoint(checkpoint: Any) -> str | None:
    if checkpoint is None:
        return None
    text = os.fspath(checkpoint) if isinstance(checkpoint, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"flux.stream: checkpoint must be the path of a directory, got {checkpoint!r:.200}")
    return text


def checked_trigger(trigger: Any, what: str) -> tuple[tuple[str, Any], ...]:
    if trigger is None:
        return ()
    fits = isinstance(trigger, dict) and len(trigger) == 1 and next(iter(trigger)) in TRIGGERS
    (kind, value) = next(iter(trigger.items())) if fits else ("", None)
    if not fits or not (isinstance(value, str) and value if kind == "processingTime" else value is True):
        raise UsageError(
            f'{what}: expected processingTime="1 second" or availableNow=True, got {trigger!r:.200}. Other triggers of Spark run '
            "no Python sink"
        )
    return ((kind, value),)


def _output_mode(mode: Any) -> str:
    if mode not in OUTPUT_MODES:
        raise UsageError(f"flux.stream: output_mode must be one of {', '.join(OUTPUT_MODES)}; got {mode!r:.200}")
    return str(mode)
