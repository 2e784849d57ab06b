"""A running query gets stages and sinks, and loses some, while executors are killed. Spark says the same of the rows from each
beginning on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset as datasets
import pytest
from growing_lives import BEHIND_SOURCE
from pyspark.sql import functions as F  # noqa: N812
from striking import KEYS, PARTITIONS, ROWS, SEEN, WAIT_S, Seen, rounds_until_told, rows_in, strike, tell, until

import flux

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("nothing_left_behind"),
]

ROOT = Path(__file__).resolve().parents[2]
#: Seconds without a line after which a program stands still. A start of Spark on a machine under load is the longest silence.
SILENT_S = 400.0

counted = flux.stage(name="Seen", key="key", partitions=4, replicas=2, schema=SEEN)(Seen)


class Since(flux.Aggregate):
    """The rows of each key since the stage began."""

    first = flux.min("sequence")
    last = flux.max("sequence")
    n = flux.count()


def since(name: str) -> Any:
    return flux.stage(name=name, key="key", partitions=3, replicas=2, output_mode="update")(Since)


def newest(folder: Path) -> dict[int, tuple[int, int, int]]:
    """Find, for each key, the last row that a stage has given: first, last, n."""
    files = [str(path) for path in folder.glob("part-*.parquet")]
    found: dict[int, tuple[int, int, int]] = {}
    for row in datasets.dataset(files).to_table().to_pylist() if files else []:
        if row["n"] > found.get(row["key"], (0, 0, 0))[2]:
            found[row["key"]] = row["first"], row["last"], row["n"]
    return found


def ends(folder: Path) -> list[int]:
    """List the number of the last row of each key."""
    return [last for _, last, _ in newest(folder).values()]


def rows(folder: Path) -> Any:
    return datasets.dataset([str(path) for path in folder.glob("part-*.parquet")]).to_table().to_pandas()


def by_spark(session: Any, rounds: int, given: dict[int, tuple[int, int, int]]) -> dict[int, tuple[int, int, int]]:
    """Compute Spark's batch answer over the rows of each key from the first that a stage has counted."""
    keys = KEYS * PARTITIONS
    rows = session.range(0, keys * rounds, 1, 4).selectExpr(f"id % {keys} as key", f"id div {keys} as sequence")
    begun = session.createDataFrame([(key, first) for key, (first, _, _) in given.items()], "key long, begun long")
    of_keys = rows.join(begun, "key").where("sequence >= begun").groupBy("key")
    found = of_keys.agg(F.min("sequence"), F.max("sequence"), F.count("*")).collect()
    return {row.key: tuple(row)[1:] for row in found}


@pytest.mark.starts_spark
def test_the_example_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.growing", "--flights", "100000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " ".join(done.stdout.split()).count("Spark's batch answer: equal") == 4


def add_while_an_executor_dies(query: Any, *flows: Any) -> None:
    """Kill an executor at about the time at which the addition is told."""
    lost: list[int] = []
    killer = threading.Timer(0.05, lambda: lost.append(strike(query, signal.SIGKILL, executor=True, stage=0)))
    killer.start()
    query.add(*flows, timeout=WAIT_S)
    killer.join()
    until(lambda: lost[0] not in query.members(), "the loss is noticed")
    until(lambda: query.is_whole() and len(query.members()) == 4, "all copies are there again")


def assert_the_iterator_over_an_added_output_ends_with_its_stage(query: Any) -> None:
    query.add(flux.stage(name="Shown", partitions=1)(lambda batch: batch)(query["Seen"]).to_readers(), timeout=WAIT_S)
    batches = query.rows("Shown")
    assert next(batches).num_rows > 0
    query.remove("Shown", timeout=WAIT_S)
    ended = threading.Thread(target=lambda: list(batches), daemon=True)
    ended.start()
    ended.join(WAIT_S)
    assert not ended.is_alive(), "the iterator waits for a stage that is gone"
    with pytest.raises(flux.UsageError, match="keeps no output for readers"):
        query.rows("Shown")


def test_stages_are_added_exactly_while_executors_are_killed(cluster: Any, tmp_path: Path) -> None:
    gate, begun = tmp_path / "rounds", time.time()

    def kept(flow: Any, folder: str) -> Any:
        return flow.to_parquet(tmp_path / folder, roll_every="200ms")

    source = flux.source(rounds_until_told(gate), ROWS, partitions=PARTITIONS, name="rounds")
    query = flux.start(
        kept(counted(source), "seen"), spark=cluster, workers=4, progress_interval="100ms", balance_enabled=False,
        replicas_allow_same_executor=True,  # Spark may start two of the four on one executor again
    )  # fmt: skip
    try:
        query.wait_until_running(WAIT_S)
        until(lambda: rows_in(query) > 10 * KEYS * PARTITIONS, "rows flow")
        add_while_an_executor_dies(query, kept(since("All")(query["Seen"]), "all"))
        even = since("Even")(query["Seen"].where("key % 2 = 0"))
        add_while_an_executor_dies(query, kept(even, "even"), kept(query["Seen"], "again"))
        with pytest.raises(flux.UsageError, match="a stage of that name runs"):
            query.add(kept(since("All")(query["Seen"]), "never"))
        add_while_an_executor_dies(query, kept(since("Direct")(query.source("rounds")), "direct"))
        query.add(kept(since("Gone")(query["Seen"]), "gone"), timeout=WAIT_S)
        query.remove("Gone", timeout=WAIT_S)  # with the stage that writes its files
        with pytest.raises(flux.UsageError, match="no stage 'Gone'"):
            query["Gone"]
        assert_the_iterator_over_an_added_output_ends_with_its_stage(query)
        rounds = tell(gate, begun)
        of_each = KEYS * PARTITIONS
        for folder, keys in (("all", of_each), ("even", of_each // 2), ("direct", of_each)):
            until(lambda folder=folder, keys=keys: ends(tmp_path / folder) == [rounds - 1] * keys, f"all of {folder}")
        query.processAllAvailable(WAIT_S)
    finally:
        query.stop()
    for folder in ("all", "even", "direct"):
        given = newest(tmp_path / folder)
        assert min(first for first, _, _ in given.values()) > 0
        assert given == by_spark(cluster, rounds, given)
    seen, again = rows(tmp_path / "seen"), rows(tmp_path / "again")
    assert len(seen) == KEYS * PARTITIONS * rounds
    assert (seen.sequence == seen.seen).all(), "the running stage has lost, doubled or reordered nothing"
    of_key = again.groupby("key").sequence
    assert (of_key.count() == rounds - of_key.min()).all()
    assert of_key.nunique().sum() == len(again)
    kinds = [event.kind for event in query.events()]
    assert kinds.count("plan") == 7, "each addition and each removal, and none of those that were refused"
    assert "take-over" in kinds
    assert "divergence" not in kinds


@pytest.mark.starts_spark
@pytest.mark.timeout(1800)  # eleven starts of a program: two minutes, on a machine under load ten times as long
def test_changes_are_done_or_never_happened_wherever_the_driver_is_killed(tmp_path: Path) -> None:
    """Ten times, the driver and all its processes are killed in the middle of changes, and the program is started again."""
    program = [sys.executable, str(Path(__file__).parent / "growing_lives.py"), str(tmp_path)]
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable, "FLUX_RUNTIME_DIR": str(runtime)
    }  # fmt: skip
    rng = random.Random("kills of the driver")
    for life in range(10):
        driver = subprocess.Popen(
            program, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            said = lines_until(driver, rng.randint(2, 8))
            time.sleep(rng.random() * 0.2)  # into the middle of the next one
            assert driver.poll() is None, f"life {life}: {''.join(said)}{driver.stdout.read()}"  # type: ignore[union-attr]
        finally:
            kill_family(driver, first=life % 2 == 0)
    last = subprocess.run(
        [*program, "end"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert "through" in last.stdout, last.stdout[-3000:] + last.stderr[-3000:]
    seen = rows(tmp_path / "Seen")
    of_key = seen.groupby("key").n
    assert (of_key.count() == of_key.max() + 1).all(), "each row once, from the first to the last"
    assert of_key.nunique().sum() == len(seen)
    folders = [folder for folder in tmp_path.glob("Since*") if list(folder.glob("part-*.parquet"))]
    assert len(folders) > 3
    for folder in folders:
        given = rows(folder)
        assert (given.n == given["last"] - given["first"] + 1).all(), "each row from the first one on, once"
        assert (given.groupby("key")["first"].nunique() == 1).all(), "an edge begins at one row, in all lives"
    behind_source = [folder for folder in folders if folder.name.startswith(BEHIND_SOURCE)]
    for some in (behind_source, set(folders) - {*behind_source}):
        assert max(given["first"].min() for given in map(rows, some)) > 0


def kill_family(driver: Any, first: bool) -> None:
    """Kill a program and all that it has started, itself ``first`` or last."""
    if driver.poll() is None:
        family = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        for process in family if first else family[::-1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, 10)
    driver.communicate(timeout=WAIT_S)


def lines_until(driver: Any, changes: int) -> list[str]:
    """Read the lines of a program until it has made this number of changes, or ends. One that is silent for ``SILENT_S`` gets a
    signal on which it prints the stacks of its threads and ends."""
    said: list[str] = []
    while changes:
        silent = threading.Timer(SILENT_S, driver.send_signal, (signal.SIGABRT,))
        silent.start()
        line = driver.stdout.readline()
        silent.cancel()
        if not line:
            break
        said.append(line)
        changes -= line.startswith(("added", "removed"))
    return said
