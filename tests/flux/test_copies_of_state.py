"""State as bytes and back, as it travels when a partition moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.errors import SnapshotError
from flux.exchange.log import LogEntry, LogMeter, Rows
from flux.exchange.producer import Producer
from flux.replica.snapshot import ALIGNMENT, decode_snapshot, encode_snapshot
from flux.state import state_copy as copy_state
from partitioning.clustering import Clustering
from partitioning.ids import StreamId

BATCH = pa.record_batch({"key": [1, 2, None], "name": ["a", None, "c"]})
STATES: dict[str, Any] = {
    "nothing": None,
    "bytes": b"state",
    "no bytes": b"",
    "a batch": BATCH,
    "an empty batch": BATCH.slice(0, 0),
    "a table of two chunks": pa.Table.from_batches([BATCH, BATCH.slice(1)]),
    "a table without rows": BATCH.schema.empty_table(),
    "anything else": {"counts": [1, 2, 3]},
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("head", [b"", b"h", b"h" * ALIGNMENT, b"h" * 1000])
def test_a_state_comes_back_from_behind_any_head(name: str, head: bytes) -> None:
    data = encode_snapshot(STATES[name], "here", head)
    assert bytes(data[: len(head)]) == head
    back = decode_snapshot(data, len(head))
    assert type(back) is type(STATES[name])
    assert back == STATES[name]


@pytest.mark.parametrize("as_bytes", [False, True])
def test_arrays_come_back_and_can_be_changed_in_place(as_bytes: bool) -> None:
    state = {"counts": np.arange(100_000), "sums": np.arange(7.0), "none": np.zeros(0), "name": "x"}
    data = encode_snapshot(state, "here", b"head")
    back = decode_snapshot(bytes(data) if as_bytes else data, 4)
    assert back["name"] == "x"
    for name in ("counts", "sums", "none"):
        assert np.array_equal(back[name], state[name])
        back[name][:] = 0
    assert state["counts"][5] == 5, "a copy is no view of what it was made of"


def test_memory_that_was_got_ready_is_used_where_it_is_enough() -> None:
    state = np.arange(1000)
    room = np.zeros(10_000, np.uint8)
    data = encode_snapshot(state, "here", room=room)
    assert np.shares_memory(np.frombuffer(data, np.uint8), room)
    assert np.array_equal(decode_snapshot(data), state)
    small = np.zeros(10, np.uint8)
    assert np.array_equal(decode_snapshot(encode_snapshot(state, "here", room=small)), state)


@pytest.mark.parametrize("offset", range(9))
def test_arrow_data_is_read_wherever_in_memory_the_message_lies(offset: int) -> None:
    data = bytes(encode_snapshot(BATCH, "here"))
    memory = np.zeros(len(data) + 16, np.uint8)
    memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    back = decode_snapshot(memoryview(memory)[offset : offset + len(data)])
    assert back.equals(BATCH)
    assert all(buffer.address % 8 == 0 for buffer in back.column("key").buffers() if buffer is not None)


def test_what_is_no_snapshot_is_refused() -> None:
    with pytest.raises(SnapshotError, match="not a snapshot"):
        decode_snapshot(b"?")


#: The content of ``Log.gone`` for four partitions from whose logs nothing has gone.
NONE_GONE = np.full(4, -1, np.int64).tobytes()


def test_the_entries_of_a_copied_log_are_sent_and_evicted_without_compiling_anything() -> None:
    """Compile nothing: kernels would be compiled anew for arrays that may not be written, in the worker that has just
    taken over."""
    rows = pa.record_batch({"k": pa.array(range(100), pa.int64())})
    data = Clustering(rows.schema, (0,), 4).by_key(rows)
    producer = Producer(StreamId(0, 0), 0, 4, 1 << 20, 1.0)
    packed = copy_state._pack(LogEntry(0, Rows(data), data.by_rank, data.nbytes, 0, 0.0))
    (copied,) = copy_state._unpacked(copy_state.OutputLog(0, False, NONE_GONE, (packed,)), rows.schema)
    producer.adopt([copied], np.frombuffer(NONE_GONE, np.int64), False)
    entry = producer.log[0]
    assert isinstance(entry.element, Rows)
    back = entry.element.data
    assert back.batch == data.batch
    for array, first in ((back.by_rank, data.by_rank), (back.offsets, data.offsets), (entry.touches, data.by_rank)):
        assert array.tolist() == first.tolist()
        assert (array.dtype, array.flags.writeable) == (first.dtype, True)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_copied_log_goes_on_like_the_log_that_it_was_made_of(gone: int) -> None:
    rows = pa.record_batch({"k": pa.array(range(100), pa.int64())})
    meter = LogMeter()
    first = Producer(StreamId(0, 0), 0, 4, 1 << 20, 1.0)
    for step in range(2):
        first.append(Clustering(rows.schema, (0,), 4).by_key(rows), 7.0 + step, 100 + step)
    first.finish(9.0)
    at = np.full(4, gone - 1, np.int64)
    assert first.log.evict(at) == gone
    packed = copy_state.OutputLog(
        first.log.base, True, first.log.gone.tobytes(), tuple(map(copy_state._pack, first.log.entries()))
    )
    second = Producer(StreamId(0, 0), 1, 4, 1 << 20, 1.0, meter, base=first.log.base)
    second.adopt(copy_state._unpacked(packed, rows.schema), np.frombuffer(packed.gone, np.int64), packed.finished)
    second.log.validate()
    assert second.finished
    assert not second.has_room
    assert (second.log.base, second.log.end, second.log.bytes) == (first.log.base, 3, first.log.bytes)
    assert meter.bytes == meter.peak == first.log.bytes
    assert second.log.gone.tolist() == first.log.gone.tolist()
    assert second.rows == 100 * (2 - gone)
    for there, here in zip(second.log.entries(), first.log.entries(), strict=True):
        assert there.touches.tolist() == here.touches.tolist()
        assert (there.sequence, there.nbytes, there.created) == (here.sequence, here.nbytes, here.created)
        assert there.checksum == (0 if gone == 2 else here.checksum), "a word keeps the checksum of the entry before it"
