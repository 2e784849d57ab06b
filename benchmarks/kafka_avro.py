"""Values of Avro and JSON to columns, the same rows: ``python -m benchmarks.kafka_avro [ROWS]``. No broker.

The last line has a list besides, so that the library reads it."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import fastavro
import pyarrow as pa

from flux.kafka.formats import Format, format_of

CLICK = {
    "type": "record", "name": "Click", "fields": [
        {"name": "user", "type": "long"}, {"name": "name", "type": ["null", "string"]}, {"name": "amount", "type": "double"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}, {"name": "n", "type": "int"},
        {"name": "new", "type": "boolean"},
    ],
}  # fmt: skip
COLUMNS = "user BIGINT, name STRING, amount DOUBLE, at BIGINT, n INT, new BOOLEAN"
#: Of each format the best of so many runs counts.
RUNS = 5


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"user": i, "name": f"user-{i}", "amount": i / 3, "at": 1_700_000_000_000 + i, "n": i % 100, "new": i % 2 == 0}
        for i in range(count)
    ]


def values(count: int) -> tuple[pa.Array, pa.Array, pa.Array]:
    """In Avro, with the framing of a registry, and in JSON."""
    plain, schema = [], fastavro.parse_schema(CLICK)
    for row in rows(count):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, row)
        plain.append(out.getvalue())
    framed = [b"\x00\x00\x00\x00\x07" + value for value in plain]
    texts = [json.dumps(row).encode() for row in rows(count)]
    return pa.array(plain, pa.binary()), pa.array(framed, pa.binary()), pa.array(texts, pa.binary())


def rate(format_: Format | None, given: pa.Array) -> float:
    """Million rows per second."""
    assert format_ is not None
    best = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter()
        parsed = format_.parse(given, find_all=True)
        best = min(best, time.perf_counter() - began)
        assert len(parsed.rows) == len(given)
    return len(given) / best / 1e6


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
        print(f"{name:20}{rate(made, given):8.2f} M rows/s")


if __name__ == "__main__":
    main(sys.argv[1:])
