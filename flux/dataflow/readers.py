"""Readers as the end of a flow: the workers keep the output until it is read from outside (design: readers)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from flux.dataflow.sink import FlowTo, Position, Sink, SinkTraits
from flux.errors import UsageError
from flux.settings import parse_bytes

if TYPE_CHECKING:
    from flux.dataflow.api import Flow
    from flux.dataflow.plan import Plan, StagePlan


def to_readers(flow: Flow, *, max_bytes: int | str = "128m") -> FlowTo:
    """Keep the output in the workers; see ``Outputs.to_readers``."""
    most = parse_bytes("max_bytes", max_bytes)
    if most < 1:
        raise UsageError(f"max_bytes must be above zero, got {max_bytes!r}")
    return FlowTo(flow, Readers(most))


class Readers(Sink):
    """Mark of a stage whose output is kept for readers, up to ``max_bytes`` in all partitions together. No method of it is
    called: readers fetch the output themselves."""

    traits = SinkTraits(exactly_once=True)

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    def kept_max(self, partitions: int) -> int:
        """Return the bytes that one of ``partitions`` partitions keeps."""
        return max(self.max_bytes // partitions, 1)

    def write(self, batch: pa.RecordBatch, position: Position) -> None:
        raise AssertionError("output for readers is not written anywhere")

    def __repr__(self) -> str:
        return "readers"


def offered(plan: Plan, stage: str | None) -> StagePlan:
    """Return the stage whose output is kept for readers: the one of that name, or the only one."""
    found = [each for each in plan.stages if isinstance(each.sink, Readers)]
    names = ", ".join(each.name for each in found)
    if not found:
        raise UsageError("the query keeps no output for readers: end the flow with to_readers() before it is started")
    if stage is not None:
        found = [each for each in found if stage in (each.name, each.name.removesuffix(".sink"))]
        if not found:
            raise UsageError(f"no output of a stage {stage!r} is kept for readers; there is that of {names}")
    if len(found) > 1:
        raise UsageError(f"the query keeps the output of several stages for readers, say which: {names}")
    return found[0]
