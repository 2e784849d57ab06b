"""Events pushed to a gateway over HTTP: the time until they are on disk, beside bare flushes of the same disk in the same run.

Requests are due at a steady rate, and a late one counts from the time at which it was due. Clients are threads of this process
and take cores from the gateway. Afterwards the log is read: each event that was answered must be in it once. With the fault
``kill-gateway`` one of two gateways is killed half-way, and clients go over to the other one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console

from benchmarks.ports import free_port
from benchmarks.timeline import Report
from flux.client import GatewayClient
from flux.errors import FluxError
from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import open_log
from flux.eventlog.records import rows_of
from flux.eventlog.streams import StreamCatalogue
from flux.gateway.tokens import TokenRegister
from flux.vault.location import place_of

STREAM, SCHEMA = "pushed", "n BIGINT, name STRING, amount DOUBLE, page STRING"
#: Seconds before the measurement: connections and the log are opened.
WARM_UP_S = 1.0
#: Time between two bare flushes, and their bytes.
FLUSH_EVERY_S, FLUSH_BYTES = 0.05, 4096
#: Longest wait for a gateway to begin or to end: on a machine under load, loading Arrow takes a minute.
STARTS_S = 180.0
#: Bodies of this many rows are JSON lines, or Arrow.
ROWS = {"rows": 100, "arrow": 10_000}


class GatewayUnderLoad:
    """A gateway in a process of its own."""

    def __init__(self, location: Path) -> None:
        self._location, self.port = location, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it, again if it has ended, and wait until it answers."""
        http = f"127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flux", "gateway", "--location", str(self._location), "--http", http]
        )
        end = time.monotonic() + STARTS_S
        while True:
            try:
                httpx.get(f"{self.url}/v1/health")
                return
            except httpx.TransportError as error:
                if self.process.poll() is not None or time.monotonic() > end:
                    self.process.kill()
                    self.process.wait()
                    raise FluxError(f"the gateway at {self.url} has not begun within {STARTS_S:g} s") from error
                time.sleep(0.05)

    def cpu_s(self) -> float:
        """Return the processor time that it has taken; 0 if it has ended."""
        try:
            used = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(used.user + used.system)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(STARTS_S)


class BareFlushes(threading.Thread):
    """Flushes of a file beside the log, one after the other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._path = folder / "flushes"
        self._over = threading.Event()
        self.took_ms: list[float] = []
        self.start()

    def run(self) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while not self._over.wait(FLUSH_EVERY_S):
                began = time.perf_counter()
                os.write(file, bytes(FLUSH_BYTES))
                os.fdatasync(file)
                self.took_ms.append(1000 * (time.perf_counter() - began))
        finally:
            os.close(file)

    def end(self) -> None:
        self._over.set()
        self.join()


class Load:
    """Requests that are due at a steady rate, sent by several clients."""

    def __init__(self, body: Callable[[int], Any], rate: float, seconds: float, clients: list[GatewayClient]) -> None:
        self._body, self._rate = body, rate
        self._count = int(rate * (seconds + WARM_UP_S))
        self._next, self._guard = 0, threading.Lock()
        #: By request, when it was due and answered, in seconds from the begin; NaN: it was not.
        self.due = np.arange(self._count) / rate
        self.answered = np.full(self._count, np.nan)
        self.errors: list[str] = []
        self.began = time.perf_counter()
        self._threads = [threading.Thread(target=self._run, args=(client,), daemon=True) for client in clients]
        for thread in self._threads:
            thread.start()

    def _run(self, client: GatewayClient) -> None:
        while True:
            with self._guard:
                number, self._next = self._next, self._next + 1
            if number >= self._count:
                return
            body = self._body(number)
            time.sleep(max(self.began + self.due[number] - time.perf_counter(), 0.0))
            try:
                client.push_events(STREAM, body)
            except FluxError as error:
                self.errors.append(str(error))
                continue
            self.answered[number] = time.perf_counter() - self.began

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def figures(self) -> dict[str, Any]:
        """Return the times from due to answered, in milliseconds, without the warm-up."""
        counted = self.due >= WARM_UP_S
        took = 1000 * (self.answered - self.due)[counted & ~np.isnan(self.answered)]
        if not len(took):
            return {"errors": len(self.errors)}
        p50, p99, most = np.percentile(took, [50, 99, 100]).round(2).tolist()
        return {"p50_ms": p50, "p99_ms": p99, "gap_ms_max": most, "errors": len(self.errors)}


def lines(number: int) -> bytes:
    """Return the body of a request as JSON lines."""
    first, rows = number * ROWS["rows"], ROWS["rows"]
    return b"\n".join(
        b'{"n": %d, "name": "user %d", "amount": %d.5, "page": "/page/%d"}' % (n, n % 1000, n % 97, n % 31)
        for n in range(first, first + rows)
    )


def arrow(number: int) -> pa.Table:
    """Return the rows of a request of Arrow."""
    first, rows = number * ROWS["arrow"], ROWS["arrow"]
    n = np.arange(first, first + rows)
    names, pages = pa.array([f"user {each}" for each in range(1000)]), pa.array([f"/page/{each}" for each in range(31)])
    columns = {
        "n": n,
        "name": names.take(pa.array(n % 1000)),
        "amount": n % 97 + 0.5,
        "page": pages.take(pa.array(n % 31)),
    }
    return pa.table(columns)


def run(rate: float, body: str, seconds: float, clients: int, fault: str | None, console: Console) -> Report:
    """Push bodies of a kind ("rows" or "arrow") at a rate of requests a second."""
    with tempfile.TemporaryDirectory(prefix="flux-bench-serve-") as name:
        folder, location = Path(name), Path(name) / "location"
        location.mkdir(mode=0o700)
        token = TokenRegister(place_of(str(location))).make(["admin"], ["*"])
        gateways = [GatewayUnderLoad(location) for _ in range(1 if fault is None else 2)]
        pushers = [GatewayClient([each.url for each in gateways], token) for _ in range(clients)]
        try:
            pushers[0].register_stream(STREAM, SCHEMA)
            pushers[0].push_events(STREAM, lines(-1))  # the first gateway owns the log
            flushes, used = BareFlushes(folder), gateways[0].cpu_s()
            load = Load(lines if body == "rows" else arrow, rate, seconds, pushers)
            if fault is not None:
                time.sleep(WARM_UP_S + seconds / 2)
                gateways[0].process.send_signal(signal.SIGKILL)
            load.join()
            cores = (gateways[0].cpu_s() - used) / float(load.due[-1])
            flushes.end()
            figures: dict[str, Any] = {"benchmark": "serve", "rate": rate, "body": body, "rows_a_request": ROWS[body]}
            figures |= {"clients": clients, "fault": fault or "none"} | load.figures()
            figures |= dict(zip(("flush_p50_ms", "flush_p99_ms"), _percentiles(flushes.took_ms), strict=True))
            if "p50_ms" in figures:
                figures["ratio"] = round(figures["p50_ms"] / max(figures["flush_p50_ms"], 0.001), 2)
            if fault is None:
                figures["gateway_cores"] = round(cores, 2)
            figures |= _exactness(location, ROWS[body], ~np.isnan(load.answered))
        finally:
            for each in pushers:
                each.close()
            for gateway in gateways:
                gateway.close()
    console.print(f"  {figures}", highlight=False)
    failed = figures["lost"] or figures["doubled"]
    return Report(figures, failed="events were lost or doubled" if failed else None)


def _percentiles(took_ms: list[float]) -> list[float]:
    found: list[float] = np.percentile(took_ms or [0.0], [50, 99]).round(2).tolist()
    return found


def _exactness(location: Path, rows: int, answered: np.ndarray) -> dict[str, int]:
    """Count events that were answered and are not in the log, and those that are in it twice."""
    catalogue = StreamCatalogue(place_of(str(location)))
    of = catalogue.get(STREAM)
    reader, found = LogReader(open_log(catalogue.log_place(of, 0)), "the log"), []
    while records := reader.read():
        found += [rows_of(record, of.columns())["n"].to_numpy() for record in records]
    reader.close()
    stored = np.concatenate(found)
    times = np.bincount(stored[stored >= 0], minlength=len(answered) * rows)
    wanted = np.repeat(answered, rows)
    return {"lost": int((times[wanted] == 0).sum()), "doubled": int((times > 1).sum())}
