"""Requests of operators on the wire: well-formed ones are read, everything else is refused."""

from __future__ import annotations

import os

import msgspec
import pytest

from controller.operate.requests import (
    MOVES_MAX,
    REQUEST_BYTES_MAX,
    Accepted,
    AnyRequest,
    DrainWorker,
    FailWorker,
    GetHistory,
    GetMetrics,
    GetPartitions,
    GetStatus,
    MetricsText,
    MoveStatus,
    Refusal,
    SetWorkers,
    StartMoves,
    Suggest,
    WantedMove,
    decode_answer,
    decode_request,
    encode_request,
)
from flux.errors import ProtocolError
from flux.wire.control import PartitionFinished
from flux.wire.frames import MAGIC, PREFIX, VERSION, encode

REQUESTS: list[AnyRequest] = [
    GetStatus(number=7),
    GetPartitions(number=8, stage="Delays"),
    GetPartitions(number=9),
    GetHistory(number=10),
    GetMetrics(number=11),
    Suggest(number=12, policy="pairing"),
    StartMoves(number=13, why="by hand", moves=[WantedMove(stage="Delays", partition=3, target=2, source=0)]),
    StartMoves(number=14, why="by hand", moves=[WantedMove(stage="Delays", partition=3, target=2)]),
    DrainWorker(number=15, worker=1),
    FailWorker(number=16, worker=1),
    SetWorkers(number=17, workers=4),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_what_is_asked_is_what_arrives(request_: AnyRequest) -> None:
    assert decode_request(encode_request(request_)) == request_


@pytest.mark.parametrize(
    "answer",
    [
        MetricsText(number=1, text="# HELP\n"),
        Accepted(number=2, moves=[MoveStatus(stage="Delays", partition=1, source=0, target=1)]),
        Refusal(number=3, kind="usage", reason="there is no worker 9"),
    ],
)
def test_what_is_answered_is_what_arrives(answer: MetricsText | Accepted | Refusal) -> None:
    assert decode_answer([encode(answer)]) == answer


def spoilt(**fields: object) -> bytes:
    """Encode a request of these fields, whatever their types."""
    return PREFIX + msgspec.msgpack.encode(fields)


BAD: dict[str, list[bytes]] = {
    "garbage": [b"\x00\xff garbage" * 7],
    "nothing": [b""],
    "another version": [MAGIC + bytes([VERSION + 1]) + encode(GetStatus())[4:]],
    "another magic": [b"FLY" + encode(GetStatus())[3:]],
    "no body": [encode(GetStatus())[:4]],
    "truncated": [encode(REQUESTS[6])[:-3]],
    "a message of another kind": [encode(PartitionFinished(node=0, stage=0, partition=0))],
    "an answer": [encode(Refusal(kind="usage", reason="no"))],
    "unknown": [spoilt(type="DropEverything", number=1)],
    "without its fields": [spoilt(type="DrainWorker", number=1)],
    "text where a number belongs": [spoilt(type="DrainWorker", number=1, worker="all")],
    "a negative worker": [spoilt(type="DrainWorker", number=1, worker=-1)],
    "a negative number": [spoilt(type="GetStatus", number=-1)],
    "no workers": [spoilt(type="SetWorkers", number=1, workers=0)],
    "far too many workers": [spoilt(type="SetWorkers", number=1, workers=1 << 40)],
    "no moves": [spoilt(type="StartMoves", number=1, moves=[], why="")],
    "a name without end": [spoilt(type="Suggest", number=1, policy="x" * 300)],
    "too many moves": [
        spoilt(type="StartMoves", number=1, why="", moves=[{"stage": "A", "partition": 0, "target": 1}] * (MOVES_MAX + 1))
    ],
    "a frame too many": [encode(GetStatus()), b""],
    "a frame too few": [],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_a_request_is_refused_by_name(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode_request(BAD[name])


def test_an_oversized_request_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ProtocolError, match=str(REQUEST_BYTES_MAX)):
        decode_request([encode(GetStatus()) + bytes(REQUEST_BYTES_MAX)])


def test_every_truncation_and_every_flipped_byte_is_refused_or_read_as_a_request() -> None:
    """Bytes of a peer with the secret make the decoder raise ProtocolError and no other error."""
    for request in REQUESTS:
        whole = encode(request)
        for cut in range(len(whole)):
            with pytest.raises(ProtocolError):
                decode_request([whole[:cut]])
        for at in range(len(whole)):
            for flip in (0x01, 0x80, 0xFF):
                changed = bytearray(whole)
                changed[at] ^= flip
                try:
                    decode_request([bytes(changed)])
                except ProtocolError:
                    pass


def test_random_bytes_are_refused() -> None:
    for length in range(200):
        with pytest.raises(ProtocolError):
            decode_request([os.urandom(length)])
        with pytest.raises(ProtocolError):
            decode_answer([os.urandom(length)])
