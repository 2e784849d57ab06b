"""The stage before a topic: it gives each row its partition of the topic, and its number among this writer's rows there.

Law: both follow from the rows and their order alone. So they are ordered state like any other: all replicas number alike, a
replica that takes over goes on with the next number, and a broker can tell by the number whether it has a record already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.formats.text_encode import Columns
from flux.connectors.kafka.records import kernels
from flux.connectors.kafka.records.encoder import partitions_of
from flux.connectors.kafka.warm_up import warm_up
from flux.errors import SchemaError
from flux.operators.tentative import ReadableOperator, TentativeRows

#: Added columns: the partition of the topic (int32), and the number of the row there, from 0 (int64).
PARTITION, SEQUENCE = "_kafka_partition", "_kafka_sequence"
#: Ways to choose a partition of the topic when no column has it.
MURMUR2, ROUND_ROBIN = "murmur2", "round_robin"


class SequenceOperator(ReadableOperator):
    """Operator that numbers rows. ``topic_partitions`` is the number of partitions of the topic, 1 to 2^31 - 1. ``column`` has
    the partition of each row; without it ``partitioner`` chooses, and rows without a key take turns."""

    __former_names__: ClassVar = [("flux.kafka.numbering", "Numbering")]

    snapshot_classes = ()

    def __init__(self, columns: Columns, topic_partitions: int, partitioner: str, column: str | None) -> None:
        self._columns = columns
        self._partitioner = partitioner
        self._column = column
        self._counts = np.zeros(topic_partitions, np.int64)
        self._turn = -1  # partition of the last row without a key; below 0 before the first batch

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        if not batch.num_rows:
            return None
        if self._turn < 0:
            warm_up()
            self._turn = self.context.partition  # so that several writers begin with different partitions
        chosen = self._chosen(batch)
        sequences = np.empty(len(chosen), np.int64)
        self._turn = int(kernels.number(chosen, self._turn, self._counts, sequences))
        return batch.append_column(PARTITION, pa.array(chosen)).append_column(SEQUENCE, pa.array(sequences))

    def _chosen(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return the partition of each row as int32, -1 for rows that take turns."""
        if self._column is None:
            keys = self._columns.keys(batch) if self._partitioner == MURMUR2 else None
            return np.full(batch.num_rows, -1, np.int32) if keys is None else partitions_of(keys, len(self._counts))
        given = batch.column(self._column)
        wanted = np.asarray(given.cast(pa.int64()).fill_null(-1))
        wrong = np.flatnonzero((wanted < 0) | (wanted >= len(self._counts)))
        if len(wrong):
            said = given[int(wrong[0])].as_py()
            raise ValueError(
                f"column {self._column!r} says partition {said}; the topic has 0 to {len(self._counts) - 1}"
            )
        return wanted.astype(np.int32)

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> pa.Schema:
        (schema,) = schemas
        self._columns.check(schema)
        if self._column is not None:
            if schema.names.count(self._column) != 1:
                raise SchemaError(f"to_kafka: the output has no single column {self._column!r} to say the partition")
            if not pa.types.is_integer(schema.field(self._column).type):
                raise SchemaError(f"to_kafka: column {self._column!r} must be an integer to say the partition")
        for name in (PARTITION, SEQUENCE):
            if name in schema.names:
                raise SchemaError(f"to_kafka: the output has a column {name!r} already; name it otherwise")
        return schema.append(pa.field(PARTITION, pa.int32())).append(pa.field(SEQUENCE, pa.int64()))

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside = self._flux_aside()
        aside._counts = self._counts.copy()
        return aside

    def note_of_output(self) -> list[int]:
        """Return the number of rows until now in each partition of the topic."""
        return [int(count) for count in self._counts]

    def snapshot(self) -> Any:
        return {"counts": self._counts.copy(), "turn": self._turn}

    def restore(self, snapshot: Any) -> None:
        if len(snapshot["counts"]) != len(self._counts):
            raise ValueError(
                f"the state numbers the rows of {len(snapshot['counts'])} partitions of a topic, not of {len(self._counts)}"
            )
        self._counts, self._turn = np.array(snapshot["counts"], np.int64), int(snapshot["turn"])

    def state_bytes(self) -> int:
        return int(self._counts.nbytes)
