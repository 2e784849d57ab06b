"""Busy or stopped: the controller's judgement from pulses, heartbeats and a lifeline that is reset."""

from __future__ import annotations

import pytest

from flux.wire.control import Heartbeat, InStep
from flux.wire.pulse import LoopActivity, Pulse
from tests.controller.cluster import Cluster

BEAT_S = 0.1


def cluster(**options: float) -> Cluster:
    return Cluster(**{"heartbeat_timeout": 0.5, "heartbeat_last_timeout": 60.0, "step_timeout": 5.0} | options)


def at_step(turns: int, step: int = 17, kind: LoopActivity = LoopActivity.STEP) -> Pulse:
    return Pulse(turns, kind, 0, 0, step)


def go_on(c: Cluster, seconds: float, pulse: Pulse | None, victim: int = 0) -> None:
    """Let the other workers report; of the victim, only the pulse of its process comes, if one is given."""
    for _ in range(round(seconds / BEAT_S)):
        for node in [node for node in c.core.members.workers if node != victim]:
            c.report(node, Heartbeat(node=node, progress=1, stats={}))
        if pulse is not None:
            c.take(c.core.on_pulse(victim, pulse, c.now))
        c.tick(BEAT_S)


def test_a_worker_in_a_long_step_is_not_given_up_while_its_process_beats() -> None:
    c = cluster()
    go_on(c, 4.0, at_step(3))
    assert 0 in c.core.members.workers
    c.report(0, Heartbeat(node=0, progress=2, stats={}))
    go_on(c, 4.0, at_step(4))
    assert 0 in c.core.members.workers, "each step has its own time"


def opens(stage: int, partition: int) -> Pulse:
    return Pulse(3, LoopActivity.OPEN, stage, partition, 0)


def test_each_open_of_a_turn_has_its_own_time() -> None:
    c = cluster(partitions=3)
    for partition in range(3):
        go_on(c, 4.0, opens(0, partition))
        go_on(c, BEAT_S, at_step(3, 0, LoopActivity.TURNS))
    assert 0 in c.core.members.workers


def test_quick_calls_of_open_are_signs_of_life() -> None:
    c = cluster(partitions=3)
    for number in range(20):
        go_on(c, BEAT_S, opens(0, number % 2))
    assert 0 in c.core.members.workers


def test_a_worker_whose_open_does_not_return_is_given_up_with_its_stage_and_partition() -> None:
    c = cluster(partitions=3)
    go_on(c, 4.0, opens(0, 0))
    go_on(c, 4.0, opens(0, 1))
    go_on(c, 1.2, opens(0, 1))
    assert 0 not in c.core.members.workers
    why = c.events("loss")[0].why
    assert why == "stage Sums, partition 1: open() has run for 5.1 s, longer than spark.flux.step.timeout"


def test_a_worker_that_is_stopped_in_a_long_step_is_given_up_when_its_pulse_has_been_silent() -> None:
    c = cluster()
    go_on(c, 2.0, at_step(3))
    go_on(c, 0.3, None)
    assert 0 in c.core.members.workers
    go_on(c, 0.3, None)
    assert 0 not in c.core.members.workers
    assert c.events("loss")[0].why.startswith("no heartbeat for")


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        (
            LoopActivity.STEP,
            True,
            "stage Sums, partition 0, step 17: process() has run for 5.1 s, longer than spark.flux.step.timeout; "
            "first row of the step: {'k': 1}",
        ),
        (
            LoopActivity.STEP,
            False,
            "stage Sums, partition 0, step 17: a call has run for 5.1 s, longer than spark.flux.step.timeout, "
            "and holds the interpreter lock, so its first row is not known",
        ),
        (LoopActivity.TURNS, False, "its loop has stood still for 5.1 s, longer than spark.flux.step.timeout"),
    ],
)
def test_a_step_without_end_is_given_up_and_named(kind: LoopActivity, said: bool, why: str) -> None:
    c = cluster()
    if said:
        about = {"node": 0, "stage": 0, "partition": 0, "step": 17, "method": "process", "row": "{'k': 1}"}
        c.report(0, InStep(**about))
    go_on(c, 6.0, at_step(3, kind=kind))
    assert [event.why for event in c.events("loss")] == [why]


def test_it_is_given_up_also_where_it_has_the_only_copy() -> None:
    c = cluster()
    for victim in (1, 2):
        c.lose(victim)
    go_on(c, 6.0, at_step(3))
    assert "stage Sums, partition 0" in str(c.core.error)
    assert "longer than spark.flux.step.timeout" in str(c.core.error)
    assert "Another worker would take as long: let the call do less, or raise spark.flux.step" in str(c.core.error)
    assert "replicas" not in str(c.core.error), "another replica would be stuck in the same step"


@pytest.mark.parametrize("kind", [LoopActivity.WAITS, LoopActivity.STEP])
def test_a_worker_that_turns_and_sends_no_heartbeats_is_out_of_reach_and_given_up(kind: LoopActivity) -> None:
    """Only its lifeline is whole: orders and reports do not get through."""
    c = cluster()
    for turns in range(8):
        go_on(c, BEAT_S, Pulse(turns if kind == LoopActivity.STEP else 0, kind, 0, 0, turns))
    assert 0 not in c.core.members.workers


def test_a_controller_that_stood_still_takes_no_step_for_too_long() -> None:
    c = cluster()
    go_on(c, 1.0, at_step(3))
    c.tick(100.0)
    go_on(c, 1.0, at_step(3))
    assert len(c.core.members.workers) == 3


def test_a_controller_that_is_late_by_less_than_the_time_out_reads_before_it_judges() -> None:
    """Between a look at the sockets and the search for silence, the controller's thread waited for a core: 505 ms were counted
    against a worker whose heartbeats of the last 450 ms had come and lay unread, while the other replica was killed."""
    c = cluster()
    c.report(0, Heartbeat(node=0, progress=1, stats={}))
    c.tick(0.09)
    c.tick(0.45)
    assert set(c.core.members.workers) == {0, 1, 2}
    for node in (1, 2):
        c.report(node, Heartbeat(node=node, progress=1, stats={}))
    c.tick(0.01)
    assert set(c.core.members.workers) == {1, 2}, "what worker 0 might have said has been read by now"


def test_a_lifeline_that_is_reset_is_no_loss_while_heartbeats_come() -> None:
    """Something between the hosts has done it, or the host: then the worker is silent as well."""
    c = cluster()
    c.take(c.core.on_reset(0))
    for _ in range(20):
        c.report(0, Heartbeat(node=0, progress=1, stats={}))
        go_on(c, BEAT_S, None)
    assert 0 in c.core.members.workers
    go_on(c, 0.7, None)
    assert 0 not in c.core.members.workers


def test_a_worker_whose_lifeline_was_reset_and_that_is_silent_is_lost_also_with_the_only_copy() -> None:
    c = cluster()
    for victim in (1, 2):
        c.lose(victim)
    c.take(c.core.on_reset(0))
    go_on(c, 0.7, None)
    assert "no heartbeat for" in str(c.core.error)


def test_what_was_read_before_the_silence_is_looked_for_is_not_put_off_into_the_future() -> None:
    """After a controller stood still for 20 s and read a heartbeat first, the worker could be silent for 20 s more."""
    c = cluster()
    c.tick(BEAT_S)
    c.now += 20.0
    c.report(0, Heartbeat(node=0, progress=1, stats={}))
    c.tick(0.0)
    member = c.core.members.workers[0]
    assert (member.heard, member.turned) == (c.now, c.now)
    go_on(c, 0.7, None)
    assert 0 not in c.core.members.workers


@pytest.mark.parametrize(
    "forged",
    [
        Pulse(5, LoopActivity.READ, 99, 0, 0),
        Pulse(5, LoopActivity.READ, 0, 0, 0),
        Pulse(5, LoopActivity.STEP, 99, 0, 0),
        Pulse(5, LoopActivity.STEP, -1, 0, 0),
        Pulse(5, LoopActivity.STEP, 0, 99, 0),
        Pulse(5, LoopActivity.OPEN, 0, 99, 0),
        Pulse(5, 17, 0, 0, 0),
    ],
)
def test_a_pulse_with_numbers_that_do_not_exist_is_no_sign_of_life_and_ends_nothing(forged: Pulse) -> None:
    """Such a pulse ended the query, by an IndexError where the loss is worded. The source here is one of Spark's: no worker
    reads it."""
    c = cluster(step_timeout=2.0)
    go_on(c, 3.0, forged)
    assert 0 not in c.core.members.workers
    assert c.core.phase == "running"
    assert c.events("loss")[0].why.startswith("no heartbeat for")


def test_a_step_without_end_is_given_up_also_without_a_lifeline() -> None:
    """Reports of a worker about its step kept it for ever, though it had the only copy."""
    c = cluster()
    for victim in (1, 2):
        c.lose(victim)
    about = {"node": 0, "stage": 0, "partition": 0, "step": 17, "method": "process", "row": "{'k': 1}"}
    for _ in range(49):
        c.report(0, InStep(**about))
        c.tick(BEAT_S)
    assert 0 in c.core.members.workers, "a step may take so long"
    for _ in range(3):
        if 0 in c.core.members.workers:
            c.report(0, InStep(**about))
        c.tick(BEAT_S)
    assert "stage Sums, partition 0, step 17: process() has run for 5.1 s" in str(c.core.error)
    assert "first row of the step: {'k': 1}" in str(c.core.error)


def test_a_step_that_does_not_exist_is_no_sign_of_life() -> None:
    c = cluster()
    for _ in range(7):
        c.report(0, InStep(node=0, stage=99, partition=0, step=17, method="process", row=""))
        go_on(c, BEAT_S, None)
        if 0 not in c.core.members.workers:
            break
    assert c.events("loss")[0].why.startswith("no heartbeat for")


def test_a_worker_of_which_nothing_is_heard_is_silent_and_not_in_a_step() -> None:
    """``heartbeat.timeout`` may be longer than ``step.timeout``."""
    c = cluster(heartbeat_timeout=20.0)
    go_on(c, 15.0, None)
    assert 0 in c.core.members.workers
    go_on(c, 6.0, None)
    assert c.events("loss")[0].why.startswith("no heartbeat for")
