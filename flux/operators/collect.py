"""The operator at the end of ``toDF()``: keeps a partition's output until egress tasks have fetched it.

The output is an Arrow IPC stream in memory, and in a temporary file beyond a bound. Reading does not consume it, so a
Spark task that fetches may be retried.
"""

from __future__ import annotations

import tempfile
from typing import IO, Any, ClassVar, NamedTuple

import pyarrow as pa

from flux.operators.operator import BARRIER, Batches, Context, Operator

#: End of an Arrow IPC stream.
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class OutputChunk(NamedTuple):
    """A piece of the output."""

    data: bytes
    #: Bytes of the whole output.
    total: int


class Collect(Operator):
    """The operator that keeps one partition of the output, in memory up to ``memory_bytes`` and then in a file."""

    __former_names__: ClassVar = [("flux.dataflow.collect", "Collect")]

    snapshot_classes = ()
    _flux_tentative = BARRIER

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._size: int | None = None
        self._told = -1  # bytes at the last call of ``changes``; -1: there was no call

    def open(self, context: Context) -> None:
        super().open(context)
        self._file = tempfile.SpooledTemporaryFile(max_size=self._memory_bytes, prefix="flux-egress-")  # noqa: SIM115
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), context.schemas[0])

    def process(self, batch: pa.RecordBatch) -> Batches:
        assert self._writer is not None
        self._writer.write_batch(batch)
        return None

    def finish(self) -> Batches:
        assert self._writer is not None
        assert self._file is not None
        self._writer.close()
        self._size = self._file.tell()
        return None

    def read(self, offset: int, nbytes: int) -> OutputChunk | None:
        """Return bytes from ``offset`` on; None while input still comes."""
        if self._size is None:
            return None
        assert self._file is not None
        self._file.seek(offset)
        return OutputChunk(self._file.read(nbytes), self._size)

    def snapshot(self) -> Any:
        assert self._file is not None
        end = self._file.tell() if self._size is None else self._size  # a reader leaves the file at any place
        self._file.seek(0)
        data = self._file.read(end)
        self._file.seek(end)
        return {"data": data, "size": self._size}

    def restore(self, snapshot: Any) -> None:
        """Replay the batches: a stream's writer cannot be opened half-way."""
        assert self._writer is not None
        data = snapshot["data"]
        if not data:
            return  # the schema is only written with the first batch
        if snapshot["size"] is None:
            data += _END
        with pa.ipc.open_stream(data) as reader:
            for batch in reader:
                self._writer.write_batch(batch)
        if snapshot["size"] is not None:
            self.finish()

    def changes(self) -> Any:
        """Return the bytes that were appended since the last call."""
        start, self._told = self._told, self.state_bytes()
        if start < 0:
            return None
        assert self._file is not None
        self._file.seek(start)
        data = self._file.read(self._told - start)
        self._file.seek(self._told)
        return {"data": data, "size": self._size}

    def apply_changes(self, changes: Any) -> None:
        """Append batches. They come without their schema, unless nothing came before them."""
        if self._size is not None:
            return  # nothing comes behind the end
        assert self._file is not None
        begun = self._file.tell() > 0
        self.restore({**changes, "data": self._schema() + changes["data"]} if begun else changes)

    def _schema(self) -> bytes:
        """Return the first bytes of a stream: its schema."""
        empty = pa.BufferOutputStream()
        with pa.ipc.new_stream(empty, self.context.schemas[0]):
            pass
        begun: bytes = empty.getvalue().to_pybytes()
        return begun.removesuffix(_END)

    def state_bytes(self) -> int:
        assert self._file is not None
        return self._file.tell() if self._size is None else self._size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
