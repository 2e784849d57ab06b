"""Whatever bytes come, a decoder gives a message or a ProtocolError: nothing that is sent ends who receives it.

The inputs are drawn from a fixed seed: true messages with bytes changed, cut, doubled or put together, lengths that lie,
values nested without end, and noise.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import pytest

from controller.requests import FailWorker, GetStatus, StartMoves, WantedMove, decode_answer
from flux.codec import HEADER_BYTES_MAX, PREFIX, decode_data, decode_order, decode_report, encode
from flux.control import EdgeComplete, Failure, Heartbeat, NewTable, Stop, TableSeen, Welcome
from flux.errors import ProtocolError
from flux.messages import Ack, Data, Entry, Orders, PartitionOrder, Reset, Resume
from partitioning.table import ReplicaAt, Table

SEED = 11
INPUTS = 4_000

TABLE = Table(3, (((ReplicaAt(0, 0), ReplicaAt(1, 3)),),), ((0,),), {0: "tcp://127.0.0.1:9", 1: "tcp://127.0.0.1:8"})
TRUE = [
    encode(message)
    for message in (
        Ack(0, 1, 2, 3, 4, [(5, 6)], 7),
        Data(0, 1, 2, 0, 0, 1, [0, 1], [10, 20], [2], 1000),
        Orders([PartitionOrder(0, 0, 1, 1, 5, [Entry(1.0, 1.0, [(0, 0, 7)])], 5)]),
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

#: In msgpack: a list or map of one element, whose element is a list of one element, and so on.
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
    """Alone, or where a message may hold anything."""
    deep = rng.choice(NESTS) * rng.choice([10, 500, 1_000, 2_000]) + b"\xc0"
    heads = [PREFIX, PREFIX + b"\x84\xa4type\xa9Heartbeat\xa4node\x01\xa8progress\x01\xa5stats\x81\xa1a"]
    return rng.choice(heads) + deep


def _lying(rng: random.Random) -> bytes:
    whole = rng.choice(TRUE)
    at = rng.randrange(len(PREFIX), len(whole) + 1)
    return whole[:at] + rng.choice(LIES) + whole[at:]


def _noise(rng: random.Random) -> bytes:
    return rng.choice([b"", PREFIX]) + rng.randbytes(rng.randrange(64))


@pytest.mark.parametrize("decode", [decode_data, decode_order, decode_report, lambda frame: decode_answer([frame])])
def test_a_decoder_gives_a_message_or_refuses(decode: Callable[[bytes], object]) -> None:
    refused = 0
    for given in inputs(INPUTS):
        try:
            decode(given)
        except ProtocolError:
            refused += 1
    assert refused > INPUTS // 2


def test_values_nested_without_end_are_refused_by_name() -> None:
    deep = PREFIX + b"\x84\xa4type\xa9Heartbeat\xa4node\x01\xa8progress\x01\xa5stats" + b"\x81\xa1a" * 1000 + b"\xc0"
    with pytest.raises(ProtocolError, match="RecursionError"):
        decode_report(deep)


def test_a_header_beyond_the_limit_is_not_looked_at() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode_data(PREFIX + struct.pack(">BI", 0xDD, 1) + bytes(HEADER_BYTES_MAX))
