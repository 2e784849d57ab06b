"""Copies of state between two workers: taken aside, sent in parts, put together, and brought to life."""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

import flux
from flux.dataflow.plan import StagePlan
from flux.errors import ProtocolError, UserCodeError
from flux.exchange.producer import ToWorker
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.state.jobs import JobFailed, attempt
from flux.state.receiver import sign
from flux.state.sender import Aside, StateSender, ToSender
from flux.state.state_copy import StateCopy
from flux.wire.control import CopyState
from flux.wire.messages import Install, Installed, OrderEntry
from flux.wire.parts import PartLimits
from partitioning.table import ReplicaAt

SCHEMA = pa.schema([("word", pa.string())])
SOURCE, TARGET, INCARNATION = 0, 1, 7
KEY = (0, 3)
ORDER = CopyState(stage=0, partition=3, worker=TARGET, incarnation=INCARNATION)
AGAIN_S = 1.0
#: Ten parts of a state of some hundred bytes, two under way, everything in the background.
SMALL = PartLimits(part_bytes=50, parts=2, inline_bytes=0)


class Words(flux.Operator):
    """An operator that keeps a text of known size."""

    restores_in_background = True
    broken = False

    def open(self, context: flux.Context) -> None:
        self.text, self.closed = b"", False

    def process(self, batch: pa.RecordBatch) -> None:
        pass

    def snapshot(self) -> Any:
        return self.text

    def restore(self, snapshot: Any) -> None:
        if self.broken:
            raise ValueError("not my state")
        self.text = snapshot

    def state_bytes(self) -> int:
        return len(self.text)

    def close(self) -> None:
        self.closed = True


class Host:
    def __init__(self) -> None:
        self.replicas: dict[tuple[int, int], Replica] = {}
        self.awaited: dict[tuple[int, int], int] = {}
        self.followers: dict[tuple[int, int], Any] = {}
        self.built: list[Replica] = []
        self.went_on: list[tuple[int, int]] = []
        #: Errors of user code end a stage, and not the query.
        self.stages_fail = False
        self.failed: list[UserCodeError] = []

    def snapshot_classes(self, key: tuple[int, int]) -> tuple[type, ...]:
        return ()

    def inbounds_of(self, replica: Replica) -> Iterable[Any]:
        return []

    def note_copy(self, replica: Replica, *about: Any) -> None:
        pass

    def goes_on(self, key: tuple[int, int]) -> None:
        self.went_on.append(key)

    def fitted(self, key: tuple[int, int], state: StateCopy) -> StateCopy:
        return state

    def build(self, key: tuple[int, int], incarnation: int, state: StateCopy | None) -> Replica:
        self.built.append(replica_of(incarnation))
        return self.built[-1]

    def fail(self, key: tuple[int, int], error: UserCodeError) -> None:
        if not self.stages_fail:
            raise error
        self.failed.append(error)

    def came_to_life(self, replica: Replica, state: StateCopy, now: float) -> None:
        del self.awaited[KEY]
        replica.adopt(state.state.replica)
        self.replicas[KEY] = replica

    def keeps_checkpoints(self, key: tuple[int, int]) -> bool:
        return False

    def begins_on_disk(self, key: tuple[int, int]) -> bool:
        return False


def replica_of(incarnation: int) -> Replica:
    stage = StagePlan(0, "words", 4, 2, (), Words, (SCHEMA,), None, (0,), ())
    return Replica(stage, KEY[1], incarnation, [], Settings.of())


class Two:
    """A primary's worker and the worker of a new replica. Nothing is carried between them unless a test says so."""

    def __init__(self, limits: PartLimits = SMALL, text: bytes = b"state" * 60) -> None:
        self.source, self.target = Host(), Host()
        clock = iter(range(1000)).__next__
        self.sender = StateSender(self.source, b"secret", AGAIN_S, clock, limits)
        self.receiver = StateSender(self.target, b"secret", AGAIN_S, clock, limits)
        self.primary = self.source.replicas[KEY] = replica_of(0)
        self.primary.operator.text = text  # type: ignore[attr-defined]
        self.primary.lead(0, [ReplicaAt(TARGET, INCARNATION, False)])
        for step in range(3):
            self.primary.order.append(OrderEntry(step, step, [(0, 0, step)]))
        self.primary.applied = 2
        self.target.awaited[KEY] = INCARNATION
        self.aside: deque[tuple[StateSender, Aside]] = deque()
        self.parts: deque[ToWorker] = deque()
        self.answers: deque[Installed] = deque()
        self.now = 0.0

    @property
    def text(self) -> bytes | None:
        """Return the state of the new replica; None: it has not come to life."""
        replica = self.target.replicas.get(KEY)
        return None if replica is None else replica.operator.text  # type: ignore[attr-defined]

    def poll(self) -> None:
        for transfers in (self.sender, self.receiver):
            for effect in transfers.poll(self.now):
                if isinstance(effect, Aside):
                    self.aside.append((transfers, effect))
                elif isinstance(effect, ToSender):
                    self.answers.append(effect.message)
                else:
                    assert len(effect.payload or b"") <= SMALL.part_bytes or transfers._limits is not SMALL
                    self.parts.append(effect)

    def do_aside(self, what: str) -> None:
        self.poll()
        transfers, effect = self.aside.popleft()
        assert effect.what == what
        transfers.on_done(effect.token, attempt(effect.job), self.now)
        self.poll()

    def deliver(self, part: ToWorker) -> None:
        assert isinstance(part.message, Install)
        assert part.payload is not None
        self.receiver.incoming.on_install("there", part.message, part.payload, self.now)
        self.poll()

    def carry(self, until: Callable[[], object] = lambda: False) -> None:
        """Deliver parts and answers until none is left, or until ``until`` holds."""
        self.poll()
        while (self.parts or self.answers) and not until():
            while self.parts:
                self.deliver(self.parts.popleft())
            while self.answers:
                self.sender.on_installed(TARGET, self.answers.popleft(), self.now)
            self.poll()

    def copied(self) -> Two:
        self.sender.on_copy_state(ORDER)
        self.do_aside("room")
        self.do_aside("copy")
        self.do_aside("sign")
        return self

    def finish(self) -> None:
        self.carry()
        self.do_aside("decode")
        self.do_aside("restore")
        self.carry()


def test_a_state_arrives_and_only_then_the_new_replica_is_told_the_order() -> None:
    two = Two().copied()
    two.carry()
    assert two.text is None
    assert two.primary.order.peers[TARGET].copying
    two.finish()
    assert two.text == b"state" * 60
    assert not two.primary.order.peers[TARGET].copying
    assert two.target.replicas[KEY].order.base == 2, "and what was ordered and not applied is with it"
    assert two.target.replicas[KEY].order.end == 3


def test_a_copy_that_is_asked_of_a_primary_which_is_still_restored_begins_when_it_is_there() -> None:
    """Begin the copy as soon as the primary is there: the controller asks again only after a while, and producers keep
    rows for the new replica meanwhile."""
    two = Two()
    del two.source.replicas[KEY]
    two.source.awaited[KEY] = 0
    two.sender.on_copy_state(ORDER)
    two.sender.on_copy_state(ORDER)
    two.poll()
    assert two.sender.active
    assert not two.aside
    two.source.replicas[KEY] = two.primary
    del two.source.awaited[KEY]
    for what in ("room", "copy", "sign"):
        two.do_aside(what)
    two.finish()
    assert two.text == b"state" * 60


def test_a_copy_that_is_asked_of_a_primary_which_never_comes_is_forgotten() -> None:
    two = Two()
    del two.source.replicas[KEY]
    two.source.awaited[KEY] = 0
    two.sender.on_copy_state(ORDER)
    del two.source.awaited[KEY]
    two.poll()
    assert not two.sender.active


def test_the_partition_stands_still_only_while_its_state_is_read() -> None:
    two = Two()
    two.sender.on_copy_state(ORDER)
    two.poll()
    assert not two.primary.frozen, "memory is got ready before"
    two.do_aside("room")
    assert two.primary.frozen
    assert not two.primary.ready(0.0)
    two.do_aside("copy")
    assert not two.primary.frozen
    assert two.source.went_on == [KEY]
    assert two.primary.order.peers[TARGET].stall_ms > 0
    assert two.primary.order.peers[TARGET].copy_bytes > 300


def test_only_a_few_parts_are_under_way() -> None:
    two = Two().copied()
    assert [part.message.offset for part in two.parts] == [0, 50]  # type: ignore[union-attr]
    two.deliver(two.parts.popleft())
    two.sender.on_installed(TARGET, two.answers.popleft(), 0.0)
    two.poll()
    assert [part.message.offset for part in two.parts] == [50, 100]  # type: ignore[union-attr]


@pytest.mark.parametrize("lost", ["parts", "answers"])
def test_what_a_broken_connection_has_lost_is_sent_again(lost: str) -> None:
    two = Two().copied()
    if lost == "answers":
        while two.parts:
            two.deliver(two.parts.popleft())
    getattr(two, lost).clear()
    two.carry()
    assert not two.parts
    two.now += AGAIN_S
    two.finish()
    assert two.text == b"state" * 60


def test_parts_that_come_without_those_before_them_are_not_taken() -> None:
    two = Two().copied()
    two.parts.popleft()
    two.carry()
    two.now += AGAIN_S
    two.finish()
    assert two.text == b"state" * 60


def test_the_news_that_the_replica_lives_is_asked_for_when_it_is_lost() -> None:
    two = Two().copied()
    two.carry()
    two.do_aside("decode")
    two.do_aside("restore")
    assert [answer.done for answer in two.answers] == [True]
    two.answers.clear()
    two.now += AGAIN_S
    two.carry()
    assert not two.primary.order.peers[TARGET].copying


def test_parts_that_come_twice_change_nothing() -> None:
    two = Two().copied()
    while two.parts:
        part = two.parts.popleft()
        two.deliver(part)
        two.deliver(part)
    two.finish()
    assert two.text == b"state" * 60


def test_a_copy_that_is_ordered_again_is_taken_once() -> None:
    two = Two().copied()
    two.sender.on_copy_state(ORDER)
    two.finish()
    assert not two.aside
    assert two.text == b"state" * 60


def test_a_copy_that_has_arrived_is_not_taken_again() -> None:
    """Ignore the question: the controller asks again until it hears that the replica has caught up, and that may cross
    the end of the copy."""
    two = Two().copied()
    two.finish()
    peer = two.primary.order.peers[TARGET]
    assert not peer.copying
    two.sender.on_copy_state(ORDER)
    two.poll()
    assert not two.aside
    assert (two.primary.frozen, peer.copying) == (0, False)


def test_a_replica_that_becomes_live_while_a_copy_for_it_is_taken_is_told_the_order() -> None:
    """Make the replica live by the report of an earlier primary, whose copy it has. Without the order nothing would be
    committed any more."""
    two = Two()
    two.sender.on_copy_state(ORDER)
    two.do_aside("room")
    assert two.primary.order.peers[TARGET].copying
    two.primary.lead(0, [ReplicaAt(TARGET, INCARNATION, True)])
    two.do_aside("copy")
    assert not two.parts
    assert not two.primary.order.peers[TARGET].copying


def test_a_replica_that_is_live_when_its_copy_is_said_to_have_arrived_is_told_the_order() -> None:
    two = Two().copied()
    two.carry()
    two.do_aside("decode")
    two.do_aside("restore")
    two.primary.lead(0, [ReplicaAt(TARGET, INCARNATION, True)])
    while two.answers:  # before the sender looks at its copies again
        two.sender.on_installed(TARGET, two.answers.popleft(), two.now)
    assert not two.primary.order.peers[TARGET].copying


def test_a_copy_that_nobody_wants_any_more_holds_nobody_up() -> None:
    two = Two()
    two.sender.on_copy_state(ORDER)
    two.do_aside("room")
    two.primary.lead(1, [])  # the new replica was dropped while the state is being read
    two.poll()
    assert two.primary.frozen, "it is being read all the same"
    two.do_aside("copy")
    assert not two.primary.frozen
    assert not two.parts


def test_what_comes_for_a_replica_that_was_dropped_is_forgotten() -> None:
    two = Two().copied()
    two.carry()
    two.target.awaited.clear()
    two.receiver.incoming.on_table()
    two.do_aside("decode")
    assert two.target.built == []
    assert two.text is None


def test_a_replica_that_is_dropped_while_it_gets_its_state_is_closed() -> None:
    two = Two().copied()
    two.carry()
    two.do_aside("decode")
    two.target.awaited[KEY] = INCARNATION + 1  # another one is placed here
    two.receiver.incoming.on_table()
    two.do_aside("restore")
    assert two.text is None
    assert two.target.built[0].operator.closed  # type: ignore[attr-defined]


def test_a_part_for_another_life_of_the_replica_is_refused() -> None:
    two = Two().copied()
    two.target.awaited[KEY] = INCARNATION + 1
    part = two.parts.popleft()
    assert isinstance(part.message, Install)
    assert part.payload is not None
    assert not two.receiver.incoming.on_install("there", part.message, part.payload, 0.0)


def test_a_copy_of_another_primary_takes_the_place_of_the_one_that_was_not_complete() -> None:
    two = Two().copied()
    two.deliver(two.parts.popleft())
    first = replace(two.parts.popleft())
    two.sender._number += 4
    two.sender._outgoing.clear()
    two.primary.operator.text = b"newer" * 60  # type: ignore[attr-defined]
    two.copied()
    two.answers.clear()
    two.deliver(two.parts.popleft())
    two.deliver(first)  # late
    two.finish()
    assert two.text == b"newer" * 60


def test_a_part_beyond_the_end_is_malformed() -> None:
    two = Two()
    message = Install(*KEY, INCARNATION, 1, 0, 10)
    with pytest.raises(ProtocolError, match="10 bytes goes to 11"):
        two.receiver.incoming.on_install("there", message, b"x" * 11, 0.0)


class Spy:
    """An object that notices when it is unpickled."""

    noticed: list[str] = []

    def __reduce__(self) -> Any:
        return Spy.noticed.append, ("unpickled",)


@pytest.mark.parametrize("limits", [SMALL, PartLimits()], ids=["aside", "at once"])
def test_a_copy_without_the_signature_of_the_query_is_not_read(limits: PartLimits) -> None:
    """Forge a copy as a stranger inside a connection would, with all knowledge except the secret."""
    two = Two(limits)
    data = pickle.dumps(Spy())
    forged = struct.pack("<Q", len(data)) + data + b"N"
    forged += sign(b"guess", (*KEY, INCARNATION, 1, -1), memoryview(forged))
    message = Install(*KEY, INCARNATION, 1, 0, len(forged))
    assert two.receiver.incoming.on_install("there", message, forged, 0.0)
    if limits is SMALL:
        two.do_aside("decode")
    assert two.receiver.incoming._counters.refused == 1
    assert (Spy.noticed, two.target.built, two.text) == ([], [], None)
    two.copied() if limits is SMALL else two.sender.on_copy_state(ORDER)
    two.finish() if limits is SMALL else two.carry()
    assert two.text is not None, "and the true one is read"


@pytest.mark.parametrize("changed", ["partition", "incarnation", "copy"])
def test_a_signature_is_good_for_one_copy_of_one_replica(changed: str) -> None:
    two = Two().copied()
    data = b"".join(bytes(part) for part in _whole(two))
    about = {"partition": KEY[1], "incarnation": INCARNATION, "copy": 1} | {changed: 9}
    two.target.awaited[KEY[0], about["partition"]] = about["incarnation"]
    message = Install(KEY[0], about["partition"], about["incarnation"], about["copy"], 0, len(data))
    two.receiver.incoming.on_install("there", message, data, 0.0)
    two.do_aside("decode")
    assert two.receiver.incoming._counters.refused == 1
    assert two.target.built == []


def _whole(two: Two) -> list[bytes]:
    (out,) = two.sender._outgoing.values()
    assert out.parts.signature is not None
    return [bytes(out.parts.data), out.parts.signature]


def test_parts_travel_while_the_copy_is_signed() -> None:
    two = Two()
    two.sender.on_copy_state(ORDER)
    two.do_aside("room")
    two.do_aside("copy")
    two.carry()
    (found,) = two.receiver.incoming._incoming.values()
    assert found.received == found.total - 32
    two.do_aside("sign")
    two.finish()
    assert two.text == b"state" * 60


def test_a_small_state_is_copied_and_restored_at_once() -> None:
    two = Two(PartLimits())
    two.sender.on_copy_state(ORDER)
    two.carry()
    assert not two.aside
    assert two.text == b"state" * 60


def test_a_state_of_unknown_size_is_not_copied_at_once() -> None:
    two = Two(PartLimits(), text=b"")
    two.sender.on_copy_state(ORDER)
    two.do_aside("copy")
    two.do_aside("sign")
    two.carry()
    assert two.text == b""


def test_an_operator_that_cannot_take_its_state_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two().copied()
    two.carry()
    two.do_aside("decode")
    monkeypatch.setattr(Words, "broken", True)
    with pytest.raises(UserCodeError, match=r"stage words, partition 3: restore.*not my state"):
        two.do_aside("restore")
    two.receiver.incoming.close()
    assert two.target.built[0].operator.closed  # type: ignore[attr-defined]


def test_an_operator_that_cannot_take_its_state_ends_its_stage_alone_where_stages_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Two().copied()
    two.target.stages_fail = True
    two.carry()
    two.do_aside("decode")
    monkeypatch.setattr(Words, "broken", True)
    two.do_aside("restore")
    assert ["not my state" in str(error) for error in two.target.failed] == [True]
    assert two.target.built[0].operator.closed  # type: ignore[attr-defined]
    assert not two.target.replicas
    assert KEY in two.target.awaited


def test_an_operator_that_cannot_be_opened_again_ends_its_stage_alone_where_stages_may() -> None:
    two = Two().copied()
    two.target.stages_fail, error = True, UserCodeError("open() raised")

    def build(*given: Any) -> Replica:
        raise error

    two.target.build = build  # type: ignore[method-assign]
    two.carry()
    two.do_aside("decode")
    assert two.target.failed == [error]
    assert KEY in two.target.awaited


def test_an_operator_that_wants_one_thread_is_restored_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "restores_in_background", False)
    two = Two().copied()
    two.carry()
    two.do_aside("decode")
    assert not two.aside
    assert two.text == b"state" * 60


def test_a_job_that_fails_gives_its_error() -> None:
    assert isinstance(attempt(lambda: 1 / 0), JobFailed)
    assert attempt(lambda: 2) == 2
