"""Small messages to one receiver travel together, and nobody who makes or reads them knows."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux.errors import ProtocolError
from flux.wire.bundle import BUNDLE_BYTES, MESSAGES_MAX, PREFIX, SMALL_BYTES, WORD, bundled, unbundled
from flux.wire.frames import PREFIX as MESSAGE_PREFIX

frames_ = st.lists(
    st.binary(max_size=40) | st.just(bytes(SMALL_BYTES)) | st.just(bytes(SMALL_BYTES + 1)), min_size=1, max_size=3
)
message_ = frames_.map(lambda frames: [MESSAGE_PREFIX, *frames])


def sent(messages: list[Any]) -> list[Any]:
    """What ZeroMQ is given: lists of frames."""
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


@pytest.mark.parametrize("size", [0, SMALL_BYTES - len(MESSAGE_PREFIX)])
def test_a_bundle_is_bounded_in_bytes_and_in_messages(size: int) -> None:
    messages = [[MESSAGE_PREFIX, bytes(size)] for _ in range(2 * MESSAGES_MAX + 1)]
    travelled = sent(messages)
    assert heard(travelled) == messages
    assert all(len(frames[0]) < BUNDLE_BYTES + MESSAGES_MAX * 2 * (WORD + 8) for frames in travelled)
    assert all(len(list(unbundled(frames))) <= MESSAGES_MAX for frames in travelled)


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
