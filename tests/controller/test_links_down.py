"""Links over which nothing comes are shown, with the worker that is read instead (design: reachability)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from cluster import Cluster

from controller.report.links import UP_S, LinksDown, lent, links_down, loans, relayed, relays, told
from flux.wire.statistics import Detour, LentRows, RelayedLink

AT = datetime(2026, 11, 27, 12, 1, 7).timestamp()


def cluster(**stats: Any) -> Cluster:
    made = Cluster()
    made.core.members.workers[2].stats = stats
    return made


def test_a_detour_is_told_with_both_workers_and_its_time() -> None:
    made = cluster(detours=[Detour(0, 1, 1_000_000_000.5, 3)])
    (link,) = links_down(made.core.members)
    assert link == {
        "worker": 2,
        "nothingFrom": 0,
        "since": "2001-09-09T01:46:40.500Z",
        "readsFrom": 1,
        "streams": 3,
        "inStep": False,
    }
    assert "worker 2 reads 3 streams from worker 1 since" in told(link)
    assert told(link).endswith("nothing came from worker 0")


def test_a_worker_in_a_step_is_told_from_a_link_that_is_down() -> None:
    made = cluster(detours=[Detour(0, 1, 1.0, 1)])
    member = made.core.members.workers[0]
    member.heard = member.turned + 1.0
    (link,) = links_down(made.core.members)
    assert told(link).endswith("nothing came from worker 0, which is busy in a step")


@pytest.mark.parametrize("detours", [[], [Detour(9, 1, 1.0, 1)]])
def test_nothing_is_told_without_a_detour_or_of_a_worker_that_is_gone(detours: list[Detour]) -> None:
    assert links_down(cluster(detours=detours).core.members) == []


def test_a_loan_is_told_with_the_worker_of_the_secondaries() -> None:
    made = cluster(lent=[LentRows(1, 1_000_000_000.5, 2, 30)])
    (loan,) = loans(made.core.members)
    assert loan == {"worker": 2, "lentBy": 1, "since": "2001-09-09T01:46:40.500Z", "streams": 2, "slices": 30}
    assert lent(loan).startswith("worker 2 gets rows of 2 streams from secondaries on worker 1 since")


def test_answers_that_come_over_a_third_worker_are_told_with_it() -> None:
    made = cluster(relays=[RelayedLink(1, 0, 1_000_000_000.5)])
    (relay,) = relays(made.core.members)
    assert relay == {"worker": 2, "nothingFrom": 1, "over": 0, "since": "2001-09-09T01:46:40.500Z"}
    assert relayed(relay).startswith("worker 2 and worker 1 reach each other over worker 0 since")


def link(since: float, instead: int = 1, busy: bool = False) -> list[dict[str, Any]]:
    made = cluster(detours=[Detour(0, instead, since, 3)])
    member = made.core.members.workers[0]
    member.heard = member.turned + busy
    return links_down(made.core.members)


def test_a_link_that_was_down_is_one_entry_of_the_history_also_if_it_is_left_again_and_again() -> None:
    down = LinksDown()
    down.note(link(AT, instead=1), AT + 1)
    down.note([], AT + 2)
    down.note(link(AT + 3, instead=3), AT + 4)
    assert list(down.over(AT + 4 + UP_S)) == []
    assert list(down.over(AT + 4.5 + UP_S)) == [
        (
            "nothing came from worker 0 to worker 2 from 12:01:07 to 12:01:11: it read 3 streams from worker 1 and worker 3",
            4.0,
        )
    ]
    assert list(down.over(AT + 20)) == []


def test_a_worker_that_was_only_busy_is_no_link_that_was_down() -> None:
    down = LinksDown()
    down.note(link(AT, busy=True), AT + 1)
    assert list(down.over(AT + 20)) == []
    down.note(link(AT, busy=True), AT + 21)
    down.note(link(AT), AT + 22)
    assert len(list(down.over(AT + 40))) == 1
