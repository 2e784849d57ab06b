"""Orders that come with the welcome are obeyed before the worker's loop turns: a long ``open`` counts as busy."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from harness import ThreadQuery, dataframe

import flux
from flux.shell import worker_loop as module
from flux.shell.liveness_thread import LivenessThread
from flux.wire.pulse import KIND, LoopActivity

SCHEMA = pa.schema([("k", pa.int64())])


def test_whoever_opens_and_closes_operators_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report the time in user code as work: the worker that joined last was given up while its operators loaded a
    model."""
    hearts: list[LivenessThread] = []
    seen: list[tuple[str, LoopActivity]] = []

    def made(every_s: float) -> LivenessThread:
        hearts.append(LivenessThread(every_s))
        return hearts[-1]

    class Slow(flux.Operator):
        schema = None

        def open(self, context: Any) -> None:
            seen.extend(("open", LoopActivity(heart.note[KIND])) for heart in hearts)

        def process(self, batch: pa.RecordBatch) -> None: ...

        def close(self) -> None:
            seen.extend(("close", LoopActivity(heart.note[KIND])) for heart in hearts)

    monkeypatch.setattr(module, "LivenessThread", made)
    with ThreadQuery(flux.stage(partitions=1, replicas=1)(Slow)(dataframe(SCHEMA)), workers=1) as query:
        query.started()
        query.feed([[]])
        query.wait()
    assert {what for what, _ in seen} == {"open", "close"}
    assert LoopActivity.WAITS not in {kind for _, kind in seen}
