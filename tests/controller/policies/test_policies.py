"""Laws of all policies: names, settings, limits, and one file for a new one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from policy_model import Cluster, policy

from controller.balance.load import Loads, Move, Suggestion
from controller.balance.policies import REGISTRY, Policy, PolicySettings, make
from controller.balance.policies.planned_moves import Budget
from controller.balance.rounds import Rounds, after, whole_plan
from flux.errors import ContractBroken, UsageError
from flux.settings import Settings

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


@pytest.fixture
def registry() -> Iterator[None]:
    """Forget policies that a test adds."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def test_every_module_of_the_package_is_known_by_the_name_of_its_policy() -> None:
    assert {"pairing", "even", "drain"} <= set(REGISTRY)
    assert Settings.of().balance_policy in REGISTRY


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"no balance policy 'luck'; known are .*drain, even.*, pairing"):
        make("luck", PolicySettings())


@pytest.mark.usefixtures("registry")
def test_the_example_in_the_documentation_works() -> None:
    section = PAGE.read_text().split("\n## A policy")[1].split("\n## ")[0]
    code, trial = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code + trial, "example", "exec"), {"__name__": "example"})
    by_busy = code.replace("replica.state_bytes <=", "replica.busy <=").replace(
        "+= replica.state_bytes", "+= replica.busy"
    )
    assert by_busy.count("replica.busy") == 2
    exec(
        compile(
            by_busy.replace("spread-state", "spread-busy") + trial.replace("state_bytes=1000", "state_bytes=0"),
            "example",
            "exec",
        ),
        {"__name__": "example"},
    )
    careless = code.replace("2 * replica.state_bytes", "replica.state_bytes").replace("spread-state", "careless")
    with pytest.raises(ContractBroken, match="it never comes to rest"):
        exec(compile(careless + trial, "example", "exec"), {"__name__": "example"})
    cluster = Cluster(3).put([0.1] * 6, lambda p: [p % 3])
    cluster.state_bytes = {(0, p): 1000 * (p in (1, 4)) for p in range(6)}
    cluster.leaving = {0, 2}
    assert cluster.round(policy("spread-state")).moves == [], "who leaves takes nothing, whatever the policy"
    cluster.leaving = set()
    (move,) = cluster.round(policy("spread-state")).moves
    assert (move.partition, move.from_worker, move.cost) == (1, 1, 1000)


def test_settings_reach_the_policy() -> None:
    given = Settings.of(
        None,
        balance_threshold="0.3",
        balance_cool_down="7s",
        balance_max_moves=4,
        balance_max_bytes_per_second="2m",
        balance_round="500ms",
        replicas_allow_same_executor="true",
    )
    assert PolicySettings.of(given) == PolicySettings(0.3, 7.0, 4, 2 << 20, True, smooth_s=1.0)


# ---- limits


def moves(*costs: int) -> list[Move]:
    return [Move(0, number, 0, 1, cost=cost) for number, cost in enumerate(costs)]


def budget(**settings: float) -> Budget:
    return Budget(PolicySettings(**settings))  # type: ignore[arg-type]


def test_no_more_moves_than_allowed_and_the_first_come_first() -> None:
    assert budget(max_moves=2).take(moves(1, 2, 3), 0.0) == moves(1, 2)


def test_bytes_are_paid_for_over_time_and_what_was_not_used_does_not_add_up() -> None:
    bucket = budget(max_moves=9, max_bytes_per_s=100)
    assert len(bucket.take(moves(60, 60, 60), 1000.0)) == 2, "the second goes into debt"
    assert bucket.take(moves(1), 1000.1) == []
    assert len(bucket.take(moves(1), 1000.3)) == 1
    assert len(bucket.take(moves(*[50] * 9), 5000.0)) == 2


def test_a_state_larger_than_the_bucket_moves_and_the_debt_is_waited_for() -> None:
    bucket = budget(max_moves=9, max_bytes_per_s=100)
    assert len(bucket.take(moves(1000), 0.0)) == 1
    assert [len(bucket.take(moves(1), now)) for now in (1.0, 8.0, 9.0, 9.1)] == [0, 0, 0, 1]


def test_without_limits_everything_may_move() -> None:
    bucket = budget(max_moves=math.inf, max_bytes_per_s=math.inf)
    assert [len(bucket.take(moves(*[1 << 40] * 9), now)) for now in (0.0, 0.0, 1.0)] == [9, 9, 9]


# ---- whole plans


def test_a_policy_that_does_not_exist_is_refused_before_the_query_runs() -> None:
    with pytest.raises(UsageError, match="no balance policy 'none'"):
        Rounds(Settings.of(None, balance_policy="none"))


@pytest.mark.parametrize("name", ["pairing", "even"])
def test_a_whole_plan_moves_each_partition_once_and_leaves_nothing_to_do(name: str) -> None:
    cluster = Cluster(5).put([0.02] * 80, lambda p: [p % 2])
    plan = whole_plan(name, cluster.loads(), Settings.of(), 1.0)
    assert len({m.partition for m in plan.moves}) == len(plan.moves) <= 48
    for move in plan.moves:
        cluster.make(move)
    assert cluster.imbalance() <= 1.2
    assert whole_plan(name, cluster.loads(), Settings.of(), 1.0).moves == []


def test_a_whole_plan_empties_workers_that_hold_two_copies_of_a_partition() -> None:
    cluster = Cluster(5).put([0.1] * 4, lambda p: [0, 1])
    cluster.leaving = {0, 1}
    for move in whole_plan("drain", cluster.loads(), Settings.of(), 1.0).moves:
        cluster.make(move)
    assert cluster.counts()[0] == cluster.counts()[1] == 0


@pytest.mark.usefixtures("registry")
def test_a_policy_that_never_has_enough_does_not_keep_a_plan_for_ever() -> None:
    class Restless(Policy, name="restless"):
        def suggest(self, loads: Loads, now: float) -> Suggestion:
            here = loads.replicas[0].worker
            return Suggestion([Move(0, 0, here, 1 - here)])

    assert len(whole_plan("restless", Cluster(2).put([0.1], lambda p: [0]).loads(), Settings.of(), 1.0).moves) == 2


def test_load_goes_with_the_copy_in_the_loads_after_a_move() -> None:
    loads = Cluster(2).put([0.2, 0.1], lambda p: [0]).loads()
    moved = after(loads, [Move(0, 1, 0, 1)])
    assert moved.of_workers() == pytest.approx({0: 0.2, 1: 0.1})
    assert replace(moved.replicas[1], worker=0) == loads.replicas[1]
