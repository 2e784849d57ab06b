"""Upstream replicas: they begin empty at a replay point, and the output is as if nothing had been lost (design: replay-point)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from flux.replica.replica import Replica
from flux.replica.user_code_guard import UserCodeGuard
from flux.state import replay_points
from flux.state.replay_points import ReplayPoint
from tests.simulation.checkers import Ledger
from tests.simulation.faults import Faults
from tests.simulation.flows import Dataflow, chain, with_standbys
from tests.simulation.mixes import UPSTREAM, UPSTREAM_LIVES, UPSTREAM_PROTECTED, UPSTREAM_REPAIRS
from tests.simulation.replaying import Lately, Replaying
from tests.simulation.run import Result, Simulation, outcome, run
from tests.simulation.runs import Runs
from tests.simulation.stage_kinds import Hold, Shatter, Watched

#: The first two long runs, and the first five short ones, show all events; ``make test`` makes those.
SEEDS = (0, 21, 1, 2, 6, 19, 36, 45)
SHORT_SEEDS = (2, 0, 1, 3, 4)
MIXES = (UPSTREAM_PROTECTED, UPSTREAM, UPSTREAM_REPAIRS, UPSTREAM_LIVES)


class ReplayingShatter(Replaying, Shatter):
    pass


def long_run(seed: int) -> Result:
    """Run a source, one to three stages, and a sink, while workers die all the time."""
    rng = random.Random(f"upstream {seed}")
    kinds = rng.choices(
        [Lately, ReplayingShatter, Replaying, Watched, Hold], [5, 1, 2, 1, 0.3], k=rng.choice([1, 2, 2, 3])
    )

    def flow(ledger: Ledger) -> Dataflow:
        made = chain(
            ledger, kinds, rng.choice([2, 2, 3]), batches=150, resend_timeout=0.03, heartbeat_timeout=0.25,
            heartbeat_interval=0.05, heartbeat_last_timeout=3.0,
        )  # fmt: skip
        made = with_standbys(made, rng, rng.choice([0.7, 1.0]))
        settings = replace(made.plan.settings, checkpoint_interval=rng.choice([0.01, 0.03]))
        return replace(made, plan=replace(made.plan, settings=settings))

    faults = Faults(
        calm_after_s=1.0,
        delay_s=rng.choice([0.001, 0.01]),
        breaks_per_s=rng.choice([0, 10.0]),
        crashes_per_s=rng.choice([10.0, 20.0]),
        uneven_crash_probability=rng.choice([0.0, 0.7]),
        loss_probability=rng.choice([0, 0.2]),
    )
    return outcome(Simulation(seed, faults, 2, 5, flow))


@pytest.fixture(scope="module")
def results() -> Runs:
    short = [partial(run, seed, mix) for seed in SHORT_SEEDS for mix in MIXES]
    long = [partial(long_run, seed) for seed in SEEDS]
    return Runs([*long[:2], *short, *long[2:]], few=7)


@pytest.mark.timeout(3600)
def test_upstream_replicas_keep_every_law(results: Runs) -> None:
    broken = results.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "take-overs from replay points",
        "take-overs that throw output away",
        "changes to upstream",
        "take-overs by standbys",
    ],
)
def test_it_happens_to_upstream_replicas(results: Runs, event: str) -> None:
    assert results.happens(event)


def sends_points_before_all_is_acked(patch: pytest.MonkeyPatch) -> None:
    """Send replay points before all output is acked: no replica makes the output again that consumers lack."""
    patch.setattr(ReplayPoint, "acked", lambda self, replica: True)


def gives_again_what_everybody_has(patch: pytest.MonkeyPatch) -> None:
    """Give output again that all consumers have. An operator that has just begun gives other batches, and all later ones get
    other numbers."""
    adopt = Replica.adopt
    patch.setattr(Replica, "adopt", lambda self, state: adopt(self, state | {"silent": 0}))


def forgets_what_operators_need(patch: pytest.MonkeyPatch) -> None:
    """Forget the rows that operators need: an operator that looks back begins too late."""
    patch.setattr(UserCodeGuard, "needs_from", lambda self: self._context.step + 1)


def acks_what_is_still_needed(patch: pytest.MonkeyPatch) -> None:
    """Ack the positions of the newest step, in place of those of the replay point."""
    point = replay_points._point
    patch.setattr(
        replay_points,
        "_point",
        lambda replica, first, now: point(replica, replace(first, positions=now.positions), now),
    )


@pytest.mark.parametrize(
    ("break_it", "seeds"),
    [
        (sends_points_before_all_is_acked, (21, 2)),
        (gives_again_what_everybody_has, (0, 36)),
        (forgets_what_operators_need, (2, 21)),
        (acks_what_is_still_needed, (0, 19)),
    ],
)
def test_a_variant_without_the_rule_is_caught(
    break_it: Callable[[pytest.MonkeyPatch], None], seeds: tuple[int, ...]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        assert any(not long_run(seed).ok for seed in (*seeds, *range(60)))
