"""Every number that travels has bounds: an absurd one is refused where it is decoded, and goes no further."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest

from flux.errors import ProtocolError
from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.codec import decode_answer, decode_asked, decode_command, decode_data, decode_report
from flux.wire.control import (
    Checkpointed,
    CopyState,
    EdgeBorn,
    EdgeComplete,
    EdgeStored,
    EdgeWatermark,
    Failure,
    FromController,
    GetPlan,
    Goodbye,
    GoodbyeSeen,
    Heartbeat,
    HeartbeatSeen,
    InStep,
    LastCheckpoints,
    NewTable,
    PartitionFinished,
    PlanChanged,
    PlanSeen,
    Register,
    RegisterAgain,
    Rejected,
    ReplicaCaughtUp,
    ReplicaDiverged,
    Stop,
    TableChanged,
    TableMissed,
    TableSeen,
    ToController,
    Unreached,
    Welcome,
)
from flux.wire.frames import PREFIX, encode
from flux.wire.messages import (
    Ack,
    Acks,
    Answered,
    AppliedThrough,
    Asked,
    Borrow,
    Bound,
    Chunk,
    Data,
    Fetch,
    Hello,
    Install,
    Installed,
    Mark,
    Needed,
    OrderEntry,
    Orders,
    OrdersSeen,
    PartitionOrder,
    PartitionSeen,
    Passed,
    Press,
    Pull,
    Pulled,
    ReadsElsewhere,
    Refuse,
    Relayed,
    Reset,
    Restore,
    Resume,
    Settled,
    Tentative,
    Unacked,
    UnackedElement,
    Unordered,
    UnorderedRows,
    Unread,
    WantAck,
    WantTentative,
)
from flux.wire.statistics import (
    BadRecords,
    Detour,
    EndedShadow,
    FeedRows,
    Forfeited,
    KeptCheckpoint,
    Lag,
    LentRows,
    Load,
    LostRows,
    NotCompared,
    PartitionRead,
    Pauses,
    PrimaryRows,
    ReaderState,
    RelayedLink,
    ReplicaWork,
    SilentStream,
    SourceLag,
    SourceTime,
    StageStatistics,
    StageTime,
    Statistics,
    TentativeReport,
    TentativeState,
    Unapplied,
)
from partitioning.table import Table, TableChange

#: Stands where a number of 64 bits is meant, and nowhere else.
CHECKSUM = 77
BELOW, ABOVE = (-2, -(1 << 63)), (1 << 63, (1 << 64) - 1)

EVERYTHING: Statistics = {
    "rows_in": 1,
    "source_rows": 2,
    "sources": [PartitionRead(0, 1, 2, 3, 4)],
    "pauses": [Pauses(0, 1, 2, True)],
    "lags": [SourceLag(0, 1, 2, 3)],
    "bad_records": [BadRecords(0, 1, 2)],
    "lost_rows": [LostRows(0, 1, 2)],
    "tentative": [TentativeReport(0, 1, TentativeState.UP_FAILURE, 0.5, 2, 3, 4)],
    "ended_shadows": [EndedShadow(0, 1, 0.5, "ValueError: none")],
    "times": [SourceTime(0, 1, NEVER, 2, NEVER, 3, ReaderState.IDLE)],
    "silent": [SilentStream(0, 1, 0.5, "its broker does not answer")],
    "detours": [Detour(0, 1, 0.5, 2)],
    "lent": [LentRows(1, 0.5, 2, 3)],
    "relays": [RelayedLink(1, 2, 0.5)],
    "state_full": False,
    "feeds": [FeedRows(1, 2, 3, 4, 5)],
    "not_compared": [NotCompared(0, 1, 2)],
    "drained": 3,
    "behind": [Lag(0, 1, 2, 3, 4, 0.5, 5, False)],
    "unapplied": [Unapplied(0, 1, 2)],
    "log_bytes": 4,
    "peak_log_bytes": 5,
    "held_bytes": 6,
    "queued": 7,
    "first_row_at": 0.5,
    "finished_at": None,
    "counters": {"stale": 8},
    "stages": [
        {
            "stage": 0,
            "primaries": [PrimaryRows(0, 1, 2, 1)],
            "queued": 9,
            "busy_s": 0.5,
            "latency_ms": [0.5, 1.5],
            "sink_bytes": 4,
            "sink_full": 1,
            "standbys": 2,
            "checkpoint_bytes": 5,
            "checkpoint_behind_s": 0.5,
            "checkpoints": [KeptCheckpoint(0, 1, 0.5)],
            "replay_s": 1.5,
            "vault_replay_s": 2.5,
            "kept_bytes": 6,
            "times": [StageTime(0, NEVER, 1, 2, 3, 4)],
            "forfeits": [Forfeited(0, NEVER, NEVER, 2)],
        }
    ],
    "rss_bytes": 10,
    "cpu_s": 0.5,
    "written_bytes": 11,
    "order_bytes": 5,
    "order_slices": 3,
    "load": {"at": 1.5, "replicas": [ReplicaWork(0, 1, 2, 0.5, 3, 4, 5, 6)], "rested_s": 0.5},
}
ASKED = [
    Hello(0, 1, 2, 3, 4),
    Data(0, 1, 2, 0, 0, 1, [0, 1], [10, 20], [2], 1000, checksum=CHECKSUM, batches=[0, 1], counts=[5, 10, 5, 10]),
    Data(0, 1, 2, 0, 0, 9, [0, 1], [4, 6], [2], 1000, checksum=CHECKSUM, mark=Mark(8, CHECKSUM, 0, b"at")),
    Fetch(0, 1, 2),
    Orders([PartitionOrder(0, 0, 1, 1, 5, [OrderEntry(1.0, 1.0, [(0, 0, 7)], version=3)], 5, 0, 4, CHECKSUM)]),
    Install(0, 1, 2, 3, 0, 64),
    Install(0, 1, 2, 3, 0, 64, 5, base=1),
    Press(0, 1, [2]),
    Settled(0, 1, 2, 3, Mark(8, CHECKSUM, 0, b"at", 9)),
    Passed(0, 1, 2, 3, 4),
    Bound(0, 1, 2, 3, 4, 5, NEVER),
    Unread(0, 1, 2, 3),
    Tentative(0, 1, 2, 3, NEVER, NEVER, 6, 1.5, [0, 1], [10, 20]),
    WantTentative(0, 1, 2, NEVER),
    Unordered(0, [UnorderedRows(0, 1, 2, 3, 4, 5)]),
    Unacked(0, [UnackedElement(0, 1, 2, 3, 4, 5)]),
    Relayed(0, 1, 2, OrdersSeen([PartitionSeen(0, 0, 1, 1, 5, 5, 5, CHECKSUM)])),
    Relayed(0, 1, 2, WantAck(3, 4, 5)),
    Relayed(
        0, 1, 2, Data(0, 1, 2, 0, 0, 9, [0, 1], [4, 6], [2], 1000, checksum=CHECKSUM, mark=Mark(8, CHECKSUM, 0, b"at"))
    ),
    Relayed(0, 1, 2, Bound(0, 1, 2, 3, 4, 5, NEVER)),
    Relayed(0, 1, 2, Unordered(0, [UnorderedRows(0, 1, 2, 3, 4, 5)])),
    Relayed(0, 1, 2, Borrow(0, 1, 2, 3, 4, 5, 6, 7)),
    Restore(0, 1, 2, 3),
    Pull(0, 1, 2, 3, 4, True),
]
ANSWERED = [
    Resume(0, 1, 2, 3, [Needed(0, 1)], 4, [AppliedThrough(2, 3)], 5, [Mark(3, CHECKSUM, 2, b"at")], 9),
    ReadsElsewhere(0, 1, 2, 3, [AppliedThrough(5, 6)]),
    Ack(0, 1, 2, 3, 4, [AppliedThrough(5, 6)], 7),
    Acks([Ack(0, 1, 2, 3, 4, [AppliedThrough(5, 6)], 7)]),
    Reset(0, 1, "again"),
    Refuse(0, 1, "edge", "none"),
    Chunk(0, 1, 2, 3),
    Pulled(0, 1, 2, 3, 4, 5, False, True),
    OrdersSeen([PartitionSeen(0, 0, 1, 1, 5, 5, 5, CHECKSUM)]),
    Installed(0, 1, 2, 3, 64, False),
    Installed(0, 1, 2, 3, 0, False, lacks=True),
    Borrow(0, 1, 2, 3, 4, 5, 6, 7),
    Borrow(0, 1, 2, 3, 4, 5, 6, 7, of_log=True),
]
REPORTS = [
    Register(role="worker", index=0, attempt=1, host="h", pid=3, edges=[1], node=2),
    Heartbeat(node=1, progress=7, stats=EVERYTHING),
    InStep(node=1, stage=0, partition=1, step=2, method="process"),
    TableSeen(node=1, epoch=2),
    TableMissed(node=1, epoch=2),
    PlanSeen(node=1, version=2, error="no"),
    GetPlan(node=1, version=2),
    EdgeBorn(node=1, edge=2, producer=3, number=4, mark=Mark(3, CHECKSUM, 2, b"at")),
    ReplicaCaughtUp(node=1, stage=0, partition=1, worker=2, incarnation=3, safe=True, bytes=4, steps_behind=5),
    ReplicaDiverged(node=1, stage=0, partition=1, worker=2, incarnation=3, step=4),
    Unreached(
        node=1, stage=0, partition=1, primary=1, leader=0, worker=2, incarnation=3, edge=4, producer=5, acks=True
    ),
    PartitionFinished(node=1, stage=0, partition=1),
    Checkpointed(node=1, settled=True),
    Goodbye(node=1),
    Failure(node=1, kind="UserCodeError", message="x"),
]
COMMANDS = [
    Welcome(node=1, incarnation=2, workers=3),
    Rejected(reason="no"),
    RegisterAgain(),
    NewTable(table=Table(0, (), (), {}), complete={0: [1]}),
    TableChanged(change=TableChange(0, 1, [], [], {}, [], 1, [2], {2: 3}, {4: 5})),
    PlanChanged(version=1, change=b"change"),
    EdgeStored(edge=2, producer=3, number=4, mark=Mark(3, CHECKSUM, 2, b"at")),
    EdgeComplete(edge=0, producers=[1]),
    EdgeWatermark(edge=0, watermark=NEVER),
    HeartbeatSeen(),
    CopyState(stage=0, partition=1, worker=2, incarnation=3),
    GoodbyeSeen(),
    LastCheckpoints(),
    Stop(reason="over"),
]
Decode = Callable[[Any], Any]
PORTS: list[tuple[Decode, list[Any], Any]] = [
    (decode_asked, ASKED, Asked),
    (decode_answer, ANSWERED, Answered),
    (decode_report, REPORTS, ToController),
    (decode_command, COMMANDS, FromController),
]


def numbers(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield all numbers in a message, with the way to each. Numbers of a table are left out: only the controller makes
    tables."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key != "table":
                yield from numbers(item, (*way, key))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from numbers(item, (*way, place))
    elif type(value) is int:
        yield way, value


def with_another(value: Any, way: tuple[Any, ...], number: int) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for step in way[:-1]:
        inner = inner[step]
    inner[way[-1]] = number
    return changed


def absurd() -> Iterator[Any]:
    for decode, messages, _ in PORTS:
        for message in messages:
            name = type(message).__name__
            plain = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
            for way, number in numbers(plain):
                yield pytest.param(decode, plain, way, number, id=f"{name} {'.'.join(map(str, way))}")


@pytest.mark.parametrize(("decode", "plain", "way", "number"), list(absurd()))
def test_an_absurd_number_is_refused(decode: Decode, plain: Any, way: tuple[Any, ...], number: int) -> None:
    def sent(instead: int) -> bytes:
        return PREFIX + msgspec.msgpack.encode(with_another(plain, way, instead))

    decode(sent(number))
    # A time may be any number of 64 bits; NEVER and END_OF_TIME stand for times.
    for beyond in BELOW if number == CHECKSUM else ABOVE if number in (NEVER, END_OF_TIME) else BELOW + ABOVE:
        with pytest.raises(ProtocolError, match="malformed"):
            decode(sent(beyond))


def test_every_statistic_has_a_place_here() -> None:
    assert set(EVERYTHING) == set(Statistics.__annotations__)
    assert set(EVERYTHING["stages"][0]) == set(StageStatistics.__annotations__)
    assert set(EVERYTHING["load"]) == set(Load.__annotations__)


def test_statistics_come_with_the_names_of_their_fields() -> None:
    came = decode_report(encode(Heartbeat(node=1, progress=7, stats=EVERYTHING)))
    assert isinstance(came, Heartbeat)
    assert came.stats["behind"][0].its_turn is False
    assert came.stats["load"]["replicas"][0].state_bytes == 6


def test_a_checksum_may_have_all_its_bits() -> None:
    message = OrdersSeen([PartitionSeen(0, 0, 1, 1, 5, 5, 5, (1 << 64) - 1)])
    assert decode_answer(encode(message)) == message


@pytest.mark.parametrize(("decode", "messages", "union"), PORTS, ids=["asked", "answered", "reports", "commands"])
def test_every_message_has_a_place_here(decode: Decode, messages: list[Any], union: Any) -> None:
    assert {type(message) for message in messages} == set(get_args(union))
    for message in messages:
        assert decode(encode(message)) == message


@pytest.mark.parametrize("message", ANSWERED, ids=lambda message: type(message).__name__)
def test_a_port_is_not_told_what_only_a_port_says(message: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode_asked(encode(message))
    assert decode_data(encode(message)) == message


@pytest.mark.parametrize("message", ASKED, ids=lambda message: type(message).__name__)
def test_who_asks_a_port_is_not_asked_by_it(message: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode_answer(encode(message))
