"""The partition of a row, second half: from hash to partition.

Law: 0 <= id < partitions, spread evenly, and taken from the high half of the hash, so that a table over the
keys of one partition may use the low bits.
"""

from __future__ import annotations

import numpy as np

from partitioning import kernels

#: A batch is sorted by one counter per partition: 4,096 counters of 8 bytes fill a 32 KiB cache.
PARTITIONS_MAX = 4096


def check_partitions(partitions: int) -> None:
    """Raise ValueError unless a stage may have this number of partitions."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise ValueError(f"partitions must be from 1 to {PARTITIONS_MAX}, not {partitions}")


def partition_ids(hashes: np.ndarray, partitions: int) -> np.ndarray:
    """Return the partition of each hash, as uint16."""
    check_partitions(partitions)
    ids = np.empty(len(hashes), np.uint16)
    kernels.reduce_hashes(hashes, partitions, ids)
    return ids
