"""Readers of output over real sockets: the loss of workers in the middle, the end of the query, and answers that are damaged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, Peer, ThreadQuery, dataframe

import flux
from flux.errors import Fenced, ProtocolError, QueryFailed
from flux.shell.output_loops import MALFORMED_MAX, Puller, decoded
from flux.shell.process import Stopped
from flux.tasks.output_pull import OutputPull, OutputSurvey
from flux.wire.frames import encode
from flux.wire.messages import Pull

SCHEMA = pa.schema([("x", pa.int64()), ("wide", pa.string())])
ROWS, WIDE, PARTITIONS = 4_000, "w" * 400, 2


@flux.stage(partitions=PARTITIONS, replicas=2, schema=SCHEMA)
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def query(request: Any) -> Iterator[ThreadQuery]:
    """Yield a query with some output that waits for a reader. Its other rows wait for room."""
    options = {"operate": False, "replicas_allow_same_executor": True, "batch_max_rows": 50}
    flow = same(dataframe(SCHEMA)).to_readers(max_bytes="200k")
    with ThreadQuery(flow, encrypted=request.param, **options) as query:  # type: ignore[arg-type]
        query.started().feed([[pa.record_batch([pa.array(range(ROWS)), pa.repeat(WIDE, ROWS)], schema=SCHEMA)]])
        yield query


@pytest.fixture
def puller(query: ThreadQuery) -> Iterator[Puller]:
    puller = Puller(query.rendezvous, SCHEMA, 60.0)
    yield puller
    puller.close()


def read(puller: Puller, pulling: OutputPull, most: int = 1) -> list[int]:
    """Read at least ``most`` rows, or up to the end."""
    found: list[int] = []
    limit = time.monotonic() + LIMIT_S
    while not pulling.over and len(found) < most:
        assert time.monotonic() < limit, f"{len(found)} rows came in {LIMIT_S:g} s, {most} are awaited"
        got = pulling.take()
        if got is None:
            puller.turn(pulling, 0.1)
        else:
            found += got.batch.column("x").to_pylist()
    return found


def read_to_the_end(puller: Puller, pulling: OutputPull) -> list[int]:
    """Read batch by batch. The last acknowledgement may end the query before its answer has left; rows that were read
    count."""
    found: list[int] = []
    with suppress(Stopped):
        while not pulling.over:
            found += read(puller, pulling)
    return found


def all_of_it() -> OutputPull:
    return OutputPull(0, dict.fromkeys(range(PARTITIONS), 0), 30_000)


def test_all_rows_come_once_and_then_the_query_has_ended(query: ThreadQuery, puller: Puller) -> None:
    assert sorted(read_to_the_end(puller, all_of_it())) == list(range(ROWS))
    query.wait()


def test_the_loss_of_a_worker_in_the_middle_is_no_loss_of_rows(query: ThreadQuery, puller: Puller) -> None:
    pulling = all_of_it()
    found = read(puller, pulling, ROWS // 3)
    assert query.server.core.table is not None
    worker = query.server.core.table.stages[0][0][0].worker
    query.server.command(lambda now: query.server.core.on_closed(worker, now))
    found += read_to_the_end(puller, pulling)
    assert sorted(found) == list(range(ROWS))
    assert all(isinstance(error, Fenced) for error in query.raised)


def test_a_survey_says_how_far_each_partition_is(query: ThreadQuery, puller: Puller) -> None:
    pulling = all_of_it()
    read(puller, pulling, 500)
    survey = OutputSurvey(0, dict.fromkeys(range(PARTITIONS), 0))
    puller.until_over(survey, LIMIT_S)
    for partition, part in survey.parts.items():
        assert part.left <= pulling.acknowledged[partition] <= pulling.parts[partition].position <= part.end
    assert sum(part.left for part in survey.parts.values()) > 0


def test_a_reader_of_a_query_that_has_ended_hears_so(query: ThreadQuery, puller: Puller) -> None:
    pulling = all_of_it()
    read(puller, pulling, 500)
    query.stop()
    with pytest.raises(Stopped, match="the query has ended"):
        read(puller, pulling, ROWS)


def test_rows_that_another_has_acknowledged_are_not_passed_over(query: ThreadQuery, puller: Puller) -> None:
    read(puller, all_of_it(), 500)
    with pytest.raises(QueryFailed, match="another reader has acknowledged them"):
        read(puller, all_of_it(), ROWS)


def test_questions_about_partitions_that_do_not_exist_change_nothing(query: ThreadQuery, puller: Puller) -> None:
    with Peer(query.ports()[0], keys=query.keys) as peer:
        for stage, partition in ((-1, 0), (0, -1), (0, 99), (7, 0)):
            peer.send(encode(Pull(stage, partition, 0, 1 << 62, 1 << 62, True)))
            assert peer.recv() is not None
        peer.send(encode(Pull(0, 0, 1 << 62, 0, 1 << 62, False)))  # nor does a position that is far from being reached
        assert peer.recv() is not None
    assert len(set(read(puller, all_of_it(), ROWS // 2))) >= ROWS // 2


def test_what_is_not_the_output_is_refused() -> None:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, SCHEMA) as writer:
        writer.write_batch(pa.record_batch([pa.array([1]), pa.array(["a"])], schema=SCHEMA))
    good = stream.getvalue().to_pybytes()
    assert decoded([good], SCHEMA)[0].num_rows == 1
    for frames, why in (
        ([good, good], "one payload frame, 2 came"),
        ([good[:-40]], "not a stream of record batches"),
        ([b"nonsense"], "not a stream of record batches"),
        ([b""], "not a stream of record batches"),
    ):
        with pytest.raises(ProtocolError, match=why):
            decoded(frames, SCHEMA)
    with pytest.raises(ProtocolError, match="output has the columns"):
        decoded([good], pa.schema([("x", pa.int64())]))


def test_answers_that_can_never_be_read_end_the_reader(query: ThreadQuery) -> None:
    puller = Puller(query.rendezvous, pa.schema([("x", pa.string())]), 60.0)
    try:
        with pytest.raises(QueryFailed, match="cannot be read: output has the columns"):
            read(puller, all_of_it(), ROWS)
        assert puller.malformed == MALFORMED_MAX
    finally:
        puller.close()
