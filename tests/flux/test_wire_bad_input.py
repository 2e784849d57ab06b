"""Whoever reaches the ports of a query without belonging to it is counted and refused, and the result is unchanged.

The query runs in threads with real sockets. It is attacked half-way: some rows are applied, more are still to come.
"""

from __future__ import annotations

import collections
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zmq
from harness import SECRET, Rows, ThreadQuery, dataframe

import flux
from flux.codec import HEADER_BYTES_MAX, MAGIC, VERSION, decode_data, decode_order, encode
from flux.control import Failure, Heartbeat, PartitionFinished, Register, Rejected
from flux.messages import Ack, Data, Fetch, Hello, Refuse, Reset, Resume
from flux.transport import Keys

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("word", pa.string())])
ROWS, BATCHES = 500, 6
WAIT_MS = 5000
#: The producer that sends nothing during an attack.
QUIET = 1


@flux.stage(key="k", partitions=4)
class Count(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")


def batches(seed: int) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(seed)
    return [
        pa.RecordBatch.from_arrays(
            [rng.integers(0, 40, ROWS), rng.integers(-9, 9, ROWS), rng.integers(0, 9, ROWS).astype(str)], schema=SCHEMA
        )
        for _ in range(BATCHES)
    ]


def expected(given: list[pa.RecordBatch]) -> list[dict[str, int]]:
    n: collections.Counter[int] = collections.Counter()
    total: collections.Counter[int] = collections.Counter()
    for batch in given:
        for row in batch.to_pylist():
            n[row["k"]] += 1
            total[row["k"]] += row["v"]
    return sorted(({"k": k, "n": n[k], "total": total[k]} for k in n), key=repr)


@contextmanager
def attacked_half_way(**options: Any) -> Iterator[ThreadQuery]:
    """The body runs when half of the rows are applied; afterwards the rest comes, and the result must be right.

    Meanwhile the first producer goes on with a row now and then, and the second, ``QUIET``, is silent."""
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
        assert gate.wait(60)
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


def until_applied(query: ThreadQuery, at_least: int, limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while True:
        stats = [member.stats for member in list(query.server.core.members.workers.values())]
        if sum(rows for s in stats if s for _, rows, _, _ in s["stages"][0]["primaries"]) >= at_least:
            return
        assert time.monotonic() < end, (stats, query.raised, query.server.error)
        time.sleep(0.01)


@contextmanager
def connected(endpoint: str, keys: Keys | None = None) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.rcvtimeo = WAIT_MS
        if keys is not None:
            raw.curve_serverkey = keys.public
            raw.curve_publickey, raw.curve_secretkey = keys.public, keys.private
        raw.connect(endpoint)
        yield raw


def hello(secret: bytes = SECRET, edge: int = 0, producer: int = QUIET, incarnation: int = 7) -> Hello:
    return Hello(edge, producer, incarnation, 0, secret)


def data(**changes: Any) -> Data:
    """One row for partition 0, in sequence 0 of the quiet producer's stream."""
    fields: dict[str, Any] = {
        "edge": 0, "producer": QUIET, "nonce": 1, "number": 0, "first": 0, "sequence": 0,
        "partitions": [0], "rows": [1], "runs": [1], "nbytes": 300,
    }  # fmt: skip
    return Data(**(fields | changes))


def row() -> bytes:
    arrays = [pa.array([1]), pa.array([10**6]), pa.array(["extra"])]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA).serialize().to_pybytes()


# ---- strangers at the data port

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
    "numbers where lists belong": [b"FLX\x01\x9e\xa4Data" + bytes(13)],
}


def test_malformed_messages_to_a_data_port_are_counted_and_change_nothing() -> None:
    with attacked_half_way() as query:
        for sent, frames in enumerate(MALFORMED.values()):
            with connected(query.ports()[0]) as stranger:
                stranger.send_multipart(frames)
                query.until_counted("malformed", sent + 1)
        assert query.counters()["malformed"] == len(MALFORMED)
        assert query.counters()["refused"] == 0


def test_a_wrong_secret_is_refused_on_the_data_port() -> None:
    with attacked_half_way() as query:
        for wrong in (b"", SECRET[:-1], SECRET + b"x", b"\xff" * 32):
            with connected(query.ports()[0]) as stranger:
                stranger.send(encode(hello(wrong)))
                answer = decode_data(stranger.recv())
                assert isinstance(answer, Refuse)
                assert answer.code == "secret"
                stranger.send_multipart([encode(data()), row()])  # and knowing better does not help
                assert isinstance(decode_data(stranger.recv()), Reset)
        query.until_counted("refused", 8)


def test_rows_before_hello_are_refused() -> None:
    with attacked_half_way() as query:
        for nonce in range(1, 9):  # one of them is that of the true producer
            with connected(query.ports()[0]) as stranger:
                stranger.send_multipart([encode(data(nonce=nonce, sequence=BATCHES // 2)), row()])
                assert isinstance(decode_data(stranger.recv()), Reset)
        query.until_counted("refused", 8)


def test_rows_for_a_stream_that_does_not_exist_are_refused() -> None:
    with attacked_half_way() as query, connected(query.ports()[0]) as stranger:
        for changes in ({"edge": 99}, {"edge": -1}, {"producer": 12345}, {"producer": -1}):
            stranger.send_multipart([encode(data(**changes)), row()])
            assert isinstance(decode_data(stranger.recv()), Reset)
        for changes in ({"edge": 99}, {"edge": -1}, {"producer": -1}):
            stranger.send(encode(hello(**changes)))
            answer = decode_data(stranger.recv())
            assert isinstance(answer, Refuse)
            assert answer.code == "edge"
        query.until_counted("refused", 7)


def test_output_is_not_given_away_without_the_secret() -> None:
    with attacked_half_way() as query, connected(query.ports()[0]) as stranger:
        stranger.send(encode(Fetch(b"guess", 0, 0, 0)))
        query.until_counted("refused", 1)
        stranger.rcvtimeo = 50
        with pytest.raises(zmq.Again):
            stranger.recv()


# ---- a connection that has proved the secret and sends nonsense


def batch_of(schema: pa.Schema) -> bytes:
    return pa.RecordBatch.from_pylist([{"k": 1}], schema=schema).serialize().to_pybytes()


NONSENSE: dict[str, tuple[dict[str, Any], list[bytes]]] = {
    "a truncated payload": ({}, [row()[:-24]]),
    "half of the payload's header": ({}, [row()[:20]]),
    "an empty payload": ({}, [b""]),
    "garbage as payload": ({}, [b"\xff\xff\xff\xff" + bytes(200)]),
    "no payload": ({}, []),
    "one payload too many": ({}, [row(), row()]),
    "more rows announced than there are": ({"rows": [2]}, [row()]),
    "no row for a partition": ({"partitions": [0, 1], "rows": [1, 0], "runs": [2]}, [row()]),
    "a negative number of rows": ({"partitions": [0, 1], "rows": [2, -1], "runs": [2]}, [row()]),
    "lists of different lengths": ({"partitions": [0, 1]}, [row()]),
    "runs that do not add up": ({"runs": [2]}, [row()]),
    "a payload of another schema": ({}, [batch_of(pa.schema([("k", pa.int8())]))]),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_peer_that_sends_nonsense_after_its_hello_is_counted_and_changes_nothing(name: str) -> None:
    changes, payload = NONSENSE[name]
    with attacked_half_way(resend_timeout="100ms") as query, connected(query.ports()[0]) as peer:
        end = time.monotonic() + 30
        while query.counters().get("malformed", 0) < 1:
            # The real producer may greet again in between; then the connection is its own, and nothing is looked at.
            assert time.monotonic() < end, f"never malformed: {query.counters()}; raised {query.raised}"
            peer.send(encode(hello()))
            resume = decode_data(peer.recv())
            if isinstance(resume, Resume):
                following = max(sequence for _, sequence in resume.next)
                mine = {"partitions": [resume.next[0][0]]} | changes
                good = data(nonce=resume.nonce, first=following, sequence=following, **mine)
                peer.send_multipart([encode(good), *payload])
            time.sleep(0.3)  # longer than the next heartbeat with counts takes


def test_damaged_payloads_never_reach_an_operator_nor_end_the_worker() -> None:
    """Each byte of the payload's metadata and buffers is spoilt once; what still is a batch is one of another nonce."""
    whole = row()
    with attacked_half_way(resend_timeout="100ms") as query, connected(query.ports()[0]) as peer:
        peer.send(encode(hello()))
        resume = decode_data(peer.recv())
        assert isinstance(resume, Resume)
        before = query.counters()
        for at in range(0, len(whole), 3):
            spoilt = bytearray(whole)
            spoilt[at] ^= 0xFF
            peer.send_multipart([encode(data(nonce=resume.nonce + 99)), bytes(spoilt)])
        sent = len(range(0, len(whole), 3))
        end = time.monotonic() + 10
        while (after := query.counters())["malformed"] + after["stale"] - before["malformed"] - before["stale"] < sent:
            assert time.monotonic() < end, after
            time.sleep(0.01)
        assert after["malformed"] > before["malformed"]


ABSURD = [1 << 63, (1 << 64) - 1, -1, -(1 << 63)]


@pytest.mark.parametrize("field", ["nonce", "number", "first", "sequence", "nbytes"])
def test_numbers_out_of_range_from_a_peer_are_malformed_and_change_nothing(field: str) -> None:
    with attacked_half_way(resend_timeout="100ms") as query, connected(query.ports()[0]) as peer:
        peer.send(encode(hello()))
        resume = decode_data(peer.recv())
        assert isinstance(resume, Resume)
        following = max(sequence for _, sequence in resume.next)
        fields = {"nonce": resume.nonce, "first": following, "sequence": following}
        for absurd in ABSURD:
            peer.send_multipart([encode(data(**(fields | {field: absurd}))), row()])
        query.until_counted("malformed", len(ABSURD))


def test_an_offset_out_of_range_in_a_fetch_is_malformed_and_changes_nothing() -> None:
    with attacked_half_way() as query, connected(query.ports()[0]) as peer:
        for absurd in ABSURD:
            peer.send(encode(Fetch(SECRET, 0, 0, absurd)))
        query.until_counted("malformed", len(ABSURD))


def test_frames_beyond_the_limit_close_the_connection_and_nothing_else() -> None:
    with attacked_half_way(message_max_bytes="64k") as query:
        for endpoint in (query.ports()[0], query.rendezvous.endpoint):
            with connected(endpoint) as stranger:
                monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                stranger.send(bytes(65 << 10))
                assert monitor.poll(WAIT_MS), "still connected"
                stranger.disable_monitor()
        assert query.counters()["malformed"] == 0


def test_what_is_not_zeromq_at_all_changes_nothing() -> None:
    with attacked_half_way() as query:
        for endpoint in (*query.ports(), query.rendezvous.endpoint):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), struct.pack("<Q", 1 << 60) * 8):
                with socket.create_connection((host, int(port)), timeout=5) as raw:
                    raw.sendall(noise)


# ---- the controller's port


def register(secret: bytes, **changes: Any) -> bytes:
    fields = {"role": "worker", "index": 0, "attempt": 99, "host": "elsewhere", "pid": 1, "endpoint": "tcp://1.2.3.4:5"}
    return encode(Register(secret=secret, **(fields | changes)))


CONTROLLER_STRANGERS: dict[str, list[bytes]] = {
    "garbage": [b"\x00\xff garbage"],
    "another version": [MAGIC + bytes([VERSION + 1]) + register(SECRET)[4:]],
    "two frames": [register(SECRET), b""],
    "a message of the data plane": [encode(hello())],
    "a heartbeat of nobody": [encode(Heartbeat(node=0, progress=1 << 40, stats={"stages": []}))],
    "a false end": [encode(PartitionFinished(node=0, stage=1, partition=0))],
    "a false failure": [encode(Failure(node=0, kind="UserCodeError", message="all is lost"))],
    "a wrong secret": [register(b"guess")],
    "no secret": [register(b"")],
}


def test_strangers_at_the_controller_are_counted_and_change_nothing() -> None:
    with attacked_half_way() as query:
        for number, frames in enumerate(CONTROLLER_STRANGERS.values()):
            with connected(query.rendezvous.endpoint) as stranger:
                stranger.send_multipart(frames)
                until(lambda number=number: query.server.core.refused > number)
        assert query.server.core.refused == len(CONTROLLER_STRANGERS)
        assert len(query.server.core.members.workers) == 2


def test_the_controller_tells_a_process_with_a_wrong_secret_why_it_is_refused() -> None:
    with attacked_half_way() as query, connected(query.rendezvous.endpoint) as stranger:
        stranger.send(register(b"guess"))
        answer = decode_order(stranger.recv())
        assert isinstance(answer, Rejected)
        assert "another query" in answer.reason


# ---- encryption


def test_an_encrypted_query_gives_the_same_result() -> None:
    with attacked_half_way(encrypted=True) as query:
        assert query.keys is not None


def test_a_plain_peer_cannot_talk_to_an_encrypted_query() -> None:
    with attacked_half_way(encrypted=True) as query:
        for endpoint, frames in (
            (query.ports()[0], [encode(hello())]),
            (query.ports()[0], [b"garbage"]),
            (query.rendezvous.endpoint, [register(SECRET)]),
        ):
            with connected(endpoint) as stranger:
                stranger.rcvtimeo = 200
                stranger.send_multipart(frames)
                with pytest.raises(zmq.Again):
                    stranger.recv()
        assert query.server.core.refused == 0
        assert not any(query.counters().values())


def test_a_peer_with_other_keys_cannot_talk_to_an_encrypted_query_and_one_with_its_keys_can() -> None:
    with attacked_half_way(encrypted=True, resend_timeout="100ms") as query:
        with connected(query.ports()[0], Keys.make()) as stranger:
            stranger.rcvtimeo = 200
            stranger.send(encode(hello()))
            with pytest.raises(zmq.Again):
                stranger.recv()
        # The keys are right, and still the secret is asked for.
        with connected(query.ports()[0], query.keys) as stranger:
            stranger.send(encode(hello(b"guess")))
            assert isinstance(decode_data(stranger.recv()), Refuse)


# ---- an input that says nothing for long


def test_rows_that_are_read_arrive_while_the_input_is_silent() -> None:
    gate = threading.Event()

    def one_then_silence() -> Iterator[pa.RecordBatch]:
        yield batches(1)[0]
        assert gate.wait(60)

    with ThreadQuery(Rows().stage(Count(dataframe(SCHEMA)))) as query:
        query.started().feed([one_then_silence()])
        try:
            until_applied(query, ROWS, limit_s=3)
        finally:
            gate.set()
        query.wait()


def until(look: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not look():
        assert time.monotonic() < end
        time.sleep(0.01)
