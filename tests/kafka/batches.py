"""Record batches for tests, without a broker: made from rows, read to the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.records import kernels
from flux.connectors.kafka.records.decoder import COLUMNS, HEADER, Aborted, Decoder, Transactions
from flux.connectors.kafka.records.encoder import NOBODY, ProducerIdentity, encode

TIME = 1_750_000_000_000
ABORT, COMMIT = 0, 1


def made(
    values: Sequence[bytes | None],
    offset: int | None = 0,
    keys: Sequence[bytes | None] | None = None,
    headers: Any = None,
    codec: str | None = None,
    times: Sequence[int] | None = None,
    **more: Any,
) -> bytes:
    """Record batches of these rows; one unless ``batch_bytes`` says less."""
    given = None if headers is None else pa.array(headers, pa.list_(HEADER))
    stamps = np.array(times if times is not None else [TIME + i for i in range(len(values))], np.int64)
    return bytes(
        encode(
            None if keys is None else pa.array(keys, pa.binary()), pa.array(values, pa.binary()), stamps, given, codec,
            offset=offset, **more,
        ).data
    )  # fmt: skip


def control(kind: int, offset: int, producer: int) -> bytes:
    """Make the batch that ends a transaction."""
    key = (0).to_bytes(2, "big") + kind.to_bytes(2, "big")
    data = made([b"\0" * 6], offset, [key], producer=ProducerIdentity(producer, 0, -1))
    return changed(data, attributes=kernels.TRANSACTIONAL | kernels.CONTROL)


def changed(batch: bytes, **fields: int) -> bytes:
    """Make a batch with other numbers in its head, and a checksum that fits."""
    places = {
        "length": (8, 4), "magic": (16, 1), "attributes": (21, 2), "last_delta": (23, 4), "base_time": (27, 8),
        "max_time": (35, 8), "producer": (43, 8), "records": (57, 4), "base": (0, 8),
    }  # fmt: skip
    data = bytearray(batch)
    for name, number in fields.items():
        at, size = places[name]
        data[at : at + size] = number.to_bytes(size, "big", signed=number < 0)
    return signed(bytes(data))


def signed(batch: bytes) -> bytes:
    """Write the checksum of its bytes into a batch."""
    rest = np.frombuffer(batch[21:], np.uint8)
    return batch[:17] + int(kernels.crc32c(rest.ctypes.data, rest.size)).to_bytes(4, "big") + batch[21:]


def decoded(
    data: bytes, start: int = 0, columns: Sequence[str] = COLUMNS, aborted: Sequence[tuple[int, int]] = (), **more: Any
) -> pa.Table:
    """Decode all rows of all whole batches."""
    decoder, buffer, used, tables = Decoder("a topic", 3, columns), pa.py_buffer(data), 0, []
    transactions = Transactions(Aborted(*each) for each in aborted)
    while used < len(data):
        got = decoder.decode(buffer.slice(used), start, transactions, **more)
        if not got.used:
            break
        used, start = used + got.used, got.next
        if got.rows is not None:
            got.rows.validate(full=True)
            tables.append(got.rows)
    return pa.Table.from_batches(tables, decoder.schema)


def values(table: pa.Table) -> list[bytes | None]:
    return list(table.column("value").to_pylist())


__all__ = [
    "ABORT",
    "COMMIT",
    "NOBODY",
    "TIME",
    "ProducerIdentity",
    "changed",
    "control",
    "decoded",
    "made",
    "signed",
    "values",
]
