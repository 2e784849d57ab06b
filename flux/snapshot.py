"""State of an operator as bytes and back.

Arrow data travels as Arrow IPC, bytes as they are, everything else pickled. Snapshots are only read back by workers of
the same query, from connections that have proved its secret (DESIGN 8).
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import pyarrow as pa

from flux.errors import SnapshotError

_NONE, _BYTES, _BATCH, _TABLE, _PICKLE = b"N", b"B", b"R", b"T", b"P"


def encode_snapshot(state: Any, where: str) -> bytes:
    """``where`` names stage and partition in the SnapshotError raised for what cannot be serialised."""
    if state is None:
        return _NONE
    if isinstance(state, bytes | bytearray | memoryview):
        return _BYTES + bytes(state)
    if isinstance(state, pa.RecordBatch | pa.Table):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, state.schema) as writer:
            writer.write(state)
        return (_BATCH if isinstance(state, pa.RecordBatch) else _TABLE) + sink.getvalue().to_pybytes()
    try:
        return _PICKLE + cloudpickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise SnapshotError(
            f"{where}: the snapshot, a {type(state).__name__}, cannot be serialised ({type(error).__name__}: {error}). "
            "Return bytes, a pyarrow RecordBatch or Table, or something picklable: no sockets, files, locks or threads"
        ) from error


def decode_snapshot(data: bytes) -> Any:
    kind, body = data[:1], data[1:]
    if kind == _NONE:
        return None
    if kind == _BYTES:
        return body
    if kind in (_BATCH, _TABLE):
        with pa.ipc.open_stream(body) as reader:
            table = reader.read_all()
        return table if kind == _TABLE else (table.combine_chunks().to_batches() or [_empty(table.schema)])[0]
    if kind == _PICKLE:
        return pickle.loads(body)
    raise SnapshotError(f"not a snapshot: it starts with {kind!r}")


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
