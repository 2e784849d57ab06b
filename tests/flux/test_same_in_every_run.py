"""The same in every run: windows, sessions and late rows are equal byte for byte, whatever is lost and moved, and however rows
are cut and partitioned; and they are those of the oracle."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import ThreadQuery
from outside_store import lose, until

import flux
from controller.replicas.moves import Move
from tests.oracles.disordered import DELAY, GAP, PARTITIONS, SCHEMA, SIZE, SLIDE, answers, lines, numbered

ROWS = 700
#: The first half of the rows flows before a fault, the rest behind it: the partitions that are through with the first half.
GATE = threading.Event()
HALF: set[int] = set()
KINDS = ("active", "standby")


class Spent(flux.Aggregate):
    n = flux.count()
    total = flux.sum("amount")
    kinds = flux.count_distinct("amount")


def may_go_on(partition: int, number: int) -> bool:
    if number >= ROWS // 2:
        HALF.add(partition)
    return number < ROWS // 2 or GATE.is_set()


def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def outputs(folder: Path, seed: int) -> dict[str, bytes]:
    """Run the program under the faults of a seed. Return the rows of each of its outputs, sorted."""
    rng = random.Random(seed)
    GATE.clear()
    HALF.clear()
    read = numbered(ROWS, rng.choice([7, 60, 200]), may_go_on)
    events = flux.source(read, SCHEMA, PARTITIONS, "events", positions=True).withWatermark("ts", DELAY)

    def stage(target: Any, window: Any = None) -> Any:
        kind = rng.choice(KINDS) if window else "active"
        key = "user" if window else None
        return flux.stage(
            key=key, partitions=rng.randint(1, 4), replicas=2, recovery=kind, window=window, name=f"at{rng.random()}"
        )(target)

    flows = {
        "windows": stage(Spent, flux.window("ts", SIZE, SLIDE))(events),
        "sessions": stage(Spent, flux.session_window("ts", GAP))(events),
        "late": stage(passed)(events.late),
    }
    options = {"batch_max_rows": rng.choice([10, 50, 1000]), "step_max_rows": rng.choice([5, 50, 5000])}
    sinks = [flow.to_parquet(str(folder / name), roll_every="200ms") for name, flow in flows.items()]
    with ThreadQuery(
        *sinks, workers=3, operate=False, replicas_allow_same_executor=True, checkpoint_interval="50ms", **options
    ) as query:
        query.started()
        core = query.server.core
        until(lambda: len(HALF) == PARTITIONS, "half of the rows")
        until(lambda: all(list((folder / name).glob("part-*")) for name in flows), "output of them")
        if seed % 2:
            lose(query, rng.choice(list(core.members.workers)))
        else:
            query.server.command(lambda now: core.move(moves(core.table, rng), "for the test", now))
        GATE.set()
        query.wait()
    return {name: lines(pq.read_table(folder / name)) for name in flows}


def moves(table: Any, rng: random.Random) -> list[Move]:
    """A move of the primary of some partitions of the stages, to a worker that has no replica of them."""
    found = []
    for stage in range(3):
        for partition, replicas in enumerate(table.stages[stage]):
            free = sorted({0, 1, 2} - {each.worker for each in replicas})
            if free and rng.random() < 0.7:
                found.append(Move(stage, partition, replicas[0].worker, free[0]))
    return found


@pytest.mark.timeout(300)
def test_windows_sessions_and_late_rows_are_the_same_in_every_run(tmp_path: Path) -> None:
    wanted = answers(ROWS)
    for seed in range(4):
        found = outputs(tmp_path / str(seed), seed)
        assert found == wanted, f"run {seed}: {[name for name in wanted if found[name] != wanted[name]]}"
