"""The job of the service: the flights of 2013 over HTTP, as they left, with SQL, a webhook and a live table.

It starts `flux serve` with three executors and two gateways, and registers a stream of flights, one of the weather, and three
queries: delays of each airport in windows of a day, flights that left more than two hours late, and late flights with the weather
of their hour. The late flights go to a webhook, whose receiver is in this program. Then the flights are pushed in the order in
which they left. Half-way a fourth query is registered on the result of another one, a worker and a gateway are killed, and later
the whole service is stopped and started again. Results are read as server-sent events all the time.

The exit code is 0 only if each result equals Spark's batch answer, and the receiver has each late flight once.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import hmac
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from rich.live import Live
from rich.table import Table

from benchmarks.serve_process import ServiceProcess
from examples.flights import console
from examples.flights_windows import read_flights, read_weather
from flux.client import Client
from flux.errors import FluxError

#: Flights in a second at most, and in a request; fewer flights take ``PUSHED_S`` nevertheless, so that faults come among them.
RATE, REQUEST = 12_000, 500
#: Longest wait for a step.
WAIT_S = 300.0
PUSHED_S = 30.0
FLIGHTS = "n BIGINT, left_at TIMESTAMP, airport STRING, destination STRING, late_by BIGINT"
WEATHER = "hour TIMESTAMP, station STRING, visibility DOUBLE, rain DOUBLE"
#: Minutes by which a late flight is late at least.
LATE_MIN = 120
#: The queries, in order of registration.
QUERIES = {
    "delays": """
        SELECT window.start AS day, airport, count(*) AS flights, avg(late_by) AS late_by, max(late_by) AS longest
        FROM flights GROUP BY window(left_at, '1 day'), airport""",
    "late": f"SELECT n, left_at, airport, destination, late_by FROM flights WHERE late_by > {LATE_MIN}",
    "in_weather": f"""
        SELECT f.n, f.airport, f.late_by, w.visibility, w.rain FROM flights f JOIN weather w
        ON f.airport = w.station AND f.left_at >= w.hour AND f.left_at < w.hour + INTERVAL 1 HOUR
        WHERE f.late_by > {LATE_MIN}""",
}
#: The delay of the watermarks, and the length of a window.
DELAY, WINDOW = pd.Timedelta("1 minute"), pd.Timedelta("1 day")
FLIGHT_COLUMNS = ["airport", "destination", "late_by"]
#: Seconds without a row after which all have come, and none comes twice.
QUIET_S = 5.0
#: The receiver answers one of this number of deliveries with an error, although it has the rows.
FAIL_EVERY = 10
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
#: The query that is added half-way, behind another one.
FOURTH = "very_late", f"SELECT n, destination, late_by FROM late WHERE late_by > {2 * LATE_MIN}"


# ---- waits


def until(missing: Callable[[], str], trouble: Callable[[], str] = str) -> None:
    """Wait until nothing is missing. ``missing`` and ``trouble`` return words, or "". RuntimeError: there is trouble, so that it
    will not come; TimeoutError: it takes longer than ``WAIT_S``."""
    end = time.monotonic() + WAIT_S
    while lacks := missing():
        if said := trouble():
            raise RuntimeError(f"while it waited for {lacks}: {said}")
        if time.monotonic() > end:
            raise TimeoutError(f"after {WAIT_S:.0f} s it still waits for {lacks}")
        time.sleep(0.1)


# ---- the receiver of the webhook


class Receiver:
    """A receiver of late flights. It checks each signature, drops deliveries that come again, and fails now and then."""

    def __init__(self) -> None:
        self.secret = os.urandom(16).hex()
        self.rows: list[dict[str, Any]] = []
        self.repeated = self.refused = 0
        #: The number of the newest delivery, and the time at which it came.
        self.newest, self.newest_at = 0, 0.0
        receiver, guard = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with guard:
                    status = receiver.take(body, dict(self.headers))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/late"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes, headers: dict[str, str]) -> int:
        """Take a delivery and return the status of the answer."""
        number, sent = int(headers["Flux-Delivery"]), headers["Flux-Timestamp"]
        wanted = hmac.new(self.secret.encode(), f"{sent}.".encode() + body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(f"v1={wanted}", headers["Flux-Signature"]):
            self.refused += 1
            return 401
        if number <= self.newest:
            self.repeated += 1
            return 200
        self.newest, self.newest_at = number, time.monotonic()
        self.rows += json.loads(body)["rows"]
        return 500 if number % FAIL_EVERY == 0 else 200  # as if the answer was lost: the delivery comes again

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


# ---- readers and pushes


class Follower(threading.Thread):
    """A reader of one result, over both gateways and over the stop of the service."""

    def __init__(self, query: str, client: Client) -> None:
        super().__init__(name=f"follow-{query}", daemon=True)
        self.query, self.rows, self.missed, self.error = query, list[dict[str, Any]](), 0, ""
        #: The time at which the newest rows came.
        self.newest_at = 0.0
        self._client = client
        self.start()

    def run(self) -> None:
        try:
            for rows in self._client.follow(self.query):
                self.newest_at = time.monotonic()
                self.rows += rows.rows
                self.missed += len(rows.missed)
        except FluxError as error:
            self.error = f"the reader of {self.query} has ended: {error}"


class Feed(threading.Thread):
    """Pushes of all flights, and of the weather until then, at a steady pace."""

    def __init__(self, client: Client, flights: pd.DataFrame, weather: pd.DataFrame) -> None:
        super().__init__(name="feed", daemon=True)
        self._client, self._flights, self._weather = client, flights, weather
        self.pushed, self.error = 0, ""

    def run(self) -> None:
        began, told, rate = time.monotonic(), 0, min(RATE, len(self._flights) / PUSHED_S)
        try:
            for start in range(0, len(self._flights), REQUEST):
                time.sleep(max(began + start / rate - time.monotonic(), 0.0))
                rows = self._flights.iloc[start : start + REQUEST]
                behind = int(self._weather.hour.searchsorted(rows.left_at.iloc[-1], side="right"))
                if behind > told:
                    self._push("weather", self._weather.iloc[told:behind])
                    told = behind
                self._push("flights", rows)
                self.pushed = start + len(rows)
        except FluxError as error:
            self.error = f"the pushes have ended: {error}"

    def _push(self, stream: str, rows: pd.DataFrame) -> None:
        self._client.push_events(stream, pa.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata(None))


def told(feed: Feed, readers: list[Follower], receiver: Receiver) -> Table:
    """Return the live table."""
    made = Table("result", "rows", "newest row", title=f"{feed.pushed:,} flights pushed")
    for each in readers:
        newest = each.rows[-1] if each.rows else {}
        made.add_row(each.query, f"{len(each.rows):,}", ", ".join(f"{name} {value}" for name, value in newest.items()))
    made.add_row("webhook", f"{len(receiver.rows):,}", f"{receiver.repeated:,} deliveries came again")
    return made


def show_commands(service: ServiceProcess) -> None:
    """Print lines of curl that do the same by hand."""
    console.print("The same by hand:")
    curl = f"  curl -H 'Authorization: Bearer {service.token}'"
    stream = json.dumps({"name": "flights", "schema": FLIGHTS, "time": "left_at", "delay": "1 minute"})
    query = json.dumps({"name": "late", "sql": QUERIES["late"]})
    hook = json.dumps({"name": "hook", "query": "late", "url": "https://host/path"})
    for line in (
        f"-X POST {service.urls[0]}/v1/streams -d '{stream}'",
        f"-X POST {service.urls[0]}/v1/queries -d '{query}'",
        f"-X POST {service.urls[0]}/v1/outputs -d '{hook}'",
        f"-H 'Content-Type: text/csv' {service.urls[0]}/v1/streams/flights/events --data-binary @flights.csv",
        f"'{service.urls[1]}/v1/queries/late/rows?wait=10s'",
        f"-N {service.urls[1]}/v1/queries/late/events",
    ):
        console.print(f"{curl} {line}", markup=False, soft_wrap=True)


# ---- Spark's answers


def by_spark(
    spark: SparkSession, flights: pd.DataFrame, weather: pd.DataFrame, fourth_from: int
) -> dict[str, DataFrame]:
    """Return Spark's answers to the same texts. ``fourth_from``: the first flight that the fourth query has seen."""
    for name, rows in (("flights", flights), ("weather", weather)):
        spark.createDataFrame(pa.Table.from_pandas(rows, preserve_index=False)).createOrReplaceTempView(name)
    found = {name: spark.sql(text) for name, text in QUERIES.items()}
    found["late"].createOrReplaceTempView("late")
    name, text = FOURTH
    return {**found, name: spark.sql(text).where(f"n >= {fourth_from}")}


def sorted_rows(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return rows in a form for comparison: times as texts, sorted."""
    return sorted((tuple(map(_plain, row.values())) for row in rows), key=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat()
    if isinstance(value, str) and _TIME.match(value):
        return datetime.datetime.fromisoformat(value).astimezone(datetime.UTC).isoformat()
    return value


def compared(
    readers: list[Follower], receiver: Receiver, flights: pd.DataFrame, weather: pd.DataFrame, sure_from: int
) -> bool:
    """Print whether each result is Spark's answer, and whether the receiver has each late flight once. ``sure_from``: the first
    flight that was pushed after the registration of the fourth query had been answered."""
    fourth = next(each for each in readers if each.query == FOURTH[0])
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.sql.session.timeZone": "UTC"}
    spark = SparkSession.builder.master("local[2]").config(map=quiet).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    answers = by_spark(spark, flights, weather, min([sure_from, *(row["n"] for row in fourth.rows)]))
    final_until = _plain(flights.left_at.iloc[-1].to_pydatetime() - DELAY - WINDOW)
    good = True
    for each in readers:
        rows = [row.asDict() for row in answers[each.query].collect()]
        if each.query == "delays":  # later windows are open: a stream has no end
            rows = [row for row in rows if _plain(row["day"]) <= final_until]
        same = sorted_rows(each.rows) == sorted_rows(rows) and not each.missed
        good = good and same
        console.print(
            f"{each.query}: {len(each.rows):,} rows; Spark's batch answer: {'equal' if same else 'DIFFERENT'}"
        )
    same = sorted_rows(receiver.rows) == sorted_rows(row.asDict() for row in answers["late"].collect())
    spark.stop()
    console.print(
        f"webhook: {len(receiver.rows):,} rows, {receiver.repeated:,} deliveries again, {receiver.refused:,} refused; "
        f"Spark's batch answer: {'equal' if same else 'DIFFERENT'}"
    )
    return good and same


# ---- the run


def run(
    service: ServiceProcess, receiver: Receiver, flights: pd.DataFrame, weather: pd.DataFrame
) -> tuple[list[Follower], int]:
    """Push all flights among kills. Return the readers, which have all results, and the first flight that the fourth query has
    certainly read."""
    client, feeder = (Client(service.urls, service.token, timeout=WAIT_S) for _ in range(2))
    client.register_stream("flights", FLIGHTS, time="left_at", delay="1 minute")
    client.register_stream("weather", WEATHER, time="hour", delay="1 minute")
    for name, text in QUERIES.items():
        made = client.register_query(name, text)
        console.print(f"registered {name}: {made['schema']}")
    client.register_output("hook", "late", receiver.url, secret=receiver.secret)
    show_commands(service)
    readers = [Follower(name, Client(service.urls, service.token, timeout=WAIT_S)) for name in QUERIES]
    feed = Feed(feeder, flights, weather)
    feed.start()

    def reached(part: float) -> None:
        until(
            lambda: (
                "" if feed.pushed >= part * len(flights) else f"{part:.0%} of the flights ({feed.pushed:,} are pushed)"
            ),
            lambda: feed.error or next((each.error for each in readers if each.error), ""),
        )

    with Live(console=console, get_renderable=lambda: told(feed, readers, receiver), refresh_per_second=2):
        reached(0.5)
        client.register_query(*FOURTH)
        sure_from = feed.pushed + REQUEST  # the request before may have been on its way
        readers.append(Follower(FOURTH[0], Client(service.urls, service.token, timeout=WAIT_S)))
        reached(0.6)
        console.print(f"[bold]Killed a worker (process {service.kill_a_worker()})[/bold]")
        reached(0.7)
        console.print(f"[bold]Killed a gateway (process {service.kill_a_gateway()})[/bold]")
        reached(0.8)
        console.print("[bold]Stopping the service, and starting it again[/bold]")
        service.close()
        service.start()
        reached(1.0)
        until(
            lambda: rows_missing(readers, receiver, flights),
            lambda: next((each.error for each in readers if each.error), ""),
        )
    return readers, sure_from


def rows_missing(readers: list[Follower], receiver: Receiver, flights: pd.DataFrame) -> str:
    """Return the results that are not there yet: late flights, the last window that is final, and silence behind them."""
    rows = {each.query: each.rows for each in readers}
    expected = int((flights.late_by > LATE_MIN).sum())
    last = _plain((flights.left_at.iloc[-1] - DELAY - WINDOW).floor("D").to_pydatetime())
    for name, count in (("the reader of late", len(rows["late"])), ("the webhook", len(receiver.rows))):
        if count < expected:
            return f"{expected:,} rows at {name}, which has {count:,}"
    if not any(_plain(row["day"]) == last for row in rows["delays"][-10:]):
        return f"the window of {last} at the reader of delays"
    quiet_s = time.monotonic() - max(receiver.newest_at, *(each.newest_at for each in readers))
    return "" if quiet_s >= QUIET_S else f"{QUIET_S:g} s without a row"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default="local-cluster[3,2,1024]", help="Spark master (default: three executors here)"
    )
    parser.add_argument(
        "--flights", type=int, default=None, metavar="N", help="the first N flights; default: all 336,776 of the year"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as after Ctrl-C, the service ends with this program
    given = read_flights(arguments.flights)
    flights = given.rows.assign(n=range(len(given.rows)), left_at=given.at)[["n", "left_at", *FLIGHT_COLUMNS]]
    weather = read_weather(flights.left_at.max()).rows.drop(columns="partition")
    console.print(f"{len(flights):,} flights and {len(weather):,} hours of weather")
    receiver = Receiver()
    with tempfile.TemporaryDirectory(prefix="flux-service-") as folder:
        service = ServiceProcess(Path(folder), 2, arguments.master, 2, "--webhooks-to", "127.0.0.1")
        try:
            readers, sure_from = run(service, receiver, flights, weather)
        finally:
            service.close()
            receiver.close()
    return 0 if compared(readers, receiver, flights, weather, sure_from) else 1


if __name__ == "__main__":
    sys.exit(main())
