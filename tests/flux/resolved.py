"""Conditions and columns in tests without Spark: a stand-in for its DataFrame and its analyser."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from flux.expressions.steps import RowStep, RowSteps, Select, Where
from flux.expressions.tree import Expression


class Steps:
    """A stand-in for a DataFrame in tests without Spark: each operator brings its step."""

    def __init__(self, *chain: RowStep) -> None:
        self.chain = chain

    def where(self, condition: Expression) -> Steps:
        return Steps(*self.chain, Where(condition))

    def alias(self, name: str) -> Steps:
        return self

    def select(self, *outputs: tuple[str, Expression]) -> Steps:
        return Steps(*self.chain, Select(outputs))


def to_steps(schema: pa.Schema, operators: Any) -> RowSteps:
    return RowSteps.of(schema, operators(Steps()).chain)
