"""A site that falls silent: readings of sensors at four sites, in windows of one second, for each site and over all.

One site is cut off for ten seconds, and an executor is killed meanwhile. With ``availability="3s"`` the windows go on within
three seconds: tentative, marked with ~, and corrected one by one when the site is back. Beside them stand the same windows of
Structured Streaming, which wait for the site, and those of a flow with ``idle``, which go on without it and are wrong for good.

Readings come through a topic of Kafka, if a broker can start here, and otherwise from files. The exit code is 0 only if the
stable windows are those of Spark's batch answer, tentative ones came meanwhile, and none came later than the bound.
``--picture`` draws the windows over all, as they came in each of the three.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from rich.live import Live
from rich.table import Table

import flux
from examples.flights import HEARTBEAT_TIMEOUT, console, options_of, start_spark
from tests.kafka.broker import Broker, create_topic, missing

SITES = ("Aden", "Bern", "Cork", "Doha")
#: The site that is cut off.
SILENT = SITES[-1]
SCHEMA, READINGS = "site STRING, at TIMESTAMP, reading BIGINT", "readings"
#: Readings of a site in a second, and seconds between two deliveries of its forwarder.
RATE, EVERY_S = 40, 0.2
#: The longest delay of a reading, the time after which a site counts as idle, and the bound of results.
DELAY, IDLE, BOUND, BOUND_S = "500 milliseconds", "1 second", "3s", 3.0
#: Seconds from the first reading of a window to the one behind which it is complete: its length and the delay. The bound, and all
#: waits, count from there: no result can come earlier.
WHOLE_S = 1.5
#: Seconds before the site is cut off, until it is back, and until the end; the executor is killed in the middle of the cut.
BEFORE_S, CUT_S, AFTER_S = 8.0, 10.0, 8.0
#: Seconds that the start of the workers may take on a busy machine.
START_S = 180.0
#: Seconds until all results have come out behind the last reading, at most.
WAIT_S = 45.0
#: The longest time until each flow shows the windows of the last seconds: Structured Streaming takes up to half a minute for its
#: first batches, and a comparison that begins meanwhile would be one of starts.
WARM_UP_S, RECENT_S = 120.0, 6
#: Names of the flows on the board: with availability, in Structured Streaming, and with idle.
FLOWS = {"sites", "all", "micro", "idle"}
#: Seconds between two lines about the query if there is no terminal.
SAID_S = 2.0
#: The most windows in the table on the terminal.
SHOWN = 14
#: All sites together, as a key.
ALL = ""


class Window(NamedTuple):
    """A window of a site, or of ``ALL``; ``start`` in seconds since 1970."""

    start: int
    site: str


class Values(NamedTuple):
    readings: int
    total: int


# ---- the sites


class Sites:
    """Four sites with a forwarder each, which brings readings to a topic, if there is one, and to a folder of JSON lines.

    A site that is cut off keeps its readings, and brings all of them when it is back."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self._address = folder, address
        self.made: list[tuple[str, datetime, int]] = []
        #: By window: the time by the clock at which its first reading was brought.
        self.brought: dict[Window, float] = {}
        self._kept: dict[str, list[str]] = {site: [] for site in SITES}
        self._cut: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._files = 0
        for site in SITES:
            (folder / site).mkdir()
        if address:
            from confluent_kafka import Producer

            self._producer = Producer({"bootstrap.servers": address, "linger.ms": 5})

    def start(self) -> None:
        self._thread.start()

    def cut(self, site: str) -> None:
        self._cut.add(site)

    def heal(self, site: str) -> None:
        self._cut.discard(site)

    def end(self) -> int:
        """Stop. Return the end of the last whole window; one more reading of each site, four seconds ahead, lets it end."""
        self._ended.set()
        self._thread.join()
        now = time.time()
        for site in SITES:
            self._read(site, now + 4, 0)
            self._bring(site)
        return int(now)

    def _run(self) -> None:
        chance = random.Random(7)
        while not self._ended.wait(EVERY_S):
            now = time.time()
            for site in SITES:
                count = round(RATE * EVERY_S)
                for number in range(count):
                    self._read(site, now - EVERY_S * (count - 1 - number) / count, chance.randrange(100))
                if site not in self._cut:
                    self._bring(site)

    def _read(self, site: str, at: float, reading: int) -> None:
        moment = datetime.fromtimestamp(at, UTC)
        self.made.append((site, moment, reading))
        self._kept[site].append(
            json.dumps({"site": site, "at": moment.isoformat(timespec="microseconds"), "reading": reading})
        )

    def _bring(self, site: str) -> None:
        lines, self._kept[site] = self._kept[site], []
        now = time.time()
        for each in {int(datetime.fromisoformat(json.loads(line)["at"]).timestamp()) for line in lines}:
            self.brought.setdefault(Window(each, site), now)
            self.brought.setdefault(Window(each, ALL), now)
        if self._address:
            for line in lines:
                self._producer.produce(READINGS, line, partition=SITES.index(site))
            self._producer.flush(10)
        self._files += 1
        hidden = self.folder / f".{self._files}"
        hidden.write_text("".join(f"{line}\n" for line in lines))
        hidden.rename(self.folder / site / f"{self._files:06}.json")

    def source(self, name: str) -> Any:
        """Return a source of all readings: the topic, or the files."""
        if self._address:
            return flux.kafka(READINGS, self._address, format="json", schema=SCHEMA, name=name)
        folders = [str(self.folder / site) for site in SITES]
        schema = pa.schema([("site", pa.string()), ("at", pa.timestamp("us", "UTC")), ("reading", pa.int64())])

        def read(partition: int, start: str | None) -> Iterator[Any]:
            return followed(Path(folders[partition]), start or "", schema)

        return flux.source(read, schema, len(SITES), name, positions=True)


def followed(folder: Path, newest: str, schema: pa.Schema) -> Iterator[Any]:
    """Yield the rows of the files of a folder behind ``newest``, as they come; None: there are none now."""
    while True:
        names = sorted(name for name in os.listdir(folder) if name > newest)
        for name in names:
            rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
            rows = [row | {"at": datetime.fromisoformat(row["at"])} for row in rows]
            newest = name
            yield flux.Positioned(pa.RecordBatch.from_pylist(rows, schema=schema), name)
        if not names:
            yield None


# ---- the windows as they come


class Board(flux.Sink):
    """A sink that writes its calls as lines into its own file, which the program reads: a board that all executors reach."""

    def __init__(self, folder: Path, flow: str) -> None:
        self.folder, self.flow = str(folder), flow

    def open(self, context: flux.SinkContext) -> None:
        # Buffered by line: a line is there as a whole, or not at all.
        self._lines = open(Path(self.folder) / f"{self.flow}-{uuid.uuid4().hex}.jsonl", "w", buffering=1)  # noqa: SIM115

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        self._say("stable", rows=self._rows(batch))

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self._say("tentative", rows=self._rows(batch))

    def undo(self, start: int | None, end: int | None) -> None:
        """Do nothing: windows on the board stay marked until their stable ones come."""

    def close(self) -> None:
        self._lines.close()

    def _say(self, kind: str, rows: list[Any]) -> None:
        print(json.dumps({"flow": self.flow, "kind": kind, "at": time.time(), "rows": rows}), file=self._lines)

    @staticmethod
    def _rows(batch: pa.RecordBatch) -> list[Any]:
        return [
            [int(row["start"].timestamp()), row.get("site", ALL), row["readings"], row["total"]]
            for row in batch.to_pylist()
        ]


@dataclass
class Shown:
    """A window as shown first, and as shown for good. Times are those of the clock."""

    first: Values
    first_at: float
    tentative: bool
    last: Values | None = None
    last_at: float = 0.0


@dataclass
class Boards:
    """All windows of all flows, as they were shown."""

    windows: dict[str, dict[Window, Shown]] = field(default_factory=dict)
    #: Windows that had two stable values.
    contradictions: list[Window] = field(default_factory=list)

    def note(self, flow: str, kind: str, at: float, rows: list[Any]) -> None:
        windows = self.windows.setdefault(flow, {})
        for start, site, *values in rows:
            window, now = Window(start, site), Values(*values)
            shown = windows.setdefault(window, Shown(now, at, kind == "tentative"))
            if kind != "stable":
                continue
            if shown.last is None:
                shown.last, shown.last_at = now, at
            elif shown.last != now:
                self.contradictions.append(window)

    def has_windows_since(self, start: float) -> bool:
        """Return whether each flow has shown a window that begins then or later."""
        return all(any(window.start >= start for window in self.of(flow)) for flow in FLOWS)

    def of(self, flow: str) -> dict[Window, Shown]:
        return dict(self.windows.get(flow, {}))


def follow_boards(folder: Path, boards: Boards, ended: threading.Event) -> None:
    """Read the files of all boards as they grow."""
    read: dict[Path, int] = {}
    while not ended.wait(0.05):
        for path in folder.glob("*.jsonl"):
            with path.open() as lines:
                lines.seek(read.get(path, 0))
                for line in lines:
                    if not line.endswith("\n"):
                        break
                    read[path] = read.get(path, 0) + len(line)
                    boards.note(**json.loads(line))


# ---- the three queries


def windows_of(readings: Any, *key: str) -> Any:
    counted, summed = F.count("*").alias("readings"), F.sum("reading").alias("total")
    return readings.groupBy(F.window("at", "1 second"), *key).agg(counted, summed)


def started(sites: Sites, folder: Path, workers: int) -> flux.Query:
    """Start the windows with availability, and beside them those over all that leave an idle site out."""
    readings = sites.source("readings").withWatermark("at", DELAY)
    hurried = sites.source("with idle").withWatermark("at", DELAY, idle=IDLE)
    kept = {"replicas": 2, "partitions": 2}
    columns = ("window.start", "readings", "total")
    of_sites = windows_of(readings, "site").withStage(availability=BOUND, **kept).select("site", *columns)
    over_all = windows_of(readings).withStage(availability=BOUND, replicas=2).select(*columns)
    idle = windows_of(hurried).withStage(replicas=2).select(*columns)
    flows = {"sites": of_sites, "all": over_all, "idle": idle}
    return flux.start(
        *(flow.to(Board(folder, name)) for name, flow in flows.items()),
        workers=workers, workers_timeout="3min", progress_interval="200ms", heartbeat_timeout=HEARTBEAT_TIMEOUT,
    )  # fmt: skip


def start_micro_batches(spark: SparkSession, folder: Path, boards: Boards) -> Any:
    """Start the same windows over all in Structured Streaming, over the files. Its watermark is that of the slowest site."""
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    sites = [spark.readStream.schema(SCHEMA).json(str(folder / site)).withWatermark("at", DELAY) for site in SITES]
    readings = sites[0]
    for each in sites[1:]:
        readings = readings.union(each)

    def show(batch: DataFrame, number: int) -> None:
        rows = [[int(row.start.timestamp()), ALL, row.readings, row.total] for row in batch.collect()]
        boards.note("micro", "stable", time.time(), rows)

    found = windows_of(readings).select("window.start", "readings", "total")
    return found.writeStream.foreachBatch(show).trigger(processingTime="1 second").start()


def kill_an_executor(query: flux.Query) -> None:
    """Kill the executor of a worker, once every partition has both of its replicas."""
    limit = time.monotonic() + WAIT_S
    while query.isActive and (query.lastProgress is None or query.lastProgress["underReplicated"]):
        if time.monotonic() > limit:
            raise TimeoutError(
                f"expected two replicas of each partition within {WAIT_S:.0f} s; status: {query.status['message']}"
            )
        time.sleep(0.02)
    worker, member = next(iter(query.members().items()))
    console.print(f"[bold]Killing executor {member.about.executor}, with worker {worker}[/bold]")
    os.kill(int(member.about.executor.rpartition(":")[2]), signal.SIGKILL)


# ---- the run


@dataclass
class Times:
    """The course of the run, by the clock."""

    began: float = 0.0
    cut: float = 0.0
    killed: float = 0.0
    healed: float = 0.0


def drive(sites: Sites, query: flux.Query, times: Times, show: Callable[[], None]) -> int:
    """Cut the site off, kill an executor and heal, while readings come. Return the end of the last whole window."""
    times.began = time.time()
    _until(times.began + BEFORE_S, show)
    sites.cut(SILENT)
    times.cut = time.time()
    _until(times.cut + CUT_S / 2, show)
    times.killed = time.time()
    kill_an_executor(query)
    _until(times.cut + CUT_S, show)
    sites.heal(SILENT)
    times.healed = time.time()
    _until(times.healed + AFTER_S, show)
    return sites.end()


def _until(end: float, show: Callable[[], None]) -> None:
    while time.time() < end:
        show()
        time.sleep(0.2)


def answer(spark: SparkSession, sites: Sites, begin: int, end: int) -> dict[Window, Values]:
    """Return Spark's batch answer: the windows from ``begin`` to ``end``, of each site and over all."""
    readings = spark.createDataFrame(sites.made, SCHEMA)
    rows = [
        *windows_of(readings, "site").select("window.start", "site", "readings", "total").collect(),
        *windows_of(readings).select("window.start", F.lit(ALL), "readings", "total").collect(),
    ]
    found = {Window(int(start.timestamp()), site): Values(*values) for start, site, *values in rows}
    return {window: values for window, values in found.items() if begin <= window.start < end}


def stable(boards: Boards, flows: tuple[str, ...], begin: int, end: int) -> dict[Window, Values]:
    return {
        window: shown.last
        for flow in flows
        for window, shown in boards.of(flow).items()
        if begin <= window.start < end and shown.last is not None
    }


def latest(boards: Boards, sites: Sites, begin: int, end: int) -> float:
    """Return the longest time from the reading that would complete a window to its first result."""
    return max(
        (
            shown.first_at - sites.brought[window] - WHOLE_S
            for flow in ("sites", "all")
            for window, shown in boards.of(flow).items()
            if begin <= window.start < end
        ),
        default=0.0,
    )


# ---- the table and the picture


def table(boards: Boards, status: str) -> Table:
    """Return the newest windows of each site and over all. ~ marks tentative numbers, and a second number corrects the first."""
    made = Table(title=f"Readings in windows of one second, within {BOUND}", caption=status)
    made.add_column("window")
    for heading in (*SITES, "all sites", "Structured Streaming", "with idle"):
        made.add_column(heading, justify="right")
    of = {flow: boards.of(flow) for flow in ("sites", "all", "micro", "idle")}
    starts = sorted({window.start for windows in of.values() for window in windows})[-SHOWN:]
    for start in starts:
        cells = [_cell(of["sites"].get(Window(start, site))) for site in SITES]
        cells += [_cell(of[flow].get(Window(start, ALL))) for flow in ("all", "micro", "idle")]
        made.add_row(datetime.fromtimestamp(start).strftime("%H:%M:%S"), *cells)
    return made


def _cell(shown: Shown | None) -> str:
    if shown is None:
        return ""
    if shown.last is None:
        return f"[yellow]~{shown.first.readings}[/yellow]"
    if shown.tentative and shown.first != shown.last:
        return f"[dim]~{shown.first.readings}[/dim] [green]{shown.last.readings}[/green]"
    return str(shown.last.readings)


def draw(path: Path, boards: Boards, answers: dict[Window, Values], times: Times) -> None:
    """Draw the time and the number of readings of each window over all, for each of the three flows."""
    from matplotlib.figure import Figure  # without pyplot: no window, nothing global

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    above, below = figure.subplots(1, 2)
    styles = {
        "all": ("Flux, availability 3 s", "C0"),
        "micro": ("Structured Streaming", "C1"),
        "idle": ("Flux, idle 1 s", "C3"),
    }
    for flow, (label, color) in styles.items():
        windows = sorted((window.start, shown) for window, shown in boards.of(flow).items() if window in answers)
        ends = [start + 1 - times.began for start, _ in windows]
        above.plot(
            [shown.first_at - times.began for _, shown in windows], ends, "o-", color=color, label=label, markersize=3
        )
        if flow == "all":
            below.plot(
                ends,
                [shown.first.readings for _, shown in windows],
                "o:",
                color=color,
                label="Flux, at first",
                markersize=3,
            )
        final = [shown.last.readings if shown.last else float("nan") for _, shown in windows]
        below.plot(ends, final, "-" if flow != "idle" else "--", color=color, label=f"{label}, in the end")
    for axes in (above, below):
        axes.axvspan(times.cut - times.began, times.healed - times.began, color="0.9", label="a site is cut off")
        axes.grid(visible=True, alpha=0.3)
    above.axvline(times.killed - times.began, color="0.4", linestyle=":", label="an executor is killed")
    above.set(xlabel="seconds of the run", ylabel="end of the newest window", title="When each window came")
    below.set(xlabel="end of the window", ylabel="readings in the window", ylim=(0, None), title="Its answer")
    above.legend(frameon=False, fontsize=8)
    below.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110)


def verdict(boards: Boards, sites: Sites, answers: dict[Window, Values], begin: int, end: int) -> bool:
    """Print the results of the run, and return whether the answer is exact and no window was late."""
    found, waited = stable(boards, ("sites", "all"), begin, end), latest(boards, sites, begin, end)
    shown = [each for flow in ("sites", "all") for window, each in boards.of(flow).items() if window in answers]
    tentative = [each for each in shown if each.tentative]
    changed = sum(each.first != each.last for each in tentative)
    equal = found == answers and not boards.contradictions
    console.print(
        f"Flux: {len(found)} windows, {len(tentative)} of them tentative at first, {changed} of these corrected; Spark's batch "
        f"answer: {'equal' if equal else 'DIFFERENT'}"
    )
    console.print(f"The longest wait of a window behind its end and the delay was {waited:.2f} s, within {BOUND}")
    over_all = {window: values for window, values in answers.items() if window.site == ALL}
    for flow, name in (("micro", "Structured Streaming"), ("idle", "With idle")):
        mine = stable(boards, (flow,), begin, end)
        wrong = sum(mine.get(window) != values for window, values in over_all.items())
        waits = [
            each.first_at - sites.brought[window] - WHOLE_S
            for window, each in boards.of(flow).items()
            if window in over_all
        ]
        console.print(
            f"{name}: longest wait {max(waits, default=0.0):.2f} s, {wrong} of {len(over_all)} windows wrong for good"
        )
    return equal and bool(tentative) and waited <= BOUND_S


def run(spark: SparkSession, address: str, folder: Path, workers: int, picture: Path | None) -> int:
    boards, times, ended = Boards(), Times(), threading.Event()
    (folder / "boards").mkdir()
    sites = Sites(folder, address)
    query = started(sites, folder / "boards", workers)
    threading.Thread(target=follow_boards, args=(folder / "boards", boards, ended), daemon=True).start()
    micro = start_micro_batches(spark, folder, boards)
    status, said_at = "", 0.0
    try:
        query.wait_until_running(START_S)
        with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:

            def show() -> None:
                nonlocal status, said_at
                said = query.status["message"]
                if live is not None:
                    live.update(table(boards, said), refresh=True)
                elif said != status and time.time() > said_at + SAID_S:
                    console.print(said)
                    status, said_at = said, time.time()

            sites.start()
            limit = time.time() + WARM_UP_S
            while query.isActive and time.time() < limit and not boards.has_windows_since(time.time() - RECENT_S):
                _until(time.time() + 1, show)
            end = drive(sites, query, times, show)
            begin = int(times.began) + 1
            answers = answer(spark, sites, begin, end)
            over_all = {window for window in answers if window.site == ALL}
            limit = time.time() + WAIT_S
            while query.isActive and time.time() < limit:
                show()
                micro_there = {window for window in boards.of("micro") if window in over_all}
                if stable(boards, ("sites", "all"), begin, end).keys() == answers.keys() and micro_there == over_all:
                    break
                time.sleep(0.2)
        console.print(table(boards, query.status["message"]))
        for event in query.events():
            if event.kind in ("tentative", "loss"):
                console.print(f"{event}")
    finally:
        ended.set()
        micro.stop()
        query.stop()
    if (error := query.exception()) is not None:
        raise error
    if picture is not None:
        draw(picture, boards, answers, times)
        console.print(f"Picture: {picture}")
    return 0 if verdict(boards, sites, answers, begin, end) else 1


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--files", action="store_true", help="read files, also where a broker can start")
    parser.add_argument("--picture", type=Path, default=None, help="write the picture here")
    arguments = parser.parse_args()
    why = "files are asked for" if arguments.files else missing()
    with tempfile.TemporaryDirectory(prefix="flux-sites-") as folder, contextlib.ExitStack() as stack:
        address = "" if why else stack.enter_context(Broker(quick=True)).address
        if address:
            create_topic(address, READINGS, len(SITES))
        console.print(f"Readings {f'from files: {why}' if why else f'through a topic at {address}'}")
        console.print(f"Starting Spark ({arguments.master})")
        spark = start_spark(arguments.master)
        try:
            return run(spark, address, Path(folder), arguments.workers, arguments.picture)
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
