"""Each checker can fail: a run that has gone well is tampered with, and the law that is broken then is named.

Laws that can only break while a run goes on are left to the broken variants; the last test checks that no law is left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from controller.course.query_phases import QueryPhase
from controller.replicas.addition_limits import READY_MAX_S
from controller.replicas.additions import Phase
from controller.report.events import Event
from flux.dataflow.sink import TentativeUndo
from flux.errors import QueryFailed
from flux.operators.operator import Context
from flux.wire.messages import Install
from partitioning.table import ReplicaAt, Table
from tests.simulation import test_kills, test_leaving
from tests.simulation.checkers import VALIDATED_EVERY
from tests.simulation.faults import Faults
from tests.simulation.flows import chain
from tests.simulation.hearts import Heart
from tests.simulation.outside import Delivery, Outside
from tests.simulation.run import Simulation
from tests.simulation.stage_kinds import Delay, Watched, make_batch
from tests.simulation.variants import VARIANTS
from tests.simulation.violation import Violation

Tamper = Callable[[Simulation], Any]


def gone_well(**flow: Any) -> Simulation:
    sim = Simulation(0, Faults(), 2, 3, lambda ledger: chain(ledger, [Watched], 2, **flow))
    sim.run()
    return sim


def some_core(sim: Simulation) -> Any:
    return next(process.core for process in sim.workers if process.core is not None)


def sink_rows(sim: Simulation) -> list[Any]:
    """Return the rows in one replica of a partition of the sink."""
    copies = (core.replicas.get((1, 0)) for core in (process.core for process in sim.workers) if core is not None)
    return next(replica for replica in copies if replica is not None).operator.state["rows"]  # type: ignore[attr-defined]


def with_replicas(sim: Simulation, change: Callable[[tuple[ReplicaAt, ...]], tuple[ReplicaAt, ...]]) -> None:
    """Give the controller another table, in which partition 0 of stage 0 has other replicas."""
    table = sim.controller.table
    assert table is not None
    first, *others = table.stages[0]
    stages = ((change(first), *others), *table.stages[1:])
    sim.controller.board.table = Table(table.epoch + 1, stages, table.sources, table.endpoints)


# ---- the ways of tampering


def a_row_is_missing_in_every_copy(sim: Simulation) -> None:
    sink = sim.dataflow.sinks[0].name
    rows = sim.end.states(sink)[0]["rows"][:-1]
    for process in sim.workers:
        if process.core is not None and (1, 0) in process.core.replicas:
            process.core.replicas[1, 0].operator.state["rows"] = list(rows)  # type: ignore[attr-defined]
    sim.end.check_rows()


def a_row_is_there_twice_in_one_copy(sim: Simulation) -> None:
    rows = sink_rows(sim)
    rows.append(rows[0])
    sim.end.check_rows()


def a_row_is_there_twice_when_the_last_copy_is_lost(sim: Simulation) -> None:
    for process in sim.workers:
        if process.core is not None and (1, 0) in process.core.replicas:
            rows = process.core.replicas[1, 0].operator.state["rows"]  # type: ignore[attr-defined]
            rows.append(rows[0])
    sim.controller.board.error = QueryFailed("worker 1 was lost, and with it the only safe replica of sink/0")
    sim.end.check()


def a_stream_goes_back(sim: Simulation) -> None:
    operator = some_core(sim).replicas[0, 0].operator
    list(operator.process(make_batch([(1, 1, "w")], hop=0, tick=0)))


def a_key_comes_to_another_partition(sim: Simulation) -> None:
    rows = sink_rows(sim)
    name = sim.plan.stages[1].name
    context = SimpleNamespace(partition=1)
    sim.ledger.one_home(name, context, make_batch(rows[:1], 0, 0))  # type: ignore[arg-type]


def a_second_primary_in_the_same_epoch(sim: Simulation) -> None:
    one, other = [process.core for process in sim.workers if process.core is not None and process.core.replicas][:2]
    for core in (one, other):
        core.replicas[0, 0] = SimpleNamespace(  # type: ignore[assignment]
            primary=True,
            leads=True,
            leads_since=7,
            incarnation=0,
            applied=0,
            order=SimpleNamespace(end=0),
            where="stage 0",
        )
        sim.ledger.watch_roles(core)


def a_tentative_row_reaches_a_sink_that_shows_none(sim: Simulation) -> None:
    Delivery(Outside(sim), sim, sim.workers[0]).tell(0, 0, TentativeUndo(None, None))


def something_stays_in_a_log(sim: Simulation) -> None:
    some_core(sim).log_meter.add(1)
    sim.end.check_drained()


def a_step_stays_in_an_order_log(sim: Simulation) -> None:
    order = some_core(sim).replicas[0, 0].order
    order._entries.append(None)
    sim.end.check_drained()


def an_order_log_counts_what_it_does_not_have(sim: Simulation) -> None:
    core = some_core(sim)
    next(iter(core.replicas.values())).order.committed += 1
    for _ in range(VALIDATED_EVERY):
        sim.ledger.check_machines(core)


def a_log_miscounts(sim: Simulation) -> None:
    producer = some_core(sim).replicas[0, 0].outlets[0].producer
    producer.log._entries.append(SimpleNamespace(nbytes=5))
    sim.ledger.check_log(producer.log, producer.stream, "here")


def two_partitions_stand_still(sim: Simulation) -> None:
    sim.ledger.tables.stall(0, 0, 10.0, 1.0)
    sim.ledger.tables.stall(0, 1, 10.5, 1.0)


def under_way(sim: Simulation, *keys: tuple[int, int], **more: Any) -> None:
    """Make the controller believe that replicas are being added to these partitions."""
    about = {"phase": Phase.LIVE, "from_worker": None, "since": 0.0, **more}
    begun = {key: SimpleNamespace(stage=key[0], partition=key[1], **about) for key in keys}
    sim.controller.repairs.under_way = begun  # type: ignore[assignment]
    sim.ledger.tables.check_turns(sim.world.now)
    sim.ledger.tables.check()


def additions_in_two_stages(sim: Simulation) -> None:
    under_way(sim, (0, 0), (1, 0))


def copies_beyond_the_setting(sim: Simulation) -> None:
    under_way(sim, (0, 0), (0, 1), phase=Phase.COPY)


def moves_beyond_the_setting(sim: Simulation) -> None:
    sim.controller.board.phase = QueryPhase.RUNNING
    under_way(sim, (0, 0), (0, 1), from_worker=0)


def a_replica_waits_for_ever_for_its_turn(sim: Simulation) -> None:
    sim.controller.board.phase = QueryPhase.RUNNING
    under_way(sim, (0, 0), phase=Phase.READY, since=sim.world.now - READY_MAX_S - 0.1)


def a_worker_has_two_replicas_of_a_partition(sim: Simulation) -> None:
    with_replicas(sim, lambda replicas: (replicas[0], replicas[0]))
    sim.ledger.tables.check()


def a_primary_is_not_safe(sim: Simulation) -> None:
    with_replicas(sim, lambda replicas: (msgspec.structs.replace(replicas[0], live=False), *replicas[1:]))
    sim.controller.repairs.safety.is_safe = lambda stage, partition, replica: replica.live  # type: ignore[method-assign]
    sim.ledger.tables.check()


def a_replica_too_many(sim: Simulation) -> None:
    table = sim.controller.table
    assert table is not None
    with_replicas(sim, lambda _: tuple(ReplicaAt(worker, 0) for worker in sorted(table.endpoints)))
    sim.ledger.tables.check()


def a_replica_too_few(sim: Simulation) -> None:
    with_replicas(sim, lambda replicas: replicas[:1])
    sim.end.check_replicated()


def a_change_of_protection_is_gone_without_a_word(sim: Simulation) -> None:
    sim.controller.board.phase = QueryPhase.RUNNING
    sim.protects.look([Event("protect", 0.0, sim.plan.stages[0].name, -1, -1, "", request=7)])


def a_change_is_said_to_be_done_and_a_replica_is_missing(sim: Simulation) -> None:
    with_replicas(sim, lambda replicas: replicas[:1])
    name = sim.plan.stages[0].name
    sim.protects.look([Event(kind, 0.0, name, -1, -1, "", request=7) for kind in ("protect", "protected")])


def a_query_fails(sim: Simulation) -> None:
    sim.controller.board.error = QueryFailed("for no reason")
    sim.end.check()


def it_waits_for_ever(sim: Simulation) -> None:
    for process in sim.workers:
        process.wake()
    sim.run_until(lambda: False)


def a_copy_begins_again_and_again(sim: Simulation) -> None:
    def brings_its_first_parts() -> None:
        sim.copied(Install(0, 0, 7, 1, sim.world.events % 3, 100))
        sim.world.after(0.1, brings_its_first_parts)

    brings_its_first_parts()
    sim.run_until(lambda: False)


def it_acks_more_than_it_applied(sim: Simulation) -> None:
    core = some_core(sim)
    stream, inbound = next(
        item for item in core.subscriptions.streams.items() if sim.plan.edges[item[0].edge].consumer == 0
    )
    ack = inbound.ack(core.epoch, core.subscriptions.hosted_by(stream))
    sim.ledger._touching[stream, next(iter(core.subscriptions.hosted_by(stream)))].append(ack.through + 1)
    core.subscriptions.answer(None, msgspec.structs.replace(ack, through=ack.through + 1))


def two_workers_lead_by_the_same_table(sim: Simulation) -> None:
    cores = [core for core in sim.hosts() if (0, 0) in core.replicas]
    for core in cores:
        core.replicas[0, 0].primary = True
    sim.moves.roles(cores[0])


def some_primary(sim: Simulation) -> tuple[Any, Any]:
    """Return a primary of the sink, with its worker."""
    return next((c, r) for c in sim.hosts() for (stage, _), r in c.replicas.items() if stage == 1 and r.primary)


def a_worker_overlooks_what_is_ready(sim: Simulation) -> None:
    core, replica = some_primary(sim)
    replica.finished = False
    sim.ledger.check_idle(core, sim.world.now)


def a_worker_sleeps_for_too_long(sim: Simulation) -> None:
    core, replica = some_primary(sim)
    replica.finished, replica.waits.expected = False, {}
    replica.context.set_timer(sim.world.now + 1)
    core.due = lambda: sim.world.now + 2
    sim.ledger.check_idle(core, sim.world.now)


def the_time_of_a_partition_goes_back(sim: Simulation) -> None:
    _, replica = some_primary(sim)
    replica.finished, replica.context.now, replica.waits.latest = False, 2.0, 0.0
    replica.apply(replica.next_step(1.0))


def a_timer_fires_too_early(sim: Simulation) -> None:
    operator = type("Delayed", (Delay,), {"ledger": sim.ledger, "stage_name": "delayed", "transient": ("ledger",)})()
    operator.open(Context("delayed"))
    list(operator.process(make_batch([(1, 1, "w")], hop=0, tick=0)) or ())
    list(operator.on_timer("pass on"))


def a_divergence_of_nobody(sim: Simulation) -> None:
    sim.divergences.look([Event("divergence", 0.0, sim.plan.stages[0].name, 0, 0, "")])


def a_stopped_worker_stays(sim: Simulation) -> None:
    sim.controller.board.phase = "running"
    sim.faults = dataclasses.replace(sim.faults, reckless=True)
    worker = next(worker for worker in sim.workers if worker.node in sim.controller.members.workers)
    worker.stopped_since, worker.stopped_until = 0.0, 1e9
    sim.hearts._check_overdue(Heart(worker, said_at=0.0), sim.world.now)


def two_workers_in_one_slot(sim: Simulation) -> None:
    one, other, *_ = sim.controller.members.workers.values()
    other.about = one.about
    sim.rivals.look([])


SHOWN: dict[Tamper, str] = {
    two_workers_lead_by_the_same_table: "no worker owns a partition twice",
    a_row_is_missing_in_every_copy: "every row counted once at the sink",
    a_row_is_there_twice_in_one_copy: "replicas agree",
    a_row_is_there_twice_when_the_last_copy_is_lost: "no row twice or made up, also where a query is lost",
    a_stream_goes_back: "order within a stream",
    a_key_comes_to_another_partition: "one partition per key",
    a_second_primary_in_the_same_epoch: "one primary per partition and epoch",
    a_tentative_row_reaches_a_sink_that_shows_none: "tentative results are for sinks that show them",
    something_stays_in_a_log: "logs and queues drain",
    a_step_stays_in_an_order_log: "logs and queues drain",
    a_log_miscounts: "the log counts its bytes",
    an_order_log_counts_what_it_does_not_have: "state machines keep their invariants",
    two_partitions_stand_still: "partitions stalled at a time are limited",
    additions_in_two_stages: "the sweep goes stage by stage",
    copies_beyond_the_setting: "copies at a time are limited",
    moves_beyond_the_setting: "moves at a time are limited",
    a_replica_waits_for_ever_for_its_turn: "no rows are kept long for a turn",
    a_worker_has_two_replicas_of_a_partition: "replicas are on different workers of the table",
    a_primary_is_not_safe: "a primary is safe",
    a_replica_too_many: "no more replicas than asked for",
    a_replica_too_few: "everything is repaired",
    a_change_of_protection_is_gone_without_a_word: "every change of protection ends",
    a_change_is_said_to_be_done_and_a_replica_is_missing: "every wish comes true",
    a_query_fails: "no run fails",
    it_waits_for_ever: "every run comes to its end",
    a_copy_begins_again_and_again: "every run comes to its end",
    it_acks_more_than_it_applied: "an ack never exceeds what was applied",
    a_worker_overlooks_what_is_ready: "a ready replica takes its step",
    a_worker_sleeps_for_too_long: "a worker wakes up for its timers",
    the_time_of_a_partition_goes_back: "time never goes back",
    a_timer_fires_too_early: "a timer fires at its time",
    a_divergence_of_nobody: "only a diverging replica is named",
    a_stopped_worker_stays: "a stopped worker is given up",
    two_workers_in_one_slot: "one worker per slot",
}


@pytest.mark.parametrize("tamper", SHOWN, ids=lambda tamper: tamper.__name__)
def test_what_is_wrong_is_named(tamper: Tamper) -> None:
    sim = gone_well(repairs_at_once=1)
    with pytest.raises(Violation) as caught:
        tamper(sim)
    assert caught.value.law == SHOWN[tamper]


def test_no_law_is_without_a_proof_that_it_can_be_broken() -> None:
    """Compare all laws with those broken here, or by a broken variant that breaks this law and no other."""
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py") if "test_" not in path.name)
    laws = set(re.findall(r'Violation\(\s*"([^"]+)"', source))
    proved = {*SHOWN.values(), *test_kills.SHOWN.values(), test_kills.ON_ONE_HOST, *test_leaving.LAWS} | {
        law for variant in VARIANTS if len(variant.laws) == 1 for law in variant.laws
    }
    assert len(laws) > 15
    assert laws - proved == {
        # shown by variants that may break others too
        "equal sequences are equal batches",
        "replicas take the same steps",
    }
