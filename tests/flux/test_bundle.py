"""Small messages to one receiver travel together, unknown to the code that makes or reads them."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux.errors import ProtocolError
from flux.wire.bundle import (
    BUNDLE_BYTES,
    DIRECTORY_BYTES,
    FRAMES_MAX,
    MESSAGES_MAX,
    PREFIX,
    SMALL_BYTES,
    WORD,
    bundled,
    unbundled,
)
from flux.wire.frames import PREFIX as MESSAGE_PREFIX

frames_ = st.lists(
    st.binary(max_size=40) | st.just(bytes(SMALL_BYTES)) | st.just(bytes(SMALL_BYTES + 1)), min_size=1, max_size=3
)
message_ = frames_.map(lambda frames: [MESSAGE_PREFIX, *frames])


def sent(messages: list[Any]) -> list[Any]:
    """Return the lists of frames that ZeroMQ is given."""
    return [list(frames) for frames in bundled(messages)]


def heard(travelled: list[Any]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in message] for frames in travelled for message in unbundled(frames)]


@given(st.lists(message_, min_size=1, max_size=12))
def test_what_comes_are_the_messages_that_were_sent_in_their_order(messages: list[list[bytes]]) -> None:
    assert heard(sent(messages)) == messages


def test_small_messages_are_one_and_one_alone_stays_as_it_is() -> None:
    small = [MESSAGE_PREFIX + b"header", b"rows"]
    assert sent([small]) == [small]
    assert [len(frames) for frames in sent([small, small, small])] == [1]


def test_a_large_message_travels_as_it_is_in_its_turn() -> None:
    small, large = [MESSAGE_PREFIX], [MESSAGE_PREFIX, bytes(SMALL_BYTES)]
    travelled = sent([small, small, large, small])
    assert [len(frames) for frames in travelled] == [1, 2, 1]
    assert travelled[1] == large
    assert heard(travelled) == [small, small, large, small]


@pytest.mark.parametrize("frames", [1, 2, FRAMES_MAX // 2 + 1])
@pytest.mark.parametrize("size", [0, 1, 15])
def test_a_bundle_is_bounded_in_messages_and_frames(size: int, frames: int) -> None:
    messages = [[MESSAGE_PREFIX, *[bytes(size)] * frames] for _ in range(2 * MESSAGES_MAX + 1)]
    travelled = sent(messages)
    assert heard(travelled) == messages
    for bundle in map(unbundled, travelled):
        found = list(bundle)
        assert len(found) <= MESSAGES_MAX
        assert len(found) == 1 or sum(map(len, found)) <= FRAMES_MAX


@given(st.lists(message_, min_size=2, max_size=12), st.integers(-1, 3000) | st.just(BUNDLE_BYTES))
def test_no_bundle_is_longer_than_the_receiver_accepts(messages: list[list[bytes]], accepted: int) -> None:
    """Bound bundles: ZeroMQ cuts the connection of a peer that sends more, and after the next handshake again: the
    stream stood still for ever."""
    travelled = [list(frames) for frames in bundled(messages, accepted)]
    assert heard(travelled) == messages
    assert all(frames in messages or len(frames[0]) <= accepted for frames in travelled)


def test_what_is_kept_of_a_bundle_keeps_nothing_else_of_it() -> None:
    (frames,) = sent([[MESSAGE_PREFIX, b"rows"], [MESSAGE_PREFIX, bytes(SMALL_BYTES // 2)]])
    for _, rows in unbundled(frames):
        assert memoryview(rows).obj is rows, "a view keeps the memory of all others"
        assert isinstance(rows, bytes)


def test_rows_lie_at_words_wherever_the_bundle_came_to_lie() -> None:
    (frames,) = sent([[MESSAGE_PREFIX + b"x", b"12345678"], [MESSAGE_PREFIX, pa.py_buffer(b"87654321")]])
    for shift in range(WORD):
        moved = memoryview(bytes(shift) + frames[0])[shift:]
        for _, rows in unbundled([moved]):
            assert pa.py_buffer(rows).address % WORD == 0


def spoilt(directory: Any, rest: bytes = b"") -> list[bytes]:
    encoded = directory if isinstance(directory, bytes) else msgspec.msgpack.encode(directory)
    return [PREFIX + len(encoded).to_bytes(4, "little") + encoded + bytes(-len(encoded) % WORD) + rest]


@pytest.mark.parametrize(
    "frames",
    [
        [PREFIX],
        [PREFIX + b"\x01"],
        [PREFIX + b"\xff\xff\xff\xff"],
        spoilt(b"\xc1"),
        spoilt({"a": 1}),
        spoilt([["a"]]),
        spoilt([[1 << 63]]),
        spoilt([[-8, 8]]),
        spoilt([[]]),
        spoilt([[8], []], bytes(8)),
        spoilt([[9]], bytes(8)),
        spoilt([[8]], bytes(16)),
        spoilt([[0]] * (MESSAGES_MAX + 1)),
        spoilt([[0] * (FRAMES_MAX + 1)]),
        spoilt(b"\xdc\xff\xff" + bytes(DIRECTORY_BYTES)),
        spoilt([[BUNDLE_BYTES]], bytes(BUNDLE_BYTES)),
        spoilt(b"\x91" * 2000),
    ],
)
def test_what_does_not_keep_to_the_form_is_an_error_of_the_peer(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        list(unbundled(frames))


@given(st.binary(max_size=200))
def test_any_bytes_behind_the_prefix_are_messages_or_an_error_of_the_peer(rest: bytes) -> None:
    try:
        for message in unbundled([PREFIX + rest]):
            assert sum(map(len, message)) <= len(rest)
    except ProtocolError:
        pass
