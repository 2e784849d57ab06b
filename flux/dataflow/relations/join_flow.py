"""Joins of two flows under PySpark's name (design: join-conditions).

A flow keeps the call of its user. Spark resolves it when the plan is compiled: into steps in front of both inputs, which compute
keys and times; the declaration that the operator takes; and steps behind it, which give the columns their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from flux.dataflow.flow import Flow, Stage, node
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.row_operators import ONCE, UNSAID, gives_of_all
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import UsageError
from flux.operators.operator import Operator
from flux.windows.durations import microseconds, words

if TYPE_CHECKING:
    import pyarrow as pa

    from flux.expressions.steps import RowSteps
    from flux.joins.join_spec import JoinSpec

#: PySpark's spellings of the kinds of joins, without underscores.
KINDS = {
    "inner": "inner",
    **dict.fromkeys(("left", "leftouter"), "left_outer"),
    **dict.fromkeys(("right", "rightouter"), "right_outer"),
    **dict.fromkeys(("outer", "full", "fullouter"), "full_outer"),
    **dict.fromkeys(("semi", "leftsemi"), "left_semi"),
    **dict.fromkeys(("anti", "leftanti"), "left_anti"),
}


@dataclass(frozen=True)
class Joining:
    """A call of ``join``."""

    #: A Column, a name, or a list of either; None: there is no condition.
    on: Any
    #: One of the values of ``KINDS``.
    how: str
    #: Microseconds for which a row waits; None: for ever, or as long as bounds say.
    ttl: int | None
    #: Whether the user has said ``ttl``.
    says_ttl: bool

    def of(self, left: Any, right: Any) -> Any:
        """Return the join of two DataFrames."""
        return left.join(right, list(self.on) if isinstance(self.on, tuple) else self.on, self.how)

    def __repr__(self) -> str:
        on = list(self.on) if isinstance(self.on, tuple) else self.on
        said = f", ttl={None if self.ttl is None else words(self.ttl)!r}" if self.says_ttl else ""
        return f"{on!r}, {self.how!r}{said}"


#: A function from one that makes an empty DataFrame of a schema, or of another DataFrame, to an empty DataFrame with the columns,
#: names and aliases of a flow.
Frame = Callable[[Callable[[Any], Any]], Any]


@dataclass(frozen=True)
class FlowFrame:
    """A ``Frame`` that follows from a flow and the columns of its rows."""

    flow: Flow
    make: Frame

    def __call__(self, empty: Callable[[Any], Any]) -> Any:
        return self.make(empty)


class JoinInput(NamedTuple):
    """One side of a join, as it is resolved."""

    #: Names the side in messages.
    name: str
    #: The columns of the rows, each with a name of its own, in the order of those of ``frame``.
    schema: pa.Schema
    frame: Frame
    #: The steps between the origin of the rows and ``schema``; None: there are none.
    steps: RowSteps | None
    #: The columns that have the event time of the rows of the origin; empty: they have none.
    times: tuple[str, ...]
    #: Microseconds by which rows of a source may be late.
    delay: int
    #: Whether all rows are those of batch DataFrames, which end.
    ends: bool
    #: The flow or source; its declarations say what ``frame`` and ``steps`` are.
    flow: Flow | Source


@dataclass(frozen=True)
class ResolvedJoin:
    """A join as workers compute it."""

    #: By side, the steps in front of it; None: rows come as they are.
    before: tuple[RowSteps | None, RowSteps | None]
    #: By side, the names of the key columns behind these steps.
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    spec: JoinSpec
    make: Callable[[], Operator]
    #: The steps behind it, each column with a name of its own; None: its rows are the result.
    after: RowSteps | None
    #: A name that several columns of the result have in Spark; None: each has its own.
    twice: str | None


class JoinFlow(Flow):
    """A join of two flows. Its operator, keys and columns are those of the resolved join; ``stage`` has everything else.

    Users get it behind a ``RowFlow``, which has the steps behind the join."""

    def __init__(self, left: Flow | Source, right: Flow | Source, joining: Joining, stage: Stage | None = None) -> None:
        self.joining = joining
        made = Stage(_Unmade, (), None, None, None, "complete", f"{name_of(left)}.join.{name_of(right)}")
        super().__init__(made if stage is None else stage, [left, right])

    def connect(self, *inputs: Any) -> Flow:
        raise UsageError(
            "connect() adds inputs to a stage, and join() takes the rows of two flows: join the result again"
        )

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        made = JoinFlow(self.inputs[0], self.inputs[1], self.joining, self.stage)
        made.inputs = inputs
        return made

    @property
    def _gives(self) -> str:
        return ONCE

    def __repr__(self) -> str:
        left, right = self.inputs
        return f"{left!r}.join({right!r}, {self.joining!r})"


class LookupFlow(Flow):
    """A flow whose rows look up those of a batch DataFrame, which goes into every worker as a table (design: lookup).

    It is no stage: steps of the edges behind it do the work. ``table`` is the DataFrame, perhaps with conditions and columns."""

    def __init__(self, left: Flow | Source, table: Flow | Source, joining: Joining, stage: Stage | None = None) -> None:
        self.table, self.joining = table, joining
        made = Stage(_Unmade, (), None, None, None, "complete", f"{name_of(left)}.join.{name_of(table)}")
        super().__init__(made if stage is None else stage, [left])
        self.stage.passes = True

    def connect(self, *inputs: Any) -> Flow:
        raise UsageError(
            "connect() adds inputs to a stage, and join() takes the rows of two flows: join the result again"
        )

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        made = LookupFlow(self.inputs[0], self.table, self.joining, self.stage)
        made.inputs = inputs
        return made

    def _in_mode(self, output_mode: str) -> Flow:
        (left,) = self.inputs
        return LookupFlow(left._in_mode(output_mode), self.table, self.joining) if isinstance(left, Flow) else self

    @property
    def _gives(self) -> str:
        return gives_of_all(self.inputs)

    @property
    def dataframe(self) -> Any:
        """The DataFrame of the table, without conditions and columns."""
        source = self.table.inputs[0] if isinstance(self.table, RowFlow) else self.table
        assert isinstance(source, DataFrameSource)
        return source.dataframe

    @property
    def _own_stage(self) -> Stage:
        """The stage whose rows look up those of the table; behind a source, the one that passes them on, where there is one."""
        (left,) = self.inputs
        return left._own_stage if isinstance(left, Flow) and not left._own_stage.passes else self.stage

    def _with_stage(self, changes: Mapping[str, Any]) -> Flow:
        (left,) = self.inputs
        if isinstance(left, Flow) and not left._own_stage.passes:
            return LookupFlow(left._with_stage(changes), self.table, self.joining)
        return super()._with_stage(changes)

    def __repr__(self) -> str:
        return f"{self.inputs[0]!r}.join({self.table!r}, {self.joining!r})"


class _Unmade(Operator):
    """A stand-in for the operator of a join, which is made of the resolved join."""

    def process(self, batch: pa.RecordBatch) -> None:
        raise NotImplementedError


def name_of(origin: Flow | Source) -> str:
    """Return the name of the source or stage whose rows come."""
    while isinstance(origin, RowFlow):
        origin = origin.inputs[0]
    return origin.stage.name if isinstance(origin, Flow) else origin.name


def joined(left: Flow | Source, other: Any, on: Any, how: Any, ttl: Any) -> RowFlow:
    """Return the join of a flow with another input. UsageError names the argument that does not fit."""
    right = node(other)
    joining = Joining(_condition(on), _kind(how), _ttl(ttl), ttl is not UNSAID)
    from flux.dataflow.relations.lookups import refreshed, table_of  # it imports this module

    if table_of(right) is not None:
        return refreshed(left, right, joining)
    if joining.says_ttl or not _is_table(right):
        return RowFlow(JoinFlow(left, right, joining), ())
    if joining.how in ("right_outer", "full_outer"):
        if _ends(left):  # rows of batch DataFrames alone wait for nothing but their end
            return RowFlow(JoinFlow(left, right, joining), ())
        raise UsageError(
            f"join: how={how!r} gives rows of the DataFrame without a match, when all rows of the other side have come: say "
            "ttl=None, and rows of both sides are kept until the input ends. Without ttl the DataFrame is a table in every worker"
        )
    return RowFlow(LookupFlow(left, right, joining), ())


def _ends(given: Flow | Source) -> bool:
    """Tell whether all rows come from batch DataFrames."""
    if isinstance(given, Flow):
        return all(map(_ends, given.inputs))
    return isinstance(given, DataFrameSource)


def _is_table(given: Flow | Source) -> bool:
    """Tell whether an input is a batch DataFrame without event time, perhaps behind conditions and columns."""
    if isinstance(given, RowFlow):
        return given.watermark is None and isinstance(given.inputs[0], DataFrameSource)
    return isinstance(given, DataFrameSource)


def _kind(how: Any) -> str:
    if how is None:
        return "inner"
    plain = how.lower().replace("_", "") if isinstance(how, str) else how
    if plain == "cross":
        raise UsageError(
            "join: how='cross' gives every pair of rows, and rows of flows have no end. Join them by an equality: "
            "a.join(b, 'key')"
        )
    if plain not in KINDS:
        raise UsageError(
            f"join: how must be one of inner, left, right, full, left_semi, left_anti, or another spelling of PySpark; got "
            f"{how!r:.100}"
        )
    return KINDS[plain]


def _condition(on: Any) -> Any:
    """Return the condition; a list as a tuple."""
    if isinstance(on, list | tuple):
        if not on:
            return None
        if not all(isinstance(each, str) for each in on) and any(isinstance(each, str) for each in on):
            raise UsageError("join: on must be names of columns, or Columns, and not both in one list")
        return tuple(on)
    if on is None or isinstance(on, str) or type(on).__module__.startswith("pyspark."):
        return on
    raise UsageError(
        "join: on must be the name of a column that both sides have, a list of names, or a Column, as in F.expr('a.k = b.k'); "
        f"got {type(on).__name__} {on!r:.100}"
    )


def _ttl(ttl: Any) -> int | None:
    if ttl is None or ttl is UNSAID:
        return None
    length = microseconds(ttl, "join, ttl")
    if length <= 0:
        raise UsageError(f"join, ttl: expected a duration above zero, got {ttl!r:.100}; ttl=None keeps rows for ever")
    return length
