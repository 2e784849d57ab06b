"""A primary that was given up may still write when its successor has asked for the position of the outside."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from harness import LIMIT_S, ThreadQuery, dataframe
from outside_store import ALONE, SCHEMA, StrictTable, Table, batches, lose, same, until

import flux


def test_a_late_write_that_lands_after_the_successor_has_asked_ends_nothing() -> None:
    """Let the successor write at a position that the outside has got meanwhile: its write is refused, and nothing
    ends."""
    store, entered, both = Table.stores["landed late"], [], threading.Event()

    def before(position: flux.Position) -> None:
        if position == (0, 3):
            entered.append(position)
            if len(entered) == 1:
                both.wait(LIMIT_S)
            else:
                both.set()
                until(lambda: len(store.batches[0]) > 3, "the write of the lost one lands")

    with ThreadQuery(same(dataframe(SCHEMA)).to(StrictTable("landed late", before)), **ALONE) as query:
        query.started().feed([batches(2000)])
        until(lambda: entered, "the first one writes")
        table = query.server.core.table
        assert table is not None
        lose(query, table.stages[0][0][0].worker)
        query.wait()
    assert store.rows() == list(range(2000))
    assert (len(entered), store.again) == (2, 1)


@pytest.mark.parametrize("changes", [False, True])
def test_who_changes_the_outside_when_it_is_asked_is_asked_once_by_each_primary(changes: bool) -> None:
    """Ask such a sink once only: its primary may be given up and not know, and would remove output that its successor
    writes."""
    asked: list[int] = []

    class Broken(Table):
        traits = flux.SinkTraits(committed_changes=changes)

        def committed(self, partition: int) -> int:
            asked.append(partition)
            return super().committed(partition)

        def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
            if position.partition == 0:
                raise ValueError("a broken outside")

    with ThreadQuery(same(dataframe(SCHEMA)).to(Broken(f"broken {changes}")), **ALONE) as query:
        query.started().feed([batches(100)])
        assert "a broken outside" in query.error().summary
    assert asked.count(0) == (1 if changes else 2)
