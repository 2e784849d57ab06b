"""Links between workers that can be cut in one direction, as real sockets: a forwarder on loopback between each two of them."""

from __future__ import annotations

import selectors
import socket
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import harness
import pytest

from flux.shell import worker_loop
from flux.shell.transport import Port, Sockets
from flux.shell.worker_loop import WorkerLoop

CHUNK = 1 << 16


@dataclass(eq=False)
class Way:
    """One direction of a forwarded connection: bytes of ``sender`` for ``receiver``."""

    sender: str
    receiver: str
    source: socket.socket
    sink: socket.socket
    #: Bytes that cannot go on yet, as in the buffers of TCP.
    waiting: bytes = b""
    over: bool = False


class CutLinks:
    """Forwarders for all connections of workers to ports of workers, in one thread. Ends of a connection are names of threads."""

    def __init__(self) -> None:
        self.cut: set[tuple[str, str]] = set()
        self.loops: dict[str, WorkerLoop] = {}
        self.ports: dict[str, str] = {}
        self._ways: list[Way] = []
        self._listeners: list[socket.socket] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cut links", daemon=True)
        self._selector = selectors.DefaultSelector()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let the workers of a ``ThreadQuery`` connect through here."""
        links = self

        class Through(Sockets):
            def port(self, *args: Any, **options: Any) -> Port:
                port = super().port(*args, **options)
                links.ports[port.endpoint] = threading.current_thread().name
                return port

            def _socket(self, kind: int, undo: Any) -> Any:
                raw = super()._socket(kind, undo)
                connect, caller = raw.connect, threading.current_thread().name
                raw.connect = lambda endpoint: connect(links.through(caller, endpoint))
                return raw

        class Loop(WorkerLoop):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                links.loops[threading.current_thread().name] = self

        patch.setattr(worker_loop, "Sockets", Through)
        patch.setattr(harness, "WorkerLoop", Loop)
        self._thread.start()

    def through(self, caller: str, endpoint: str) -> str:
        """Return the endpoint to call instead: that of a forwarder, if a worker's port is there."""
        if endpoint not in self.ports:
            return endpoint
        listener = socket.create_server(("127.0.0.1", 0))
        where = urlsplit(endpoint)
        about = caller, self.ports[endpoint], (where.hostname, where.port)
        with self._lock:
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ, about)
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def _run(self) -> None:
        while not self._stopped.wait(0.002):
            with self._lock:
                for key, _ in self._selector.select(0):
                    self._accept(key.fileobj, *key.data)
                for way in self._ways:
                    if (way.sender, way.receiver) not in self.cut and not way.over:
                        self._forward(way)

    def _accept(self, listener: Any, caller: str, called: str, address: tuple[str, int]) -> None:
        near, _ = listener.accept()
        self._selector.unregister(listener)
        listener.close()
        try:
            far = socket.create_connection(address)
        except OSError:
            near.close()
            return
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)
        self._ways += [Way(caller, called, near, far), Way(called, caller, far, near)]

    @staticmethod
    def _forward(way: Way) -> None:
        try:
            while True:
                if not way.waiting:
                    way.waiting = way.source.recv(CHUNK)
                    if not way.waiting:
                        way.over = True
                        way.sink.shutdown(socket.SHUT_WR)
                        return
                way.waiting = way.waiting[way.sink.send(way.waiting) :]
        except BlockingIOError:
            return
        except OSError:
            way.over = True
            for one in (way.source, way.sink):
                one.close()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(harness.LIMIT_S)
        for way in self._ways:
            way.source.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
