"""A reader of a query that is stopped waits until checkpoints elsewhere have all that it has read (design: vault)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from one_worker import SCHEMA, Kept, planned, rows

import flux
from flux.wire.control import Checkpointed
from flux.wire.messages import AppliedThrough, Needed, ReadsElsewhere, Resume
from flux.worker.checkpoint_scheduler import KEEP_LOOK_S, SETTLES_MOST_S, SETTLES_S
from flux.worker.core import WorkerCore
from flux.worker.effects import ToController
from partitioning.ids import STANDBY
from partitioning.table import ReplicaAt, Table

PARTITIONS, READER, PRIMARY, KEEPER = 4, 0, 1, 2
LAST = 7


class Log:
    row_numbers = True

    def __call__(self, partition: int, start: Any) -> Iterator[Any]:
        return iter([flux.Positioned(rows(1), LAST + 1, np.array([LAST])), *[None] * 1000])


@pytest.fixture
def core() -> WorkerCore:
    """Make a reader of one record. The replicas of all partitions are with other workers, and none of the checkpoints
    has the record yet."""
    source = flux.source(Log(), SCHEMA, 1, "log", positions=True)
    plan = replace(planned(flux.stage(partitions=PARTITIONS)(Kept), source=source), durable=True)
    core = WorkerCore(plan, READER)
    row = ReplicaAt(PRIMARY, 0), ReplicaAt(KEEPER, 0, True, STANDBY)
    core.on_table(Table(0, ((row,) * PARTITIONS,), ((READER,),), dict.fromkeys((READER, PRIMARY, KEEPER), "")), 0.0)
    list(core.poll(0.0))
    core.on_answer(PRIMARY, Resume(0, 0, 0, 1, [Needed(p, 0) for p in range(PARTITIONS)], -1, [], 1 << 20, []), 0.0)
    kept(core, {}, 0.0)
    while core.read(True, 0.0):
        pass
    assert core.reading.lacking == PARTITIONS * (LAST + 1)
    return core


def kept(core: WorkerCore, through: dict[int, int], now: float) -> None:
    """Take the answer of the keeper: its checkpoints have all rows through these ones, by partition."""
    core.on_answer(KEEPER, ReadsElsewhere(0, 0, 0, -1, [AppliedThrough(*each) for each in through.items()]), now)


def first(partitions: int) -> dict[int, int]:
    """Return the rows of checkpoints, of which those of the first ``partitions`` have the record."""
    return dict.fromkeys(range(min(partitions, PARTITIONS)), LAST)


def reported(core: WorkerCore, step: Callable[[float], None] | None = None) -> tuple[float, bool]:
    """Stop the query at 0, and return the time of the report and its contents. ``step`` is called with each time
    before."""
    core.on_last_checkpoints(0.0)
    for look in range(1000):
        now = look * KEEP_LOOK_S
        if step is not None:
            step(now)
        for effect in core.poll(now):
            if isinstance(effect, ToController) and isinstance(effect.message, Checkpointed):
                return now, effect.message.settled
    raise AssertionError("there is no report")


def test_a_reader_waits_as_long_as_checkpoints_come(core: WorkerCore) -> None:
    """Wait for all checkpoints. The next start of a query raised DataLost on a busy machine: its checkpoints had come
    one after the other for longer than the reader waited, and the topic was compacted after the stop."""
    each_s = SETTLES_S * 0.8
    when, settled = reported(core, lambda now: kept(core, first(int(now / each_s)), now))
    assert settled
    assert when == pytest.approx(PARTITIONS * each_s, abs=2 * KEEP_LOOK_S)
    assert SETTLES_S < when < SETTLES_MOST_S


def test_a_reader_waits_as_long_as_checkpoints_of_one_partition_get_more(core: WorkerCore) -> None:
    each_s = 0.8

    def step(now: float) -> None:
        kept(core, first(PARTITIONS) | {0: min(int(now / each_s) - 1, LAST)}, now)

    when, settled = reported(core, step)
    assert settled
    assert when == pytest.approx((LAST + 1) * each_s, abs=2 * KEEP_LOOK_S)


def test_a_reader_reports_after_a_moment_without_a_checkpoint(core: WorkerCore) -> None:
    when, settled = reported(core, lambda now: kept(core, first(int(now)), now) if now < 1.5 else None)
    assert not settled
    assert when == pytest.approx(1.0 + SETTLES_S, abs=2 * KEEP_LOOK_S)


def test_the_wait_has_a_limit_in_all(core: WorkerCore) -> None:
    when, settled = reported(core, lambda now: kept(core, {0: min(int(now), LAST)}, now))
    assert not settled
    assert when == pytest.approx(SETTLES_MOST_S, abs=2 * KEEP_LOOK_S)
