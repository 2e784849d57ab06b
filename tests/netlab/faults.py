"""``python -m tests.netlab.faults --times 200 --seed 7``: real faults at random times, and an independent answer after each run.

Windows are counted over a topic of Kafka, or over files where no broker can start, and over a reader that may hang, on three
hosts with two replicas, in a query with ``availability``. Meanwhile the broker, the source process and workers are stopped, a
reader hangs, links are cut in one and in both directions, and executors are killed. After each run the stable results, with the
position of each batch, are compared with DuckDB's count of the rows that the source process has written down.

It prints one line for each run, and a total as JSON in the end. Exit code 0: all results of all runs are those of DuckDB.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from spark_integration.query.query import Query
from spark_integration.query.start import start_query
from tests.kafka import broker as kafka
from tests.netlab import feeder
from tests.netlab.cluster import Cluster
from tests.netlab.fault_schedule import LOSSES, SINGLE, Fault, Kind, Lasting, link_of, schedule
from tests.netlab.lab import HUB, Lab
from tests.netlab.namespaces import why_not

WORKERS = 3
BOUND = "1s"
#: Seconds after which a silent worker is given up, and the longest stop of a worker that is to be given up: the worker goes on as
#: soon as that has happened. A shared machine must not give up workers by itself, and its controller may be late.
HEARTBEAT_S, LONG_S = 10, 60.0
#: Seconds until the query runs, until it is whole again after a loss, and until all results are there in the end.
START_S, WHOLE_S, DRAIN_S = 240.0, 180.0, 240.0
#: Seconds of rows before the first fault, and behind the last.
CALM_S = 2.0
LOOK_S = 0.05
#: Entries of the history that are shown if a run goes wrong, the last ones.
EVENTS = 30
ROOT = Path(__file__).parents[2]
#: Executors and tasks are lost many times, and are started again each time.
SHIPPED = {"spark.task.maxFailures": "1000", "spark.excludeOnFailure.enabled": "false"}


class Unfinished(Exception):
    """A run that has waited in vain."""


@dataclass
class Run:
    """The outcome of one run."""

    number: int
    faults: Counter[Kind] = field(default_factory=Counter)
    judgement: feeder.Judgement = field(default_factory=feeder.Judgement)
    #: The reason why the run has not come to its end; empty: it has.
    failed: str = ""
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        return not self.failed and self.judgement.exact and self.judgement.rows > 0

    def told(self) -> str:
        """Put the run into one line."""
        struck = ", ".join(f"{times} x {kind}" for kind, times in sorted(self.faults.items()))
        found = self.judgement
        said = (
            f"run {self.number}: {self.faults.total()} faults ({struck}) in {self.seconds:.0f} s; {found.rows:,} rows, "
            f"{found.groups:,} groups, {found.tentative:,} tentative rows; {found.lost} lost, {found.doubled} doubled, "
            f"{found.wrong} groups wrong"
        )
        return f"{said}; NOT FINISHED: {self.failed}" if self.failed else said


def total(seed: int, runs: list[Run]) -> dict[str, Any]:
    """Sum up all runs."""
    sums: Counter[str] = Counter()
    struck: Counter[Kind] = Counter()
    for run in runs:
        sums.update(asdict(run.judgement))
        struck.update(run.faults)
    return {
        "seed": seed,
        "runs": len(runs),
        "faults": struck.total(),
        "by_kind": {str(kind): struck[kind] for kind in sorted(struck)},
        **sums,
        "not_finished": {run.number: run.failed for run in runs if run.failed},
        "exact": all(run.exact for run in runs),
    }


# ---- one run


class Strikes:
    """The faults of one run, and their ends."""

    def __init__(self, lab: Lab, query: Query, folder: Path, stoppable: dict[Kind, int], console: Console) -> None:
        """Prepare for faults. ``stoppable``: the processes of the broker and of the source, by the kind of the fault."""
        self._lab, self._query, self._folder, self._console = lab, query, folder, console
        self._stoppable = stoppable
        self._hosts = [host for host in lab.spaces if host != HUB]
        self._lasting = Lasting()
        #: Workers that are lost, or will be given up soon.
        self._losing: set[int] = set()
        self.struck: Counter[Kind] = Counter()

    def run(self, faults: list[Fault]) -> None:
        for fault in faults:
            self._pass(time.monotonic() + fault.wait_s)
            if fault.kind in LOSSES:
                self._until_whole()
            elif fault.kind in SINGLE:
                self._until(partial(self._free, fault.kind), f"an earlier fault is over ({fault.kind})")
            self._begin(fault)
            self.struck[fault.kind] += 1
        self._until(lambda: not self._lasting, "all faults are over")
        self._until_whole()

    def _free(self, thing: Hashable) -> bool:
        return not self._lasting.of(thing)

    def heal(self) -> None:
        """End all faults now."""
        self._lasting.end(math.inf)

    # ---- time

    def _pass(self, end: float) -> None:
        """Wait, and end faults whose time has come."""
        while (now := time.monotonic()) < end:
            self._lasting.end(now)
            for node in self._losing - self._query.members().keys():
                self._losing.remove(node)
                self._lasting.over(node)
            time.sleep(min(LOOK_S, max(end - now, 0.0)))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WHOLE_S
        while not condition():
            if not self._query.isActive:
                raise Unfinished(f"the query has ended: {self._query.exception()}")
            if time.monotonic() > end:
                raise Unfinished(f"waited {WHOLE_S:g} s in vain until {what}; status: {self._query.status['message']}")
            self._pass(time.monotonic() + LOOK_S)

    def _until_whole(self) -> None:
        def whole() -> bool:
            return not self._losing and len(self._query.members()) >= WORKERS and self._query.is_whole()

        self._until(whole, f"the query is whole, with {WORKERS} workers")

    # ---- faults

    def _begin(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.BROKER | Kind.FEEDER:
                pid = self._stoppable[fault.kind]
                self._last(
                    fault, fault.kind, lambda: signalled(pid, signal.SIGSTOP), lambda: signalled(pid, signal.SIGCONT)
                )
            case Kind.READER:
                hang = self._folder / "hang"
                self._last(fault, fault.kind, hang.touch, hang.unlink)
            case Kind.CUT_ONE | Kind.CUT_BOTH:
                a, b = link_of(fault.chance, self._hosts)
                for link in [(a, b)] if fault.kind is Kind.CUT_ONE else [(a, b), (b, a)]:
                    self._last(fault, link, partial(self._lab.cut, *link), partial(self._lab.heal, *link))
            case Kind.PAUSE | Kind.LONG_PAUSE | Kind.KILL:
                members = sorted(self._query.members().items())
                node, member = members[fault.chance % len(members)]
                if fault.kind is not Kind.PAUSE:
                    self._losing.add(node)
                if fault.kind is Kind.KILL:
                    signalled(int(member.about.executor.rpartition(":")[2]), signal.SIGKILL)
                    return
                pid = member.about.pid
                self._last(fault, node, lambda: signalled(pid, signal.SIGSTOP), lambda: signalled(pid, signal.SIGCONT))

    def _last(self, fault: Fault, thing: Hashable, begin: Callable[[], object], end: Callable[[], object]) -> None:
        seconds = LONG_S if fault.kind is Kind.LONG_PAUSE else fault.seconds
        self._lasting.begin(thing, time.monotonic() + seconds, begin, end)


def signalled(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def started(folder: Path, address: str, topic: str, seed: int, run: int, spark: SparkSession) -> Query:
    """Start the windows of a run, with feeds and a number of stages that the run draws."""
    chance = random.Random(f"query {seed} {run}")
    feeds, chain = chance.choice(["one", "hedged", "all"]), chance.choice([1, 2])
    return start_query(
        [feeder.flow(folder, address, topic, chain)], f"faults {seed} {run}", spark, workers=WORKERS, workers_timeout="4min",
        availability=BOUND, feeds=feeds, heartbeat_timeout=f"{HEARTBEAT_S}s", progress_interval="200ms",
    )  # fmt: skip


def one_run(
    lab: Lab, spark: SparkSession, broker: kafka.Broker | None, seed: int, number: int, times: int, console: Console
) -> Run:
    """Strike a query ``times`` times, and compare its results. A run that goes wrong leaves its folder behind."""
    began, run = time.monotonic(), Run(number)
    folder = Path(tempfile.mkdtemp(prefix=f"flux-faults-{seed}-{number}-"))
    topic = f"rows-{seed}-{number}" if broker else ""
    address = broker.address if broker else ""
    if broker:
        kafka.create_topic(address, topic, feeder.EVEN)
    command = [sys.executable, "-m", "tests.netlab.feeder", str(folder), *([address, topic] if broker else [])]
    made = lab.spaces[HUB].start(command, cwd=ROOT)
    query = None
    try:
        query = started(folder, address, topic, seed, number, spark)
        query.wait_until_running(START_S)
        stoppable = {Kind.FEEDER: made.pid}
        if broker:
            assert broker.process is not None
            stoppable[Kind.BROKER] = broker.process.pid
        strikes = Strikes(lab, query, folder, stoppable, console)
        kinds = [kind for kind in Kind if kind is not Kind.BROKER or broker]
        time.sleep(CALM_S)
        try:
            strikes.run(schedule(seed, number, times, kinds))
        finally:
            strikes.heal()
            run.faults = strikes.struck
        time.sleep(CALM_S)
        run.judgement = finished(query, folder, made)
    except (Unfinished, flux.FluxError, subprocess.TimeoutExpired) as error:
        run.failed = f"{type(error).__name__}: {error}"
    finally:
        if query is not None and not run.exact:
            for event in query.events()[-EVENTS:]:
                console.print(f"  {event}", highlight=False)
            console.print(f"  rows and results: {folder}", highlight=False)
        made.kill()
        made.wait(10)
        if query is not None:
            query.stop()
    run.seconds = time.monotonic() - began
    if run.exact:
        shutil.rmtree(folder, ignore_errors=True)
    return run


def finished(query: Query, folder: Path, made: subprocess.Popen[bytes]) -> feeder.Judgement:
    """End the source, wait until all results are there, and compare them. Unfinished: they do not come."""
    (folder / "stop").touch()
    made.wait(DRAIN_S)
    if not (folder / "end").exists():
        raise Unfinished("the source process has not written its end")
    end = int((folder / "end").read_text())
    wanted, limit = feeder.answer(folder, end), time.monotonic() + DRAIN_S
    while not feeder.complete(notes := feeder.notes_in(folder), wanted) and time.monotonic() < limit and query.isActive:
        time.sleep(0.5)
    if (error := query.exception()) is not None:
        raise error
    return feeder.judged(notes, wanted, end)


def main(
    times: Annotated[int, typer.Option(min=1, max=10_000, help="Faults in all.")] = 100,
    seed: Annotated[int, typer.Option(help="The same seed gives the same faults, at about the same times.")] = 1,
    per_run: Annotated[int, typer.Option(min=1, max=200, help="Faults of one run.")] = 20,
    files: Annotated[bool, typer.Option("--files", help="Read files, also where a broker can start.")] = False,
) -> None:
    """Strike queries with real faults, and compare each of their results with DuckDB's."""
    console = Console(highlight=False)
    if reason := why_not():
        console.print(f"There is no network laboratory here: {reason}")
        raise typer.Exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the broker ends with this program
    why = "files are asked for" if files else kafka.missing()
    if not why:
        kafka.jars()  # before the laboratory, from which no repository can be reached
    runs: list[Run] = []
    with Lab() as lab, Cluster(lab) as cluster, contextlib.ExitStack() as stack:
        broker = None if why else stack.enter_context(kafka.Broker(quick=True, host=lab.addresses[HUB]))
        console.print(f"Rows from files: {why}" if broker is None else f"Rows through a topic at {broker.address}")
        spark = cluster.session(**SHIPPED)
        for number in range((times + per_run - 1) // per_run):
            runs.append(one_run(lab, spark, broker, seed, number, min(per_run, times - number * per_run), console))
            console.print(runs[-1].told(), soft_wrap=True)
    found = total(seed, runs)
    print(json.dumps(found), flush=True)
    if not found["exact"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
