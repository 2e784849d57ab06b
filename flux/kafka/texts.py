"""One text for each row of several columns, made in one pass.

Arrow takes a call for each step and column, which is most of the cost of small batches, and keeps the text of each column
beside that of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from flux.kafka import kernels
from partitioning.columns import raw, raw_bytes

_WHOLE = {pa.int32().id: kernels.TEXT_INT32, pa.int64().id: kernels.TEXT_INT64}
_STRING = pa.string().id


def row_texts(
    columns: Sequence[pa.Array], pieces: tuple[str, ...], null: str, json: bool, made: Callable[[pa.Array], pa.Array]
) -> pa.Array | None:
    """Join the columns of each row to a text. None: some text needs more than quotes, or the result more than one column can
    hold.

    ``pieces`` has the text before each column, and the text behind the last one. ``null`` stands for a null. With ``json``,
    text is in quotes; otherwise, as in CSV, only an empty one is. ``made`` makes the text of a column that is neither a
    whole number nor text."""
    rows = len(columns[0])
    fields = np.zeros((len(columns), kernels.TEXT_FIELDS), np.int64)
    for field, column in zip(fields, columns, strict=True):
        kind = _WHOLE.get(column.type.id)
        if kind is not None:
            view = raw(column)
            field[:] = kind, view.values, 0, view.validity, view.first
        elif column.type.id == _STRING:
            field[:] = _of_text(kernels.TEXT_STRING, column)
        else:
            field[0] = kernels.TEXT_MADE
    # This check comes before any text is made, which would have to be made again: nested columns are made of such texts,
    # too.
    if not kernels.are_plain(rows, fields, json):
        return None
    kept = []
    for field, column in zip(fields, columns, strict=True):
        if field[0] == kernels.TEXT_MADE:
            text = made(column)
            if text.type.id != _STRING:
                return None
            kept.append(text)
            field[:] = _of_text(kernels.TEXT_MADE, text)
    ends, out = kernels.texts(rows, fields, *_as_bytes(pieces), _null(null), json)
    del kept  # the kernel used its addresses until here
    if not len(ends):
        return None
    return pa.StringArray.from_buffers(rows, pa.py_buffer(ends), pa.py_buffer(out))


def _of_text(kind: int, column: pa.Array) -> tuple[int, int, int, int, int]:
    view = raw_bytes(column)
    return kind, view.data, view.offsets, view.validity, view.first


@functools.lru_cache(maxsize=64)
def _as_bytes(pieces: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [piece.encode() for piece in pieces]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([len(piece) for piece in encoded])


@functools.cache
def _null(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
