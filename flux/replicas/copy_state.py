"""A replica's state as one value that travels: step 2 of AddReplica (design: copy).

Taken by the primary between two steps: operator state, input positions, output logs, step number, the order received
but not yet applied, and where uncommitted output begins, so that the new replica holds back what the primary holds back.

A standby that has an earlier copy gets one of what has changed since: the operator's changes, and the rest as ever, because that
is small and all of it may have changed.

Two parts, because the second takes long where there is much state: ``photograph`` refers to everything as it is, and
``Photograph.encode`` makes bytes of it, in any thread, as long as the replica takes no step meanwhile.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from flux.replicas.replica import Replica
from flux.replicas.snapshot import decode_snapshot, encode_snapshot, laid_out, laid_pieces
from flux.stream.elements import WORDS, End, Rows
from flux.stream.log import LogEntry
from flux.stream.producer import Producer
from flux.stream.receiver import Inbound
from flux.wire.messages import ElementKind
from flux.wire.unpickle import loads
from partitioning.cluster import Clustered
from partitioning.ids import StreamId

_LENGTH = struct.Struct("<Q")
#: Kind of the element, its rows, their partitions and offsets, bytes in the log, checksum, time.
_LogTuple = tuple[int, bytes, bytes, bytes, int, int, float]


@dataclass(frozen=True)
class Position:
    """Where a stream's input goes on, and what tells a retried producer apart: the ``marks`` of the stream."""

    stream: StreamId
    next: int
    incarnation: int
    marks: tuple[tuple[int, int, int, bytes, int], ...]


@dataclass(frozen=True)
class OutputLog:
    base: int
    finished: bool
    gone: bytes
    entries: tuple[_LogTuple, ...]


@dataclass(frozen=True)
class ReplicaState:
    """Everything about one replica between two steps, but what its operator holds. ``replica`` is Replica.state()."""

    replica: dict[str, object]
    positions: tuple[Position, ...]
    outputs: tuple[OutputLog, ...]


@dataclass(frozen=True)
class StateCopy:
    """As it came: ``snapshot`` of the operator, and its ``changes`` after that, up to the moment of ``state``."""

    state: ReplicaState
    snapshot: Any
    changes: tuple[Any, ...] = ()

    @property
    def outputs(self) -> tuple[OutputLog, ...]:
        return self.state.outputs

    @property
    def positions(self) -> tuple[Position, ...]:
        return self.state.positions


@dataclass(frozen=True)
class OutputNow:
    """An output log as it is: entries never change, the log goes on without them."""

    base: int
    finished: bool
    gone: bytes
    entries: tuple[LogEntry, ...]

    @classmethod
    def of(cls, producer: Producer) -> OutputNow:
        log = producer.log
        return cls(log.base, producer.finished, log.gone.tobytes(), tuple(log.entries()))

    @classmethod
    def after(cls, producer: Producer) -> OutputNow:
        """As it will be once all of it has been acked."""
        gone = producer.log.gone.copy()
        for entry in producer.log.entries():
            gone[entry.touches] = entry.sequence
        return cls(producer.log.end, producer.finished, gone.tobytes(), ())


@dataclass(frozen=True)
class Photograph:
    """What ``encode`` makes bytes of, or ``encode_changes``. ``snapshot`` may be a view of the operator's state; ``changes``:
    what it said has changed. ``classes``: as ``Operator.snapshot_classes``."""

    where: str
    replica: dict[str, object]
    positions: tuple[Position, ...]
    outputs: tuple[OutputNow, ...]
    snapshot: Any
    classes: tuple[type, ...] | None
    changes: Any = None

    def encode(self, room: np.ndarray | None = None) -> bytes | memoryview:
        """A whole copy. ``room``: memory to use for it if that is enough."""
        return encode_snapshot(self.snapshot, self.where, self._head(), room, self.classes)

    def encode_changes(self) -> memoryview:
        """Of this cut alone."""
        return memoryview(encode_snapshot(self.changes, self.where, classes=self.classes)).cast("B")

    def encode_since(self, changes: Sequence[memoryview]) -> memoryview:
        """What goes to a standby that lacks these changes; the rest of the state is whole in it."""
        return laid_out(self._head(), changes)

    def _head(self) -> bytes:
        outputs = tuple(
            OutputLog(log.base, log.finished, log.gone, tuple(map(_pack, log.entries))) for log in self.outputs
        )
        state = ReplicaState(self.replica, self.positions, outputs)
        pickled = pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
        return _LENGTH.pack(len(pickled)) + pickled


def photograph(replica: Replica, inbounds: Iterable[Inbound], changes: Any = None, whole: bool = True) -> Photograph:
    """Of a replica between two steps. ``changes``: what its operator has just said. ``whole``: with a snapshot of it."""
    return Photograph(
        replica.where,
        replica.state(),
        positions_of(replica, inbounds),
        tuple(OutputNow.of(outlet.producer) for outlet in replica.outlets),
        replica.snapshot() if whole else None,
        replica.operator.snapshot_classes,
        changes,
    )


def positions_of(replica: Replica, inbounds: Iterable[Inbound]) -> tuple[Position, ...]:
    """Where its inputs go on."""
    return tuple(_position(inbound, replica.partition) for inbound in inbounds)


def _position(inbound: Inbound, partition: int) -> Position:
    marks = tuple((*mark,) for mark in inbound.marks.shown())
    return Position(inbound.stream, inbound.next_to_apply(partition), inbound.incarnation, marks)


def room_for(nbytes: int) -> np.ndarray:
    """Memory that is really there: to touch it for the first time can take longer than the copy."""
    room = np.empty(nbytes, np.uint8)
    room[::_PAGE] = 0
    return room


_PAGE = 4096


def joined(parts: Sequence[bytes | memoryview]) -> memoryview:
    """One piece of memory of its own, that may be written to."""
    whole = np.empty(sum(memoryview(part).nbytes for part in parts), np.uint8)
    start = 0
    for part in parts:
        piece = np.frombuffer(part, np.uint8)
        whole[start : start + len(piece)] = piece
        start += len(piece)
    return whole.data


def decode(
    data: bytes | memoryview, classes: Sequence[type] | None = (), since: Sequence[bytes | memoryview] = ()
) -> StateCopy:
    """Only of bytes signed with the query's secret. Arrow data stays a view into ``data``. ``classes``: as
    ``Operator.snapshot_classes``. ``since``: copies of what has changed after it, each after the one before."""
    view, end = _head(data)
    changes = [decode_snapshot(each, 0, classes) for piece in since for each in laid_pieces(*_head(piece))]
    return StateCopy(decode_state(since[-1] if since else data), decode_snapshot(view, end, classes), tuple(changes))


def decode_state(data: bytes | memoryview) -> ReplicaState:
    """The same without the snapshot of the operator."""
    view, end = _head(data)
    state = loads(view[_LENGTH.size : end], (ReplicaState, Position, OutputLog, StreamId))
    assert isinstance(state, ReplicaState)
    return state


def _head(data: bytes | memoryview) -> tuple[memoryview, int]:
    """The bytes, and where the snapshot begins."""
    view = memoryview(data).cast("B")
    (length,) = _LENGTH.unpack_from(view)
    return view, _LENGTH.size + length


def restore(copy: StateCopy, replica: Replica) -> None:
    """Make a fresh replica what the copied one was. Its operator has been restored, and its producers were made with the
    logs' bases."""
    replica.adopt(copy.state.replica)
    for outlet, output in zip(replica.outlets, copy.outputs, strict=True):
        for entry in output.entries:
            _append(outlet.producer, entry, outlet.schema or replica.stage.output_schema)
        outlet.producer.finished = output.finished
        outlet.producer.log.gone[:] = np.frombuffer(output.gone, np.int64)


def _pack(entry: LogEntry) -> _LogTuple:
    kind = int(entry.element.kind)
    if not isinstance(entry.element, Rows):
        return kind, b"", b"", b"", 0, entry.checksum, entry.created
    data = entry.element.data
    by_rank, offsets = data.by_rank.astype(np.int32).tobytes(), data.offsets.astype(np.int64).tobytes()
    batch = data.batch.serialize().to_pybytes()
    return kind, batch, by_rank, offsets, data.nbytes, entry.checksum, entry.created


def _append(producer: Producer, packed: _LogTuple, schema: pa.Schema | None) -> None:
    kind, batch, by_rank, offsets, nbytes, checksum, created = packed
    if kind != ElementKind.ROWS:
        word = WORDS[ElementKind(kind)]
        producer.finish(created) if isinstance(word, End) else producer.say(word, created)
        return
    rows = pa.ipc.read_record_batch(pa.py_buffer(batch), schema)
    # Copies that may be written: kernels would be compiled anew for arrays that may not.
    data = Clustered(rows, np.frombuffer(by_rank, np.int32).copy(), np.frombuffer(offsets, np.int64).copy(), nbytes)
    producer.append(data, created, checksum)
