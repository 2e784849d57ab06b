"""A query in threads with real sockets that is attacked half-way: some rows are applied, more are still to come."""

from __future__ import annotations

import collections
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from harness import LIMIT_S, Peer, Rows, ThreadQuery, dataframe

import flux
from flux.wire.codec import decode_data
from flux.wire.control import PartitionFinished
from flux.wire.frames import HEADER_BYTES_MAX, MAGIC, PREFIX, VERSION, encode
from flux.wire.messages import Ack, Data, Hello, Install

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("word", pa.string())])
ROWS, BATCHES = 500, 6
#: The producer that sends nothing during an attack.
QUIET = 1


@flux.stage(key="k", partitions=4)
class Count(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")
    last = flux.max("word")  # so that all columns travel


def batches(seed: int) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(seed)
    return [
        pa.RecordBatch.from_arrays(
            [rng.integers(0, 40, ROWS), rng.integers(-9, 9, ROWS), rng.integers(0, 9, ROWS).astype(str)], schema=SCHEMA
        )
        for _ in range(BATCHES)
    ]


def expected(given: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    n: collections.Counter[int] = collections.Counter()
    total: collections.Counter[int] = collections.Counter()
    last: dict[int, str] = {}
    for batch in given:
        for row in batch.to_pylist():
            n[row["k"]] += 1
            total[row["k"]] += row["v"]
            last[row["k"]] = max(last.get(row["k"], ""), row["word"])
    return sorted(({"k": k, "n": n[k], "total": total[k], "last": last[k]} for k in n), key=repr)


@contextmanager
def attacked_half_way(**options: Any) -> Iterator[ThreadQuery]:
    """Run the body when half of the rows are applied, feed the rest afterwards, and check the result.

    While the body runs, the first producer sends a row now and then, and the second, ``QUIET``, is silent."""
    rows, half, gate = Rows(), threading.Event(), threading.Event()
    given: list[pa.RecordBatch] = []

    def noted(batch: pa.RecordBatch) -> pa.RecordBatch:
        given.append(batch)
        return batch

    def trickle(seed: int, until: threading.Event) -> Iterator[pa.RecordBatch]:
        mine = batches(seed)
        for batch in mine[: BATCHES // 2]:
            yield noted(batch)
        while not until.wait(0.01):
            yield noted(mine[0].slice(0, 1))
        assert gate.wait(2 * LIMIT_S)
        for batch in mine[BATCHES // 2 :]:
            yield noted(batch)

    with ThreadQuery(rows.stage(Count(dataframe(SCHEMA))), **options) as query:
        query.started().feed([trickle(1, gate), trickle(2, half)])
        try:
            until_applied(query, 2 * ROWS * (BATCHES // 2))
            half.set()
            yield query
            assert query.server.phase == "running", query.server.error
            assert rows == []
        finally:
            half.set()
            gate.set()
        query.wait()
        assert rows.sorted() == expected(given)
        assert query.raised == []


def until_applied(query: ThreadQuery, at_least: int, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while True:
        stats = [member.stats for member in list(query.server.core.members.workers.values())]
        if sum(rows for s in stats if s for _, rows, _, _ in s["stages"][0]["primaries"]) >= at_least:
            return
        assert time.monotonic() < end, (stats, query.raised, query.server.error)
        time.sleep(0.01)


def until(look: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not look():
        assert time.monotonic() < end
        time.sleep(0.01)


def everywhere(query: ThreadQuery) -> list[str]:
    return [*query.ports(), query.rendezvous.endpoint]


# ---- messages for its ports


def hello(edge: int = 0, producer: int = QUIET, incarnation: int = 7) -> Hello:
    return Hello(edge, producer, incarnation, 0)


def answered(peer: Peer) -> Any:
    """Return the next answer of a data port."""
    frames = peer.recv()
    assert frames is not None, f"no answer: {peer.link.problem}"
    return decode_data(frames[0])


def data(**changes: Any) -> Data:
    """Make the message of one row for partition 0, in sequence 0 of the quiet producer's stream."""
    fields: dict[str, Any] = {
        "edge": 0, "producer": QUIET, "nonce": 1, "number": 0, "first": 0, "sequence": 0,
        "partitions": [0], "rows": [1], "runs": [1], "nbytes": 300,
    }  # fmt: skip
    return Data(**(fields | changes))


def row() -> bytes:
    arrays = [pa.array([1]), pa.array([10**6]), pa.array(["extra"])]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA).serialize().to_pybytes()


MALFORMED = {
    "garbage": [b"\x00\xff garbage" * 7],
    "an empty frame": [b""],
    "several frames of garbage": [b"x", b"y", b"z"],
    "another version": [MAGIC + bytes([VERSION + 1]) + encode(hello())[4:]],
    "another magic": [b"FLY" + encode(hello())[3:]],
    "a header without a body": [encode(hello())[:4]],
    "a truncated header": [encode(hello())[:-3]],
    "a header that is too long": [encode(hello()) + bytes(HEADER_BYTES_MAX)],
    "a message that only producers take": [encode(Ack(0, 0, 1, 0, 1 << 40, [], 1 << 40))],
    "a control message": [encode(PartitionFinished(node=0, stage=0, partition=0))],
    "numbers where lists belong": [PREFIX + b"\x9e\xa4Data" + bytes(13)],
    "a part of a state": [encode(Install(0, 0, 0, 1, 0, 100)), bytes(100)],
    "values nested without end": [PREFIX + b"\x91" * 2000],
}


def zmtp(mechanism: bytes) -> bytes:
    """Return the first bytes of ZeroMQ's protocol (ZMTP 3.0, RFC 23)."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def named(mechanism: bytes, command: bytes, name: bytes) -> bytes:
    """Return the first bytes of a peer that chooses the name by which its connection is known."""
    given = b"".join(
        bytes([len(key)]) + key + struct.pack("!I", len(value)) + value
        for key, value in ((b"Socket-Type", b"DEALER"), (b"Identity", name))
    )
    body = bytes([len(command)]) + command + given
    return zmtp(mechanism) + b"\x04" + bytes([len(body)]) + body
