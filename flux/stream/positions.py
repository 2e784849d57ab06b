"""Positions at which readers of sources go on (design: position).

A position belongs to the reader: code that keeps it, or gives it to a reader, knows nothing about its meaning. A reader without
positions of its own is given the number of batches that it has to leave out, because its batches are numbered.
"""

from __future__ import annotations

from typing import Any, NewType

import msgspec

from flux.dataflow.user_code import text_of
from flux.errors import UsageError

#: The second argument of ``read(partition, start)``.
ReaderPosition = NewType("ReaderPosition", object)

#: Most bytes of a position in messages and checkpoints.
POSITION_BYTES = 1024


def packed(position: Any) -> bytes:
    """Encode a position. UsageError: it cannot travel."""
    try:
        data = msgspec.msgpack.encode(position)
        same = _plain(position) == msgspec.msgpack.decode(data)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"{_expected(position)}: {error}") from None
    if not same:
        raise UsageError(f"{_expected(position)}, which would come back as something else")
    if len(data) > POSITION_BYTES:
        raise UsageError(
            f"the position of a source may take {POSITION_BYTES} bytes, got one of {len(data)}: keep what is long elsewhere, "
            "and give its name"
        )
    return data


def _expected(position: Any) -> str:
    return (
        "the position of a source must be a number, text, bytes, or lists and dicts of these, got "
        f"{text_of(position, repr):.100}"
    )


def _plain(position: Any) -> Any:
    """Replace tuples by lists, as a decoded position has them."""
    if isinstance(position, list | tuple):
        return [_plain(each) for each in position]
    return {key: _plain(each) for key, each in position.items()} if isinstance(position, dict) else position


def unpacked(data: bytes) -> ReaderPosition:
    return ReaderPosition(msgspec.msgpack.decode(data))


def position_before(sequence: int) -> ReaderPosition:
    """Make the position of a reader whose batches are counted, so that element ``sequence`` of its streams comes first."""
    return ReaderPosition(sequence)
