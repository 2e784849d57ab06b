"""Shares of a worker's credit among the streams that come to it."""

from __future__ import annotations

from flux.exchange.inbound import Inbound
from flux.worker.subscriptions import Credit
from partitioning.ids import StreamId

SOURCES, STAGES = 0, 1  # edges


def streams(edge: int, count: int) -> list[Inbound]:
    return [Inbound(StreamId(edge, producer), 0, 0) for producer in range(count)]


def test_streams_share_a_worker_s_credit_evenly_down_to_a_floor() -> None:
    credit = Credit(1000, floor=300)
    admitted = streams(SOURCES, 5)
    shares = []
    for inbound in admitted:
        credit.admit(inbound, of_source=True)
        shares.append(inbound.credit)
    assert shares == [1000, 500, 333, 300, 300]
    for inbound in admitted[1:]:
        credit.release(inbound.stream)
    credit.admit(admitted[1], of_source=True)
    assert admitted[0].credit == 500


def test_the_first_does_not_get_the_share_of_those_that_are_to_come() -> None:
    credit = Credit(1000, floor=1)
    credit.expect(sources=4, stages=0)
    (first,) = streams(SOURCES, 1)
    credit.admit(first, of_source=True)
    assert first.credit == 250


def test_a_source_keeps_its_half_however_many_partitions_a_stage_has() -> None:
    credit = Credit(1000, floor=1)
    credit.expect(sources=2, stages=100)
    sources, partitions = streams(SOURCES, 2), streams(STAGES, 100)
    for inbound in sources:
        credit.admit(inbound, of_source=True)
    for inbound in partitions:
        credit.admit(inbound, of_source=False)
    assert [inbound.credit for inbound in sources] == [250, 250]
    assert {inbound.credit for inbound in partitions} == {5}
