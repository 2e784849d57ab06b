"""What runs inside the tasks: worker, ingress, and the identity of the process they run in (DESIGN 2)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import psutil
import pyarrow as pa
from pyspark import TaskContext

from flux.ingress_loop import Ingress
from flux.plan import Plan
from flux.shell import Rendezvous, Stopped
from flux.worker import Worker

#: How long an ingress task that is told to stop throws away input before it fails. Spark kills it before that.
DRAIN_S = 30.0
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def worker_function(plan: Plan, rendezvous: Rendezvous) -> ArrowFunction:
    """One long-running task: slot number in, last statistics out."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = _context()
        for _ in batches:  # the slot's number, which the partition's id says as well
            pass
        stats = Worker(plan, rendezvous).run(context.partitionId(), context.taskAttemptId(), _executor())
        yield pa.RecordBatch.from_pydict({"stats": [json.dumps(stats)]})

    return run


def ingress_function(plan: Plan, rendezvous: Rendezvous, source: int) -> ArrowFunction:
    """One task per partition of the user's DataFrame: rows in, one row about them out."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = _context()
        partition = context.partitionId()
        names = plan.sources[source].schema.names
        renamed = (pa.RecordBatch.from_arrays(batch.columns, names) for batch in batches)
        ingress = Ingress(plan, rendezvous, source, partition)
        try:
            rows = ingress.run(renamed, context.taskAttemptId())
        except Stopped:
            rows = -1  # the query is over; nobody looks at the result
            if not ingress.drained(DRAIN_S):
                raise  # a thread still reads Spark's socket: this process must not be used again
        yield pa.RecordBatch.from_pydict(
            {"partition": pa.array([partition], pa.int32()), "rows": pa.array([rows], pa.int64())}
        )

    return run


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "runs inside a Spark task"
    return context


def _executor() -> str:
    """Host and process of the executor: the JVM is the parent of the daemon that forked this process."""
    try:
        for ancestor in psutil.Process().parents():
            if "java" in ancestor.name():
                return f"{socket.gethostname()}:{ancestor.pid}"
    except psutil.Error:
        pass
    return socket.gethostname()
