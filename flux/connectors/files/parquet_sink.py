"""Parquet files as a sink: ordered steps decide where a file ends, so every replica would write the same files (design: files).

A stage of its own passes rows on, and ends a file with a batch without rows when the file has its size or its time is over. The
sink collects the rows of a file, writes them under a hidden name, and renames it: a file appears whole. Its name has the
positions of its rows, so that a new primary knows where to go on.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from flux.arguments import checked
from flux.dataflow.sink import FlowTo, Position, Sink, SinkContext, SinkTraits
from flux.errors import UsageError
from flux.operators.batches import BATCH_BYTES, logical_bytes, split
from flux.operators.operator import Operator
from flux.settings import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from flux.dataflow.flow import Flow

#: Name of the timer that ends a file.
_ROLL = "roll"


@checked("to_parquet")
def to_parquet(
    flow: Flow,
    path: str | os.PathLike[str],
    *,
    partitions: int = 1,
    roll_bytes: int | str = "32m",
    roll_every: float | str = "10s",
) -> FlowTo:
    """Write the output of a flow as parquet files into a folder, each row once, even if processes are lost meanwhile. Spark may
    read the folder at any moment: files appear whole. A query that is started again adds files of its own.

    path        a path that all workers reach, or a URI that pyarrow.fs knows; a relative path begins at the current folder
    partitions  number of partitions that write at the same time, 1 to 4096
    roll_bytes  size of a file before compression, at which the file ends
    roll_every  time from the first row of a file to its end, in seconds or as "10s", also if nothing more comes
    """
    from flux.dataflow.flow import StageWith, stage

    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(path, str) or not path:
        raise UsageError(f"to_parquet wants the path of a folder, got {path!r}")
    size, seconds = parse_bytes("roll_bytes", roll_bytes), parse_seconds("roll_every", roll_every)
    if size < 1 or seconds <= 0:
        raise UsageError(f"roll_bytes and roll_every must be above zero, got {roll_bytes!r} and {roll_every!r}")
    where = path if "://" in path else os.path.abspath(os.path.expanduser(path))
    try:
        fs.FileSystem.from_uri(where)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"to_parquet cannot write to {path!r}: {error}") from error
    files = stage(partitions=partitions, replicas=flow.stage.replicas, name=f"{flow.stage.name}.files")(ParquetFolder)
    ended = StageWith(files, (size, seconds), {})(flow)
    return FlowTo(ended, ParquetFiles(where, 2 * size))  # a file that lacks one byte gets one more part


class ParquetFolder(Operator):
    """The operator that passes rows on. A batch without rows marks the end of a file."""

    __former_names__: ClassVar = [("flux.dataflow.files", "Files")]

    snapshot_classes = ()

    def __init__(self, roll_bytes: int, roll_s: float) -> None:
        self._roll_bytes = roll_bytes
        self._roll_s = roll_s
        self._bytes = 0  # bytes of the open file; 0: no file is open

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        # In parts, each with the end of its file: the sink writes one file while the next waits for room.
        for part in split(batch, batch.num_rows, self._roll_bytes):
            if not self._bytes:
                self.context.set_timer(self.context.now + self._roll_s, _ROLL)
            self._bytes += BATCH_BYTES + logical_bytes(part)
            yield part
            if self._bytes >= self._roll_bytes:
                self.context.cancel_timer(_ROLL)
                yield self._end()

    def on_timer(self, name: str) -> Iterator[pa.RecordBatch]:
        if self._bytes:
            yield self._end()

    def finish(self) -> Iterator[pa.RecordBatch]:
        if self._bytes:
            yield self._end()

    def _end(self) -> pa.RecordBatch:
        self._bytes = 0
        return pa.RecordBatch.from_pylist([], schema=self.context.schemas[0])

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        return schemas[0]

    def snapshot(self) -> Any:
        return {"bytes": self._bytes}

    def restore(self, snapshot: Any) -> None:
        self._bytes = snapshot["bytes"]


class ParquetFiles(Sink):
    """The sink of files in the folder ``path``. The name of a file tells its positions, from ``first`` to below ``next``."""

    traits = SinkTraits(
        exactly_once=True,
        committed_changes=True,  # it removes the unfinished files of lost writers
        takes_empty=True,
    )

    def __init__(self, path: str, holds_bytes: int) -> None:
        self.path = path
        self.traits = replace(ParquetFiles.traits, holds_bytes=holds_bytes)

    def __repr__(self) -> str:
        return f"parquet files in {self.path}"

    def destination(self) -> str:
        return f"parquet files in {self.path}"

    def check(self, schema: pa.Schema) -> None:
        if not len(schema):
            raise ValueError("rows without columns leave nothing in a file")
        names = [name.lower() for name in schema.names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"Spark could not read its columns: {', '.join(twice)} is there twice but for case")
        if "://" not in self.path and os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ValueError(f"{self.path} is not a folder")
        pq.write_table(schema.empty_table(), pa.BufferOutputStream())

    def open(self, context: SinkContext) -> None:
        self._whose = f"{context.query}-{context.number}"  # several stages may write to the same folder
        self._fs, self._folder = fs.FileSystem.from_uri(self.path)
        self._fs.create_dir(self._folder, recursive=True)
        self._rows: list[pa.RecordBatch] = []
        self._first = 0  # position of the first of ``_rows``
        self._next = 0  # position behind the last of them

    def committed(self, partition: int) -> int:
        """Return the position after the files of this query that follow each other from the start."""
        name = re.compile(rf"(\.?)part-{partition:05}-{self._whose}-(\d+)-(\d+)\.parquet(?:\.\w+)?")
        spans = {}
        for info in self._fs.get_file_info(fs.FileSelector(self._folder)):
            found = name.fullmatch(info.base_name)
            if found is not None and found[1]:
                # A file of a lost writer; if that writer is only slow, its writes do not count any more.
                self._delete(info.path)
            elif found is not None:
                spans[int(found[2])] = int(found[3])
        at = 0
        while at in spans:
            at = spans.pop(at)
        if spans:
            raise FileNotFoundError(
                f"{self._folder}: a file of partition {partition} that begins with position {at} is missing, files from "
                f"{min(spans)} on are there. Do not remove files while the query runs"
            )
        return at

    def write(self, batch: pa.RecordBatch, position: Position) -> int | None:
        if not self._rows:
            self._first = self._next = position.sequence
        if position.sequence != self._next:  # the file would stand for a batch that it does not have
            raise ValueError(f"position {position.sequence} comes where {self._next} is the next of the file")
        if batch.num_rows:
            self._rows.append(batch)
            self._next += 1
            return self._first
        # Without rows, too: the batch may stand for output whose rows are gone, and files have to follow each other.
        self._write(position, batch.schema)
        return None

    def _write(self, position: Position, schema: pa.Schema) -> None:
        name = f"part-{position.partition:05}-{self._whose}-{self._first:010}-{position.sequence + 1:010}.parquet"
        hidden, shown = f"{self._folder}/.{name}.{uuid.uuid4().hex}", f"{self._folder}/{name}"
        with self._fs.open_output_stream(hidden) as out:
            pq.write_table(pa.Table.from_batches(self._rows, schema), out)
        # A primary that was given up may do the same at this moment: its file has the same rows.
        if self._fs.get_file_info(shown).type is fs.FileType.File:
            self._delete(hidden)
        elif isinstance(self._fs, fs.LocalFileSystem):
            _to_disk(hidden)
            self._fs.move(hidden, shown)
            _to_disk(self._folder)
        else:
            self._fs.move(hidden, shown)
        self._rows = []

    def _delete(self, path: str) -> None:
        try:
            self._fs.delete_file(path)
        except FileNotFoundError:
            pass


def _to_disk(path: str) -> None:
    """Force a file or a folder to disk. The replicas forget the rows of a renamed file, so it must survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
