"""Steps whose rows are gone from a log before they could be repeated: a source that goes on after a loss passes them over, and no
row behind them passes for one of them (design: rows-that-are-gone)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from one_worker import SCHEMA, Kept, kept, planned, rows, work

import flux
from flux.errors import DataLost
from flux.exchange.slices import with_numbers
from flux.replica.order_exchange import Diverged, on_seen, outgoing
from flux.replica.replica import EXTRA
from flux.state import standby as image
from flux.state.standby import Checkpoint, Standby
from flux.state.state_copy import StreamPosition
from flux.vault.journal import restore, whole_of
from flux.wire.messages import Data, ElementKind, Hello, OrderEntry, PartitionOrder, PartitionSeen, Passed, StepKind
from flux.worker.core import WorkerCore
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import ReplicaAt, Table

FIRST, SECOND = PartitionKey(0, 0), PartitionKey(1, 0)


def log_source(goes_on: bool = True) -> Any:
    class Log:
        row_numbers = True
        goes_on_after_loss = goes_on

        def __call__(self, partition: int, start: Any) -> Iterator[Any]:
            return iter(())

    return flux.source(Log(), SCHEMA, 1, "log", positions=True)


@flux.stage(partitions=1, schema=SCHEMA, name="passed")
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(partitions=1, schema=SCHEMA, name="odd")
def odd(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pa.array([value % 2 == 1 for value in batch.column("x").to_pylist()]))


class Read:
    """A worker with every replica; worker 5 reads the log. The replica of the first stage leads, with steps in its order that an
    earlier primary has given it."""

    def __init__(
        self,
        *orders: OrderEntry,
        first: Any = passed,
        goes_on: bool = True,
        until_hello: Callable[[], None] = lambda: None,
    ) -> None:
        then = flux.stage(partitions=1, name="kept")(Kept)
        self.core = WorkerCore(planned(first, then, source=log_source(goes_on)), 0)
        replicas = tuple(((ReplicaAt(0, 0),),) for _ in range(2))
        self.core.on_table(Table(0, replicas, ((5,),), {0: "", 5: ""}), 0.0)
        self.first, self.second = self.core.replicas[FIRST], self.core.replicas[SECOND]
        if orders:
            self._follows(self.first, orders)
        until_hello()
        list(self.core.poll(0.0))
        self.core.on_data_plane("log", Hello(0, 0, 0, 0, 5), [], 0.0)
        self.number, self.from_ = 0, 0
        self.nonce = self.core.subscriptions.streams[0, 0].feed.nonce

    @staticmethod
    def _follows(replica: Any, orders: Any) -> None:
        replica.follow()
        for entry in orders:
            replica.order.append(entry)
        replica.lead(0, [])

    def give(self, *offsets: int) -> None:
        batch = with_numbers(rows(*offsets), np.array(offsets, np.int64))
        message = Data(
            0, 0, self.nonce, self.number, self.from_, offsets[-1], [0], [len(offsets)], [1], 100, ElementKind.ROWS
        )
        self.number, self.from_ = self.number + 1, offsets[-1] + 1
        self.core.on_data_plane("log", message, [batch], 0.0)
        self.work()

    @property
    def got(self) -> list[int]:
        return [value for batch in kept(self.core, 1) for value in batch]

    def has_passed(self, below: int) -> None:
        self.core.on_data_plane("log", Passed(0, 0, self.nonce, self.number, below), [], 0.0)
        self.work()

    def work(self) -> None:
        for _ in range(5):
            list(self.core.poll(0.0))
            work(self.core)


def step(through: int, rows_: int, edge: int = 0) -> OrderEntry:
    return OrderEntry(0.0, 0.0, [(edge, 0, through)], rows=rows_)


# ---- one stage


def test_a_step_goes_on_with_the_rows_that_are_there_once_newer_rows_come() -> None:
    read = Read(step(5, 6))
    read.give(1, 4, 7)
    assert read.got == [1, 4, 7]
    assert read.first.applied == 2, "7 is a step of its own"
    assert read.first.gone == [(0, 4)]


def test_a_step_without_any_row_left_goes_on_when_none_come_any_more() -> None:
    read = Read(step(5, 6), step(7, 1))
    read.has_passed(6)
    assert (read.first.applied, read.first.gone) == (1, [(0, 6)])
    read.has_passed(8)
    assert (read.first.applied, read.first.gone) == (2, [(0, 6), (1, 1)])
    read.give(9)
    assert read.got == [9]


def test_a_step_that_has_all_its_rows_is_repeated_as_it_was() -> None:
    read = Read(step(5, 2), step(7, 1))
    read.has_passed(3)
    read.give(2, 5, 7)
    assert read.got == [2, 5, 7]
    assert read.first.gone == []


def test_a_replica_applies_rows_that_were_gone_before_the_primary_got_them() -> None:
    """Lose a reader that has given row 3 to this replica, and let the log lose the row. The primary got rows 2 and 5
    from the next reader, and has ordered them as one step. The order names row 5 only, so this replica cannot tell
    which row is too many. The query ended with NonDeterministicInputError, which advises to sort the input."""
    read = Read(step(5, 2), step(7, 1))
    read.give(2, 3, 5)
    assert (read.got, read.first.gone) == ([2, 3, 5], [(0, -1)])
    read.give(7)
    assert (read.got, read.first.gone) == ([2, 3, 5, 7], [(0, -1)])
    assert read.first.lost == {}, "nothing is reported as lost"


def test_more_rows_than_were_ordered_end_a_query_that_does_not_go_on() -> None:
    read = Read(step(5, 2), goes_on=False)
    with pytest.raises(DataLost, match=r"gone from the log.*or are other ones now"):
        read.give(2, 3, 5)


def test_a_row_too_many_does_not_make_up_for_one_that_is_gone() -> None:
    more, fewer = Read(step(5, 2), step(8, 2)), Read()
    more.give(2, 3, 5, 8)
    assert more.first.gone == [(0, -1), (1, 1)]
    assert more.first.gone_before(2) not in (0, fewer.first.gone_before(2))


def test_the_output_behind_a_step_that_gives_nothing_has_the_numbers_that_it_had() -> None:
    """Keep the numbers, because a consumer may have the output of both steps: it would take the output of the second
    step for that of the first, and drop it."""
    read = Read(step(5, 6), step(7, 2))
    read.give(6, 7)
    (outlet,) = read.first.outlets
    assert (read.first.applied, outlet.producer.next_sequence) == (2, 2)
    assert read.got == [6, 7]


def test_a_source_that_does_not_go_on_ends_the_query_and_says_what_to_do() -> None:
    read = Read(step(5, 6), goes_on=False)
    with pytest.raises(
        DataLost, match=r"stage passed, partition 0.*gone from the log.*query\.stop.*fail_on_data_loss=False"
    ):
        read.has_passed(6)
    read = Read(step(5, 6), goes_on=False)
    with pytest.raises(DataLost, match=r"fail_on_data_loss=False"):
        read.give(1, 4, 7)


def test_a_stage_whose_steps_give_no_or_several_batches_cannot_tell_the_numbers_and_ends_the_query() -> None:
    read = Read(first=odd)
    read.give(2)
    assert not read.first.steady
    state = read.first.state()
    read = Read(step(5, 6), first=odd)
    read.first.steady = state["steady"]
    with pytest.raises(DataLost, match=r"no batch of output or several.*another checkpointLocation"):
        read.give(7)


def test_whether_the_numbers_can_be_told_travels_with_the_state() -> None:
    read, other = Read(step(5, 6)), Read()
    read.give(1, 4)
    read.has_passed(6)
    read.first.steady = False
    other.first.adopt(read.first.state())
    assert (other.first.gone, other.first.steady) == ([(0, 4)], False)


@flux.stage(partitions=1, schema=SCHEMA, name="late")
class Late(flux.Operator):
    """An operator that gives each batch and, a second later, its sum, as a sink of files marks the end of a file."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.sum = 0

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.sum += sum(batch.column("x").to_pylist())
        self.context.set_timer(self.context.now + 1.0, "late")
        return batch

    def on_timer(self, name: str) -> pa.RecordBatch:
        return rows(self.sum)


def test_a_tick_without_the_timer_that_the_rows_would_have_set_keeps_its_number() -> None:
    ticked = OrderEntry(2.0, 2.0, [], StepKind.TICK, 0)
    read = Read(step(5, 6), ticked, step(7, 1), first=Late)
    read.has_passed(6)
    (outlet,) = read.first.outlets
    assert (read.first.applied, outlet.producer.next_sequence) == (2, 2)
    read.give(7)
    assert outlet.producer.next_sequence == 3
    assert read.first.steady
    assert read.got == [7]


def took_over(*said: bool) -> Any:
    """Make a replica of the stage ``odd`` that leads behind the empty checkpoint of a standby. The lost primary has
    said to this standby, with its orders, whether each of its steps had given one batch."""
    standby = Standby(FIRST, 0)
    for first, steady in enumerate(said):
        standby.on_orders(PartitionOrder(*FIRST, 0, 1, first, [step(3 * first + 2, 2)], first, steady=steady))
    standby = image.decode(image.encode(standby), FIRST, 2)
    read = Read(first=odd, until_hello=lambda: None)
    read.first.succeed(standby.order, standby.left, standby.claim, False, standby.steady)
    read.first.lead(5, [])
    return read


def test_a_replica_believes_what_the_lost_primary_has_said_of_the_output_of_its_steps() -> None:
    """Believe the lost primary, because the replica has seen no step itself: nothing else tells that its steps do not
    give one batch each. It gave a batch for each step whose rows were gone, and waited for ever, or gave later output
    under the numbers of other output."""
    read = took_over(True, False)
    with pytest.raises(DataLost, match=r"no batch of output or several"):
        read.has_passed(4)
    read = took_over(True, True)
    read.has_passed(4)
    assert read.first.gone == [(0, 2)]


def test_a_primary_says_with_its_orders_what_its_steps_gave() -> None:
    read = Read(first=odd)
    read.first.lead(0, [ReplicaAt(3, 0)])

    def said() -> bool:
        read.first.order.peers[3].sent = 0
        (item,) = outgoing([read.first], 0.0, 1.0)[3]
        return item.steady

    read.give(1)
    assert said()
    read.give(2)
    assert not said()


def test_the_journal_knows_what_the_steps_gave() -> None:
    standby, heard = Standby(FIRST, 0), []
    standby._changed = lambda of, change: heard.append(change)
    for steady in (True, False, False):
        standby.on_orders(PartitionOrder(*FIRST, 0, 1, 0, [], 0, steady=steady))
    assert [change.item.steady for change in heard] == [True, False], "said once"
    whole, again = whole_of(standby), Standby(FIRST, 0)
    restore(again, whole, lambda kept: Checkpoint())
    assert not again.steady


# ---- the stage behind it


def test_the_stage_behind_it_goes_on_without_the_output_that_does_not_come() -> None:
    """Order a step of the second stage when the first one had all rows. The batch of the first stage has no rows for
    this step any more, and no newer batch comes: the producer says that it has passed the batch."""
    read = Read(step(5, 6))
    read._follows(read.second, [step(0, 6, edge=1)])
    read.core.subscriptions.read_from_next(read.core.subscriptions.streams[1, 0])
    read.has_passed(6)
    assert (read.second.applied, read.second.gone) == (1, [(0, 6)])
    read.give(8)
    assert read.got == [8]


def test_the_stage_behind_it_takes_the_part_of_the_output_that_is_left() -> None:
    read = Read(step(5, 6))
    read._follows(read.second, [step(0, 6, edge=1)])
    read.give(1, 4, 7)
    assert read.got == [1, 4, 7]
    assert read.second.gone == [(0, 4)]


# ---- replicas alike


@pytest.mark.parametrize(
    ("applied", "gone", "drops"),
    [(1, 4, False), (1, 0, True), (0, 0, False), (1, 3, True), (2, 4, False), (1, 4 * EXTRA, True)],
)
def test_a_replica_that_has_passed_over_other_rows_is_dropped_and_built_anew(
    applied: int, gone: int, drops: bool
) -> None:
    read = Read(step(5, 6))
    read.first.lead(0, [ReplicaAt(3, 0)])
    read.give(1, 4)
    read.has_passed(6)
    seen = PartitionSeen(0, 0, 0, 0, 1, applied, 0, 0, gone=gone)
    found = on_seen(read.first, 3, seen, 0.0)
    assert any(isinstance(each, Diverged) for each in found) is drops


# ---- any losses, and any places of checkpoints


class Recorded(Read):
    """A first life: the orders of both stages, and their states after each time that rows have come."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: dict[PartitionKey, list[OrderEntry]] = {}
        self.states: list[dict[PartitionKey, State]] = []
        for replica in (self.first, self.second):
            self.orders[replica.key] = []
            self._record(replica)
        self.note()

    def _record(self, replica: Any) -> None:
        append, orders = replica.order.append, self.orders[replica.key]

        def recorded(entry: OrderEntry) -> int:
            orders.append(entry)
            return int(append(entry))

        replica.order.append = recorded

    def note(self) -> None:
        (outlet,) = self.first.outlets
        streams = self.core.subscriptions.streams
        received = {
            FIRST: streams[0, 0].received[0],
            SECOND: streams[1, 0].received[0] if (1, 0) in streams else 0,
        }
        made = {FIRST: outlet.producer.next_sequence, SECOND: 0}
        self.states.append(
            {
                replica.key: State(
                    replica.state(), replica.applied, received[replica.key], made[replica.key], [*self.got]
                )
                for replica in (self.first, self.second)
            }
        )


class State(NamedTuple):
    replica: dict[str, Any]
    applied: int
    #: The next number that it wants.
    next: int
    #: The next number of its output.
    made: int
    got: list[int]


class Restored(Read):
    """A second life from a state of each stage, with all that was ordered in the first one."""

    def __init__(self, first: State, second: State, orders: dict[PartitionKey, list[OrderEntry]]) -> None:
        super().__init__(until_hello=lambda: self._restore(first, second, orders))

    def _restore(self, first: State, second: State, orders: dict[PartitionKey, list[OrderEntry]]) -> None:
        (outlet,) = self.first.outlets
        outlet.producer.log.begin_at(first.made, settled=True)
        for edge, replica, state in ((0, self.first, first), (1, self.second, second)):
            replica.adopt(state.replica)
            for entry in orders[replica.key][state.applied :]:
                replica.order.append(entry)
            replica.lead(0, [])
            self.core.subscriptions.adopt(replica, [], [StreamPosition(StreamId(edge, 0), state.next, 0, ())])


@pytest.mark.parametrize("seed", range(15))
def test_each_row_that_is_left_counts_once_and_none_twice_from_any_checkpoints(seed: int) -> None:
    rng = random.Random(seed)
    there = sorted(rng.sample(range(100), rng.randint(5, 60)))
    before, at = Recorded(), 0
    while at < len(there):
        few = there[at : at + rng.randint(1, 8)]
        at += len(few)
        before.give(*few)
        before.note()
    assert before.got == there
    first = rng.choice([states[FIRST] for states in before.states])
    # Output of the first stage until then is in no log here, so the second one has it.
    second = rng.choice([states[SECOND] for states in before.states if states[SECOND].next >= first.made])
    lost = set(rng.sample(there, rng.randint(0, len(there)))) if rng.random() < 0.9 else set(there)
    after = Restored(first, second, before.orders)
    left = [row for row in there if row >= first.next and row not in lost]
    while left:
        size = rng.randint(1, 9)
        after.give(*left[:size])
        left = left[size:]
    after.has_passed(100)
    after.core.subscriptions.relieve(10.0)
    after.has_passed(100)
    after.give(*range(200, 205))
    found = Counter([*second.got, *after.got])
    assert max(found.values()) == 1, "no row counts twice"
    wanted = {*second.got, *(row for row in there if row not in lost), *range(200, 205)}
    assert wanted <= set(found), f"{sorted(wanted - set(found))} are there and do not count"
