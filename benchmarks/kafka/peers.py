"""The peers of Flux: Spark's real-time mode, its micro-batches, and Kafka Streams. Each runs in one or two processes of its own.

Their jars come from Maven. If these cannot be had, ``Unavailable`` says why, and the benchmark goes on without that peer.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: Two instances of Kafka Streams share the partitions, or each has the standbys of the other.
INSTANCES = 2
START_S, END_S, BACKLOG_S, COMPILE_S = 180.0, 30.0, 600.0, 120.0
#: Kafka Streams as fast as it goes, and with what Flux keeps to: each record once, and a second copy of the state.
STREAMS, STREAMS_ONCE = "kstreams", "kstreams_exactly_once"
_NAMES = {
    "rtm": "Spark's real-time mode", "micro": "Spark's micro-batches", STREAMS: "Kafka Streams", STREAMS_ONCE: "Kafka Streams",
}  # fmt: skip
_GUARANTEES = {
    "rtm": "at least once", "micro": "at least once", STREAMS: "at least once, no standby",
    STREAMS_ONCE: "exactly once, one standby",
}  # fmt: skip
#: ``processing.guarantee`` and ``num.standby.replicas``.
_STREAMS_SETTINGS = {STREAMS: ("at_least_once", "0"), STREAMS_ONCE: ("exactly_once_v2", "1")}


class Unavailable(Exception):
    """A peer cannot be run here."""


@dataclass(frozen=True)
class Peer:
    """A running peer. ``strike`` kills one of its processes; all of its processes come from those with the ids ``roots``."""

    strike: Callable[[], None]
    roots: Sequence[int]


class Child:
    """A process that ends when its standard input does, with its output."""

    def __init__(self, command: list[str], end_s: float = END_S) -> None:
        self._end_s = end_s
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # close closes it
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment()
        )
        self._lines: Queue[str | None] = Queue()
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def wait_for(self, wanted: Callable[[str], bool], limit_s: float) -> str:
        end = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(end - time.monotonic(), 0))
            except Empty:
                raise TimeoutError(f"{self.process.args[:6]!r} is not there after {limit_s:g} s") from None  # type: ignore[index]
            if line is None:
                self._log.seek(0)
                raise RuntimeError(f"{self.process.args[:6]!r} has ended:\n{self._log.read()[-2000:]}")  # type: ignore[index]
            if wanted(line):
                return line

    def close(self) -> None:
        """End the process and all its descendants."""
        family = _family(self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(family, timeout=self._end_s / 3)
        for process in left:
            process.kill()
        self._log.close()


def environment() -> dict[str, str]:
    """Make an environment in which a child process finds these modules, wherever they are."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *([before] if before else [])])}


def _family(pid: int) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    except psutil.NoSuchProcess:
        return []


def broker() -> Any:
    """Import the module that starts a broker and fetches jars. It belongs to the tests, which are not installed."""
    if str(ROOT) not in sys.path and (ROOT / "tests" / "kafka" / "broker.py").exists():
        sys.path.append(str(ROOT))
    try:
        from tests.kafka import broker as found
    except ImportError as error:
        raise Unavailable(f"it is started from a checkout of the project, and this is none: {error}") from error
    if why := found.missing():
        raise Unavailable(why)
    return found


def _jars(pom: str) -> Path:
    try:
        found: Path = broker().jars(HERE / pom)
        return found
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from error


def title(peer: str) -> str:
    return f"{_NAMES[peer]} ({_GUARANTEES[peer]})"


def guarantee(peer: str) -> str:
    return _GUARANTEES[peer]


def runs_of(peers: Sequence[str], fault: bool) -> list[str]:
    """Return the runs for the peers that were asked for: Kafka Streams runs with both guarantees, or with a fault exactly once
    only, because it loses its state otherwise."""
    of_streams = [STREAMS_ONCE] if fault else [STREAMS, STREAMS_ONCE]
    return [run for peer in peers for run in (of_streams if peer == STREAMS else [peer])]


@contextmanager
def running(peer: str, address: str, given: str, out: str) -> Iterator[Peer]:
    """Run a peer from topic to topic during the block."""
    with ExitStack() as ends:
        if peer in _STREAMS_SETTINGS:
            yield _streams(ends, address, given, out, *_STREAMS_SETTINGS[peer])
        else:
            command = _spark(address, given, out, peer)
            child = Child(command)
            ends.callback(child.close)
            child.wait_for(lambda line: '"running"' in line, START_S)
            yield Peer(lambda: _kill_executor(child.process.pid), [child.process.pid])


def backlog(address: str, given: str, rows: int) -> int:
    """Measure the rows per second of micro-batches."""
    child = Child([*_spark(address, given, "-", "backlog"), str(rows)])
    try:
        return int(json.loads(child.wait_for(lambda line: '"rows_per_s"' in line, BACKLOG_S))["rows_per_s"])
    finally:
        child.close()


def _spark(address: str, given: str, out: str, mode: str) -> list[str]:
    jars = _jars("spark-kafka-pom.xml")
    return [sys.executable, "-m", "benchmarks.kafka.spark_count", address, str(jars), given, out, mode]


def _kill_executor(pid: int) -> None:
    for process in _family(pid):
        if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
            process.send_signal(signal.SIGKILL)
            return
    raise RuntimeError("Spark has no executor that could be killed")


def _streams(ends: ExitStack, address: str, given: str, out: str, guarantee: str, standbys: str) -> Peer:
    folder = tempfile.mkdtemp(prefix="flux-bench-")
    ends.callback(shutil.rmtree, folder, ignore_errors=True)
    path = f"{_jars('kafka-streams-pom.xml')}/*{os.pathsep}{_compiled(folder)}"
    children = []
    for number in range(INSTANCES):
        child = Child(
            [broker().java(), "-Xmx384m", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", path,
             "Count", address, given, out, given, f"{folder}/{number}", guarantee, standbys]
        )  # fmt: skip
        ends.callback(child.close)
        children.append(child)
    for child in children:
        child.wait_for(lambda line: line == "RUNNING", START_S)
    return Peer(children[0].process.kill, [child.process.pid for child in children])


def _compiled(folder: str) -> str:
    compiler = str(Path(broker().java()).with_name("javac")) if os.sep in broker().java() else "javac"
    command = [compiler, "-cp", f"{_jars('kafka-streams-pom.xml')}/*", "-d", folder, str(HERE / "Count.java")]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
    except FileNotFoundError as error:
        raise Unavailable("the compiler of Java (javac) is missing, which Kafka Streams needs") from error
    except subprocess.SubprocessError as error:
        raise Unavailable(f"Count.java cannot be compiled: {getattr(error, 'stderr', '') or error}") from error
    return folder
