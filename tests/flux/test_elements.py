"""Elements of a stream: rows for some partitions, words for all of them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flux.errors import ProtocolError
from flux.exchange.log import WORDS, End
from flux.wire.codec import check_shape, decode_data
from flux.wire.frames import encode
from flux.wire.messages import Data, ElementKind
from tests.flux.test_producer import batch, messages, producer, welcomed

ROWS = pa.record_batch({"x": pa.array([1], pa.int64())})


def test_a_word_is_numbered_like_rows_and_goes_to_every_partition() -> None:
    p = producer()
    p.append(batch(1, 0, 0), 0.0)
    p.say(End(), 0.0)
    welcomed(p)
    ours, theirs = messages(p, 10), producer()
    assert [(each.sequence, each.element) for each in ours] == [(0, ElementKind.ROWS), (1, ElementKind.END)]
    theirs.append(batch(1, 0, 0), 0.0)
    theirs.say(End(), 0.0)
    welcomed(theirs)
    assert [(each.first, each.sequence, each.element) for each in messages(theirs, 11)] == [(0, 1, ElementKind.END)]


def test_a_word_takes_nothing_of_the_bound_of_the_log() -> None:
    p = producer(log_bytes_max=8)
    p.say(End(), 0.0)
    assert (p.log.bytes, p.has_room) == (0, True)


@pytest.mark.parametrize("kind", WORDS)
def test_a_word_that_comes_with_rows_is_refused(kind: ElementKind) -> None:
    message = decode_data(encode(Data(0, 0, 1, 0, 0, 0, [0], [1], [1], 8, kind)))
    with pytest.raises(ProtocolError, match="has no rows"):
        check_shape(message, [ROWS])


def test_every_kind_but_rows_is_a_word() -> None:
    assert set(WORDS) == set(ElementKind) - {ElementKind.ROWS}
