"""Flows of conditions and columns, behind a source or a stage (design: steps-of-edges)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flux.dataflow.event_time import WatermarkDeclaration, declared
from flux.dataflow.flow import ChangedStage, Flow, Stage
from flux.dataflow.row_operators import RowOperator, gives_of_all
from flux.dataflow.source import NO_LATE, Source
from flux.errors import NoSuchAttribute, UsageError
from partitioning.ids import ACTIVE

#: pyspark's DataFrame: this layer does not import the layers above it.
DataFrame = Any


class RowFlow(Flow):
    """A flow or a source with conditions and columns behind it, computed where its rows are read or given out (design:
    steps-of-edges). ``operators`` are those of the user, as Spark's analyser takes them; ``watermark`` is a declaration in front
    of them, and ``is_late`` tells whether the rows are the late ones.

    Stages read the rows of its origin through the steps. Only where it is the end of a flow, or where something is chained behind
    it, its ``stage`` is needed, which passes rows on."""

    def __init__(
        self,
        origin: Flow | Source,
        operators: tuple[RowOperator, ...],
        watermark: WatermarkDeclaration | None = None,
        is_late: bool = False,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """``changes``: those of ``withStage`` for the stage of the flow itself."""
        before = origin.stage if isinstance(origin, Flow) else None
        self.operators = operators
        self.watermark = watermark
        self.is_late = is_late
        self._changes = dict(changes or {})
        super().__init__(
            Stage(
                _passed,
                (),
                None if before is None else before.partitions,
                None if before is None else before.replicas,
                None,
                "complete" if before is None else before.output_mode,
                f"{origin.name if before is None else before.name}.{'late' if is_late else 'rows'}",
                ACTIVE if before is None else before.recovery,
                before is None or before.durable,
                availability=None if before is None else before.availability,
            ),  # fmt: skip
            [origin],
        )
        self.stage.passes = True
        if self._changes:
            self.stage = ChangedStage(self.stage, self._changes)

    def connect(self, *inputs: Any) -> Flow:
        raise UsageError(
            "connect() adds inputs to a stage, and this flow is conditions and columns behind one: call it there"
        )

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        made = RowFlow(self.inputs[0], self.operators, self.watermark, self.is_late, self._changes)
        made.inputs = inputs
        return made

    def _in_mode(self, output_mode: str) -> Flow:
        (origin,) = self.inputs
        return RowFlow(origin._in_mode(output_mode), self.operators) if isinstance(origin, Flow) else self

    @property
    def _gives(self) -> str:
        return gives_of_all(self.inputs)

    @property
    def late(self) -> RowFlow:
        """The rows that came too late, each once, behind the same conditions and columns."""
        if self.watermark is None:
            raise NoSuchAttribute(NO_LATE)
        return RowFlow(self.inputs[0], self.operators, self.watermark, True, self._changes)

    def _with_operator(self, operator: RowOperator) -> RowFlow:
        return RowFlow(self.inputs[0], (*self.operators, operator), self.watermark, self.is_late, self._changes)

    def _with_watermark(self, *arguments: Any) -> RowFlow:
        (origin,) = self.inputs
        if isinstance(origin, Flow):
            raise origin._no_watermark()
        if self.watermark is not None:
            raise UsageError(
                f"withWatermark twice: source {origin.name} has {self.watermark!r} already, and a source has one watermark. "
                "Leave one of them out"
            )
        return RowFlow(origin, (), declared(origin, self.operators, *arguments), changes=self._changes)

    @property
    def _own_stage(self) -> Stage:
        (origin,) = self.inputs
        return origin._own_stage if isinstance(origin, Flow) else self.stage

    def _with_stage(self, changes: Mapping[str, Any]) -> Flow:
        """Change the stage whose rows these are; behind a source, the one that passes them on, where there is one."""
        (origin,) = self.inputs
        if isinstance(origin, Flow):
            return RowFlow(origin._with_stage(changes), self.operators)
        return RowFlow(origin, self.operators, self.watermark, self.is_late, {**self._changes, **changes})

    def __repr__(self) -> str:
        parts = [self.inputs[0], *([] if self.watermark is None else [self.watermark]), *self.operators]
        return ".".join(map(repr, parts)) + (" (late rows)" if self.is_late else "")


class UnionFlow(Flow):
    """The rows of several flows or sources, which have the same columns by position. Aggregates read them as inputs of their own;
    elsewhere a stage passes them on."""

    def __init__(self, inputs: list[Flow | Source], stage: Stage | None = None) -> None:
        super().__init__(Stage(_passed, (), None, None, None, "complete", "union") if stage is None else stage, inputs)
        self.stage.passes = True

    def connect(self, *inputs: Any) -> Flow:
        raise UsageError("connect() adds inputs to a stage, and this flow is a union: call union() with the other flow")

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        return UnionFlow(inputs, self.stage)

    @property
    def _gives(self) -> str:
        return gives_of_all(self.inputs)

    def __repr__(self) -> str:
        first, *others = map(repr, self.inputs)
        return f"{first}{''.join(f'.union({each})' for each in others)}"


@dataclass(frozen=True)
class Applied:
    """A function that puts operators behind a DataFrame."""

    operators: tuple[RowOperator, ...]

    def __call__(self, dataframe: DataFrame) -> DataFrame:
        return functools.reduce(lambda df, each: each.of(df), self.operators, dataframe)


def _passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch
