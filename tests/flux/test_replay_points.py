"""Replay points of one primary: where an upstream replica would begin (design: replay-point)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.errors import UsageError
from flux.exchange.producer import Producer
from flux.settings import Settings
from flux.state.replay_points import BOUNDARIES_MAX, ReplayPoints
from flux.state.state_copy import decode
from partitioning.clustering import Clustering
from partitioning.ids import StreamId

ROWS = pa.schema([("key", pa.int64())])
BATCH = pa.record_batch([[1, 2]], schema=ROWS)


def primary(needs: Any = None) -> Any:
    """Make a primary as far as replay points ask it: between two steps, with one outgoing edge of two partitions."""
    producer = Producer(StreamId(1, 0), 0, 2, 1 << 20, resend_s=1.0)
    made = SimpleNamespace(
        where="stage x, partition 0", applied=0, finished=False, leads_since=3, partition=0,
        outlets=[SimpleNamespace(producer=producer, edge=SimpleNamespace(id=1))], output=SimpleNamespace(exit=None),
    )  # fmt: skip
    made.silent = 0
    made.state = lambda: {
        "applied": made.applied,
        "checksum": made.applied * 7,
        "rows": (0, 0),
        "marks": [(9, [9])],
        "silent": made.silent,
    }
    made.left_out = lambda: (10 * made.applied, made.applied)
    made.guard = SimpleNamespace(needs_from=needs or (lambda: made.applied))
    return made


def step(replica: Any) -> None:
    producer = replica.outlets[0].producer
    producer.append(Clustering(BATCH.schema, [], 2).whole(BATCH, replica.applied % 2), 0.0)
    replica.applied += 1


def test_a_stage_without_state_begins_at_the_newest_step_once_its_output_is_acked() -> None:
    replica, points = primary(), ReplayPoints()
    for _ in range(3):
        step(replica)
    point = points.make(replica, [], after=0)
    assert point is not None
    assert not point.acked(replica)
    log = replica.outlets[0].producer.log
    log.evict(np.array([2, 0]))
    assert not point.acked(replica), "batch 1 is not acked"
    log.evict(np.array([2, 1]))
    assert point.acked(replica)
    copy = decode(point.picture.encode())
    assert (copy.state.replica["applied"], copy.state.replica["silent"], copy.state.replica["marks"]) == (3, 3, [])
    (output,) = copy.outputs
    assert (output.base, output.entries) == (3, ())
    assert np.frombuffer(output.gone, np.int64).tolist() == [2, 1], "what each partition has had"
    assert copy.snapshot is None


def test_nothing_is_told_twice() -> None:
    replica, points = primary(), ReplayPoints()
    step(replica)
    assert points.make(replica, [], after=1) is None


def test_one_that_looks_back_begins_at_a_boundary_that_was_noted_before_what_it_needs() -> None:
    replica, points = primary(needs=lambda: 4), ReplayPoints()
    for _ in range(3):
        step(replica)
    first = points.make(replica, [], after=0)
    assert first is not None
    assert first.picture.replica["applied"] == 3, "no later boundary is known yet"
    for _ in range(3):
        step(replica)
        points.make(replica, [], after=3)
    point = points.make(replica, [], after=3)
    assert point is not None
    assert (point.picture.replica["applied"], point.picture.replica["silent"]) == (4, 6)
    assert point.picture.replica["left out before"] == [40, 4], "rows of later steps are counted again"
    assert point.picture.replica["checksum"] == 42, "that of step 6, from which on output is compared"


def test_who_is_still_repeating_goes_on_throwing_away() -> None:
    """Throw away such output in the next term, too: the next primary would else give rows that all consumers have,
    under new numbers."""
    replica, points = primary(needs=lambda: 3), ReplayPoints()
    replica.silent = 9
    for _ in range(4):
        step(replica)
        point = points.make(replica, [], after=2)
    assert point is not None
    assert (point.picture.replica["applied"], point.picture.replica["silent"]) == (3, 9)


def test_one_that_needs_everything_gets_none() -> None:
    replica, points = primary(needs=lambda: None), ReplayPoints()
    step(replica)
    assert points.make(replica, [], after=0) is None


def test_what_was_noted_in_an_earlier_term_is_forgotten() -> None:
    """Forget such notes, because another primary may have ordered other steps since."""
    replica, points = primary(needs=lambda: 1), ReplayPoints()
    step(replica)
    assert points.make(replica, [], after=0) is not None
    replica.leads_since = 8
    step(replica)
    assert points.make(replica, [], after=0) is None


def test_boundaries_are_few() -> None:
    replica, points = primary(needs=lambda: 0), ReplayPoints()
    for _ in range(5 * BOUNDARIES_MAX):
        step(replica)
        points.make(replica, [], after=0)
    assert len(points._known) <= BOUNDARIES_MAX


def test_after_its_end_nothing_matters() -> None:
    replica, points = primary(needs=lambda: 0), ReplayPoints()
    step(replica)
    replica.finished = True
    point = points.make(replica, [], after=0)
    assert point is not None
    assert point.picture.replica["applied"] == 1


class Counts(flux.Aggregate):
    n = flux.count()


def test_operators_that_need_all_their_rows_are_refused_at_planning_time() -> None:
    source = flux.source(lambda partition: iter(()), ROWS, partitions=1)
    flow = flux.stage(key="key", replicas=2, recovery="upstream")(Counts)(source)
    with pytest.raises(UsageError, match=r"stage Counts: recovery='upstream' keeps no state.*recovery='standby'"):
        compile_plan([flow], Settings.of(), lambda given: given, "q", b"s")
