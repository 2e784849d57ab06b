"""Whoever reaches the ports of a query without belonging to it is counted and refused, and the result is unchanged.

The query runs in threads with real sockets. It is attacked half-way: some rows are applied, more are still to come.
"""

from __future__ import annotations

import collections
import contextlib
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import zmq
from harness import SECRET, Peer, Rows, ThreadQuery, dataframe

import flux
from flux.codec import HEADER_BYTES_MAX, MAGIC, PREFIX, VERSION, decode_data, encode
from flux.control import Failure, Heartbeat, PartitionFinished, TableSeen
from flux.messages import Ack, Data, Fetch, Hello, Install, Refuse, Reset, Resume
from flux.shell import Rendezvous
from flux.strangers import Strangers
from flux.transport import Keys, Sockets

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("word", pa.string())])
ROWS, BATCHES = 500, 6
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
def connected(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A stranger with ZeroMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 50
        raw.connect(endpoint)
        yield raw


def hello(edge: int = 0, producer: int = QUIET, incarnation: int = 7) -> Hello:
    return Hello(edge, producer, incarnation, 0)


def answered(peer: Peer) -> Any:
    """The next answer of a data port."""
    frames = peer.recv()
    assert frames is not None, f"no answer: {peer.link.problem}"
    return decode_data(frames[0])


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


# ---- strangers

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


def everywhere(query: ThreadQuery) -> list[str]:
    return [*query.ports(), query.rendezvous.endpoint]


def test_without_a_ticket_nothing_that_is_said_is_heard() -> None:
    with attacked_half_way() as query:
        for endpoint in everywhere(query):
            for frames in MALFORMED.values():
                with connected(endpoint) as stranger, contextlib.suppress(zmq.Again):
                    stranger.send_multipart(frames, zmq.NOBLOCK)
        query.until_counted("refused", 1)
        until(lambda: query.server.core.refused >= 1)
        assert query.counters()["malformed"] == 0


def test_a_wrong_secret_opens_no_port() -> None:
    with attacked_half_way() as query:
        for endpoint in everywhere(query):
            for wrong in (b"", SECRET[:-1], SECRET + b"x", b"\xff" * 32):
                with Peer(endpoint, wrong, limit_s=0.3) as stranger:
                    assert not stranger.met()
                    assert "does not accept the secret of this query" in stranger.link.problem
        query.until_counted("refused", 8)
        assert query.server.core.refused >= 4


def zmtp(mechanism: bytes) -> bytes:
    """How ZeroMQ's protocol begins (ZMTP 3.0, RFC 23)."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def named(mechanism: bytes, command: bytes, name: bytes) -> bytes:
    """One that chooses the name by which its connection is known."""
    given = b"".join(
        bytes([len(key)]) + key + struct.pack("!I", len(value)) + value
        for key, value in ((b"Socket-Type", b"DEALER"), (b"Identity", name))
    )
    body = bytes([len(command)]) + command + given
    return zmtp(mechanism) + b"\x04" + bytes([len(body)]) + body


#: The names that ZeroMQ gives by itself are numbers, and the first one is always the same.
GIVEN = [b"\0" + struct.pack("!I", 0x6B8B4567 + number) for number in range(20)]


def test_a_stranger_cannot_choose_the_name_of_the_next_connection() -> None:
    """ZeroMQ ended the process, by an assertion, when a true connection got a name that somebody had taken."""
    with attacked_half_way() as query:
        for endpoint in everywhere(query):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            strangers = [socket.create_connection((host, int(port))) for _ in range(3 * len(GIVEN))]
            for number, stranger in enumerate(strangers):
                mechanism, command = [(b"NULL", b"READY"), (b"PLAIN", b"INITIATE"), (b"CURVE", b"READY")][number % 3]
                stranger.sendall(named(mechanism, command, GIVEN[number // 3]))
            for _ in range(3):
                with Peer(endpoint) as peer:
                    assert peer.met()
            for stranger in strangers:
                stranger.close()


def push(stranger: socket.socket, frames: bool) -> int:
    """Send frames, or one frame of the handshake, of 190 MB; how many were taken before the connection was cut."""
    pushed = 0
    try:
        if not frames:
            stranger.sendall(b"\x06" + struct.pack("!Q", 200 << 20) + b"\x05HELLO")
        while pushed < 190:
            stranger.sendall((b"\x01\xff" + bytes(255)) * 4080 if frames else bytes(1 << 20))
            pushed += 1
    except OSError:
        pass
    return pushed


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN"])
def test_frames_without_end_are_not_kept(mechanism: bytes) -> None:
    """ZeroMQ keeps the parts of a message until the last one has come."""
    with attacked_half_way() as query:
        before = psutil.Process().memory_info().rss
        for endpoint in everywhere(query):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5) as stranger:
                stranger.sendall(named(mechanism, b"READY", b"") if mechanism == b"NULL" else zmtp(mechanism))
                assert push(stranger, mechanism == b"NULL") < 190, "never cut"
        assert psutil.Process().memory_info().rss - before < 300 << 20
        query.until_counted("refused", 1)


def test_connections_without_end_keep_nobody_out() -> None:
    at_most = Strangers(resource.getrlimit(resource.RLIMIT_NOFILE)[0]).at_most
    with attacked_half_way() as query:
        for endpoint in everywhere(query):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            silent = [socket.create_connection((host, int(port))) for _ in range(at_most + 50)]
            with Peer(endpoint) as peer:
                assert peer.met()
            for connection in silent:
                connection.close()


def test_rows_before_hello_are_refused() -> None:
    with attacked_half_way() as query:
        for nonce in range(1, 9):  # one of them is that of the true producer
            with Peer(query.ports()[0]) as peer:
                peer.send(encode(data(nonce=nonce, sequence=BATCHES // 2)), row())
                assert isinstance(answered(peer), Reset)
        query.until_counted("refused", 8)


def test_rows_for_a_stream_that_does_not_exist_are_refused() -> None:
    with attacked_half_way() as query, Peer(query.ports()[0]) as peer:
        for changes in ({"edge": 99}, {"edge": -1}, {"producer": 12345}, {"producer": -1}):
            peer.send(encode(data(**changes)), row())
            assert isinstance(answered(peer), Reset)
        for changes in ({"edge": 99}, {"edge": -1}, {"producer": -1}):
            peer.send(encode(hello(**changes)))
            answer = answered(peer)
            assert isinstance(answer, Refuse)
            assert answer.code == "edge"
        query.until_counted("refused", 7)


# ---- somebody who listens where a process of the query has listened


class Impostor:
    """Has bound a port; takes part in ZeroMQ's handshake as far as it can and remembers what it hears."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.raw = self.context.socket(zmq.ROUTER)
        self.raw.linger = 0
        self.raw.plain_server = True
        self.zap = self.context.socket(zmq.REP)
        self.zap.linger = 0
        self.zap.bind("inproc://zeromq.zap.01")
        self.endpoint = f"tcp://127.0.0.1:{self.raw.bind_to_random_port('tcp://127.0.0.1')}"
        self.heard: list[bytes] = []

    def listen(self, seconds: float, answer: Callable[[bytes], bytes]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.zap.poll(5):
                version, request, *about = self.zap.recv_multipart()
                self.heard += about
                self.zap.send_multipart([version, request, b"200", b"OK", b"", b""])
            if self.raw.poll(5):
                identity, *frames = self.raw.recv_multipart()
                self.heard += frames
                self.raw.send_multipart([identity, answer(frames[0])])

    def close(self) -> None:
        self.context.destroy(0)


def test_whoever_binds_the_port_of_a_dead_process_hears_nothing_of_use() -> None:
    impostor = Impostor()
    sockets = Sockets(None, SECRET)
    link = sockets.link(impostor.endpoint)
    rows, install = b"rows " * 40, b"a part of a state"
    listens = threading.Thread(target=impostor.listen, args=(1.5, lambda said: b"FLXc\x02" + said[5:] + bytes(32)))
    listens.start()
    link.send([encode(hello())])
    link.send([encode(data()), rows])
    link.send([encode(Install(0, 0, 0, 1, 0, 100)), install])
    while listens.is_alive():
        for ready in sockets.wait(0.05):
            assert list(ready.receive()) == []
    assert "does not know the secret" in link.problem
    assert link.refused > 1, "it is asked again, in case a true process listens there by then"
    heard = b"".join(impostor.heard)
    assert b"FLXg" in heard
    assert not any(said in heard for said in (SECRET, b"Hello", b"Data", rows, b"Install", install))
    sockets.close()
    impostor.close()


def test_what_was_under_way_does_not_go_to_who_listens_next() -> None:
    """ZeroMQ by itself connects again, and sends what is left to whoever is there."""
    first = Sockets(None, SECRET)
    port = first.port("127.0.0.1")
    sockets = Sockets(None, SECRET)
    link = sockets.link(port.endpoint)
    meeting = time.monotonic() + 10
    while not link.ready and time.monotonic() < meeting:
        for both in (first, sockets):
            for ready in both.wait(0.01):
                assert list(ready.receive()) == []
    assert link.ready
    number = int(port.endpoint.rpartition(":")[2])
    first.close()
    with socket.create_server(("127.0.0.1", number)) as listener:
        listener.settimeout(5)
        for _ in range(50):
            link.send([b"secret rows"])
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            for ready in sockets.wait(0.02):
                assert list(ready.receive()) == []
        connection, _ = listener.accept()
        with connection:
            connection.sendall(zmtp(b"PLAIN"))
            connection.settimeout(0.5)
            heard = b""
            with contextlib.suppress(OSError):
                while more := connection.recv(65536):
                    heard += more
        assert b"PLAIN" in heard
        assert b"secret rows" not in heard
    assert not link.ready
    sockets.close()


# ---- a connection that has proved the secret and sends nonsense


def test_malformed_messages_of_a_peer_are_counted_and_change_nothing() -> None:
    malformed = {name: frames for name, frames in MALFORMED.items() if name != "a part of a state"}
    with attacked_half_way() as query:
        for sent, frames in enumerate(malformed.values()):
            with Peer(query.ports()[0]) as peer:
                peer.send(*frames)
                query.until_counted("malformed", sent + 1)
        assert query.counters()["malformed"] == len(malformed)
        assert query.counters()["refused"] == 0


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
    with attacked_half_way(resend_timeout="100ms") as query, Peer(query.ports()[0]) as peer:
        end = time.monotonic() + 30
        while query.counters().get("malformed", 0) < 1:
            # The real producer may greet again in between; then the connection is its own, and nothing is looked at.
            assert time.monotonic() < end, f"never malformed: {query.counters()}; raised {query.raised}"
            peer.send(encode(hello()))
            resume = answered(peer)
            if isinstance(resume, Resume):
                following = max(sequence for _, sequence in resume.next)
                mine = {"partitions": [resume.next[0][0]]} | changes
                good = data(nonce=resume.nonce, first=following, sequence=following, **mine)
                peer.send(encode(good), *payload)
            time.sleep(0.3)  # longer than the next heartbeat with counts takes


def test_damaged_payloads_never_reach_an_operator_nor_end_the_worker() -> None:
    """Each byte of the payload's metadata and buffers is spoilt once; what still is a batch is one of another nonce."""
    whole = row()
    with attacked_half_way(resend_timeout="100ms") as query, Peer(query.ports()[0]) as peer:
        peer.send(encode(hello()))
        resume = answered(peer)
        assert isinstance(resume, Resume)
        before = query.counters()
        for at in range(0, len(whole), 3):
            spoilt = bytearray(whole)
            spoilt[at] ^= 0xFF
            peer.send(encode(data(nonce=resume.nonce + 99)), bytes(spoilt))
        sent = len(range(0, len(whole), 3))
        end = time.monotonic() + 10
        while (after := query.counters())["malformed"] + after["stale"] - before["malformed"] - before["stale"] < sent:
            assert time.monotonic() < end, after
            time.sleep(0.01)
        assert after["malformed"] > before["malformed"]


ABSURD = [1 << 63, (1 << 64) - 1, -1, -(1 << 63)]


@pytest.mark.parametrize("field", ["nonce", "number", "first", "sequence", "nbytes"])
def test_numbers_out_of_range_from_a_peer_are_malformed_and_change_nothing(field: str) -> None:
    with attacked_half_way(resend_timeout="100ms") as query, Peer(query.ports()[0]) as peer:
        peer.send(encode(hello()))
        resume = answered(peer)
        assert isinstance(resume, Resume)
        following = max(sequence for _, sequence in resume.next)
        fields = {"nonce": resume.nonce, "first": following, "sequence": following}
        for absurd in ABSURD:
            peer.send(encode(data(**(fields | {field: absurd}))), row())
        query.until_counted("malformed", len(ABSURD))


def test_an_offset_out_of_range_in_a_fetch_is_malformed_and_changes_nothing() -> None:
    with attacked_half_way() as query, Peer(query.ports()[0]) as peer:
        for absurd in ABSURD:
            peer.send(encode(Fetch(0, 0, absurd)))
        query.until_counted("malformed", len(ABSURD))


def test_frames_beyond_the_limit_close_the_connection_and_nothing_else() -> None:
    with attacked_half_way(message_max_bytes="64k") as query, Peer(query.ports()[0]) as peer:
        assert peer.met()
        peer.send(bytes(65 << 10))
        peer.limit_s = 1.0
        before = peer.link._caller
        assert peer.recv() is None
        assert peer.met()
        assert peer.link._caller is not before, "it is another connection"
        assert query.counters()["malformed"] == 0


def test_what_is_not_zeromq_at_all_changes_nothing() -> None:
    with attacked_half_way() as query:
        for endpoint in (*query.ports(), query.rendezvous.endpoint):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), struct.pack("<Q", 1 << 60) * 8):
                with socket.create_connection((host, int(port)), timeout=5) as raw:
                    raw.sendall(noise)


# ---- the controller's port

CONTROLLER_STRANGERS: dict[str, bytes] = {
    "garbage": b"\x00\xff garbage",
    "another version": MAGIC + bytes([VERSION + 1]) + encode(TableSeen(node=0, epoch=0))[4:],
    "a message of the data plane": encode(hello()),
    "values nested without end": PREFIX + b"\x81\xa4type" * 1000,
    "a heartbeat of nobody": encode(Heartbeat(node=0, progress=1 << 40, stats={"stages": []})),
    "a false end": encode(PartitionFinished(node=0, stage=1, partition=0)),
    "a false failure": encode(Failure(node=0, kind="UserCodeError", message="all is lost")),
}


def test_who_has_not_registered_at_the_controller_is_counted_and_changes_nothing() -> None:
    with attacked_half_way() as query:
        for number, said in enumerate(CONTROLLER_STRANGERS.values()):
            with Peer(query.rendezvous.endpoint, sealed=True) as peer:
                peer.send(said)
                until(lambda number=number: query.server.core.refused > number)
        assert query.server.core.refused == len(CONTROLLER_STRANGERS)
        assert len(query.server.core.members.workers) == 2


def test_the_controller_hears_nothing_without_a_seal() -> None:
    """Of somebody who has got into a connection of the query."""
    with attacked_half_way() as query, Peer(query.rendezvous.endpoint, sealed=False) as peer:
        peer.send(encode(Failure(node=0, kind="UserCodeError", message="all is lost")))
        until(lambda: query.server.core.refused == 1)


# ---- encryption


def test_an_encrypted_query_gives_the_same_result() -> None:
    with attacked_half_way(encrypted=True) as query:
        assert query.keys is not None


def test_a_plain_peer_cannot_talk_to_an_encrypted_query() -> None:
    with attacked_half_way(encrypted=True) as query:
        for endpoint in everywhere(query):
            with Peer(endpoint, limit_s=0.3) as stranger:
                assert not stranger.met()
        assert query.counters()["malformed"] == 0


def test_a_peer_with_other_keys_cannot_talk_to_an_encrypted_query_and_one_with_its_keys_needs_the_secret() -> None:
    with attacked_half_way(encrypted=True) as query:
        assert query.keys is not None
        for endpoint in everywhere(query):
            own = Keys.make(server=query.keys.public)
            for keys, secret in ((Keys.make(), SECRET), (own, SECRET), (query.keys, b"guess")):
                with Peer(endpoint, secret, keys, limit_s=0.3) as stranger:
                    assert not stranger.met()
            with Peer(endpoint, SECRET, query.keys) as peer:
                assert peer.met()


def test_secrets_are_in_no_repr() -> None:
    keys = Keys.make()
    shown = repr(Rendezvous("tcp://127.0.0.1:9", keys, SECRET, "tcp://127.0.0.1:8")) + repr(keys)
    assert repr(SECRET)[2:-1] not in shown
    assert keys.private.decode() not in shown


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
