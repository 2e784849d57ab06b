"""The runner of ``make test``, layer by layer. ``python tests/run.py NAME...`` runs some of the layers, ``--long`` the layers of
``make test-long``.

Layers that wait much of the time run beside each other, in lanes; the layers of one lane follow one another. The simulation
computes for minutes and goes by a clock of its own. It begins first and runs beside all others, at the priority that gets only
idle time of the cores (``SCHED_IDLE``): a test that wakes up has the core at once. Asked for alone, the simulation has the whole
machine.

At the end it prints a timeline: when each layer ran, its work in seconds of a core, and how busy the cores were meanwhile. A
layer whose work is small may wait beside others; cores that rest before the end ask for another order of the layers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # run as a program, it finds its folder alone
from tests import java_archive  # noqa: E402

BIN = Path(sys.executable).parent
PYTEST = [str(BIN / "pytest"), "-q", "-p", "no:cacheprovider", "--durations=12", "--durations-min=4"]
#: Waits for descendants, too.
WAITED = [sys.executable, str(ROOT / "tests" / "waited.py")]
SHORT = [*PYTEST, "-m", "not long"]

#: Files of the simulation that a second process runs: half of the work in seconds of a core, so that both cores have something
#: to do until the end.
SECOND_OF_SIMULATION = [
    f"tests/simulation/test_{name}.py"
    for name in ("balance", "broken_variants", "claims", "event_time", "kills", "numbered", "reach", "timers")
]

LAYERS = {
    "lint": [
        [str(BIN / "ruff"), "check", "--quiet", "."],
        [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
        [str(BIN / "mypy")],
        [str(BIN / "lint-imports"), "--no-cache"],
    ],
    # A process takes eight seconds of a core until it has loaded everything, so there are few of them.
    "unit": [
        [*SHORT, "tests/flux", "tests/benchmarks"],
        [
            *SHORT,
            "tests/partitioning",
            "tests/controller",
            "tests/transcripts",
            "tests/test_documents.py",
            "tests/test_language.py",
            "tests/test_packaging.py",
            "tests/laws",
            "tests/netlab",
            "benchmarks",
            "--benchmark-disable",
        ],
    ],
    "spark": [
        [*PYTEST, "tests/spark", "-m", "not long and not second"],
        [*PYTEST, "tests/spark", "-m", "not long and second"],
    ],
    "kafka": [[*SHORT, "tests/kafka", "--timeout=240"]],
    "simulation": [
        [*SHORT, "tests/simulation", *(f"--ignore={file}" for file in SECOND_OF_SIMULATION), "--timeout=3600"],
        [*SHORT, *SECOND_OF_SIMULATION, "--timeout=3600"],
    ],
}
#: The share of the random examples of properties in ``make test`` (``tests/conftest.py``).
EXAMPLES_SHARE = 0.25
#: The work of ``make test-long``: tests with the marker ``long``, all examples of properties, and every run of the simulation
#: that a test has.
LONG = {
    "jobs and benchmarks": [
        [*PYTEST, "tests/spark", "tests/flux", "tests/controller", "tests/netlab", "-m", "long", "--timeout=1200"],
        [*PYTEST, "benchmarks", "--benchmark-disable", "-m", "long", "--timeout=1200"],
    ],
    "all examples of properties": [
        [
            *PYTEST,
            "tests/flux",
            "tests/laws",
            "tests/partitioning",
            "tests/controller",
            "tests/kafka",
            "-m",
            "hypothesis",
            "--timeout=1200",
        ],
    ],
    "more of kafka": [[*PYTEST, "tests/kafka", "-m", "long", "--timeout=1200"]],
    "all of the simulation": [[*PYTEST, "tests/simulation", "--timeout=7200"]],
}
#: Commands of these layers run at once: those of lint are short, those of the simulation compute, one on each
#: core, and those of the others wait much of the time.
AT_ONCE = ("lint", "unit", "spark", "simulation")
#: Layers of different lanes run beside each other. A layer that is in no lane runs before them, alone.
LANES = (("spark",), ("kafka",), ("unit",))
#: Begins first, and ends last.
BESIDE = "simulation"
#: Columns of the timeline.
COLUMNS = 60
#: How often the work of the machine is noted for it.
NOTE_S = 1.0


class Command:
    """A process. Its output is kept until its end where another prints meanwhile (``aside``)."""

    def __init__(self, command: list[str], aside: bool = False, idle: bool = False) -> None:
        self._output = tempfile.TemporaryFile() if aside else None  # noqa: SIM115
        self.process = subprocess.Popen(
            [*WAITED, *command], cwd=ROOT, stdout=self._output, stderr=self._output,
            preexec_fn=be_idle if idle else None,
        )  # fmt: skip
        #: Work of the process and of all its descendants, JVMs of Spark among them.
        self.work_s = 0.0

    def wait(self) -> bool:
        """Wait for its end; return whether all was well."""
        if self.process.returncode is None:
            _, status, usage = os.wait4(self.process.pid, 0)
            self.process.returncode = os.waitstatus_to_exitcode(status)
            self.work_s = usage.ru_utime + usage.ru_stime
        return self.process.returncode == 0

    def show(self) -> None:
        """Print the output that was kept aside."""
        if self._output is not None:
            self._output.seek(0)
            sys.stdout.buffer.write(self._output.read())
            sys.stdout.flush()
            self._output.close()


def be_idle() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or a container that does not allow it
        os.nice(19)


def be_idle_no_more(pid: int) -> None:
    """Give a process tree the priority of this process: at the idle one, the rest of the layer would wait for all other work of
    the machine."""
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        try:
            os.sched_setscheduler(each.pid, os.sched_getscheduler(0), os.sched_param(0))
        except (AttributeError, OSError):
            pass  # as above, or it has ended meanwhile


@dataclass(frozen=True)
class Passed:
    """A layer that is through, with its begin and its end by ``time.monotonic``."""

    good: bool
    began: float
    ended: float
    work_s: float


class Timeline:
    """The work of all cores over time."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._notes: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._note()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while not self._over.wait(NOTE_S):
            self._note()

    def _note(self) -> None:
        self._notes.append((time.monotonic(), machine_s()))

    def end(self) -> None:
        self._over.set()
        self._note()

    @property
    def seconds(self) -> float:
        return self._notes[-1][0] - self.began

    @property
    def work_s(self) -> float:
        return self._notes[-1][1] - self._notes[0][1]

    def bar(self, one: Passed) -> str:
        """Draw when a layer ran."""
        begin, end = (round((at - self.began) / self.seconds * COLUMNS) for at in (one.began, one.ended))
        return " " * begin + "=" * max(end - begin, 1)

    def busy(self) -> str:
        """Draw how many tenths of the cores were busy, 9 for all."""
        edges = np.linspace(0.0, self.seconds, COLUMNS + 1) + self.began
        work = np.diff(np.interp(edges, *zip(*self._notes, strict=True)))
        share = work / (self.seconds / COLUMNS * (psutil.cpu_count() or 1))
        return "".join(str(min(int(10 * each), 9)) for each in share)


class Layers:
    """A runner of layers, with their results."""

    def __init__(self, commands: dict[str, list[list[str]]]) -> None:
        self.results: dict[str, Passed] = {}
        self._commands = commands
        self._printing = threading.Lock()

    def run(self, wanted: list[str]) -> None:
        """Run the layers without a lane, then all lanes at once. The simulation runs beside all of them, and the archive of
        classes is made beside the first layers: a core that rests at the beginning is missing at the end."""
        lanes = [lane for each in LANES if (lane := [name for name in each if name in wanted])]
        began = time.monotonic()
        commands = self._commands[BESIDE] if lanes and BESIDE in wanted else []
        beside = [Command(each, aside=True, idle=True) for each in commands]
        archive = threading.Thread(target=java_archive.make)
        if "spark" in wanted or "kafka" in wanted:
            archive.start()
        for name in wanted:
            if not any(name in lane for lane in lanes) and (name != BESIDE or not lanes):
                self._run(name)
        if archive.ident is not None:
            archive.join()
        threads = [threading.Thread(target=self._run_lane, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for command in beside:
            be_idle_no_more(command.process.pid)
        if beside:
            self._end(BESIDE, beside, began)

    def _run_lane(self, lane: list[str]) -> None:
        for name in lane:
            self._run(name, aside=True)

    def _run(self, name: str, aside: bool = False) -> None:
        began = time.monotonic()
        running: list[Command] = []
        if not aside:
            print(f"\n=== {name}", flush=True)
        for command in self._commands[name]:
            running.append(Command(command, aside))
            if name not in AT_ONCE:
                running[-1].wait()
        self._end(name, running, began, header=aside)

    def _end(self, name: str, running: list[Command], began: float, header: bool = True) -> None:
        ends = [command.wait() for command in running]
        with self._printing:
            work_s = sum(command.work_s for command in running)
            self.results[name] = Passed(all(ends), began, time.monotonic(), work_s)
            if header:
                print(f"\n=== {name}", flush=True)
            for command in running:
                command.show()


def machine_s() -> float:
    """Return the seconds for which the cores of the machine have worked, for all processes."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def main(names: list[str]) -> int:
    long = "--long" in names
    names = [name for name in names if name != "--long"]
    commands = LONG if long else LAYERS
    unknown = [name for name in names if name not in commands]
    if unknown:
        print(f"no layer {', '.join(unknown)}; there are {', '.join(commands)}")
        return 2
    if long:
        os.environ["FLUX_TEST_LONG"] = "1"
    else:
        os.environ["FLUX_TEST_EXAMPLES"] = str(EXAMPLES_SHARE)
    timeline, layers = Timeline(), Layers(commands)
    layers.run(names or list(commands))
    timeline.end()
    print("\n=== layers")
    for name, one in layers.results.items():
        took = f"{'passed' if one.good else 'FAILED'} in {one.ended - one.began:.0f} s, {one.work_s:.0f} s of work"
        print(f"{name:22} {took:34} {timeline.bar(one)}")
    together = f"{timeline.seconds:.0f} s, {timeline.work_s:.0f} s of work on {psutil.cpu_count()} cores"
    print(f"{'together':22} {together:34} {timeline.busy()}")
    return 0 if all(one.good for one in layers.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
