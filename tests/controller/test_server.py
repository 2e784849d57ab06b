"""The controller's thread: an error in it ends the query and is named, and other threads ask it without a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, Rows, ThreadQuery, dataframe

import flux
from controller import server
from controller.operate.requests import GetPartitions, GetStatus, Partitions, SetWorkers, Status
from flux.errors import QueryFailed, UsageError

SCHEMA = pa.schema([("k", pa.int64())])


@flux.stage(key="k", partitions=4)
class Count(flux.Aggregate):
    n = flux.count()


@pytest.fixture
def query() -> Iterator[ThreadQuery]:
    with ThreadQuery(Rows().stage(Count(dataframe(SCHEMA))), operate=False) as query:
        yield query.started()


def test_a_call_of_another_thread_is_made_at_once_though_nothing_else_happens(
    query: ThreadQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = server.Server(query.plan, 1, "127.0.0.1", None, "alone", None)
    with monkeypatch.context() as patch:
        patch.setattr(server, "COMMAND_S", 20.0)
        alone.start()
        began = time.monotonic()
        assert alone.look(lambda: 3) == 3
        assert time.monotonic() - began < 10
    alone.stop()
    assert alone.close(LIMIT_S)


@pytest.mark.parametrize("where", ["on_tick", "on_report", "report"])
def test_a_defect_in_the_controller_fails_the_query_and_says_what_it_was(
    query: ThreadQuery, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, such a defect set all events without an error, and a query that had lost its controller looked as if it had ended
    well."""
    working = getattr(query.server.core, where)

    def broken(*given: Any) -> Any:
        monkeypatch.setattr(query.server.core, where, working)
        raise KeyError("a worker that nobody knows")

    monkeypatch.setattr(query.server.core, where, broken)
    error = query.error()
    assert isinstance(error, QueryFailed)
    assert str(error) == "the controller failed: KeyError: 'a worker that nobody knows'"
    assert query.server.phase == "ended"
    for thread in query._threads:  # the workers were sent home
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_a_question_that_fails_is_the_error_of_its_caller_alone(query: ThreadQuery) -> None:
    """Names of an odd type, as in restart(["Count"]), ended the query."""
    known: dict[Any, Any] = {}
    with pytest.raises(TypeError, match="unhashable type"):
        query.server.look(lambda: known.get([]))
    assert query.server.look(lambda: query.server.core.phase) == "running"


def test_a_controller_that_cannot_even_send_everybody_home_still_ends(
    query: ThreadQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)  # pytest would report the expected error

        def broken(*_: Any) -> Any:
            raise OSError("always")

        patch.setattr(query.server.core, "on_tick", broken)
        assert "OSError: always" in str(query.error())
        query.server._thread.join(LIMIT_S)
        assert not query.server._thread.is_alive()
    query.server._thread = threading.Thread(target=lambda: None)  # it has ended; the harness closes it once more
    query.server._thread.start()
    for thread in query._threads:
        assert thread.daemon


def test_the_program_asks_what_the_command_asks_also_where_no_command_may(query: ThreadQuery) -> None:
    status = query.server.ask(GetStatus())
    assert isinstance(status, Status)
    assert (status.phase, len(status.workers)) == ("running", 2)
    placed = query.server.ask(GetPartitions(stage="Count"))
    assert isinstance(placed, Partitions)
    assert len(placed.replicas) == 4
    with pytest.raises(UsageError, match="there is no stage Sum"):
        query.server.ask(GetPartitions(stage="Sum"))
    assert query.server.phase == "running"


def test_more_workers_than_there_is_room_for_are_refused_with_the_arithmetic(query: ThreadQuery) -> None:
    query.server.look(lambda: query.server.core.driver.allow(3, "4 task slots exist, 1 for others"))
    with pytest.raises(UsageError, match="cannot scale to 4 workers: 4 task slots exist, 1 for others"):
        query.server.ask(SetWorkers(workers=4))
    query.server.ask(SetWorkers(workers=3))
    assert query.server.look(query.server.core.driver.missing_slots) == [2]


def test_what_is_asked_is_done_in_the_controllers_thread_and_after_its_end_in_the_callers(query: ThreadQuery) -> None:
    def name() -> str:
        return threading.current_thread().name

    assert query.server.look(name).startswith("flux-controller-")
    query.server.stop()
    query.wait()
    assert query.server.close(LIMIT_S)
    assert query.server.look(name) == threading.current_thread().name
    status = query.server.ask(GetStatus())
    assert isinstance(status, Status)
    assert status.phase == "ended"
    with pytest.raises(UsageError, match="the query is ended"):
        query.server.ask(SetWorkers(workers=3))


def test_many_threads_ask_at_once(query: ThreadQuery) -> None:
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(query.server.look(lambda: 1))) for _ in range(20)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    assert len(seen) == 20
