"""The thread that says which step takes long: it outlives the objects that it looks at."""

from __future__ import annotations

import logging
import queue
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S

from flux.replica.step_queue import ReplicaStep
from flux.shell.step_watch import StepWatch, first_row
from flux.wire.control import InStep
from flux.wire.messages import OrderEntry
from flux.wire.pulse import IN_STEP, KIND, no_note
from partitioning.ids import PartitionKey


def step(batch: pa.RecordBatch) -> ReplicaStep:
    return ReplicaStep(PartitionKey(0, 0), 0, OrderEntry(0.0, 0.0, []), [], batch)


def test_a_row_without_a_text_is_left_out() -> None:
    no_text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    assert first_row(step(pa.record_batch({"s": pa.array(["x"])}))) == "{'s': 'x'}"
    assert first_row(step(pa.record_batch({"s": no_text}))) == ""


class Replicas:
    """A mapping of replicas that fails when it is asked for the first time."""

    def __init__(self) -> None:
        self.asked = 0

    def get(self, key: tuple[int, int]) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("the loop changes something just now")
        context = SimpleNamespace(_flux_method="on_watermark")
        return SimpleNamespace(under_way=step(pa.record_batch({"x": [1]})), context=context)


def test_it_goes_on_after_a_step_that_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    note = no_note()
    note[KIND] = IN_STEP
    said: queue.SimpleQueue[InStep] = queue.SimpleQueue()
    core: Any = SimpleNamespace(note=note, replicas=Replicas(), worker=3)
    watch = StepWatch(core, said.put, step_timeout_s=0.01)
    with caplog.at_level(logging.WARNING, "flux"):
        watch.start()
        watch.quiet.release()
        try:
            told = said.get(timeout=LIMIT_S)
            assert (told.row, told.method) == ("{'x': 1}", "on_watermark")
        finally:
            watch.stop()
    assert "a step that takes long cannot be told: RuntimeError: the loop changes" in caplog.text
