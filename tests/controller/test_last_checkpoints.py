"""A query with a checkpoint location that is stopped ends when all workers have answered the newest order (design: vault)."""

from __future__ import annotations

from typing import Any

from controller.decide.departures import LAST_CHECKPOINTS_S
from flux.wire.control import Checkpointed, LastCheckpoints
from tests.controller.cluster import register
from tests.controller.test_disks import Durable


def stopped(**more: Any) -> Durable:
    c = Durable(**{"slots": 2, "replicas": 2, "readers": 2} | more)
    c.take(c.core.driver.on_pause(c.now))
    assert orders(c, "w0.0") == orders(c, "w1.0") == [c.table.epoch]
    return c


def orders(c: Durable, connection: str) -> list[int]:
    return [order.epoch for order in c.told(connection) if isinstance(order, LastCheckpoints)]


def answer(c: Durable, epoch: int, *workers: int, settled: bool = True) -> str:
    for worker in workers:
        c.report(worker, Checkpointed(node=worker, epoch=epoch, settled=settled))
    c.tick(0.01)
    return c.core.phase


def test_it_ends_with_the_answer_of_the_last_worker() -> None:
    c = stopped()
    assert answer(c, c.table.epoch, 0) == "running"
    assert answer(c, c.table.epoch, 1) == "ended"
    assert not c.events("warning")


def test_a_worker_that_joins_meanwhile_is_asked() -> None:
    """Such a worker read on, and the query waited for its answer to an order that it had never got."""
    c = stopped()
    c.lose(1)
    c.tick(0.01)
    joined = c.join(1, attempt=1)
    c.tick(0.01)
    assert orders(c, "w1.1")
    epoch = orders(c, "w0.0")[-1]
    assert answer(c, epoch, 0) == "running"
    assert answer(c, epoch, joined) == "ended"


def test_a_worker_that_gets_sources_of_another_one_is_asked_again() -> None:
    c = stopped(slots=3)
    assert answer(c, c.table.epoch, 0, 2) == "running"
    primaries = [rows[0][:1] for rows in c.table.stages]
    c.drain(1)
    assert [rows[0][:1] for rows in c.table.stages] == primaries, "nothing has changed but the readers"
    c.tick(0.01)
    assert orders(c, "w0.0")[1:] == [c.table.epoch]


def test_a_worker_with_a_new_connection_is_asked_on_it() -> None:
    c = stopped()
    c.take(c.core.on_report("again", register(0, node=0), c.now))
    assert orders(c, "again") == [c.table.epoch]
    assert answer(c, c.table.epoch, 0, 1) == "ended"


def test_the_wait_has_a_limit_and_the_event_names_the_silent_workers() -> None:
    c = stopped()
    assert answer(c, c.table.epoch, 0) == "running"
    c.tick(LAST_CHECKPOINTS_S)
    assert (c.core.phase, c.core.error) == ("ended", None)
    (warning,) = c.events("warning")
    assert "the last checkpoints of worker 1 were not kept within 8 s" in str(warning)


def test_an_event_names_the_workers_whose_rows_are_not_in_all_checkpoints() -> None:
    c = stopped()
    assert answer(c, c.table.epoch, 0) == "running"
    assert answer(c, c.table.epoch, 1, settled=False) == "ended"
    (warning,) = c.events("warning")
    assert "worker 1 had read rows that were not in all checkpoints" in str(warning)
