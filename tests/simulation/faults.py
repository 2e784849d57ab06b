"""Faults of a run: an explicit list, each kind drawn per seed. No fault may change a result.

Two faults may end a run with an error, and only with the right error: input that reads otherwise when it is read again, and
the loss of the last safe copy of a partition, which is drawn on purpose now and then (``reckless``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Faults:
    """Faults of one run. Rates are events per second of virtual time over the whole cluster, probabilities are per occasion."""

    #: Virtual seconds from the start after which all faults stop: from then on a run must come to its end.
    calm_after_s: float = 0.0
    #: Delay of a message: exponential with this mean, times ``spike`` now and then.
    delay_s: float = 0.002
    spike_probability: float = 0.0
    spike: float = 1.0
    #: A connection breaks: all messages under way on it are lost, but not the messages that its sender had not yet written.
    breaks_per_s: float = 0.0
    #: A connection to the controller breaks in this way.
    control_breaks_per_s: float = 0.0
    #: One message is lost and the connection stays.
    loss_probability: float = 0.0
    #: Nothing gets through in one direction for a while, on one connection of any kind.
    cuts_per_s: float = 0.0
    #: Nothing gets through on a connection of a worker to the controller, in one direction or in both: the worker is given up,
    #: and goes on without knowing.
    control_cuts_per_s: float = 0.0
    cut_s: float = 0.0
    #: A consumer goes over to another replica of a producer without any need.
    whims_per_s: float = 0.0
    #: A process stands still, and goes on.
    pauses_per_s: float = 0.0
    pause_s: float = 0.0
    #: The factor by which one worker is slower in everything.
    slowness: float = 1.0
    #: An ingress task dies, and is started again.
    deaths_per_s: float = 0.0
    #: Another attempt is started while the first is alive (speculation), and the first does not know.
    zombies_per_s: float = 0.0
    #: The time that an ingress task needs to read a batch.
    read_s: float = 0.0
    #: A producer repeats batches that no consumer asked for, as a careless producer might.
    repeats_probability: float = 0.0
    #: A retried task reads other rows.
    nondeterministic: bool = False
    #: A worker dies, and Spark starts its task again.
    crashes_per_s: float = 0.0
    #: All workers die at once, and neither the vault nor the controller does.
    all_workers_per_s: float = 0.0
    #: The next crash follows at once, so that it falls into the take-over or the repair.
    second_crash_probability: float = 0.0
    #: The connection of a dead worker is not seen to close: only the silence of that worker tells.
    silent_crash_probability: float = 0.0
    #: For a moment before its death, only some of the others hear a worker.
    uneven_crash_probability: float = 0.0
    #: A dead worker does not come back.
    never_back_probability: float = 0.0
    #: Crashes spare the last safe copy of a partition, unless the run is reckless.
    reckless: bool = False
    #: A worker dies as soon as the first partition has finished.
    crash_at_the_end: bool = False
    #: A worker dies as soon as it has any rows, before the first acks.
    crash_at_the_start: bool = False
    #: A worker dies as soon as a source has given its last batch.
    crash_at_the_last_batch: bool = False
    #: The input goes on until everything is repaired, so that repairs have something to repair.
    patient: bool = False
    #: Only one partition of a patient source goes on; the others end before.
    patient_alone: bool = False
    #: Orders of the controller come late at some processes, and some come twice.
    late_order_probability: float = 0.0
    late_order_s: float = 0.0
    twice_probability: float = 0.0
    edge_complete_delay_s: float = 0.0
    #: A change of the table is lost alone, comes twice, or comes after later changes.
    spoilt_table_probability: float = 0.0
    #: A placement is published again under a higher epoch, unchanged.
    epochs_per_s: float = 0.0
    #: Messages go through their encoding and back.
    encoded: bool = False
    #: A step takes up to ``slow_step_s``, and the worker is deaf meanwhile.
    slow_step_probability: float = 0.0
    slow_step_s: float = 0.0
    #: The controller stands still, and goes on.
    controller_pauses_per_s: float = 0.0
    controller_pause_s: float = 0.0
    #: The lifeline of a worker closes, and the worker is well.
    closings_per_s: float = 0.0
    #: The wall clock of a process is set.
    clock_steps_per_s: float = 0.0
    clock_step_s: float = 0.0
    #: A message on the data plane comes as bytes that are no message; to and from the controller such bytes come besides.
    garbled_probability: float = 0.0
    garbage_per_s: float = 0.0
    #: A replica gives other output than its primary, once.
    divergences_per_s: float = 0.0
    #: Workers send pulses, and some steps take much longer than a silence may last, but none may take longer than
    #: ``step_timeout_s`` (0: the default).
    pulses: bool = False
    busy_step_probability: float = 0.0
    busy_step_s: float = 0.0
    step_timeout_s: float = 0.0
    #: A second attempt of a worker's task starts while the first lives, and Spark says when tasks are over.
    rivals_per_s: float = 0.0
    #: A worker dies when it is asked for its output, or the task that asks fails and begins again.
    fetch_crash_probability: float = 0.0
    fetch_fails_probability: float = 0.0
    #: A secondary takes no more steps for a while, and its worker is well.
    stands_per_s: float = 0.0
    stand_s: float = 0.0
    #: A person asks for another number of replicas of a stage, or for other kinds.
    protects_per_s: float = 0.0
    #: Nothing gets through between two workers, in one direction or in both, on any connection; both are heard by the controller.
    pair_cuts_per_s: float = 0.0
    pair_cut_s: float = 0.0
    #: Cuts between two workers come one link at a time, in one direction, each for the whole of ``pair_cut_s``.
    pair_cuts_alone: bool = False
    #: Cuts between two workers are in both directions, because TCP sends no more than a window without acks of its own.
    pair_cuts_both: bool = False


def draw(rng: random.Random, replicated: bool) -> Faults:
    """Draw the faults of a run: most runs have a few kinds, some have all, a few have none. ``replicated``: workers may crash."""
    kinds = rng.choice([0.0, 0.25, 0.5, 0.5, 0.8, 1.0])

    def sometimes(value: float, otherwise: float = 0.0) -> float:
        return value if rng.random() < kinds else otherwise

    nondeterministic = not replicated and rng.random() < 0.4
    retries = rng.choice([1.0, 6.0])
    return Faults(
        calm_after_s=rng.choice([0.3, 0.8, 1.6]),
        delay_s=rng.choice([0.0005, 0.002, 0.01]),
        spike_probability=sometimes(rng.choice([0.01, 0.1])),
        spike=rng.choice([10.0, 50.0]),
        breaks_per_s=sometimes(rng.choice([2.0, 10.0, 40.0])),
        control_breaks_per_s=sometimes(rng.choice([1.0, 5.0])),
        loss_probability=sometimes(rng.choice([0.005, 0.05])),
        cuts_per_s=sometimes(rng.choice([1.0, 6.0])),
        control_cuts_per_s=sometimes(2.0),
        cut_s=rng.choice([0.05, 0.6]),
        whims_per_s=sometimes(rng.choice([2.0, 20.0])),
        pauses_per_s=sometimes(rng.choice([1.0, 5.0])),
        pause_s=rng.choice([0.05, 0.8]),
        slowness=sometimes(rng.choice([5.0, 50.0]), 1.0),
        deaths_per_s=sometimes(retries, 3.0 if nondeterministic else 0.0),
        zombies_per_s=sometimes(retries, 1.0 if nondeterministic else 0.0),
        nondeterministic=nondeterministic,
        crashes_per_s=sometimes(rng.choice([1.0, 3.0, 8.0]), 1.0) if replicated else 0.0,
        second_crash_probability=sometimes(0.5),
        silent_crash_probability=sometimes(0.4),
        uneven_crash_probability=sometimes(0.7),
        never_back_probability=sometimes(0.15),
        reckless=rng.random() < 0.06,
        crash_at_the_end=replicated and rng.random() < 0.1,
        crash_at_the_start=replicated and rng.random() < 0.1,
        crash_at_the_last_batch=replicated and rng.random() < 0.1,
        patient=replicated and rng.random() < 0.5,
        patient_alone=rng.random() < 0.3,
        read_s=rng.choice([0.0, 0.01, 0.1]),
        repeats_probability=sometimes(0.5),
        late_order_probability=sometimes(0.3),
        late_order_s=rng.choice([0.1, 0.5]),
        twice_probability=sometimes(0.1),
        edge_complete_delay_s=sometimes(rng.choice([0.05, 0.5])),
        epochs_per_s=sometimes(rng.choice([1.0, 5.0])),
        encoded=rng.random() < 0.15,
    )


def more(rng: random.Random, faults: Faults, replicated: bool) -> Faults:
    """Add later kinds of faults to half of the runs, by draws of their own, so that the other runs stay as they were."""
    if rng.random() < 0.5:
        return faults
    kinds = rng.choice([0.3, 0.6, 1.0])

    def sometimes(value: float) -> float:
        return value if rng.random() < kinds else 0.0

    garbled = sometimes(rng.choice([0.002, 0.02]))
    return replace(
        faults,
        slow_step_probability=sometimes(rng.choice([0.01, 0.1])),
        slow_step_s=rng.choice([0.01, 0.2]),
        controller_pauses_per_s=sometimes(rng.choice([0.5, 3.0])),
        controller_pause_s=rng.choice([0.1, 1.0]),
        closings_per_s=sometimes(rng.choice([0.5, 2.0])) if replicated else 0.0,
        clock_steps_per_s=sometimes(2.0),
        clock_step_s=rng.choice([0.1, 8.0]),
        garbled_probability=garbled,
        garbage_per_s=sometimes(10.0),
        encoded=faults.encoded or garbled > 0,
    )


def latest(rng: random.Random, faults: Faults, replicated: bool) -> Faults:
    """Add still later kinds of faults to a quarter of the runs, by draws of their own as well."""
    if rng.random() < 0.75:
        return faults
    kinds = rng.choice([0.4, 0.4, 1.0])
    pulses = rng.random() < kinds
    return replace(
        faults,
        divergences_per_s=rng.choice([1.0, 5.0, 20.0]) if replicated and rng.random() < kinds else 0.0,
        pulses=pulses,
        busy_step_probability=rng.choice([0.02, 0.1]) if pulses else 0.0,
        busy_step_s=rng.choice([0.5, 2.0]),
        step_timeout_s=rng.choice([0.6, 1.0]) if pulses else 0.0,
        fetch_crash_probability=0.2,
        fetch_fails_probability=0.2,
        rivals_per_s=rng.choice([1.0, 5.0]) if rng.random() < kinds else 0.0,
    )


def with_protects(rng: random.Random, faults: Faults) -> Faults:
    """Add changes of protection to a third of the runs; the others stay as they were."""
    return replace(faults, protects_per_s=rng.choice([0.0, 0.0, rng.choice([1.0, 4.0, 15.0])]))


def with_spoilt_tables(rng: random.Random, faults: Faults) -> Faults:
    """Add spoilt changes of the table to a fifth of the runs; the others stay as they were."""
    return replace(faults, spoilt_table_probability=rng.choice([0.0, 0.0, 0.0, 0.0, rng.choice([0.05, 0.3])]))


def with_pair_cuts(rng: random.Random, faults: Faults) -> Faults:
    """Add cut links between workers to three quarters of the runs; the others stay as they were."""
    return replace(faults, pair_cuts_per_s=rng.choice([0.0, 0.5, 2.0, 6.0]), pair_cut_s=rng.choice([0.5, 3.0, 10.0]))
