"""Compilation of the kernels for records, or their loading from the disk cache, before records wait for them.

The kernels are those of ``records``; the formats and the writer that call them are called here, so that each is compiled for
the types that it will get. ``partitioning.warm_up`` does the same for the kernels of keys.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.formats.avro_decode import FlatProgram, RecordColumns
from flux.connectors.kafka.formats.base import format_of
from flux.connectors.kafka.formats.text_encode import row_texts
from flux.connectors.kafka.records import kernels
from flux.connectors.kafka.records.decoder import Decoder
from flux.connectors.kafka.records.encoder import BATCH_BYTES, encode, partitions_of
from flux.connectors.kafka.write.partition_batches import by_partition, make_together


@functools.cache
def warm_up() -> None:
    """Put a record through every kernel, once in a process."""
    values = pa.array([b'{"a":1}'], pa.binary())
    headers = pa.array(
        [[{"key": "a", "value": b"b"}]], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    )
    data = encode(values, values, np.zeros(1, np.int64), headers, offset=0).data
    Decoder("warm-up", 0).decode(data, 0)
    kernels.number(partitions_of(values, 2), 0, np.zeros(2, np.int64), np.zeros(1, np.int64))
    kernels.control_kind(data.address, data.size)
    one, numbers = np.zeros(1, np.int64), np.asarray(pa.array([0], pa.int64()))
    lines = by_partition(np.asarray(pa.array([0], pa.int32())), numbers, 1, values, values, headers, one)
    make_together(lines, BATCH_BYTES, transactional=False)
    row_texts([pa.array([1], pa.int64())], ("", ""), "", False, lambda column: column)
    for name, schema, value in (("json", "a BIGINT", b'{"a":1}'), ("csv", "a BIGINT, b INT", b"1,2")):
        made = format_of(name, schema)
        assert made is not None
        made.parse(pa.array([value], pa.binary()), find_all=False)
    empty = np.empty(0, np.int64)
    flat = RecordColumns(values, {"type": "record", "name": "a", "fields": []})
    flat.read(empty, 0, FlatProgram(empty, empty, empty, empty))
    kernels.gather(empty, empty, np.zeros(1, np.int32), np.empty(0, np.uint8))
    kernels.schema_ids((0, 0, 0, 0), empty)
    fields = np.zeros((0, kernels.OUT_FIELDS), np.int64)
    kernels.avro_values(0, 0, np.empty(0, np.uint8), fields, np.zeros(1, np.int32), np.empty(0, np.uint8))


if __name__ == "__main__":
    warm_up()
