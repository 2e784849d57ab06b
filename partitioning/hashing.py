"""The partition of a row, first half: from key columns to one 64-bit hash per row.

Law: the hash depends on the values alone, never on version, machine, process, slicing or batch. Rows that
Spark would group together have equal hashes: -0.0 and 0.0, every NaN and every other, null and null. Equal
numbers in columns of different types need not have equal hashes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from partitioning import kernels
from partitioning.columns import BYTES, SUPPORTED, kind_of, raw, raw_bytes
from partitioning.errors import KeyTypeError


def check_key_type(name: str, type_: pa.DataType) -> None:
    """Raise KeyTypeError unless columns of this type can be keys."""
    if kind_of(type_) is None:
        raise KeyTypeError(name, type_, SUPPORTED)


def hash_columns(columns: Sequence[pa.Array]) -> np.ndarray:
    """Hash each row over all columns, in their order, to a uint64. All columns must have the same length."""
    if not columns:
        raise ValueError("a hash needs at least one key column")
    rows = len(columns[0])
    hashes = np.full(rows, kernels.SEED)
    for column in columns:
        kind = kind_of(column.type)
        if kind is None:
            raise KeyTypeError("(unnamed)", column.type, SUPPORTED)
        if len(column) != rows:
            raise ValueError(f"key columns differ in length: {len(column)} rows and {rows} rows")
        if rows == 0:
            continue
        if kind < BYTES:
            kernels.hash_fixed(hashes, *raw(column))
        else:
            kernels.hash_strings(hashes, *raw_bytes(column))
    return hashes
