"""Clustered batches by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from partitioning.clustering import Clustered


def clustered(rows: pa.RecordBatch, partitions: Sequence[int] | np.ndarray, counts: Sequence[int]) -> Clustered:
    """Declare that rows lie in the order of these partitions, with ``counts`` of each. Partitions without rows are left
    out."""
    some = [(partition, count) for partition, count in zip(partitions, counts, strict=True) if count]
    offsets = np.cumsum([0, *(count for _, count in some)], dtype=np.int64)
    return Clustered(rows, np.array([partition for partition, _ in some], np.int32), offsets, rows.nbytes)
