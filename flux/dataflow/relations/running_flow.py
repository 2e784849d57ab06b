"""Handles on parts of a running query, from which added flows go on (design: additions).

``query["Delays"]`` is a flow of the rows that a running stage gives from now on, and ``query.source("flights")`` is a source of
the rows that a running source reads from now on. They stand for parts that run; a flow with one in it can only be added to the
query of that part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import pyarrow as pa

from flux.dataflow.flow import ChangedStage, Flow
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.source import NO_LATE, Source
from flux.errors import NoSuchAttribute, UsageError


class RunningStage(Flow):
    """A flow of the rows that a running stage gives, behind the conditions and columns of its declaration."""

    def __init__(self, declared: Flow, name: str, number: int, query: str, compiled: Callable[[], Any]) -> None:
        """``declared``: the flow that the stage was made of; ``number``: the id of the stage in the query ``query``; ``compiled``
        returns the newest compiled plan of that query."""
        own = declared.stage
        super().__init__(own if own.name == name else ChangedStage(own, {"name": name}), [])
        self.declared, self.number, self.query, self.compiled = declared, number, query, compiled

    def connect(self, *inputs: Any) -> Flow:
        self._refuse("connect() adds inputs to a stage")

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        return self

    def _in_mode(self, output_mode: str) -> Flow:
        self._refuse("in_mode() changes a stage")

    def _with_stage(self, changes: Mapping[str, Any]) -> Flow:
        self._refuse("withStage() changes a stage")

    def _refuse(self, why: str) -> NoReturn:
        raise UsageError(
            f"{why}, and stage {self.stage.name} runs: put a stage behind it, as in my_stage(query[{self.stage.name!r}])"
        )

    @property
    def _gives(self) -> str:
        return self.declared._gives

    def __repr__(self) -> str:
        return f"query[{self.stage.name!r}]"


class RunningSource(Source):
    """A source of the rows that a running one reads: all of them, or the rows on time if it has a watermark."""

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        number: int,
        query: str,
        compiled: Callable[[], Any],
        watermark: bool,
        is_late: bool = False,
    ) -> None:
        """``schema``: the columns of these rows; ``watermark``: the source has one; ``is_late``: the rows are the late ones. The
        others as for ``RunningStage``."""
        super().__init__(name, schema)
        self.number, self.query, self.compiled = number, query, compiled
        self.watermark, self.is_late = watermark, is_late

    @property
    def late(self) -> RunningSource:
        """The rows that come too late."""
        if not self.watermark:
            raise NoSuchAttribute(NO_LATE)
        return RunningSource(self.name, self.declared, self.number, self.query, self.compiled, True, True)

    def _with_watermark(self, *arguments: Any) -> RowFlow:
        has = (
            "has its watermark already: leave withWatermark out"
            if self.watermark
            else "has none: declare it in the program, and start the query anew, or read the input by a source of its own"
        )
        raise UsageError(f"withWatermark: source {self.name} runs and {has}")

    def __repr__(self) -> str:
        return f"query.source({self.name!r})" + (".late" if self.is_late else "")


#: A handle of either kind.
Running = RunningStage | RunningSource
