"""Registered queries behind pushes over HTTP: the time from a push to the reader of a filter, and that of a registration.

Everything is in one machine: ``flux serve`` with its workers, clients that push at a steady rate, and readers of server-sent
events, one of which does not read. A push counts from the time at which it was due until the rows that pass the filter have come
to a reader. Afterwards each row of a push that was answered must have come once. With the fault ``kill-worker`` a worker is
killed half-way, with ``kill-gateway`` a gateway.
"""

from __future__ import annotations

import selectors
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console

from benchmarks.serve import ROWS, SCHEMA, STREAM, WARM_UP_S, Load, lines
from benchmarks.serve_process import ServiceProcess
from benchmarks.timeline import Report
from flux.client import GatewayClient
from flux.errors import FluxError

#: The query with readers, and the part of the rows that passes its filter: one in ``EVERY``.
READ, EVERY = "read", 10
#: Longest wait for a connection of a reader.
CONNECTS_S = 10.0
#: Seconds for the last rows to come to the reader.
LAST_ROWS_S = 60.0


class FilterReader(threading.Thread):
    """A reader of the filter, which notes when each row came."""

    def __init__(self, client: GatewayClient) -> None:
        super().__init__(name="reader", daemon=True)
        self._client = client
        #: Numbers of rows, and the time at which each came.
        self.rows: list[int] = []
        self.came: list[float] = []
        self.error = ""
        self.start()

    def run(self) -> None:
        try:
            for piece in self._client.follow(READ):
                came = time.perf_counter()
                self.rows += [row["n"] for row in piece.rows]
                self.came += [came] * len(piece.rows)  # last: rows are counted by it while this goes on
        except FluxError as error:
            self.error = str(error)


def following(url: str, token: str, receives: int = 0) -> socket.socket:
    """Return a connection that follows the result. ``receives``: bytes of the buffer for it; 0: those of the system."""
    at = urlsplit(url)
    assert at.hostname is not None
    assert at.port is not None
    made = socket.socket()
    if receives:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    made.settimeout(CONNECTS_S)
    made.connect((at.hostname, at.port))
    asked = f"GET /v1/queries/{READ}/events HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n"
    made.sendall(asked.encode())
    return made


class OtherReaders(threading.Thread):
    """Connections that follow the same result. Nothing is done with the bytes, and one connection is not read at all."""

    def __init__(self, count: int, url: str, token: str, one_idle: bool = True) -> None:
        """``one_idle``: the first one is not read."""
        super().__init__(name="other-readers", daemon=True)
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._sockets = [following(url, token) for _ in range(count)]
        for each in self._sockets[one_idle:]:
            self._selector.register(each, selectors.EVENT_READ)
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(0.1):
                sock: Any = key.fileobj
                try:
                    found = sock.recv(1 << 16)
                except OSError:  # its gateway was killed
                    found = b""
                if not found:
                    self._selector.unregister(sock)

    def end(self) -> None:
        self._over.set()
        self.join()
        for each in self._sockets:
            each.close()


def register(client: GatewayClient, count: int) -> list[float]:
    """Register the filter and other queries. Return the milliseconds until each was answered."""
    texts = {READ: f"SELECT n FROM {STREAM} WHERE n % {EVERY} = 0 AND n >= 0"}
    texts |= {f"rare_{number}": f"SELECT n, page FROM {STREAM} WHERE n = -{number + 2}" for number in range(count - 1)}
    took_ms = []
    for name, text in texts.items():
        began = time.perf_counter()
        client.register_query(name, text)
        took_ms.append(1000 * (time.perf_counter() - began))
    return took_ms


def run(
    rate: float,
    seconds: float,
    clients: int,
    queries: int,
    readers: int,
    fault: str | None,
    master: str,
    console: Console,
) -> Report:
    """Push JSON lines at a rate of requests a second, with ``queries`` registered and ``readers`` of one of them."""
    with tempfile.TemporaryDirectory(prefix="flux-bench-serve-") as name:
        service = ServiceProcess(
            Path(name), 2 if fault == "kill-gateway" else 1, master, 2 if fault == "kill-worker" else 1
        )
        pushers = [GatewayClient(service.urls, service.token) for _ in range(clients)]
        try:
            pushers[0].register_stream(STREAM, SCHEMA)
            registered_ms = register(pushers[0], queries)
            pushers[0].push_events(STREAM, lines(-1))
            reader = FilterReader(GatewayClient(service.urls, service.token))
            others = OtherReaders(readers - 1, service.urls[-1], service.token)
            load = Load(lines, rate, seconds, pushers)
            if fault is not None:
                time.sleep(WARM_UP_S + seconds / 2)
                service.kill_a_worker() if fault == "kill-worker" else service.kill_a_gateway()
            load.join()
            figures: dict[str, Any] = {
                "benchmark": "serve",
                "rate": rate,
                "body": "rows",
                "rows_a_request": ROWS["rows"],
            }
            figures |= {"clients": clients, "queries": queries, "readers": readers, "fault": fault or "none"}
            figures |= load.figures() | shares("registration", registered_ms)
            figures |= arrived(load, reader).figures()
            others.end()
        finally:
            for each in pushers:
                each.close()
            service.close()
    console.print(f"  {figures}", highlight=False)
    if reader.error:
        return Report(figures, failed=f"the reader has ended: {reader.error}")
    return Report(figures, failed="rows were lost or doubled" if figures["lost"] or figures["doubled"] else None)


def shares(what: str, took_ms: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile under names of their own."""
    p50, p99 = np.percentile(took_ms or [0.0], [50, 99]).round(2).tolist()
    return {f"{what}_p50_ms": p50, f"{what}_p99_ms": p99}


class Arrivals(NamedTuple):
    """The rows of one load that have come to a reader."""

    #: Milliseconds from the due push of each row until it came, without those of the warm-up.
    took_ms: np.ndarray
    #: Rows of answered pushes that are missing, and rows that came again.
    lost: int
    doubled: int

    def figures(self) -> dict[str, Any]:
        longest = round(float(self.took_ms.max(initial=0.0)), 2)
        found = shares("reader", self.took_ms.tolist()) | {"reader_gap_ms_max": longest}
        return found | {"lost": self.lost, "doubled": self.doubled}


def arrived(load: Load, reader: FilterReader, first: int = 0) -> Arrivals:
    """Wait for the rows of a load, and return them. ``first``: the number of the request of lines with which the load began; rows
    of earlier loads have come all."""
    a_request = ROWS["rows"] // EVERY
    answered = ~np.isnan(load.answered)
    end, before = time.monotonic() + LAST_ROWS_S, a_request * first
    while len(reader.came) < before + a_request * int(answered.sum()) and time.monotonic() < end and not reader.error:
        time.sleep(0.05)
    count = len(reader.came)
    number, came = np.array(reader.rows[:count], np.int64) // EVERY - before, np.array(reader.came[:count])
    number, came = number[number >= 0], came[number >= 0]
    times = np.bincount(number, minlength=a_request * len(answered))
    request = number // a_request
    counted = load.due[request] >= WARM_UP_S
    took_ms = 1000 * (came - load.began - load.due[request])[counted]
    wanted = np.repeat(answered, a_request)
    return Arrivals(took_ms, int((times[: len(wanted)][wanted] == 0).sum()), int((times > 1).sum()))
