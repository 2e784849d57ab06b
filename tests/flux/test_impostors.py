"""A stranger listens where a process of the query has listened: the stranger hears nothing of use."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

import zmq
from attacked import data, hello, zmtp
from harness import LIMIT_S, SECRET

from flux.shell.transport import Sockets
from flux.wire.frames import encode
from flux.wire.messages import Install


class Impostor:
    """A stranger that has bound a port, takes part in ZeroMQ's handshake as far as possible, and notes all frames that
    come."""

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

    def listen(self, over: threading.Event, answer: Callable[[bytes], bytes]) -> None:
        while not over.is_set():
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
    over, end = threading.Event(), time.monotonic() + LIMIT_S
    listens = threading.Thread(target=impostor.listen, args=(over, lambda said: b"FLXc\x02" + said[5:] + bytes(32)))
    listens.start()
    link.send([encode(hello())])
    link.send([encode(data()), rows])
    link.send([encode(Install(0, 0, 0, 1, 0, 100)), install])
    while link.refused < 2 and time.monotonic() < end:
        for ready in sockets.wait(0.05):
            assert list(ready.receive()) == []
    over.set()
    listens.join()
    assert "does not know the secret" in link.problem
    assert link.refused > 1, "it is asked again, in case a true process listens there by then"
    heard = b"".join(impostor.heard)
    assert b"FLXg" in heard
    assert not any(said in heard for said in (SECRET, b"Hello", b"Data", rows, b"Install", install))
    sockets.close()
    impostor.close()


def test_what_was_under_way_does_not_go_to_who_listens_next() -> None:
    """Drop messages of a lost connection: ZeroMQ by itself connects again, and sends them to any process that listens
    there."""
    first = Sockets(None, SECRET)
    port = first.port("127.0.0.1")
    sockets = Sockets(None, SECRET)
    link = sockets.link(port.endpoint)
    meeting = time.monotonic() + LIMIT_S
    while not link.ready and time.monotonic() < meeting:
        for both in (first, sockets):
            for ready in both.wait(0.01):
                assert list(ready.receive()) == []
    assert link.ready
    number = int(port.endpoint.rpartition(":")[2])
    first.close()
    with socket.create_server(("127.0.0.1", number)) as listener:
        for _ in range(50):
            link.send([b"secret rows"])
        end = time.monotonic() + LIMIT_S
        while not select.select([listener], [], [], 0)[0] and time.monotonic() < end:
            for ready in sockets.wait(0.02):
                assert list(ready.receive()) == []
        connection, _ = listener.accept()
        with connection:
            connection.sendall(zmtp(b"PLAIN"))
            connection.settimeout(LIMIT_S)
            heard = connection.recv(65536)
            connection.settimeout(0.5)
            with contextlib.suppress(OSError):
                while more := connection.recv(65536):
                    heard += more
        assert b"PLAIN" in heard
        assert b"secret rows" not in heard
    assert not link.ready
    sockets.close()
