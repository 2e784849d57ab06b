"""State as bytes and back: what travels when a partition moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.errors import SnapshotError
from flux.snapshot import ALIGNMENT, decode_snapshot, encode_snapshot

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
