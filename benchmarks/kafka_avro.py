"""Values of Avro and JSON to columns and back, with the same rows: ``python -m benchmarks.kafka_avro [ROWS]``. No broker.

The last line of each format has a list besides, so that the library reads it.
"""

from __future__ import annotations

import functools
import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import fastavro
import pyarrow as pa

from flux.connectors.kafka.formats.avro_encode import AvroValues
from flux.connectors.kafka.formats.base import Format, format_of
from flux.connectors.kafka.formats.text_encode import objects

CLICK = {
    "type": "record", "name": "Click", "fields": [
        {"name": "user", "type": "long"}, {"name": "name", "type": ["null", "string"]}, {"name": "amount", "type": "double"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}, {"name": "n", "type": "int"},
        {"name": "new", "type": "boolean"},
    ],
}  # fmt: skip
COLUMNS = "user BIGINT, name STRING, amount DOUBLE, at BIGINT, n INT, new BOOLEAN"
#: Runs of each format, of which the best counts.
RUNS = 5


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"user": i, "name": f"user-{i}", "amount": i / 3, "at": 1_700_000_000_000 + i, "n": i % 100, "new": i % 2 == 0}
        for i in range(count)
    ]


def values(count: int) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Make values in Avro, with the framing of a registry, and in JSON."""
    plain, schema = [], fastavro.parse_schema(CLICK)
    for row in rows(count):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, row)
        plain.append(out.getvalue())
    framed = [b"\x00\x00\x00\x00\x07" + value for value in plain]
    texts = [json.dumps(row).encode() for row in rows(count)]
    return pa.array(plain, pa.binary()), pa.array(framed, pa.binary()), pa.array(texts, pa.binary())


def rate(format_: Format | None, given: pa.Array) -> float:
    """Measure million rows per second."""
    assert format_ is not None
    return best_of(lambda: len(format_.parse(given, find_all=True).rows), len(given))


def best_of(work: Callable[[], int], rows: int) -> float:
    best = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter()
        done = work()
        best = min(best, time.perf_counter() - began)
        assert done == rows
    return rows / best / 1e6


def by_library(schema: Any, given: list[dict[str, Any]]) -> int:
    """Write value by value, from existing objects, with the library that other writers use."""
    parsed, made = fastavro.parse_schema(schema), []
    for row in given:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, row)
        made.append(out.getvalue())
    return len(made)


def written(how: AvroValues, batch: pa.RecordBatch) -> int:
    return len(how.encode(batch.columns, batch.schema.names, batch.num_rows, None))


def main(arguments: list[str]) -> None:
    plain, framed, texts = values(int(arguments[0]) if arguments else 100_000)
    listed = {**CLICK, "fields": [*CLICK["fields"], {"name": "tags", "type": {"type": "array", "items": "int"}}]}
    tagged = pa.array([value + b"\x02\x02\x00" for value in plain.to_pylist()], pa.binary())
    for name, made, given in (
        ("avro", format_of("avro", CLICK), plain),
        ("avro of a registry", format_of("avro", CLICK, lambda number: CLICK), framed),
        ("json", format_of("json", COLUMNS), texts),
        ("avro with a list", format_of("avro", listed), tagged),
    ):
        print(f"read {name:24}{rate(made, given):8.2f} M rows/s")
    at = pa.field("at", pa.timestamp("ms", "UTC"))
    fields = [pa.field("user", pa.int64()), pa.field("name", pa.string()), pa.field("amount", pa.float64())]
    schema_of_rows = pa.schema([*fields, at, pa.field("n", pa.int32()), pa.field("new", pa.bool_())])
    batch = pa.RecordBatch.from_pylist(rows(len(plain)), schema=schema_of_rows)
    tags = pa.array([[1]] * len(plain), pa.list_(pa.int32()))
    for name, schema, schemas, columns in (
        ("avro", CLICK, None, batch),
        ("avro of a registry", CLICK, lambda subject, text: 7, batch),
        ("avro with a list", listed, None, batch.append_column("tags", tags)),
    ):
        settled = AvroValues("clicks", schema, schemas).settled(columns.schema, 1.0)
        print(f"write {name:23}{best_of(functools.partial(written, settled, columns), len(plain)):8.2f} M rows/s")
    names = batch.schema.names
    print(f"write {'json':23}{best_of(lambda: len(objects(batch.columns, names)), len(plain)):8.2f} M rows/s")
    given_rows = rows(len(plain))
    print(f"write {'avro by fastavro':23}{best_of(lambda: by_library(CLICK, given_rows), len(plain)):8.2f} M rows/s")


if __name__ == "__main__":
    main(sys.argv[1:])
