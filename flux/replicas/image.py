"""All that a standby holds, as bytes and back: what the vault gives to a worker that is to lead (design: restore)."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from flux.replicas.copy_state import decode_state
from flux.replicas.order import OrderLog
from flux.replicas.standby import Checkpoint, Standby
from flux.wire.messages import OrderEntry
from partitioning.ids import PartitionKey

_LENGTH = struct.Struct("<Q")
#: The checkpoint begins at a multiple of this: arrays in it are used where they are.
_ALIGNMENT = 64


class _Head(msgspec.Struct, array_like=True):
    """``whole``: there is a checkpoint; else the standby began empty."""

    whole: bool
    term: int
    number: int
    step: int
    entries: list[OrderEntry]
    committed: int
    left: int


_head = msgspec.msgpack.Decoder(_Head)


def encode(standby: Standby) -> memoryview:
    kept, order = standby.checkpoint, standby.order
    head = msgspec.msgpack.encode(
        _Head(
            kept.data is not None, kept.term, kept.number, kept.step, order.since(order.base), order.committed, standby.left
        )
    )  # fmt: skip
    start = _aligned(_LENGTH.size + len(head))
    whole = bytearray(start + kept.nbytes)
    whole[: _LENGTH.size] = _LENGTH.pack(len(head))
    whole[_LENGTH.size : _LENGTH.size + len(head)] = head
    if kept.data is not None:
        whole[start:] = kept.data
    return memoryview(whole)


def decode(
    data: memoryview, key: PartitionKey, incarnation: int, taken: Callable[[Standby], None] = lambda standby: None
) -> Standby:
    """A standby that holds the same. Its checkpoint stays a view into ``data``."""
    (length,) = _LENGTH.unpack_from(data)
    head = _head.decode(data[_LENGTH.size : _LENGTH.size + length])
    standby = Standby(key, incarnation, taken)
    if head.whole:
        kept = data[_aligned(_LENGTH.size + length) :]
        standby.checkpoint = Checkpoint.of(kept, decode_state(kept), head.term, head.number)
    standby.order = OrderLog(head.step)
    standby.order.adopt(head.entries, head.committed)
    standby.left = head.left
    return standby


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
