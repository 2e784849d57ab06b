"""What can go wrong in a run: an explicit list, each kind drawn per seed. None of them may change a result.

Two may end a run with an error, and only with the right one: input that reads otherwise when it is read again, and
the crash of a worker, which one copy of each partition does not survive.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Faults:
    """Rates are events per second of virtual time over the whole cluster, probabilities are per occasion. All faults
    stop ``calm_after_s`` after the start: from then on a run must come to its end."""

    calm_after_s: float = 0.0
    #: Delay of a message: exponential with this mean, times ``spike`` now and then.
    delay_s: float = 0.002
    spike_probability: float = 0.0
    spike: float = 1.0
    #: A connection breaks: everything under way on it is lost, but for what its sender had not yet written.
    breaks_per_s: float = 0.0
    #: One message is lost and the connection stays.
    loss_probability: float = 0.0
    #: A process stands still, and goes on.
    pauses_per_s: float = 0.0
    pause_s: float = 0.0
    #: One worker takes so many times longer for everything.
    slowness: float = 1.0
    #: An ingress task dies, and is started again.
    deaths_per_s: float = 0.0
    #: Another attempt is started while the first is alive (speculation), and the first does not know.
    zombies_per_s: float = 0.0
    #: An ingress task needs so long to read a batch.
    read_s: float = 0.0
    #: A producer sends again what was not asked for, as a careless one might.
    repeats_probability: float = 0.0
    #: A retried task reads other rows.
    nondeterministic: bool = False
    #: A worker dies, and Spark starts its task again.
    crash: bool = False
    #: Orders of the controller come late at some processes.
    late_order_probability: float = 0.0
    late_order_s: float = 0.0
    edge_complete_delay_s: float = 0.0
    #: The same placement is published again under a higher epoch.
    epochs_per_s: float = 0.0
    #: Messages go through their encoding and back.
    encoded: bool = False


def draw(rng: random.Random) -> Faults:
    """Most runs have a few kinds of faults, some have all, a few have none."""
    kinds = rng.choice([0.0, 0.25, 0.5, 0.5, 0.8, 1.0])

    def sometimes(value: float, otherwise: float = 0.0) -> float:
        return value if rng.random() < kinds else otherwise

    nondeterministic = rng.random() < 0.12
    retries = rng.choice([1.0, 6.0])
    return Faults(
        calm_after_s=rng.choice([1.0, 4.0]),
        delay_s=rng.choice([0.0005, 0.002, 0.01]),
        spike_probability=sometimes(rng.choice([0.01, 0.1])),
        spike=rng.choice([10.0, 50.0]),
        breaks_per_s=sometimes(rng.choice([2.0, 10.0, 40.0])),
        loss_probability=sometimes(rng.choice([0.005, 0.05])),
        pauses_per_s=sometimes(rng.choice([1.0, 5.0])),
        pause_s=rng.choice([0.05, 1.0]),
        slowness=sometimes(rng.choice([5.0, 50.0]), 1.0),
        deaths_per_s=sometimes(retries, 1.0 if nondeterministic else 0.0),
        zombies_per_s=sometimes(retries, 1.0 if nondeterministic else 0.0),
        nondeterministic=nondeterministic,
        crash=rng.random() < 0.05,
        read_s=rng.choice([0.0, 0.01, 0.1]),
        repeats_probability=sometimes(0.5),
        late_order_probability=sometimes(0.3),
        late_order_s=rng.choice([0.1, 1.0]),
        edge_complete_delay_s=sometimes(rng.choice([0.05, 2.0])),
        epochs_per_s=sometimes(rng.choice([1.0, 5.0])),
        encoded=rng.random() < 0.3,
    )
