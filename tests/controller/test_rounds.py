"""Policies are asked once a round; the controller accepts or refuses their suggestions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.balance.load import Loads, Move, ReplicaLoad, Suggestion
from controller.balance.rounds import PER_REPLICA_S, SETTLED_S, Rounds
from flux.errors import UsageError
from tests.controller.cluster import Cluster


class Policies:
    """A stub for all policies: each makes the suggestions that a test gives, and notes the times at which it was asked."""

    def __init__(self) -> None:
        self.says: dict[str, list[Suggestion]] = {}
        self.asked: list[tuple[str, float]] = []
        self.looks: list[Loads] = []

    def whole_plan(self, name: str, loads: Loads, settings: Any, now: float) -> Suggestion:
        return self.make(name, "at once").suggest(loads, now)

    def make(self, name: str, settings: Any) -> Any:
        if name not in ("pairing", "even", "drain"):
            raise UsageError(f"there is no balance policy {name!r}")

        def suggest(loads: Loads, now: float) -> Suggestion:
            self.asked.append((name + (" at once" if settings == "at once" else ""), now))
            self.looks.append(loads)
            says = self.says.get(name, [])
            given = says.pop(0) if says else Suggestion()
            if isinstance(given, Exception):
                raise given
            return given

        return SimpleNamespace(suggest=suggest)


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Policies:
    made = Policies()
    monkeypatch.setattr("controller.balance.rounds.make", made.make)
    monkeypatch.setattr("controller.balance.rounds.whole_plan", made.whole_plan)
    return made


def cluster(**more: Any) -> Cluster:
    c = Cluster(**more)
    c.core.balancer.rounds = Rounds(c.core.plan.settings)
    c.core.rounds.on = True
    c.core.rounds._policy = c.core.rounds._make("pairing")
    return c


def test_a_round_over_very_many_copies_comes_later_so_that_the_controller_has_time_for_losses(
    policies: Policies,
) -> None:
    rounds = Rounds(cluster().core.plan.settings)
    rounds.on = True
    rounds._policy = rounds._make("pairing")
    few, many = (Loads({}, [ReplicaLoad(0, 0, 0)] * number) for number in (2_000, 200_000))
    rounds.ask(few, 0.0, True)
    assert rounds.due(1.0)
    rounds.ask(many, 1.0, True)
    assert not rounds.due(1.0 + 200_000 * PER_REPLICA_S - 0.1)
    assert rounds.due(1.0 + 200_000 * PER_REPLICA_S + 0.1)


def test_the_policy_is_asked_once_a_round(policies: Policies) -> None:
    c = cluster()
    for _ in range(30):
        c.tick(0.1)
    assert 3 <= len(policies.asked) <= 4
    assert {name for name, _ in policies.asked} == {"pairing"}


def test_it_is_not_asked_when_balance_is_off(policies: Policies) -> None:
    c = cluster()
    c.core.rounds.on = False
    c.tick(5.0)
    assert policies.asked == []


def test_what_it_suggests_is_carried_out_and_says_who_wanted_it(policies: Policies) -> None:
    policies.says["pairing"] = [Suggestion([Move(0, 0, 0, 3)])]
    c = cluster(slots=4)
    c.tick(1.0)
    c.settle()
    assert c.holders() == [3, 1]
    assert c.events("move")[0].why == "balance: pairing"


def test_what_is_impossible_is_refused_and_the_rest_is_done(policies: Policies) -> None:
    policies.says["pairing"] = [Suggestion([Move(0, 0, 0, 1), Move(0, 1, 1, 3)])]
    c = cluster(slots=4, partitions=2)
    c.tick(1.0)
    assert c.core.report()["balance"]["refused"] == ["Sums/0: worker 1 holds a replica already"]
    assert c.settle() == [(0, 1)]


def test_what_it_has_to_say_to_people_is_in_the_report_and_once_in_the_history(policies: Policies) -> None:
    note = "Sums/0 alone is more than one worker can do"
    policies.says["pairing"] = [Suggestion([], [note])] * 3
    c = cluster()
    for _ in range(3):
        c.tick(1.0)
    assert c.core.report()["balance"]["notes"] == [note]
    assert [event.why for event in c.events("balance")] == [note]


def test_a_policy_that_fails_is_not_asked_again_and_the_query_goes_on(policies: Policies) -> None:
    policies.says["pairing"] = [ZeroDivisionError("by a worker without load")]  # type: ignore[list-item]
    c = cluster()
    c.tick(1.0)
    c.tick(5.0)
    assert len(policies.asked) == 1
    assert "policy pairing failed and is not asked again: ZeroDivisionError" in c.events("warning")[0].why
    assert c.core.phase == "running"


def test_after_a_worker_has_joined_counts_are_evened_out_before_loads(policies: Policies) -> None:
    policies.says["even"] = [Suggestion([Move(0, 0, 0, 3)]), Suggestion()]
    c = cluster(slots=3)
    c.take(c.core.scale(4, c.now))
    c.join(3)
    c.tick(SETTLED_S / 2)
    assert "even" not in {name for name, _ in policies.asked}, "others may be on their way"
    asked = len(policies.asked)
    c.tick(SETTLED_S)
    assert c.holders() == [0, 1, 3]
    c.tick(1.0)
    assert [name for name, _ in policies.asked].count("even") == 1, "not while something moves"
    c.settle()
    c.tick(1.0)
    assert not c.core.rounds.evening_out
    assert {name for name, _ in policies.asked[asked:]} == {"even", "even at once"}, "nobody else is asked meanwhile"
    c.tick(1.0)
    assert policies.asked[-1][0] == "pairing"
    assert [name for name, _ in policies.asked].count("even") == 2


def test_workers_that_join_get_no_partition_by_load_before_counts_are_even(policies: Policies) -> None:
    """Empty workers look idle: by load they would be given one partition after the other."""
    policies.says["pairing"] = [Suggestion([Move(0, 0, 0, 3)])] * 9
    c = cluster(slots=3)
    c.core.rounds.round_s = SETTLED_S / 4
    c.take(c.core.scale(4, c.now))
    c.join(3)
    assert c.core.rounds.evening_out
    for _ in range(3):
        c.tick(SETTLED_S / 4)
    assert c.core.moves_pending() == []
    c.tick(1.0)
    assert not c.core.rounds.evening_out, "they were even"
    c.tick(1.0)
    c.settle()
    assert [event.why for event in c.events("move")] == ["balance: pairing"]


def test_evening_out_is_not_over_because_the_limits_of_a_round_let_nothing_move(policies: Policies) -> None:
    """After a large state has moved, the bytes that balance may copy are used up for a while."""
    policies.says["even"] = [Suggestion(), Suggestion([Move(0, 0, 0, 3)]), Suggestion([Move(0, 0, 0, 3)]), Suggestion()]
    c = cluster(slots=3)
    c.take(c.core.scale(4, c.now))
    c.join(3)
    c.tick(2 * SETTLED_S)
    assert policies.asked[-1][0] == "even at once", "what is left without these limits"
    assert c.core.rounds.evening_out
    c.tick(1.0)
    c.settle()
    assert c.events("move")[0].why == "balance: even"


def test_evening_out_ends_when_all_that_it_suggests_is_impossible(policies: Policies) -> None:
    policies.says["even"] = [Suggestion([Move(0, 0, 0, 1)])] * 9
    c = cluster(slots=3)
    c.lose(2)
    c.join(2, attempt=1)
    c.tick(2 * SETTLED_S)
    assert c.core.report()["balance"]["refused"] == ["Sums/0: worker 1 holds a replica already"]
    assert not c.core.rounds.evening_out


def test_a_worker_that_waits_to_be_emptied_for_ever_does_not_keep_others_from_their_share(policies: Policies) -> None:
    policies.says["even"] = [Suggestion()] * 9
    c = cluster(slots=3)
    c.take(c.core.drain(0, c.now))
    c.lose(2)
    c.settle()
    assert c.core.report()["movesWaiting"] == ["no other worker may hold a replica of it"]
    c.core.rounds.joined(c.now)
    c.tick(2 * SETTLED_S)
    assert "even" in {name for name, _ in policies.asked}


def test_repairs_come_before_evening_out(policies: Policies) -> None:
    c = cluster(slots=3)
    c.lose(0)
    c.join(0, attempt=1)
    for _ in range(3):
        c.tick(1.0)
    assert "even" not in {name for name, _ in policies.asked}
    c.settle()
    c.tick(1.0)
    assert "even" in {name for name, _ in policies.asked}


def test_a_plan_by_hand_is_made_at_once_and_changes_nothing(policies: Policies) -> None:
    policies.says["even"] = [Suggestion([Move(0, 0, 0, 3)], ["as even as can be"])]
    c = cluster(slots=4)
    epoch = c.table.epoch
    assert c.core.suggest("even", c.now) == Suggestion([Move(0, 0, 0, 3)], ["as even as can be"])
    assert policies.asked[-1] == ("even at once", c.now)
    assert (c.table.epoch, c.core.moves_pending()) == (epoch, [])


def test_an_unknown_policy_is_a_usage_error(policies: Policies) -> None:
    with pytest.raises(UsageError, match="there is no balance policy 'mine'"):
        cluster().core.suggest("mine", 1.0)


def test_queries_whose_copies_keep_no_order_are_not_balanced() -> None:
    settings = Cluster(ordered=False).core.plan.settings
    assert not Rounds(settings).on


# ---- where a worker that leaves sends its partitions


def test_what_leaves_goes_where_the_policy_of_drains_would_have_it(policies: Policies) -> None:
    c = cluster(slots=5)
    policies.says["drain"] = [Suggestion([Move(0, 0, 1, 4)])]
    c.take(c.core.drain(1, c.now))
    assert policies.looks[-1].workers[1].leaving
    c.settle()
    assert c.holders() == [0, 4]


def test_another_worker_is_found_if_that_one_is_lost_meanwhile(policies: Policies) -> None:
    c = cluster(slots=5)
    policies.says["drain"] = [Suggestion([Move(0, 0, 1, 4)])]
    c.take(c.core.drain(1, c.now))
    c.lose(4)
    c.settle()
    assert c.holders()[0] == 0
    assert c.holders()[1] in (2, 3)


def test_a_policy_of_drains_that_fails_does_not_hold_up_the_drain(policies: Policies) -> None:
    c = cluster(slots=5)
    policies.says["drain"] = [KeyError("nobody")]  # type: ignore[list-item]
    c.take(c.core.drain(1, c.now))
    c.settle()
    assert 1 not in c.core.members.workers
