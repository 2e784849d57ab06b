"""Functions that run inside the tasks: worker, ingress, and the identity of their process (design: worker)."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import psutil
import pyarrow as pa
from pyspark import Broadcast, TaskContext

from flux.dataflow.plan import Plan
from flux.errors import QueryFailed, UsageError
from flux.shell.ingress_loop import Ingress
from flux.shell.output_loops import Egress
from flux.shell.process import Rendezvous, Stopped
from flux.shell.worker_loop import WorkerLoop
from flux.tasks.micro_batches import MicroBatch
from flux.windows.window import NEVER
from spark_integration.schema import recast

#: Time for which an ingress task that is told to stop throws away input before it fails. Spark kills it before that.
DRAIN_S = 30.0
#: Local properties of Spark, by which tasks know the streaming query and the micro-batch that they work for.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
#: The columns of a row about a partition of a micro-batch.
REACHED = "partition int, end long, sent array<long>, newest long, late long"
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Reached(NamedTuple):
    """The place that a partition of a streaming query has reached, in all of its batches."""

    #: The number of its rows.
    end: int
    #: By edge that leaves the source: the number behind the last row that travelled. Empty: all did.
    sent: tuple[int, ...] = ()


class PartitionReached(NamedTuple):
    """A row about a partition of a batch, as ``REACHED`` has it."""

    partition: int
    end: int
    sent: list[int]
    newest: int
    late: int


#: The place of a partition that had no rows.
NOTHING = Reached(0)


def worker_function(
    plan: Plan, rendezvous: Rendezvous, slots: Sequence[int]
) -> Callable[[Iterable[int]], Iterator[str]]:
    """Make the function of worker tasks: one long-running task for each of ``slots``, in the order of the job's partitions. It
    gives the last statistics, as JSON."""
    slots = list(slots)

    def run(numbers: Iterable[int]) -> Iterator[str]:
        context = _context()
        for _ in numbers:  # the number is that of the partition, which the context has
            pass
        slot = slots[context.partitionId()]
        yield json.dumps(WorkerLoop(plan, rendezvous).run(slot, context.taskAttemptId(), name_of_executor()))

    return run


def ingress_function(plan: Plan, rendezvous: Rendezvous, source: int) -> ArrowFunction:
    """Make the function of ingress tasks, one per partition of the user's DataFrame: rows in, one row about them out."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = _context()
        partition = context.partitionId()
        names = plan.sources[source].schema.names
        renamed = (pa.RecordBatch.from_arrays(batch.columns, names) for batch in batches)
        ingress = Ingress(plan, rendezvous, source, partition)
        try:
            rows = ingress.run(renamed, context.taskAttemptId())
        except Stopped:
            rows = -1  # the query is over, and no reader is left for the result
            if not ingress.drained(DRAIN_S):
                raise  # a thread still reads Spark's socket: this process must not be used again
        yield pa.RecordBatch.from_pydict(
            {"partition": pa.array([partition], pa.int32()), "rows": pa.array([rows], pa.int64())}
        )

    return run


def micro_batch_function(
    plan: Plan, rendezvous: Rendezvous, source: int, reached: Mapping[int, Reached], again: bool = False,
    watermark: int = NEVER,
) -> ArrowFunction:  # fmt: skip
    """Make the function of tasks for a micro-batch of a streaming query, one per partition: rows go in, one row about them
    comes out, with the columns ``REACHED``. ``reached``: how far each partition that had rows was before the batch. ``again``: a
    part of the batch may have been sent before; ``watermark``: rows below it are late."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        partition = _context().partitionId()
        found, newest, late = send_micro_batch(
            plan, rendezvous, source, batches, reached.get(partition, NOTHING), again, watermark
        )
        yield pa.RecordBatch.from_pydict(
            {
                "partition": pa.array([partition], pa.int32()),
                "end": pa.array([found.end], pa.int64()),
                "sent": pa.array([list(found.sent)], pa.list_(pa.int64())),
                "newest": pa.array([newest], pa.int64()),
                "late": pa.array([late], pa.int64()),
            }
        )

    return run


def table_function(
    plan: Plan, rendezvous: Rendezvous, source: int, rows: Broadcast[bytes], reached: Mapping[int, Reached], again: bool,
    version: int,
) -> Callable[[Iterable[int]], Iterator[PartitionReached]]:  # fmt: skip
    """Make the function of the task that sends a version of a table that is read anew. ``rows``: an Arrow stream; the others are
    as for a micro-batch."""

    def run(numbers: Iterable[int]) -> Iterator[PartitionReached]:
        for _ in numbers:
            pass
        batches = iter(pa.ipc.open_stream(rows.value))
        name = f"table {plan.sources[source].name}"
        found, newest, late = send_micro_batch(
            plan, rendezvous, source, batches, reached.get(0, NOTHING), again, batch=(name, version)
        )
        yield PartitionReached(0, found.end, list(found.sent), newest, late)

    return run


def send_micro_batch(
    plan: Plan,
    rendezvous: Rendezvous,
    source: int,
    batches: Iterator[pa.RecordBatch],
    before: Reached = NOTHING,
    again: bool = False,
    watermark: int = NEVER,
    batch: tuple[str, int] | None = None,
) -> tuple[Reached, int, int]:
    """Send a partition of a micro-batch, in a task of a streaming query, or of another ``batch``: the name of its query and its
    number. Returns when all consumers have applied the rows: how
    far the partition is then, which is ``before`` if it has none in this one, the greatest time of its rows, and the number of
    late ones. Every other outcome raises, also a stop of the query, because Spark commits the batch otherwise."""
    given = (batch for batch in batches if batch.num_rows)
    first = next(given, None)
    # Without rows there is nothing to send. If a part of the batch was sent before, it must be found out that it had no rows
    # then, either.
    if first is None and not again and not _context().attemptNumber():
        return before, NEVER, 0
    context = _context()
    schema = plan.sources[source].schema
    renamed = (in_types(batch, schema) for batch in itertools.chain(() if first is None else (first,), given))
    query, number = batch or (context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID))
    if not query or not number:
        raise UsageError("rows come that are not in a micro-batch of a streaming query: start it with writeStream")
    ingress = Ingress(
        plan, rendezvous, source, context.partitionId(), MicroBatch(query, int(number), *before, watermark)
    )
    try:
        ingress.run(renamed, context.taskAttemptId())
        return Reached(ingress.end, tuple(ingress.sent)), ingress.newest, ingress.late
    except Stopped as error:
        raise QueryFailed(f"the Flux query has ended before batch {number} was applied: {error}") from None


def in_types(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the names of ``schema``, and its time zones: the session of a streaming query may have another one."""
    columns = [
        column if column.type == type_ else column.cast(type_)
        for column, type_ in zip(batch.columns, schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def egress_function(plan: Plan, rendezvous: Rendezvous, stage: int, schema: pa.Schema) -> ArrowFunction:
    """Make the function of tasks that fetch output, one for each partition of the collecting stage: its number goes in, its
    rows come out, by ``schema``."""
    settings = plan.settings

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        attempt = _context().taskAttemptId()
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                egress = Egress(rendezvous, stage, partition, settings.controller_timeout, settings.ordered)
                yield from (recast(rows, schema) for rows in egress.batches(attempt))

    return run


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "runs inside a Spark task"
    return context


def name_of_executor() -> str:
    """Return Spark's id, host and process of the executor, as in ``1@host:4711``; without the id where the driver is the
    executor. The JVM is the parent of the daemon that forked this process.

    Spark does not tell Python tasks the id; every kind of executor has it on its command line."""
    try:
        for ancestor in psutil.Process().parents():
            if "java" in ancestor.name():
                name = f"{socket.gethostname()}:{ancestor.pid}"
                identifier = _argument(ancestor.cmdline(), "--executor-id")
                return name if identifier is None else f"{identifier}@{name}"
    except psutil.Error:
        pass
    return socket.gethostname()


def spark_id(executor: str) -> str | None:
    """Return Spark's id in the name of an executor; None: it is not known."""
    identifier, at, _ = executor.rpartition("@")
    return identifier if at else None


def _argument(command: Sequence[str], flag: str) -> str | None:
    for given, following in itertools.pairwise(command):
        if given == flag:
            return following
    return None
