"""Kills of executors, of the driver and of everything, one after the other, under a query that writes parquet files.

    make soak                                  # 20 kills of each kind, about half an hour
    make soak WHAT=driver KILLS=5 SEED=7

A program of its own counts the rows of each key (``soak_program.py``); this one kills its processes at random moments, some of
them while the query still recovers from the kill before, and starts the program again on the same location when its driver was
among them. Each life may have other workers and replicas. All the time it looks at the files (``soak_files.py``). Exit code 0:
they have been right at every moment, and are equal to the source at the end. A run that deviates keeps its folder."""

from __future__ import annotations

import enum
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from soak_files import Deviation, Files
from soak_program import EXECUTORS, PROTECTED, ROUND_S, Rounds
from striking import KEYS, PARTITIONS

ROOT = Path(__file__).resolve().parents[2]
#: By which all processes of a run are found, also those whose parents are dead.
MARK = "FLUX_SOAK"
LOOK_S = 0.5
#: A machine under load takes its time: sessions, executors and workers that come again.
PROGRESS_S, GONE_S = 900.0, 180.0
#: Kills of executors after which the query is stopped, and started again with other workers and replicas.
KILLS_OF_A_LIFE = 5
#: Words of the error of a query that cannot go on by itself, or cannot start because an executor is lost just then.
ALL_LOST = "no worker is left, and none has come within"
TOO_FEW = "on different executors, and the"
EXECUTOR, JVM = "CoarseGrainedExecutorBackend", "SparkSubmit"


class What(enum.StrEnum):
    EXECUTOR = "executor"
    DRIVER = "driver"
    EVERYTHING = "everything"


class Life:
    """One run of the program."""

    def __init__(self, folder: Path, number: int, workers: int, protected: int) -> None:
        self._log = folder / f"life-{number}.log"
        self._read = 0
        self.lines: list[dict[str, Any]] = []
        paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        scratch = str(folder / "scratch")
        os.makedirs(scratch, exist_ok=True)
        environment = os.environ | {
            MARK: str(folder), "PYTHONPATH": paths, "TMPDIR": scratch, "FLUX_RUNTIME_DIR": scratch,
            "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={scratch}",
        }  # fmt: skip
        os.chmod(scratch, 0o700)
        with self._log.open("w") as log:
            command = [sys.executable, str(Path(__file__).with_name("soak_program.py"))]
            self.process = subprocess.Popen(
                [*command, str(folder), str(workers), str(protected)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd=ROOT,
            )  # fmt: skip

    def hear(self) -> list[dict[str, Any]]:
        """Read the lines that the life has printed since the last call."""
        text = self._log.read_text(errors="replace")
        whole = text[self._read : text.rfind("\n") + 1]
        self._read += len(whole)
        news = [json.loads(line) for line in whole.splitlines() if line.startswith('{"at"')]
        self.lines += news
        return news

    def said(self, word: str) -> bool:
        return any(word in line for line in self.lines)

    def told(self) -> str:
        return self._log.read_text(errors="replace")


def processes(folder: Path) -> list[psutil.Process]:
    """Find all processes of this run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def running(found: list[psutil.Process], word: str) -> list[psutil.Process]:
    """Choose the processes that run this program."""
    kept = []
    for process in found:
        try:
            if any(word in argument for argument in process.cmdline()):
                kept.append(process)
        except psutil.Error:
            pass
    return kept


def kill(found: list[psutil.Process]) -> None:
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


class Soak:
    """One kind of kill, ``kills`` times."""

    def __init__(self, what: What, kills: int, seed: int, folder: Path, end: float, say: Callable[[str], None]) -> None:
        self.what, self.kills, self.folder, self.end, self.say = what, kills, folder, end, say
        self.random = random.Random(f"{seed} {what}")
        self.files = Files(folder / "rows", KEYS * PARTITIONS)
        self.lives: list[Life] = []
        self.killed = 0
        self.counts: Counter[str] = Counter()

    # ---- the run

    def run(self) -> Iterator[None]:
        """Run the query, and yield after each kill. Raise Deviation for any result that must not be."""
        (self.folder / "rows").mkdir()
        (self.folder / "began").write_text(str(time.time()))
        self._begin_life()
        since_stop = 0
        while self.killed < self.kills:
            self._wait_for_the_moment()
            if self.what is What.EXECUTOR:
                self._kill_an_executor()
                since_stop += 1
                if since_stop == KILLS_OF_A_LIFE and self.killed < self.kills:
                    self._stop()
                    self._begin_life()
                    since_stop = 0
            else:
                self._kill_driver() if self.what is What.DRIVER else self._kill_everything()
                self._begin_life()
            yield
        self._to_the_end()

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def _begin_life(self) -> None:
        workers, protected = self.random.choice((2, 3)), self.random.randrange(len(PROTECTED))
        self.lives.append(Life(self.folder, len(self.lives) + 1, workers, protected))
        self.say(f"life {len(self.lives)}: {workers} workers, protected by {PROTECTED[protected]}")

    def _wait_for_the_moment(self) -> None:
        """Mostly in mid-stream; now and then while the query recovers, or even while Spark still starts."""
        dice = self.random.random()
        if dice < 0.1 and self.killed:
            self._pause(self.random.uniform(0.0, 12.0))
        elif dice < 0.4 and self.killed:
            self._until(lambda: self.life.said("starts"), "session of Spark")
            self._pause(self.random.uniform(0.0, 4.0))
        else:
            due, began = self._age() / ROUND_S, time.monotonic()
            self._until(lambda: self.files.newest_of_all >= due, "new rows of all keys")
            self.say(f"  new rows of all keys after {time.monotonic() - began:.1f} s, {self.files.rows:,} rows in all")
            self._pause(self.random.uniform(0.2, 6.0))

    def _to_the_end(self) -> None:
        """Let the source end a little later than now, so that no reader has passed this point yet."""
        rounds = int((self._age() + 3.0) / ROUND_S)
        made = self.folder / ".end"
        made.write_text(str(rounds))
        made.rename(self.folder / "end")
        self._wait_for_its_end()
        while not any(line.get("through") for line in self.life.lines):
            self._begin_life()
            self._wait_for_its_end()
        self._all_gone()
        self.files.check_through(self._source)

    def _wait_for_its_end(self) -> None:
        self._until(lambda: self.life.process.poll() is not None, "end of the query", may_end=True)
        self._look()
        if self.life.process.returncode:
            self._check_that_all_workers_were_lost()

    def _check_that_all_workers_were_lost(self) -> None:
        """Check that all workers were lost, or too few were left to begin: only for these reasons may a query end by itself, and
        its error says how to go on."""
        told = self.life.told()
        reason = next((reason for reason in (ALL_LOST, TOO_FEW) if reason in told), None)
        if self.what is not What.EXECUTOR or reason is None:
            raise Deviation(
                f"life {len(self.lives)} ended by itself, code {self.life.process.returncode}: {told[-2000:]}"
            )
        self.counts[
            "ends because all workers were lost" if reason == ALL_LOST else "starts with too few executors"
        ] += 1

    def _source(self) -> Iterator[Any]:
        """Read the source directly, without a query."""
        for partition in range(PARTITIONS):
            yield from (batch for batch in Rounds(str(self.folder))(partition, 0) if batch is not None)

    # ---- kills

    def _kill_an_executor(self) -> None:
        alive: list[psutil.Process] = []
        self._until(lambda: alive.extend(running(processes(self.folder), EXECUTOR)) or alive, "executor")
        self._strike(
            [self.random.choice(sorted(alive, key=lambda process: process.pid))], f"1 of {len(alive)} executors"
        )

    def _kill_driver(self) -> None:
        """Kill the driver; its executors find out by themselves, while the next life begins."""
        python = psutil.Process(self.life.process.pid)
        jvm = running(processes(self.folder), JVM)
        which = self.random.choice(("Python", "JVM", "both"))
        if not jvm:  # Spark has not started it yet
            which = "Python"
        self._strike({"Python": [python], "JVM": jvm, "both": [python, *jvm]}[which], f"the driver ({which})")
        if which == "JVM":
            self._until(
                lambda: python.status() == psutil.STATUS_ZOMBIE, "end of a driver without its JVM", may_end=True
            )
        self.life.process.wait()

    def _kill_everything(self) -> None:
        found = processes(self.folder)
        self.random.shuffle(found)
        self._strike(found, "everything")
        self.life.process.wait()
        psutil.wait_procs(found, GONE_S)

    def _strike(self, found: list[psutil.Process], what: str) -> None:
        self.killed += 1
        kill(found)
        pids = " ".join(str(process.pid) for process in found)
        self.say(f"kill {self.killed} of {self.kills} at {self._age():.1f} s: {what}, pids {pids}")

    def _age(self) -> float:
        """Return the age of the source in seconds."""
        return time.time() - float((self.folder / "began").read_text())

    def _stop(self) -> None:
        """Stop the query in order, and wait until all of its processes are gone."""
        self._until(lambda: self.life.said("started"), "query that runs")
        assert self.life.process.stdin is not None
        self.life.process.stdin.close()
        self._wait_for_its_end()
        self._all_gone()

    def _all_gone(self) -> None:
        """Check that every process of the run ends by itself."""
        end = time.monotonic() + GONE_S
        while left := processes(self.folder):
            if time.monotonic() > end:
                raise Deviation(f"left after {GONE_S:g} s: {[' '.join(process.cmdline())[:200] for process in left]}")
            time.sleep(LOOK_S)

    # ---- waiting, and looking meanwhile

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end, "a pause")

    def _until(self, condition: Callable[[], object], what: str, may_end: bool = False) -> None:
        end = time.monotonic() + PROGRESS_S
        while not condition():
            if time.monotonic() > self.end:
                raise Deviation(f"the time is over after {self.killed} kills, while waiting for {what}")
            if time.monotonic() > end:
                raise Deviation(f"no {what} within {PROGRESS_S:g} s: {self.life.told()[-3000:]}")
            if not may_end and self.life.process.poll() is not None:
                self._check_that_all_workers_were_lost()
                self._begin_life()
            self._look()
            time.sleep(0.05 if what == "a pause" else LOOK_S)

    def _look(self) -> None:
        for life in self.lives[-2:]:
            for line in life.hear():
                if "read" in line:
                    self.counts["reads by Spark"] += 1
                    self.files.check_read(line["began"], **line["read"])
                elif "not_read" in line:
                    self.counts["reads that failed with their executor"] += 1
                    if "FileNotFound" in line["not_read"] or "FILE_NOT_EXIST" in line["not_read"]:
                        raise Deviation(f"Spark misses a file: {line['not_read']}")
                self.counts.update(line.get("events", {}))
        self.files.look()


def soak(console: Console, what: What, kills: int, seed: int, limit_s: float) -> bool:
    """Run one kind of kill and show its progress; tell whether all was well."""

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    folder = Path(tempfile.mkdtemp(prefix=f"flux-soak-{what}-"))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
    )
    began, good, deviates = time.monotonic(), False, False
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"kills of {what}", total=kills)
        run = Soak(what, kills, seed, folder, began + limit_s, say)
        try:
            for _ in run.run():
                progress.advance(task)
            good = True
        except Deviation as deviation:
            say(f"DEVIATION: {deviation}")
            deviates = True
        finally:
            kill(processes(folder))
            if not deviates:
                shutil.rmtree(folder, ignore_errors=True)
    more = "".join(f", {name} {times}" for name, times in sorted(run.counts.items()))
    say(
        f"{what}: {run.killed} kills, {len(run.lives)} lives, {run.files.rows:,} rows in {len(run.files.known):,} files, "
        f"{len(run.files.history):,} looks, {time.monotonic() - began:.0f} s{more}"
    )
    say("the files are equal to the source" if good else f"see {folder}; seed {seed}")
    return good


def main(
    what: Annotated[list[What] | None, typer.Option(help="what is killed; default: each in turn")] = None,
    kills: Annotated[int, typer.Option(min=1, help="so many times each")] = 20,
    seed: Annotated[
        int | None, typer.Option(help="of the moments and the choices; default: another one each time")
    ] = None,
    limit_min: Annotated[
        float, typer.Option(help="minutes for each kind of kill; what is not through then has failed")
    ] = 40.0,
) -> None:
    console = Console(highlight=False)
    seed = random.randrange(10_000) if seed is None else seed
    console.print(f"seed {seed}, {EXECUTORS} executors")
    ends = [soak(console, each, kills, seed, limit_min * 60) for each in what or What]
    raise typer.Exit(not all(ends))


if __name__ == "__main__":
    typer.run(main)
