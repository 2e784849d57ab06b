"""Sums in a table of a real PostgreSQL server, while a worker is stopped between statement and commit, and another is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from striking import KEYS, PARTITIONS, ROUNDS, ROWS, WAIT_S, paced, rows_in, strike, until

import flux
from tests.postgres_server import Server, missing

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
from examples.postgres import Additions  # noqa: E402

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@flux.stage(key="key", partitions=2, replicas=2, schema="key STRING, n BIGINT, sequence BIGINT")
def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
    key, sequence = batch.columns
    return pa.record_batch([key.cast(pa.string()), pa.array([1] * len(key)), sequence], ["key", "n", "sequence"])


class Stopping(Additions):
    """A sink that stops its process before the commit of its fifth batch, in one copy only. ``marker``: file with the process."""

    marker = ""

    def store(self, rows: Any, position: flux.Position) -> None:
        super().store(rows, position)
        if position.sequence >= 5:
            try:
                with open(self.marker, "x") as out:
                    out.write(str(os.getpid()))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture
def server() -> Iterator[Server]:
    if why := missing():
        pytest.skip(why)
    server = Server()
    yield server
    server.close()


@pytest.mark.usefixtures("nothing_left_behind")
def test_each_row_counts_once_though_a_primary_sleeps_before_its_commit_and_a_worker_is_killed(
    slots: Any, tmp_path: Path, server: Server
) -> None:
    sink = Stopping(server.address, "sums", "key", ["n", "sequence"])
    sink.marker = str(tmp_path / "stopped")
    flow = counted(flux.source(paced(tmp_path / "gate"), ROWS, partitions=PARTITIONS))
    query = flow.to(sink).start(spark=slots, workers=3, progress_interval="100ms", heartbeat_timeout="1s")

    def next_positions() -> dict[int, int]:
        with psycopg.connect(server.address) as connection:
            return dict(connection.execute("SELECT partition, next FROM flux_positions").fetchall())

    try:
        marker = Path(sink.marker)
        until(lambda: marker.exists() and marker.read_text(), "a primary that stops before its commit")
        stopped = int(marker.read_text())
        try:
            until(
                lambda: stopped not in [m.about.pid for m in query.members().values()], "the stopped worker is given up"
            )
            before = next_positions()
            until(
                lambda: all(next_positions().get(p, 0) > before.get(p, 0) for p in range(2)),
                "all partitions go on without it",
            )
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert rows_in(query) < KEYS * PARTITIONS * ROUNDS, "the faults must come in mid-stream"
        until(query.is_whole, "full replication")
        strike(query, signal.SIGKILL, stage=0)
        (tmp_path / "gate").touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    with psycopg.connect(server.address) as connection:
        found = connection.execute("SELECT key, n, sequence FROM sums").fetchall()
    expected = [(str(key), ROUNDS, ROUNDS * (ROUNDS - 1) // 2) for key in range(KEYS * PARTITIONS)]
    assert sorted(found) == sorted(expected)
