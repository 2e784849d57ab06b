"""The whole content of a standby as bytes, and back: the vault gives them to a worker that is to lead (design: restore)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from flux.replicas.copy_state import decode_state
from flux.replicas.order import NO_CLAIM, Claim, OrderLog
from flux.replicas.standby import Checkpoint, Standby
from flux.wire.messages import Mark, OrderEntry
from partitioning.ids import PartitionKey, StreamId

_LENGTH = struct.Struct("<Q")
#: Each piece of the checkpoint begins at a multiple of this, so that arrays in it can be used in place.
_ALIGNMENT = 64


class _Head(msgspec.Struct, array_like=True):
    """The head of an image. ``pieces`` are the bytes of the whole copy and of each copy of changes since; none: the standby
    began empty."""

    pieces: list[int]
    term: int
    number: int
    step: int
    entries: list[OrderEntry]
    committed: int
    left: int
    claim: tuple[int, int] = NO_CLAIM
    settled: list[tuple[int, int, Mark]] = []


_head = msgspec.msgpack.Decoder(_Head)


def encode(standby: Standby) -> memoryview:
    kept, order = standby.checkpoint, standby.order
    head = msgspec.msgpack.encode(
        _Head(
            [piece.nbytes for piece in kept.pieces], kept.term, kept.number, kept.step, order.since(order.base), order.committed,
            standby.left, standby.claim, [(*stream, mark) for stream, mark in standby.settled.items()],
        )
    )  # fmt: skip
    starts, end = _places(_LENGTH.size + len(head), [piece.nbytes for piece in kept.pieces])
    whole = bytearray(end)
    whole[: _LENGTH.size] = _LENGTH.pack(len(head))
    whole[_LENGTH.size : _LENGTH.size + len(head)] = head
    for start, piece in zip(starts, kept.pieces, strict=True):
        whole[start : start + piece.nbytes] = piece
    return memoryview(whole)


def decode(
    data: memoryview, key: PartitionKey, incarnation: int, taken: Callable[[Standby], None] = lambda standby: None
) -> Standby:
    """Decode a standby with the same content. Its checkpoint stays a view into ``data``."""
    (length,) = _LENGTH.unpack_from(data)
    head = _head.decode(data[_LENGTH.size : _LENGTH.size + length])
    standby = Standby(key, incarnation, taken)
    if head.pieces:
        starts, _ = _places(_LENGTH.size + length, head.pieces)
        whole, *changes = [data[start : start + size] for start, size in zip(starts, head.pieces, strict=True)]
        newest = Checkpoint.of(whole, decode_state(changes[-1] if changes else whole), head.term, head.number)
        standby.checkpoint = replace(newest, changes=tuple(changes))
    standby.order = OrderLog(head.step)
    standby.order.adopt(head.entries, head.committed)
    standby.left, standby.claim = head.left, Claim(*head.claim)
    standby.settled = {StreamId(edge, producer): mark for edge, producer, mark in head.settled}
    return standby


def _places(end: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the beginnings of the pieces that come behind ``end``, and the end of the last one."""
    starts = []
    for size in sizes:
        starts.append(_aligned(end))
        end = starts[-1] + size
    return starts, end


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
