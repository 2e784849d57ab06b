"""State of an operator as bytes and back.

Arrow data travels as Arrow IPC, bytes as they are, everything else pickled. Snapshots are only read back by workers of
the same query, from connections that have proved its secret (DESIGN 8).
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from flux.errors import SnapshotError

#: Arrow data begins at a multiple of this, as it likes to, and is read in place where words are aligned.
ALIGNMENT, WORD = 64, 8
_NONE, _BYTES, _BATCH, _TABLE, _PICKLE = b"N", b"B", b"R", b"T", b"P"


def encode_snapshot(state: Any, where: str, head: bytes = b"", room: np.ndarray | None = None) -> bytes | memoryview:
    """The bytes of ``head``, then those of the state. Arrow data is copied once, to where it will be sent from: that copy is
    for how long its partition stands still. ``room``: memory to copy it to if it is large enough. ``where`` names stage
    and partition in the SnapshotError raised for what cannot be serialised."""
    if state is None:
        return head + _NONE
    if isinstance(state, bytes | bytearray | memoryview):
        return b"".join((head, _BYTES, state))
    if isinstance(state, pa.RecordBatch | pa.Table):
        kind = _BATCH if isinstance(state, pa.RecordBatch) else _TABLE
        start = -(-(len(head) + len(kind)) // ALIGNMENT) * ALIGNMENT
        size = pa.MockOutputStream()
        _write(state, size)
        wanted = start + size.size()
        # Memory of numpy comes in huge pages where there are any: touching small ones takes longer than the copy.
        buffer = room[:wanted] if room is not None and len(room) >= wanted else np.empty(wanted, np.uint8)
        with pa.FixedSizeBufferWriter(pa.py_buffer(buffer)) as out:
            out.write((head + kind).ljust(start, b"\0"))
            _write(state, out)
        return buffer.data
    try:
        return head + _PICKLE + cloudpickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise SnapshotError(
            f"{where}: the snapshot, a {type(state).__name__}, cannot be serialised ({type(error).__name__}: {error}). "
            "Return bytes, a pyarrow RecordBatch or Table, or something picklable: no sockets, files, locks or threads"
        ) from error


def _write(state: pa.RecordBatch | pa.Table, out: Any) -> None:
    with pa.ipc.new_stream(out, state.schema) as writer:
        writer.write(state)


def decode_snapshot(data: bytes | memoryview, start: int = 0) -> Any:
    """Of what follows the first ``start`` bytes. Arrow data stays a view into ``data``."""
    view = memoryview(data).cast("B")
    kind = bytes(view[start : start + 1])
    if kind == _NONE:
        return None
    if kind == _BYTES:
        return bytes(view[start + 1 :])
    if kind in (_BATCH, _TABLE):
        body = view[-(-(start + 1) // ALIGNMENT) * ALIGNMENT :]
        if np.frombuffer(body, np.uint8).ctypes.data % WORD:
            body = memoryview(bytes(body))  # small messages lie anywhere in the buffer that they were received in
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            table = reader.read_all()
        return table if kind == _TABLE else (table.combine_chunks().to_batches() or [_empty(table.schema)])[0]
    if kind == _PICKLE:
        return pickle.loads(view[start + 1 :])
    raise SnapshotError(f"not a snapshot: it starts with {kind!r}")


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
