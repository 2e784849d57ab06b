"""Parquet files as a sink: ordered steps decide where a file ends, so every replica would write the same files (design: files).

A stage of its own passes rows on, and ends a file with a batch without rows when the file has its size or its time is over. The
sink collects the rows of a file, writes them under a hidden name, and renames it: a file appears whole. Its name has the
positions of its rows, so that a new primary knows where to go on.

With ``partitionBy`` the rows between two ends go into several files, one for each folder (design: partition-columns).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from flux.arguments import checked, partition_names
from flux.connectors.files.partition_columns import PartitionColumns
from flux.dataflow.sink import FlowTo, Position, Sink, SinkAhead, SinkContext, SinkTraits
from flux.errors import UsageError
from flux.operators.batches import BATCH_BYTES, logical_bytes, split
from flux.operators.operator import BARRIER, Operator
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
    partitionBy: str | Sequence[str] | None = None,  # noqa: N803
    partitions: int = 1,
    roll_bytes: int | str = "32m",
    roll_every: float | str = "10s",
) -> FlowTo:
    """Write the output of a flow as parquet files into a folder, each row once, even if processes are lost meanwhile. Spark may
    read the folder at any moment: files appear whole. A query that is started again adds files of its own.

    path         a path that this program and all workers reach, or a URI that pyarrow.fs knows; a relative path begins at the
                 current folder. The folder is made at the start
    partitionBy  columns by whose values rows go into folders such as ``day=2013-01-01``, as in PySpark. Their values are in the
                 names of the folders alone
    partitions   number of partitions that write at the same time, 1 to 4096
    roll_bytes   size of a file before compression, at which the file ends; with ``partitionBy`` that of the files that end
                 together
    roll_every   time from the first row of a file to its end, in seconds or as "10s", also if nothing more comes
    """
    from flux.dataflow.flow import StageWith, stage

    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(path, str) or not path:
        raise UsageError(f"to_parquet wants the path of a folder, got {path!r}")
    names = partition_names(partitionBy)
    size, seconds = parse_bytes("roll_bytes", roll_bytes), parse_seconds("roll_every", roll_every)
    if size < 1 or seconds <= 0:
        raise UsageError(f"roll_bytes and roll_every must be above zero, got {roll_bytes!r} and {roll_every!r}")
    where = path.rstrip("/") if "://" in path else os.path.abspath(os.path.expanduser(path))
    try:
        fs.FileSystem.from_uri(where)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"to_parquet cannot write to {path!r}: {error}") from error
    files = stage(partitions=partitions, replicas=flow.stage.replicas, name=f"{flow.stage.name}.files")(ParquetFolder)
    writes = StageWith(files, (size, seconds), {})
    writes.for_sink = True
    return FlowTo(writes(flow), ParquetFiles(where, 2 * size, names))  # a file that lacks one byte gets one more part


class ParquetFolder(Operator):
    """The operator that passes rows on. A batch without rows marks the end of a file."""

    __former_names__: ClassVar = [("flux.dataflow.files", "Files")]

    snapshot_classes = ()
    _flux_tentative = BARRIER

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
    """The sink of files in the folder ``path``. The name of a file tells its positions, from ``first`` to below ``next``, and
    with ``partition_by`` its number among the files of these positions."""

    traits = SinkTraits(
        exactly_once=True,
        committed_changes=True,  # it removes the unfinished files of lost writers
        takes_empty=True,
    )

    def __init__(self, path: str, holds_bytes: int, partition_by: Sequence[str] = ()) -> None:
        self.path = path
        self.traits = replace(ParquetFiles.traits, holds_bytes=holds_bytes)
        #: Names of the columns by whose values rows go into folders.
        self.partition_by = tuple(partition_by)
        self._by = PartitionColumns(partition_by) if partition_by else None
        self._new_folder: str | None = None  # made by ``prepare``

    def __repr__(self) -> str:
        return self.destination()

    def destination(self) -> str:
        by = f" by {', '.join(self.partition_by)}" if self.partition_by else ""
        return f"parquet files in {self.path}{by}"

    def check(self, schema: pa.Schema) -> None:
        if not len(schema):
            raise ValueError("rows without columns leave nothing in a file")
        names = [name.lower() for name in schema.names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"Spark could not read its columns: {', '.join(twice)} is there twice but for case")
        if self._by is not None:
            self._by.check(schema)
        if "://" not in self.path and os.path.exists(self.path) and not os.path.isdir(self.path):
            raise UsageError(f"{self.path} is not a folder; give the path of one, which is made if it is not there")
        pq.write_table(schema.empty_table(), pa.BufferOutputStream())

    def prepare(self, partitions: int, kept: Any) -> None:
        """Make the folder, before anything runs. UsageError: it cannot be made, or nothing can be written into it."""
        try:
            files, folder = fs.FileSystem.from_uri(self.path)
            if isinstance(files, fs.LocalFileSystem) and not os.path.exists(folder):
                self._new_folder = folder
            files.create_dir(folder, recursive=True)
            if isinstance(files, fs.LocalFileSystem) and not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"nothing can be written into {folder}")
        except (OSError, pa.ArrowException) as error:
            raise UsageError(
                f"to_parquet cannot write to {self.path}: {error}. Give the path of a folder that this program and all workers "
                "can make and write to"
            ) from error

    def take_back(self) -> None:
        """Remove the folder that ``prepare`` has made, if nothing is in it: the stage was refused."""
        if self._new_folder is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._new_folder)

    def open(self, context: SinkContext) -> None:
        self._whose = f"{context.query}-{context.number}"  # several stages may write to the same folder
        self._fs, self._folder = fs.FileSystem.from_uri(self.path)
        self._fs.create_dir(self._folder, recursive=True)
        self._rows: list[pa.RecordBatch] = []
        self._first = 0  # position of the first of ``_rows``
        self._next = 0  # position behind the last of them
        self._begun = 0  # position behind the files that were there in part when ``committed`` was asked

    def committed(self, partition: int) -> int:
        """Return the position after the files of this query that follow each other from the start. Positions whose files are not
        all there are still to be written; if a writer was lost between two of them, the next one writes the same."""
        name = re.compile(
            rf"(\.?)_?part-{partition:05}-{self._whose}-(\d{{10,}})-(\d{{10,}})(?:-\d+-(\d+))?\.parquet(?:\.\w+)?"
        )
        whole: dict[int, int] = {}
        lacking: dict[tuple[int, int], int] = {}  # number of missing files by positions
        for info in self._fs.get_file_info(fs.FileSelector(self._folder, recursive=self._by is not None)):
            found = name.fullmatch(info.base_name)
            if found is None:
                continue
            if found[1]:
                # A file of a lost writer; if that writer is only slow, its writes do not count any more.
                self._delete(info.path)
                continue
            positions = int(found[2]), int(found[3])
            lacking[positions] = lacking.get(positions, max(int(found[4] or 1), 1)) - 1
            if not lacking[positions]:
                whole[positions[0]] = positions[1]
        at = 0
        while at in whole:
            at = whole.pop(at)
        in_part = [positions for positions, missing in lacking.items() if missing]
        behind = [*whole, *(first for first, _ in in_part if first > at)]
        if behind:
            raise FileNotFoundError(
                f"{self._folder}: a file of partition {partition} that begins with position {at} is missing, files from "
                f"{min(behind)} on are there. Do not remove files while the query runs"
            )
        self._begun = max((end for _, end in in_part), default=0)
        return at

    def recovered(self, sequence: int) -> None:
        if self._begun > sequence:
            raise SinkAhead(
                f"there are files with the first {self._begun} batches, and the location knows of {sequence}"
            )

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
        """Write the collected rows into one file, or into one of each folder. Files of lost writers are found in part, so that
        they are renamed when all of them are written."""
        name = f"part-{position.partition:05}-{self._whose}-{self._first:010}-{position.sequence + 1:010}"
        rows = pa.Table.from_batches(self._rows, schema)
        files = [(f"{self._folder}/{name}.parquet", rows)]
        if self._by is not None:
            parts = self._by.folders(rows) if rows.num_rows else []
            # A file at the top would be no part of a partitioned table: Spark overlooks one that begins with an underscore.
            files = (
                [(f"{self._folder}/_{name}-00000-00000.parquet", rows.slice(0, 0))]
                if not parts
                else [
                    (f"{self._folder}/{folder}/{name}-{number:05}-{len(parts):05}.parquet", part)
                    for number, (folder, part) in enumerate(parts, 1)
                ]
            )
        hidden: list[str] = []
        try:
            for shown, part in files:
                hidden.append(self._hidden(shown))
                self._put(hidden[-1], part)
            for path, (shown, _) in zip(hidden, files, strict=True):
                # A primary that was given up may do the same at this moment: its file has the same rows.
                if self._fs.get_file_info(shown).type is fs.FileType.File:
                    self._delete(path)
                else:
                    self._fs.move(path, shown)
        except BaseException:
            for path in hidden:  # the call may be repeated, and on a full disk each file counts
                with contextlib.suppress(OSError):
                    self._delete(path)
            raise
        if isinstance(self._fs, fs.LocalFileSystem):
            for folder in self._above(shown for shown, _ in files):
                _to_disk(folder)
        self._rows = []

    def _hidden(self, shown: str) -> str:
        """Return a hidden path beside a file."""
        folder, _, name = shown.rpartition("/")
        return f"{folder}/.{name}.{uuid.uuid4().hex}"

    def _put(self, path: str, rows: pa.Table) -> None:
        """Write a file, and make its folder."""
        folder = path.rpartition("/")[0]
        if folder != self._folder:
            try:
                self._fs.create_dir(folder, recursive=True)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                name = max(folder.removeprefix(f"{self._folder}/").split("/"), key=len)
                raise ValueError(
                    f"partitionBy: {name[:60]!r}... is longer than a name of a folder may be ({len(os.fsencode(name))} bytes). "
                    "Give a column with shorter values, as in flow.withColumn('p', F.substring('p', 1, 50))"
                ) from error
        with self._fs.open_output_stream(path) as out:
            pq.write_table(rows, out)
        if isinstance(self._fs, fs.LocalFileSystem):
            _to_disk(path)

    def _above(self, paths: Iterable[str]) -> set[str]:
        """Return the folders of files up to that of the sink: each may be new."""
        found = {self._folder}
        for path in paths:
            folder = path.rpartition("/")[0]
            while folder not in found:
                found.add(folder)
                folder = folder.rpartition("/")[0]
        return found

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
