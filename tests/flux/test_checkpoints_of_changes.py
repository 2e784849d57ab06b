"""Checkpoints of changes, between a primary and a standby: against the checkpoint of the standby, or whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

import flux
from flux.dataflow.plan import StagePlan
from flux.errors import UserCodeError
from flux.exchange.producer import ToWorker
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.state import standby as image
from flux.state.jobs import attempt
from flux.state.receiver import StateReceiver
from flux.state.sender import Aside, StateSender, ToSender
from flux.state.standby import Checkpoint, Standby, StandbyStore
from flux.state.state_copy import ReplicaState, StateCopy, StreamPosition
from flux.wire.messages import Install, Installed, OrderEntry, PartitionOrder
from flux.wire.parts import PartLimits
from partitioning.ids import STANDBY, PartitionKey, StreamId
from partitioning.table import ReplicaAt

SCHEMA = pa.schema([("word", pa.string())])
KEY = PartitionKey(0, 3)
LIFE = 7
ONE, TWO = 1, 2
FILLER = b"f" * 5000


class Noted(flux.Operator):
    """An operator that keeps its notes. Its changes are the notes since the last ones were taken."""

    def open(self, context: flux.Context) -> None:
        self.state: dict[str, bytes] = {"filler": FILLER}
        self.since: dict[str, bytes] = {}
        self.knows = True

    def note(self, name: str, value: bytes) -> None:
        self.state[name] = self.since[name] = value

    def process(self, batch: pa.RecordBatch) -> None:
        pass

    def snapshot(self) -> Any:
        return self.state

    def restore(self, snapshot: Any) -> None:
        self.state = snapshot

    def changes(self) -> Any:
        since, self.since = self.since, {}
        return since if self.knows else None

    def apply_changes(self, changes: Any) -> None:
        if "no base" in changes:
            raise KeyError("no base")
        self.state |= changes

    def state_bytes(self) -> int:
        return len(FILLER)


class Host:
    def __init__(self) -> None:
        self.replicas: dict[PartitionKey, Replica] = {}
        self.awaited: dict[PartitionKey, int] = {}
        self.followers: dict[PartitionKey, Any] = {}
        self.standby_store = StandbyStore()
        self.led: list[StateCopy | None] = []

    def snapshot_classes(self, key: PartitionKey) -> tuple[type, ...]:
        return ()

    def inbounds_of(self, replica: Replica) -> Iterable[Any]:
        return []

    def goes_on(self, key: PartitionKey) -> None:
        pass

    def fitted(self, key: PartitionKey, state: StateCopy) -> StateCopy:
        return state

    def build(self, key: PartitionKey, incarnation: int, state: StateCopy | None) -> Replica:
        return replica_of()

    def fail(self, key: PartitionKey, error: UserCodeError) -> None:
        raise error

    def took_over(self, replica: Replica, state: StateCopy | None, standby: Standby, now: float) -> None:
        self.replicas[KEY] = replica
        self.led.append(state)


def replica_of() -> Replica:
    stage = StagePlan(0, "noted", 4, 3, (), Noted, (SCHEMA,), None, (0,), (), recovery=STANDBY)
    return Replica(stage, KEY.partition, 0, [], Settings.of())


class Scene:
    """A primary, and two workers with a standby each. Nothing travels unless it is carried."""

    def __init__(self, limits: PartLimits | None = None) -> None:
        limits = limits or PartLimits(part_bytes=1000)
        self.source = Host()
        self.sender = StateSender(self.source, b"secret", 1.0, lambda: 0.0, limits)  # type: ignore[arg-type]
        self.primary = self.source.replicas[KEY] = replica_of()
        self.operator: Any = self.primary.operator
        self.hosts = {worker: Host() for worker in (ONE, TWO)}
        self.receivers = {
            worker: StateSender(host, b"secret", 1.0, lambda: 0.0, limits)  # type: ignore[arg-type]
            for worker, host in self.hosts.items()
        }
        for host in self.hosts.values():
            host.followers[KEY] = Standby(KEY, LIFE)
        self.lead(5)
        self.aside: deque[tuple[StateSender, Aside]] = deque()
        self.parts: deque[ToWorker] = deque()
        self.sent: dict[int, int] = {}

    def lead(self, term: int) -> None:
        self.primary.follow()
        self.primary.lead(term, [ReplicaAt(worker, LIFE, True, STANDBY) for worker in (ONE, TWO)])

    def standby(self, worker: int) -> Standby:
        found = self.hosts[worker].followers[KEY]
        assert isinstance(found, Standby)
        return found

    def step(self, name: str, value: bytes = b"v") -> None:
        self.operator.note(name, value)
        self.primary.order.append(OrderEntry(1.0, 1.0, [(0, 0, self.primary.applied)]))
        self.primary.applied += 1

    def poll(self) -> None:
        for transfers in (self.sender, *self.receivers.values()):
            for effect in list(transfers.poll(0.0)):
                if isinstance(effect, Aside):
                    self.aside.append((transfers, effect))
                elif isinstance(effect, ToSender):
                    self.answered(effect)
                else:
                    self.parts.append(effect)

    def answered(self, effect: ToSender) -> None:
        assert isinstance(effect.connection, int)
        self.sender.on_installed(effect.connection, effect.message, 0.0)

    def think(self) -> None:
        """Do all jobs that are to be done aside. Nothing travels."""
        self.poll()
        while self.aside:
            transfers, effect = self.aside.popleft()
            transfers.on_done(effect.token, attempt(effect.job), 0.0)
            self.poll()

    def carry(self) -> None:
        self.think()
        while self.parts:
            part = self.parts.popleft()
            assert isinstance(part.message, Install)
            assert part.payload is not None
            self.sent[part.message.copy] = part.message.total
            self.receivers[part.worker].incoming.on_install(part.worker, part.message, part.payload, 0.0)
            self.think()

    def checkpoint(self, worker: int) -> int:
        """Send a checkpoint to this worker, and return the bytes that it took."""
        self.sender.checkpoint(KEY, worker)
        self.carry()
        self.sender.validate()
        return self.sent[max(self.sent)]

    def commit(self, worker: int) -> None:
        order = self.primary.order
        item = PartitionOrder(*KEY, LIFE, self.primary.leads_since, 0, order.since(0), order.end)
        assert self.standby(worker).on_orders(item)
        self.standby(worker).validate()

    def led_by(self, worker: int) -> dict[str, bytes]:
        """Let this standby take over, and return the state that its operator has then."""
        self.commit(worker)
        self.receivers[worker].incoming.promote(self.standby(worker), 9, 0.0)
        self.think()
        operator: Any = self.hosts[worker].replicas[KEY].operator
        state: dict[str, bytes] = operator.state
        return {name: value for name, value in state.items() if name != "filler"}


@pytest.fixture(params=["at once", "aside"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(
        PartLimits(part_bytes=1000) if request.param == "at once" else PartLimits(part_bytes=1000, inline_bytes=0)
    )


def test_the_first_checkpoint_is_whole_and_the_next_ones_are_what_has_changed(scene: Scene) -> None:
    scene.step("a")
    assert scene.checkpoint(ONE) > len(FILLER)
    for number, name in enumerate("bcd", 1):
        scene.step(name)
        scene.step("a", name.encode())
        assert scene.checkpoint(ONE) < 1000
        assert len(scene.standby(ONE).beside.changes) == number  # type: ignore[union-attr]
    assert scene.led_by(ONE) == {"a": b"d", "b": b"v", "c": b"v", "d": b"v"}


def test_each_standby_gets_the_changes_since_its_own_checkpoint(scene: Scene) -> None:
    scene.step("a")
    scene.checkpoint(ONE)
    scene.step("b")
    scene.checkpoint(TWO)
    for name in "cd":
        scene.step(name)
        assert scene.checkpoint(ONE) < 1000
    scene.step("e")
    assert scene.checkpoint(TWO) < 1000
    assert scene.led_by(TWO) == dict.fromkeys("abcde", b"v")
    assert scene.led_by(ONE) == dict.fromkeys("abcd", b"v")


def test_two_at_the_same_time_are_cut_one_after_the_other(scene: Scene) -> None:
    for worker in (ONE, TWO):
        scene.step(f"whole{worker}")
        scene.checkpoint(worker)
    scene.step("b")
    scene.sender.checkpoint(KEY, ONE)
    scene.sender.checkpoint(KEY, TWO)
    scene.carry()
    for worker in (ONE, TWO):
        assert len(scene.standby(worker).beside.changes) == 1  # type: ignore[union-attr]
        assert scene.led_by(worker)["b"] == b"v"


def test_changes_stay_beside_until_their_steps_are_committed(scene: Scene) -> None:
    scene.step("a")
    scene.checkpoint(ONE)
    scene.commit(ONE)
    standby = scene.standby(ONE)
    scene.step("b")
    scene.checkpoint(ONE)
    assert (standby.checkpoint.step, len(standby.checkpoint.changes)) == (1, 0)
    assert standby.beside is not None
    assert standby.beside.data is standby.checkpoint.data, "what they are the changes of is kept once"
    scene.commit(ONE)
    assert (standby.checkpoint.step, len(standby.checkpoint.changes)) == (2, 1)


def test_a_checkpoint_that_did_not_arrive_is_followed_by_a_whole_one(scene: Scene) -> None:
    scene.step("a")
    scene.checkpoint(ONE)
    scene.step("b")
    scene.sender.checkpoint(KEY, ONE)
    scene.think()
    scene.parts.clear()
    scene.hosts[ONE].followers[KEY] = Standby(KEY, LIFE + 1)
    scene.primary.lead(5, [ReplicaAt(ONE, LIFE + 1, True, STANDBY), ReplicaAt(TWO, LIFE, True, STANDBY)])
    scene.think()
    scene.step("c")
    assert scene.checkpoint(ONE) > len(FILLER)


def test_a_standby_that_has_lost_what_they_are_the_changes_of_gets_a_whole_one_at_once(scene: Scene) -> None:
    scene.step("a")
    scene.checkpoint(ONE)
    scene.standby(ONE).beside = None
    scene.step("b")
    assert scene.checkpoint(ONE) > len(FILLER)
    assert scene.led_by(ONE) == {"a": b"v", "b": b"v"}


def test_what_they_are_the_changes_of_may_be_lost_while_they_travel(scene: Scene) -> None:
    scene.step("a")
    scene.checkpoint(ONE)
    scene.step("b", b"x" * 1200)
    scene.sender.checkpoint(KEY, ONE)
    scene.think()
    first = scene.parts.popleft()
    assert isinstance(first.message, Install)
    assert first.message.base >= 0
    scene.receivers[ONE].incoming.on_install(ONE, first.message, first.payload or b"", 0.0)
    scene.standby(ONE).beside = None
    scene.carry()
    assert scene.led_by(ONE) == {"a": b"v", "b": b"x" * 1200}


def test_changes_of_the_same_number_of_another_term_are_not_taken() -> None:
    scene = Scene()
    scene.step("a")
    scene.checkpoint(ONE)
    standby = scene.standby(ONE)
    assert standby.beside is not None
    later = Checkpoint(2, memoryview(b"changes"), term=6, number=standby.beside.number + 1, base=standby.beside.number)
    assert not standby.take(later)
    assert standby.take(Checkpoint(2, memoryview(b"changes"), term=5, number=later.number, base=later.base))


def test_a_new_term_begins_with_a_whole_one(scene: Scene) -> None:
    scene.step("a")
    scene.checkpoint(ONE)
    scene.lead(6)
    scene.step("b")
    assert scene.checkpoint(ONE) > len(FILLER)
    scene.step("c")
    assert scene.checkpoint(ONE) < 1000


def test_an_operator_that_does_not_know_what_has_changed_gives_all(scene: Scene) -> None:
    for worker in (ONE, TWO):
        scene.step(f"whole{worker}")
        scene.checkpoint(worker)
    scene.operator.knows = False
    scene.step("b")
    assert scene.checkpoint(ONE) > len(FILLER)
    scene.operator.knows = True
    scene.step("c")
    assert scene.checkpoint(TWO) > len(FILLER), "what has changed before is not known for it either"
    scene.step("d")
    assert scene.checkpoint(ONE) < 1000
    assert scene.led_by(ONE).keys() == {"whole1", "whole2", "b", "c", "d"}
    assert scene.led_by(TWO).keys() == {"whole1", "whole2", "b", "c"}


def test_changes_of_more_than_half_of_the_state_are_not_worth_it(scene: Scene) -> None:
    scene.step("a")
    scene.checkpoint(ONE)
    scene.step("b", b"x" * len(FILLER))
    assert scene.checkpoint(ONE) > 2 * len(FILLER)
    assert not scene.primary.frozen
    scene.step("c")
    assert scene.checkpoint(ONE) < 1000
    assert scene.led_by(ONE).keys() == {"a", "b", "c"}


def test_after_so_many_a_whole_one_comes() -> None:
    scene = Scene(PartLimits(changes_max=2))
    sizes = []
    for step in range(6):
        scene.step(str(step))
        sizes.append(scene.checkpoint(ONE) > len(FILLER))
    assert sizes == [True, False, False, True, False, False]


def test_a_forged_base_is_seen() -> None:
    """Sign the number of the checkpoint that changes apply to, as well as the changes."""
    scene = Scene()
    for worker in (ONE, ONE):
        scene.step("a")
        scene.checkpoint(worker)
    scene.step("b")
    scene.sender.checkpoint(KEY, ONE)
    scene.think()
    incoming: StateReceiver = scene.receivers[ONE].incoming
    standby = scene.standby(ONE)
    standby.checkpoint = Checkpoint(0, memoryview(b"other"), term=5, number=0)
    for part in scene.parts:
        assert isinstance(part.message, Install)
        values = {name: getattr(part.message, name) for name in part.message.__struct_fields__}
        incoming.on_install(ONE, Install(**(values | {"base": 0})), part.payload or b"", 0.0)
    assert incoming._counters.refused == 1
    assert standby.beside is not None
    assert len(standby.beside.changes) == 1


def test_a_failure_of_apply_changes_is_the_operators() -> None:
    scene = Scene()
    scene.step("a")
    scene.checkpoint(ONE)
    scene.step("no base")
    scene.checkpoint(ONE)
    with pytest.raises(UserCodeError, match=r"apply_changes\(\) raised KeyError"):
        scene.led_by(ONE)


def test_an_image_holds_all_pieces() -> None:
    scene = Scene()
    for name in "abc":
        scene.step(name)
        scene.checkpoint(ONE)
    scene.commit(ONE)
    kept = scene.standby(ONE).checkpoint
    back = image.decode(image.encode(scene.standby(ONE)), KEY, LIFE).checkpoint
    assert [bytes(piece) for piece in back.pieces] == [bytes(piece) for piece in kept.pieces]
    assert len(back.pieces) == 3
    assert (back.step, back.term, back.number, back.next) == (kept.step, kept.term, kept.number, kept.next)


def test_an_answer_to_an_earlier_copy_says_nothing_of_a_later_one() -> None:
    scene = Scene()
    scene.step("a")
    scene.checkpoint(ONE)
    scene.sender.on_installed(ONE, Installed(*KEY, LIFE, 1, 0, False, lacks=True), 0.0)
    scene.step("b")
    assert scene.checkpoint(ONE) < 1000


def test_positions_are_those_of_the_newest_piece() -> None:
    about: dict[str, object] = {"applied": 4, "now": 2.0}
    base = Checkpoint(2, memoryview(b"whole"), (), 1, 1, {StreamId(0, 0): 2}, 1.0)
    piece = Checkpoint.of(
        memoryview(b"changes"), ReplicaState(about, (StreamPosition(StreamId(0, 0), 4, 0, ()),), ()), 1, 2, base=1
    )
    both = piece.after(base)
    assert (both.step, both.next, both.at, both.number) == (4, {StreamId(0, 0): 4}, 2.0, 2)
    assert both.nbytes == len(b"whole") + len(b"changes")
