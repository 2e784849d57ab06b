"""The sending end of a stream, told as stories: messages of consumers, and the rows that are sent then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from clustered import clustered

from flux.errors import NonDeterministicInputError, RefusedError
from flux.exchange.bounds import WatermarkPace
from flux.exchange.consumer_progress import MESSAGE_BYTES
from flux.exchange.producer import Producer, state_watermark
from flux.exchange.replay_check import START, Beginning
from flux.wire.messages import Ack, Bound, Data, Hello, Mark, ReadsElsewhere, Refuse, Reset, Resume
from partitioning.clustering import Clustered
from partitioning.ids import STANDBY, StreamId
from partitioning.table import ReplicaAt, Table

#: Worker 10 hosts partitions 0 and 2, worker 11 hosts partition 1.
PLACES = (10, 11, 10)
GREETING = ("Hello", 10), ("Hello", 11)


def table(epoch: int = 0, places: tuple[int, ...] = PLACES, incarnations: tuple[int, ...] = (0, 0, 0)) -> Table:
    replicas = tuple((ReplicaAt(worker, i),) for worker, i in zip(places, incarnations, strict=True))
    return Table(epoch, (replicas,), (), dict.fromkeys(places, ""))


def producer(log_bytes_max: int = 1 << 20, incarnation: int = 0) -> Producer:
    made = Producer(StreamId(4, 1), incarnation, 3, log_bytes_max, resend_s=1.0)
    made.on_table(table(), 0, 0.0)
    return made


def batch(*counts: int) -> Clustered:
    """Make a batch with these counts of rows, of 8 bytes each, for partitions 0, 1, 2."""
    rows = pa.record_batch({"x": pa.array(np.arange(sum(counts)), pa.int64())})
    return clustered(rows, range(3), counts)


def resume(worker: int, needed: int = 0, nonce: int = 1, granted: int = 1 << 20, epoch: int = 0, **more: Any) -> Resume:
    mine = [partition for partition, place in enumerate(PLACES) if place == worker]
    return Resume(4, 1, nonce, epoch, [(p, needed) for p in mine], needed - 1, [], granted, **more)


def ack(
    through: int, granted: int = 1 << 20, nonce: int = 1, behind: tuple[tuple[int, int], ...] = (), epoch: int = 0
) -> Ack:
    return Ack(4, 1, nonce, epoch, through, list(behind), granted)


def sent(p: Producer, now: float = 0.0) -> list[Any]:
    return [
        ("Hello", effect.worker) if isinstance(effect.message, Hello) else (effect.worker, effect.message.sequence)
        for effect in p.poll(now)
    ]


def messages(p: Producer, worker: int, now: float = 0.0) -> list[Data]:
    return [e.message for e in p.poll(now) if e.worker == worker and isinstance(e.message, Data)]


def welcomed(p: Producer, **given: Any) -> Producer:
    list(p.poll(0.0))
    for worker in (10, 11):
        p.on_answer(worker, resume(worker, **given), 0.0)
    return p


def test_each_worker_is_greeted_and_gets_only_what_has_rows_for_it() -> None:
    p = producer()
    p.append(batch(1, 0, 1), 0.0)
    p.append(batch(0, 2, 0), 0.0)
    assert sent(p) == [*GREETING]
    p.on_answer(10, resume(10), 0.0)
    assert sent(p) == [(10, 0)]
    p.on_answer(11, resume(11), 0.0)
    assert sent(p) == [(11, 1)]


def test_one_message_carries_the_slices_of_all_partitions_of_a_worker() -> None:
    p = welcomed(producer())
    p.append(batch(2, 1, 3), 7.0)
    (message,) = messages(p, 10)
    assert (message.partitions, message.rows, message.runs) == ([0, 2], [2, 3], [1, 1])
    assert (message.number, message.first, message.sequence, message.created) == (0, 0, 0, 7.0)


def test_partitions_that_lie_next_to_each_other_travel_as_one_frame() -> None:
    p = producer()
    assert p.by_rank is not None
    assert p.by_rank.tolist() == [0, 2, 1]
    welcomed(p)
    rows = pa.record_batch({"x": pa.array(range(6), pa.int64())})
    p.append(clustered(rows, p.by_rank, [2, 3, 1]), 0.0)
    (message,) = messages(p, 10)
    assert (message.partitions, message.rows, message.runs) == ([0, 2], [2, 3], [2])


def test_numbers_say_what_was_left_out() -> None:
    p = welcomed(producer())
    for counts in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        p.append(batch(*counts), 0.0)
    assert [(m.number, m.first, m.sequence) for m in messages(p, 10)] == [(0, 0, 0), (1, 1, 2)]


def test_a_worker_without_credit_holds_back_nobody_else() -> None:
    p = welcomed(producer(), granted=1)
    for _ in range(3):
        p.append(batch(1, 1, 0), 0.0)
    assert sent(p) == [(10, 0), (11, 0)]  # one message may go beyond the bytes that were granted
    p.on_answer(11, ack(0, granted=1 + 2 * (MESSAGE_BYTES + 8)), 0.0)
    assert sent(p) == [(11, 1), (11, 2)]
    p.on_answer(10, ack(0, granted=MESSAGE_BYTES + 9), 0.0)
    assert sent(p) == [(10, 1)]


def test_a_statement_about_sent_rows_needs_no_credit() -> None:
    def told(now: float) -> list[tuple[int, int, int]]:
        found = [(effect.worker, effect.message) for effect in p.poll(now)]
        return [(worker, bound.sequence, bound.watermark) for worker, bound in found if isinstance(bound, Bound)]

    p = Producer(StreamId(4, 1), 0, 3, 1 << 20, resend_s=9.0, pace=WatermarkPace(0, 0.0))
    p.on_table(table(), 0, 0.0)
    welcomed(p, granted=1)
    p.append(batch(1, 1, 0), 0.0)
    assert sent(p) == [(10, 0), (11, 0)], "the credit is used up"
    state_watermark(p, 1, 7)
    assert told(1.0) == [(10, 1, 7), (11, 1, 7)]
    p.append(batch(0, 1, 0), 0.0)
    state_watermark(p, 2, 8)
    assert told(2.0) == [], "it stands behind rows that were not sent"
    p.on_answer(11, ack(0), 3.0)
    assert told(3.0) == [(11, 2, 8)]


def test_an_old_ack_does_not_take_credit_back() -> None:
    p = welcomed(producer(), granted=10_000)
    p.on_answer(10, ack(-1, granted=1), 0.0)
    p.append(batch(1, 0, 0), 0.0)
    assert sent(p) == [(10, 0)]


def test_a_full_log_stops_the_owner_until_the_slowest_has_acked() -> None:
    p = welcomed(producer(log_bytes_max=16))
    p.append(batch(1, 1, 0), 0.0)
    assert not p.has_room
    p.on_answer(10, ack(0), 0.0)
    assert not p.has_room
    p.on_answer(11, ack(0), 0.0)
    assert p.has_room


def test_an_ack_may_leave_out_partitions_that_are_behind() -> None:
    p = welcomed(producer())
    p.append(batch(1, 0, 1), 0.0)
    p.on_answer(10, ack(0, behind=((2, -1),)), 0.0)
    assert len(p.log) == 1
    p.on_answer(10, ack(0), 0.0)
    assert len(p.log) == 0


def test_a_late_ack_of_an_earlier_handshake_still_tells_what_is_applied_but_grants_nothing() -> None:
    p = welcomed(producer(), nonce=2, granted=1)
    p.append(batch(1, 0, 0), 0.0)
    p.append(batch(1, 0, 0), 0.0)
    assert sent(p) == [(10, 0)]
    p.on_answer(10, ack(0, nonce=1, granted=1 << 20), 0.0)
    assert (p.log.base, sent(p)) == (1, [])


def test_an_ack_of_a_later_handshake_shows_that_its_resume_was_lost() -> None:
    p = welcomed(producer(), nonce=2)
    p.on_answer(10, ack(-1, nonce=2), 0.1)
    assert sent(p, 0.1) == []
    p.on_answer(10, ack(-1, nonce=3), 0.2)
    p.on_answer(10, ack(-1, nonce=3), 0.2)
    assert sent(p, 0.2) == [("Hello", 10)]
    p.on_answer(10, resume(10, nonce=3), 0.3)
    p.on_answer(10, ack(-1, nonce=3), 0.3)
    assert sent(p, 0.3) == []


def test_an_ack_by_an_older_table_does_not_count_for_a_newer_replica() -> None:
    p = welcomed(producer())
    p.append(batch(1, 0, 0), 0.0)
    p.on_table(table(1, incarnations=(1, 0, 0)), 0, 0.0)
    p.on_answer(10, ack(0, epoch=0), 0.0)
    assert len(p.log) == 1


def test_a_stream_ends_with_a_message_to_every_partition_and_is_drained_by_their_acks() -> None:
    p = welcomed(producer())
    p.finish(0.0)
    assert sent(p) == [(10, 0), (11, 0)]
    assert not p.has_room
    assert not p.drained
    p.on_answer(10, ack(0), 0.0)
    p.on_answer(11, ack(0), 0.0)
    assert p.drained


def test_a_batch_without_rows_is_sent_to_nobody_and_leaves_at_once() -> None:
    p = welcomed(producer())
    p.append(batch(0, 0, 0), 0.0)
    assert (sent(p), len(p.log), p.next_sequence) == ([], 0, 1)


def test_a_resumed_worker_gets_everything_from_where_it_says() -> None:
    p = welcomed(producer())
    for _ in range(3):
        p.append(batch(1, 0, 0), 0.0)
    assert sent(p) == [(10, 0), (10, 1), (10, 2)]
    p.on_answer(10, resume(10, needed=1, nonce=2), 0.0)
    again = messages(p, 10)
    assert [(m.nonce, m.number, m.first, m.sequence) for m in again] == [(2, 0, 1, 1), (2, 1, 2, 2)]


def test_partitions_that_need_different_batches_each_get_theirs() -> None:
    p = producer()
    list(p.poll(0.0))
    for _ in range(2):
        p.append(batch(1, 0, 1), 0.0)
    p.on_answer(10, Resume(4, 1, 1, 0, [(0, 1), (2, 0)], 0, [(2, -1)], 1 << 20), 0.0)
    assert [(m.sequence, m.partitions) for m in messages(p, 10)] == [(0, [2]), (1, [0, 2])]


def test_many_resets_lead_to_one_greeting() -> None:
    p = welcomed(producer())
    for _ in range(3):
        p.append(batch(1, 0, 0), 0.0)
    assert len(sent(p)) == 3
    greetings = []
    for _ in range(3):  # each message of a lost connection is answered by one
        p.on_answer(10, Reset(4, 1, "say Hello first"), 0.1)
        greetings += sent(p, 0.1)
    assert greetings == [("Hello", 10)]


def test_a_worker_that_owes_an_ack_is_greeted_again_after_a_silence_that_grows_up_to_a_bound() -> None:
    p = welcomed(producer())
    p.append(batch(1, 0, 0), 0.0)
    sent(p)
    greeted = [now for now in np.arange(0, 40, 0.5) if ("Hello", 10) in sent(p, float(now))]
    assert [later - earlier for earlier, later in zip(greeted, greeted[1:], strict=False)] == [2, *[4] * 8]


def test_a_greeting_that_nobody_answers_is_repeated_more_rarely_up_to_a_bound() -> None:
    p = producer()
    greeted = [now for now in np.arange(0, 60, 0.5) if ("Hello", 11) in sent(p, float(now))]
    assert greeted == [0, 1, 3, *range(7, 60, 4)]


def test_rows_that_are_owed_wait_for_no_more_than_four_timeouts_however_long_the_silence_before() -> None:
    p = producer()
    times = [step / 10 for step in range(1000)]
    greeted = [now for now in times if ("Hello", 10) in sent(p, now)]
    p.append(batch(1, 1, 1), 100.0)
    assert max(np.diff(greeted)) <= 4.1
    p.on_answer(10, resume(10), 100.0)
    p.on_answer(11, resume(11), 100.0)
    assert sent(p, 100.0) == [(10, 0), (11, 0)]
    assert ("Hello", 10) in [effect for tick in range(1, 42) for effect in sent(p, 100.0 + tick / 10)]


def test_a_consumer_that_has_read_from_another_replica_for_long_misses_a_lost_batch_soon() -> None:
    p = producer()
    for now in range(0, 100, 5):
        list(p.poll(float(now)))
        p.on_answer(10, ReadsElsewhere(4, 1, 0, -1, []), float(now))
        p.on_answer(11, ReadsElsewhere(4, 1, 0, -1, []), float(now))
    p.append(batch(1, 1, 1), 100.0)
    p.on_answer(10, resume(10), 100.0)
    assert (10, 0) in sent(p, 100.0)
    assert ("Hello", 10) in sent(p, 101.1)


def test_an_idle_stream_does_not_greet_again_when_a_batch_comes_at_last() -> None:
    p = welcomed(producer())
    assert sent(p, 99.9) == []
    p.append(batch(1, 0, 0), 100.0)
    assert sent(p, 100.0) == [(10, 0)]
    assert sent(p, 100.5) == []


@pytest.mark.parametrize("seconds", [0.9, 1.5, 3.0])
def test_a_long_step_between_an_ack_and_the_next_batch_is_no_silence_of_the_consumer(seconds: float) -> None:
    """Take the time of an ack for a sign of life: acks do not lead to a poll, and during a step there is none."""
    p = welcomed(producer())
    p.append(batch(1, 1, 0), 0.0)
    sent(p)
    for worker in (10, 11):
        p.on_answer(worker, ack(0), 0.3)
    assert not p.dirty
    p.append(batch(1, 1, 0), 0.3 + seconds)
    assert [type(effect.message) for effect in p.poll(0.3 + seconds)] == [Data, Data]


def test_an_ack_that_brings_credit_for_rows_that_wait_is_followed_by_them() -> None:
    p = welcomed(producer(), granted=1)
    for _ in range(2):
        p.append(batch(1, 0, 0), 0.0)
    assert len(messages(p, 10)) == 1
    p.on_answer(10, ack(0, granted=1 << 20), 0.1)
    assert p.dirty
    assert [message.sequence for message in messages(p, 10, 0.1)] == [1]


def test_an_answer_from_before_its_sender_hosts_something_else_is_asked_for_again() -> None:
    p = producer()
    list(p.poll(0.0))
    p.on_table(table(epoch=3, incarnations=(3, 0, 0)), 0, 0.0)
    p.append(batch(1, 0, 0), 0.0)
    assert sent(p, 0.0) == [("Hello", 10)]
    p.on_answer(10, resume(10, epoch=2), 0.0)
    assert sent(p, 0.05) == []
    assert sent(p, 0.2) == [("Hello", 10)]


def test_epochs_that_changed_other_workers_leave_a_handshake_valid() -> None:
    p = producer()
    list(p.poll(0.0))
    p.on_table(table(epoch=3, incarnations=(0, 3, 0)), 0, 0.0)  # a repair on worker 11
    p.append(batch(1, 0, 0), 0.0)
    p.on_answer(10, resume(10, epoch=0), 0.0)
    assert (10, 0) in sent(p, 0.0), "no second greeting is waited for"


def test_workers_that_left_the_table_are_waited_for_no_longer() -> None:
    p = welcomed(producer())
    p.append(batch(0, 1, 0), 0.0)
    p.on_table(table(1, places=(10, 10, 10), incarnations=(0, 1, 0)), 0, 0.0)
    assert sent(p, 0.0) == [("Hello", 10)]
    p.on_answer(10, Resume(4, 1, 5, 1, [(0, 0), (1, 0), (2, 0)], -1, [], 1 << 20), 0.0)
    assert sent(p) == [(10, 0)]


def test_a_refusal_is_an_error_that_says_why() -> None:
    with pytest.raises(RefusedError, match=r"worker 10 refuses stream 4\.1: newer") as caught:
        producer().on_answer(10, Refuse(4, 1, "stale", "newer"), 0.0)
    assert caught.value.code == "stale"


# ---- a retried task: the consumers have applied batches of an earlier attempt


def retried() -> Producer:
    p = producer(incarnation=1)
    list(p.poll(0.0))
    return p


def test_a_retry_makes_again_what_is_applied_and_sends_what_is_not() -> None:
    p = retried()
    p.on_answer(10, resume(10, needed=2, shown=[Mark(1, 101)]), 0.0)
    p.on_answer(11, resume(11, needed=0), 0.0)
    for sequence in range(3):
        p.append(batch(1, 0, 0), 0.0, checksum=100 + sequence)
    assert p.log.base == 2
    assert sent(p) == [(10, 2)]


def test_a_retry_that_reads_other_rows_is_an_error_that_names_the_partition() -> None:
    p = retried()
    p.on_answer(10, resume(10, needed=1, shown=[Mark(0, 100)]), 0.0)
    with pytest.raises(NonDeterministicInputError, match=r"partition 1 .* at or before batch 0 than worker 10"):
        p.append(batch(1, 0, 0), 0.0, checksum=999)


def test_other_rows_are_found_out_also_when_the_worker_answers_late() -> None:
    p = retried()
    p.append(batch(1, 0, 0), 0.0, checksum=999)
    with pytest.raises(NonDeterministicInputError):
        p.on_answer(10, resume(10, needed=1, shown=[Mark(0, 100)]), 0.0)


def test_a_worker_that_has_lost_its_replica_meanwhile_still_shows_what_it_had() -> None:
    p = retried()
    p.append(batch(1, 0, 0), 0.0, checksum=999)
    p.on_table(Table(9, (((ReplicaAt(11, 9),),) * 3,), (), {10: "", 11: ""}), 0, 0.0)
    with pytest.raises(NonDeterministicInputError):
        p.on_answer(10, resume(10, needed=1, shown=[Mark(0, 100)]), 0.0)


def test_nothing_is_forgotten_before_every_worker_has_said_what_it_has() -> None:
    p = retried()
    p.append(batch(0, 0, 0), 0.0, checksum=999)  # an empty batch is of no use to anyone, but for the comparison
    with pytest.raises(NonDeterministicInputError):
        p.on_answer(10, resume(10, needed=1, shown=[Mark(0, 100)]), 0.0)


def test_a_retry_that_reads_less_is_an_error() -> None:
    p = retried()
    p.on_answer(10, resume(10, needed=3, shown=[Mark(2, 102)]), 0.0)
    p.append(batch(1, 0, 0), 0.0, checksum=100)
    with pytest.raises(NonDeterministicInputError, match="batch 2"):
        p.finish(0.0)


def test_a_retry_that_reads_less_is_an_error_also_when_the_worker_answers_late() -> None:
    p = retried()
    p.finish(0.0)
    with pytest.raises(NonDeterministicInputError, match="batch 2"):
        p.on_answer(10, resume(10, needed=3, shown=[Mark(2, 102)]), 0.0)


def test_a_retry_of_a_finished_task_has_nothing_to_send() -> None:
    p = retried()
    for worker in (10, 11):
        p.on_answer(worker, resume(worker, needed=2, shown=[Mark(1, 100)]), 0.0)
    p.append(batch(1, 1, 0), 0.0, checksum=100)
    p.finish(0.0)
    assert p.drained
    assert sent(p) == []


# ---- where a new reader of a source begins


def reader_while_a_replica_is_added() -> Producer:
    """Make the producer of a reader. Worker 10 has all three partitions, and a copy of partition 1 is being made on
    worker 11."""
    made = Producer(StreamId(4, 1), 5, 3, 1 << 20, resend_s=1.0)
    replicas = (ReplicaAt(10, 0),), (ReplicaAt(10, 0), ReplicaAt(11, 5, False)), (ReplicaAt(10, 0),)
    made.on_table(Table(5, (replicas,), (), {10: "", 11: ""}), 0, 0.0)
    list(made.poll(0.0))
    everything = [(0, 8), (1, 8), (2, 8)]
    made.on_answer(10, Resume(4, 1, 1, 5, everything, 7, [], 1 << 20, [Mark(6, 66), Mark(7, 77)]), 0.0)
    made.on_answer(11, Resume(4, 1, 1, 5, [], 7, [(1, -1)], 1 << 20), 0.0)
    return made


def test_a_replica_without_a_state_does_not_send_a_new_reader_back_to_the_start() -> None:
    """Begin at the marks of the other replicas, however long the copy takes: on a busy machine that was longer than any
    patience, and minutes of input were read again."""
    p = reader_while_a_replica_is_added()
    assert p.floor() == Beginning(7, 66)


def test_a_new_replica_with_a_state_counts_before_it_is_live() -> None:
    p = reader_while_a_replica_is_added()
    p.on_answer(11, Resume(4, 1, 2, 5, [(1, 7)], 6, [], 1 << 20), 0.0)
    assert p.floor() == START, "no mark below what it has applied is known"


def test_a_new_reader_begins_behind_what_everybody_has_applied_however_long_the_queues_are() -> None:
    """Count applied rows only: rows that are received and still wait are not there for a replica that gets a copy of
    the state."""
    p = retried()
    marks = [Mark(at, 100 + at) for at in (1, 3, 5, 8)]
    p.on_answer(10, Resume(4, 1, 1, 0, [(0, 9), (2, 9)], 4, [], 1 << 20, marks), 0.0)
    assert p.floor() is None, "worker 11 has not answered"
    p.on_answer(11, Resume(4, 1, 1, 0, [(1, 9)], 6, [], 1 << 20, marks[-1:]), 0.0)
    assert p.floor() == Beginning(4, 103)


def test_all_that_is_read_again_is_compared_the_first_batch_included() -> None:
    for rows in (105, 999):
        p = retried()
        for worker in (10, 11):
            mine = [(number, 6) for number, place in enumerate(PLACES) if place == worker]
            p.on_answer(worker, Resume(4, 1, 1, 0, mine, 5, [], 1 << 20, [Mark(4, 104), Mark(5, 105)]), 0.0)
        p.begin_at(*(p.floor() or START)[:2])
        assert p.next_sequence == 5
        if rows == 105:
            p.append(batch(1, 0, 0), 0.0, checksum=rows)
        else:
            with pytest.raises(NonDeterministicInputError, match="at or before batch 5"):
                p.append(batch(1, 0, 0), 0.0, checksum=rows)


# ---- elements that all consumers have applied


def test_an_element_is_applied_when_every_partition_with_rows_up_to_it_has_acked_these() -> None:
    p = producer()
    assert not p.applied_through(0), "nobody has answered"
    welcomed(p)
    p.append(batch(1, 1, 0), 0.0)
    p.append(batch(1, 0, 0), 0.0)
    list(p.poll(0.0))
    p.on_answer(10, ack(1), 0.0)
    assert not p.applied_through(0), "worker 11 has element 0 still to apply"
    p.on_answer(11, ack(0), 0.0)
    assert p.applied_through(1), "worker 11 has no rows of element 1"
    p.append(batch(0, 1, 0), 0.0)
    assert p.applied_through(0)
    assert not p.applied_through(2)


def test_what_only_a_checkpoint_lacks_is_not_applied_though_it_has_left_the_log() -> None:
    kept = ReplicaAt(11, 0, True, STANDBY)
    p = Producer(StreamId(4, 1), 0, 1, 1 << 20, resend_s=1.0, reads_again=True)
    p.on_table(Table(0, (((ReplicaAt(10, 0), kept),),), (), {10: "", 11: ""}), 0, 0.0)
    list(p.poll(0.0))
    p.on_answer(10, Resume(4, 1, 1, 0, [(0, 0)], -1, [], 1 << 20), 0.0)
    p.on_answer(11, ReadsElsewhere(4, 1, 1, 0, [(0, -1)]), 0.0)
    p.append(alone(1), 0.0)
    list(p.poll(0.0))
    p.on_answer(10, ack(0), 0.0)
    assert len(p.log) == 0
    assert not p.applied_through(0)
    p.on_answer(11, ReadsElsewhere(4, 1, 1, 0, [(0, 0)]), 0.0)
    assert p.applied_through(0)


def test_what_an_earlier_life_gave_and_a_checkpoint_lacks_is_not_applied() -> None:
    """Give the partition of that checkpoint nothing in this life, which began behind its rows."""
    kept = ReplicaAt(11, 0, True, STANDBY)
    p = Producer(StreamId(4, 1), 1, 2, 1 << 20, resend_s=1.0, reads_again=True)
    replicas = (ReplicaAt(10, 0), kept), (ReplicaAt(10, 0),)
    p.on_table(Table(1, (replicas,), (), {10: "", 11: ""}), 0, 0.0)
    list(p.poll(0.0))
    marks = [Mark(4, 44), Mark(5, 55)]
    p.on_answer(10, Resume(4, 1, 1, 1, [(0, 6), (1, 6)], 5, [], 1 << 20, marks), 0.0)
    p.on_answer(11, ReadsElsewhere(4, 1, 1, 1, [(0, 2)]), 0.0)
    floor = p.floor()
    assert floor == Beginning(5, 44)
    p.begin_at(floor.sequence, floor.checksum)
    p.append(alone(0, 1), 0.0, 55)
    p.on_answer(10, ack(5, epoch=1), 0.0)
    assert not p.applied_through(5)
    p.on_answer(11, ReadsElsewhere(4, 1, 1, 1, [(0, 5)]), 0.0)
    assert p.applied_through(5)


def alone(*counts: int) -> Clustered:
    """Make a batch as ``batch`` does, for as many partitions as there are numbers."""
    rows = pa.record_batch({"x": pa.array(np.arange(sum(counts)), pa.int64())})
    return clustered(rows, range(len(counts)), counts)


def test_an_element_without_rows_waits_for_no_ack_and_goes_nowhere() -> None:
    """Number elements without rows, too: steps may leave nothing of a batch of a source, which still is a batch."""
    p = welcomed(producer())
    for _ in range(3):
        p.append(batch(0, 0, 0), 0.0, checksum=5)
    assert sent(p) == []
    assert (len(p.log), p.log.base, p.next_sequence) == (0, 3, 3)
    assert p.has_room
    p.append(batch(1, 0, 0), 0.0)
    p.append(batch(0, 0, 0), 0.0)
    assert len(p.log) == 2, "it stays behind a batch that is not acked, in the order of the stream"
    assert [(m.first, m.sequence) for m in messages(p, 10)] == [(0, 3)]
    p.on_answer(10, ack(3), 0.0)
    assert len(p.log) == 0
    assert p.applied_through(4)
    p.finish(0.0)
    assert sent(p) == [(10, 5), (11, 5)]
    for worker in (10, 11):
        p.on_answer(worker, ack(5), 0.0)
    assert p.drained


def test_elements_without_rows_among_those_that_travel_together() -> None:
    p = Producer(StreamId(4, 1), 0, 3, 1 << 20, resend_s=1.0, run_max_rows=4096)
    p.on_table(table(), 0, 0.0)
    for counts in [(0, 0, 0), (2, 1, 0), (0, 0, 0), (0, 0, 0), (1, 0, 3), (0, 0, 0)]:
        p.append(batch(*counts), 0.0)
    welcomed(p)
    (together,) = messages(p, 10)
    assert (together.first, together.sequence, list(together.batches)) == (0, 4, [1, 4])
    nothing = Producer(StreamId(4, 1), 0, 3, 1 << 20, resend_s=1.0, run_max_rows=4096)
    nothing.on_table(table(), 0, 0.0)
    for _ in range(4):
        nothing.append(batch(0, 0, 0), 0.0)
    assert sent(welcomed(nothing)) == []


def test_another_life_makes_elements_without_rows_again() -> None:
    """Let a consumer have batch 1. Nothing was left of batches 0 and 2, which have numbers all the same."""
    p = producer(incarnation=1)
    list(p.poll(0.0))
    for worker in (10, 11):
        p.on_answer(worker, resume(worker, needed=2, shown=[Mark(1, 77)]), 0.0)
    assert p.floor() == START
    for number, counts in enumerate([(0, 0, 0), (1, 0, 0), (0, 0, 0), (0, 1, 0)]):
        p.append(batch(*counts), 0.0, checksum=76 + number)
    assert sent(p) == [(11, 3)]
    other = producer(incarnation=1)
    list(other.poll(0.0))
    other.on_answer(10, resume(10, needed=2, shown=[Mark(1, 77)]), 0.0)
    other.append(batch(0, 0, 0), 0.0, checksum=76)
    with pytest.raises(NonDeterministicInputError):
        other.append(batch(0, 0, 0), 0.0, checksum=78)


def test_an_answer_to_an_earlier_life_is_none_to_this_one() -> None:
    """Ignore such an answer: it does not show the rows that the earlier life has given, and the end of the stream would
    get another number. A worker that reads a source again has both lives, one after the other."""
    p = producer()
    p.on_answer(10, resume(10, incarnation=p.incarnation + 1), 0.0)
    assert not p.awaited
    p.on_answer(10, resume(10, incarnation=p.incarnation), 0.0)
    assert p.awaited
