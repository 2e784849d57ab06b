"""The phases of a producer's progress towards one worker, told by the answers of the worker."""

from __future__ import annotations

import pytest

from flux.exchange.consumer_progress import ConsumerProgress, HandshakePhase
from flux.exchange.producer import Producer
from flux.wire.messages import AppliedThrough, ReadsElsewhere, Reset
from tests.flux.test_producer import ack, batch, messages, producer, resume, welcomed

GREETING, CATCHING_UP, READING, STANDING_BY = (
    HandshakePhase.GREETING,
    HandshakePhase.CATCHING_UP,
    HandshakePhase.READING,
    HandshakePhase.STANDING_BY,
)
ELSEWHERE = ReadsElsewhere(4, 1, 0, -1, [])


def towards(p: Producer, worker: int = 10) -> ConsumerProgress:
    return p._cursors[worker]


def with_three_batches() -> Producer:
    p = producer()
    for _ in range(3):
        p.append(batch(1, 1, 1), 0.0)
    return p


def test_a_worker_is_greeted_until_it_answers() -> None:
    p = with_three_batches()
    assert (towards(p).phase, messages(p, 10)) == (GREETING, [])
    p.on_answer(10, resume(10), 0.0)
    assert towards(p).phase is READING
    assert [message.sequence for message in messages(p, 10)] == [0, 1, 2]


def test_replicas_that_want_more_than_others_catch_up_first() -> None:
    p = with_three_batches()
    answer = resume(10, 0)
    first, *others = answer.next
    assert others, "a worker with two replicas"
    answer.next[:] = [first, *[(partition, 2) for partition, _ in others]]
    p.on_answer(10, answer, 0.0)
    assert towards(p).phase is CATCHING_UP
    messages(p, 10)
    assert towards(p).phase is READING, "element 2 is wanted by both"


def test_a_replica_that_wants_nothing_yet_leaves_its_worker_catching_up() -> None:
    p = with_three_batches()
    answer = resume(10, 0)
    del answer.next[1:]
    p.on_answer(10, answer, 0.0)
    messages(p, 10)
    assert towards(p).phase is CATCHING_UP
    p.on_answer(10, resume(10, 3, nonce=2), 0.0)
    assert towards(p).phase is READING


@pytest.mark.parametrize("before", [GREETING, READING, STANDING_BY])
def test_each_answer_leads_to_its_phase_from_any_other(before: HandshakePhase) -> None:
    for answer, after in ((resume(10, nonce=7), READING), (ELSEWHERE, STANDING_BY)):
        p = with_three_batches()
        if before is not GREETING:
            p.on_answer(10, resume(10) if before is READING else ELSEWHERE, 0.0)
        assert towards(p).phase is before
        p.on_answer(10, answer, 0.0)
        assert towards(p).phase is after
        p.validate()


def test_a_reset_leads_back_to_the_greeting_once() -> None:
    p = welcomed(with_three_batches())
    p.on_answer(10, Reset(4, 1, "a gap"), 5.0)
    assert (towards(p).phase, towards(p).hello_due) == (GREETING, 5.0)
    list(p.poll(5.0))
    p.on_answer(10, Reset(4, 1, "a gap"), 5.5)
    assert towards(p).hello_due > 5.5, "the answer to data from before the greeting"


def test_an_ack_is_owed_from_the_first_element_that_is_not_acked() -> None:
    p = welcomed(producer())
    list(p.poll(1.0))
    assert towards(p).owes_since is None
    p.append(batch(1, 1, 1), 2.0)
    list(p.poll(3.0))
    assert towards(p).owes_since == 3.0
    p.append(batch(1, 1, 1), 3.5)
    list(p.poll(3.5))
    p.on_answer(10, ack(0, behind=(AppliedThrough(9, 0),)), 3.7)
    assert towards(p).owes_since == 3.7, "it receives messages, and owes one more ack"
    p.on_answer(10, ack(1), 3.9)
    assert towards(p).owes_since is None
