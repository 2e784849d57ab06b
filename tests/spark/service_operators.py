"""Operators that a service of the tests allows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import flux


class Above(flux.Operator):
    """The users above a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def output_schema(self, schemas: Any, key: Any) -> Any:
        return schemas[0]

    def process(self, batch: pa.RecordBatch) -> Any:
        return batch.filter(pc.field("user") > self.limit)


def unlucky(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Fail for user 13."""
    if 13 in batch["user"].to_pylist():
        raise ValueError("user 13")
    return batch


SECRET = "no operator"
