"""Requests that are made to harm a gateway: each is refused, and nothing is used up or left behind."""

from __future__ import annotations

import decimal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.flux.gateways import HeldClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[HeldClient]:
    made = HeldClient(tmp_path)
    yield made
    made.close()


def arrow(batch: pa.RecordBatch) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue().to_pybytes()  # type: ignore[no-any-return]


ARROW = "application/vnd.apache.arrow.stream"
_NEGATIVE_SCALE = pa.record_batch({"a": pa.array([decimal.Decimal(100)], pa.decimal128(5, -2))})


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"{}", "application/x-ndjson"), (b'{"":1}', "application/x-ndjson"), (arrow(_NEGATIVE_SCALE), ARROW)],
)
def test_first_events_whose_columns_no_ddl_has_leave_the_stream_as_it_was(
    client: HeldClient, body: bytes, kind: str
) -> None:
    client.register(schema="infer")
    assert client.push(body, kind).status_code == 422
    assert client.push(b'{"user": 1}').status_code == 200, "the refused events gave the stream their columns"
