"""The loop of an ingress task, where it does not go by sockets."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.source import DataFrameSource
from flux.settings import Settings
from flux.shell import ingress_loop
from flux.shell.ingress_loop import Ingress
from flux.wire.control import Welcome

SCHEMA = pa.schema([("x", pa.int64())])


def test_rows_carry_the_wall_clock_also_where_the_table_comes_with_the_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    @flux.stage(partitions=1)
    def passed_on(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    plan = compile_plan([passed_on(DataFrameSource("rows", SCHEMA))], Settings.of(), lambda schema: schema, "q", b"")
    created: list[float] = []

    class Core(ingress_loop.IngressTask):
        def append(self, batch: pa.RecordBatch, now: float) -> None:
            created.append(now + self.wall_ahead)

        has_room = drained = True

    class Loop(Ingress):
        def __init__(self) -> None:
            nothing: Any = SimpleNamespace(bell=lambda: SimpleNamespace(clear=lambda: None, ring=lambda: None))
            self.plan, self.sockets, self.control, self.rendezvous = plan, nothing, nothing, nothing
            self.source = self.partition = 0
            self.micro_batch, self._ready, self._dismissed = None, True, False

        def _turn(self, core: Any, wait_s: float) -> None: ...

        def _beat(self, core: Any, now: float) -> None:
            self._dismissed = True

    monkeypatch.setattr(ingress_loop, "IngressTask", Core)
    monkeypatch.setattr(ingress_loop, "register", lambda *_, **__: (Welcome(node=3, incarnation=0, workers=1), []))
    before = time.time()
    Loop()._join([pa.record_batch({"x": [1]}, SCHEMA)], 0)
    assert before <= created[0] <= time.time()
