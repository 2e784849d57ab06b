"""What ``make test`` runs, layer by layer. ``python tests/run.py NAME...`` runs some of the layers, ``--long`` what
``make test-long`` runs.

Layers that wait much of the time run beside each other, in lanes; the layers of one lane follow one another. The simulation
computes for minutes and goes by a clock of its own. It runs beside the lanes, at the priority that only takes time nobody else
wants (``SCHED_IDLE``): a test that wakes up has the core at once. Asked for alone, it has the machine for itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # run as a program, it finds its folder alone
from tests import java_archive  # noqa: E402

BIN = Path(sys.executable).parent
PYTEST = [str(BIN / "pytest"), "-q", "-p", "no:cacheprovider", "--durations=12", "--durations-min=4"]
SHORT = [*PYTEST, "-m", "not long"]

#: Files of the simulation that a second process runs, so that both cores have something to do when the lanes are through.
SECOND_OF_SIMULATION = ["tests/simulation/test_broken_variants.py", "tests/simulation/test_numbered.py"]

LAYERS = {
    "lint": [
        [str(BIN / "ruff"), "check", "--quiet", "."],
        [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
        [str(BIN / "mypy")],
        [str(BIN / "lint-imports"), "--no-cache"],
    ],
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
        ],
    ],
    "laws": [[*SHORT, "tests/laws"]],
    "kernels": [[*SHORT, "benchmarks", "--benchmark-disable"]],
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
#: What ``make test-long`` runs: tests with the marker ``long``, and every run of the simulation that a test has.
LONG = {
    "jobs and benchmarks": [
        [*PYTEST, "tests/spark", "tests/flux", "tests/controller", "-m", "long", "--timeout=1200"],
    ],
    "more of kafka": [[*PYTEST, "tests/kafka", "-m", "long", "--timeout=1200"]],
    "all of the simulation": [[*PYTEST, "tests/simulation", "--timeout=7200"]],
}
#: Commands of these layers run at once: those of lint are short, those of the simulation compute, one on each
#: core, and those of the others wait much of the time.
AT_ONCE = ("lint", "unit", "spark", "simulation")
#: Layers of different lanes run beside each other. What is in no lane runs before them, alone.
LANES = (("spark",), ("unit", "laws", "kernels", "kafka"))
#: Begins with the lanes, and ends last.
BESIDE = "simulation"


class Command:
    """A process. What it prints is kept until it is through where another prints meanwhile (``aside``)."""

    def __init__(self, command: list[str], aside: bool = False, idle: bool = False) -> None:
        self._output = tempfile.TemporaryFile() if aside else None  # noqa: SIM115
        self.process = psutil.Popen(
            command, cwd=ROOT, stdout=self._output, stderr=self._output, preexec_fn=be_idle if idle else None
        )

    def wait(self) -> bool:
        """Wait for its end; return whether all was well."""
        return self.process.wait() == 0

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


def be_idle_no_more(process: psutil.Process) -> None:
    """As this process is: others may use the machine, too, and the rest would wait for all that they compute."""
    for each in [process, *process.children(recursive=True)]:
        try:
            os.sched_setscheduler(each.pid, os.sched_getscheduler(0), os.sched_param(0))
        except (AttributeError, OSError):
            pass  # as above, or it has ended meanwhile


class Layers:
    """Runs layers, and knows how they ended: whether all was well, and after how many seconds."""

    def __init__(self, commands: dict[str, list[list[str]]]) -> None:
        self.results: dict[str, tuple[bool, float]] = {}
        self._commands = commands
        self._printing = threading.Lock()

    def run(self, wanted: list[str]) -> None:
        """Run the layers without a lane, then all lanes at once and the simulation beside them."""
        lanes = [lane for each in LANES if (lane := [name for name in each if name in wanted])]
        for name in wanted:
            if not any(name in lane for lane in lanes) and (name != BESIDE or not lanes):
                self._run(name)
        if not lanes:
            return
        if "spark" in wanted or "kafka" in wanted:
            java_archive.make()
        began = time.monotonic()
        beside = [Command(each, aside=True, idle=True) for each in self._commands[BESIDE] if BESIDE in wanted]
        threads = [threading.Thread(target=self._run_lane, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for command in beside:
            be_idle_no_more(command.process)
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
            self.results[name] = all(ends), time.monotonic() - began
            if header:
                print(f"\n=== {name}", flush=True)
            for command in running:
                command.show()


def machine_s() -> float:
    """Return the seconds for which the cores of the machine have worked, for whatever process."""
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
    began, worked, layers = time.monotonic(), machine_s(), Layers(commands)
    layers.run(names or list(commands))
    print("\n=== layers")
    for name, (good, seconds) in layers.results.items():
        print(f"{name:22} {'passed' if good else 'FAILED'} in {seconds:.0f} s")
    cores = f"{machine_s() - worked:.0f} s of work on {psutil.cpu_count()} cores"
    print(f"{'together':22} {time.monotonic() - began:.0f} s, {cores}")
    return 0 if all(good for good, _ in layers.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
