"""A reader of output: its questions and their receivers, the use of the answers, and acknowledgements."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from flux.errors import ProtocolError, QueryFailed
from flux.tasks.output_pull import OVER_EVERY_S, PATIENCE_S, TABLE_EVERY_S, OutputPull, OutputSurvey, StageRemoved
from flux.wire.messages import Pull, Pulled
from partitioning.table import ReplicaAt, Table

STAGE, LOTS = 1, 1000


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


def table(epoch: int, *leaders: int) -> Table:
    """Make a table with the primary of each partition of the stage. Worker 7 is at "tcp://7"."""
    endpoints = {worker: f"tcp://{worker}" for worker in leaders}
    stages = (), tuple((ReplicaAt(worker, 0, True),) for worker in leaders)
    return Table(epoch=epoch, stages=tuple(stages), sources=(), endpoints=endpoints)


def reading(positions: dict[int, int] | None = None, **options: Any) -> OutputPull:
    pulling = OutputPull(STAGE, positions or {0: 0}, LOTS, **options)
    pulling.on_table(table(1, *range(7, 7 + len(pulling.parts))))
    return pulling


def asked(pulling: OutputPull, now: float) -> list[tuple[str, Pull]]:
    return [(ask.endpoint, ask.pull) for ask in pulling.asks(now)]


def taken(pulling: OutputPull) -> list[tuple[int, int, list[int]]]:
    found = []
    while (got := pulling.take()) is not None:
        found.append((got.partition, got.position, got.batch.column("x").to_pylist()))
    return found


def test_it_asks_for_the_table_first_and_no_more_often_than_it_may() -> None:
    pulling = OutputPull(STAGE, {0: 0}, LOTS)
    assert asked(pulling, 0.0) == []
    assert pulling.wants_table(0.0)
    assert not pulling.wants_table(TABLE_EVERY_S / 2)
    assert pulling.wants_table(TABLE_EVERY_S)
    pulling.on_table(table(1, 7))
    assert not pulling.wants_table(9.0)
    assert asked(pulling, 9.0) == [("tcp://7", Pull(STAGE, 0, 0, 0, LOTS, True))]


def test_the_removal_of_its_stage_is_told_and_not_waited_for() -> None:
    pulling = reading()
    assert len(asked(pulling, 0.0)) == 1
    for stages in ((), ((),), ((), ())):
        with pytest.raises(StageRemoved, match="was removed from the query, or has failed"):
            pulling.on_table(Table(epoch=2, stages=stages, sources=(), endpoints={}))
    assert pulling.endpoint(0) == "tcp://7", "the last acknowledgement goes where the stage was"


def test_it_asks_one_question_at_a_time_and_goes_on_behind_the_answer() -> None:
    pulling = reading()
    assert len(asked(pulling, 0.0)) == 1
    assert asked(pulling, 0.1) == []
    pulling.on_pulled(Pulled(STAGE, 0, 0, 2, end=2), [batch(1), batch(2)], 0.1)
    assert asked(pulling, 0.1) == [], "what has come is taken first: nothing heaps up"
    assert taken(pulling) == [(0, 0, [1]), (0, 1, [2])]
    assert asked(pulling, 0.2) == [("tcp://7", Pull(STAGE, 0, 2, 2, LOTS, True))], "and both are acknowledged"


def test_a_batch_is_acknowledged_when_the_next_one_is_asked_for_and_not_when_it_is_handed_out() -> None:
    pulling = reading()
    list(pulling.asks(0.0))
    pulling.on_pulled(Pulled(STAGE, 0, 0, 2, end=2), [batch(1), batch(2)], 0.1)
    pulling.take()
    assert pulling.acknowledged == {0: 0}
    pulling.take()
    assert pulling.acknowledged == {0: 1}
    pulling.settle()
    assert pulling.acknowledged == {0: 2}
    assert [ask.pull.acknowledged for ask in pulling.last_words()] == [2]


def test_an_answer_that_comes_twice_or_late_is_nothing_new() -> None:
    pulling = reading()
    list(pulling.asks(0.0))
    answer = Pulled(STAGE, 0, 0, 1, end=1)
    for _ in range(2):
        pulling.on_pulled(answer, [batch(1)], 0.1)
    assert taken(pulling) == [(0, 0, [1])]
    for other in (answer, Pulled(STAGE, 5, 1, 1, end=2), Pulled(0, 0, 1, 1, end=2)):
        pulling.on_pulled(other, [batch(9)], 0.2)
    assert taken(pulling) == []


def test_a_worker_that_does_not_answer_may_be_lost_and_the_newest_table_says_who_leads() -> None:
    pulling = reading()
    list(pulling.asks(0.0))
    assert not pulling.wants_table(PATIENCE_S / 2)
    assert asked(pulling, PATIENCE_S) == [("tcp://7", Pull(STAGE, 0, 0, 0, LOTS, True))], "it may as well be slow"
    assert pulling.wants_table(PATIENCE_S)
    pulling.on_table(table(2, 8))
    assert asked(pulling, 2 * PATIENCE_S) == [("tcp://8", Pull(STAGE, 0, 0, 0, LOTS, True))]
    pulling.on_table(table(1, 7))
    assert asked(pulling, 3 * PATIENCE_S)[0][0] == "tcp://8", "an older table is no news"


def test_who_does_not_lead_any_more_is_asked_again_only_after_a_while() -> None:
    pulling = reading()
    list(pulling.asks(0.0))
    pulling.on_pulled(Pulled(STAGE, 0, 0, leads=False), [], 0.1)
    assert asked(pulling, 0.1) == []
    assert pulling.wants_table(0.1)
    assert len(asked(pulling, 0.1 + TABLE_EVERY_S)) == 1


def test_what_is_acknowledged_is_said_again_though_all_is_over_to_whoever_leads_then() -> None:
    """Repeat the acknowledgement: the worker that heard it may have been deposed, or be lost before another replica
    knows."""
    pulling = reading()
    list(pulling.asks(0.0))
    pulling.on_pulled(Pulled(STAGE, 0, 0, 1, end=1, finished=True), [batch(1)], 0.1)
    assert taken(pulling) == [(0, 0, [1])]
    list(pulling.asks(0.2))
    pulling.on_pulled(Pulled(STAGE, 0, 1, left=1, end=1, finished=True), [], 0.2)
    assert pulling.over
    assert asked(pulling, 0.2) == []
    assert pulling.due(0.2) <= 0.2 + OVER_EVERY_S
    assert pulling.wants_table(0.2 + TABLE_EVERY_S)
    pulling.on_table(table(2, 8))
    said = Pull(STAGE, 0, 1, 1, LOTS, False)
    assert asked(pulling, 0.2 + OVER_EVERY_S) == [("tcp://8", said)]
    pulling.on_pulled(Pulled(STAGE, 0, 1, left=0, end=0), [], 1.0)
    assert pulling.over, "what the new primary does not know changes nothing for the reader"
    assert asked(pulling, 1.0 + OVER_EVERY_S) == [("tcp://8", said)]


def test_what_there_is_to_acknowledge_goes_out_although_a_question_waits() -> None:
    """Send the acknowledgement: the worker may wait for just this one, because its room is full."""
    pulling = reading(acknowledging=False)
    list(pulling.asks(0.0))
    pulling.acknowledge(0, 0)
    assert asked(pulling, 0.1) == []
    pulling.acknowledge(0, 3)
    assert [pull.acknowledged for _, pull in asked(pulling, 0.1)] == [3]
    assert asked(pulling, 0.1) == []


def test_it_is_over_when_the_worker_has_heard_that_all_has_come() -> None:
    pulling = reading()
    list(pulling.asks(0.0))
    pulling.on_pulled(Pulled(STAGE, 0, 0, 1, end=1, finished=True), [batch(1)], 0.1)
    assert not pulling.over
    taken(pulling)
    assert (pulling.over, pulling.all_read) == (False, True)
    assert asked(pulling, 0.1) == [("tcp://7", Pull(STAGE, 0, 1, 1, LOTS, False))]
    pulling.on_pulled(Pulled(STAGE, 0, 1, left=1, end=1, finished=True), [], 0.2)
    assert pulling.over


def test_a_task_reads_to_its_end_and_acknowledges_nothing() -> None:
    pulling = OutputPull(STAGE, {0: 5}, LOTS, {0: 7}, acknowledging=False, where={0: "tcp://3"})
    assert not pulling.wants_table(0.0), "who leads was known when it was planned"
    assert asked(pulling, 0.0) == [("tcp://3", Pull(STAGE, 0, 5, 0, LOTS, True))]
    pulling.on_pulled(Pulled(STAGE, 0, 5, 3, left=5, end=9), [batch(5), batch(6), batch(7)], 0.1)
    assert taken(pulling) == [(0, 5, [5]), (0, 6, [6])]
    assert pulling.over
    assert pulling.acknowledged == {0: 0}


def test_rows_that_another_reader_has_acknowledged_are_an_error_and_no_gap() -> None:
    pulling = reading({0: 3})
    list(pulling.asks(0.0))
    with pytest.raises(QueryFailed, match=r"from batch 3 on, and the batches below 5 are gone.*one reader"):
        pulling.on_pulled(Pulled(STAGE, 0, 3, left=5, end=8), [], 0.1)


def test_a_position_behind_the_end_of_the_output_is_an_error_and_no_endless_wait() -> None:
    pulling = reading({0: 9})
    list(pulling.asks(0.0))
    pulling.on_pulled(Pulled(STAGE, 0, 9, end=4), [], 0.1)  # a new primary that is not as far yet
    with pytest.raises(QueryFailed, match="end with 4 batches of output, and is to be read from batch 9 on"):
        pulling.on_pulled(Pulled(STAGE, 0, 9, end=4, finished=True), [], 0.2)


def test_an_answer_whose_payload_is_not_as_announced_is_refused() -> None:
    pulling = reading()
    list(pulling.asks(0.0))
    with pytest.raises(ProtocolError, match="1 batches of output, the header announces 2"):
        pulling.on_pulled(Pulled(STAGE, 0, 0, 2, end=2), [batch(1)], 0.1)
    assert len(asked(pulling, PATIENCE_S)) == 1, "and asked for again"


# ---- how far they are


def survey(acknowledged: dict[int, int], *answers: Pulled) -> OutputSurvey:
    found = OutputSurvey(STAGE, acknowledged, table(1, 7, 8))
    assert all(not ask.pull.waits and not ask.pull.bytes_max for ask in found.asks(0.0))
    for answer in answers:
        found.on_pulled(answer, [], 0.1)
    return found


def test_a_survey_is_over_when_every_partition_has_said_how_far_it_is() -> None:
    found = survey({0: 0, 1: 2}, Pulled(STAGE, 0, 0, left=0, end=4))
    assert not found.over
    found.on_pulled(Pulled(STAGE, 1, 2, left=2, end=6), [], 0.1)
    assert found.over
    assert found.latest({0: 0, 1: 2}) == {0: 4, 1: 6}


def test_a_survey_takes_no_batches_that_another_reader_of_the_same_connection_has_asked_for() -> None:
    found = survey({0: 0, 1: 0}, Pulled(STAGE, 1, 0, end=2))
    found.on_pulled(Pulled(STAGE, 0, 0, 1, end=4), [batch(1)], 0.1)
    assert found.over
    assert found.latest({0: 0, 1: 0}) == {0: 4, 1: 2}


def test_an_end_never_goes_back() -> None:
    found = survey({0: 0, 1: 0}, Pulled(STAGE, 0, 0, end=4), Pulled(STAGE, 1, 0, end=2))
    assert found.latest({0: 5, 1: 0}) == {0: 5, 1: 2}, "a new primary is not as far as the one before was"


def test_of_a_full_partition_one_batch_is_left_for_the_next_time() -> None:
    """Leave one batch: Spark acknowledges processed rows when there are new ones to process, and a full query gives no
    new rows before it hears an acknowledgement."""
    found = survey({0: 0, 1: 0}, Pulled(STAGE, 0, 0, end=4, full=True), Pulled(STAGE, 1, 0, end=4))
    assert found.latest({0: 0, 1: 0}) == {0: 3, 1: 4}
    assert found.latest({0: 3, 1: 4}) == {0: 4, 1: 4}, "the last one is there, and with it the others are acknowledged"
