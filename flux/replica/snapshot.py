"""Conversion of operator state to bytes and back.

Arrow data travels as Arrow IPC, bytes as they are, and everything else pickled, with large arrays beside the pickle.
Snapshots are only read by workers of the same query, from copies signed with its secret (design: signed-copies).
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flux.errors import SnapshotError
from flux.operators.attributes import AttributeState, PickledAttributes
from flux.operators.user_code import described, user_traceback
from flux.wire.safe_pickle import dumps, loads

#: Arrow data begins at a multiple of ``ALIGNMENT``, as Arrow recommends, and is read in place if it is aligned to a ``WORD``.
ALIGNMENT, WORD = 64, 8
_LENGTH = struct.Struct("<Q")
_NONE, _BYTES, _BATCH, _TABLE, _PICKLE, _ATTRIBUTES = b"N", b"B", b"R", b"T", b"P", b"A"


def encode_snapshot(
    state: Any, where: str, head: bytes = b"", room: np.ndarray | None = None, classes: Sequence[type] | None = ()
) -> bytes | memoryview:
    """Encode a state: the bytes of ``head``, then those of the state.

    Arrow data and arrays are copied once, to the memory from which they will be sent; the partition stands still for as long as
    that copy takes. ``room``: memory for the copy, used if it is large enough. ``where`` names stage and partition in the
    SnapshotError for a state that cannot be serialised. ``classes``: as ``Operator.snapshot_classes``."""
    if state is None:
        return head + _NONE
    if isinstance(state, bytes | bytearray | memoryview):
        return b"".join((head, _BYTES, state))
    if isinstance(state, pa.RecordBatch | pa.Table):
        kind = _BATCH if isinstance(state, pa.RecordBatch) else _TABLE
        start = _aligned(len(head) + len(kind))
        size = pa.MockOutputStream()
        _write(state, size)
        buffer = _memory(start + size.size(), room)
        with pa.FixedSizeBufferWriter(pa.py_buffer(buffer)) as out:
            out.write((head + kind).ljust(start, b"\0"))
            _write(state, out)
        return buffer.data
    try:
        pieces = _pieces(state, classes)
    except SnapshotError as error:
        raise SnapshotError(f"{where}: {error.summary}", error.traceback) from error
    except BaseException as error:
        raise SnapshotError(
            f"{where}: the snapshot, a {type(state).__name__}, cannot be serialised ({described(error)}). "
            "Return bytes, a pyarrow RecordBatch or Table, or something picklable: no sockets, files, locks or threads",
            user_traceback(error),
        ) from error
    return laid_out(head + (_ATTRIBUTES if isinstance(state, AttributeState) else _PICKLE), pieces, room)


def _pieces(state: Any, classes: Sequence[type] | None) -> list[memoryview]:
    """Return the pickle of a state, and behind it the arrays that are not in it."""
    arrays: list[pickle.PickleBuffer] = []
    of_attributes = isinstance(state, AttributeState)
    pickled = state.pickled(arrays.append) if of_attributes else dumps(state, classes, arrays.append)
    return [memoryview(pickled), *(memoryview(array.raw()) for array in arrays)]


def checksum_of_snapshot(state: Any, where: str, classes: Sequence[type] | None = ()) -> int:
    """Return a number that stays the same as long as the state does, in this process (design: peek)."""
    if state is None or isinstance(state, bytes | bytearray | memoryview | pa.RecordBatch | pa.Table):
        return zlib.crc32(encode_snapshot(state, where))
    found = 0
    for piece in _pieces(state, classes):
        found = zlib.crc32(piece, found)
    return found


def laid_out(head: bytes, pieces: Sequence[memoryview], room: np.ndarray | None = None) -> memoryview:
    """Lay out ``head``, the number of the pieces and their lengths, then the pieces, each at a multiple of ALIGNMENT."""
    lengths = [_LENGTH.pack(len(pieces)), *(_LENGTH.pack(piece.nbytes) for piece in pieces)]
    front = head + b"".join(lengths)
    starts = []
    end = len(front)
    for piece in pieces:
        starts.append(_aligned(end))
        end = starts[-1] + piece.nbytes
    buffer = _memory(end, room)
    buffer[: len(front)] = np.frombuffer(front, np.uint8)
    for start, piece in zip(starts, pieces, strict=True):
        buffer[start : start + piece.nbytes] = np.frombuffer(piece, np.uint8)
    return buffer.data


def laid_pieces(view: memoryview, start: int) -> list[memoryview]:
    """Return views of the pieces laid out by ``laid_out``, whose head ends at ``start``."""
    (count,) = _LENGTH.unpack_from(view, start)
    end = start + _LENGTH.size * (1 + count)
    pieces = []
    for i in range(count):
        (length,) = _LENGTH.unpack_from(view, start + _LENGTH.size * (1 + i))
        begin = _aligned(end)
        end = begin + length
        pieces.append(view[begin:end])
    return pieces


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _memory(nbytes: int, room: np.ndarray | None) -> np.ndarray:
    """Allocate memory by numpy, which uses huge pages if there are any: touching small pages takes longer than the copy."""
    return room[:nbytes] if room is not None and len(room) >= nbytes else np.empty(nbytes, np.uint8)


def _write(state: pa.RecordBatch | pa.Table, out: Any) -> None:
    with pa.ipc.new_stream(out, state.schema) as writer:
        writer.write(state)


def decode_snapshot(data: bytes | memoryview, start: int = 0, classes: Sequence[type] | None = ()) -> Any:
    """Decode a state, from the bytes after the first ``start``. Arrow data stays a view into ``data``. ``classes``: as
    ``Operator.snapshot_classes``."""
    view = memoryview(data).cast("B")
    kind = bytes(view[start : start + 1])
    if kind == _NONE:
        return None
    if kind == _BYTES:
        return bytes(view[start + 1 :])
    if kind in (_BATCH, _TABLE):
        body = view[_aligned(start + 1) :]
        if np.frombuffer(body, np.uint8).ctypes.data % WORD:
            body = memoryview(bytes(body))  # small messages begin anywhere in their receive buffer
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            table = reader.read_all()
        return table if kind == _TABLE else (table.combine_chunks().to_batches() or [_empty(table.schema)])[0]
    if kind in (_PICKLE, _ATTRIBUTES):
        pickled, *pieces = laid_pieces(view, start + 1)
        # Restored arrays may be changed in place.
        arrays = [memoryview(bytearray(piece)) if piece.readonly else piece for piece in pieces]
        return PickledAttributes(pickled, arrays) if kind == _ATTRIBUTES else loads(pickled, classes, arrays)
    raise SnapshotError(f"not a snapshot: it starts with {kind!r}")


def check_snapshot(state: Any, where: str, classes: Sequence[type] | None) -> None:
    """Check that the state could be restored at another worker, as far as can be seen here. SnapshotError says why not."""
    try:
        for part in state.values() if isinstance(state, dict) else [state]:
            if isinstance(part, AttributeState):  # read once there is an operator for it, so decoding is no check
                part.check()
    except SnapshotError as error:
        raise SnapshotError(f"{where}: {error.summary}", error.traceback) from error
    if isinstance(state, AttributeState):
        return
    data = encode_snapshot(state, where, classes=classes)
    try:
        decode_snapshot(data, classes=classes)
    except SnapshotError as error:
        raise SnapshotError(f"{where}: {error.summary}", error.traceback) from error
    except BaseException as error:
        raise SnapshotError(
            f"{where}: the snapshot, a {type(state).__name__}, cannot be read again ({described(error)})",
            user_traceback(error),
        ) from error


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
