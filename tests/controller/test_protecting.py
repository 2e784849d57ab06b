"""A running stage gets another number of replicas, or other kinds: its additions, the time of its drops, and its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.decide.request_book import State
from controller.replicas.kinds import wanted
from controller.replicas.protection_wishes import in_words, least_safe, most_at_a_time, places_needed, wished
from flux.errors import UsageError
from flux.wire.control import CopyState
from partitioning.ids import ACTIVE, STANDBY, PartitionKey
from partitioning.table import ReplicaAt
from tests.controller.cluster import Cluster


def standing(c: Cluster, request: int) -> str:
    return str(c.core.request(request).standing.state)


# ---- the ways from one technique to another


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [
        ((1, ACTIVE), (2, ACTIVE), ["a (a)", "a a"]),
        ((1, ACTIVE), (2, STANDBY), ["a (s)", "a s"]),
        ((2, ACTIVE), (2, STANDBY), ["a a (s)", "a s"]),
        ((2, STANDBY), (2, ACTIVE), ["a s (a)", "a a"]),
        ((3, STANDBY), (2, ACTIVE), ["a s (a)", "a a"]),
        ((3, ACTIVE), (1, ACTIVE), ["a"]),
        ((3, ACTIVE), (2, STANDBY), ["a a (s)", "a s"]),
        ((2, STANDBY), (3, ACTIVE), ["a s (a)", "a a (a)", "a a a"]),
        ((3, STANDBY), (1, None), ["a"]),
    ],
)
def test_what_is_added_is_safe_before_what_it_replaces_goes(
    before: tuple[int, str], after: tuple[int, str | None], way: list[str]
) -> None:
    c = Cluster(slots=4, replicas=before[0], recovery=before[1])
    seen = [c.has()]
    request = c.protect(*after)
    for _ in range(len(way) + 1):
        if c.has() != seen[-1]:
            seen.append(c.has())
        c.settle_one()
        if c.has() != seen[-1]:
            seen.append(c.has())
        c.tick(0.3)
    assert seen[1:] == way
    assert standing(c, request) == State.DONE
    assert not c.core.board.wishes.open


def test_the_old_replica_stays_until_the_new_one_is_safe() -> None:
    c = Cluster(slots=3)
    c.protect(recovery=STANDBY)
    old = c.holders()[1]
    assert c.has() == "a a (s)"
    c.caught_up(safe=False)
    c.let_list()
    assert c.has() == "a a s"
    for _ in range(5):
        c.tick(1.0)
        assert old in c.holders(), "live is not safe"
    c.caught_up(safe=True)
    assert c.has() == "a s"
    assert old not in c.holders()


def test_the_primary_stays_where_it_is() -> None:
    c = Cluster(slots=4, partitions=4)
    primaries = [c.holders(partition)[0] for partition in range(4)]
    c.protect(recovery=STANDBY)
    c.settle()
    c.tick(1.0)
    c.settle()
    assert [c.holders(partition)[0] for partition in range(4)] == primaries
    assert {c.has(partition) for partition in range(4)} == {"a s"}


def test_one_table_drops_what_many_partitions_have_too_many() -> None:
    c = Cluster(slots=4, replicas=3, partitions=64)
    before = c.table.epoch
    c.protect(1)
    assert {c.has(partition) for partition in range(64)} == {"a"}
    assert c.table.epoch == before + 1


def test_of_several_the_one_far_behind_goes() -> None:
    c = Cluster(slots=4, replicas=3)
    late = c.replicas()[1]
    c.core.repairs.safety.is_behind = lambda stage, partition, replica: replica == late  # type: ignore[method-assign]
    c.protect(2)
    assert late.worker not in c.holders()


def test_of_several_the_one_on_a_worker_that_leaves_goes() -> None:
    c = Cluster(slots=5, replicas=3)
    leaves = c.holders()[1]
    c.core.members.empty(leaves)
    change = c.core.board.wishes.ask(wished(c.core.wished.stages[0], 2, None), c.table.stages[0], c.now, 1)
    assert c.core.protecting.too_many(change, PartitionKey(0, 0), c.replicas()) == [leaves]


# ---- turns


def test_repairs_of_any_stage_go_before_what_a_change_still_adds() -> None:
    c = Cluster(slots=5, partitions=20, stages=2)
    c.protect(recovery=STANDBY)
    assert 0 < len(c.core.repairs.under_way) < 20, "a first batch"
    c.lose(next(iter(c.core.repairs.under_way.values())).worker)
    known, repaired = set(c.core.repairs.under_way), 0
    while c.settle_one() is not None or c.core.board.wishes.open:
        short = {
            (stage, partition)
            for stage, rows in enumerate(c.table.stages)
            for partition, row in enumerate(rows)
            if len(row) - ((stage, partition) in c.core.repairs.under_way) < 2
        }
        new = set(c.core.repairs.under_way) - known
        assert not short - set(c.core.repairs.under_way) or new <= short, (
            "no repair waits for a change that has not begun"
        )
        repaired += len(new & short)
        known |= new
        c.tick(0.3)
    assert repaired > 5
    assert {c.has(partition) for partition in range(20)} == {"a s"}
    assert {c.has(partition, 1) for partition in range(20)} == {"a a"}


def test_moves_wait_until_a_change_is_through() -> None:
    c = Cluster(slots=4, partitions=2)
    c.protect(recovery=STANDBY)
    source = c.holders(1)[0]
    target = next(worker for worker in range(4) if worker not in c.holders(1))
    c.move(source, target, partition=1)
    assert not c.core.moving.under_way
    while c.core.board.wishes.open:
        c.settle_one()
        c.tick(0.3)
    c.tick(0.3)
    c.settle()
    assert c.holders(1)[0] == target
    assert c.has(1) == "a s"


def test_a_move_that_is_under_way_comes_to_its_end_first() -> None:
    c = Cluster(slots=4)
    source, other = c.holders()
    c.move(source, 3)
    c.protect(1)
    assert c.has() == "a a (a)"
    c.complete()
    c.tick(0.3)
    assert c.holders() == [3], "the target leads, and the other replica is too many"
    assert other not in c.all_holders()


# ---- losses


def test_a_loss_half_way_is_repaired_towards_what_is_wished_now() -> None:
    c = Cluster(slots=5)
    request = c.protect(recovery=STANDBY)
    c.lose(c.holders()[0])
    assert c.has() == "a (s)", "the new primary is the other active one, and a standby is added"
    c.complete()
    assert c.has() == "a s"
    assert standing(c, request) == State.DONE


def test_a_standby_that_has_to_lead_meanwhile_is_the_active_one() -> None:
    c = Cluster(slots=4, recovery=STANDBY)
    c.protect(recovery=ACTIVE)
    assert c.has() == "a s (a)"
    c.lose(c.holders()[0])
    assert c.has() == "a (a)"
    c.complete()
    assert c.has() == "a a"


def test_a_change_waits_for_workers_that_are_lost_and_says_so() -> None:
    c = Cluster(slots=3)
    request = c.protect(recovery=STANDBY)
    c.lose(c.holders()[2])
    c.tick(1.0)
    assert c.has() == "a a", "nothing is given up for what cannot come"
    assert standing(c, request) == State.UNDER_WAY
    assert "1 partition of Sums" in c.core.request(request).standing.left
    c.join(2, attempt=1)
    c.tick(0.3)
    c.settle()
    assert c.has() == "a s"
    assert standing(c, request) == State.DONE


def test_a_failed_attempt_is_repeated() -> None:
    c = Cluster(slots=4)
    c.mute.add("w3.0")
    c.protect(recovery=STANDBY)
    c.tick(31.0)
    assert c.events("failed attempt")
    c.mute.clear()
    c.confirm(3, c.table.epoch)
    c.tick(1.0)
    c.settle()
    c.tick(1.0)
    assert c.has() == "a s"


def test_a_worker_that_is_needed_meanwhile_does_not_leave() -> None:
    c = Cluster(slots=3)
    c.protect(recovery=STANDBY)
    with pytest.raises(UsageError, match="has replicas=2, and 3 while they change"):
        c.drain(2)
    c.settle()
    c.drain(2)


# ---- asking


def test_what_is_there_already_is_done_at_once() -> None:
    c = Cluster()
    before = c.table
    request = c.protect(2, ACTIVE)
    assert standing(c, request) == State.DONE
    assert c.table is before
    assert not c.events("protect")


def test_who_asks_again_joins_the_change() -> None:
    c = Cluster()
    first, second = c.protect(recovery=STANDBY), c.protect(2, STANDBY)
    assert [standing(c, request) for request in (first, second)] == [State.UNDER_WAY] * 2
    c.settle()
    c.tick(0.3)
    assert [standing(c, request) for request in (first, second)] == [State.DONE] * 2
    assert len(c.events("protected")) == 1


def test_the_newest_wish_counts() -> None:
    c = Cluster(slots=4)
    first = c.protect(recovery=STANDBY)
    second = c.protect(3, ACTIVE)
    assert standing(c, first) == State.GIVEN_UP
    assert c.core.request(first).standing.why == f"request {second} asks for 3 active replicas"
    for _ in range(4):
        c.settle()
        c.tick(0.3)
    assert c.has() == "a a a"
    assert standing(c, second) == State.DONE
    assert standing(c, first) == State.GIVEN_UP
    (given_up,) = c.events("protect given up")
    assert given_up.request == first


def test_back_to_what_it_was() -> None:
    c = Cluster(slots=4)
    c.protect(recovery=STANDBY)
    request = c.protect(recovery=ACTIVE)
    for _ in range(3):
        c.settle()
        c.tick(0.3)
    assert c.has() == "a a"
    assert standing(c, request) == State.DONE


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        ({}, {}, "say how many replicas, or which recovery"),
        ({"replicas": 0}, {}, "replicas must be 1 to 3; got 0"),
        ({"replicas": 4}, {}, "replicas must be 1 to 3; got 4"),
        ({"recovery": "upstream", "replicas": 2}, {}, "keeps no state, only where rows come in once more"),
        ({"recovery": "warm"}, {}, "recovery must be one of active, standby, upstream; got 'warm'"),
        ({"recovery": STANDBY, "replicas": 1}, {}, "says what further replicas do: give replicas=2 or more"),
        (
            {"replicas": 3},
            {"slots": 2},
            "3 active replicas need 3 workers on different executors, and there are 2 that stay",
        ),
        (
            {"recovery": STANDBY},
            {"slots": 2},
            "each partition needs 3 workers on different executors while 2 active replicas become 1 active replica and "
            "1 standby, and there are 2 that stay",
        ),
        ({"recovery": STANDBY}, {"replicas_ordered": False}, "do not keep one order"),
        ({"recovery": STANDBY, "stage": 7}, {}, "there is no stage 7"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(given: dict[str, Any], more: dict[str, Any], said: str) -> None:
    ordered = more.pop("replicas_ordered", True)
    c = Cluster(**more)
    if not ordered:
        plan = c.core.plan
        c.core.board.plan = replace(plan, settings=replace(plan.settings, ordered=False))
    before, wish = c.table, c.core.wished
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        c.protect(**given)
    assert c.table is before
    assert c.core.wished is wish


def test_output_that_is_kept_to_be_fetched_has_no_standbys() -> None:
    c = Cluster(slots=4, collect=1)
    (collects,) = [stage.id for stage in c.core.plan.stages if stage.collects]
    with pytest.raises(UsageError, match="only replicas can be changed"):
        c.protect(recovery=STANDBY, stage=collects)
    c.protect(3, stage=collects)


def test_one_replica_with_standbys_in_mind_is_an_active_one() -> None:
    c = Cluster(slots=4, recovery=STANDBY)
    c.protect(1)
    assert (c.core.wished.stages[0].replicas, c.core.wished.stages[0].recovery) == (1, ACTIVE)


def test_executors_that_are_shared_count_once() -> None:
    c = Cluster(slots=4, executors={0: "a", 1: "b", 2: "b", 3: "a"})
    with pytest.raises(UsageError, match="on different executors"):
        c.protect(recovery=STANDBY)
    c = Cluster(slots=4, executors={0: "a", 1: "b", 2: "b", 3: "a"}, same_executor=True)
    c.protect(recovery=STANDBY)


# ---- history


def test_the_history_has_the_request_its_replicas_and_its_end() -> None:
    c = Cluster(slots=4)
    request = c.protect(recovery=STANDBY)
    c.now += 2.0
    c.settle()
    told = [(event.kind, event.stage, event.why) for event in c.core.repairs.history if event.request == request]
    change = "from 2 active replicas to 1 active replica and 1 standby"
    assert told == [
        ("protect", "Sums", f"asked for: {change}"),
        ("repair", "Sums", f"change {change}"),
        ("protected", "Sums", change),
    ]
    assert c.events("protected")[0].seconds == pytest.approx(2.0, abs=0.5)
    assert str(c.events("protected")[0]).startswith("protected of Sums: from 2 active")


def test_a_query_that_is_through_gives_changes_up() -> None:
    c = Cluster(slots=4)
    c.protect(recovery=STANDBY)
    c.core.sweeper.wind_down("the query is through", c.now)
    assert c.events("protect given up")
    assert not c.core.board.wishes.open


def test_levels_and_errors_go_by_what_is_wished_now() -> None:
    c = Cluster(slots=4)
    c.protect(1)
    assert [(level.wanted, level.short) for level in c.core.levels()] == [(1, 0)]
    c.lose(c.holders()[0])
    assert "Stages with replicas=1 do not survive" in str(c.core.error)


def test_a_copy_of_a_standby_is_ordered_like_any_other() -> None:
    c = Cluster(slots=4)
    c.protect(recovery=STANDBY)
    (ordered,) = c.sent(CopyState)
    assert c.replicas()[-1] == ReplicaAt(ordered.worker, ordered.incarnation, False, STANDBY)


# ---- arithmetic


@given(
    st.tuples(st.integers(1, 3), st.sampled_from([ACTIVE, STANDBY])),
    st.tuples(st.integers(1, 3), st.sampled_from([ACTIVE, STANDBY])),
)
@settings(deadline=None)
def test_no_change_needs_more_workers_than_are_asked_for(before: tuple[int, str], after: tuple[int, str]) -> None:
    """Given the number of workers that ``places_needed`` says, every change comes to its end, and there are never more replicas
    than ``most_at_a_time`` says, nor fewer safe ones than ``least_safe``."""
    (have, of), (number, kind) = before, after
    if (have == 1 and of == STANDBY) or (number == 1 and kind == STANDBY):
        return
    plan = Cluster(slots=5, replicas=have, recovery=of).core.plan.stages[0]
    wish = wished(plan, number, kind)
    rows = Cluster(slots=5, replicas=have, recovery=of).table.stages[0]
    needed = places_needed(rows, plan, wish)
    c = Cluster(slots=needed, replicas=have, recovery=of)
    request = c.protect(number, kind)
    for _ in range(8):
        assert len(c.replicas()) <= max(most_at_a_time(wish, least_safe(plan, wish)), have)
        assert sum(c.core.repairs.safety.is_safe(0, 0, each) for each in c.replicas()) >= least_safe(plan, wish)
        c.settle_one()
        c.tick(0.3)
    assert standing(c, request) == State.DONE
    assert sorted(each.kind for each in c.replicas()) == sorted(wanted(wish))


def test_techniques_in_words() -> None:
    stage = Cluster().core.plan.stages[0]
    said = [
        in_words(replace(stage, replicas=n, recovery=kind)) for n, kind in [(1, ACTIVE), (2, STANDBY), (3, STANDBY)]
    ]
    assert said == ["1 active replica", "1 active replica and 1 standby", "1 active replica and 2 standbys"]
