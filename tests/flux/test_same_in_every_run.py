"""Results are the same in every run: windows, sessions, late rows, joins, ranks and rows without duplicates are equal
byte for byte, with any losses and moves, and however rows are cut and partitioned; and they are those of the oracle."""

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
from flux.arguments import MARKS
from flux.joins.join import Join
from flux.joins.join_spec import LEFT, JoinSpec, TimeBound
from flux.ranks.top import OrderColumn, RankSpec, TopOfWindow
from flux.windows.window import Window
from tests.oracles.disordered import (
    BEST,
    BEST_SIZE_US,
    DELAY,
    GAP,
    JOINED,
    OFFERS,
    PARTITIONS,
    SCHEMA,
    SIZE,
    SLIDE,
    WITHIN,
    WITHIN_US,
    answers,
    lines,
    numbered,
    offers,
    part,
)  # fmt: skip

ROWS = 400
#: Half of the rows flow before a fault, the rest behind it. Sources and partitions that are through with the first half.
GATE = threading.Event()
HALF: set[tuple[str, int]] = set()
KINDS = ("active", "standby")
#: The fault of each run, by its seed: a worker is lost, partitions move, or stages get replicas of the other kind.
MOVES, LOSS, OTHER_KINDS = range(3)
#: Events with the offers to their users that are a little older, as Spark resolves the condition; and the best of them.
NEAR = JoinSpec(
    "left_outer", ((SCHEMA.names.index("user"),), (OFFERS.names.index("user"),)),
    tuple((name, [*SCHEMA.names, *OFFERS.names].index(name)) for name in JOINED), (2, 2),
    (TimeBound(LEFT, False, 2, 0), TimeBound(LEFT, True, 2, WITHIN_US)), time_of=LEFT,
)  # fmt: skip
RANKS = RankSpec(
    BEST, (OrderColumn("price", True, True), OrderColumn("amount", True, True)), JOINED,
    window=Window("ts", BEST_SIZE_US, BEST_SIZE_US),
)  # fmt: skip


class Spent(flux.Aggregate):
    n = flux.count()
    total = flux.sum("amount")
    kinds = flux.count_distinct("amount")


def read(name: str, count: int, most: int, made: Any) -> Any:
    """Make a reader of a source that waits at its half."""

    def may_go_on(partition: int, number: int) -> bool:
        if number >= count // 2:
            HALF.add((name, partition))
        return number < count // 2 or GATE.is_set()

    return numbered(count, most, may_go_on, made)


def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def outputs(folder: Path, seed: int) -> dict[str, bytes]:
    """Run the program under the faults of a seed. Return the rows of each of its outputs, sorted."""
    rng = random.Random(seed)
    GATE.clear()
    HALF.clear()
    most = rng.choice([7, 60, 200])
    all_events = flux.source(read("events", ROWS, most, part), SCHEMA, PARTITIONS, "events", positions=True)
    all_offers = flux.source(read("offers", ROWS // 2, most, offers), OFFERS, PARTITIONS, "offers", positions=True)
    events, others = all_events.withWatermark("ts", DELAY), all_offers.withWatermark("at", DELAY)

    def stage(target: Any, key: str | None = "user", **more: Any) -> Any:
        kind = rng.choice(KINDS) if key else "active"
        return flux.stage(
            key=key, partitions=rng.randint(1, 4), replicas=2, recovery=kind, name=f"at{rng.random()}", **more
        )(target)

    def placed(flow: Any) -> Any:
        return flow.withStage(partitions=rng.randint(1, 4), replicas=2, recovery=rng.choice(KINDS))

    joined = stage(Join)(NEAR, SCHEMA, OFFERS)(events, others)
    once = events.dropDuplicatesWithinWatermark(["partition", "user"])
    flows = {
        "windows": stage(Spent, window=flux.window("ts", SIZE, SLIDE))(events),
        "without an order": flux.stage(
            key="user", partitions=3, replicas=2, order=MARKS, window=flux.window("ts", SIZE, SLIDE)
        )(Spent)(events),
        "sessions": stage(Spent, window=flux.session_window("ts", GAP))(events),
        "late": stage(passed, None)(events.late),
        "once": placed(once),
        "as_of": placed(flux.asof_join(events, others, on="user", tolerance=WITHIN, how="left")),
        "joined": joined,
        "best": stage(TopOfWindow)(RANKS)(joined),
    }
    options = {"batch_max_rows": rng.choice([10, 50, 1000]), "step_max_rows": rng.choice([5, 50, 5000])}
    sinks = [flow.to_parquet(str(folder / name), roll_every="200ms") for name, flow in flows.items()]
    with ThreadQuery(
        *sinks, workers=3, operate=False, replicas_allow_same_executor=True, checkpoint_interval="100ms", **options
    ) as query:
        query.started()
        core = query.server.core
        until(lambda: len(HALF) == 2 * PARTITIONS, "half of the rows")
        until(lambda: all(list((folder / name).glob("part-*")) for name in flows), "output of them")
        if seed == LOSS:
            lose(query, rng.choice(list(core.members.workers)))
        elif seed == MOVES:
            query.server.command(lambda now: core.move(moves(core.table, rng), "for the test", now))
        else:
            for number, of in enumerate(query.plan.stages):
                if of.at_marks:
                    continue
                other = "standby" if of.recovery == "active" else "active"
                query.server.command(lambda now, number=number, other=other: core.protect(number, 2, other, now))
        GATE.set()
        query.wait()
    return {name: lines(pq.read_table(folder / name)) for name in flows}


def moves(table: Any, rng: random.Random) -> list[Move]:
    """Choose moves of the primaries of some partitions, each to a worker that has no replica of the partition."""
    found = []
    for stage, partitions in enumerate(table.stages):
        for partition, replicas in enumerate(partitions):
            free = sorted({0, 1, 2} - {each.worker for each in replicas})
            if free and rng.random() < 0.7:
                found.append(Move(stage, partition, replicas[0].worker, free[0]))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [MOVES, LOSS, pytest.param(OTHER_KINDS, marks=pytest.mark.long)],
    ids=["partitions move", "a worker is lost", "stages get replicas of the other kind"],
)
def test_all_outputs_are_the_same_in_every_run(seed: int, tmp_path: Path) -> None:
    wanted = answers(ROWS)
    wanted["without an order"] = wanted["windows"]
    found = outputs(tmp_path, seed)
    assert found == wanted, f"{[name for name in wanted if found[name] != wanted[name]]}"
