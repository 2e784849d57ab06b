"""A service that is stopped and started again: the time until a row of an event that is pushed after the start is at a reader.

The service has many registered queries: filters, counts by page, and one that keeps state for each event. Events are pushed
until the location has as many bytes of state as are asked for. Then the service is stopped as by its operator,
and started again on its location. The time counts from the start of its process; Spark's own start is part of it. Clients
push and read as soon as they can. Spark's classes are in the archive of the user, as after any longer life of a service. At the
end each event must have been counted once, and each row of the filter have come once.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.serve import ROWS, SCHEMA, STREAM, arrow, lines
from benchmarks.serve_process import ENDS_S, ServiceProcess
from benchmarks.serve_queries import EVERY, READ, FilterReader
from benchmarks.timeline import Report
from flux.client import GatewayClient
from flux.errors import FluxError
from spark_integration.service.class_archive import MAKES_S, archive_path
from spark_integration.service.command import IDLE_JVM

#: Longest wait for rows at a reader.
ROWS_S = 120.0
#: Time between two pushes after the start.
PUSH_EVERY_S = 0.05
#: The query with state for each event, and that which counts all events.
STATEFUL, COUNTED = "stateful", "counted"
#: The texts of the other queries, by turns.
OTHERS = (
    f"SELECT n, page FROM {STREAM} WHERE n = -{{number}}",
    f"SELECT window.start AS hour, page, count(*) AS events FROM {STREAM} WHERE n % 1000 = {{number}} "
    "GROUP BY window(arrived_at, '1 hour'), page",
    f"SELECT n, upper(name) AS name, amount * {{number}} AS amount FROM {STREAM} WHERE n = -{{number}} AND amount > 1",
)
#: A part of the start, as the service tells it, and its seconds.
_PART = re.compile(r"([a-z ]+) (\d+\.\d+)(?:,|$)", re.MULTILINE)


def texts(count: int) -> dict[str, dict[str, str]]:
    """Return the definitions of queries by name."""
    made = {
        READ: {"sql": f"SELECT n FROM {STREAM} WHERE n % {EVERY} = 0 AND n >= 0"},
        STATEFUL: {
            "sql": "SELECT window.start AS day, n, count(*) AS events, sum(amount) AS amount "
            f"FROM {STREAM} GROUP BY window(arrived_at, '30 days'), n"
        },
        COUNTED: {"sql": f"SELECT page, count(*) AS events FROM {STREAM} GROUP BY page", "mode": "update"},
    }
    return made | {
        f"other_{number}": {"sql": OTHERS[number % len(OTHERS)].format(number=number + 2)}
        for number in range(count - len(made))
    }


def size_mb(folder: Path) -> float:
    """Return the bytes of all files below a folder, in MiB."""
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()) / (1 << 20)


class Started:
    """One start of the service, with a client that pushes as soon as it can."""

    def __init__(self, service: ServiceProcess, reader: FilterReader, pusher: GatewayClient, first: int) -> None:
        """``first``: the number of the first request of lines that is pushed."""
        self.requests, self.error = 0, ""
        self.pushed_s = self.seconds = 0.0
        self._pusher, self._first, self._over = pusher, first, threading.Event()
        with tempfile.TemporaryFile("w+") as told:
            before, self._began = len(reader.came), time.perf_counter()
            service.launch(told.fileno())
            pushes = threading.Thread(target=self._push, name="pushes", daemon=True)
            pushes.start()
            end = self._began + ROWS_S
            while len(reader.came) == before:
                if service.process.poll() is not None or time.perf_counter() > end or self.error or reader.error:
                    told.seek(0)
                    raise FluxError(
                        f"no row of a new event within {ROWS_S:g} s after the start; exit code "
                        f"{service.process.poll()}; pushes: {self.error or 'go on'}; reader: {reader.error or 'goes on'}; "
                        f"the service said: {told.read()}"
                    )
                time.sleep(0.002)
            self.seconds = reader.came[before] - self._began
            service.wait_until_it_answers()
            self._over.set()
            pushes.join()
            #: Seconds of the parts of the start, as the service told them.
            self.parts = self._parts(told)

    def _push(self) -> None:
        try:
            while not self._over.is_set():
                self._pusher.push_events(STREAM, lines(self._first + self.requests))
                self.requests += 1
                self.pushed_s = self.pushed_s or time.perf_counter() - self._began
                time.sleep(PUSH_EVERY_S)
        except FluxError as error:
            self.error = str(error)

    def _parts(self, told: Any) -> dict[str, float]:
        """Return the parts that the service has told. FluxError: it has not within the time of its end."""
        end = time.monotonic() + ENDS_S
        while True:
            told.seek(0)
            line = next((each for each in told if "started in" in each), "")
            if line:
                found = {part.strip(): float(seconds) for part, seconds in _PART.findall(line.partition(": ")[2])}
                return {"first push": self.pushed_s, **found}
            if time.monotonic() > end:
                raise FluxError(f"the service has not told the parts of its start within {ENDS_S:g} s")
            time.sleep(0.05)


def run(queries: int, state_mb: int, times: int, master: str, console: Console) -> Report:
    """Stop and start a service ``times`` times, with ``queries`` registered and ``state_mb`` MiB of state besides its events."""
    _make_archive()
    with tempfile.TemporaryDirectory(prefix="flux-bench-serve-") as name:
        location = Path(name) / "location"
        service = ServiceProcess(Path(name), 1, master, 1)
        pusher = GatewayClient(service.urls, service.token)
        starts: list[Started] = []
        stops_s: list[float] = []
        try:
            pusher.register_stream(STREAM, SCHEMA)
            for query, definition in texts(queries).items():
                pusher.register_query(query, **definition)
            reader = FilterReader(GatewayClient(service.urls, service.token, timeout=ROWS_S))
            pushed = _filled(pusher, reader, location, state_mb)
            for number in range(times):
                began = time.perf_counter()
                service.close()
                stops_s.append(time.perf_counter() - began)
                sizes = {"state_mb": size_mb(location / "plan"), "events_mb": size_mb(location / "streams")}
                first = pushed // ROWS["rows"]
                starts.append(Started(service, reader, pusher, first))
                pushed += starts[-1].requests * ROWS["rows"]
                _wait_for(reader, pushed // EVERY)
                console.print(
                    f"  start {number + 1} of {times}: {starts[-1].seconds:.2f} s {starts[-1].parts}", highlight=False
                )
            counted = _counted(pusher, pushed)
        finally:
            pusher.close()
            service.close()
    seconds = [each.seconds for each in starts]
    figures: dict[str, Any] = {"benchmark": "serve", "queries": queries, "restarts": times}
    figures |= {key: round(value, 1) for key, value in sizes.items()}
    figures |= {"restart_s": round(float(np.median(seconds)), 2), "restart_s_max": round(max(seconds), 2)}
    figures |= {"stop_s": round(float(np.median(stops_s)), 2)}
    for part in starts[-1].parts:
        figures[f"{part.replace(' ', '_')}_s"] = round(float(np.median([each.parts[part] for each in starts])), 2)
    came = Counter(reader.rows)
    figures["lost"] = sum(1 for n in range(0, pushed, EVERY) if n not in came) + max(pushed - counted, 0)
    figures["doubled"] = sum(came.values()) - len(came) + max(counted - pushed, 0)
    return Report(figures, failed="events were lost or doubled" if figures["lost"] or figures["doubled"] else None)


def _make_archive() -> None:
    """Make the archive of Spark's classes, if this user has none: a service that has run for some minutes would have made it."""
    path = archive_path()
    if path is not None and not path.exists():
        command = [sys.executable, "-m", "spark_integration.service.class_archive", str(path), IDLE_JVM]
        with (
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as made,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            made.wait(MAKES_S)


def _filled(pusher: GatewayClient, reader: FilterReader, location: Path, state_mb: int) -> int:
    """Push events until there are ``state_mb`` of state, and return their number."""
    requests = 0
    while size_mb(location / "plan") < state_mb:
        for _ in range(20):
            pusher.push_events(STREAM, arrow(requests))
            requests += 1
        _wait_for(reader, requests * ROWS["arrow"] // EVERY)
    return requests * ROWS["arrow"]


def _wait_for(reader: FilterReader, rows: int) -> None:
    end = time.monotonic() + ROWS_S
    while len(reader.came) < rows:
        if reader.error or time.monotonic() > end:
            raise FluxError(f"{len(reader.came):,} of {rows:,} rows have come within {ROWS_S:g} s {reader.error}")
        time.sleep(0.05)


def _counted(client: GatewayClient, pushed: int) -> int:
    """Return the number of events that the query has counted, when it has counted all, or after ``ROWS_S`` seconds."""
    end, newest, cursor = time.monotonic() + ROWS_S, dict[str, int](), None
    while sum(newest.values()) < pushed and time.monotonic() < end:
        page = client.rows(COUNTED, cursor, wait="1s", limit=100_000)
        newest |= {row["page"]: row["events"] for row in page.rows}
        cursor = page.cursor
    return sum(newest.values())
