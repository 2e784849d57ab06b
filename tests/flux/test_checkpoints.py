"""Times at which primaries send checkpoints: in turn, at once where there is need, and not too many (design:
standby)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flux.errors import UsageError
from flux.replica.deltas import DeltaTracker
from flux.replica.kinds import active, kind_named, standby
from flux.settings import Settings
from flux.state.phases import OutPhase
from flux.worker.checkpoint_scheduler import AT_ONCE, Begin, CheckpointScheduler, CheckpointTarget
from partitioning.ids import UPSTREAM, PartitionKey

SETTINGS = replace(
    Settings.of(),
    checkpoint_interval=1.0,
    resend_timeout=0.5,
    checkpoint_max_bytes_per_second=1000,
    order_max_steps=100,
)
AT = 7  # the standby's worker


class Transfers:
    def __init__(self) -> None:
        self.checkpoints = 0
        self.begun: dict[CheckpointTarget, OutPhase] = {}

    def under_way(self, key: PartitionKey, worker: int) -> OutPhase | None:
        return self.begun.get(CheckpointTarget(key, worker))


def peer(applied: int = 0, kind: Any = standby) -> Any:
    return SimpleNamespace(kind=kind, live=True, incarnation=0, applied=applied)


def replica(applied: int, state_bytes: int = 0, **more: Any) -> Any:
    order = SimpleNamespace(peers={AT: peer()}, end=applied)
    about = {"primary": True, "finished": False, "between_steps": True, "step_s": 0.01} | more
    return SimpleNamespace(applied=applied, order=order, state_bytes=state_bytes, deltas=DeltaTracker(), **about)


class Scene:
    def __init__(self, *replicas: Any, policy: str = "round-robin") -> None:
        self.replicas = {PartitionKey(0, number): each for number, each in enumerate(replicas)}
        self.transfers: Any = Transfers()
        self.made = CheckpointScheduler(self.replicas, replace(SETTINGS, checkpoint_policy=policy), self.transfers)

    def next(self, now: float) -> list[int]:
        return [begin.key.partition for begin in self.made.next(now)]

    def taken(self, partition: int) -> None:
        each = self.replicas[PartitionKey(0, partition)]
        each.order.peers[AT].applied = each.applied


def test_each_interval_and_the_one_that_has_waited_longest_first() -> None:
    scene = Scene(replica(5), replica(5), replica(5))
    assert scene.next(0.0) == []
    assert scene.next(0.6) == [0, 1], "the first is due sooner: the empty state is of the beginning"
    assert scene.next(0.8) == [2]
    for partition in range(3):
        scene.taken(partition)
        scene.replicas[PartitionKey(0, partition)].applied += 1
    assert scene.next(1.2) == []
    assert scene.next(1.7) == [0, 1]


def test_nothing_is_sent_of_what_has_not_changed_or_is_on_its_way() -> None:
    scene = Scene(replica(5), replica(5))
    scene.taken(0)
    scene.transfers.begun[CheckpointTarget(PartitionKey(0, 1), AT)] = OutPhase.SENDING
    assert scene.next(0.0) == []
    assert scene.next(5.0) == []


def upstream(applied: int, **more: Any) -> Any:
    made = replica(applied, **more)
    made.order.peers[AT].kind = kind_named(UPSTREAM)
    return made


def test_upstream_replicas_get_replay_points_from_time_to_time() -> None:
    scene = Scene(upstream(5))
    assert scene.made.next(0.0) == []
    assert scene.made.next(0.6) == [Begin(PartitionKey(0, 0), AT, False)]


def test_a_replay_point_that_does_not_come_is_replaced_by_a_checkpoint_where_rows_are_held_back() -> None:
    scene = Scene(upstream(5))
    key = PartitionKey(0, 0)
    scene.made.next(0.6)
    scene.transfers.begun[CheckpointTarget(key, AT)] = OutPhase.UNACKED
    assert scene.made.next(5.0) == [], "nobody is held up"
    scene.made.press(key)
    assert scene.made.next(5.3) == [Begin(key, AT, True)]
    scene.transfers.begun[CheckpointTarget(key, AT)] = OutPhase.SENDING
    scene.made.press(key)
    assert scene.made.next(9.0) == [], "it is on its way"


def test_who_asks_just_after_a_replay_point_that_was_of_no_use_is_not_forgotten() -> None:
    """Ask again soon, and urgently: an operator that looks back gives no replay point for a long time, and requests for
    one come at the same pace."""
    scene = Scene(upstream(5))
    assert scene.made.next(0.0) == []
    assert scene.made.next(0.6) == [Begin(PartitionKey(0, 0), AT, False)]
    assert scene.made.next(1.7) == [Begin(PartitionKey(0, 0), AT, False)]
    scene.made.press(PartitionKey(0, 0))
    assert scene.made.next(1.8) == [], "it may take a while until the other end knows"
    assert scene.made.next(2.3) == [Begin(PartitionKey(0, 0), AT, True)]


def test_a_replay_point_is_enough_where_the_last_one_has_just_come() -> None:
    scene = Scene(upstream(5))
    scene.made.next(0.6)
    scene.taken(0)
    scene.made.next(2.0)
    scene.replicas[PartitionKey(0, 0)].applied = 9
    scene.made.press(PartitionKey(0, 0))
    assert scene.made.next(2.3) == [Begin(PartitionKey(0, 0), AT, False)]


@pytest.mark.parametrize(
    "more", [{"applied": 5, "finished": True}, {"applied": 60}], ids=["has ended", "order log fills"]
)
def test_at_once_where_a_partition_has_ended_or_its_order_log_fills(more: dict[str, Any]) -> None:
    scene = Scene(replica(**more))
    assert scene.next(0.0) == [0]
    assert scene.next(0.2) == [], "it may take a while until the standby knows that all is committed"
    assert scene.next(0.9) == [0], "it should know by now"


def test_at_once_where_a_producer_asks() -> None:
    scene = Scene(replica(5))
    scene.made.press(PartitionKey(0, 0))
    assert scene.next(0.0) == [0]
    assert scene.next(0.9) == [], "it asks again if that did not help"


def test_an_order_log_that_fills_is_noticed_however_long_the_interval_is() -> None:
    scene = Scene(replica(5))
    scene.made._interval_s = 3600.0
    assert scene.next(0.0) == []
    each = scene.replicas[PartitionKey(0, 0)]
    each.applied = each.order.end = 60
    assert scene.next(0.3) == [0]


def test_a_step_under_way_is_waited_for_and_the_wish_is_not_forgotten() -> None:
    scene = Scene(replica(5, between_steps=False))
    scene.made.press(PartitionKey(0, 0))
    assert scene.next(0.0) == []
    scene.replicas[PartitionKey(0, 0)].between_steps = True
    assert scene.next(0.2) == [0]


def test_few_at_a_time() -> None:
    scene = Scene(*[replica(5) for _ in range(4)])
    for partition in range(4):
        scene.made.press(PartitionKey(0, partition))
    assert len(scene.next(0.0)) == AT_ONCE
    scene.transfers.checkpoints = AT_ONCE
    assert scene.next(0.3) == []
    scene.transfers.checkpoints = 0
    assert len(scene.next(0.6)) == AT_ONCE, "the others"


def test_states_leave_no_faster_than_allowed_unless_somebody_waits() -> None:
    scene = Scene(replica(5, state_bytes=4000), replica(5, state_bytes=4000))
    scene.made.press(PartitionKey(0, 0))
    assert scene.next(0.0) == [0]
    assert scene.next(1.5) == [], "4,000 bytes take four seconds"
    scene.made.press(PartitionKey(0, 1))
    assert scene.next(1.7) == [1]


def test_secondaries_get_none_and_nobody_presses_for_what_is_not_here() -> None:
    scene = Scene(replica(5))
    scene.replicas[PartitionKey(0, 0)].order.peers[AT] = peer(kind=active)
    scene.made.press(PartitionKey(0, 0))
    scene.made.press(PartitionKey(9, 9))
    assert scene.next(0.0) == []
    assert not scene.made._pressed


def test_last_checkpoints_are_sent_at_once_and_said_when_all_are_there() -> None:
    scene = Scene(replica(5), replica(3))
    for partition in (0, 1):
        scene.taken(partition)
    scene.next(0.0)
    for each in scene.replicas.values():
        each.applied += 2
    scene.made.last()
    assert scene.next(0.01) == [0, 1], "not an interval later"
    assert not scene.made.all_kept()
    scene.taken(0)
    assert not scene.made.all_kept()
    scene.taken(1)
    assert scene.made.all_kept()


def test_last_checkpoints_go_on_for_steps_that_come_after_all_was_kept() -> None:
    """Go on, because rows that another worker has read may still be on their way."""
    scene = Scene(replica(5))
    scene.taken(0)
    scene.next(0.0)
    scene.made.last()
    assert (scene.next(0.01), scene.made.all_kept()) == ([], True)
    scene.replicas[PartitionKey(0, 0)].applied += 1
    scene.made.last()
    assert scene.next(0.03) == [0], "not an interval later"
    assert scene.made.all_kept(), "a query whose timers tick ends all the same"


def test_min_max_begins_where_a_loss_would_cost_most_time_per_byte() -> None:
    """Give three partitions: much to repeat in a large state, the same in a small one, and little in a small one."""
    orders = {}
    for policy in ("round-robin", "min-max"):
        scene = Scene(replica(40, 9000), replica(40, 3000), replica(4, 3000), policy=policy)
        assert scene.next(0.0) == [], "their time begins"
        first = scene.next(2.0)
        for partition in first:
            scene.taken(partition)
        orders[policy] = [*first, *scene.next(60.0)]
    assert orders == {"round-robin": [0, 1, 2], "min-max": [1, 0, 2]}


def test_who_is_pressed_comes_first_by_any_policy() -> None:
    scene = Scene(replica(40, 3000), replica(40, 3000), replica(4, 9000), policy="min-max")
    scene.made.press(PartitionKey(0, 2))
    assert scene.next(2.0)[0] == 2


def test_a_policy_that_nobody_knows_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"checkpoint.policy: cannot read 'newest' as round-robin or min-max"):
        Settings.of({"spark.flux.checkpoint.policy": "newest"})
