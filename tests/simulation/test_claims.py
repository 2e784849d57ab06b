"""The claims of the literature on which the project rests, one by one, each tried in the simulator.

"Article" is the encyclopedia article on fault tolerance and high availability in data stream systems, by its sections;
"ICDE 2003" is the paper that introduced Flux for load balance, and "SIGMOD 2004" the paper that made it fault-tolerant. Every
run here is also under all the laws of the checkers: no row lost, doubled or out of order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from controller.balance.load import Move
from controller.decide.board import Tell
from controller.replicas.additions import Phase, under_replicated
from flux.errors import QueryFailed
from flux.replica.replica import Replica
from flux.worker.core import WorkerCore
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt
from tests.simulation.faults import Faults
from tests.simulation.flows import chain
from tests.simulation.network import Link
from tests.simulation.run import Simulation
from tests.simulation.runs import LONG
from tests.simulation.stage_kinds import Double, Shatter, Watched
from tests.simulation.violation import Violation
from tests.simulation.worker_process import WorkerProcess

#: A time at which the rows of these runs flow; their sources end about 60 ms after the start, or when all is repaired.
UNDER_WAY_S = 0.03


def simulation(
    kinds: tuple[Any, ...] = (Watched,),
    copies: int = 2,
    slots: int = 3,
    seed: int = 0,
    faults: Faults | None = None,
    **flow: Any,
) -> Simulation:
    """Make a simulation without faults, unless they are given: most tests strike by hand."""
    return Simulation(seed, faults or Faults(), copies, slots, lambda ledger: chain(ledger, kinds, copies, **flow))


#: Sources wait with their end until a second is over and all is repaired.
PATIENT = Faults(patient=True, calm_after_s=1.0)


def at(sim: Simulation, seconds: float, do: Callable[..., Any], *given: Any) -> None:
    sim.world.after(seconds, do, *given)


def run_for(sim: Simulation, seconds: float) -> None:
    end = sim.world.now + seconds
    at(sim, seconds, lambda: None)
    sim.run_until(lambda: sim.world.now >= end)


def cores(sim: Simulation) -> Iterator[WorkerCore]:
    return (process.core for process in sim.workers if process.core is not None and not process.dead)


def replicas(sim: Simulation) -> dict[tuple[int, int], list[Replica]]:
    """Return the replicas of each partition, the primary first."""
    found: dict[tuple[int, int], list[Replica]] = {}
    for core in cores(sim):
        for key, replica in core.replicas.items():
            found.setdefault(key, []).insert(0 if replica.primary else 99, replica)
    return found


def replicas_listed(sim: Simulation, stage: int, partition: int) -> tuple[ReplicaAt, ...]:
    assert sim.controller.table is not None
    return sim.controller.table.stages[stage][partition]


def applied(sim: Simulation) -> Counter[tuple[int, int]]:
    return Counter({key: copies[0].applied for key, copies in replicas(sim).items()})


def begun(sim: Simulation) -> bool:
    return sim.controller.phase == "running" and all(applied(sim)[key] for key in replicas(sim)) and bool(replicas(sim))


def whole_again(sim: Simulation) -> bool:
    assert sim.controller.table is not None
    return sim.all_in and sim.settled and not under_replicated(sim.plan, sim.controller.table)


def data_links(sim: Simulation, worker: WorkerProcess) -> list[Link]:
    """Return all links to this worker and from it, but not those to the controller."""
    to_it = [process.links[worker.node] for process in sim.workers if worker.node in process.links]
    return [*worker.links.values(), *to_it]


# ---- two copies of one computation


def test_copies_that_take_the_same_steps_give_the_same_output() -> None:
    """Article, Historical Background: computations modelled as deterministic state machines that get the same input in the
    same order give the same output in the same order. The operators here number their output as it comes, and two
    streams interleave, so that any difference in order shows in it."""
    for seed in range(5 if LONG else 2):
        sim = simulation((Watched, Shatter), copies=3, seed=seed)
        sim.run_until(lambda sim=sim: sim.controller.phase == "ended")  # type: ignore[misc]
        run_for(sim, 1.0)
        compared = 0
        for first, *others in replicas(sim).values():
            for other in others:
                assert other.output.checksums.steps > 3
                assert other.output.checksums.newest == first.output.checksums.at(other.output.checksums.steps)
                compared += 1
        assert compared == 2 * len(replicas(sim))


def test_copies_that_choose_their_own_order_differ() -> None:
    """Article, Historical Background: copies agree on the order of their input. Without that, copies of one partition that
    is fed by several streams come to differ, and a consumer that goes over from one to the other sees it."""
    laws = Counter[str]()
    for seed in range(5):
        sim = simulation((Watched,), seed=seed, ordered=False)
        # No replica leads or follows then.
        sim.ledger.watch_roles = sim.ledger._known_everywhere = lambda *given: None  # type: ignore[method-assign]
        sim.moves.roles = lambda core: None  # type: ignore[method-assign]
        try:
            sim.run()
        except Violation as violation:
            laws[violation.law] += 1
    assert sum(laws.values()) >= 3
    assert set(laws) <= {"equal sequences are equal batches", "replicas take the same steps", "replicas agree"}


def test_a_slow_copy_does_not_hold_up_the_other() -> None:
    """Article, Active Replicas; SIGMOD 2004: replicated pipelines need not go in lock-step. With enough room in the logs
    each goes at its own pace: consumers use the output of the faster copy while the slower is far behind."""
    sim = simulation((Watched,), slots=2, batches=60, step_max_rows=1)
    slow = sim.workers[1]
    slow.slowness = 150.0
    behind = 0
    while sim.controller.phase != "finished" and sim.controller.phase != "ended":
        run_for(sim, 0.01)
        for core in cores(sim):
            for replica in core.replicas.values():
                if not replica.primary and core.worker == slow.node:
                    table = sim.controller.table
                    assert table is not None
                    leader = sim.by_node[table.stages[replica.stage.id][replica.partition][0].worker].core
                    assert leader is not None
                    primary = leader.replicas[replica.stage.id, replica.partition]
                    released = primary.order.committed
                    behind = max(behind, released - replica.applied)
    assert behind > 5, "output of steps was let go that the slow copy had not applied"
    sim.run()


def test_acks_to_all_copies_of_a_producer_empty_the_logs_that_nobody_reads() -> None:
    """Article, Active Replicas: a consumer reads one copy of its producer and acknowledges to all of them, so that each
    may cut its log."""
    sim = simulation((Watched, Watched), slots=2)
    sim.run()
    unread = 0
    for core in cores(sim):
        for producer in core.producers.values():
            assert producer.drained
            nobody_reads = all(cursor.nonce is None for cursor in producer._cursors.values())
            unread += nobody_reads and producer.log.base > 10
    assert unread


# ---- failures of nodes


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_crash_at_any_moment_loses_and_doubles_nothing(slot: int) -> None:
    """Article, Active Replicas; SIGMOD 2004: strict consistency in the face of crash failures, no output lost and none
    twice. One crash at each of many moments, from before the first batch until after the last; ``make test`` tries every third
    one, others for each slot."""
    for moment in range(16) if LONG else range(slot, 16, 3):
        sim = simulation((Watched, Double))
        at(sim, 0.006 + moment * 0.005, lambda sim=sim: sim.crash(sim.workers[slot]))  # type: ignore[misc]
        sim.run()
        assert sim.controller.error is None
        assert sim.counts["rows at sinks"] == 2 * 40 * 4 * 2


@pytest.mark.parametrize(("copies", "crashes"), [(2, 1), (3, 2)])
def test_k_copies_more_survive_k_failures_at_once(copies: int, crashes: int) -> None:
    """Article, Historical Background: k + 1 copies on independent nodes tolerate k simultaneous failures."""
    sim = simulation(copies=copies, slots=copies)
    run_for(sim, UNDER_WAY_S)
    for victim in sim.workers[:crashes]:
        sim.crash(victim, back=False)
    sim.run()
    assert sim.controller.error is None


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_more_failures_at_once_end_the_query_and_give_no_wrong_result(copies: int) -> None:
    """Try the claim from its other side: k + 1 failures at once are beyond it, and the query says so."""
    sim = simulation(copies=copies, slots=copies + 1)
    run_for(sim, UNDER_WAY_S)
    table = sim.controller.table
    assert table is not None
    for replica in table.stages[0][0]:
        sim.crash(sim.by_node[replica.worker])
    sim.run_until(lambda: sim.controller.phase == "ended")
    assert isinstance(sim.controller.error, QueryFailed)
    assert "the only safe replica of" in str(sim.controller.error)


def test_survivors_go_on_before_anything_is_repaired() -> None:
    """Article, Failure Recovery: the first part of recovery masks the failure by the remaining copy: consumers and
    producers turn to that copy. This part needs no repair: here none is possible, and the query comes to its right end."""
    sim = simulation((Watched, Watched), slots=2)
    run_for(sim, UNDER_WAY_S)
    before = applied(sim)
    sim.crash(sim.workers[0], back=False)
    sim.run()
    assert sim.controller.error is None
    assert sim.controller.repairs.take_overs > 0
    assert sim.controller.repairs.done == 0
    after = applied(sim)
    assert all(after[key] > before[key] for key in before), "every partition went on"


def test_a_consumer_may_go_over_to_another_copy_at_any_time() -> None:
    """Article, Failure Detection (first edition): as the copies of a producer are alike, a consumer may go over to another
    on suspicion, or only because that one is faster, without an agreement."""
    for seed in range(3):
        sim = simulation((Watched, Watched), seed=seed, batches=100, faults=Faults(calm_after_s=1.0, whims_per_s=500.0))
        sim.run()
        assert sim.counts["changes of source on a whim"] > 25


# ---- repair


def test_repair_restores_the_level_of_fault_tolerance() -> None:
    """Article, Failure Recovery: the second part of recovery regains the original number of copies. Workers die one after
    the other, each when the loss of the one before is repaired: more in all than there are copies."""
    sim = simulation((Watched,), faults=PATIENT)
    sim.run_until(lambda: begun(sim))
    for slot in (0, 1, 2, 0):
        sim.sources_may_end = False
        sim.crash(sim.workers[slot])
        sim.run_until(lambda: whole_again(sim))
        sim.sources_may_end = True
    sim.run()
    assert sim.controller.error is None


def test_only_what_was_lost_is_repaired() -> None:
    """Article, Failure Recovery; SIGMOD 2004: with coordination between partitions, repair rebuilds the lost pieces and
    leaves the others alone."""
    sim = simulation((Watched, Watched), slots=4, partitions=3, faults=PATIENT)
    sim.run_until(lambda: begun(sim))
    victim = sim.workers[1]
    assert victim.core is not None
    lost = set(victim.core.replicas)
    others = {id(r) for core in cores(sim) if core is not victim.core for r in core.replicas.values()}
    sim.crash(victim)
    sim.run_until(lambda: whole_again(sim))
    stages = {stage.name: stage.id for stage in sim.plan.stages}
    repaired = [(stages[e.stage], e.partition) for e in sim.controller.repairs.history if e.kind == "repair"]
    assert sorted(repaired) == sorted(lost)
    still = {id(r) for core in cores(sim) for r in core.replicas.values()}
    assert others <= still
    sim.run()


def test_pieces_are_repaired_one_at_a_time_from_input_to_output_while_all_go_on() -> None:
    """Article, Failure Recovery and Flux: the controller sweeps through the query in topological order and repairs one
    partition at a time; that takes longer in all, and meanwhile every partition, also the one that is being copied, goes
    on but for the moment of the copy."""
    sim = simulation((Watched, Watched), slots=4, partitions=3, batches=300, faults=PATIENT, repairs_at_once=1)
    sim.run_until(lambda: begun(sim))
    sim.crash(sim.workers[1], back=False)
    sim.run_until(lambda: bool(sim.controller.repairs.under_way))
    at_once, order, rows_end = 0, [], sim.world.now + 0.25
    progress: dict[int, Counter[tuple[int, int]]] = {0: Counter(), 1: Counter()}  # by the stage under repair

    def copied() -> list[PartitionKey]:
        return [key for key, addition in sim.controller.repairs.under_way.items() if addition.phase == Phase.COPY]

    while not whole_again(sim):
        now, before = copied(), applied(sim)
        at_once = max(at_once, len(now))
        sim.run_until(lambda now=now: copied() != now or whole_again(sim))  # type: ignore[misc]
        if now:
            order.extend(now)
            progress[now[0].stage] += applied(sim) - before
    assert at_once == 1
    assert sim.world.now < rows_end, "a repair does not wait for a lull"
    assert {stage for stage, _ in order} == {0, 1}
    assert [stage for stage, _ in order] == sorted(stage for stage, _ in order)
    assert all(gone[key] for gone in progress.values() for key in replicas(sim)), "while others are copied all go on"
    sim.run()


def test_a_new_node_is_used() -> None:
    """Article, Flux; ICDE 2003: a query uses the resources of nodes as they enter. A worker that comes when copies are
    missing gets them."""
    sim = simulation((Watched,), slots=2, faults=PATIENT)
    sim.run_until(lambda: begun(sim))
    sim.crash(sim.workers[0])
    sim.run_until(lambda: whole_again(sim))
    newcomer = sim.workers[0].core
    assert newcomer is not None
    assert len(newcomer.replicas) == 4
    sim.run()


# ---- balance


def course(sim: Simulation, stage: int, partition: int, until: Callable[[], bool]) -> list[dict[int, bool]]:
    """Follow the listed copies of a partition: the workers in their order, and whether each copy is live; one item for each
    change."""

    def listed() -> dict[int, bool]:
        return {replica.worker: replica.live for replica in replicas_listed(sim, stage, partition)}

    seen = [listed()]
    while not until():
        sim.run_until(lambda: until() or list(listed().items()) != list(seen[-1].items()))
        seen.append(listed())
    return seen


def test_a_move_is_an_artificial_failure_and_a_repair_elsewhere() -> None:
    """Article, Flux: load is balanced by artificially failing overloaded partitions and repairing them on other nodes. Here
    the order is the one that costs no copy: the new copy is added in the steps of a repair and by the same orders, and then
    the source is dropped as if it had failed, so that the survivors take over."""
    sim = simulation((Watched,), slots=4, batches=600, faults=PATIENT)
    sim.run_until(lambda: begun(sim))
    orders = Counter[str]()
    perform = sim.server.perform

    def watched(effects: list[Tell]) -> None:
        orders.update(type(effect.command).__name__ for effect in effects)
        perform(effects)

    sim.server.perform = watched  # type: ignore[method-assign]
    source, other = (r.worker for r in replicas_listed(sim, 0, 0))
    target, spare = (worker for worker in sim.controller.members.workers if worker not in (source, other))
    before = applied(sim)[0, 0]
    sim.server.perform(sim.controller.move([Move(0, 0, source, target)], "too much load", sim.world.now))
    moved = course(sim, 0, 0, lambda: sim.controller.moving.done == 1)
    assert moved == [
        {source: True, other: True, target: False},
        {source: True, other: True, target: True},
        {target: True, other: True},
    ]
    assert list(moved[-1]) == [target, other], "who takes the place of the primary leads"
    assert sim.controller.table is not None
    dropped_at = sim.controller.table.epoch
    by_move = set(orders) - {"HeartbeatSeen"}
    assert applied(sim)[0, 0] > before, "rows went on"
    sim.run_until(lambda: sim.settled)
    leader = sim.by_node[target].core
    assert leader is not None
    assert leader.replicas[0, 0].leads_since == dropped_at, "as a survivor of a failure does"

    orders.clear()
    sim.crash(sim.by_node[other], back=False)
    sim.run_until(lambda: other not in sim.controller.members.workers)
    repaired = course(sim, 0, 0, lambda: whole_again(sim))
    newcomer = list(repaired[-1])[-1]
    assert newcomer in (source, spare)
    steps = [each[newcomer] for each in repaired if newcomer in each]
    assert steps[:2] == [each[target] for each in moved][:2] == [False, True], "first listed, then live"
    assert set(orders) - {"HeartbeatSeen"} == by_move == {"TableChanged", "CopyState"}
    sim.run()
    assert sim.controller.error is None


# ---- failures that are none, and networks that fail


def test_a_slow_node_is_taken_for_dead_and_does_no_harm() -> None:
    """Article, Failure Detection: a slow node cannot be told from a dead one. A long delay therefore counts as a failure;
    if both then acted as primary, output would be doubled. Here the suspected worker is removed by agreement, its epoch
    fences it, and another comes in its place."""
    sim = simulation((Watched, Watched), faults=PATIENT)
    sim.run_until(lambda: begun(sim))
    suspect = sim.workers[0]
    suspect.pause(0.6)
    sim.run_until(lambda: suspect.node not in sim.controller.members.workers)
    assert not suspect.dead, "it was given up alive"
    sim.run_until(lambda: suspect.dead)
    assert sim.world.now >= suspect.paused_until
    sim.run()
    assert sim.counts["workers that were fenced"] == 1
    assert sim.counts["workers that came in place of one that was given up"] == 1
    assert sim.controller.error is None


def test_silence_is_noticed_within_the_time_out() -> None:
    """Article, Failure Detection: a node that does not answer keep-alive messages within a time-out is suspected."""
    sim = simulation(faults=PATIENT)
    sim.run_until(lambda: begun(sim))
    settings = sim.plan.settings
    victim, died = sim.workers[0], sim.world.now
    sim.crash(victim, seen=False)
    sim.run_until(lambda: victim.node not in sim.controller.members.workers)
    assert sim.world.now - died >= settings.heartbeat_timeout - settings.heartbeat_interval - 0.1
    assert sim.world.now - died <= settings.heartbeat_timeout + 0.1
    sim.run()


def test_membership_is_agreed_in_one_place() -> None:
    """Article, Failure Detection: nodes must not act alone on a suspicion; a group membership service, in Flux the
    controller, decides on the members. Workers whose links to each other are all cut suspect no node: the table stays."""
    sim = simulation((Watched,), faults=PATIENT)
    sim.run_until(lambda: begun(sim))
    assert sim.controller.table is not None
    epoch = sim.controller.table.epoch
    for link in data_links(sim, sim.workers[0]):
        link.cut_up(1.0)
        link.cut_down(1.0)
    run_for(sim, 0.9)
    assert sim.controller.table.epoch == epoch
    sim.run()


def test_what_is_cut_off_stalls_and_does_not_guess() -> None:
    """Article, Network Partitions: Flux prefers consistency. A primary without a link to its secondaries goes on applying,
    but lets no output out until they are back."""
    sim = simulation((Watched,), slots=2, batches=200, faults=PATIENT)
    sim.run_until(lambda: begun(sim))
    for link in data_links(sim, sim.workers[0]):
        link.cut_up(0.5)
        link.cut_down(0.5)
    run_for(sim, 0.05)
    before = {id(r): (r.applied, r.order.committed) for core in cores(sim) for r in core.replicas.values()}
    run_for(sim, 0.4)
    leading = [r for core in cores(sim) for r in core.replicas.values() if r.primary]
    assert any(r.applied > before[id(r)][0] for r in leading)
    assert all(r.order.committed == before[id(r)][1] for r in leading)
    sim.run()


# ---- the exchange


def test_a_slow_consumer_holds_back_only_its_own_rows() -> None:
    """ICDE 2003, short-term imbalance: a plain exchange waits for its slowest consumer, while Flux keeps the rows for
    that consumer in a buffer and goes on with the others."""
    sim = simulation((Watched,), copies=1, slots=2, partitions=2, batches=100)
    sim.run_until(lambda: begun(sim))
    slow = sim.workers[1]
    slow.pause(0.2)
    run_for(sim, 0.15)
    ahead = 0
    for core in cores(sim):
        for producer in core.producers.values():
            acked = [int(cursor.acked.min()) for cursor in producer._cursors.values()]
            if core.worker != slow.node and len(acked) == 2:
                ahead = max(ahead, max(acked) - min(acked))
    assert ahead > 20
    sim.run()


def test_a_full_buffer_slows_the_source_down_and_drops_nothing() -> None:
    """ICDE 2003, short-term imbalance: the buffer is bounded; beyond it the producer waits."""
    sim = simulation((Watched,), copies=1, slots=2, batches=200, log_max_bytes=2000)
    sim.run_until(lambda: begun(sim))
    sim.workers[1].pause(0.2)
    sim.run()
    assert sim.counts["turns with a full log"] > 10
    assert sim.counts["rows at sinks"] == 2 * 200 * 4


def test_what_comes_twice_is_counted_once() -> None:
    """SIGMOD 2004, take-over: producers repeat unacknowledged batches, and consumers drop known ones by their sequence
    numbers."""
    careless = Faults(calm_after_s=1.0, breaks_per_s=200.0, repeats_probability=1.0)
    sim = simulation((Watched, Watched), seed=0, batches=300, faults=careless)
    sim.run()
    assert sim.counts["duplicates refused"] > 500


def test_operators_know_nothing_of_it() -> None:
    """Article, Active Replicas: Flux is put between operators without their knowledge. The operators of these runs have
    process, snapshot and restore, and see rows only; an operator gives the same output with one copy and no faults as with
    three copies and a crash."""
    plain = simulation((Double,), copies=1, slots=1)
    plain.run()
    replicated = simulation((Double,), copies=3)
    at(replicated, UNDER_WAY_S, lambda: replicated.crash(replicated.workers[0]))
    replicated.run()
    sink = plain.dataflow.sinks[0].name
    rows = [Counter(row for s in sim.end.states(sink) for row in s["rows"]) for sim in (plain, replicated)]
    assert rows[0] == rows[1]
