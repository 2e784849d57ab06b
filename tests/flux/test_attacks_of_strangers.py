"""Strangers at the ports of a query, without its secret or keys, are counted and refused, and the result is
unchanged."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import zmq
from attacked import MALFORMED, attacked_half_way, everywhere, named, until, zmtp
from harness import LIMIT_S, SECRET, Peer

from flux.shell.process import Rendezvous
from flux.shell.transport import Keys
from flux.wire.handshake import Strangers


@contextmanager
def connected(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """Connect to an endpoint as a stranger with ZeroMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 50
        raw.connect(endpoint)
        yield raw


def test_without_a_ticket_nothing_that_is_said_is_heard() -> None:
    with attacked_half_way() as query:
        with contextlib.ExitStack() as strangers:  # none leaves before it is met, however busy the machine
            for endpoint in everywhere(query):
                for frames in MALFORMED.values():
                    stranger = strangers.enter_context(connected(endpoint))
                    with contextlib.suppress(zmq.Again):
                        stranger.send_multipart(frames, zmq.NOBLOCK)
            query.until_counted("refused", 1)
            until(lambda: query.server.core.refused >= 1)
        assert query.counters()["malformed"] == 0


def test_a_wrong_secret_opens_no_port() -> None:
    with attacked_half_way() as query:
        for endpoint in everywhere(query):
            for wrong in (b"", SECRET[:-1], SECRET + b"x", b"\xff" * 32):
                with Peer(endpoint, wrong) as stranger:
                    assert "does not accept the secret of this query" in stranger.turned_away()
                    assert not stranger.link.ready
        query.until_counted("refused", 8)
        until(lambda: query.server.core.refused >= 4)


#: The names that ZeroMQ gives by itself are numbers, and the first one is always the same.
GIVEN = [b"\0" + struct.pack("!I", 0x6B8B4567 + number) for number in range(20)]


def test_a_stranger_cannot_choose_the_name_of_the_next_connection() -> None:
    """ZeroMQ ended the process, by an assertion, when a true connection got a name that a stranger had taken."""
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
    """Send frames, or one frame of the handshake, of 190 MB, and return the megabytes that were taken before the
    cut."""
    pushed = 0
    try:
        if not frames:
            stranger.sendall(b"\x06" + struct.pack("!Q", 200 << 20) + b"\x05HELLO")
        while pushed < 190:
            stranger.sendall((b"\x01\xff" + bytes(255)) * 4080 if frames else bytes(1 << 20))
            pushed += 1
    except TimeoutError:  # the other side was cut with nothing left to read: that comes as its end, and resets nothing
        while stranger.recv(1 << 16):
            pass
    except OSError:
        pass
    return pushed


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN"])
def test_frames_without_end_are_not_kept(mechanism: bytes) -> None:
    """Cut off a message without end, because ZeroMQ keeps the parts of a message until the last one has come."""
    with attacked_half_way() as query:
        before = psutil.Process().memory_info().rss
        for endpoint in everywhere(query):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), timeout=LIMIT_S) as stranger:
                stranger.settimeout(5.0)
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


def test_what_is_not_zeromq_at_all_changes_nothing() -> None:
    with attacked_half_way() as query:
        for endpoint in (*query.ports(), query.rendezvous.endpoint):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), struct.pack("<Q", 1 << 60) * 8):
                with socket.create_connection((host, int(port)), timeout=LIMIT_S) as raw:
                    raw.sendall(noise)


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
