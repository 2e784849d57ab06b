"""A running count per key from a topic to a topic: latency, the cost of a killed executor, and the rate of working off a
backlog.

Each run has two new topics on a broker that is started for the benchmark: paced rows go into one of them, and records come out
in the other, with times that the broker gives. Broker, load and query share the machine, so the cores that each uses are
reported as well. The broker is warm before the first run, and each system warms up for the same time. After the run another
client reads both topics, and every record of the output is compared with the result of the input alone. Each peer gets the same
load on the same broker, one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console

from benchmarks import session
from benchmarks.arrivals import Seen
from benchmarks.kafka import count, load, written
from benchmarks.kafka import peers as peers_
from benchmarks.kafka.cores import Meter, Roots, await_compiled
from benchmarks.kafka.echo import echoing
from benchmarks.kafka.fastest import fastest
from benchmarks.kafka.watch import Visible, watching
from benchmarks.operating import until
from benchmarks.timeline import Line, Mark, Report, of_arrivals
from flux.connectors.kafka.client.cluster import LATEST, Client, addresses
from flux.connectors.kafka.client.producer import ProducerClient
from flux.connectors.kafka.client.security import Security
from flux.errors import FluxError, QueryFailed, UsageError
from spark_integration.query.query import Query

#: Load before the measurement, the same for all systems; JVMs compile during this time.
WARM_UP_S = 20.0
#: Longest time until a broker stops compiling.
BROKER_WARM_UP_S = 90.0
#: For this time the output must stand still after the end of the load to count as complete. If rows share records, the number
#: of records is not known, and batches may take seconds. Recovery after a fault takes longer still.
STILL_S, STILL_SHARED_S, STILL_AFTER_FAULT_S = 4.0, 12.0, 25.0
WORKERS, WORKERS_WITH_FAULT = 2, 3
START_S, LOAD_EXTRA_S, BACKLOG_S = 120.0, 30.0, 300.0
#: Time for a broker given by name to answer.
REACHED_S = 15.0
FAULT = "kill-executor"


@dataclass
class Run:
    """One run of one system: its figures, and its picture; None: there is nothing to draw."""

    figures: dict[str, Any]
    line: Line | None


@dataclass
class Topics:
    """The input topic ``given`` and the output topic ``out`` of one run, with ``partitions`` partitions each. ``broker`` is its
    process; empty for a broker that was running before."""

    address: str
    name: str
    partitions: int
    broker: tuple[int, ...] = ()
    given: str = field(init=False)
    out: str = field(init=False)

    def __post_init__(self) -> None:
        self.given, self.out = f"{self.name}-in", f"{self.name}-out"
        for topic in (self.given, self.out):
            create(self.address, topic, self.partitions, message_timestamp_type="LogAppendTime")

    def records(self, topic: str) -> int:
        """Behind the last one that is committed, all partitions together."""
        client = Client(addresses(self.address), Security({}))
        try:
            places = {(topic, each): LATEST for each in range(self.partitions)}
            return sum(client.offsets(places, 30.0, True).values())
        finally:
            client.close()

    def await_output(self, still_s: float, limit_s: float, each_row: bool) -> None:
        """Wait until all records have come out, or none has for ``still_s``."""
        wanted, had = self.records(self.given), -1
        since = began = time.monotonic()
        while time.monotonic() - since < still_s and time.monotonic() - began < limit_s:
            has = self.records(self.out)
            if each_row and has >= wanted:
                time.sleep(0.5)  # time for duplicates to arrive
                return
            if has != had:
                had, since = has, time.monotonic()
            time.sleep(0.1)


def create(address: str, topic: str, partitions: int, **settings: Any) -> None:
    from confluent_kafka.admin import NewTopic

    config = {name.replace("_", "."): str(value) for name, value in settings.items()}
    admin = _admin(address)
    admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(30)


def _admin(address: str) -> Any:
    """Make a client, which has to live until its requests are done. It logs errors only."""
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": address, "log_level": 3})


@contextmanager
def loading(topics: Topics, rate: int, seconds: float) -> Iterator[Loading]:
    """Let rows flow into ``given`` during the block, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.kafka.load", topics.address, topics.given]
    process = subprocess.Popen(
        [*command, str(topics.partitions), str(rate), str(seconds)], stdout=subprocess.PIPE, text=True,
        env=peers_.environment(),
    )  # fmt: skip
    made = Loading(process)
    try:
        yield made
    finally:
        process.kill()
        process.wait()


class Loading:
    """A load in another process. ``start`` is the time at which its first row is due."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self._said: Queue[dict[str, Any]] = Queue()
        threading.Thread(target=self._hear, daemon=True).start()
        self.start = float(self._next(START_S)["start"])

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))

    def _next(self, limit_s: float) -> dict[str, Any]:
        try:
            return self._said.get(timeout=limit_s)
        except Empty:
            raise QueryFailed(
                f"the load is not through {limit_s:.0f} s later: this machine cannot send as many rows a second, or the broker "
                "does not take them. Give a lower --rate"
            ) from None

    def end(self, limit_s: float) -> None:
        """Wait until all rows are sent."""
        self._next(limit_s)


def measured(
    name: str,
    topics: Topics,
    rate: int,
    seconds: float,
    roots: Roots,
    strike: Callable[[], None] | None,
    each_row: bool = True,
    watched: bool = False,
) -> Run:
    """Apply load, with a fault in the middle, and measure the output. The measured system runs already: it is ``roots`` and the
    processes that they have started. With ``watched``, a reader follows the output, which costs a part of a core at high
    rates."""
    fault_at: float | None = None
    with ExitStack() as ends:
        seen = Visible()
        if watched:
            seen = ends.enter_context(watching(topics.address, topics.out, topics.partitions))
        flowing = ends.enter_context(loading(topics, rate, WARM_UP_S + seconds))
        start = flowing.start + WARM_UP_S
        end = start + seconds
        others = (*topics.broker, flowing.pid)
        groups: dict[str, Roots] = {
            "cores": roots,
            "broker_cores": lambda: topics.broker,
            "load_cores": lambda: [flowing.pid],
        }
        meter = Meter(groups, lambda: others)
        _sleep_until(start)
        meter.mark()
        if strike is not None:
            _sleep_until(start + seconds / 2)
            meter.mark()
            fault_at = time.time()
            strike()
        _sleep_until(end)
        meter.mark()
        flowing.end(max(end - time.time(), 0) + LOAD_EXTRA_S + seconds)
        still_s = STILL_AFTER_FAULT_S if strike is not None else STILL_S if each_row else STILL_SHARED_S
        topics.await_output(still_s, seconds + 4 * still_s, each_row)
    given = written.read(topics.address, topics.given, topics.partitions)
    got = written.read(topics.address, topics.out, topics.partitions)
    figures: dict[str, Any] = written.statistics(got, start, end) | seen.statistics(start, end)
    figures |= {f"load_{name}": value for name, value in written.statistics(given, start, end).items()}
    figures |= written.exactness(given, got, each_row) | meter.cores()
    return Run(figures, line_of(name, got, start, end, fault_at))


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.time(), 0))


def line_of(name: str, got: written.Written, start: float, end: float, fault_at: float | None) -> Line:
    at = got.append_ms / 1e3
    ones = at * 0 + 1
    marks = [] if fault_at is None else [Mark(fault_at, fault_at, FAULT)]
    return of_arrivals(name, Seen(at, ones * 0, got.due_us / 1e6, ones, ones[:0]), marks, start, end)


def run(
    rate: int,
    partitions: int,
    peers: Sequence[str],
    fault: bool,
    console: Console,
    seconds: float = 20.0,
    replicas: int = 2,
    rows: int = 10_000_000,
    bootstrap: str | None = None,
    p99_ms: float | None = None,
) -> Report:
    """Run the benchmark.

    ``seconds`` is the time of measurement; ``rows`` those of the backlog, 0: none; ``bootstrap`` the address of a running
    broker; ``p99_ms`` asks for the highest rate that keeps to it, instead of one rate and the backlog."""
    _require()
    with ExitStack() as ends:
        address, broker = _there(bootstrap) if bootstrap else _broker(ends, console)
        topics = TopicFactory(address, partitions, broker)
        ends.callback(topics.remove)
        workers = WORKERS_WITH_FAULT if fault else WORKERS
        result: dict[str, Any] = {"benchmark": "kafka", "rate": rate, "partitions": partitions, "seconds": seconds}
        result |= {"workers": workers, "replicas": replicas, "fault": FAULT if fault else None}
        result["guarantee"] = f"exactly once, {replicas} replica{'s' if replicas > 1 else ''}"
        result["broker_warm_up_s"] = _warmed(topics, rate, console)
        peers = peers_.runs_of(peers, fault)
        if p99_ms is not None:
            result["p99_ms_bound"] = p99_ms
            runs = _fastest(topics, peers, seconds, workers, replicas, p99_ms, console)
        else:
            runs = {"flux": _flux(topics, rate, seconds, workers, replicas, rows, fault, console)}
            for peer in peers:
                runs[peer] = _peer(peer, topics, rate, seconds, rows, fault, console)
    return report(result, runs)


def report(result: dict[str, Any], runs: Mapping[str, Run]) -> Report:
    """Join the figures: those of Flux as they are, and those of each peer behind ``peer_`` and its name. ``ratio`` compares the
    rates of working off a backlog."""
    result |= {"rows_per_s": None} | runs["flux"].figures
    for peer, measured in runs.items():
        if peer != "flux":
            result |= {f"peer_{peer}_{name}": value for name, value in measured.figures.items()}
    theirs = result.get("peer_micro_rows_per_s")
    result["ratio"] = round(result["rows_per_s"] / theirs, 2) if theirs and result.get("rows_per_s") else None
    lines = [measured.line for measured in runs.values() if measured.line is not None]
    return Report(result, lines, "latency, due to appended (ms)", failed=_wrong(result))


def _wrong(result: Mapping[str, Any]) -> str | None:
    """Return the reason why the command ends with an error; None: each record is there once."""
    lost, more = (result.get(name, result.get(f"sustained_{name}", 0)) for name in ("lost", "duplicated"))
    if not lost and not more:
        return None
    return f"{lost} records are lost and {more} should not be there; each was to be there once"


def _require() -> None:
    """Check the imports before the benchmark runs for minutes."""
    try:
        import confluent_kafka  # noqa: F401
    except ImportError:
        raise UsageError(
            "the topics are read with confluent-kafka, which is missing: pip install 'flux-exchange[kafka,bench]'"
        ) from None


def _there(bootstrap: str) -> tuple[str, tuple[int, ...]]:
    """Return the address of a running broker, and no process. BrokerUnreachable: it does not answer."""
    client = ProducerClient(addresses(bootstrap), Security({}))
    try:
        client.producer_ids(1, REACHED_S)
    finally:
        client.close()
    return bootstrap, ()


def _broker(ends: ExitStack, console: Console) -> tuple[str, tuple[int, ...]]:
    """Start a broker. Return its address and its process."""
    try:
        found = peers_.broker()
    except peers_.Unavailable as error:
        raise UsageError(
            f"no broker can be started here: {error}. --bootstrap HOST:PORT names a running one"
        ) from error
    console.print("starting a broker")
    running = ends.enter_context(found.Broker(heap="1g"))
    return running.address, (running.process.pid,)


class TopicFactory:
    """Maker of topics with unique names, which it removes at the end."""

    def __init__(self, address: str, partitions: int, broker: tuple[int, ...] = ()) -> None:
        self.address, self.partitions, self._broker = address, partitions, broker
        self._names: list[str] = []

    def pair(self, who: str) -> Topics:
        made = Topics(self.address, f"flux-bench-{os.getpid()}-{who}", self.partitions, self._broker)
        self._names += [made.given, made.out]
        return made

    def backlog(self, rows: int) -> str:
        """Return the topic with the backlog. The first call fills it."""
        name = f"flux-bench-{os.getpid()}-backlog"
        if name not in self._names:
            create(self.address, name, self.partitions)
            self._names.append(name)
            load.backlog(addresses(self.address), name, self.partitions, rows)
        return name

    def remove(self) -> None:
        if self._names:
            admin = _admin(self.address)
            for done in admin.delete_topics(self._names).values():
                done.result(30)


def _warmed(topics: TopicFactory, rate: int, console: Console) -> float:
    """Warm the broker up, and return the seconds that it took.

    A broker that has just been started compiles while rows flow, which leaves fewer cores to a system that is measured
    meanwhile. So rows flow through it before, in and out, until it stops compiling."""
    console.print(f"warming the broker up, {rate:,} rows/s")
    pair = topics.pair("warm-up")
    with loading(pair, rate, BROKER_WARM_UP_S), echoing(pair.address, pair.given, pair.out, pair.partitions):
        return round(await_compiled(next(iter(pair.broker), None), WARM_UP_S, BROKER_WARM_UP_S), 1)


def _flux(
    topics: TopicFactory,
    rate: int,
    seconds: float,
    workers: int,
    replicas: int,
    rows: int,
    fault: bool,
    console: Console,
    watched: bool = True,
) -> Run:
    # With a fault, two workers share an executor, so that the remaining executors have room for all replicas.
    spark, _ = session.start(
        workers, 2 if fault else 1, 1024, idle_jvm=True,
        **{"spark.task.maxFailures": 1000, "spark.excludeOnFailure.enabled": "false"},
    )  # fmt: skip
    try:
        console.print(f"Flux, {rate:,} rows/s{', an executor is killed' if fault else ''}")
        found = with_flux(spark, topics.pair(f"flux-{rate}"), rate, seconds, workers, replicas, fault, watched)
        if rows:
            console.print(f"Flux, a backlog of {rows:,} rows")
            found.figures["rows_per_s"] = work_off(spark, topics, rows)
        return found
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()


def _fastest(
    topics: TopicFactory,
    peers: Sequence[str],
    seconds: float,
    workers: int,
    replicas: int,
    p99_ms: float,
    console: Console,
) -> dict[str, Run]:
    runs = {}
    for system in ("flux", *peers):

        def at(rate: int, system: str = system) -> dict[str, Any]:
            try:
                if system == "flux":
                    found = _flux(topics, rate, seconds, workers, replicas, 0, False, console, False).figures
                else:
                    found = _peer(system, topics, rate, seconds, 0, False, console, False).figures
            except (FluxError, TimeoutError, AssertionError) as error:  # the rate is too high
                found = {"failed": str(error)}
            console.print(f"  {found}", highlight=False)
            return found

        runs[system] = Run(fastest(at, p99_ms), None)
        if system != "flux":
            runs[system].figures["guarantee"] = peers_.guarantee(system)
    return runs


def _peer(
    peer: str,
    topics: TopicFactory,
    rate: int,
    seconds: float,
    rows: int,
    fault: bool,
    console: Console,
    watched: bool = True,
) -> Run:
    pair = topics.pair(f"{peer}-{rate}")
    console.print(f"{peers_.title(peer)}, {rate:,} rows/s")
    try:
        with peers_.running(peer, topics.address, pair.given, pair.out) as running:
            # Spark may put several rows of a key into one record.
            each_row = peer in (peers_.STREAMS, peers_.STREAMS_ONCE)
            found = measured(
                peers_.title(peer),
                pair,
                rate,
                seconds,
                lambda: running.roots,
                running.strike if fault else None,
                each_row,
                watched,
            )
        found.figures["guarantee"] = peers_.guarantee(peer)
        if peer == "micro" and rows:
            console.print(f"{peers_.title(peer)}, a backlog of {rows:,} rows")
            found.figures["rows_per_s"] = peers_.backlog(topics.address, topics.backlog(rows), rows)
        return found
    except peers_.Unavailable as error:
        console.print(f"  not run: {error}")
        return Run({"not_run": str(error)}, None)
    except (RuntimeError, TimeoutError, FluxError) as error:  # the figures of Flux are kept
        console.print(f"  failed: {error}")
        return Run({"failed": str(error)}, None)


def with_flux(
    spark: SparkSession,
    topics: Topics,
    rate: int,
    seconds: float,
    workers: int,
    replicas: int,
    fault: bool,
    watched: bool = False,
    **options: Any,
) -> Run:
    query = count.start(
        spark, topics.address, topics.given, topics.out, topics.partitions, workers, replicas, **options
    )
    try:
        query.wait_until_running(START_S)
        until(query.is_whole, START_S, "all replicas are there")
        strike = (lambda: kill_executor(query)) if fault else None
        return measured(
            "flux", topics, rate, seconds, lambda: [os.getpid()], strike, watched=watched
        )  # driver, executors, workers
    finally:
        query.stop()


def kill_executor(query: Query) -> None:
    """Kill the executor with the primary of the count's first partition."""
    table = query._server.core.table
    assert table is not None
    primary = table.stages[0][0][0].worker
    os.kill(int(query.members()[primary].about.executor.rpartition(":")[2]), signal.SIGKILL)


def work_off(spark: SparkSession, topics: TopicFactory, rows: int) -> int:
    """Measure rows per second from a topic through a keyed stage to state, from the moment at which the workers are there."""
    name = topics.backlog(rows)
    query = count.start_totals(spark, topics.address, name, topics.partitions, WORKERS, progress_interval="20ms")
    try:
        query.wait_until_running(START_S)
        began = time.monotonic()
        until(lambda: _applied(query) >= rows, BACKLOG_S, f"{rows} rows are applied")
        took = time.monotonic() - began
        if _applied(query) != rows:
            raise QueryFailed(f"{_applied(query)} rows were applied of {rows}")
        return round(rows / took)
    finally:
        query.stop()


def _applied(query: Query) -> int:
    if (error := query.exception()) is not None:
        raise error
    progress = query.lastProgress
    return 0 if progress is None else int(progress["stages"][0]["rowsIn"])
