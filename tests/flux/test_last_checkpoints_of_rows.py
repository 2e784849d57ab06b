"""A query that is stopped reads nothing more, and its last checkpoints have all rows that were read (design:
last-checkpoints)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from one_worker import Kept, planned, rows
from test_own_numbers import log_of, reading
from test_reviving import FIRST, VAULT, Both
from test_reviving import table as table_with_vault

import flux
from flux.wire.control import Checkpointed
from partitioning.ids import DISK
from partitioning.table import ReplicaAt, Table


def test_a_stopped_worker_reads_nothing_more_and_waits_for_what_it_has_read() -> None:
    core = reading([flux.Positioned(rows(1), 1, np.array([7])), None, flux.Positioned(rows(2), 2, np.array([8])), None])
    (streams,) = core.sources.values()
    before = streams.rows
    core.on_last_checkpoints(1.0)
    assert not core.read(True, 2.0)
    assert streams.rows == before
    for now in (2.0, 2.1, 2.2):
        list(core.poll(now))
        while core.work(now):
            pass
    list(core.poll(2.3))
    assert core.reading.settled


def stopped(made: Both) -> int:
    """Go on for two tenths of a second, and return the steps in the checkpoint."""
    for _ in range(10):
        made.turn()
        made.aside()
    return made.vault.followers[0, 0].checkpoint.step  # type: ignore[attr-defined]


def test_a_stopped_worker_gives_the_vault_what_comes_from_the_readers_of_others_after_its_report() -> None:
    """Give such rows at once: the interval between two checkpoints plays no part."""
    plan = replace(planned(flux.stage(partitions=1)(Kept), checkpoint_interval=600.0), durable=True)
    made = Both(plan)
    made.show(table_with_vault(0, FIRST, 0))
    made.greet(0, 0)
    made.feed(0)
    made.worker.on_last_checkpoints(made.now)
    assert stopped(made) == 1
    assert made.reports.count(Checkpointed(node=FIRST, settled=True)) == 1
    made.feed(1)
    assert stopped(made) == 2
    assert made.reports.count(Checkpointed(node=FIRST, settled=True)) == 1


def test_a_stopped_reader_reports_when_the_vault_has_its_rows_however_long_the_interval_is() -> None:
    log = log_of([flux.Positioned(rows(1), 1, np.array([7])), *[None] * 1000])
    plan = replace(planned(flux.stage(partitions=1)(Kept), source=log, checkpoint_interval=600.0), durable=True)
    made = Both(plan)
    row = ReplicaAt(FIRST, 0), ReplicaAt(VAULT, 0, kind=DISK)
    made.show(Table(0, ((row,),), ((FIRST,),), {FIRST: "", VAULT: ""}))
    made.turn()
    while made.worker.read(True, made.now):
        pass
    made.worker.on_last_checkpoints(made.now)
    assert stopped(made) == 1
    assert made.worker.reading.settled
    assert made.reports.count(Checkpointed(node=FIRST, settled=True)) == 1
