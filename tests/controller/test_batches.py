"""Additions of a stage begin together and become live together; only their copies go one by one."""

from __future__ import annotations

import pytest

from controller.replicas.addition_limits import FIRST, LISTED_EVERY_S, MOST, READY_MAX_S, AdditionBatches
from controller.replicas.additions import Phase
from flux.settings import Settings
from flux.wire.control import CopyState, Heartbeat, TableChanged
from tests.controller.cluster import Cluster, epoch_of


def phases(c: Cluster) -> list[str]:
    return [str(addition.phase) for addition in c.core.repairs.under_way.values()]


def copied(c: Cluster) -> list[int]:
    """List the partitions whose copies were ordered, one after the other."""
    return list(dict.fromkeys(order.partition for order in c.sent(CopyState)))


def after_a_loss(partitions: int = 4, **more: int) -> tuple[Cluster, list[int]]:
    """Worker 0 of three is lost. The partitions that had a replica there."""
    c = Cluster(slots=3, partitions=partitions, **more)
    c.orders.clear()
    lost = [partition for partition in range(partitions) if 0 in c.holders(partition)]
    c.lose(0)
    return c, lost


# ---- a batch


def test_a_batch_begins_with_one_table_is_copied_one_by_one_and_becomes_live_with_one_table() -> None:
    c, lost = after_a_loss(partitions=6)
    epoch = c.table.epoch
    assert len(lost) == 4
    assert {c.replicas(partition)[-1].incarnation for partition in lost} == {epoch}
    for at, partition in enumerate(lost):
        assert phases(c) == ["follows"] * at + ["copy"] + ["ready"] * (len(lost) - at - 1)
        assert copied(c) == lost[: at + 1]
        assert c.table.epoch == epoch
        c.caught_up(False, partition)
    assert c.table.epoch == epoch + 1
    assert all(replica.live for partition in lost for replica in c.replicas(partition))
    for partition in lost:
        c.caught_up(True, partition)
    assert (c.table.epoch, c.core.repairs.done, phases(c)) == (epoch + 1, len(lost), [])


def test_no_copy_begins_before_all_go_by_the_table_of_the_batch() -> None:
    c = Cluster(slots=3, partitions=4)
    c.mute = {"w2.0"}
    c.lose(0)
    assert (set(phases(c)), c.sent(CopyState)) == ({"retain"}, [])
    c.confirm(2, c.table.epoch)
    assert len(c.sent(CopyState)) == 1


def test_a_worker_that_joins_meanwhile_has_to_confirm_too() -> None:
    c = Cluster(slots=3, partitions=4)
    c.mute = {"w2.0", "w0.1"}
    c.lose(0)
    epoch = c.table.epoch
    newcomer = c.join(0, attempt=1)
    c.confirm(2, epoch)
    assert set(phases(c)) == {"retain"}
    c.confirm(newcomer, c.table.epoch)
    assert phases(c)[0] == "copy"


def test_who_follows_becomes_live_after_a_while_although_others_are_still_copied() -> None:
    c, lost = after_a_loss()
    c.caught_up(False, lost[0])
    assert not c.replicas(lost[0])[-1].live
    c.tick(LISTED_EVERY_S)
    assert c.replicas(lost[0])[-1].live
    assert phases(c)[:2] == ["live", "copy"]


def test_the_next_batch_begins_with_the_table_that_makes_the_one_before_live() -> None:
    c, lost = after_a_loss(partitions=18)
    first, second = lost[:FIRST], lost[FIRST:]
    assert second
    assert [key.partition for key in c.core.repairs.under_way] == first
    for partition in first:
        before = c.table.epoch
        c.caught_up(False, partition)
    assert c.table.epoch == before + 1
    assert all(c.replicas(partition)[-1].live for partition in first)
    assert [c.replicas(partition)[-1].incarnation for partition in second] == [c.table.epoch] * len(second)
    assert c.sent(CopyState)[-1].partition == second[0], "it need not wait until the first are safe"


def test_several_are_copied_at_the_same_time_if_that_is_allowed() -> None:
    c, lost = after_a_loss(partitions=6, repairs_at_once=3)
    assert phases(c) == ["copy"] * 3 + ["ready"]
    c.caught_up(False, lost[1])
    assert phases(c) == ["copy", "follows", "copy", "copy"]


def test_a_stage_waits_until_all_of_the_one_before_are_safe() -> None:
    c = Cluster(slots=3, partitions=3, stages=2)
    c.lose(0)
    first = [key.partition for key in c.core.repairs.under_way]
    for partition in first:
        c.caught_up(False, partition)
    for partition in first:
        assert {key.stage for key in c.core.repairs.under_way} == {0}
        c.caught_up(True, partition)
    assert {key.stage for key in c.core.repairs.under_way} == {1}


def test_a_worker_that_leaves_is_emptied_in_batches() -> None:
    c = Cluster(slots=4, partitions=8)
    c.orders.clear()
    held = [partition for partition in range(8) if 3 in c.holders(partition)]
    c.drain(3)
    assert phases(c) == ["copy"] + ["ready"] * (len(held) - 1)
    for partition in held:
        c.caught_up(False, partition)
    for partition in held:
        c.caught_up(True, partition)
    assert c.core.moving.done == len(held) == 4
    assert not any(3 in c.holders(partition) for partition in range(8))
    epochs = {epoch_of(order) for order in c.sent(TableChanged)}
    assert len(epochs) == 4, "retain, live, without the sources, and without the worker"


# ---- losses and moves meanwhile


def test_the_target_of_a_batch_is_lost_and_its_additions_go_elsewhere() -> None:
    c = Cluster(slots=6, partitions=8, replicas=3)
    c.lose(0)
    before = dict(c.core.repairs.under_way)
    target = next(iter(before.values())).worker
    c.lose(target)
    for key, addition in c.core.repairs.under_way.items():
        assert addition.worker != target
        kept = key in before and before[key].worker != target and c.holders(key.partition)[0] != target
        assert not kept or addition is before[key], "what the loss does not concern goes on"
    c.settle()
    assert all(len(c.holders(partition)) == 3 for partition in range(8))


@pytest.mark.parametrize("phase", [Phase.RETAIN, Phase.READY, Phase.FOLLOWS])
def test_a_primary_is_lost_and_what_was_to_be_copied_from_it_is_not_counted_on(phase: Phase) -> None:
    c = Cluster(slots=5, partitions=10, replicas=3)
    if phase == Phase.RETAIN:
        c.mute = {"w4.0"}
    c.lose(0)
    keys = list(c.core.repairs.under_way)
    key = keys[0] if phase == Phase.FOLLOWS else keys[1]
    if phase == Phase.FOLLOWS:
        c.caught_up(False, key.partition)
    addition = c.core.repairs.under_way[key]
    assert addition.phase == phase
    c.lose(c.holders(key.partition)[0])
    assert addition.phase == Phase.DROPPED
    assert addition.incarnation not in [replica.incarnation for replica in c.replicas(key.partition)]
    c.mute = set()
    c.confirm(4, c.table.epoch)
    c.settle()
    assert {len(c.holders(partition)) for partition in range(10)} == {3}


def test_a_copy_that_nobody_wants_any_more_counts_until_its_primary_knows() -> None:
    """Meanwhile the primary may be in the middle of the copy, and its partition stands still."""
    c = Cluster(slots=6, partitions=12, replicas=3)
    c.lose(0)
    first, *others = c.core.repairs.under_way.values()
    assert any(addition.worker != first.worker for addition in others)
    primary = c.holders(first.partition)[0]
    c.mute = {f"w{primary}.0"}
    ordered = len(c.sent(CopyState))
    c.lose(first.worker)
    assert "ready" in phases(c)
    assert (len(c.sent(CopyState)), "copy" in phases(c)) == (ordered, False)
    c.confirm(primary, c.table.epoch)
    assert "copy" in phases(c)


def test_who_waits_too_long_for_a_copy_is_taken_out_and_the_next_batch_is_small() -> None:
    c, lost = after_a_loss(partitions=9)
    assert len(lost) > 3
    epoch = c.table.epoch
    c.tick(READY_MAX_S + 0.01)
    assert phases(c) == ["copy"]
    assert c.table.epoch == epoch + 1, "all with one table"
    assert [len(c.holders(partition)) for partition in lost] == [2] + [1] * (len(lost) - 1)
    assert not c.events("failed attempt"), "that is nobody's fault"
    c.caught_up(False, lost[0])
    assert phases(c) == ["live", "copy"]


def test_a_move_that_waits_too_long_for_its_turn_begins_again_and_counts_only_once() -> None:
    c = Cluster(slots=4, partitions=8)
    c.drain(3)
    waits = list(c.core.repairs.under_way)[1]
    c.tick(READY_MAX_S + 0.01)
    (job,) = [job for job in c.core.moving.pending if job.key == waits]
    assert job.begun == 0
    c.settle()
    assert not any(3 in c.holders(partition) for partition in range(8))


# ---- how large


def batches(at_once: int = 1) -> AdditionBatches:
    return AdditionBatches(Settings.of(repair_at_once=at_once))


def test_the_first_batch_of_a_stage_is_small_and_the_next_twice_as_large() -> None:
    b = batches()
    assert (b.size(0, 1.0), b.size(1, 1.0)) == (FIRST, FIRST)
    b.begun(0, FIRST)
    b.note_copy(0, 0.001)
    assert (b.size(0, 1.0), b.size(1, 1.0)) == (2 * FIRST, FIRST)
    for _ in range(20):
        b.begun(0, b.size(0, 1.0))
    assert b.size(0, 1.0) == MOST


@pytest.mark.parametrize(("copy_s", "room", "at_once", "size"), [
    (0.25, 1.0, 1, 4),
    (0.25, 0.5, 1, 2),
    (0.25, 0.0, 1, 1),
    (0.02, 0.0, 1, 5),
    (0.25, 1.0, 3, 12),
    (30.0, 1.0, 1, 1),
    (30.0, 1.0, 3, 3),
])  # fmt: skip
def test_a_batch_is_as_large_as_can_be_copied_while_rows_wait(
    copy_s: float, room: float, at_once: int, size: int
) -> None:
    b = batches(at_once)
    for _ in range(3):
        b.begun(0, b.size(0, 1.0))
    b.note_copy(0, copy_s)
    assert b.size(0, room) == size


def test_the_room_in_logs_is_that_of_the_fullest_as_reported() -> None:
    c = Cluster(slots=3, log_max_bytes=1000)
    assert c.core.board.log_room() == 1.0
    c.report(1, Heartbeat(node=1, progress=1, stats={"log_bytes": 250}))
    c.report(2, Heartbeat(node=2, progress=1, stats={"log_bytes": 100}))
    assert c.core.board.log_room() == 0.75
    c.report(2, Heartbeat(node=2, progress=2, stats={"log_bytes": 2000}))
    assert c.core.board.log_room() == 0.0
