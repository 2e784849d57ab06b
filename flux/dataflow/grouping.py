"""Groups of rows and their aggregates, under the names that a DataFrame has for them (design: grouping).

A flow keeps the call of its user. Spark resolves it when the plan is compiled: into steps in front of an aggregate, which
compute keys and the values that are aggregated; the aggregate itself; and steps behind it, which compute with its results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import flux
from flux.arguments import checked
from flux.dataflow.flow import WINDOW_MODES, Flow, Stage
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.source import Source
from flux.errors import NoSuchAttribute, UsageError
from flux.operators.user_code import named
from flux.windows.window import Closing, SessionWindow, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

    from flux.expressions.steps import RowSteps
    from flux.operators.operator import Operator

#: The method of groups that takes a function of the user's.
APPLY = "applyInArrow"
#: The names that Spark gives to the column of a window.
WINDOW_NAMES = {Window: "window", SessionWindow: "session_window"}


#: A function as PySpark's ``applyInArrow`` takes it.
GroupFunction = Callable[..., "pa.Table"]


@dataclass(frozen=True)
class WindowKey:
    """A window among the keys, or a time at which groups are complete. The ``column`` of the window itself is of no account."""

    window: Window | SessionWindow
    #: The times of rows: the name of a column, or a Column; None: the time of the step.
    time: Column | str | None
    #: The name of the column of the result: a struct of start and end, or the time at which the group is complete.
    name: str


@dataclass(frozen=True)
class Grouping:
    """A call of ``groupBy``, and of a method of its result, with their arguments."""

    keys: tuple[Any, ...]
    method: str
    arguments: tuple[Any, ...]

    @property
    def window(self) -> WindowKey | None:
        return next((key for key in self.keys if isinstance(key, WindowKey)), None)

    def __repr__(self) -> str:
        keys, arguments = (", ".join(map(_said, listed)) for listed in (self.keys, self.arguments))
        return f"groupBy({keys}).{self.method}({arguments})"


def _said(given: Any) -> str:
    if inspect.isroutine(given):
        return named(given)
    if not isinstance(given, WindowKey):
        return repr(given)
    times = "flux.NOW" if given.time is None else str(given.time)
    return f"closes={times}" if isinstance(given.window, Closing) else f"{given.name} of {times}"


@dataclass(frozen=True)
class ResolvedGrouping:
    """A grouping as workers compute it."""

    #: The steps in front of the operator; None: it takes rows as they come.
    before: RowSteps | None
    key: tuple[str, ...]
    make: Callable[[], Operator]
    #: The steps behind the operator; None: its rows are the result.
    after: RowSteps | None


class GroupFlow(Flow):
    """An aggregate over groups. Its operator, key and columns are those of the resolved grouping; ``stage`` has everything
    else.

    Users get it behind a ``RowFlow``, which has the steps behind the aggregate."""

    def __init__(self, origin: Flow | Source, grouping: Grouping, stage: Stage | None = None) -> None:
        from flux.operators.aggregate import GroupedRows  # it loads kernels, which importing flux does not

        self.grouping = grouping
        window = grouping.window
        mode = "complete" if window is None else WINDOW_MODES[0]
        applies = grouping.method == APPLY
        made = Stage(
            grouping.arguments[0] if applies else GroupedRows,
            (),
            None,
            None,
            None,
            mode,
            f"{_name_of(origin)}.{APPLY if applies else 'groupBy'}",
            window=None if window is None else window.window,
        )
        super().__init__(made if stage is None else stage, [origin])

    def connect(self, *inputs: Any) -> Flow:
        raise UsageError(
            "connect() adds inputs to a stage, and groupBy() takes the rows of one flow: call union() first"
        )

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        made = GroupFlow(self.inputs[0], self.grouping, self.stage)
        made.inputs = inputs
        return made

    def _in_mode(self, output_mode: str) -> Flow:
        return GroupFlow(self.inputs[0], self.grouping, self.stage.in_mode(output_mode))

    def __repr__(self) -> str:
        return f"{self.inputs[0]!r}.{self.grouping!r}"


def _name_of(origin: Flow | Source) -> str:
    """Return the name of the source or stage whose rows come."""
    while isinstance(origin, RowFlow):
        origin = origin.inputs[0]
    return origin.stage.name if isinstance(origin, Flow) else origin.name


class GroupedData:
    """Groups of rows, which ``agg`` and its short forms make a flow of, with PySpark's names."""

    def __init__(self, origin: Flow | Source, keys: tuple[Any, ...]) -> None:
        listed = keys[0] if len(keys) == 1 and isinstance(keys[0], list | tuple) else keys
        self._origin, self._keys = origin, tuple(_key(given) for given in listed)
        windows = [key for key in self._keys if isinstance(key, WindowKey)]
        if len(windows) > 1:
            raise UsageError(
                f"groupBy: expected one window at most, got {windows[0].name} and {windows[1].name}: group by one of them, and "
                "the result by the other"
            )

    @checked("groupBy.agg")
    def agg(self, *exprs: Any, closes: str | None = None) -> RowFlow:
        """Give one row for each group: the keys, then these aggregates. Each is a Column, such as ``F.sum("price")``, or SQL; or
        all are a dictionary from columns to functions.

        closes  in place of a window, the column with the time at which a group is complete, such as the end of an auction. It is
                one more key, and groups are given when the watermark has passed it"""
        if not exprs:
            raise UsageError("groupBy.agg: expected at least one aggregate, as in agg(F.count('*').alias('n'))")
        if closes is None:
            return self._flow("agg", *exprs)
        if not isinstance(closes, str) or not closes:
            raise UsageError(
                f"groupBy.agg: closes must be the name of a column with a time, as in closes='expires'; got {closes!r:.100}"
            )
        if any(isinstance(key, WindowKey) for key in self._keys):
            raise UsageError(
                "groupBy.agg: a window and closes= both say when a group is complete; leave one of them out"
            )
        made = copy(self)
        made._keys = (*self._keys, WindowKey(Closing(""), closes, closes))
        return made._flow("agg", *exprs)

    @checked("groupBy.count")
    def count(self) -> RowFlow:
        """Count the rows of each group, as the column ``count``."""
        return self._flow("count")

    @checked("groupBy.sum")
    def sum(self, *cols: str) -> RowFlow:
        """Sum these columns; without a name, all that hold numbers and are no keys."""
        return self._flow("sum", *cols)

    @checked("groupBy.min")
    def min(self, *cols: str) -> RowFlow:
        """Take the least value of these columns; without a name, of all that hold numbers and are no keys."""
        return self._flow("min", *cols)

    @checked("groupBy.max")
    def max(self, *cols: str) -> RowFlow:
        """Take the greatest value of these columns; without a name, of all that hold numbers and are no keys."""
        return self._flow("max", *cols)

    @checked("groupBy.avg")
    def avg(self, *cols: str) -> RowFlow:
        """Take the mean of these columns; without a name, of all that hold numbers and are no keys."""
        return self._flow("avg", *cols)

    @checked("groupBy.mean")
    def mean(self, *cols: str) -> RowFlow:
        """Take the mean of these columns: another name of ``avg``."""
        return self._flow("avg", *cols)

    @checked("groupBy.applyInArrow")
    def applyInArrow(self, func: GroupFunction, schema: Any) -> RowFlow:  # noqa: N802
        """Call a function with the rows of each group when its window is final, as PySpark's ``applyInArrow``; one of the keys is
        a window. Rows are kept until then.

        func    takes a pyarrow.Table with the columns of the flow, or the key, a tuple of pyarrow scalars, and the table; returns
                a pyarrow.Table. It depends on its arguments alone, because replicas and repetitions call it again
        schema  of the rows that it gives: DDL, StructType or pyarrow schema. Columns are found by name"""
        from flux.operators.windowed_rows import check_group_function  # it loads kernels, which importing flux does not

        check_group_function(func, schema)
        if not any(isinstance(key, WindowKey) for key in self._keys):
            raise UsageError(
                "groupBy.applyInArrow: without a window among the keys a group has all its rows only when the input has ended. "
                "Add one, as in groupBy(F.window('ts', '10 minutes'), 'user') or F.session_window('ts', '5 minutes'). For rows "
                "as they come, a class derived from flux.KeyedOperator has a method for each key"
            )
        return self._flow(APPLY, func, schema)

    def _flow(self, method: str, *arguments: Any) -> RowFlow:
        made = RowFlow(GroupFlow(self._origin, Grouping(self._keys, method, arguments)), ())
        flux._check_columns(made)
        return made

    def __getattr__(self, name: str) -> Any:
        if name in _OTHERS:
            raise NoSuchAttribute(f"groupBy() has no {name}: {_OTHERS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"{self._origin!r}.groupBy({', '.join(map(_said, self._keys))})"


_CLASS = "@flux.stage(key=...) over a class derived from flux.KeyedOperator calls a method for each key, with its rows"
#: Methods of PySpark's GroupedData that are not there, each with its replacement.
_OTHERS = {
    "pivot": "an aggregate for each value gives its columns, as in F.expr(\"sum(n) FILTER (WHERE kind = 'a')\").alias('a')",
    **dict.fromkeys(
        (
            "applyInPandasWithState", "transformWithState", "transformWithStateInPandas", "cogroup",
        ),
        _CLASS,
    ),
    **dict.fromkeys(
        ("apply", "applyInPandas"),
        "groupBy(F.window(...), ...).applyInArrow(function, schema) calls a function with the rows of a window, and "
        f"table.to_pandas() is in its reach. {_CLASS}",
    ),
}  # fmt: skip


def _key(given: Any) -> Any:
    """Return a key, and a window as a WindowKey."""
    if isinstance(given, Window | SessionWindow):
        return WindowKey(replace(given, column=""), given.column, WINDOW_NAMES[type(given)])
    found = flux._window_key(given)
    return given if found is None else found
