"""A replica's state as one value that travels: step 2 of AddReplica (design: copy).

The copy is taken by the primary between two steps: operator state, input positions, output logs, step number, the order that is
received but not yet applied, and the beginning of uncommitted output, so that the new replica holds back the same output as the
primary.

A standby that has an earlier copy gets a copy with the operator's changes since then. The rest is whole in it, as ever, because
that is small and all of it may have changed.

Checkpoint locations hold pickles of ``ReplicaState``, ``StreamPosition`` and ``OutputLog`` by name, and outlive the places of
modules: a class that is moved keeps the names that it had in ``__former_names__`` (design: stored-names).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from flux.exchange.inbound import Inbound
from flux.exchange.log import WORDS, LogEntry, Rows
from flux.exchange.producer import Producer
from flux.replica.output import output_at
from flux.replica.replica import Replica
from flux.replica.snapshot import decode_snapshot, encode_snapshot, laid_out, laid_pieces
from flux.windows.window import NEVER
from flux.wire.messages import ElementKind, Mark
from flux.wire.safe_pickle import loads
from partitioning.clustering import Clustered
from partitioning.ids import StreamId

_LENGTH = struct.Struct("<Q")
#: Kind of the element, its rows, their partitions and offsets, bytes in the log, checksum, time, and the watermark behind it,
#: which streams without event time lack.
_LogTuple = tuple[int, bytes, bytes, bytes, int, int, float] | tuple[int, bytes, bytes, bytes, int, int, float, int]
#: The fields of ``flux.wire.messages.Mark``, in order. Marks of streams without event time have the first five.
_MarkTuple = tuple[int, int, int, bytes, int] | tuple[int, int, int, bytes, int, int, int, int, int]


@dataclass(frozen=True)
class StreamPosition:
    """The position of one input stream. The ``marks`` of the stream identify a retried producer."""

    __former_names__: ClassVar = [("flux.replicas.copy_state", "Position")]

    stream: StreamId
    #: Next sequence that the partition has to apply.
    next: int
    #: Incarnation of the producer.
    incarnation: int
    marks: tuple[_MarkTuple, ...]


@dataclass(frozen=True)
class OutputLog:
    """The entries of an output log, and its place in the stream."""

    __former_names__: ClassVar = [("flux.replicas.copy_state", "OutputLog")]

    #: Sequence of the first entry; without entries, of the next one.
    base: int
    #: The end is among the entries, or was.
    finished: bool
    #: For each partition of the consumer the highest evicted sequence with rows for it (``Log.gone``), as int64.
    gone: bytes
    entries: tuple[_LogTuple, ...]


@dataclass(frozen=True)
class ReplicaState:
    """Everything about one replica between two steps, except the state of its operator."""

    __former_names__: ClassVar = [("flux.replicas.copy_state", "ReplicaState")]

    #: As returned by ``Replica.state``.
    replica: dict[str, object]
    positions: tuple[StreamPosition, ...]
    outputs: tuple[OutputLog, ...]


@dataclass(frozen=True)
class StateCopy:
    """A received copy: the state of a replica, and that of its operator up to the same moment."""

    state: ReplicaState
    #: Snapshot of the operator.
    snapshot: Any
    #: Changes of the operator after the snapshot, up to the moment of ``state``.
    changes: tuple[Any, ...] = ()
    #: The entries of each output log, once they are unpacked.
    logs: tuple[list[LogEntry], ...] = ()

    @property
    def outputs(self) -> tuple[OutputLog, ...]:
        return self.state.outputs

    @property
    def positions(self) -> tuple[StreamPosition, ...]:
        return self.state.positions


@dataclass(frozen=True)
class OutputNow:
    """An output log at one moment: its entries never change, and the log goes on without them."""

    #: That of the stream.
    edge: int
    base: int
    finished: bool
    gone: bytes
    entries: tuple[LogEntry, ...]

    @classmethod
    def of(cls, producer: Producer) -> OutputNow:
        log = producer.log
        return cls(producer.stream.edge, log.base, producer.finished, log.gone.tobytes(), tuple(log.entries()))

    @classmethod
    def after(cls, producer: Producer) -> OutputNow:
        """Describe the log as it will be once all its entries have been acked."""
        gone = producer.log.gone.copy()
        for entry in producer.log.entries():
            gone[entry.touches] = entry.sequence
        return cls(producer.stream.edge, producer.log.end, producer.finished, gone.tobytes(), ())


@dataclass(frozen=True)
class Photograph:
    """References to the state of a replica between two steps, which ``encode`` or ``encode_changes`` serialises.

    A copy is made in two parts, because the second takes long for a large state: ``photograph`` refers to everything as it is,
    and ``Photograph.encode`` serialises it, in any thread, as long as the replica takes no step meanwhile."""

    where: str
    replica: dict[str, object]
    positions: tuple[StreamPosition, ...]
    outputs: tuple[OutputNow, ...]
    #: Snapshot of the operator; may be a view of its state.
    snapshot: Any
    #: As ``Operator.snapshot_classes``.
    classes: tuple[type, ...] | None
    #: The operator's changes since its last cut.
    changes: Any = None

    def encode(self, room: np.ndarray | None = None) -> bytes | memoryview:
        """Encode a whole copy. ``room``: memory that is used for the copy if it is large enough."""
        return encode_snapshot(self.snapshot, self.where, self._head(), room, self.classes)

    def encode_changes(self) -> memoryview:
        """Encode the changes of this cut alone."""
        return memoryview(encode_snapshot(self.changes, self.where, classes=self.classes)).cast("B")

    def encode_since(self, changes: Sequence[memoryview]) -> memoryview:
        """Encode the copy for a standby that lacks these changes; the rest of the state is whole in it."""
        return laid_out(self._head(), changes)

    def _head(self) -> bytes:
        outputs = tuple(
            OutputLog(log.base, log.finished, log.gone, tuple(map(_pack, log.entries))) for log in self.outputs
        )
        state = ReplicaState(self.replica, self.positions, outputs)
        pickled = pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
        return _LENGTH.pack(len(pickled)) + pickled


def photograph(replica: Replica, inbounds: Iterable[Inbound], changes: Any = None, whole: bool = True) -> Photograph:
    """Refer to the state of a replica between two steps. ``changes``: those that its operator has just returned. ``whole``: with
    a snapshot of the operator."""
    return Photograph(
        replica.where,
        replica.state(),
        positions_of(replica, inbounds),
        tuple(OutputNow.of(outlet.producer) for outlet in replica.outlets),
        replica.guard.snapshot() if whole else None,
        replica.operator.snapshot_classes,
        changes,
    )


def positions_of(replica: Replica, inbounds: Iterable[Inbound]) -> tuple[StreamPosition, ...]:
    """Return the positions at which the replica's inputs go on."""
    return tuple(_position(inbound, replica.partition) for inbound in inbounds)


def _position(inbound: Inbound, partition: int) -> StreamPosition:
    marks = tuple(_told(mark) for mark in inbound.marks.shown())
    return StreamPosition(inbound.stream, inbound.next_to_apply(partition), inbound.incarnation, marks)


def _told(mark: Mark) -> _MarkTuple:
    """Return a mark as copies have it."""
    fields = (*mark,)
    return fields[:5] if mark.watermark == NEVER and not mark.late else fields


def room_for(nbytes: int) -> np.ndarray:
    """Allocate memory and touch each page of it, because the first touch can take longer than the copy."""
    room = np.empty(nbytes, np.uint8)
    room[::_PAGE] = 0
    return room


_PAGE = 4096


def joined(parts: Sequence[bytes | memoryview]) -> memoryview:
    """Join parts into one new piece of memory, which may be written to."""
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
    """Decode a copy, which must have been signed with the query's secret. Arrow data stays a view into ``data``. ``classes``: as
    ``Operator.snapshot_classes``. ``since``: copies with the changes after it, each after the one before."""
    view, end = _head(data)
    changes = [decode_snapshot(each, 0, classes) for piece in since for each in laid_pieces(*_head(piece))]
    return StateCopy(decode_state(since[-1] if since else data), decode_snapshot(view, end, classes), tuple(changes))


def decode_state(data: bytes | memoryview) -> ReplicaState:
    """Decode a copy without the snapshot of the operator."""
    view, end = _head(data)
    state = loads(view[_LENGTH.size : end], (ReplicaState, StreamPosition, OutputLog, StreamId))
    assert isinstance(state, ReplicaState)
    return state


def _head(data: bytes | memoryview) -> tuple[memoryview, int]:
    """Return a view of the bytes, and the offset at which the snapshot begins."""
    view = memoryview(data).cast("B")
    (length,) = _LENGTH.unpack_from(view)
    return view, _LENGTH.size + length


def fitted(copy: StateCopy, at_birth: Sequence[int], known: Callable[[int], bool]) -> StateCopy:
    """Return a copy with the edges that its replica is to feed, without those that are removed: they are not ``known``.
    ``at_birth``: the edges that replicas of the stage feed when they begin (design: edge-begins)."""
    state = copy.state.replica
    edges = state.get("edges", at_birth)
    assert isinstance(edges, Sequence)
    kept = [place for place, edge in enumerate(edges) if known(edge)]
    if len(kept) == len(edges):
        return copy
    fewer = {"edges": [edges[place] for place in kept], "version": state.get("version", 0)}
    outputs = tuple(copy.outputs[place] for place in kept)
    return replace(copy, state=replace(copy.state, replica=state | fewer | output_at(state, kept), outputs=outputs))


def edges_of(copy: StateCopy, at_birth: Sequence[int]) -> Sequence[int]:
    """Return the edges of a copy, in the order of its output logs."""
    edges = copy.state.replica.get("edges", at_birth)
    assert isinstance(edges, Sequence)
    return edges


def restored(copy: StateCopy, replica: Replica) -> StateCopy:
    """Give the operator of a fresh replica its state, and return the copy with its logs unpacked. In any thread: both may take
    long."""
    if copy.snapshot is not None or copy.changes:
        replica.guard.restore(copy.snapshot, copy.changes)
    schemas = [outlet.schema or replica.stage.output_schema for outlet in replica.outlets]
    return replace(copy, logs=tuple(map(_unpacked, copy.state.outputs, schemas)))


def restore(copy: StateCopy, replica: Replica) -> None:
    """Give a fresh replica the state of the copied one. ``copy`` is as ``restored`` has returned it, and the replica's producers
    were made with the logs' bases."""
    replica.adopt(copy.state.replica)
    for outlet, output, entries in zip(replica.outlets, copy.state.outputs, copy.logs, strict=True):
        outlet.producer.adopt(entries, np.frombuffer(output.gone, np.int64), output.finished)


def _pack(entry: LogEntry) -> _LogTuple:
    kind = int(entry.element.kind)
    if not isinstance(entry.element, Rows):
        return kind, b"", b"", b"", 0, entry.checksum, entry.created
    data = entry.element.data
    by_rank, offsets = data.by_rank.astype(np.int32).tobytes(), data.offsets.astype(np.int64).tobytes()
    batch = data.batch.serialize().to_pybytes()
    packed = kind, batch, by_rank, offsets, data.nbytes, entry.checksum, entry.created
    return packed if entry.watermark == NEVER else (*packed, entry.watermark)


def _unpacked(output: OutputLog, schema: pa.Schema | None) -> list[LogEntry]:
    """Return the entries of a copied log."""
    entries: list[LogEntry] = []
    for sequence, packed in enumerate(output.entries, output.base):
        kind, batch, by_rank, offsets, nbytes, checksum, created = packed[:7]
        watermark = packed[7] if len(packed) > 7 else NEVER
        if kind == ElementKind.ROWS:
            rows = pa.ipc.read_record_batch(pa.py_buffer(batch), schema)
            # Copies, because kernels would be compiled anew for arrays that are read-only.
            touches = np.frombuffer(by_rank, np.int32).copy()
            data = Clustered(rows, touches, np.frombuffer(offsets, np.int64).copy(), nbytes)
            entries.append(LogEntry(sequence, Rows(data), touches, nbytes, checksum, created, watermark=watermark))
        else:  # a word goes to every partition, and leaves the checksum as it is
            everyone = np.arange(len(output.gone) // np.dtype(np.int64).itemsize, dtype=np.int32)
            known = entries[-1].checksum if entries else 0
            entries.append(LogEntry(sequence, WORDS[ElementKind(kind)], everyone, 0, known, created))
    return entries
