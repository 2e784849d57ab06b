"""Copies of state that arrive at a worker, as a state machine without I/O (design: copy, standby).

Parts are joined and checked. A replica is made of them, or, for a standby, they are kept as a checkpoint. Changes since a
checkpoint are kept with that checkpoint; a standby without it answers that it lacks it. A standby that becomes primary restores
its checkpoint.

``Restoration`` gives operators their state back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from flux.errors import ProtocolError, UserCodeError
from flux.exchange.feed import Counters
from flux.replica.kinds import Follower
from flux.replica.replica import Replica
from flux.state import standby as image
from flux.state.phases import InEvent, InPhase, after_in
from flux.state.standby import Checkpoint, Standby, StandbyStore
from flux.state.state_copy import ReplicaState, StateCopy, decode, decode_state, joined, restored
from flux.wire.handshake import MAC_BYTES, mac, same
from flux.wire.messages import Install
from partitioning.ids import PartitionKey

Aside = Callable[[str, PartitionKey, Callable[[], Any], Callable[[Any, float], None]], None]
#: The replica, the state that it has got, and the time.
Alive = Callable[[Replica, StateCopy, float], None]


class ReplicaBuilder(Protocol):
    def build(self, key: PartitionKey, incarnation: int, state: StateCopy | None) -> Replica:
        """Build a replica that no other part of the worker knows of yet."""

    def fitted(self, key: PartitionKey, state: StateCopy) -> StateCopy:
        """Return a state without the output of edges that are removed."""

    def fail(self, key: PartitionKey, error: UserCodeError) -> None:
        """Take an error of the user's code in a replica that is made again. Raises it, unless only the stage ends."""


class Restoration:
    """The replicas of one worker on their way to life, whose operators get back a state (design: copy).

    A large state is given to another thread as ``Aside`` if the operator allows it, so that other partitions of the worker go on
    meanwhile."""

    def __init__(self, host: ReplicaBuilder, aside: Aside) -> None:
        self._host = host
        self._aside = aside
        self._waiting: dict[int, Replica] = {}

    def begin(
        self, key: PartitionKey, incarnation: int, state: StateCopy, inline: bool, wanted: Callable[[], bool], then: Alive,
        now: float,
    ) -> None:  # fmt: skip
        """Build a replica with this state, and bring it to life (``then``), if it is ``wanted`` when it is done. ``inline``:
        the state is small, so do it at once."""
        state = self._host.fitted(key, state)
        try:
            replica = self._host.build(key, incarnation, state)
        except UserCodeError as error:
            self._host.fail(key, error)
            return
        stateful = state.snapshot is not None or bool(state.changes)
        self._waiting[id(replica)] = replica
        restore, alive = partial(_restored, state, replica), partial(self._alive, replica, wanted, then)
        if stateful and replica.operator.restores_in_background and not inline:
            self._aside("restore", key, restore, alive)
        else:
            alive(restore(), now)

    def _alive(
        self, replica: Replica, wanted: Callable[[], bool], then: Alive, state: StateCopy | UserCodeError, now: float
    ) -> None:  # fmt: skip
        del self._waiting[id(replica)]
        if wanted() and not isinstance(state, UserCodeError):
            then(replica, state, now)
            return
        replica.close()
        if wanted() and isinstance(state, UserCodeError):
            self._host.fail(replica.key, state)

    def close(self) -> None:
        """End operators that were about to come to life. No job runs aside any more."""
        for replica in self._waiting.values():
            replica.close()
        self._waiting.clear()


def _restored(state: StateCopy, replica: Replica) -> StateCopy | UserCodeError:
    """Return the state as ``restored`` does, or the error of the operator that was to take it."""
    try:
        return restored(state, replica)
    except UserCodeError as error:
        return error


_ABOUT = struct.Struct("!5q")


class ReceiverHost(Protocol):
    """The worker, as its ``StateReceiver`` sees it."""

    replicas: dict[PartitionKey, Replica]
    #: Incarnations of replicas that are placed here and have no state yet.
    awaited: dict[PartitionKey, int]
    #: Replicas without an operator.
    followers: dict[PartitionKey, Follower]

    def snapshot_classes(self, key: PartitionKey) -> tuple[type, ...] | None:
        """Return the ``Operator.snapshot_classes`` of that stage."""

    def build(self, key: PartitionKey, incarnation: int, state: StateCopy | None) -> Replica:
        """Make a replica that is not registered anywhere yet."""

    def fitted(self, key: PartitionKey, state: StateCopy) -> StateCopy:
        """Return a state without the output of edges that are removed."""

    def fail(self, key: PartitionKey, error: UserCodeError) -> None:
        """Take an error of the user's code in a replica that is made again. Raises it, unless only the stage ends."""

    @property
    def standby_store(self) -> StandbyStore:
        """The store in which the standbys of this worker keep checkpoints."""

    def keeps_checkpoints(self, key: PartitionKey) -> bool:
        """Tell whether the awaited replica has no operator."""

    def begins_on_disk(self, key: PartitionKey) -> bool:
        """Tell whether the awaited replica comes from the vault, as everything that a standby holds."""

    def came_to_life(self, replica: Replica, state: StateCopy, now: float) -> None:
        """Add an awaited replica whose operator has got its state."""

    def keep(self, key: PartitionKey, incarnation: int, checkpoint: Checkpoint, state: ReplicaState) -> None:
        """Add an awaited replica without an operator, with its first checkpoint."""

    def came_from_vault(self, standby: Standby) -> int | None:
        """Add a standby in place of an awaited replica that begins with the vault's state. Return the epoch in which it is to
        take over; None: it is not primary."""

    def took_over(self, replica: Replica, state: StateCopy | None, standby: Standby, now: float) -> None:
        """Add a replica, in place of the standby from whose checkpoint it was restored. None: it has the empty state."""


@dataclass
class IncomingCopy:
    """A copy that arrives at this worker."""

    incarnation: int
    term: int
    number: int
    #: Bytes of the whole copy.
    total: int
    connection: Hashable
    #: It has the changes since the copy of this number; -1: it is whole.
    base: int = -1
    parts: list[bytes | memoryview] = field(default_factory=list)
    #: Bytes that are here.
    received: int = 0
    phase: InPhase = InPhase.RECEIVING

    def on(self, event: InEvent) -> None:
        self.phase = after_in(self.phase, event)


def sign(secret: bytes, about: tuple[int, int, int, int, int], data: memoryview) -> bytes:
    """Sign the copy of a replica. ``about``: stage, partition, incarnation, number of the copy, and number of the copy to which
    it has the changes; -1: it is whole."""
    return mac(secret, b"copy of state", _ABOUT.pack(*about), data)


class StateReceiver:
    """The arriving copies of one worker.

    ``answer`` is called with the connection by which a part arrived, the number of bytes that are here, whether the replica
    lives, and whether the checkpoint is lacking to which the copy has the changes. ``inline_bytes``: as in
    ``parts.PartLimits``. Copies without a valid signature are counted as ``refused``."""

    def __init__(
        self,
        host: ReceiverHost,
        secret: bytes,
        inline_bytes: int,
        aside: Aside,
        answer: Callable[..., None],
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._host = host
        self._secret = secret
        self._inline_bytes = inline_bytes
        self._aside = aside
        self._answer = answer
        self._incoming: dict[PartitionKey, IncomingCopy] = {}
        self._restoring = Restoration(host, aside)

    def on_install(self, connection: Hashable, message: Install, part: bytes | memoryview, now: float) -> bool:
        """Take a part of a copy. Return False if it is for another incarnation of the replica."""
        key, name = PartitionKey(message.stage, message.partition), (message.term, message.copy)
        standby = self._standby(key, message.incarnation)
        if standby is not None:
            if standby.leads or message.term < standby.order.term:
                return False
            if not standby.wants(*name):  # it has this checkpoint already, or a newer one
                self._answer(connection, message, message.total, True)
                return True
            if message.base >= 0 and standby.holds(message.term, message.base) is None:
                self._answer(connection, message, 0, False, lacks=True)
                return True
        elif message.base >= 0:
            return False  # changes, and nothing here to which they apply
        elif self._host.awaited.get(key) != message.incarnation:
            known = self._host.replicas.get(key)
            if known is None or known.incarnation != message.incarnation:
                return False
            self._answer(connection, message, message.total, True)
            return True
        found = self._incoming.get(key)
        if found is not None and (found.incarnation != message.incarnation or (found.term, found.number) < name):
            self._forget(key)
            found = None
        if found is None:
            found = self._incoming[key] = IncomingCopy(
                message.incarnation, *name, message.total, connection, message.base
            )  # fmt: skip
        elif (found.term, found.number) > name:
            return False
        found.connection = connection
        receiving = found.phase is InPhase.RECEIVING
        if message.offset == found.received and receiving:
            if message.offset + len(part) > found.total or message.total != found.total:
                raise ProtocolError(f"part of a copy of {found.total} bytes goes to {message.offset + len(part)}")
            found.parts.append(part)
            found.received += len(part)
        self._answer(connection, message, found.received, False)
        if found.received == found.total and receiving:
            found.on(InEvent.WHOLE)
            if standby is not None or self._host.keeps_checkpoints(key):
                self._keep(key, found, message, now)
            elif self._host.begins_on_disk(key):
                self._revive(key, found, message, now)
            else:
                self._restore(key, found, message, now)
        return True

    def _standby(self, key: PartitionKey, incarnation: int) -> Standby | None:
        """Return the standby that the copy of a state is for, if it is here already."""
        follower = self._host.followers.get(key)
        return follower if isinstance(follower, Standby) and follower.incarnation == incarnation else None

    def _forget(self, key: PartitionKey) -> None:
        """Forget a copy that is on its way. The results of its jobs in other threads will be ignored."""
        self._incoming.pop(key).on(InEvent.DROPPED)

    def _signed_data(self, key: PartitionKey, found: IncomingCopy) -> memoryview | None:
        """Return all parts in one piece; None: the signature is wrong."""
        whole = joined(found.parts)
        found.parts.clear()  # in this thread, because it takes long to free large parts
        about = (*key, found.incarnation, found.number, found.base)
        data, signature = whole[:-MAC_BYTES], whole[-MAC_BYTES:]
        return data if same(signature, sign(self._secret, about, data)) else None

    def _usable(self, key: PartitionKey, found: IncomingCopy, read: Any) -> bool:
        """Tell whether the result ``read`` from a copy can be used. It is None, and useless, if the signature is wrong."""
        if read is None:
            self._counters.refused += 1
        if found.phase is InPhase.FORGOTTEN:
            return False
        if read is None:
            self._forget(key)
            return False
        found.on(InEvent.DECODED)
        return True

    def _restore(self, key: PartitionKey, found: IncomingCopy, message: Install, now: float) -> None:
        classes = self._host.snapshot_classes(key)

        def read() -> StateCopy | None:
            data = self._signed_data(key, found)
            return None if data is None else decode(data, classes)

        def build(state: StateCopy | None, now: float) -> None:
            if self._usable(key, found, state) and state is not None:
                wanted = lambda: found.phase is not InPhase.FORGOTTEN  # noqa: E731
                self._restoring.begin(key, found.incarnation, state, inline, wanted, live, now)

        def live(replica: Replica, state: StateCopy, now: float) -> None:
            found.on(InEvent.RESTORED)
            del self._incoming[key]
            replica.copy_bytes = found.total
            self._host.came_to_life(replica, state, now)
            self._answer(found.connection, message, found.total, True)

        inline = found.total <= self._inline_bytes
        self._read("decode", key, inline, read, build, now)

    def _read(
        self, what: str, key: PartitionKey, inline: bool, read: Callable[[], Any], then: Callable[[Any, float], None],
        now: float,
    ) -> None:  # fmt: skip
        if inline:
            then(read(), now)
        else:
            self._aside(what, key, read, then)

    # ---- standbys

    def _keep(self, key: PartitionKey, found: IncomingCopy, message: Install, now: float) -> None:
        """Keep a checkpoint whose parts are all here."""

        def read() -> tuple[Checkpoint, ReplicaState] | None:
            data = self._signed_data(key, found)
            if data is None:
                return None
            state = decode_state(data)
            made = Checkpoint.of(data, state, found.term, found.number, found.base)
            return self._host.standby_store.put(key, made), state

        def keep(kept: tuple[Checkpoint, ReplicaState] | None, now: float) -> None:
            if not self._usable(key, found, kept) or kept is None:
                if kept is not None:
                    self._host.standby_store.landed(key, kept[0])
                return
            found.on(InEvent.RESTORED)
            del self._incoming[key]
            standby = self._standby(key, found.incarnation)
            if standby is not None:
                used = standby.take(kept[0])
                self._host.standby_store.landed(key, kept[0])
                if found.base >= 0 and not used:
                    self._answer(found.connection, message, 0, False, lacks=True)
                    return
            else:
                self._host.keep(key, found.incarnation, *kept)
            self._answer(found.connection, message, found.total, True)

        self._read("decode", key, found.total <= self._inline_bytes, read, keep, now)

    def _revive(self, key: PartitionKey, found: IncomingCopy, message: Install, now: float) -> None:
        """Let a replica take over whose whole image has come from the vault: it is the primary."""

        def read() -> Standby | None:
            data = self._signed_data(key, found)
            return None if data is None else image.decode(data, key, found.incarnation)

        def lead(standby: Standby | None, now: float) -> None:
            if self._usable(key, found, standby) and standby is not None:
                found.on(InEvent.RESTORED)
                del self._incoming[key]
                self._answer(found.connection, message, found.total, True)
                standby.from_vault = True
                epoch = self._host.came_from_vault(standby)
                if epoch is not None:
                    self.promote(standby, epoch, now)

        self._read("decode", key, found.total <= self._inline_bytes, read, lead, now)

    def promote(self, standby: Standby, epoch: int, now: float) -> None:
        """Restore the checkpoint of a standby that becomes the primary."""
        key, kept = standby.key, standby.checkpoint
        standby.lead(epoch)
        if key in self._incoming:
            self._forget(key)
        data = kept.data
        if data is None:
            try:
                replica = self._host.build(key, standby.incarnation, None)
            except UserCodeError as error:
                self._host.fail(key, error)
            else:
                self._host.took_over(replica, None, standby, now)
            return
        classes = self._host.snapshot_classes(key)

        def wanted() -> bool:
            return self._host.followers.get(key) is standby

        def build(state: StateCopy, now: float) -> None:
            if wanted():
                self._restoring.begin(key, standby.incarnation, state, inline, wanted, live, now)

        def live(replica: Replica, state: StateCopy, now: float) -> None:
            replica.copy_bytes = kept.nbytes
            self._host.took_over(replica, state, standby, now)

        inline = kept.nbytes <= self._inline_bytes
        self._read("decode", key, inline, partial(decode, data, classes, kept.changes), build, now)

    # ---- both

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        for key, found in self._incoming.items():
            assert self._is_for(key, found), f"a copy comes for {key}, which is not awaited"
            receiving = found.phase is InPhase.RECEIVING
            assert (found.received < found.total) == receiving, f"{found.received} of {found.total}, {found.phase}"

    def on_table(self) -> None:
        """Forget copies for replicas that are no longer placed here."""
        for key in [key for key, found in self._incoming.items() if not self._is_for(key, found)]:
            self._forget(key)

    def _is_for(self, key: PartitionKey, found: IncomingCopy) -> bool:
        """Tell whether a replica here waits for this copy."""
        awaited = self._host.awaited.get(key) == found.incarnation
        return awaited or self._standby(key, found.incarnation) is not None

    def close(self) -> None:
        """Close operators that were about to come to life. No job runs in another thread any more."""
        self._restoring.close()
