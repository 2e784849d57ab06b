"""The making of the replicas that the newest table places on a worker, and the end of those that it does not (design: epoch).

Left to others: the roles of replicas (the worker), the state of a replica that was added (``flux.state.sender``), the sources
(``source_scheduler``).

``RevivalRequests`` asks the vault for state; ``Newcomers`` brings replicas with copied state to life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from flux.dataflow.plan import EdgePlan, FromSource, Plan
from flux.exchange.inbound import Inbound
from flux.exchange.log import LogMeter
from flux.exchange.producer import Producer, ToWorker
from flux.replica.kinds import Follower, keeps_checkpoints, kind_of
from flux.replica.order_exchange import OrderExchange
from flux.replica.output import EdgeOutput
from flux.replica.replica import Replica
from flux.state.standby import Checkpoint, Standby, StandbyStore
from flux.state.state_copy import ReplicaState, StateCopy, StreamPosition, restore
from flux.wire.messages import Restore
from flux.worker.hosted_replicas import HostedReplicas
from flux.worker.output_delivery import OutputDelivery
from flux.worker.step_scheduler import StepScheduler
from flux.worker.subscriptions import Subscriptions
from partitioning.ids import DISK, PartitionKey, StreamId
from partitioning.table import Table


class RevivalRequests:
    """The requests of one worker, repeated until the state comes.

    Requests for the state of replicas that will be primary here and whose state only the vault has (design: restore)."""

    def __init__(self, hosted: HostedReplicas, again_s: float) -> None:
        #: The vault's worker number; None while no replica here needs it.
        self.vault: int | None = None
        self._hosted = hosted
        self._again_s = again_s
        self._ask_at = inf

    def on_table(self) -> None:
        asking = self._hosted.begin_on_disk()
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


class Newcomers:
    """The worker, as ``sender.SenderHost``. ``show``: shows the newest table to a producer; ``lead``: gives a replica its role by
    that table; ``promote``: promotes the standbys that lead by it.

    Replicas that come to life on a worker with a state that was copied (design: copy, standby).

    A replica that comes to life reads on at the end of its state. A standby that becomes primary goes on in the order that it has
    kept."""

    def __init__(
        self,
        plan: Plan,
        hosted: HostedReplicas,
        housing: ReplicaHousing,
        subscriptions: Subscriptions,
        turns: StepScheduler,
        pairing: OrderExchange,
        show: Callable[[Producer, float], None],
        lead: Callable[[Replica], None],
        promote: Callable[[float], None],
    ) -> None:
        self.replicas = hosted.replicas
        self.awaited = hosted.awaited
        self.followers = hosted.followers
        self._turns = turns
        self._pairing = pairing
        self._plan = plan
        self._hosted = hosted
        self._housing = housing
        self._subscriptions = subscriptions
        self._show = show
        self._lead = lead
        self._promote = promote

    # ---- at a primary

    def inbounds_of(self, replica: Replica) -> list[Inbound]:
        return self._subscriptions.of(replica)

    def note_copy(self, replica: Replica, worker: int, incarnation: int, positions: Iterable[StreamPosition]) -> None:
        self._subscriptions.note_copy(replica, worker, incarnation, positions)

    def goes_on(self, key: PartitionKey) -> None:
        """Wake a replica that stood still and may take steps again, or that has orders to send."""
        if key in self.replicas:
            self._turns.wake(key)
            self._pairing.tell(key)

    # ---- at a new replica

    def snapshot_classes(self, key: PartitionKey) -> tuple[type, ...] | None:
        return self._plan.stages[key.stage].make().snapshot_classes

    def build(self, key: PartitionKey, incarnation: int, bases: Sequence[int]) -> Replica:
        return self._housing.build(key, incarnation, bases)

    def adopt(self, replica: Replica, state: StateCopy, now: float) -> None:
        """Bring a replica to life whose operator has got its state."""
        restore(state, replica)
        self._housing.add(replica)
        self._read_on(replica, state.positions, now)

    def _read_on(self, replica: Replica, positions: Iterable[StreamPosition], now: float) -> None:
        for outlet in replica.outlets:
            self._show(outlet.producer, now)
        self._subscriptions.adopt(replica, positions)

    # ---- at a standby

    @property
    def shelf(self) -> StandbyStore:
        return self._housing.shelf

    def begins_on_disk(self, key: PartitionKey) -> bool:
        return self._hosted.begins_on_disk(key)

    def lead_from(self, standby: Standby, now: float) -> None:
        self._housing.keep_order(standby.key, standby)
        self._promote(now)

    def keeps_checkpoints(self, key: PartitionKey) -> bool:
        return keeps_checkpoints(self._hosted.kind_here(key))

    def keep(self, key: PartitionKey, incarnation: int, checkpoint: Checkpoint, state: ReplicaState) -> None:
        self._housing.keep(key, incarnation, checkpoint, state)

    def take_over(self, replica: Replica, state: StateCopy | None, standby: Standby, now: float) -> None:
        """Bring a replica to life behind the checkpoint of a standby, with the standby's order."""
        replica.reads_since = standby.reads_since
        if state is not None:
            restore(state, replica)
        # A vault has acked every step before any output of it was shown.
        replica.succeed(standby.order, standby.left, standby.claim, whole=standby.from_vault)
        self._housing.add(replica)
        self._lead(replica)
        self._read_on(replica, standby.positions, now)


class ReplicaHousing:
    """The owner of a worker's replicas and ``producers``, including those of its sources. ``workers``: their number when the
    query began."""

    def __init__(
        self, plan: Plan, hosted: HostedReplicas, subscriptions: Subscriptions, turns: StepScheduler, leaving: OutputDelivery,
        workers: int,
        shelf: StandbyStore,
    ) -> None:  # fmt: skip
        self.producers: dict[StreamId, Producer] = {}
        self.log_meter = LogMeter()
        self._plan = plan
        self._hosted = hosted
        self._subscriptions = subscriptions
        self._turns = turns
        self._leaving = leaving
        self._workers = workers
        self.shelf = shelf
        self._noted = False
        #: Producers of an edge, if they are known by now.
        self._complete: dict[int, list[int]] = {}

    def on_table(self, table: Table, changed: Iterable[PartitionKey]) -> None:
        """Follow the newest table. ``changed``: partitions whose replicas are not as in the table before."""
        hosted, replicas, followers = self._hosted, self._hosted.replicas, self._hosted.followers
        others = not self._noted  # other replicas live here than before
        for key in changed:
            mine = next((each for each in table.replicas(*key) if each.worker == hosted.worker), None)
            here = replicas.get(key) or followers.get(key)
            if here is not None and (mine is None or mine.incarnation != here.incarnation):
                self._discard(key) if key in replicas else followers.pop(key)
                here, others = None, True
            hosted.awaited.pop(key, None)
            if mine is None:
                hosted.placed.pop(key, None)
                continue
            hosted.placed[key] = mine
            if here is None:
                kind_of(mine).install(self, key, mine)
                others = True
        if others:
            self._note()

    def _note(self) -> None:
        self._noted = True
        self._hosted.note()
        self._turns.arrange()
        self._subscriptions.expect()

    # ---- for kinds

    def create(self, key: PartitionKey, incarnation: int) -> None:
        replica = self.build(key, incarnation, [])
        # By an earlier table, which has not come here, it may be a standby: a producer with that table sends it no rows.
        replica.reads_since = self._hosted.epoch
        self._enter(replica)

    def await_copy(self, key: PartitionKey, incarnation: int) -> None:
        self._hosted.awaited[key] = incarnation

    def await_disk(self, key: PartitionKey, incarnation: int) -> None:
        assert self._plan.durable, f"the state of replica {key} is lost"
        self.await_copy(key, incarnation)

    def keep_order(self, key: PartitionKey, follower: Follower) -> None:
        self._hosted.followers[key] = follower

    def keep_checkpoints(self, key: PartitionKey, incarnation: int) -> None:
        self.keep_order(key, self.shelf.standby(key, incarnation, self._subscriptions.kept))

    def keep(self, key: PartitionKey, incarnation: int, checkpoint: Checkpoint, state: ReplicaState) -> None:
        """Add an awaited standby, with its first checkpoint."""
        standby = Standby(key, incarnation, self._subscriptions.kept)
        standby.begin(checkpoint, state)
        self.keep_order(key, standby)

    # ---- replicas

    def build(self, key: PartitionKey, incarnation: int, bases: Sequence[int]) -> Replica:
        """Make a fresh replica. ``bases``: the beginnings of its output logs, if it gets a copy of another replica's state."""
        stage = self._plan.stages[key.stage]
        outlets = []
        for index, edge_id in enumerate(stage.edges_out):
            edge = self._plan.edges[edge_id]
            stream = StreamId(edge_id, key.partition)
            producer = self.producer(stream, edge, incarnation, bases[index] if bases else 0)
            outlets.append(EdgeOutput(producer, edge.key, edge.columns, edge.schema))
        kind = self._hosted.kind_here(key)
        replica = Replica(stage, key.partition, incarnation, outlets, self._plan.settings, kind)
        if self._plan.durable:
            replica.compare()  # the vault may give its state to a replica that repeats its steps
        replica.waits.from_sources = {edge for edge in stage.edges_in if not self._plan.edges[edge].from_stage}
        replica.waits.from_logs = {edge for edge in replica.waits.from_sources if self._plan.brings_numbers(edge)}
        edges = [self._plan.edges[edge] for edge in stage.edges_in]
        replica.may_lose = any(map(self._plan.may_lose, edges))
        replica.waits.loses = {edge.id for edge in edges if self._plan.may_lose(edge, passed_over=True)}
        self._leaving.open(replica)
        return replica

    def add(self, replica: Replica) -> None:
        """Add a replica that was awaited, or kept as a standby, and comes to life."""
        self._hosted.followers.pop(replica.key, None)
        self._enter(replica)
        self._note()
        self._hosted.note_secondary(replica.stage.id, replica.partition)

    def _enter(self, replica: Replica) -> None:
        self.producers |= {outlet.producer.stream: outlet.producer for outlet in replica.outlets}
        for edge_id in replica.stage.edges_in:
            edge = self._plan.edges[edge_id]
            if edge.producers_known:
                replica.expect(edge_id, range(edge.producers))
            elif edge_id in self._complete:
                replica.expect(edge_id, self._complete[edge_id])
        self._hosted.replicas[replica.key] = replica
        self._subscriptions.enter(replica)
        self._turns.wake(replica.key)

    def _discard(self, key: PartitionKey) -> None:
        replica = self._hosted.replicas.pop(key)
        replica.close()
        self._leaving.close(replica)
        self._turns.forget(key)
        self._subscriptions.discard(replica)
        for outlet in replica.outlets:
            outlet.producer.log.clear()
            self.producers.pop(outlet.producer.stream, None)

    def producer(self, stream: StreamId, edge: EdgePlan, incarnation: int, base: int = 0) -> Producer:
        settings = self._plan.settings
        source = self._plan.sources[edge.source] if isinstance(edge, FromSource) else None
        return Producer(
            stream, incarnation, edge.partitions, self._plan.log_share(edge, self._workers), settings.resend_timeout,
            self.log_meter, self._hosted.worker, base, settings.step_max_rows,
            source is not None and source.seeks, edge.from_stage and self._plan.may_lose(edge, passed_over=True),
        )  # fmt: skip

    def on_edge_complete(self, edge: int, producers: list[int]) -> None:
        self._complete[edge] = producers
        for replica in self._hosted.replicas.values():
            if edge in replica.stage.edges_in:
                replica.expect(edge, producers)
                self._turns.wake(replica.key)
