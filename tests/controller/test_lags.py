"""Replicas that lag their primaries, in the controller: additions that are given up for their sake, and their own end."""

from __future__ import annotations

from typing import Any

import pytest

from controller.replicas.addition_limits import ATTEMPTS_MAX, REST_S, SAFE_MAX_S, STANDING_COUNTS_S
from flux.wire.control import Heartbeat, ReplicaCaughtUp
from partitioning.table import ReplicaAt
from tests.controller.cluster import Cluster

STEPS_MAX, REPLAY_MAX_S, STEP_MAX_S = 1000, 2.0, 5.0


def cluster(**more: Any) -> Cluster:
    bounds = {"replicas_max_steps_behind": STEPS_MAX, "replicas_max_replay": REPLAY_MAX_S, "step_timeout": STEP_MAX_S}
    return Cluster(**{**bounds, **more})


def beat(c: Cluster, worker: int, *lags: tuple[int, int, int, int, int, float, int, bool]) -> list[str]:
    """Let this worker report; list the kinds of events since the last call."""
    c.report(worker, Heartbeat(node=worker, progress=1, stats={"behind": lags}))
    return c.kinds()


def lag(
    replica: ReplicaAt, steps: int, seconds: float = 0.0, applied: int = 0, told: bool = True
) -> tuple[int, int, int, int, int, float, int, bool]:
    return 0, 0, replica.worker, replica.incarnation, steps, seconds, applied, told


def fall_behind(c: Cluster, place: int = 1, steps: int = STEPS_MAX + 1) -> None:
    """Let the primary report that the replica in this place of Sums/0 is ``steps`` behind."""
    beat(c, c.holders()[0], lag(c.replicas()[place], steps))


# ---- reports


def test_a_replica_that_is_far_behind_is_reported_and_counts_again_when_it_has_caught_up() -> None:
    c = cluster()
    primary, secondary = c.replicas()
    assert beat(c, 0, lag(secondary, STEPS_MAX)) == []
    assert beat(c, 0, lag(secondary, STEPS_MAX + 1)) == ["behind"]
    assert beat(c, 0, lag(secondary, STEPS_MAX // 2 + 1)) == [], "not yet"
    assert not c.core.repairs.safety.keeps_up(0, 0, secondary)
    assert c.core.repairs.safety.is_safe(0, 0, secondary), "it has the order: should the primary die, it takes over"
    assert c.core.report()["behind"][0]["steps"] == STEPS_MAX // 2 + 1
    assert beat(c, 0, lag(secondary, STEPS_MAX // 2 - 1)) == ["caught up"], "though it is spoken of"
    assert beat(c, 0, lag(secondary, STEPS_MAX + 1)) == ["behind"]
    assert beat(c, 0) == ["caught up"]
    assert c.core.repairs.safety.keeps_up(0, 0, secondary)
    assert c.core.repairs.safety.keeps_up(0, 0, primary)


def test_a_single_step_behind_is_behind_no_bound_on_steps() -> None:
    c = cluster(replicas_max_steps_behind=1)
    secondary = c.replicas()[1]
    assert beat(c, 0, lag(secondary, 2)) == ["behind"]
    assert beat(c, 0, lag(secondary, 1)) == ["caught up"], "or timers, one step each, would hold up a move for ever"


def test_a_few_long_steps_are_far_behind_as_well_and_the_event_says_how_long_a_take_over_waits() -> None:
    c = cluster()
    assert beat(c, 0, lag(c.replicas()[1], 3, REPLAY_MAX_S)) == []
    beat(c, 0, lag(c.replicas()[1], 1234, REPLAY_MAX_S + 1.5))
    (event,) = c.events("behind")
    assert event.why == "1,234 steps behind its primary, about 3.5 s: a take-over would wait for these"
    assert c.core.report()["behind"] == [{"stage": "Sums", "partition": 0, "worker": 1, "steps": 1234, "seconds": 3.5}]


def test_only_the_primary_of_a_partition_speaks_for_its_replicas_and_a_new_one_as_soon_as_it_leads() -> None:
    c = cluster(slots=4)
    fall_behind(c)
    secondary = c.replicas()[1]
    assert beat(c, 3) == beat(c, 1) == []
    assert not c.core.repairs.safety.keeps_up(0, 0, secondary)
    c.move(0, 3)
    c.complete()
    assert c.holders() == [3, 1]
    assert beat(c, 0, lag(secondary, 2 * STEPS_MAX)) == ["move"], "it leads no more"
    assert not c.core.repairs.safety.keeps_up(0, 0, secondary)
    assert beat(c, 3) == ["caught up"]
    assert c.core.repairs.safety.keeps_up(0, 0, secondary)


# ---- where safety is spent


def test_a_silent_worker_is_not_given_up_for_the_sake_of_a_replica_that_is_far_behind() -> None:
    c = cluster(heartbeat_timeout=0.5, heartbeat_last_timeout=10.0)
    fall_behind(c)

    def others_beat(seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            c.now += 0.1
            for node in {1, 2} & set(c.core.members.workers):
                beat(c, node)
            c.tick(0.0)

    others_beat(5.0)
    assert c.holders() == [0, 1], "it may only be slow, and is the only replica that could go on at once"
    others_beat(6.0)
    assert c.holders()[0] == 1, "after the limit for last replicas it is given up"
    assert c.core.error is None


def test_a_silent_worker_is_given_up_when_the_heir_says_that_it_has_applied_what_it_had() -> None:
    c = cluster(heartbeat_timeout=0.5, heartbeat_last_timeout=60.0)
    fall_behind(c)
    heir = c.replicas()[1]
    for number in range(20):
        c.now += 0.1
        mine = [(0, 0, heir.incarnation)] if number < 10 else []
        c.report(1, Heartbeat(node=1, progress=1, stats={"unapplied": mine}))
        c.report(2, Heartbeat(node=2, progress=1, stats={"unapplied": []}))
        c.tick(0.0)
        assert (c.holders()[0] == 0) == (number < 10), "its primary can say nothing, and it has little to apply by now"


def test_a_replica_that_is_far_behind_takes_over_where_there_is_no_other() -> None:
    c = cluster()
    fall_behind(c)
    c.lose(0)
    assert c.core.error is None
    (event,) = c.events("take-over")
    assert event.why == (
        "its connection closed; the heir was 1,001 steps behind its primary, and makes up for them first"
    )
    assert c.core.repairs.safety.keeps_up(0, 0, c.replicas()[0])


def test_of_several_heirs_one_that_keeps_up_takes_over() -> None:
    c = cluster(slots=4, replicas=3)
    fall_behind(c)
    c.lose(0)
    assert c.holders()[:2] == [2, 1]


def test_a_move_keeps_its_source_until_the_target_keeps_up() -> None:
    c = cluster(slots=4)
    c.move(0, 3)
    c.caught_up(safe=False)
    c.caught_up(safe=True, steps_behind=STEPS_MAX + 1)
    assert c.holders() == [0, 1, 3]
    assert c.kinds() == ["behind"]
    beat(c, 0, lag(c.replicas()[2], STEPS_MAX - 1, applied=1))
    c.tick(1.0)
    assert c.holders() == [0, 1, 3], "it has not caught up yet"
    assert beat(c, 0) == ["caught up"]
    c.tick(0.0)
    assert c.holders() == [3, 1]


def test_a_move_keeps_its_source_while_another_replica_has_fallen_behind_since_it_began() -> None:
    c = cluster(slots=4)
    c.move(0, 3)
    fall_behind(c)
    c.complete()
    assert c.holders() == [0, 1, 3]
    beat(c, 0)
    c.tick(0.0)
    assert c.holders() == [3, 1]


def test_a_replica_that_was_behind_when_the_move_began_does_not_hold_it_up() -> None:
    c = cluster(slots=4)
    fall_behind(c)
    c.move(0, 3)
    c.complete()
    assert c.holders() == [3, 1]


def test_a_move_whose_target_does_not_catch_up_is_tried_again_and_given_up() -> None:
    c = cluster(slots=4)
    c.move(0, 3)
    for _ in range(3):
        c.caught_up(safe=False)
        c.caught_up(safe=True, steps_behind=STEPS_MAX + 1)
        c.tick(SAFE_MAX_S + 1)
    assert c.holders() == [0, 1]
    (event,) = c.events("move given up")
    assert event.why.startswith("the replicas that would be left are far behind after 31 s")


def test_a_worker_that_leaves_stays_until_what_moves_away_from_it_keeps_up() -> None:
    c = cluster(slots=4)
    c.take(c.core.drain(0, c.now))
    c.caught_up(safe=False)
    c.caught_up(safe=True, steps_behind=STEPS_MAX + 1)
    c.tick(1.0)
    assert 0 in c.core.members.workers
    beat(c, 0)
    c.tick(1.0)
    assert 0 not in c.core.members.workers


def test_a_repair_is_complete_though_the_new_replica_is_far_behind_because_nothing_is_given_up_for_it() -> None:
    c = cluster()
    c.lose(1)
    c.caught_up(safe=False)
    c.caught_up(safe=True, steps_behind=STEPS_MAX + 1)
    assert c.core.repairs.under_way == {}
    assert c.core.repairs.safety.is_safe(0, 0, c.replicas()[1])
    assert not c.core.repairs.safety.keeps_up(0, 0, c.replicas()[1])


# ---- standing still


def stand_still(
    c: Cluster, seconds: float, told: bool = True, step: int = 0, steps_behind: int = STEPS_MAX + 1
) -> None:
    """Let time pass in which the secondary of Sums/0 applies ``step`` steps per report, one report a second."""
    for number in range(round(seconds)):
        c.now += 1.0
        primary, *others = c.replicas()
        beat(c, primary.worker, *(lag(other, steps_behind, 0.0, number * step, told) for other in others[:1]))
        c.tick(0.0)


def test_a_replica_that_stands_still_is_dropped_with_the_reason_and_built_elsewhere() -> None:
    c = cluster()
    stand_still(c, STEP_MAX_S)
    assert c.holders() == [0, 1], "a step may take so long"
    stand_still(c, 2)
    assert c.holders() == [0, 2]
    (event,) = c.events("drop")
    assert (event.worker, event.why) == (
        1, "it has applied nothing for 6 s, 1,001 steps behind its primary, and is built anew"
    )  # fmt: skip
    c.complete()
    assert c.core.repairs.done == 1


def test_a_replica_that_stands_still_is_dropped_however_few_steps_it_lags() -> None:
    """Producers keep their rows for it, and when their logs are full nothing more is ordered."""
    c = cluster()
    stand_still(c, STEP_MAX_S + 2, steps_behind=1)
    assert c.holders() == [0, 2]
    assert c.events("behind") == []


@pytest.mark.parametrize("more", [{"step": 1}, {"told": False}])
def test_a_replica_that_gets_on_or_that_others_keep_from_it_is_not_dropped(more: dict[str, Any]) -> None:
    c = cluster()
    stand_still(c, 4 * STEP_MAX_S, **more)
    assert c.holders() == [0, 1]


def test_nothing_is_dropped_because_the_controller_stood_still() -> None:
    c = cluster(heartbeat_timeout=50.0)
    stand_still(c, 3)
    c.tick(0.1)
    c.now += 100.0
    beat(c, 0, lag(c.replicas()[1], STEPS_MAX + 1))  # waited to be read
    c.tick(0.0)
    assert c.holders() == [0, 1]


def test_replicas_that_stand_still_one_after_the_other_are_built_ever_more_seldom() -> None:
    c = cluster()
    for _ in range(ATTEMPTS_MAX):
        stand_still(c, STEP_MAX_S + 2)
        if c.core.repairs.under_way:
            c.complete()
    assert [event.kind for event in c.core.repairs.history if event.kind in ("drop", "warning")] == [
        *["drop"] * ATTEMPTS_MAX, "warning",
    ]  # fmt: skip
    assert len(c.replicas()) == 1, "meanwhile the primary goes on alone"
    c.tick(REST_S + 1)
    assert len(c.replicas()) == 2
    c.complete()
    c.tick(STANDING_COUNTS_S + 1)
    c.kinds()
    stand_still(c, STEP_MAX_S + 2)
    assert c.core.repairs.under_way, "what was long ago does not count"


def test_of_an_addition_under_way_nothing_is_asked_but_that_it_becomes_safe() -> None:
    c = cluster()
    c.lose(1)
    c.caught_up(safe=False)
    stand_still(c, 2 * STEP_MAX_S)
    assert c.events("drop") == []
    c.report(
        0, ReplicaCaughtUp(node=0, stage=0, partition=0, worker=2, incarnation=c.replicas()[1].incarnation, safe=True)
    )
    assert c.core.repairs.done == 1
