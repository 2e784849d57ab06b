"""The doorman hears of connections from ZeroMQ and of proofs from the port, in any order, and loses none that lives."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import zmq
from harness import LIMIT_S, Peer

from flux.shell.authentication import Door
from flux.shell.transport import Keys, Sockets
from flux.wire.handshake import Tickets

SECRET = b"of this query"


class Scene:
    """A door whose events a test makes; connections are real, so that they can be cut."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.tells, hears = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        hears.bind("inproc://events")
        self.tells.connect("inproc://events")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.door = Door(b"port", self.address[1], hears, Tickets(SECRET, "here"), b"")
        self.sockets: list[socket.socket] = []

    def comes(self, told: bool = True, takes: int | None = None) -> int:
        caller = socket.create_connection(self.address)
        if caller.fileno() == takes:
            moved = caller.dup()
            caller.close()
            caller = moved
        there, _ = self.listener.accept()
        if takes is not None and there.fileno() != takes:
            os.dup2(there.fileno(), takes)
            there.close()
            there = socket.socket(fileno=takes)
        self.sockets += [caller, there]
        if told:
            self.event(zmq.EVENT_ACCEPTED, there.fileno())
        return there.fileno()

    def event(self, kind: int, descriptor: int) -> None:
        self.tells.send_multipart([struct.pack("=hi", kind, descriptor), b"tcp://"])

    def close(self) -> None:
        self.door.close()
        for each in (*self.sockets, self.listener):
            each.close()
        self.context.destroy(0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_a_descriptor_that_is_no_tcp_connection_by_now_is_left_alone(scene: Scene) -> None:
    for each in socket.socketpair():
        scene.sockets.append(each)
        scene.event(zmq.EVENT_ACCEPTED, each.fileno())
    scene.door.look(0.0)
    assert not scene.door.busy
    assert scene.door.came == 2


def test_who_has_proved_the_secret_is_no_stranger_and_is_told_of_when_it_closes(scene: Scene) -> None:
    descriptor = scene.comes()
    scene.door.look(0.0)
    assert scene.door.busy
    scene.door.trust(descriptor, b"c", 1)
    scene.door.look(0.0)
    assert not scene.door.busy
    assert scene.door.closed() == []
    scene.event(zmq.EVENT_DISCONNECTED, descriptor)
    scene.door.look(0.0)
    assert scene.door.closed() == [b"c"]


def test_a_proof_that_is_noted_before_the_news_of_its_connection_is_not_lost(scene: Scene) -> None:
    """Keep a proof until the doorman hears of its connection, which may be late. The end of another connection came
    first and made the doorman look at proofs: the connection was forgotten, and nothing that came on it was heard any
    more."""
    descriptor = scene.comes(told=False)
    scene.event(zmq.EVENT_DISCONNECTED, 9999)
    scene.event(zmq.EVENT_ACCEPTED, descriptor)
    scene.door.trust(descriptor, b"c", 1)
    for _ in range(3):
        scene.door.look(0.0)
    assert scene.door.closed() == []
    assert not scene.door.busy


def test_a_connection_that_closes_before_its_proof_is_noted_is_told_of(scene: Scene) -> None:
    descriptor = scene.comes()
    scene.event(zmq.EVENT_DISCONNECTED, descriptor)
    scene.door.look(0.0)
    scene.door.trust(descriptor, b"c", 1)
    for _ in range(3):
        scene.door.look(0.0)
    assert scene.door.closed() == [b"c"]


@pytest.mark.parametrize("late", [True, False], ids=["late", "later still"])
def test_a_proof_that_is_read_late_is_not_that_of_who_has_the_descriptor_now(scene: Scene, late: bool) -> None:
    """Match proofs with connections, not with descriptors. The port of the proof was in a long step: the later
    connection counted as proved by it, and was forgotten when it proved itself."""
    descriptor = scene.comes()
    scene.door.look(0.0)
    scene.event(zmq.EVENT_DISCONNECTED, descriptor)
    scene.sockets.pop().close()
    scene.door.look(0.1)
    assert scene.comes(takes=descriptor) == descriptor
    scene.door.look(0.2)
    if late:
        scene.door.trust(descriptor, b"a", 1)
        scene.door.look(0.3)
        assert scene.door.closed() == [b"a"]
        assert scene.door.busy, "a stranger is still limited"
    scene.door.trust(descriptor, b"b", 2)
    if not late:
        scene.door.trust(descriptor, b"a", 1)
    for now in (0.4, 0.5):
        scene.door.look(now)
    assert scene.door.closed() == ([] if late else [b"a"])
    assert not scene.door.busy
    scene.event(zmq.EVENT_DISCONNECTED, descriptor)
    scene.door.look(0.6)
    assert scene.door.closed() == [b"b"]


@pytest.mark.parametrize("keys", [None, Keys.make()], ids=["plain", "curve"])
def test_the_doorman_knows_of_a_connection_before_it_is_admitted(keys: Keys | None) -> None:
    sockets = Sockets(keys, SECRET)
    port = sockets.port("127.0.0.1")
    proved: list[int] = []
    trust = port._door.trust
    port._door.trust = lambda *proof: (proved.append(proof[2]), trust(*proof))[1]  # type: ignore[method-assign]
    links = [sockets.link(port.endpoint) for _ in range(20)]
    deadline = time.monotonic() + LIMIT_S
    while not all(link.ready for link in links) and time.monotonic() < deadline:
        for ready in sockets.wait(0.05):
            assert list(ready.receive()) == []
    assert len(proved) == 20
    assert all(came >= number for number, came in enumerate(sorted(proved), 1)), "each is among those that had come"
    while port._door.busy and time.monotonic() < deadline:
        sockets.wait(0.05)
    assert port._door.closed() == []
    assert not port._door.busy
    sockets.close()


def test_who_sends_too_much_is_cut_and_nobody_else(scene: Scene) -> None:
    loud, quiet = scene.comes(), scene.comes()
    scene.door.look(time.monotonic())
    scene.sockets[0].sendall(bytes(65 << 10))
    deadline = time.monotonic() + LIMIT_S
    while scene.door.refused == 0 and time.monotonic() < deadline:
        scene.door.look(time.monotonic())
    assert scene.door.refused == 1
    assert scene.sockets[1].fileno() == loud
    assert scene.sockets[3].fileno() == quiet
    scene.sockets[3].send(b"still open")
    assert scene.sockets[2].recv(100) == b"still open"
    with pytest.raises(OSError, match="Broken pipe"):
        scene.sockets[1].send(b"x")


def test_a_port_that_has_forgotten_a_connection_says_so_and_the_link_begins_again() -> None:
    sockets = Sockets(None, SECRET)
    port = sockets.port("127.0.0.1")

    def heard() -> list[bytes]:
        return [bytes(frames[0]) for ready in sockets.wait(0.01) for _, frames in ready.receive()]

    with Peer(port.endpoint, SECRET, limit_s=0.02) as peer:
        said: list[bytes] = []
        deadline = time.monotonic() + LIMIT_S
        while b"again" not in said and time.monotonic() < deadline:
            said += heard()
            if peer.link.ready and not said:
                peer.send(b"first")
            elif b"first" in said and port._gate.sessions:
                port._gate.sessions.clear()
                peer.send(b"lost")
                said.append(b"forgotten")
            elif b"forgotten" in said and peer.link.ready:
                peer.send(b"again")
            peer.recv()
            if b"forgotten" in said:
                said = [each for each in said if each != b"first"]
        assert b"again" in said
    sockets.close()
