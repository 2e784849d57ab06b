"""Replicas that come to life on a worker with a state that was copied (design: copy, standby).

A replica that comes to life reads on at the end of its state. A standby that becomes primary goes on in the order that it has
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flux.dataflow.plan import Plan
from flux.host.hosted import Hosted
from flux.host.housing import Housing
from flux.host.subscriptions import Subscriptions
from flux.host.turns import Turns
from flux.replicas.copy_state import Position, ReplicaState, StateCopy, restore
from flux.replicas.kinds import keeps_checkpoints
from flux.replicas.pairing import Pairing
from flux.replicas.replica import Replica
from flux.replicas.shelf import Shelf
from flux.replicas.standby import Checkpoint, Standby
from flux.stream.producer import Producer
from flux.stream.receiver import Inbound
from partitioning.ids import PartitionKey


class Newcomers:
    """The worker, as ``transfers.Host``. ``show``: shows the newest table to a producer; ``lead``: gives a replica its role by
    that table; ``promote``: promotes the standbys that lead by it."""

    def __init__(
        self,
        plan: Plan,
        hosted: Hosted,
        housing: Housing,
        subscriptions: Subscriptions,
        turns: Turns,
        pairing: Pairing,
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

    def copied(self, replica: Replica, worker: int, incarnation: int, positions: Iterable[Position]) -> None:
        self._subscriptions.copied(replica, worker, incarnation, positions)

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

    def _read_on(self, replica: Replica, positions: Iterable[Position], now: float) -> None:
        for outlet in replica.outlets:
            self._show(outlet.producer, now)
        self._subscriptions.adopt(replica, positions)

    # ---- at a standby

    @property
    def shelf(self) -> Shelf:
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
