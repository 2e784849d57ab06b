"""Egress tasks: the output is fetched whole from a worker that has it, also when another worker has it in the
middle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, ThreadQuery, dataframe

import flux
from flux.errors import Fenced
from flux.shell.output_loops import Egress
from flux.shell.process import Stopped
from flux.tasks.output_fetch import ASK_EVERY_S
from flux.wire.messages import Fetch

SCHEMA = pa.schema([("x", pa.int64()), ("wide", pa.string())])
ROWS, WIDE = 2_000, "w" * 8192  # sixteen megabytes: at least two chunks in one of the two partitions
COLLECTING = 1


@flux.stage(partitions=2, replicas=2, schema=SCHEMA)
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.fixture
def query() -> Iterator[ThreadQuery]:
    """Yield a query with all of its output, several chunks of the larger partition, and two copies of it."""
    # Steps of few rows, however many wait together: the first batch that is read must not be the whole output.
    few = {"batch_max_rows": 100, "step_max_rows": 100}
    options = {"operate": False, "replicas_allow_same_executor": True} | few
    with ThreadQuery(same(dataframe(SCHEMA)), collect=2, **options) as query:
        query.started().feed([[pa.record_batch([pa.array(range(ROWS)), pa.repeat(WIDE, ROWS)], schema=SCHEMA)]])
        assert query.server.finished.wait(LIMIT_S)
        assert query.server.phase == "finished", query.server.error
        yield query


def fetching(query: ThreadQuery, partition: int) -> Iterator[pa.RecordBatch]:
    return Egress(query.rendezvous, COLLECTING, partition, 60.0).batches(attempt=1)


def values(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [value for batch in batches for value in batch.column(0).to_pylist()]


def larger(query: ThreadQuery) -> int:
    """Return the partition with more rows, so with several chunks. Rows without a key go where there is room."""
    return max((0, 1), key=lambda partition: len(values(fetching(query, partition))))


def lose(query: ThreadQuery, worker: int) -> None:
    query.server.command(lambda now: query.server.core.on_closed(worker, now))


def test_output_is_fetched_whole_and_as_often_as_one_asks(query: ThreadQuery) -> None:
    for _ in range(2):
        assert sorted(values(fetching(query, 0)) + values(fetching(query, 1))) == list(range(ROWS))


def test_when_its_worker_is_lost_in_the_middle_the_rest_comes_from_the_copy(query: ThreadQuery) -> None:
    partition = larger(query)
    expected = values(fetching(query, partition))
    fetched = fetching(query, partition)
    first = next(fetched)
    assert query.server.core.table is not None
    lose(query, query.server.core.table.stages[COLLECTING][partition][0].worker)
    assert values(iter([first, *fetched])) == expected, "nothing is missing, and nothing comes twice"
    assert values(fetching(query, partition)) == expected, "a task that Spark starts again asks the newest table"
    assert all(isinstance(error, Fenced) for error in query.raised)


def test_an_answer_of_the_controller_that_comes_twice_does_not_keep_the_task_busy(
    query: ThreadQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the second answer away: unread, it ended every wait for the worker at once."""
    core, asked, partition = query.server.core, [], larger(query)
    show = core.registration.show_table
    monkeypatch.setattr(core.registration, "show_table", lambda *given: [asked.append(given), show(*given)])
    egress = Egress(query.rendezvous, COLLECTING, partition, 60.0)
    fetched = egress.batches(attempt=1)
    next(fetched)

    def again(now: float) -> Any:
        show(*asked[-1])
        return core.board.take()

    query.server.command(again)
    waits, wait = [], egress._sockets.wait
    monkeypatch.setattr(egress._sockets, "wait", lambda seconds: [waits.append(seconds), wait(seconds)][1])
    assert egress.ask(Fetch(COLLECTING, 99, 1 << 40), ASK_EVERY_S) is None, "no worker has that"
    assert len(waits) < 20
    assert len(values(fetched)) > 0


def test_a_task_whose_query_has_ended_ends_at_once(query: ThreadQuery) -> None:
    fetched = fetching(query, larger(query))
    next(fetched)
    query.stop()  # a worker that has not heard of it yet would send the rest
    with pytest.raises(Stopped, match="the query has ended"):
        values(fetched)
    with pytest.raises(Stopped):
        values(fetching(query, 0))
