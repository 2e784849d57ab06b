"""Tentative messages: payloads that do not fit their header, and streams that have no tentative rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flux.dataflow.plan import ById, FromStage
from flux.errors import ProtocolError
from flux.exchange.feed import Counters
from flux.shadows.shadow_hosts import LIVES_MAX, ShadowHosting, host_of
from flux.wire.codec import decode_tentative
from flux.wire.messages import Tentative, WantTentative
from partitioning.ids import ACTIVE, STANDBY, PartitionKey
from partitioning.table import ReplicaAt

SCHEMA = pa.schema([("n", pa.int64())])
ROWS = pa.record_batch([pa.array([1, 2, 3])], schema=SCHEMA).serialize()


def message(**changed: Any) -> Tentative:
    given = {
        "edge": 0,
        "producer": 0,
        "life": 1,
        "revision": 1,
        "after": 0,
        "through": 10,
        "sequence": 0,
        "created": 1.0,
    }
    return Tentative(**{**given, "partitions": [0, 2], "rows": [1, 2], **changed})


def test_a_payload_is_decoded() -> None:
    (batch,) = decode_tentative(message(), [ROWS], SCHEMA)
    assert batch.to_pydict() == {"n": [1, 2, 3]}
    assert decode_tentative(message(partitions=[], rows=[]), [], SCHEMA) == []


@pytest.mark.parametrize(
    ("changed", "frames"),
    [
        ({"rows": [1, 1]}, [ROWS]),
        ({"rows": [3]}, [ROWS]),
        ({"rows": [0, 3]}, [ROWS]),
        ({"partitions": [2, 2]}, [ROWS]),
        ({"partitions": [], "rows": []}, [ROWS]),
        ({}, []),
        ({}, [ROWS, ROWS]),
        ({}, [b"none"]),
        ({"created": float("nan")}, [ROWS]),
        ({"after": 10}, [ROWS]),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(changed: dict[str, Any], frames: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_tentative(message(**changed), frames, SCHEMA)


def hosting(availability: object) -> ShadowHosting:
    """Return the hosting of a worker with one stage behind another, and no shadow."""
    edges = ById([FromStage(0, 1, 0, (), SCHEMA, 2, 2, stage=0)])
    stages = ById([SimpleNamespace(id=number, availability=availability) for number in (0, 1)])
    plan: Any = SimpleNamespace(edges=edges, stages=stages, settings=SimpleNamespace(availability_max_bytes=1000))
    hosted: Any = SimpleNamespace(worker=0, epoch=0, table=None, of_stage={})
    return ShadowHosting(plan, hosted, {}, lambda *given: None, lambda effect: None, Counters(), lambda: 0.0)


@pytest.mark.parametrize("asked", [message(edge=5), message(edge=-1), message(producer=2), WantTentative(0, -1, 0, 0)])
def test_streams_without_tentative_rows_are_refused(asked: Any) -> None:
    with pytest.raises(ProtocolError, match="has no tentative rows"):
        hosting(object()).on_message(asked, [], 0.0, 0.0)
    with pytest.raises(ProtocolError, match="has no tentative rows"):
        hosting(None).on_message(message(), [], 0.0, 0.0)


def test_rows_for_a_worker_without_the_shadow_are_counted_and_end_nothing() -> None:
    """Drop such rows without decoding: the shadow has left for another worker, or an error has ended it."""
    found = hosting(object())
    assert not found.knows(message())
    found.on_message(message(), [], 0.0, 0.0)
    assert found._counters.stale == 1


def test_a_life_of_an_epoch_that_is_not_known_here_is_refused() -> None:
    """Refuse such a life: it would void the marks of all true lives until the end of the failure."""
    found = hosting(object())
    found._hosted.epoch = 3
    found._shadows[PartitionKey(1, 0)] = object()  # type: ignore[assignment]
    assert found.knows(message(life=4 * LIVES_MAX - 1))
    for life in (4 * LIVES_MAX, 1 << 62):
        assert not found.knows(message(life=life))
        found.on_message(message(life=life), [], 0.0, 0.0)
    assert found._counters.stale == 2


@pytest.mark.parametrize("worker", [-1, 0, 99])
def test_a_request_for_a_shadow_that_is_elsewhere_or_by_an_unknown_worker_is_counted(worker: int) -> None:
    found = hosting(object())
    found.on_message(WantTentative(0, 0, worker, -(1 << 63)), [], 0.0, 0.0)
    assert found._counters.stale == 1


def test_without_availability_nothing_is_hosted() -> None:
    assert not hosting(None)
    assert hosting(None).due_at == float("inf")


def test_the_host_is_the_primary_in_front_of_a_sink_and_else_the_last_live_replica() -> None:
    row = [ReplicaAt(3, 0), ReplicaAt(5, 0), ReplicaAt(7, 1, live=False)]
    stage: Any = SimpleNamespace(sink=None, recovery=ACTIVE)
    assert host_of(stage, row) == 5
    assert host_of(SimpleNamespace(sink=object(), recovery=ACTIVE), row) == 3  # type: ignore[arg-type]
    assert host_of(SimpleNamespace(sink=None, recovery=STANDBY), row) == 3  # type: ignore[arg-type]
    assert host_of(stage, []) is None


def test_shadows_that_come_with_a_later_version_of_the_plan_have_room_for_rows() -> None:
    """Make room when such a version comes: a service begins without any stage that has availability, and without room
    their rows would go as they come."""
    found, later = hosting(None), hosting(object())
    assert found.room.bytes_max == 0
    room = found.room
    found.go_by(later._plan)
    assert found.room is room
    assert room.bytes_max == 1000
