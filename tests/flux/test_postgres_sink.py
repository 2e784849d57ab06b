"""The sink of the PostgreSQL example, with a real server: writers that are given up, stopped and cut off change nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import flux
from tests.postgres_server import Server, missing

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

LONG_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if why := missing():
        pytest.skip(why)
    server = Server()
    yield server
    server.close()


def opened(server: Server, query: str, make: Any = None) -> Any:
    from examples.postgres import Additions

    sink = (make or Additions)(server.address, "Sums of Keys", "the key", ["n", "sum"])
    sink.check(rows().schema)
    sink.prepare(1, None)
    sink.open(flux.SinkContext(query, 0, "stage", 0, 1))
    return sink


def rows() -> pa.RecordBatch:
    return pa.record_batch({"the key": ["a", "b'; --", "a"], "n": [1, 1, 1], "sum": [5, 7, -1]})


def table(server: Server) -> list[Any]:
    with psycopg.connect(server.address) as connection:
        return list(connection.execute('SELECT "the key", n, sum FROM "Sums of Keys" ORDER BY 1').fetchall())


@pytest.fixture(autouse=True)
def empty(server: Server) -> None:
    with psycopg.connect(server.address) as connection:
        connection.execute('DROP TABLE IF EXISTS "Sums of Keys", flux_positions')


ONCE, TWICE = [("a", 2, 4), ("b'; --", 1, 7)], [("a", 4, 8), ("b'; --", 2, 14)]


def test_a_position_counts_once_whoever_writes_it_and_each_query_has_its_own(server: Server) -> None:
    one, other = opened(server, "q"), opened(server, "q")
    assert one.committed(0) == 0
    one.write(rows(), flux.Position(0, 0))
    assert other.committed(0) == 1
    other.write(rows(), flux.Position(0, 0))
    assert table(server) == ONCE
    other.write(rows(), flux.Position(0, 1))
    with pytest.raises(psycopg.OperationalError) as ended:
        one.write(rows(), flux.Position(0, 1))  # its connection was ended when the other was asked
    assert one.is_transient(ended.value)
    one.write(rows(), flux.Position(0, 1))
    assert table(server) == TWICE
    another = opened(server, "another")
    assert another.committed(0) == 0
    for sink in (one, other, another):
        sink.close()


def test_a_gap_is_refused(server: Server) -> None:
    sink = opened(server, "q")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rows would be lost"):
            sink.write(rows(), flux.Position(0, 2))
    sink.write(rows(), flux.Position(0, 0))
    with pytest.raises(RuntimeError, match="flux_positions has 1"):
        sink.write(rows(), flux.Position(0, 2))
    assert table(server) == ONCE
    assert sink.committed(0) == 1
    sink.close()


@pytest.mark.parametrize("asked", [True, False])
def test_a_writer_that_is_stopped_before_its_commit_holds_up_nobody_for_long(server: Server, asked: bool) -> None:
    from examples.postgres import Additions

    entered, goes_on = threading.Event(), threading.Event()

    class Paused(Additions):
        def store(self, rows: Any, position: flux.Position) -> None:
            super().store(rows, position)
            entered.set()
            goes_on.wait(LONG_S)

    def write() -> None:
        try:
            paused.write(rows(), flux.Position(0, 0))
        except psycopg.OperationalError as error:
            errors.append(error)

    errors: list[Any] = []
    paused, successor = opened(server, "q", Paused), opened(server, "q")
    thread = threading.Thread(target=write)
    thread.start()
    assert entered.wait(LONG_S)
    if asked:
        assert successor.committed(0) == 0
    else:  # it was asked before the other began
        with pytest.raises(psycopg.errors.LockNotAvailable) as waited:
            successor.write(rows(), flux.Position(0, 0))
        assert successor.is_transient(waited.value)
    successor.write(rows(), flux.Position(0, 0))
    assert table(server) == ONCE
    goes_on.set()
    thread.join(LONG_S)
    assert paused.is_transient(errors[0])
    paused.write(rows(), flux.Position(0, 0))  # as it is tried again, with a new connection
    assert table(server) == ONCE
    successor.write(rows(), flux.Position(0, 1))
    assert table(server) == TWICE
    paused.close()
    successor.close()


def test_a_lost_connection_is_made_again(server: Server) -> None:
    sink = opened(server, "q")
    sink.write(rows(), flux.Position(0, 0))
    with psycopg.connect(server.address) as connection:
        connection.execute("SELECT pg_terminate_backend(%s)", (sink.connection.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError) as lost:
        sink.write(rows(), flux.Position(0, 1))
    assert sink.is_transient(lost.value)
    sink.write(rows(), flux.Position(0, 1))
    assert table(server) == TWICE
    sink.close()


def test_output_without_the_columns_is_refused(server: Server) -> None:
    from examples.postgres import Additions

    with pytest.raises(ValueError, match="no column sum; there are k, n"):
        Additions(server.address, "t", "k", ["n", "sum"]).check(pa.schema([("k", pa.string()), ("n", pa.int64())]))
