"""Expressions: frozen nodes, their text form and their evaluation.

A tree comes from Spark's analyser (``spark_integration.expressions``), with types, casts, modes and time zones in it,
so that its answer depends on nothing but the rows. Two trees with the same text form give the same answers; a
checkpoint location keeps this form.

An expression is evaluated for all rows of a batch at once, with one exception: where Spark computes a part for some
rows only (branches, right sides of AND and OR, arguments behind a null) and this part may raise, it is computed for
those rows alone.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.errors import SchemaError
from flux.expressions.functions import FUNCTIONS
from flux.expressions.kernels.values import Bools, Value, bools, scattered, spread
from flux.expressions.types import CALENDAR, spark_name

BOOLEAN = pa.bool_()
#: Begins the name of a column that holds a value for the parts of one expression, and that no batch has by itself.
COMMON = "\0"


class Expression(abc.ABC):
    """A scalar expression: a value for each row of a batch."""

    #: Spark's type of the values, as an Arrow type.
    type: pa.DataType

    @property
    def children(self) -> tuple[Expression, ...]:
        return ()

    @abc.abstractmethod
    def compute(self, batch: pa.RecordBatch) -> Value:
        """Return an array, or a scalar if all rows have the same value. The batch has a row at least."""

    @abc.abstractmethod
    def with_children(self, children: Sequence[Expression]) -> Expression:
        """Return the same expression of other arguments."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Return the stable text form."""

    @property
    def raises(self) -> bool:
        """Whether there are rows for which it raises."""
        return any(each.raises for each in self.children)

    def evaluate(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the value of each row."""
        if not batch.num_rows:
            return pa.array([], self.type)
        return spread(self.compute(batch), batch.num_rows)

    def columns(self) -> list[str]:
        """Return the names of the columns that it looks at, each once, in order of appearance."""
        return [name for name in _names(self) if not name.startswith(COMMON)]

    def walk(self) -> Iterator[Expression]:
        """Yield the expression and all below it."""
        yield self
        for each in self.children:
            yield from each.walk()

    def replaced(self, columns: Mapping[str, Expression]) -> Expression:
        """Return the expression with others in place of columns."""
        if isinstance(self, Column):
            return columns.get(self.name, self)
        children = [each.replaced(columns) for each in self.children]
        return (
            self
            if all(new is old for new, old in zip(children, self.children, strict=True))
            else self.with_children(children)
        )


def _names(expression: Expression) -> list[str]:
    return list(dict.fromkeys(each.name for each in expression.walk() if isinstance(each, Column)))


def _typed(value: Value, type_: pa.DataType) -> Value:
    return value if value.type == type_ else pc.cast(value, type_)


@dataclass(frozen=True)
class Column(Expression):
    """A column of the batch, by its exact name."""

    name: str
    type: pa.DataType

    def compute(self, batch: pa.RecordBatch) -> Value:
        at = batch.schema.get_all_field_indices(self.name)
        if len(at) != 1:
            problem = "is there several times" if at else "is not there"
            raise SchemaError(f"column {self.name!r} {problem}; there are {', '.join(batch.schema.names)}")
        return _as_spark(batch.column(at[0]), self.type)

    def with_children(self, children: Sequence[Expression]) -> Expression:
        return self

    def __str__(self) -> str:
        if self.name.startswith(COMMON):
            return f"<{self.name[len(COMMON) :]}>"
        name = self.name.replace("`", "``")
        return f"`{name}`"


def _as_spark(column: pa.Array, to: pa.DataType) -> pa.Array:
    """Return a column as Spark has it: text with 32-bit offsets, times in microseconds, cut to the microsecond
    before."""
    if column.type == to:
        return column
    if is_.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_.is_timestamp(column.type) and column.type.unit == "ns":
        column = pc.floor_temporal(column, unit="microsecond")
    return pc.cast(column, to)


@dataclass(frozen=True)
class Literal(Expression):
    """A constant. Its value is that of Python; dates and times are integers, days and microseconds since the epoch."""

    value: Any
    type: pa.DataType

    def scalar(self) -> pa.Scalar:
        if self.value is None:
            return pa.scalar(None, self.type)
        if is_.is_date32(self.type):
            return pa.scalar(self.value, pa.int32()).cast(self.type)
        if is_.is_timestamp(self.type) or is_.is_duration(self.type):
            return pa.scalar(self.value, pa.int64()).cast(self.type)
        if self.type == CALENDAR:
            return pa.scalar(pa.MonthDayNano(self.value), self.type)
        return pa.scalar(self.value, self.type)

    def compute(self, batch: pa.RecordBatch) -> Value:
        return self.scalar()

    def with_children(self, children: Sequence[Expression]) -> Expression:
        return self

    def __str__(self) -> str:
        return f"{_shown(self.value)}:{spark_name(self.type)}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, tuple):
        return f"({' '.join(map(str, value))})"
    return "null" if value is None else repr(value)


@dataclass(frozen=True)
class FunctionCall(Expression):
    """A function of the table, of arguments; its options are constants."""

    function: str
    arguments: tuple[Expression, ...]
    type: pa.DataType
    options: tuple[tuple[str, Any], ...] = ()
    raises_itself: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = [each.type for each in self.arguments]
        raises = FUNCTIONS[self.function].raises(self.type, given, dict(self.options))
        object.__setattr__(self, "raises_itself", raises)

    @property
    def children(self) -> tuple[Expression, ...]:
        return self.arguments

    @property
    def raises(self) -> bool:
        return self.raises_itself or super().raises

    def compute(self, batch: pa.RecordBatch) -> Value:
        function = FUNCTIONS[self.function]
        values = self._arguments(batch) if function.strict else [each.compute(batch) for each in self.arguments]
        constant = not any(isinstance(each, pa.Array) for each in values)
        if constant:
            values = [spread(each, 1) if at == 0 else each for at, each in enumerate(values)]
        result = _typed(function.kernel(self.type, *values, **dict(self.options)), self.type)
        return result[0] if constant and isinstance(result, pa.Array) else result

    def _arguments(self, batch: pa.RecordBatch) -> list[Value]:
        """Return the arguments: those that may raise only where those in front of them are not null."""
        values: list[Value] = []
        for each in self.arguments:
            where = _all_valid(values, batch.num_rows) if each.raises and values else None
            values.append(each.compute(batch) if where is None else partial(each, batch, where))
        return values

    def with_children(self, children: Sequence[Expression]) -> Expression:
        if self.function == "field" and isinstance(made := children[0], FunctionCall) and made.function == "struct":
            found: Expression = made.arguments[dict(self.options)["ordinal"]]  # of the window of groups, as a rule
            return found
        return FunctionCall(self.function, tuple(children), self.type, self.options)

    def __str__(self) -> str:
        options = [f"{name}={_shown(value)}" for name, value in self.options]
        return f"{self.function}({', '.join([*map(str, self.arguments), *options])}):{spark_name(self.type)}"


def _all_valid(values: Sequence[Value], rows: int) -> Bools | None:
    """Return where all values are there; None: everywhere."""
    found: Bools | None = None
    for each in values:
        if isinstance(each, pa.Scalar):
            if not each.is_valid:
                return np.zeros(rows, np.bool_)
        elif each.null_count:
            own = bools(each.is_valid())
            found = own if found is None else found & own
    return found


def partial(expression: Expression, batch: pa.RecordBatch, where: Bools) -> Value:
    """Return the value of each row of ``where``, and null elsewhere, if the expression may raise; else the value of
    each row."""
    if not expression.raises or where.all():
        return expression.compute(batch)
    if not where.any():
        return pa.scalar(None, expression.type)
    places = {name: batch.schema.get_field_index(name) for name in _names(expression)}
    at = [each for each in places.values() if each >= 0]
    # A column that is there twice, or not at all, gets its error where it is looked up.
    lost = any(each < 0 and not name.startswith(COMMON) for name, each in places.items())
    rows = batch.select(at) if at and not lost else batch
    return scattered(expression.evaluate(rows.filter(pa.array(where))), where)


@dataclass(frozen=True)
class Connective(Expression):
    """Two conditions in three-valued logic. The right side is computed where the left one does not decide alone."""

    left: Expression
    right: Expression
    type: pa.DataType = BOOLEAN

    #: The value with which the left side decides.
    decides: ClassVar[bool]
    #: The function of Arrow with the truth table.
    function: ClassVar[str]
    #: The name in the text form.
    name: ClassVar[str]

    @property
    def children(self) -> tuple[Expression, ...]:
        return self.left, self.right

    def compute(self, batch: pa.RecordBatch) -> Value:
        left = self.left.compute(batch)
        if self.right.raises:
            known = pc.fill_null(spread(left, batch.num_rows), not self.decides)
            where = bools(known) != self.decides
            right = pc.if_else(pa.array(where), partial(self.right, batch, where), self.decides)
        else:
            right = self.right.compute(batch)
        return pc.call_function(self.function, [left, right])

    def with_children(self, children: Sequence[Expression]) -> Expression:
        return type(self)(*children)

    def __str__(self) -> str:
        return f"{self.name}({self.left}, {self.right})"


class And(Connective):
    """Both."""

    decides = False
    function = "and_kleene"
    name = "and"


class Or(Connective):
    """One of both, or both."""

    decides = True
    function = "or_kleene"
    name = "or"


@dataclass(frozen=True)
class With(Expression):
    """An expression some of whose parts have a value in common, which is computed once: they see it as the column ``name``,
    which begins with ``COMMON``."""

    name: str
    value: Expression
    body: Expression

    @property
    def type(self) -> pa.DataType:
        return self.body.type

    @property
    def children(self) -> tuple[Expression, ...]:
        return self.value, self.body

    def compute(self, batch: pa.RecordBatch) -> Value:
        value = self.value.evaluate(batch)
        outer = batch.schema.get_field_index(self.name)
        if outer >= 0:
            batch = batch.remove_column(outer)
        return self.body.compute(batch.append_column(self.name, value))

    def with_children(self, children: Sequence[Expression]) -> Expression:
        return With(self.name, *children)

    def __str__(self) -> str:
        return f"with({Column(self.name, self.value.type)}, {self.value}, {self.body})"


@dataclass(frozen=True)
class Case(Expression):
    """The value of the first branch whose condition is true, else the value of ``otherwise``."""

    branches: tuple[tuple[Expression, Expression], ...]
    otherwise: Expression
    type: pa.DataType

    @property
    def children(self) -> tuple[Expression, ...]:
        return (*(each for branch in self.branches for each in branch), self.otherwise)

    def compute(self, batch: pa.RecordBatch) -> Value:
        rows = batch.num_rows
        left = np.ones(rows, np.bool_)
        chosen: list[tuple[Bools, Value]] = []
        for condition, value in self.branches:
            holds = left & bools(spread(partial(condition, batch, left), rows))
            chosen.append((holds, partial(value, batch, holds)))
            left = left & ~holds
        result = spread(_typed(partial(self.otherwise, batch, left), self.type), rows)
        for holds, value in chosen:
            result = pc.if_else(pa.array(holds), _typed(value, self.type), result)
        return result

    def with_children(self, children: Sequence[Expression]) -> Expression:
        pairs = tuple(zip(children[:-1:2], children[1::2], strict=True))
        return Case(pairs, children[-1], self.type)

    def __str__(self) -> str:
        return f"case({', '.join(map(str, self.children))}):{spark_name(self.type)}"


@dataclass(frozen=True)
class Coalesce(Expression):
    """The first value that is not null."""

    arguments: tuple[Expression, ...]
    type: pa.DataType

    @property
    def children(self) -> tuple[Expression, ...]:
        return self.arguments

    def compute(self, batch: pa.RecordBatch) -> Value:
        result = spread(_typed(self.arguments[0].compute(batch), self.type), batch.num_rows)
        for each in self.arguments[1:]:
            if not result.null_count:
                break
            missing = bools(result.is_null())
            result = pc.if_else(pa.array(missing), _typed(partial(each, batch, missing), self.type), result)
        return result

    def with_children(self, children: Sequence[Expression]) -> Expression:
        return Coalesce(tuple(children), self.type)

    def __str__(self) -> str:
        return f"coalesce({', '.join(map(str, self.arguments))}):{spark_name(self.type)}"
