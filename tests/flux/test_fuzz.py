"""A decoder gives a message or a ProtocolError for any bytes: no message ends its receiver.

The inputs are drawn from a fixed seed: true messages with bytes changed, cut, doubled or put together, lengths that lie,
values nested without end, and noise.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from harness import LIMIT_S, Peer, Rows, ThreadQuery, dataframe

from controller.operate.requests import FailWorker, GetStatus, StartMoves, WantedMove, decode_answer, decode_request
from flux.errors import ProtocolError
from flux.wire.codec import decode_command, decode_data, decode_report
from flux.wire.control import EdgeComplete, Failure, Heartbeat, NewTable, Stop, TableSeen, Welcome
from flux.wire.frames import HEADER_BYTES_MAX, PREFIX, encode
from flux.wire.handshake import ACCEPTED, Caller, Gate, Session, Tickets
from flux.wire.messages import (
    Ack,
    Acks,
    Borrow,
    Data,
    OrderEntry,
    Orders,
    PartitionOrder,
    Relayed,
    Reset,
    Resume,
    Tentative,
    Unacked,
    UnackedElement,
    Unordered,
    UnorderedRows,
    Unread,
    WantAck,
    WantTentative,
)
from partitioning.table import ReplicaAt, Table

SEED = 11
#: Inputs for each decoder; with the inputs at the gate, the seals and the ports there are more than 20,000.
INPUTS = 3_000
#: Connections to the ports of a query that runs.
STRANGERS = 400
SCHEMA = pa.schema([("x", pa.int64())])

TABLE = Table(3, (((ReplicaAt(0, 0), ReplicaAt(1, 3)),),), ((0,),), {0: "tcp://127.0.0.1:9", 1: "tcp://127.0.0.1:8"})
TENTATIVE = Tentative(0, 1, 2, 3, 4, 5, 6, 7.0, [0, 1], [1, 2])
TRUE = [
    encode(message)
    for message in (
        Ack(0, 1, 2, 3, 4, [(5, 6)], 7),
        Acks([Ack(0, 1, 2, 3, 4, [(5, 6)], 7)]),
        Data(0, 1, 2, 0, 0, 1, [0, 1], [10, 20], [2], 1000),
        Data(0, 1, 2, 0, 0, 1, [0, 1], [10, 20], [2], 1000, batches=[0, 1], counts=[5, 10, 5, 10]),
        Orders([PartitionOrder(0, 0, 1, 1, 5, [OrderEntry(1.0, 1.0, [(0, 0, 7)])], 5)]),
        Unread(0, 1, 2, 3),
        Unordered(1, [UnorderedRows(0, 1, 2, 0, 1, 9)]),
        Unacked(1, [UnackedElement(0, 1, 2, 0, 1, 9)]),
        Relayed(0, 1, 2, Orders([PartitionOrder(0, 0, 1, 1, 5, [OrderEntry(1.0, 1.0, [(0, 0, 7)])], 5)])),
        Relayed(0, 1, 2, WantAck(0, 1, 2, 3)),
        Relayed(0, 1, 2, Data(0, 1, 2, 0, 0, 1, [0], [10], [1], 1000)),
        Relayed(0, 1, 2, Unordered(1, [UnorderedRows(0, 1, 2, 0, 1, 9)])),
        Borrow(0, 1, 2, 0, 1, 7, 3, 1 << 20),
        WantTentative(0, 1, 2, 3),
        TENTATIVE,
        Reset(0, 1, "again"),
        Resume(0, 1, 2, 3, [(0, 1)], 4, [], 5),
        EdgeComplete(edge=0, producers=[0, 1, 2]),
        Failure(node=1, kind="UserCodeError", message="x"),
        FailWorker(worker=1),
        GetStatus(number=3),
        Heartbeat(node=1, progress=7, stats={"rows_in": 5, "stages": [{"primaries": [(0, 1, 2, 3)]}], "a": None}),
        NewTable(table=TABLE, complete={0: [0, 1]}),
        StartMoves(moves=[WantedMove(stage="a", partition=1, target=2)], why="because"),
        Stop(reason="over"),
        TableSeen(node=1, epoch=2),
        Welcome(node=1, incarnation=2),
    )
]

#: In msgpack: heads of a list or map of one element, which can be put one into the other without end.
NESTS = (b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01", b"\x81\xa5stats")
#: Lists, maps, strings, bytes and extensions that announce more than a machine holds.
LIES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff",
)


def inputs(count: int, seed: int = SEED) -> Iterator[bytes]:
    rng = random.Random(seed)
    kinds: list[Callable[[random.Random], bytes]] = [_changed, _changed, _cut, _spliced, _nested, _lying, _noise]
    for _ in range(count):
        yield rng.choice(kinds)(rng)


def _changed(rng: random.Random) -> bytes:
    whole = bytearray(rng.choice(TRUE))
    for _ in range(rng.randint(1, 4)):
        whole[rng.randrange(len(whole))] = rng.choice([0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xDD, 0xFF, rng.randrange(256)])
    return bytes(whole)


def _cut(rng: random.Random) -> bytes:
    whole = rng.choice(TRUE)
    return whole[: rng.randrange(len(whole) + 1)]


def _spliced(rng: random.Random) -> bytes:
    one, other = rng.choice(TRUE), rng.choice(TRUE)
    at = rng.randrange(len(one) + 1)
    return one[:at] + other[rng.randrange(len(other) + 1) :] + one[at:]


def _nested(rng: random.Random) -> bytes:
    """Return a deep nest, alone or in a field of a message that may hold anything."""
    deep = rng.choice(NESTS) * rng.choice([10, 500, 1_000, 2_000]) + b"\xc0"
    heads = [PREFIX, PREFIX + b"\x84\xa4type\xa9Heartbeat\xa4node\x01\xa8progress\x01\xa5stats\x81\xa1a"]
    return rng.choice(heads) + deep


def _lying(rng: random.Random) -> bytes:
    whole = rng.choice(TRUE)
    at = rng.randrange(len(PREFIX), len(whole) + 1)
    return whole[:at] + rng.choice(LIES) + whole[at:]


def _noise(rng: random.Random) -> bytes:
    return rng.choice([b"", PREFIX]) + rng.randbytes(rng.randrange(64))


DECODERS: list[Callable[[bytes], object]] = [
    decode_data, decode_command, decode_report, lambda frame: decode_request([frame]), lambda frame: decode_answer([frame])
]  # fmt: skip


@pytest.mark.parametrize("decode", DECODERS, ids=["data", "orders", "reports", "requests", "answers"])
def test_a_decoder_gives_a_message_or_refuses(decode: Callable[[bytes], object]) -> None:
    refused = 0
    for given in inputs(INPUTS):
        try:
            decode(given)
        except ProtocolError:
            refused += 1
    assert refused > INPUTS // 2


# ---- the handshake

SECRET, ENDPOINT = b"of this query", "tcp://127.0.0.1:9"


def spoilt(rng: random.Random, whole: bytes) -> bytes:
    """Return the bytes as they are, or with a byte changed, cut, longer, or noise behind the same beginning."""
    at = rng.randrange(len(whole))
    return rng.choice(
        [whole, whole[:at], whole + rng.randbytes(3), whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :],
         whole[:5] + rng.randbytes(len(whole) - 5)]
    )  # fmt: skip


def test_at_the_gate_nobody_gets_in_without_the_secret() -> None:
    """Greetings and proofs of strangers, some of whom have seen true ones, in any order on few connections."""
    rng = random.Random(SEED)
    gate, true = Gate(SECRET, ENDPOINT), Caller(SECRET, ENDPOINT)
    proof = true.hear([gate.hear("true", [true.greeting()])])
    assert proof is not None
    said = [
        true.greeting(),
        proof,
        Caller(b"guess", ENDPOINT).greeting(),
        Session(SECRET, ENDPOINT, b"", b"", False).seal(b"x"),
    ]
    answered = 0
    for _ in range(INPUTS):
        frames = [spoilt(rng, rng.choice(said)) for _ in range(rng.choice([0, 1, 1, 1, 1, 2]))]
        connection = rng.randrange(500)
        try:
            answered += bool(gate.hear(connection, frames))
        except ProtocolError:
            pass
        if rng.random() < 0.05:
            gate.forget(connection)
    assert answered
    assert gate.sessions == {}


def test_a_caller_takes_nobody_for_one_who_knows_the_secret() -> None:
    rng = random.Random(SEED)
    for _ in range(INPUTS // 4):
        caller = Caller(SECRET, ENDPOINT)
        challenge = Gate(b"guess", ENDPOINT).hear("c", [caller.greeting()])
        for _ in range(3):
            with pytest.raises(ProtocolError):
                caller.hear([spoilt(rng, rng.choice([challenge, ACCEPTED, caller.greeting()]))])
        assert caller.session is None


def test_a_broken_seal_is_refused() -> None:
    rng = random.Random(SEED)
    one = Session(SECRET, ENDPOINT, b"a", b"b", accepting=False)
    other = Session(SECRET, ENDPOINT, b"a", b"b", accepting=True)
    for _ in range(INPUTS // 4):
        sealed = one.seal(rng.choice(TRUE))
        given = spoilt(rng, sealed)
        if given != sealed:
            with pytest.raises(ProtocolError):
                other.open([given])
        else:
            other.open([given])
    assert other._heard > 0


def test_a_ticket_that_is_not_true_is_not_taken() -> None:
    rng = random.Random(SEED)
    tickets, shown = Tickets(SECRET, ENDPOINT), Caller(SECRET, ENDPOINT).ticket
    assert tickets.take(shown)
    assert not any(tickets.take(spoilt(rng, shown)) for _ in range(INPUTS // 4))


# ---- open ports


def conversation(rng: random.Random) -> bytes:
    """Make the first bytes of a ZeroMQ peer without a true ticket, spoilt."""
    name = rng.choice([b"NULL", b"PLAIN", b"CURVE", b"GSSAPI"])
    greeting = b"\xff" + bytes(8) + b"\x7f" + bytes([rng.choice([0, 1, 2, 3]), 0]) + name.ljust(20, b"\0") + bytes(32)
    ticket = Caller(b"guess", ENDPOINT).ticket.hex().encode()
    hello = b"\x05HELLO\x04flux" + bytes([len(ticket)]) + ticket
    ready = b"\x05READY\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"
    initiate = b"\x08INITIATE\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"
    said = greeting
    for command in rng.choices([hello, ready, initiate, b"\x04PING\x00\x01"], k=3):
        said += bytes([4, len(command)]) + command
    for frame in rng.choices(TRUE, k=3):
        said += bytes([rng.choice([0, 1])]) + bytes([min(len(frame), 255)]) + frame[:255]
    return spoilt(rng, said) if rng.random() < 0.7 else said


def test_open_ports_of_a_query_outlive_strangers() -> None:
    """Attack the ports of the controller and of the workers, and the lifeline, while rows flow."""
    rng = random.Random(SEED)
    rows = Rows()
    gate = threading.Event()

    def given() -> Iterator[pa.RecordBatch]:
        while not gate.wait(0.01):
            yield pa.RecordBatch.from_pydict({"x": [1, 2, 3]}, schema=SCHEMA)

    with ThreadQuery(rows.stage(dataframe(SCHEMA))) as query:
        query.started().feed([given()])
        ends = [*query.ports(), query.rendezvous.endpoint, query.rendezvous.lifeline]
        for number in range(STRANGERS):
            host, _, port = ends[number % len(ends)].removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), timeout=LIMIT_S) as stranger, contextlib.suppress(OSError):
                stranger.sendall(conversation(rng))
                if rng.random() < 0.1:
                    stranger.settimeout(0.02)
                    stranger.recv(1024)
        with Peer(query.rendezvous.endpoint, sealed=True) as peer:
            assert peer.met()
        before = len(rows)
        end = time.monotonic() + LIMIT_S
        while len(rows) <= before and time.monotonic() < end:
            time.sleep(0.01)
        assert len(rows) > before, "rows go on"
        assert len(query.server.core.members.workers) == 2
        gate.set()
        query.wait()
        assert query.raised == []


def test_values_nested_without_end_are_refused_by_name() -> None:
    deep = PREFIX + b"\x84\xa4type\xa9Heartbeat\xa4node\x01\xa8progress\x01\xa5stats" + b"\x81\xa1a" * 1000 + b"\xc0"
    with pytest.raises(ProtocolError, match="RecursionError"):
        decode_report(deep)


def test_a_header_beyond_the_limit_is_not_looked_at() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode_data(PREFIX + struct.pack(">BI", 0xDD, 1) + bytes(HEADER_BYTES_MAX))
