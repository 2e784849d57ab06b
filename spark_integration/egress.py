"""``toDF()``: the output of a flow as a DataFrame (DESIGN 2).

The last stage feeds a collecting stage inside the workers; when the input has ended, Spark tasks fetch from there.
Fetching can be repeated, so a task may be retried. Spark then holds the rows like those of a local checkpoint, and the
workers give their task slots back.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from flux.api import Flow
from flux.codec import decode_data, encode
from flux.errors import QueryTimeout
from flux.messages import Chunk, Fetch
from flux.transport import Keys, Link, Sockets
from spark_integration.executor import ArrowFunction
from spark_integration.follow import follow
from spark_integration.query import Query, start_query
from spark_integration.schema import for_spark, recast

#: How long a worker may take to answer a fetch before the task gives up (and Spark retries it).
FETCH_S = 30.0


def to_df(flow: Flow, spark: SparkSession | None, progress: bool = False, **options: Any) -> DataFrame:
    """Runs the flow to its end. ``progress``: show it on the screen. Raises what the query raises."""
    query = start_query([flow], spark=spark, keep_output=True, **options)
    if progress:
        follow(query)
    return query.toDF()


def fetch_all(query: Query) -> DataFrame:
    stage = next(stage for stage in query.plan.stages if stage.collects)
    owners = {p: query.endpoints()[query.owner(stage.id, p)] for p in range(stage.partitions)}
    struct, schema = for_spark(stage.schemas[0], f"stage {stage.name}")
    fetch = fetch_function(stage.id, owners, schema, query.plan.secret, query.keys)
    spark = query._spark
    numbers = spark.range(0, stage.partitions, 1, stage.partitions)
    return numbers.mapInArrow(fetch, struct).localCheckpoint(eager=True)


def fetch_function(
    stage: int, owners: dict[int, str], schema: pa.Schema, secret: bytes, keys: Keys | None
) -> ArrowFunction:
    """A task per partition of the collecting stage: its number in, its rows out."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                sockets = Sockets(keys)
                try:
                    remote = RemoteFile(sockets, owners[partition], Fetch(secret, stage, partition, 0))
                    with pa.ipc.open_stream(pa.PythonFile(remote, mode="r")) as reader:
                        yield from (recast(rows, schema) for rows in reader)
                finally:
                    sockets.close()

    return run


class RemoteFile(io.RawIOBase):
    """The collected output of one partition, read in order in chunks from the worker that keeps it."""

    def __init__(self, sockets: Sockets, endpoint: str, first: Fetch) -> None:
        super().__init__()
        self._sockets = sockets
        self._link: Link = sockets.link(endpoint)
        self._request = first
        self._offset = 0
        self._rest = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(1 << 20), b""))

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return self.readall()
        parts: list[bytes] = []
        while size > 0:
            if not self._rest and not self._fill():
                break
            part, self._rest = self._rest[:size], self._rest[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _fill(self) -> bool:
        if self._ended:
            return False
        chunk, data = self._ask()
        self._offset += len(data)
        self._ended = self._offset >= chunk.total
        self._rest = data
        return bool(data)

    def _ask(self) -> tuple[Chunk, bytes]:
        request = Fetch(self._request.secret, self._request.stage, self._request.partition, self._offset)
        end = time.monotonic() + FETCH_S
        while time.monotonic() < end:
            self._link.send([encode(request)])
            while self._link in self._sockets.wait(2.0):
                for frames in self._link.receive():
                    answer = decode_data(frames[0])
                    if isinstance(answer, Chunk) and answer.offset == self._offset:
                        return answer, bytes(frames[1])
        raise QueryTimeout(
            f"worker at {self._link.endpoint} did not send the output of partition {request.partition} within {FETCH_S:g} s"
        )
