"""Nonsense of a peer that has proved the secret of a query is counted and refused, and the result is unchanged."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pytest
from attacked import BATCHES, MALFORMED, QUIET, answered, attacked_half_way, data, hello, row, until
from harness import LIMIT_S, Peer

from flux.wire.control import Failure, Heartbeat, PartitionFinished, TableSeen
from flux.wire.frames import MAGIC, PREFIX, VERSION, encode
from flux.wire.messages import (
    Ack,
    Acks,
    Borrow,
    Data,
    Fetch,
    Install,
    OrderEntry,
    Orders,
    PartitionOrder,
    Refuse,
    Relayed,
    Reset,
    Resume,
    StepKind,
    Tentative,
    Unacked,
    UnackedElement,
    Unordered,
    UnorderedRows,
    Unread,
    WantAck,
    WantTentative,
)


def test_rows_before_hello_are_refused() -> None:
    with attacked_half_way() as query:
        for nonce in range(1, 9):  # one of them is that of the true producer
            with Peer(query.ports()[0]) as peer:
                peer.send(encode(data(nonce=nonce, sequence=BATCHES // 2)), row())
                assert isinstance(answered(peer), Reset)
        query.until_counted("stale", 8)
        assert query.counters()["refused"] == 0, "it is what workers hear of one that was given up, which is no alarm"


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
        query.until_counted("refused", 6)  # any producer may be a partition of an input


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
        end = time.monotonic() + LIMIT_S
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
    """Spoil bytes of the payload's metadata and buffers, one at a time. A payload that still is a batch has another
    nonce."""
    whole = row()
    with attacked_half_way(resend_timeout="100ms") as query, Peer(query.ports()[0]) as peer:
        peer.send(encode(hello()))
        resume = answered(peer)
        assert isinstance(resume, Resume)

        def counted() -> int:
            """Count messages that were turned away. Some are refused, because the real producer may greet again in
            between, and later messages on this connection count as refused then."""
            counters = query.counters()
            return counters["malformed"] + counters["stale"] + counters["refused"]

        before, malformed = counted(), query.counters()["malformed"]
        for at in range(0, len(whole), 3):
            spoilt = bytearray(whole)
            spoilt[at] ^= 0xFF
            peer.send(encode(data(nonce=resume.nonce + 99)), bytes(spoilt))
        sent = len(range(0, len(whole), 3))
        end = time.monotonic() + LIMIT_S
        while counted() - before < sent:
            assert time.monotonic() < end, query.counters()
            time.sleep(0.01)
        assert query.counters()["malformed"] > malformed


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


def test_absurd_numbers_of_primaries_and_answers_that_nobody_asked_for_are_malformed_and_change_nothing() -> None:
    absurd = 1 << 63
    moved = OrderEntry(1.0, 1.0, [], StepKind.WATERMARK, watermarks=[5])  # of a stage without event time
    items = (
        PartitionOrder(0, 0, 0, 0, absurd, [], 0),
        PartitionOrder(0, 0, 0, -2, 0, [], 0),
        PartitionOrder(0, 0, 0, 0, 0, [moved], 0),
    )
    orders = [Orders([item]) for item in items]
    installs = Install(0, 0, 0, absurd, 0, 64), Install(0, 0, 0, 1, 0, -1)
    answers = Ack(0, 0, 1, 0, absurd, [], 0), Ack(0, 0, 1, 0, 1, [], 0)
    with attacked_half_way() as query, Peer(query.ports()[0]) as peer:
        for message in (hello(incarnation=absurd), *orders, *installs, *answers):
            peer.send(encode(message), *([b"part"] if isinstance(message, Install) else []))
        query.until_counted("malformed", 8)
        assert query.counters()["malformed"] == 8


def test_tentative_rows_and_loans_of_strangers_are_counted_and_change_nothing() -> None:
    """Send such messages to a query without availability, from a worker that has no replica here."""
    tentative = Tentative(0, 0, 1, 1, 0, 5, 0, 1.0, [0], [1])
    malformed = (
        tentative, Tentative(99, -1, 1 << 62, 0, 5, 0, 0, float("nan"), [], [1]), WantTentative(0, 0, 0, 0), Unread(99, 0, 0, 1),
        Tentative(0, 0, -1, 1, 0, 5, 0, 1.0, [], []), WantTentative(0, 0, -2, 0), Unread(0, 0, 0, -1),
        Unordered(0, [UnorderedRows(0, 0, 0, 0, 0, -1)]), Borrow(0, 0, 0, 0, 0, 1, 0, 1),
        Unacked(0, [UnackedElement(0, 0, 0, 0, 0, -1)]), Relayed(0, 1, -2, Acks([])), Relayed(0, 1, 2, WantAck(0, 0, -2)),
        Relayed(0, 1, 2, Data(0, 0, -1, 0, 0, 1, [], [], [], 1)),
    )  # fmt: skip
    stale = (
        Unread(0, -1, 0, 1), Unread(0, 12345, -1, 1 << 62), Unread(0, QUIET, 1, 1),
        Unordered(99, [UnorderedRows(0, 0, 0, 0, 0, 1)]), Unordered(-1, [UnorderedRows(-1, -1, -1, -1, -1, 1 << 62)]),
        Unordered(0, [UnorderedRows(0, 1 << 30, 0, 99, 0, 1)]), Unacked(99, [UnackedElement(0, 0, 0, 0, 0, 1)]),
        Unacked(-1, [UnackedElement(-1, -1, -1, -1, -1, 1 << 62)]), Relayed(97, 98, 99, Acks([])),
        Relayed(-1, -1, -1, Orders([])), Relayed(97, 98, 99, Data(0, 0, 1, 0, 0, 1, [], [], [], 1)),
    )  # fmt: skip
    with attacked_half_way() as query, Peer(query.ports()[0]) as peer:
        before = query.counters().get("stale", 0)
        for message in (*malformed, *stale):
            peer.send(encode(message), *([row()] if message is tentative else []))
        query.until_counted("malformed", len(malformed))
        query.until_counted("stale", before + len(stale))
        assert query.counters()["malformed"] == len(malformed)


def test_frames_beyond_the_limit_close_the_connection_and_nothing_else() -> None:
    with attacked_half_way(message_max_bytes="64k") as query, Peer(query.ports()[0]) as peer:
        assert peer.met()
        peer.send(bytes(65 << 10))
        before = peer.link._caller
        peer.until(lambda: peer.link._caller is not before)
        assert peer.met()
        assert peer.link._caller is not before, "it is another connection"
        assert query.counters()["malformed"] == 0


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
    """Refuse a message without a seal, as of a stranger inside a connection of the query."""
    with attacked_half_way() as query, Peer(query.rendezvous.endpoint, sealed=False) as peer:
        peer.send(encode(Failure(node=0, kind="UserCodeError", message="all is lost")))
        until(lambda: query.server.core.refused == 1)
