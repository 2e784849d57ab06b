"""Links over which nothing comes are shown, with the worker that is read instead (design: reachability)."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import Cluster

from controller.report.links import links_down, told
from flux.wire.statistics import Detour


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
