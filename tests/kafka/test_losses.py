"""Records that a topic has lost since they were applied, by compaction and by retention: they are never needed again, and no new
record passes for one of them."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from striking import rows_in, strike, until

import flux
from flux.worker.source_scheduler import IDLE_DONE_S
from tests.kafka.broker import Broker
from tests.kafka.losing import COMPACTED, compact, delete_before, query_of, written
from tests.kafka.topics import send

OLD, NEW = range(100), range(1000, 1060)


def values(numbers: range) -> list[Any]:
    return [(b"key %d" % (number % 5), b"%d" % number, None, 0) for number in numbers]


@contextmanager
def running(flow: Any, slots: Any, location: Path | None, workers: int = 2) -> Iterator[flux.Query]:
    more = {} if location is None else {"checkpointLocation": location}
    query = flow.start(spark=slots, workers=workers, progress_interval="100ms", **more)
    try:
        yield query
    finally:
        query.stop()


def reads(query: flux.Query, folder: Path, numbers: range) -> None:
    def there() -> bool:
        if query.exception() is not None:
            raise query.exception()
        return all(written(folder)[number] for number in numbers)

    until(there, f"{numbers}: {written(folder).total()} rows are there")


@pytest.mark.spark
@pytest.mark.parametrize("key", [None, pytest.param("key", marks=pytest.mark.long)])
def test_new_records_come_after_the_old_ones_were_compacted(
    slots: Any, broker: Broker, new_topic: Callable[..., str], tmp_path: Path, key: str | None
) -> None:
    topic = new_topic(**COMPACTED)
    send(broker.address, topic, values(OLD))
    for numbers in (OLD, NEW):
        flow = query_of(topic, broker.address, tmp_path / "rows", key=key)
        with running(flow, slots, tmp_path / "location") as query:
            if numbers is NEW:
                send(broker.address, topic, values(NEW))
            reads(query, tmp_path / "rows", numbers)
        if numbers is OLD:
            compact(broker.address, topic, 5, (b"marker", b"-1"))
    found = written(tmp_path / "rows")
    assert {number: found[number] for number in (*OLD, *NEW)} == dict.fromkeys((*OLD, *NEW), 1)


@pytest.mark.spark
@pytest.mark.parametrize("fails", [True, pytest.param(False, marks=pytest.mark.long)])
def test_new_records_come_after_retention_has_deleted_all_that_were_applied(
    slots: Any, broker: Broker, topic: str, tmp_path: Path, fails: bool
) -> None:
    """Without a key, 7 of 8 partitions have got no row: they have nothing to say of the others."""
    send(broker.address, topic, values(OLD))
    for numbers in (OLD, NEW):
        flow = query_of(topic, broker.address, tmp_path / "rows", fail_on_data_loss=fails)
        with running(flow, slots, tmp_path / "location") as query:
            if numbers is NEW:
                send(broker.address, topic, values(NEW))
            reads(query, tmp_path / "rows", numbers)
        delete_before(broker.address, topic, len(OLD))
    assert written(tmp_path / "rows") == Counter([*OLD, *NEW])


@pytest.mark.spark
def test_all_that_is_there_comes_after_retention_has_passed_the_checkpoint(
    slots: Any, broker: Broker, topic: str, tmp_path: Path
) -> None:
    send(broker.address, topic, values(OLD))
    flow = query_of(topic, broker.address, tmp_path / "rows", fail_on_data_loss=False)
    with running(flow, slots, tmp_path / "location") as query:
        reads(query, tmp_path / "rows", OLD)
    send(broker.address, topic, values(range(500, 550)))
    delete_before(broker.address, topic, len(OLD) + 50)
    send(broker.address, topic, values(NEW))
    flow = query_of(topic, broker.address, tmp_path / "rows", fail_on_data_loss=False)
    with running(flow, slots, tmp_path / "location") as query:
        reads(query, tmp_path / "rows", NEW)
    assert written(tmp_path / "rows") == Counter([*OLD, *NEW])


@pytest.mark.spark
def test_a_worker_is_lost_after_records_that_were_applied_have_expired(
    slots: Any, broker: Broker, topic: str, tmp_path: Path
) -> None:
    send(broker.address, topic, values(OLD))
    flow = query_of(topic, broker.address, tmp_path / "rows", replicas=2, stages=2)
    with running(flow, slots, None, workers=3) as query:
        reads(query, tmp_path / "rows", OLD)
        until(lambda: rows_in(query) >= len(OLD), "the controller has heard of them")
        # Until then partitions without rows may still ask for them (design: needed-no-more).
        time.sleep(5 * IDLE_DONE_S)
        delete_before(broker.address, topic, len(OLD))
        reader = query._server.core.table.sources[0][0]
        strike(query, signal.SIGKILL, worker=reader)
        send(broker.address, topic, values(NEW))
        reads(query, tmp_path / "rows", NEW)
    assert written(tmp_path / "rows") == Counter([*OLD, *NEW])
