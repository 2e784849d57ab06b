"""The lives of a worker's replicas: made, installed, brought to life, given roles, and given up (design: epoch, copy, standby).

Left to others: the way of a copied state (``flux.state``), the sources (``source_scheduler``).

``RevivalRequests`` asks the vault for state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from flux.dataflow.plan import EdgePlan, FromSource, Plan, StagePlan
from flux.dataflow.plan_change import PlanVersions
from flux.errors import UserCodeError
from flux.exchange.bounds import WatermarkPace
from flux.exchange.consumer_map import Consumers
from flux.exchange.inbound import Inbound
from flux.exchange.log import LogMeter
from flux.exchange.producer import Producer, ToWorker
from flux.replica.kinds import Follower, keeps_checkpoints, kind_of
from flux.replica.order_exchange import OrderExchange
from flux.replica.output import EdgeOutput
from flux.replica.replica import Replica
from flux.state.standby import Checkpoint, Standby, StandbyStore
from flux.state.state_copy import ReplicaState, StateCopy, StreamPosition, edges_of, fitted, restore
from flux.wire.messages import Restore
from flux.wire.pulse import KIND, OPENS, PARTITION, TURN, WHAT, Note, no_note
from flux.worker.effects import StageFailures
from flux.worker.hosted_replicas import HostedReplicas, TableUpdate
from flux.worker.output_delivery import OutputDelivery
from flux.worker.step_scheduler import StepScheduler
from flux.worker.subscriptions import Subscriptions
from partitioning.ids import DISK, PartitionKey, StreamId
from partitioning.table import ReplicaAt, Table


class RevivalRequests:
    """The requests of one worker for the state of replicas that will be primary here and whose state only the vault has (design:
    restore). They are repeated until the state comes."""

    def __init__(self, hosted: HostedReplicas, again_s: float) -> None:
        #: The vault's worker number; None while no replica here needs it.
        self.vault: int | None = None
        self._hosted = hosted
        self._again_s = again_s
        self._ask_at = inf

    def on_table(self) -> None:
        asking = self._hosted.begin_on_disk() if self._hosted.awaited else []
        self._ask_at = 0.0 if asking else inf
        self.vault = None
        if asking:
            assert self._hosted.table is not None
            row = self._hosted.table.replicas(*asking[0])
            self.vault = next((replica.worker for replica in row if replica.kind == DISK), None)

    def due(self) -> float:
        return self._ask_at

    def poll(self, now: float) -> Iterator[ToWorker]:
        if now < self._ask_at:
            return
        asking = self._hosted.begin_on_disk()
        self._ask_at = now + self._again_s if asking else inf
        if self.vault is not None:
            for key in asking:
                yield ToWorker(self.vault, Restore(*key, self._hosted.awaited[key], self._hosted.worker))


@dataclass(frozen=True)
class StageInputs:
    """Facts about the inputs of a stage, found once for all its replicas on a worker."""

    #: Edges that come from sources.
    from_sources: set[int]
    #: Edges of sources whose readers give the numbers of their rows.
    from_logs: set[int]
    #: Edges without whose rows a step goes on, if these are gone.
    loses: set[int]
    #: Rows of some edge may be others when they are made again.
    may_lose: bool

    @classmethod
    def of(cls, plan: Plan, stage: StagePlan) -> StageInputs:
        edges = [plan.edges[edge] for edge in stage.edges_in]
        from_sources = {edge.id for edge in edges if not edge.from_stage}
        return cls(
            from_sources,
            {edge for edge in from_sources if plan.brings_numbers(edge)},
            {edge.id for edge in edges if plan.may_lose(edge, passed_over=True)},
            any(map(plan.may_lose, edges)),
        )


@dataclass(frozen=True)
class StreamRules:
    """Facts about an edge, found once for the producers of all its streams on a worker; they are arguments of ``Producer``."""

    log_bytes: int
    reads_again: bool
    may_lose: bool

    @classmethod
    def of(cls, plan: Plan, edge: EdgePlan, workers: int) -> StreamRules:
        source = plan.sources[edge.source] if isinstance(edge, FromSource) else None
        return cls(
            plan.log_share(edge, workers),
            source is not None and source.seeks,
            edge.from_stage and plan.may_lose(edge, passed_over=True),
        )


def _fed_since(plan: Plan) -> dict[int, int]:
    """Return for each stage the version that brought the newest of the edges that it feeds."""
    return {stage.id: max([plan.edges[edge].since for edge in stage.edges_out], default=0) for stage in plan.stages}


class ReplicaLifecycle:
    """The lives of one worker's replicas, and its ``producers``, including those of its sources.

    Law: no other part of the worker makes, installs or gives up a replica. It is the worker as seen by kinds of replicas
    (``ReplicaInstaller``) and by copies of state (``SenderHost``).

    A replica that comes to life reads on at the end of its state. A standby that becomes primary goes on in the order that it has
    kept."""

    def __init__(
        self,
        plans: PlanVersions,
        hosted: HostedReplicas,
        subscriptions: Subscriptions,
        turns: StepScheduler,
        leaving: OutputDelivery,
        order_exchange: OrderExchange,
        standby_store: StandbyStore,
        workers: int,
        failures: StageFailures,
        look_for_timers: Callable[[], None],
    ) -> None:
        """Begin without replicas. ``plans``: the versions that are known; ``workers``: the number of workers with which the query
        began; ``failures`` takes errors of new replicas. ``look_for_timers`` is called when a standby has become primary: its
        timers may be due."""
        plan = plans.newest
        self.replicas = hosted.replicas
        self.awaited = hosted.awaited
        self.followers = hosted.followers
        self.producers: dict[StreamId, Producer] = {}
        self.log_meter = LogMeter()
        self.standby_store = standby_store
        #: Returns the worker's note of its activity.
        self.note: Callable[[], Note] = no_note
        self.revivals = RevivalRequests(hosted, plan.settings.resend_timeout)
        self._plan, self._plans, self._workers = plan, plans, workers
        self._hosted = hosted
        self._subscriptions = subscriptions
        self._turns = turns
        self._leaving = leaving
        self._order_exchange = order_exchange
        self._inputs = {stage.id: StageInputs.of(plan, stage) for stage in plan.stages}
        self._rules = {edge.id: StreamRules.of(plan, edge, workers) for edge in plan.edges}
        self._failures = failures
        self._look_for_timers = look_for_timers
        self._consumers: dict[int, Consumers] = {}
        #: By stage: the version that brought the newest of the edges that it feeds.
        self._fed_since = _fed_since(plan)
        #: Replicas made for the table that is being followed, which begin empty.
        self._created: list[Replica] = []
        self._noted = False
        #: Replicas that have lost an edge of their output with the version whose table comes next.
        self._shortened: list[Replica] = []
        #: Producers of an edge, if they are known by now.
        self._complete: dict[int, list[int]] = {}

    # ---- the plan

    def on_plan(self) -> None:
        """Note another version of the plan. Steps may have waited for it. A version that was taken back may have had other parts
        of the same ids."""
        plan, known = self._plans.newest, self._plan.version
        for stage in plan.stages:
            if stage.since > known:
                self._inputs[stage.id] = StageInputs.of(plan, stage)
        for edge in plan.edges:
            if edge.since > known:
                self._rules[edge.id] = StreamRules.of(plan, edge, self._workers)
        self._turns.wake_all(self.replicas)

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next. Edges that it does not have take nothing more from here on: no
        consumer is left that would ack, and a full log would stop their stage."""
        self._plan, self._fed_since = plan, _fed_since(plan)
        gone = [each for each in self._rules if self._plans.edge(each) is None]
        for replica in self.replicas.values() if gone else ():
            self._close_edges(replica)
        for stage in [
            each for each in self._inputs if each not in plan.stages and each not in self._plans.newest.stages
        ]:
            del self._inputs[stage]
            self._consumers.pop(stage, None)
        for edge in gone:
            del self._rules[edge]
            self._complete.pop(edge, None)

    def _close_edges(self, replica: Replica) -> None:
        """End the outlets of a replica whose edges are removed."""
        for edge in [each.edge.id for each in replica.outlets if self._plans.edge(each.edge.id) is None]:
            self._shortened.append(replica)
            producer = replica.output.close(edge)
            if producer is not None and self.producers.get(producer.stream) is producer:
                del self.producers[producer.stream]

    def _new_outlets(self, replica: Replica, version: int) -> list[EdgeOutput]:
        """Make the outlets of a replica that begin with a version of the plan, in a step of their own."""
        plan = self._plans.of(version) or self._plan
        edges = [plan.edges[each] for each in plan.stages[replica.stage.id].edges_out]
        made = [
            EdgeOutput(self.producer(StreamId(edge.id, replica.partition), edge, replica.incarnation), edge)
            for edge in edges
            if replica.version < edge.since <= version
        ]
        self.producers |= {outlet.producer.stream: outlet.producer for outlet in made}
        return made

    def show_new(self, replica: Replica, now: float) -> None:
        """Show the newest table to the outlets of a replica, some of which have just begun."""
        self.show([outlet.producer for outlet in replica.outlets], now)

    # ---- the table

    def on_table(self, update: TableUpdate) -> list[Standby]:
        """Follow the newest table: its replicas first, then their roles. Return the standbys that are to become primary."""
        hosted, replicas, followers = self._hosted, self.replicas, self.followers
        others = not self._noted  # other replicas live here than before
        missing: list[tuple[PartitionKey, ReplicaAt]] = []
        for key, _, mine in update.rows:
            here = replicas.get(key) or followers.get(key)
            if here is not None and (mine is None or mine.incarnation != here.incarnation):
                self._discard(key) if key in replicas else followers.pop(key)
                here, others = None, True
            self.awaited.pop(key, None)
            if mine is None:
                hosted.placed.pop(key, None)
                continue
            hosted.placed[key] = mine
            if here is None:
                missing.append((key, mine))
        for key, mine in missing:
            kind_of(mine).install(self, key, mine)
        if others or missing:
            self._noted = True
            hosted.note()
            self._turns.arrange()
            created, self._created = self._created, []
            self._subscriptions.enter(created)
        for key, row, _ in update.rows:
            if key in replicas:
                self._assign_role(replicas[key], row, update.table.epoch)
        for replica in replicas.values():
            self._note_change(replica)
        for replica in self._shortened:
            # It may be a last one since then, or be given up.
            if replica.leads and replica.finished and replicas.get(replica.key) is replica:
                self._leaving.report(replica)
        self._shortened.clear()
        hosted.note_roles()
        self.revivals.on_table()
        return self._rising() if followers else []

    def _rising(self) -> list[Standby]:
        """List the followers that lead by the table and have not begun to: each makes a replica from its checkpoint."""
        rising = []
        for key, follower in self.followers.items():
            if self._hosted.leads(key):
                assert isinstance(follower, Standby), f"{key}: a replica without state cannot lead"
                if not follower.leads:
                    rising.append(follower)
        return rising

    def _note_change(self, replica: Replica) -> None:
        """Have the primary of a partition that feeds new edges order a step for them."""
        replica.waits.change_to = self._fed_since[replica.stage.id]

    def _assign_role(self, replica: Replica, row: Sequence[ReplicaAt], epoch: int) -> None:
        """Give a replica its role by the ``row`` of its partition in the table of this epoch."""
        first, *others = row
        if not self._plan.settings.ordered:
            replica.lead(epoch, [])  # replicas are independent of each other
        elif first.worker == self._hosted.worker:
            replica.lead(epoch, others)
            self._order_exchange.tell(replica.key)
            if replica.finished:
                self._leaving.report(replica)
        else:
            replica.follow()

    def show(self, producers: Iterable[Producer], now: float) -> None:
        """Show the newest table to these producers."""
        table, of_edge = self._hosted.table, dict[int, Consumers | None]()
        assert table is not None
        for producer in producers:
            number = producer.stream.edge
            if number not in of_edge:
                of_edge[number] = self._consumers_of(number, table)
            consumers = of_edge[number]
            if consumers is not None:
                producer.on_table(table, consumers.stage, now, consumers)
            else:
                producer.by_rank = np.arange(producer.partitions, dtype=np.int32)

    def _consumers_of(self, number: int, table: Table) -> Consumers | None:
        """Return the consumers of an edge; None: those of a stage that comes with a later table."""
        edge = self._plans.edge(number)
        assert edge is not None
        if not table.has(edge.consumer):
            return None
        known = self._consumers.get(edge.consumer)
        if known is None:
            known = self._consumers[edge.consumer] = Consumers(edge.consumer)
        return known

    def on_edge_complete(self, edge: int, producers: list[int]) -> None:
        self._complete[edge] = producers
        for replica in self.replicas.values():
            if edge in replica.stage.edges_in:
                replica.waits.expected[edge] = producers
                self._turns.wake(replica.key)

    # ---- for kinds

    def birth(self, stage: int) -> int:
        return self._hosted.birth(stage)

    def create(self, key: PartitionKey, incarnation: int) -> None:
        try:
            replica = self.build(key, incarnation, None)
        except UserCodeError as error:
            self.fail(key, error)
            self.await_copy(key, incarnation)  # until the table comes that has its stage no more
            return
        # By an earlier table, which has not come here, it may be a standby: a producer with that table sends it no rows.
        replica.reads_since = self._hosted.epoch
        if self._hosted.placed[key].empty:
            replica.begin_behind_lost()
        self._enter(replica)
        self.replicas[key] = replica
        self._created.append(replica)

    def await_copy(self, key: PartitionKey, incarnation: int) -> None:
        self.awaited[key] = incarnation

    def await_disk(self, key: PartitionKey, incarnation: int) -> None:
        assert self._plan.durable, f"the state of replica {key} is lost"
        self.await_copy(key, incarnation)

    def keep_order(self, key: PartitionKey, follower: Follower) -> None:
        self.followers[key] = follower

    def keep_checkpoints(self, key: PartitionKey, incarnation: int) -> None:
        self.keep_order(key, self.standby_store.standby(key, incarnation, self._subscriptions.kept))

    # ---- for copies of state

    def inbounds_of(self, replica: Replica) -> list[Inbound]:
        return self._subscriptions.of(replica)

    def note_copy(self, replica: Replica, worker: int, incarnation: int, positions: Iterable[StreamPosition]) -> None:
        self._subscriptions.copies.note(replica, worker, incarnation, positions)

    def goes_on(self, key: PartitionKey) -> None:
        """Wake a replica that stood still and may take steps again, or that has orders to send."""
        if key in self.replicas:
            self._turns.wake(key)
            self._order_exchange.tell(key)

    def snapshot_classes(self, key: PartitionKey) -> tuple[type, ...] | None:
        return self._plan.stages[key.stage].make().snapshot_classes

    def begins_on_disk(self, key: PartitionKey) -> bool:
        return self._hosted.begins_on_disk(key)

    def keeps_checkpoints(self, key: PartitionKey) -> bool:
        return keeps_checkpoints(self._hosted.kind(key))

    def came_to_life(self, replica: Replica, state: StateCopy, now: float) -> None:
        """Add an awaited replica whose operator has got its state."""
        del self.awaited[replica.key]
        restore(state, replica)
        others = self._add(replica)
        self._read_on(replica, others, state.state.positions, now)

    def took_over(self, replica: Replica, state: StateCopy | None, standby: Standby, now: float) -> None:
        """Add a replica that goes on behind the checkpoint of a standby, with the standby's order, as the primary."""
        del self.followers[replica.key]
        replica.reads_since = standby.reads_since
        if state is not None:
            restore(state, replica)
        # A vault has acked every step before any output of it was shown.
        replica.succeed(standby.order, standby.left, standby.claim, standby.from_vault, standby.steady)
        others = self._add(replica)
        assert self._hosted.table is not None
        self._assign_role(replica, self._hosted.table.replicas(*replica.key), self._hosted.epoch)
        self._hosted.note_roles()
        self._turns.wake(replica.key)
        self._look_for_timers()
        self._read_on(replica, others, standby.positions, now)

    def came_from_vault(self, standby: Standby) -> int | None:
        del self.awaited[standby.key]
        self.keep_order(standby.key, standby)
        return self._hosted.epoch if self._hosted.leads(standby.key) else None

    def keep(self, key: PartitionKey, incarnation: int, checkpoint: Checkpoint, state: ReplicaState) -> None:
        """Add an awaited standby, with its first checkpoint."""
        del self.awaited[key]
        standby = Standby(key, incarnation, self._subscriptions.kept)
        standby.begin(checkpoint, state)
        self.keep_order(key, standby)

    # ---- replicas

    def fitted(self, key: PartitionKey, state: StateCopy) -> StateCopy:
        """Return a copy of a state without the output of edges that are removed."""
        at_birth = self._plan.stages[key.stage].edges_at_birth
        return fitted(state, at_birth, lambda edge: self._plans.edge(edge) is not None)

    def fail(self, key: PartitionKey, error: UserCodeError) -> None:
        """Take an error of the user's code in a replica that is being made. Raises it, unless only the stage ends: then the
        replica stays awaited until the table comes that has its stage no more."""
        self._failures.take(self._plan, key.stage, error)

    def build(self, key: PartitionKey, incarnation: int, state: StateCopy | None) -> Replica:
        """Make a fresh replica. ``state``: the one that it is to get, which is ``fitted``; None: it begins empty."""
        stage = self._plan.stages[key.stage]
        edges = stage.edges_at_birth if state is None else edges_of(state, stage.edges_at_birth)
        bases = [0] * len(edges) if state is None else [output.base for output in state.outputs]
        outlets = []
        for edge_id, base in zip(edges, bases, strict=True):
            if (edge := self._plans.edge(edge_id)) is not None:
                producer = self.producer(StreamId(edge_id, key.partition), edge, incarnation, base)
                outlets.append(EdgeOutput(producer, edge))
        note = self.note()
        note[WHAT], note[PARTITION], note[KIND] = *key, OPENS
        replica = Replica(stage, key.partition, incarnation, outlets, self._plan.settings, self._hosted.kind(key))
        note[KIND] = TURN
        if self._plan.durable:
            replica.output.compare(replica.applied)  # the vault may give its state to a replica that repeats its steps
        inputs = self._inputs[key.stage]
        replica.waits.from_sources, replica.waits.from_logs = inputs.from_sources, inputs.from_logs
        replica.may_lose, replica.waits.loses = inputs.may_lose, inputs.loses
        replica.birth, replica.new_outlets, replica.waits.plans = self.birth(key.stage), self._new_outlets, self._plans
        if stage.sink is not None:
            self._leaving.open(replica)
        return replica

    def _add(self, replica: Replica) -> list[int]:
        """Add a replica that comes to life with a state. Return the other partitions of its stage here."""
        self._close_edges(replica)  # some may have been removed while its state was restored
        self._enter(replica)
        self._note_change(replica)
        others = self._hosted.add(replica)
        self._turns.arrange(woken=replica.key)
        return others

    def _read_on(
        self, replica: Replica, others: Collection[int], positions: Iterable[StreamPosition], now: float
    ) -> None:  # fmt: skip
        self.show([outlet.producer for outlet in replica.outlets], now)
        self._subscriptions.adopt(replica, others, positions)

    def _enter(self, replica: Replica) -> None:
        self.producers |= {outlet.producer.stream: outlet.producer for outlet in replica.outlets}
        for edge_id in replica.stage.edges_in:
            edge = self._plan.edges[edge_id]
            if edge.producers_known:
                replica.waits.expected[edge_id] = range(edge.producers)
            elif edge_id in self._complete:
                replica.waits.expected[edge_id] = self._complete[edge_id]

    def _discard(self, key: PartitionKey) -> None:
        replica = self.replicas.pop(key)
        replica.close()
        self._leaving.close(replica)
        self._turns.forget(key)
        self._subscriptions.discard(replica)
        for outlet in replica.outlets:
            outlet.producer.log.clear()
            self.producers.pop(outlet.producer.stream, None)

    def producer(self, stream: StreamId, edge: EdgePlan, incarnation: int, base: int = 0) -> Producer:
        settings, rules = self._plan.settings, self._rules[edge.id]
        return Producer(
            stream, incarnation, edge.partitions, rules.log_bytes, settings.resend_timeout, self.log_meter, self._hosted.worker,
            base, settings.step_max_rows, rules.reads_again, rules.may_lose,
            WatermarkPace(edge.quantum, settings.watermark_interval) if edge.states else None,
            settings.link_timeout if edge.from_stage else inf,
        )  # fmt: skip
