"""Rules that random schedules hardly ever need, each with the one story that needs it and goes wrong without it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pyarrow as pa
import pytest

import flux
from flux.errors import RefusedError
from flux.exchange.bounds import WatermarkPace
from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound, Packet, RowSlice
from flux.exchange.log import Rows
from flux.exchange.producer import Producer
from flux.replica.output import EdgeOutput
from flux.replica.replica import Replica
from flux.wire.messages import Ack, Bound, Data, Hello, Mark, Resume
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table
from tests.flux.scripted import OTHER as SECONDARY
from tests.flux.scripted import SCHEMA, feed, made, told, work
from tests.flux.test_transfers import KEY, ORDER, Two
from tests.simulation import broken_batches as batches
from tests.simulation import broken_event_time as of_times
from tests.simulation import broken_lives as lives
from tests.simulation import broken_rules as rules
from tests.simulation.checkers import Ledger
from tests.simulation.faults import Faults
from tests.simulation.flows import Dataflow, chain, with_standbys
from tests.simulation.operators import Habits
from tests.simulation.run import Simulation, outcome
from tests.simulation.stage_kinds import Shatter, Watched
from tests.simulation.test_claims import begun, replicas, run_for, whole_again
from tests.simulation.test_directed_variants import batch

Patch = pytest.MonkeyPatch
ROOM = 1 << 20
STREAM = StreamId(0, 0)


def listed(epoch: int, *replicas: ReplicaAt) -> Table:
    """Return a table of one partition."""
    return Table(epoch, ((replicas,),), (), {replica.worker: "" for replica in replicas})


def resumed(worker: int, producer: Producer, epoch: int, needs: int, nonce: int = 1) -> None:
    producer.on_answer(worker, Resume(*STREAM, nonce, epoch, [(0, needs)], needs - 1, [], ROOM), 0.0)


def acked(worker: int, producer: Producer, epoch: int, through: int) -> None:
    producer.on_answer(worker, Ack(*STREAM, 1, epoch, through, [], ROOM), 0.0)


def with_three_batches(*readers: ReplicaAt) -> Producer:
    """Make a producer with the table of epoch 0, for batches that go to the readers which have answered."""
    producer = Producer(STREAM, 0, 1, ROOM, resend_s=1.0)
    producer.on_table(listed(0, *readers), 0, 0.0)
    return producer


def fill(producer: Producer) -> None:
    for _ in range(3):
        producer.append(batch(), 0.0)
    list(producer.poll(0.0))


OLD, OTHER, NEW = ReplicaAt(10, 0), ReplicaAt(11, 0), ReplicaAt(10, 5, False)


def an_answer_of_an_earlier_life_comes_late() -> str:
    """Tell how worker 10 has lost its replica and is to get another. The batches for which its first replica had asked have
    left the log since."""
    producer = with_three_batches(OLD, OTHER)
    resumed(11, producer, 0, 0)
    fill(producer)
    producer.on_table(listed(1, OTHER), 0, 0.0)
    acked(11, producer, 1, 2)
    producer.on_table(listed(5, OTHER, NEW), 0, 0.0)
    try:
        resumed(10, producer, 0, 0)
    except RefusedError:
        return "the producer gives up"
    resumed(10, producer, 5, 3)
    return "the producer goes on"


def a_producer_did_not_know_of_a_new_replica() -> object:
    """Tell how a producer has forgotten batches that a new replica needs, and has more to give."""
    producer = with_three_batches(OTHER)
    resumed(11, producer, 0, 0)
    fill(producer)
    acked(11, producer, 0, 2)
    producer.on_table(listed(5, OTHER, NEW), 0, 0.0)
    hosted, inbound = [0], Inbound(STREAM, 0, ROOM)
    inbound.received.reach(1)
    inbound.greet(0, "connection", 7, 5)
    try:
        producer.on_answer(10, inbound.resume(5, hosted), 0.0)
    except RefusedError as refused:
        return refused.code
    producer.append(batch(), 0.0)
    sent = [send for send in producer.poll(0.0) if send.worker == 10 and isinstance(send.message, Data)]
    taken = [inbound.take(send.message, send.batches, hosted, (), Counters()) for send in sent]  # type: ignore[arg-type]
    return [slice_.sequence for slices in taken if isinstance(slices, list) for _, slice_ in slices]


def a_replica_is_built_anew_where_one_had_acked() -> object:
    """Tell how a copy was taken when its primary had applied one batch of three, although the first life had acked all."""
    producer = with_three_batches(OLD, OTHER)
    resumed(10, producer, 0, 0)
    resumed(11, producer, 0, 0)
    fill(producer)
    acked(10, producer, 0, 2)
    producer.on_table(listed(5, OTHER, NEW), 0, 0.0)  # in one table, because the one between was lost with a connection
    acked(11, producer, 0, 2)
    try:
        resumed(10, producer, 5, 1)
    except RefusedError as refused:
        return refused.code
    sent = [send.message for send in producer.poll(0.0) if send.worker == 10]
    return [message.sequence for message in sent if isinstance(message, Data)]


def a_source_is_read_again_and_then_a_replica_is_added() -> object:
    """Tell how a source is read again when five batches are received and two applied, and a copy is taken just then."""
    producer = with_three_batches(OTHER)
    marks = [Mark(at, 0) for at in range(5)]
    producer.on_answer(11, Resume(*STREAM, 1, 0, [(0, 5)], 1, [], ROOM, marks), 0.0)
    begins = producer.floor()
    assert begins is not None
    producer.begin_at(*begins[:2])
    producer.on_table(listed(5, OTHER, NEW), 0, 0.0)
    try:
        resumed(10, producer, 5, 2)
    except RefusedError as refused:
        return refused.code
    return "served"


def who_was_dropped_greets_first() -> list[object]:
    """Return the workers from which a consumer reads when a dropped replica of its producer greets before the one left."""
    plan = chain(Ledger(), (Watched,), 2).plan
    sinks = ((ReplicaAt(10, 0), ReplicaAt(12, 0)),) * 2
    endpoints = {10: "", 11: "", 12: ""}
    core = WorkerCore(plan, 10)
    core.on_table(Table(0, (((ReplicaAt(11, 0), ReplicaAt(12, 0)),) * 2, sinks), ((12, 12),), endpoints), 0.0)
    core.on_table(Table(1, (((ReplicaAt(12, 0),),) * 2, sinks), ((12, 12),), endpoints), 0.0)
    edge = plan.stages[1].edges_in[0]
    for worker, epoch in ((11, 0), (12, 1)):
        core.on_data_plane(f"worker {worker}", Hello(edge, 0, 0, epoch, worker), (), 0.0)
    answers = [effect for effect in core.poll(0.0) if isinstance(effect, ToConnection)]
    return [answer.connection for answer in answers if isinstance(answer.message, Resume)]


def a_table_comes_later_than_greetings_that_follow_it() -> bool:
    """Tell whether rows flow at once. Producers greet the worker of a new replica, and that worker hears of the replica last."""
    slow = {"resend_timeout": 5.0}
    sim = Simulation(0, Faults(patient=True, calm_after_s=1.0), 2, 3, lambda led: chain(led, (Watched,), 2, **slow))
    sim.world.after(0.03, sim.crash, sim.workers[1], True, False)
    sim.world.after(0.03, sim.workers[2].control.cut_down, 0.1)
    sim.run()
    return sim.stalls.worst[0] < 1.0


def a_newcomer_has_not_heard_of_any_table() -> set[str]:
    """Return the phase of an addition begun meanwhile: a worker that has not heard of the addition may forget rows for it."""
    slow = {"heartbeat_timeout": 30.0, "batches": 200}
    sim = Simulation(0, Faults(patient=True, calm_after_s=1.0), 2, 3, lambda led: chain(led, (Watched,), 2, **slow))
    sim.run_until(lambda: begun(sim))
    sim.crash(sim.workers[1])
    joined = len(sim.workers)
    sim.run_until(lambda: joined in sim.controller.members.workers)  # as the controller sees it
    sim.workers[1].control.cut_up(1.0)
    sim.run_until(lambda: whole_again(sim))
    sim.crash(sim.workers[2], back=False)
    run_for(sim, 0.1)
    return {addition.phase for addition in sim.controller.repairs.under_way.values()}


def a_secondary_gives_other_output() -> list[str]:
    """Return the events noted by the controller when words are longer in one copy than in the other, once."""
    sim = Simulation(
        0, Faults(patient=True, calm_after_s=1.0), 2, 3, lambda led: chain(led, (Watched,), 2, batches=100)
    )
    sim.run_until(lambda: begun(sim))
    sim.ledger.unsteady.add(StreamId(sim.plan.stages[0].edges_out[0], 0))  # readers of that copy get other rows
    sim.divergences.expect((0, 0))
    secondary = next(copy for copy in replicas(sim)[0, 0] if not copy.primary)
    operator: Any = secondary.operator
    operator.through = lambda rows: [operator.stamped([(i, key, word + "!") for i, key, word in rows])]
    run_for(sim, 0.5)
    return [event.kind for event in sim.controller.repairs.history]


def a_standby_repeats_with_other_output() -> list[str]:
    """Return the reason why the query ends: a primary gives other output once than its operator would, and is lost before its
    next checkpoint."""

    def flow(ledger: Ledger) -> Dataflow:
        made = with_standbys(chain(ledger, (Watched,), 2, batches=200), random.Random(0), 1.0)
        settings = replace(made.plan.settings, checkpoint_interval=10.0)
        return replace(made, plan=replace(made.plan, settings=settings))

    sim = Simulation(0, Faults(patient=True, calm_after_s=1.0), 2, 3, flow)
    sim.run_until(lambda: begun(sim))
    sim.divergences._disturb((0, 0), replicas(sim)[0, 0][0])
    run_for(sim, 0.1)
    primary = next(each for each in sim.workers if each.node == sim.leader_of(0, 0))
    sim.crash(primary, back=False)
    sim.run_until(lambda: sim.controller.phase != "running" or (0, 0) in replicas(sim))
    run_for(sim, 0.5)
    error = sim.controller.error
    return (
        []
        if error is None
        else [type(error).__name__, *re.findall(r"stage \w+, partition \d|gave other output", str(error))]
    )


def primaries_move_in_the_middle_of_steps() -> str | None:
    """Return the broken law. Steps give more than the logs have room for, and primaries move without a break."""

    def flow(ledger: Ledger) -> Dataflow:
        tight = {"log_max_bytes": 300, "credit_max_bytes": 600, "batches": 20}
        return replace(chain(ledger, (Shatter, Watched), 2, **tight), credit_floor=1)

    faults = Faults(patient=True, calm_after_s=1.0)
    return outcome(Simulation(1, faults, 2, 4, flow, habits=Habits(asks_per_s=100.0))).law


def a_copy_takes_longer_than_rows_can_wait() -> str | None:
    """Return the broken law. The controller does not hear of the first copy among several for three seconds."""
    slow = {"heartbeat_timeout": 30.0, "batches": 40, "partitions": 6}
    faults = Faults(patient=True, calm_after_s=1.0)
    sim = Simulation(0, faults, 2, 4, lambda led: chain(led, (Watched,), 2, **slow))
    sim.run_until(lambda: begun(sim))
    sim.crash(sim.workers[0], back=False)
    under_way = sim.controller.repairs.under_way
    sim.run_until(lambda: len(under_way) > 1 and next(iter(under_way.values())).phase == "copy")
    primary = sim.leader_of(*next(iter(under_way)))
    next(each for each in sim.workers if each.node == primary).control.cut_up(3.0)
    return outcome(sim).law


def a_copy_is_asked_of_a_primary_that_is_still_restored() -> bool:
    """Return whether the copy begins when the primary is there, without another request: the controller asks again after longer
    and longer times, and producers keep rows for the new replica as long."""
    two = Two()
    primary = two.source.replicas.pop(KEY)
    two.source.awaited[KEY] = 0
    two.sender.on_copy_state(ORDER)
    two.poll()
    two.source.replicas[KEY] = primary
    del two.source.awaited[KEY]
    two.poll()
    return two.sender.active


class Turning(flux.Operator):
    """An operator that gives a row if its last digit is not that of the row before."""

    schema = SCHEMA
    last = -1

    def process(self, rows: pa.RecordBatch) -> Any:
        for at, value in enumerate(rows.column("x").to_pylist()):
            if value % 10 != self.last:
                yield rows.slice(at, 1)
            self.last = value % 10


def timed(kind: type[flux.Operator]) -> Replica:
    """Make a replica whose rows have event time. Worker 10 reads its output, and has answered."""
    plain = made(kind, 2)
    producer = Producer(STREAM, 0, 1, ROOM, resend_s=1.0, pace=WatermarkPace(0, 0.0))
    producer.on_table(listed(0, OLD), 0, 0.0)
    resumed(10, producer, 0, 0)
    stage = replace(plain.stage, timed_inputs=(0,))
    return Replica(stage, 0, 0, [EdgeOutput(producer, plain.outlets[0].edge)], plain.limits)


def a_primary_dies_whose_watermark_no_other_has_heard_of() -> bool:
    """Return whether rows behind a told watermark are above it. The primary has applied 21, which gave nothing, and ordered
    watermark 30. The next one gets 32 of another stream before 21, so that 21 gives a row."""
    first, second = timed(Turning), timed(Turning)
    first.lead(0, [ReplicaAt(SECONDARY, 0, True)])
    second.follow()
    feed(first, 0, 11)
    feed(second, 0, 11)
    work(first, 1.0)
    told(first, second)
    work(second, 1.0)
    feed(first, 1, 21)
    work(first, 1.0)
    assert first.clock is not None
    first.clock.offer([30], 1.0)
    work(first, 1.0)
    given = list(first.outlets[0].producer.poll(1.0))
    said = [each.message.watermark for each in given if isinstance(each.message, Bound)]
    assert [each.message.sequence for each in given if isinstance(each.message, Data)] == [0]
    second.lead(1, [])
    other = pa.record_batch({"x": pa.array([32], pa.int64())})
    second.add(RowSlice(StreamId(0, 1), 0, Packet(StreamId(0, 1), 0, 8), 0, 0.0, True, other))
    feed(second, 1, 21)
    work(second, 1.0)
    rows = [entry.element for entry in second.outlets[0].producer.log.entries()[1:]]
    times = [time for each in rows if isinstance(each, Rows) for time in each.data.batch.column("x").to_pylist()]
    assert times == [32, 21]
    return all(watermark <= min(times) for watermark in said)


REPEATED = ["QueryFailed", "stage watched1, partition 0", "gave other output"]
#: Each story, its end when all rules are kept, and the variant that ends otherwise.
STORIES: list[tuple[Callable[[], object], object, Callable[[Patch], None]]] = [
    (an_answer_of_an_earlier_life_comes_late, "the producer goes on", rules.takes_answers_of_an_older_table),
    (a_producer_did_not_know_of_a_new_replica, "stale", rules.serves_what_is_left_to_who_needs_more),
    (a_replica_is_built_anew_where_one_had_acked, [1, 2], rules.keeps_acks_of_an_earlier_life),
    (a_source_is_read_again_and_then_a_replica_is_added, "served", rules.begins_where_all_is_received),
    (who_was_dropped_greets_first, ["worker 12"], rules.reads_from_who_was_dropped),
    (a_table_comes_later_than_greetings_that_follow_it, True, rules.forgets_greetings_of_a_newer_table),
    (primaries_move_in_the_middle_of_steps, None, rules.a_step_under_way_keeps_its_credit),
    (primaries_move_in_the_middle_of_steps, None, rules.what_waits_keeps_its_credit),
    (a_secondary_gives_other_output, ["divergence", "repair"], rules.never_reports_a_divergence),
    (
        a_standby_repeats_with_other_output,
        ["QueryFailed", "stage watched1, partition 0", "gave other output"],
        rules.compares_no_repetition,
    ),
    (a_copy_takes_longer_than_rows_can_wait, None, batches.keeps_rows_for_a_turn_that_does_not_come),
    (a_copy_is_asked_of_a_primary_that_is_still_restored, True, lives.forgets_copies_that_are_asked_early),
    (a_newcomer_has_not_heard_of_any_table, {"retain"}, rules.who_joins_need_not_confirm),
    (a_primary_dies_whose_watermark_no_other_has_heard_of, True, of_times.states_what_is_not_committed),
]


@cache
def _with_all_rules(story: Callable[[], object]) -> object:
    """Tell a story with all rules, once for all its variants."""
    return story()


@pytest.mark.parametrize(("story", "well", "break_it"), STORIES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_story_goes_well_with_its_rule_and_not_without(
    story: Callable[[], object], well: object, break_it: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    assert _with_all_rules(story) == well
    break_it(monkeypatch)
    assert story() != well, f"it goes well without the rule that {break_it.__name__} takes away"
