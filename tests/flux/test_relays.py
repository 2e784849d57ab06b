"""Messages of two workers that cannot reach each other go over a third one (design: relayed-answers)."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from one_worker import SCHEMA, Kept, planned, rows
from several_workers import SeveralWorkers

import flux
from flux.dataflow.source import WorkerSource
from flux.exchange.producer import ToWorker
from flux.reach.relays import RelayedWays
from flux.windows.window import NEVER
from flux.wire.messages import (
    Ack,
    Acks,
    AppliedThrough,
    Borrow,
    Bound,
    Data,
    Orders,
    OrdersSeen,
    Relayed,
    Unordered,
    WantAck,
)
from flux.wire.statistics import RelayedLink
from flux.worker.core import WorkerCore
from flux.worker.report import stats
from partitioning.table import ReplicaAt, Table

LINK_S = 0.3
BOTH = (ReplicaAt(0, 0), ReplicaAt(1, 0))
THREE = {0: "", 1: "", 2: ""}
DIRECTIONS = [{(0, 1)}, {(1, 0)}, {(0, 1), (1, 0)}]


def ordered(endpoints: dict[int, str] = THREE) -> SeveralWorkers:
    """Make three workers: a primary on worker 0 and its secondary on worker 1, both of which get each row."""
    plan = planned(flux.stage(partitions=1, replicas=2)(Kept))
    return SeveralWorkers(plan, Table(0, ((BOTH,),), (), endpoints))


def fed(workers: SeveralWorkers, number: int, now: float) -> None:
    for feeder in workers.feeders:
        feeder.send(number, number, now=now)
    workers.pass_on(now)


def committed(workers: SeveralWorkers) -> int:
    return workers.cores[0].replicas[0, 0].order.committed


def relayed(workers: SeveralWorkers, kind: type) -> list[Relayed]:
    return [message for message in workers.of(Relayed) if isinstance(message.message, kind)]


@pytest.mark.parametrize("cut", DIRECTIONS, ids=["orders", "answers", "both"])
def test_orders_and_their_answers_go_over_a_third_worker(cut: set[tuple[int, int]]) -> None:
    workers = ordered()
    fed(workers, 0, 1.0)
    workers.go_on(1.0, 1.1)
    assert committed(workers) == 1
    workers.cut = cut
    fed(workers, 1, 1.1)
    workers.go_on(1.1, 1.1 + LINK_S - 0.05)  # orders are looked at twenty times a second
    assert (committed(workers), relayed(workers, Orders)) == (1, [])
    workers.go_on(1.1 + LINK_S, 1.1 + LINK_S + 0.2)
    assert committed(workers) == 2
    assert {(m.origin, m.over, m.to) for m in relayed(workers, Orders)} == {(0, 2, 1)}
    assert stats(workers.cores[0])["relays"] == [RelayedLink(1, 2, pytest.approx(1.4, abs=0.05))]
    fed(workers, 2, 1.7)
    workers.go_on(1.7, 1.75)
    assert committed(workers) == 3, "further orders take this way at once"


def test_orders_go_directly_again_once_an_answer_has_come_directly() -> None:
    workers = ordered()
    workers.cut = {(0, 1)}
    fed(workers, 0, 1.0)
    workers.go_on(1.0, 1.6)
    assert committed(workers) == 1
    workers.cut = set()
    fed(workers, 1, 1.7)
    workers.go_on(1.7, 2.2)  # a direct one goes with the first after a link timeout
    fed(workers, 2, 2.2)
    workers.sent.clear()
    fed(workers, 3, 2.7)
    workers.go_on(2.7, 3.0)
    assert committed(workers) == 4
    assert workers.of(Orders)
    assert workers.of(Relayed) == []
    assert "relays" not in stats(workers.cores[0])


def test_without_a_third_worker_nothing_is_relayed() -> None:
    workers = ordered({0: "", 1: ""})
    workers.cut = {(0, 1)}
    fed(workers, 0, 1.0)
    workers.go_on(1.0, 3.0)
    assert (committed(workers), workers.of(Relayed)) == (0, [])


def test_attempts_go_over_all_workers_in_turn_and_then_seldom() -> None:
    ways, workers = RelayedWays(0, 1.0), range(5)
    found = [(moment / 10, over) for moment in range(200) if (over := ways.next(2, workers, moment / 10)) >= 0]
    assert [over for _, over in found[:5]] == [1, 3, 4, 1, 3]
    gaps = [later - at for (at, _), (later, _) in zip(found, found[1:], strict=False)]
    assert max(gaps[:3]) < 0.5
    assert gaps[4:] == pytest.approx([2.0] * len(gaps[4:]))
    assert ways.next(2, [0, 2], 99.0) == -1
    assert all(ways.next(2, workers, 100.0 + 3 * number) > 0 for number in range(2000)), "a link may be down for long"


def read_in_a_worker(read: Iterator[pa.RecordBatch | None], log_bytes: int = 1 << 20) -> SeveralWorkers:
    """Make three workers: worker 0 reads a source, for a partition with one replica on worker 1."""
    source = WorkerSource("rows", lambda partition: read, 1, SCHEMA)
    plan = planned(flux.stage(partitions=1)(Kept), source=source, log_max_bytes=log_bytes)
    return SeveralWorkers(plan, Table(0, (((ReplicaAt(1, 0),),),), ((0,),), THREE), fed=())


@pytest.mark.parametrize("cut", DIRECTIONS[1:], ids=["acks", "both"])
def test_acks_of_a_source_go_over_a_third_worker(cut: set[tuple[int, int]]) -> None:
    given: list[pa.RecordBatch] = [rows(1)]
    workers = read_in_a_worker(iter(lambda: given.pop() if given else None, 0))
    reader = workers.cores[0]

    def go_on(begin: float, end: float) -> None:
        for tick in range(round((end - begin) * 20)):
            reader.read(True, begin + tick / 20)
            workers.pass_on(begin + tick / 20)

    go_on(1.0, 1.5)
    producer = reader.sources[0, 0].producers[0]
    assert (producer.log.end, len(producer.log)) == (1, 0)
    given.append(rows(2))
    workers.cut = {(1, 0)}  # the rows come
    go_on(1.5, 1.6)
    workers.cut = cut
    go_on(1.6, 1.5 + LINK_S)
    assert (producer.log.end, len(producer.log)) == (2, 1)
    go_on(1.5 + LINK_S, 2.3)
    assert len(producer.log) == 0
    assert {(m.origin, m.over, m.to) for m in relayed(workers, WantAck)} == {(0, 2, 1)}
    assert {(m.origin, m.over, m.to) for m in relayed(workers, Acks)} == {(1, 2, 0)}


@pytest.mark.parametrize("cut", DIRECTIONS, ids=["rows", "acks", "both"])
def test_the_only_replica_of_a_partition_borrows_rows_of_a_source_out_of_the_log_of_its_reader(
    cut: set[tuple[int, int]],
) -> None:
    given: list[pa.RecordBatch] = [rows(1)]
    workers = read_in_a_worker(iter(lambda: given.pop(0) if given else None, 0))
    reader, consumer = workers.cores[0], workers.cores[1]

    def go_on(begin: float, end: float) -> None:
        for tick in range(round((end - begin) * 20)):
            reader.read(True, begin + tick / 20)
            workers.pass_on(begin + tick / 20)

    go_on(1.0, 1.5)
    workers.cut = cut
    workers.sent.clear()
    given += [rows(2), rows(3)]
    go_on(1.5, 2.1)
    assert kept_by(consumer) == [[1], [2, 3]] or kept_by(consumer) == [[1], [2], [3]]
    given.append(rows(4))
    go_on(2.1, 2.5)
    assert kept_by(consumer)[-1] == [4], "later rows wait for two looks"
    lent = (0, 1) in cut
    assert {(m.origin, m.over, m.to) for m in relayed(workers, Data)} == ({(0, 2, 1)} if lent else set())
    assert {(m.origin, m.over, m.to) for m in relayed(workers, Borrow)} == ({(1, 2, 0)} if lent else set())
    assert len(reader.sources[0, 0].producers[0].log) == 0
    workers.cut = set()
    given.append(rows(5))
    go_on(2.5, 6.0)
    workers.sent.clear()
    given.append(rows(6))
    go_on(6.0, 8.0)
    assert kept_by(consumer)[-2:] == [[5], [6]]
    assert workers.of(Relayed) == []


def test_a_partition_that_acks_nothing_is_asked_about_though_another_one_of_its_worker_acks_all_the_time() -> None:
    given: list[pa.RecordBatch] = []
    source = WorkerSource("rows", lambda partition: iter(lambda: given.pop(0) if given else None, 0), 1, SCHEMA)
    plan = planned(flux.stage(key="x", partitions=2)(Kept), source=source)
    workers = SeveralWorkers(plan, Table(0, (((ReplicaAt(1, 0),), (ReplicaAt(1, 0),)),), ((0,),), THREE), fed=())
    reader = workers.cores[0]

    def go_on(begin: float, end: float) -> None:
        for tick in range(round((end - begin) * 20)):
            now = begin + tick / 20
            given[:] = [rows(*range(10))]
            if workers.cut and tick % 2:
                newest = reader.sources[0, 0].producers[0].log.end - 1
                reader.on_answer(1, Ack(0, 0, 0, 0, newest, [AppliedThrough(0, 5)], 1 << 20), now)
            reader.read(True, now)
            workers.pass_on(now)

    go_on(1.0, 1.5)
    workers.cut = {(0, 1), (1, 0)}
    go_on(1.5, 1.5 + LINK_S)
    assert relayed(workers, WantAck) == []
    go_on(1.5 + LINK_S, 1.9 + LINK_S)
    assert {(m.origin, m.over, m.to) for m in relayed(workers, WantAck)} == {(0, 2, 1)}
    assert {m.message.partition for m in relayed(workers, Borrow)} == {0, 1}


def test_rows_are_borrowed_out_of_a_log_though_the_replicas_of_the_worker_have_changed_since_its_greeting() -> None:
    given: list[pa.RecordBatch] = []
    source = WorkerSource("rows", lambda partition: iter(lambda: given.pop(0) if given else None, 0), 1, SCHEMA)
    plan = planned(flux.stage(key="x", partitions=2, replicas=2)(Kept), source=source)
    both = (ReplicaAt(1, 0),), (ReplicaAt(2, 0), ReplicaAt(1, 0))
    workers = SeveralWorkers(plan, Table(0, (both,), ((0,),), THREE), fed=())

    def go_on(begin: float, end: float) -> None:
        for tick in range(round((end - begin) * 20)):
            given[:] = [rows(*range(10))]
            workers.cores[0].read(True, begin + tick / 20)
            workers.pass_on(begin + tick / 20)

    go_on(1.0, 1.5)
    workers.cut = {(0, 1), (1, 0)}
    for core in workers.cores:
        core.on_table(Table(1, ((both[0], both[1][:1]),), ((0,),), THREE), 1.5)
    go_on(1.5, 1.6)
    before = len(kept_by(workers.cores[1]))
    go_on(1.6, 2.0 + LINK_S)
    assert len(kept_by(workers.cores[1])) > before


def test_nothing_more_is_borrowed_out_of_a_log_as_long_as_a_loan_may_be_on_its_way() -> None:
    given = [rows(1)]
    workers = read_in_a_worker(iter(lambda: given.pop(0) if given else None, 0))
    reader, consumer = workers.cores[0], workers.cores[1]
    reader.read(True, 1.0)
    workers.pass_on(1.0)
    incarnation, end = reader.sources[0, 0].producers[0].incarnation, reader.sources[0, 0].producers[0].log.end

    def take(message: Data | Bound | WantAck, batches: list[pa.RecordBatch], now: float) -> list[Borrow]:
        consumer.on_data_plane("worker 2", Relayed(0, 2, 1, message), batches, now)
        sent = [effect.message for effect in consumer.poll(now) if isinstance(effect, ToWorker)]
        return [each.message for each in sent if isinstance(each, Relayed) and isinstance(each.message, Borrow)]

    question = WantAck(0, 0, incarnation, end + 2)
    [asked] = take(question, [], 1.0)
    assert take(question, [], 1.0 + LINK_S / 2) == []
    assert take(Data(0, 0, asked.nonce, 0, end, end, [0], [1], [1], 100), [rows(2)], 1.0 + LINK_S / 2) == []
    assert take(question, [], 1.1 + LINK_S) == [], "more may follow"
    [again] = take(question, [], 1.1 + 2 * LINK_S)
    assert (again.next, again.nonce > asked.nonce) == (end + 1, True)
    take(Data(0, 0, again.nonce, 0, end + 1, end + 1, [0], [1], [1], 100), [rows(3)], 2.0)
    take(Bound(0, 0, again.nonce, 1, end + 2, end + 2, NEVER), [], 2.0)
    [newest] = take(WantAck(0, 0, incarnation, end + 3), [], 2.0)
    assert newest.next == end + 2, "the loan before is over"


def test_no_rows_are_lent_out_of_a_log_to_another_life_or_to_an_unknown_replica() -> None:
    workers = read_in_a_worker(iter(lambda: rows(1), 0))
    reader = workers.cores[0]
    reader.read(True, 1.0)
    workers.pass_on(1.0)
    for question in (
        Borrow(0, 0, 7, 0, 0, 5, 0, 1 << 20, of_log=True), Borrow(0, 9, 0, 0, 0, 5, 0, 1 << 20, of_log=True),
        Borrow(0, 0, 0, 0, 9, 5, 0, 1 << 20, of_log=True), Borrow(0, 0, 0, 0, 0, 5, 0, 1 << 20),
    ):  # fmt: skip
        reader.on_data_plane("worker 2", Relayed(1, 2, 0, question), [], 1.0)
    assert [effect for effect in reader.poll(1.0) if isinstance(getattr(effect, "message", None), Relayed)] == []


def test_a_question_for_acks_to_another_life_and_relays_of_strangers_are_stale() -> None:
    workers = ordered()
    core = workers.cores[1]
    before = core.counters.stale
    seen = OrdersSeen([])
    for message in (
        Relayed(0, 2, 1, WantAck(0, 0, 7)), Relayed(0, 2, 1, WantAck(0, 9, 0)), Relayed(0, 9, 1, seen), Relayed(9, 2, 1, seen),
        Relayed(0, 0, 1, seen), Relayed(0, 1, 2, Orders([])), Relayed(1, 2, 0, seen),
    ):  # fmt: skip
        core.on_data_plane("worker 2", message, [], 1.0)
    sent = [effect for effect in core.poll(1.0) if isinstance(getattr(effect, "message", None), Relayed)]
    assert [effect.worker for effect in sent] == [2], "one is between two others, and is sent on"
    assert core.counters.stale - before == 6


def test_nothing_is_relayed_while_links_are_well() -> None:
    workers = ordered()
    for number in range(20):
        fed(workers, number, 1.0 + number / 10)
        workers.go_on(1.0 + number / 10, 1.1 + number / 10)
    assert workers.of(Relayed) == []


class Cut:
    """A reader on worker 0, the primary of its only partition on worker 1, and the secondary on the worker of the reader."""

    def __init__(self, endpoints: dict[int, str] = THREE) -> None:
        self.given: list[pa.RecordBatch] = []
        source = WorkerSource(
            "rows", lambda partition: iter(lambda: self.given.pop(0) if self.given else None, 0), 1, SCHEMA
        )
        plan = planned(flux.stage(partitions=1, replicas=2)(Kept), source=source)
        table = Table(0, (((ReplicaAt(1, 0), ReplicaAt(0, 0)),),), ((0,),), endpoints)
        self.workers = SeveralWorkers(plan, table, fed=())

    def go_on(self, begin: float, end: float) -> None:
        for tick in range(round((end - begin) * 20)):
            self.workers.cores[0].read(True, begin + tick / 20)
            self.workers.pass_on(begin + tick / 20)

    @property
    def kept(self) -> list[list[list[int]]]:
        """The rows that primary and secondary have applied."""
        return [kept_by(self.workers.cores[worker]) for worker in (1, 0)]


def kept_by(core: WorkerCore) -> list[list[int]]:
    operator = core.replicas[0, 0].operator
    assert isinstance(operator, Kept)
    return operator.batches


@pytest.mark.parametrize("cut", DIRECTIONS, ids=["rows", "questions", "both"])
def test_rows_are_borrowed_over_a_third_worker(cut: set[tuple[int, int]]) -> None:
    both = Cut()
    both.given = [rows(1)]
    both.go_on(1.0, 1.5)
    assert both.kept == [[[1]], [[1]]]
    both.workers.cut = cut
    both.workers.sent.clear()
    both.given = [rows(2)]
    both.go_on(1.5, 1.5 + LINK_S - 0.1)
    assert relayed(both.workers, Unordered) == []
    both.go_on(1.5 + LINK_S - 0.1, 2.6)
    lent = (0, 1) in cut
    assert both.kept == [[[1], [2]], [[1], [2]]]
    assert {(m.origin, m.over, m.to) for m in relayed(both.workers, Data)} == ({(0, 2, 1)} if lent else set())
    assert {(m.origin, m.over, m.to) for m in relayed(both.workers, Borrow)} == ({(1, 2, 0)} if lent else set())
    if lent:
        assert RelayedLink(1, 2, pytest.approx(1.9, abs=0.15)) in stats(both.workers.cores[0])["relays"]


def test_later_rows_wait_for_one_look_and_the_first_direct_loan_ends_the_way() -> None:
    both = Cut()
    both.workers.cut = {(0, 1)}
    both.go_on(1.0, 1.3)
    both.workers.cut = set()
    both.go_on(1.3, 2.0)
    both.workers.cut = {(0, 1)}
    both.given = [rows(1)]
    both.go_on(2.0, 2.7)
    assert both.kept[0] == [[1]]
    both.given = [rows(2)]
    both.go_on(2.7, 2.7 + LINK_S)
    assert both.kept[0] == [[1], [2]]
    assert stats(both.workers.cores[0])["relays"]
    both.workers.cut = set()
    both.go_on(3.0, 9.0)
    assert "relays" not in stats(both.workers.cores[0]), "no statement has gone that way for long"


def test_rows_that_nobody_has_borrowed_are_stale() -> None:
    both = Cut()
    core = both.workers.cores[1]
    before = core.counters.stale
    data = Data(0, 0, 77, 0, 0, 0, [0], [1], [1], 100)
    for message in Relayed(0, 2, 1, data), Relayed(0, 2, 1, Bound(0, 0, 77, 0, 0, 1, 5)):
        assert core.rows_of("worker 2", message) is None
        core.on_data_plane("worker 2", message, [], 1.0)
    assert core.counters.stale - before == 2
    third = both.workers.cores[2]
    assert third.rows_of("worker 0", Relayed(0, 2, 1, data)) == data, "they are decoded to be sent on"
    assert third.rows_of("worker 0", Relayed(0, 2, 1, Data(9, 0, 77, 0, 0, 0, [0], [1], [1], 100))) is None
    third.on_data_plane("worker 0", Relayed(0, 2, 1, data), [rows(1)], 1.0)
    third.on_data_plane("worker 0", Relayed(0, 2, 1, data), [], 1.0)
    sent = [effect for effect in third.poll(1.0) if isinstance(effect, ToWorker)]
    assert [(effect.worker, effect.batches) for effect in sent if isinstance(effect.message, Relayed)] == [
        (1, (rows(1),))
    ]
