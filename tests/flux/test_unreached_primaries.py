"""A primary to which rows or acks do not come is told to the controller, with the replica that has them (design: unreached)."""

from __future__ import annotations

from itertools import chain

from msgspec.structs import replace
from one_worker import Feeder, Kept, Split, kept, planned
from several_workers import SeveralWorkers

import flux
from flux.wire.control import Unreached
from flux.wire.messages import Unacked
from partitioning.table import ReplicaAt, Table

BOTH = (ReplicaAt(0, 0), ReplicaAt(1, 0))


def with_consumer() -> SeveralWorkers:
    """Make a primary on worker 0, its secondary on worker 1, and their consumer on worker 2."""
    plan = planned(flux.stage(partitions=1, replicas=2)(Split), flux.stage(partitions=1)(Kept))
    return SeveralWorkers(plan, Table(0, ((BOTH,), ((ReplicaAt(2, 0),),)), (), {0: "", 1: "", 2: ""}))


def pair() -> SeveralWorkers:
    return SeveralWorkers(planned(flux.stage(partitions=1, replicas=2)(Kept)), Table(0, ((BOTH,),), (), {0: "", 1: ""}))


def feed(workers: SeveralWorkers, feeders: tuple[int, ...], begin: float, end: float, first: int = 0) -> int:
    """Send a row every half second, and return the number of the next one."""
    for number in range(round((end - begin) * 2)):
        now = begin + number / 2
        for feeder in feeders:
            workers.feeders[feeder].send(first, first, now=now)
        workers.go_on(now, now + 0.5)
        first += 1
    return first


def test_rows_that_only_a_secondary_brings_for_five_seconds_are_told() -> None:
    workers = pair()
    feed(workers, (1,), 1.0, 6.0)
    assert workers.told(Unreached) == []
    feed(workers, (1,), 6.0, 8.0, first=10)
    report = workers.told(Unreached)[0]
    assert report == Unreached(
        node=0, stage=0, partition=0, primary=0, leader=0, worker=1, incarnation=0, edge=0, producer=0, acks=False
    )


def test_a_row_that_the_producer_brings_begins_the_time_anew() -> None:
    workers = pair()
    next_ = feed(workers, (1,), 1.0, 5.0)
    next_ = feed(workers, (0, 1), 5.0, 5.5, first=next_)
    next_ = feed(workers, (1,), 5.5, 10.0, first=next_)
    assert workers.told(Unreached) == []
    feed(workers, (1,), 10.0, 12.5, first=next_)
    assert workers.told(Unreached)


def test_rows_that_are_seldom_lent_are_no_reason() -> None:
    workers = pair()
    for number in range(4):
        feed(workers, (1,), 1.0 + 5 * number, 1.5 + 5 * number, first=number)
        workers.go_on(1.5 + 5 * number, 6.0 + 5 * number)
    assert workers.told(Unreached) == []


def test_a_secondary_that_lacks_rows_itself_is_not_told_and_its_primary_goes_on_with_what_it_lends() -> None:
    """Put a reader on the worker of each replica, and let nothing come over the link between the two."""
    plan = planned(flux.stage(partitions=1, replicas=2)(Kept))
    workers = SeveralWorkers(plan, Table(0, ((BOTH,),), (), {0: "", 1: "", 2: ""}), fed=())
    feeders = [Feeder(workers.cores[producer], producer=producer) for producer in (0, 1)]
    for feeder in feeders:
        feeder.hello()
        feeder.answers = lambda now=0.0: []
    workers.cut = {(0, 1), (1, 0)}
    for number in range(16):
        now = 1.0 + number / 2
        for feeder in feeders:
            feeder.send(number, number, now=now)
        workers.go_on(now, now + 0.5)
    workers.go_on(9.0, 9.5)
    assert workers.told(Unreached) == []
    assert sorted(chain.from_iterable(kept(workers.cores[0]))) == sorted([*range(16), *range(16)])
    assert workers.cores[0].replicas[0, 0].order.committed == 32
    assert workers.cores[1].replicas[0, 0].missing()


def test_acks_that_come_to_a_secondary_alone_are_told_by_it_after_five_seconds() -> None:
    workers = with_consumer()
    workers.cut = {(2, 0)}
    feed(workers, (0, 1), 1.0, 5.5)
    assert workers.of(Unacked) == workers.told(Unreached) == []
    workers.go_on(5.5, 8.0)
    assert workers.told(Unreached)[0] == Unreached(
        node=1, stage=0, partition=0, primary=0, leader=0, worker=1, incarnation=0, edge=1, producer=0, acks=True
    )


def test_acks_that_come_to_no_replica_are_asked_for_and_not_told() -> None:
    workers = with_consumer()
    workers.cut = {(2, 0), (2, 1)}
    feed(workers, (0, 1), 1.0, 9.0)
    assert workers.of(Unacked)
    assert workers.told(Unreached) == []


def test_without_a_fault_nothing_is_asked() -> None:
    workers = with_consumer()
    feed(workers, (0, 1), 1.0, 9.0)
    assert workers.of(Unacked) == []


def test_a_question_from_another_worker_or_about_another_life_is_counted_and_not_answered() -> None:
    workers = with_consumer()
    workers.cut = {(2, 0)}
    feed(workers, (0, 1), 1.0, 7.5)
    asked, core = workers.of(Unacked)[0], workers.cores[1]
    before, told = core.counters.stale, len(workers.told(Unreached))
    (element,) = asked.items
    for question in (
        replace(asked, worker=2),
        *(
            replace(asked, items=[replace(element, **other)])
            for other in ({"incarnation": 3}, {"stage": 9}, {"partition": 9}, {"edge": 9}, {"edge": 0}, {"stage": 1})
        ),
    ):
        core.on_data_plane("worker 0", question, [], 8.0)
    assert core.counters.stale == before + 7
    workers.pass_on(8.0)
    assert len(workers.told(Unreached)) <= told + 1  # the one that is due by itself


def test_output_that_is_not_committed_lacks_no_acks() -> None:
    workers = with_consumer()
    workers.cut = {(1, 0)}
    feed(workers, (0, 1), 1.0, 9.0)
    assert workers.of(Unacked) == []
