"""Kill after kill, each at full replication: none of them ends a query, and every row is counted once.

A real run of twenty kills found a failure: while one copy moved within its executor the other was lost, the target took the
place of the lost copy, and both copies shared an executor, which the next kill hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from controller.decide.registration import Registration
from controller.decide.sweep import Sweep
from controller.replicas.placement import FarApart
from tests.simulation import variants
from tests.simulation.broken_moves import a_target_stays_beside_a_source_on_its_own_executor
from tests.simulation.faults import Faults
from tests.simulation.kills import Kills, Shape
from tests.simulation.runs import LONG
from tests.simulation.table_laws import TableLaws
from tests.simulation.violation import Violation

#: Kills of one run, and the least number of kills, over all runs, that hit several workers or a move.
TIMES, MET = (6, 4) if LONG else (3, 2)
#: Faults besides, and the longest time to full replication after the return of the last worker. Lost messages may be orders to
#: copy, which are repeated after one second, then two.
BESIDES = {
    "none": (Faults(), 1.0),
    "breaks": (Faults(breaks_per_s=3.0, control_breaks_per_s=3.0), 5.0),
    "losses": (Faults(loss_probability=0.02, delay_s=0.005), 5.0),
    "delays": (Faults(spike_probability=0.02, spike=30.0, late_order_probability=0.2, late_order_s=0.1), 5.0),
}
SHAPES = [Shape(), Shape(), Shape(slots=3, workers=4), Shape(executors=4, workers=5, copies=3, partitions=2)]


def killed(besides: str, seed: int) -> Counter[str]:
    sim = Kills(seed, *BESIDES[besides], SHAPES[seed % len(SHAPES)])
    sim.kill_again_and_again(TIMES)
    assert sim.controller.error is None
    return sim.counts


@pytest.mark.timeout(1800)  # a dozen seconds on a free core
def test_kills_at_full_replication_end_no_query_whatever_fails_besides() -> None:
    counts = sum((killed(besides, seed) for seed, besides in enumerate(BESIDES)), Counter[str]())
    assert counts["executors killed with several workers"] >= MET
    assert counts["killed during a move"] >= MET
    assert counts["rows at sinks"] > 1000


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_copies_are_on_different_hosts_again_after_each_kill(seed: int) -> None:
    """Kill workers on two hosts of two executors each. A copy stays beside the other only while there is no other host."""
    shape = Shape(executors=4, slots=1, workers=4, hosts=2, partitions=4)
    sim = Kills(seed, *BESIDES["none"], shape)
    sim.kill_again_and_again(TIMES)
    assert sim.controller.error is None


def both_copies_on_one_executor(patch: pytest.MonkeyPatch) -> None:
    """Allow both copies on one executor, and switch off the checks that would see it before it hurts."""
    a_target_stays_beside_a_source_on_its_own_executor(patch)
    patch.setattr(TableLaws, "_check_apart", lambda *given: None)
    patch.setattr(Sweep, "validate", lambda *given: None)


def copies_wherever_there_is_room(patch: pytest.MonkeyPatch) -> None:
    """Place copies as if all hosts were one."""
    patch.setattr(FarApart, "rank", lambda *given: 0)
    patch.setattr(FarApart, "best", lambda *given: 0)


#: The law that shows it if there are several hosts.
ON_ONE_HOST = "replicas are on different hosts"


@pytest.mark.timeout(1800)
def test_copies_on_one_host_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_wherever_there_is_room(monkeypatch)
    sim = Kills(1, *BESIDES["none"], Shape(executors=4, slots=1, workers=4, hosts=2, partitions=4))
    with pytest.raises(Violation, match=ON_ONE_HOST):
        sim.kill_again_and_again(TIMES)


def workers_stay_where_spark_starts_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Registration, "_is_started_elsewhere", lambda *given: False)


#: As many workers as replicas, and executors that could hold both.
TWO, SHOWS_IT = Shape(workers=2), 2


def test_a_worker_that_comes_back_beside_the_other_one_is_started_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Kills(SHOWS_IT, *BESIDES["none"], TWO)
    sim.kill_again_and_again(TIMES)
    assert sim.controller.error is None
    workers_stay_where_spark_starts_them(monkeypatch)
    with pytest.raises(Violation, match="full replication comes back in time"):
        Kills(SHOWS_IT, *BESIDES["none"], TWO).kill_again_and_again(TIMES)


SHOWN: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    both_copies_on_one_executor: "no kill at full replication fails a query",
    variants.never_repairs: "full replication comes back in time",
}


@pytest.mark.parametrize("break_it", SHOWN, ids=lambda break_it: break_it.__name__)
def test_what_breaks_it_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    sim = Kills(107, *BESIDES["none"])
    with pytest.raises(Violation) as caught:
        sim.kill_again_and_again(8)
    assert caught.value.law == SHOWN[break_it]
