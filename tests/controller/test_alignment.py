"""Alignment of sources: the controller tells workers how far the others are (design: alignment)."""

from __future__ import annotations

from typing import Any

from controller.alignment import Alignment, StateStop
from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.control import Heartbeat, HeartbeatSeen
from flux.wire.statistics import ReaderState, SourceTime
from tests.controller.cluster import Cluster

S = 1_000_000


def at(seconds: float | None, partition: int = 0, state: ReaderState = ReaderState.READING, source: int = 0) -> Any:
    """Return the report of a partition whose watermark is at this time; None: it has none."""
    watermark = NEVER if seconds is None else round(seconds * S)
    return SourceTime(source, partition, watermark, 0, NEVER, 0, state)


def least(*told: Any, on: bool = True) -> float | None:
    """Return the watermark for which a worker waits that reads nothing itself, in seconds."""
    alignment = Alignment(on)
    alignment.note(0, told)
    alignment.look()
    found = alignment.of_others(1)
    return None if found == NEVER else found / S


def test_readers_wait_for_the_least_of_all_sources() -> None:
    assert least(at(100), at(20, 1), at(30, source=1)) == 20
    assert least(at(100), at(20, 1), on=False) is None, "off by default"
    assert least() is None


def test_a_partition_without_a_watermark_an_idle_one_and_one_that_has_ended_hold_nobody_back() -> None:
    assert least(at(100), at(None, 1)) == 100
    assert least(at(100), at(20, 1, ReaderState.IDLE)) == 100
    assert least(at(100), at(20, 1, ReaderState.ENDED)) == 100
    assert least(at(100, 0, ReaderState.IDLE), at(None, 1)) is None


def test_one_without_an_answer_from_outside_and_one_that_is_held_itself_hold_others_back() -> None:
    assert least(at(100), at(20, 1, ReaderState.SILENT)) == 20
    assert least(at(100), at(90, 1, ReaderState.HELD)) == 90


def test_a_worker_waits_for_other_workers_and_not_for_its_own_last_report() -> None:
    """Otherwise the worker that is farthest behind would wait for the answer to its report, again and again."""
    alignment = Alignment(True)
    alignment.note(0, [at(20), at(100, 1)])
    alignment.note(1, [at(30, 2)])
    alignment.note(2, [at(40, 3)])
    alignment.look()
    assert [alignment.of_others(worker) for worker in range(4)] == [30 * S, 20 * S, 20 * S, 20 * S]


def beat(cluster: Cluster, worker: int, *told: Any) -> int:
    cluster.orders.clear()
    cluster.report(worker, Heartbeat(node=worker, progress=1, stats={"times": list(told)}))
    (seen,) = cluster.sent(HeartbeatSeen)
    return int(seen.others_at)


def test_the_answer_to_a_heartbeat_says_how_far_others_are() -> None:
    cluster = Cluster(slots=2, readers=2, watermark_drift=60.0)
    assert beat(cluster, 0, at(100)) == NEVER
    beat(cluster, 1, at(20, 1))
    cluster.tick(0.1)
    assert beat(cluster, 0, at(100)) == 20 * S
    assert beat(cluster, 1, at(70, 1)) == 100 * S


def test_the_last_report_of_a_lost_reader_stands_until_another_one_reports() -> None:
    """Otherwise the other readers would run away from the partition while it is repaired. The next reader may have no watermark
    for long, if all rows of the partition were applied before; this reader then holds no other back."""
    cluster = Cluster(slots=3, readers=2, watermark_drift=60.0)
    beat(cluster, 0, at(100))
    beat(cluster, 1, at(20, 1))
    cluster.lose(1)
    cluster.tick(0.1)
    assert beat(cluster, 0, at(100)) == 20 * S
    beat(cluster, 2, at(None, 1))
    cluster.tick(0.1)
    assert beat(cluster, 0, at(100)) == NEVER


def test_readers_stand_still_at_the_foremost_partition_until_no_worker_has_too_much_state() -> None:
    stop, full = StateStop(), {"state_full": True}
    reading = {"times": [at(100), at(20, 1, ReaderState.SILENT)]}
    stop.look([reading, {"times": [at(90, 2)], "state_full": False}])
    assert stop.at == END_OF_TIME
    stop.look([reading | full, {"times": [at(110, 2)]}])
    assert stop.at == 110 * S
    stop.look([reading | full, {"times": [at(150, 2)]}])
    assert stop.at == 110 * S, "those that were missing come up to it"
    stop.look([{"times": [at(100), at(60, 1)]} | full, {"times": [at(150, 2)]}])
    assert stop.at == 110 * S, "it answers, and comes up to the others"
    stop.look([reading])
    assert stop.at == END_OF_TIME
    stop.look([{"times": [at(None, 1, ReaderState.SILENT)]} | full])
    assert stop.at == END_OF_TIME, "no partition has a watermark"


def test_a_state_that_is_too_large_stops_no_reader_while_all_partitions_answer() -> None:
    """Without rows no window closes, and the state would never fall."""
    stop, full = StateStop(), {"state_full": True}
    stop.look([{"times": [at(100), at(20, 1)]} | full])
    assert stop.at == END_OF_TIME
    stop.look([{"times": [at(100), at(20, 1, ReaderState.SILENT)]} | full])
    assert stop.at == 100 * S
    stop.look([{"times": [at(101), at(100, 1)]} | full])
    assert stop.at == END_OF_TIME, "it has come up to the others, and the state is as large as it is"
    stop.look([{"times": [at(101), at(100, 1)]} | full])
    assert stop.at == END_OF_TIME
