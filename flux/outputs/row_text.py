"""Rows as JSON (design: output-json)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from flux.connectors.kafka.formats.text_encode import objects


def json_rows(batch: pa.RecordBatch) -> bytes:
    """Return rows as a JSON array on one line, an object each: times in ISO 8601, instants in UTC; binary in base64; NaN and
    infinities as null."""
    if not batch.num_rows:
        return b"[]"
    texts = objects(batch.columns, batch.schema.names) if batch.num_columns else pa.array(["{}"] * batch.num_rows)
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts), ",")
    text: bytes = joined[0].as_buffer().to_pybytes()
    return b"[" + text + b"]"
