"""Conditions and columns between a source and a stage, as one step.

A chain of ``Where``, ``Select`` and ``MapRows`` gives at most one row for each row it gets, in the same order: rows are numbered
as they are read, before the chain. Neighbouring steps become one where that computes nothing twice, and conditions go
in front of columns, as in Spark's optimiser: a column is then not computed for rows that a condition drops, and
cannot raise for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from flux.expressions.tree import Column, Expression, Literal


@dataclass(frozen=True)
class Where:
    """A condition: rows pass for which it is true."""

    condition: Expression

    def columns(self) -> list[str]:
        return self.condition.columns()

    def __str__(self) -> str:
        return f"where {self.condition}"


@dataclass(frozen=True)
class Select:
    """Columns, each with its name, in place of those that come."""

    outputs: tuple[tuple[str, Expression], ...]

    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for _, each in self.outputs for name in each.columns()))

    def wanted(self, names: Iterable[str]) -> Select:
        """Return the step with those of its columns alone that have these names."""
        kept = set(names)
        return Select(tuple(each for each in self.outputs if each[0] in kept))

    def __str__(self) -> str:
        return f"select {', '.join(f'{each} as {Column(name, each.type)}' for name, each in self.outputs)}"


@dataclass(frozen=True)
class MapRows:
    """A function from a batch to one with a row for each row, in the same order: one of the user's, which is given all columns
    that come, or a table in which rows are looked up."""

    function: Callable[[pa.RecordBatch], pa.RecordBatch]
    #: The columns that come, and those that leave.
    schema: pa.Schema
    output: pa.Schema
    #: The columns at which it looks, if columns leave as they came, under the same names, with others behind them: it is given
    #: those and the columns that are wanted behind it. None: columns that leave are others.
    looks_at: tuple[str, ...] | None = None

    def needs(self, wanted: Iterable[str]) -> set[str]:
        """Return the columns that have to come so that these can leave."""
        return set(self.schema.names) if self.looks_at is None else {*self.looks_at, *wanted} & self.kept()

    def kept(self) -> set[str]:
        """Return the names of the columns that leave as they came."""
        return set() if self.looks_at is None else set(self.schema.names)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows behind the function, in the place of those that come."""
        if self.looks_at is None:
            return self.function(batch.select(self.schema.names))
        there = set(batch.schema.names)
        return self.function(batch.select([name for name in self.schema.names if name in there]))

    def __str__(self) -> str:
        columns = ", ".join(f"{Column(field.name, field.type)} {field.type}" for field in self.output)
        if self.looks_at is not None:
            return f"look up {getattr(self.function, 'name', 'rows')}"
        return f"mapInArrow {getattr(self.function, 'name', 'function')} as {columns}"


RowStep = Where | Select | MapRows


@dataclass(frozen=True)
class RowSteps:
    """A chain of steps. ``schema`` is that of the rows that come, ``output`` that of the rows that leave."""

    schema: pa.Schema
    chain: tuple[RowStep, ...]
    output: pa.Schema

    @classmethod
    def of(cls, schema: pa.Schema, chain: Sequence[RowStep], output: pa.Schema | None = None) -> RowSteps:
        """Return the steps, joined and in the order that costs least. ``output`` is needed where types of columns
        that leave differ from those of their expressions, as times in the zone of a session do."""
        joined = tuple(_pruned(_joined(chain)))
        return cls(schema, joined, _output(schema, joined) if output is None else output)

    def then(self, other: RowSteps) -> RowSteps:
        """Return these steps with others behind them."""
        return RowSteps.of(self.schema, (*self.chain, *other.chain), other.output)

    def only(self, names: Iterable[str]) -> RowSteps:
        """Return the steps with those of the columns alone that have these names, in the order of ``output``."""
        wanted = set(names)
        fields = [field for field in self.output if field.name in wanted]
        if len(fields) == len(self.output):
            return self
        types = {field.name: field.type for field in self.schema}
        for step in self.chain:
            if isinstance(step, Select):
                types = {name: each.type for name, each in step.outputs}
            elif isinstance(step, MapRows):
                types = {field.name: field.type for field in step.output}
        last = Select(tuple((field.name, Column(field.name, types[field.name])) for field in fields))
        return RowSteps.of(self.schema, (*self.chain, last), pa.schema(fields))

    def needs(self, wanted: Sequence[str] | None = None) -> list[str]:
        """Return the columns to read, in the order of the schema, so that ``wanted`` columns can be given; None: all.
        At least one column is read, which carries the number of rows."""
        names = set(self.output.names if wanted is None else wanted)
        for step in reversed(self.chain):
            if isinstance(step, Select):
                names = set(step.wanted(names).columns())
            elif isinstance(step, MapRows):
                names = step.needs(names)
            else:
                names |= set(step.columns())
        return [name for name in self.schema.names if name in names] or self.schema.names[:1]

    def names_of(self, column: str) -> list[str]:
        """Return the names under which a column leaves as it came."""
        names = {column}
        for step in self.chain:
            if isinstance(step, Select):
                names = {name for name, each in step.outputs if isinstance(each, Column) and each.name in names}
            elif isinstance(step, MapRows):
                names &= step.kept()
        return [name for name in self.output.names if name in names]

    def came_as(self, name: str) -> str | None:
        """Return the name under which a column came that leaves as it was; None: it is computed."""
        for step in reversed(self.chain):
            if isinstance(step, Select):
                made = dict(step.outputs).get(name)
                if not isinstance(made, Column):
                    return None
                name = made.name
            elif isinstance(step, MapRows) and name not in step.kept():
                return None
        return name

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that pass, with the columns of ``output``. The batch may have further columns than it
        needs, or fewer than ``schema``, as long as those of ``needs`` are there."""
        return self.run(batch)[0]

    @property
    def drops(self) -> bool:
        """Tell whether rows may be left out."""
        return any(isinstance(step, Where) for step in self.chain)

    def run(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array | None]:
        """Return what ``apply`` does, and the index of each row among those that came; None: all have passed."""
        kept: pa.Array | None = None
        for at, step in enumerate(self.chain):
            if isinstance(step, Select):
                batch = _selected(batch, step)
                continue
            if isinstance(step, MapRows):
                batch = step.apply(batch)
                continue
            passing = step.condition.evaluate(batch)
            if passing.null_count == 0 and passing.true_count == len(passing):
                continue
            kept = pc.indices_nonzero(passing) if kept is None else kept.filter(passing)
            batch = _only(batch, self._wanted_behind(at)).filter(passing)
        return self._typed(batch), kept

    def _wanted_behind(self, at: int) -> set[str] | None:
        """Return the columns that are looked at behind a step of the chain; None: all that are there."""
        names: set[str] = set()
        for place, step in enumerate(self.chain[at + 1 :], at + 1):
            if isinstance(step, MapRows):
                behind = set() if step.looks_at is None else self._wanted_behind(place)
                return None if behind is None else names | step.needs(behind)
            names |= set(step.columns())
            if isinstance(step, Select):
                return names
        return None

    def _typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.schema.equals(self.output) or all(isinstance(each, Where) for each in self.chain):
            return batch
        columns = [
            each if each.type == field.type else pc.cast(each, field.type)
            for each, field in zip(batch.columns, self.output, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.output)

    @property
    def sql(self) -> str:
        """The text of SQL, for people."""
        from flux.expressions.sql import steps_in_sql  # it knows steps

        return steps_in_sql(self)

    def __str__(self) -> str:
        return "; ".join(map(str, self.chain))


def _only(batch: pa.RecordBatch, names: set[str] | None) -> pa.RecordBatch:
    """Return these columns of a batch; a column more if there are none, for the number of rows."""
    if names is None:
        return batch
    at = [index for index, name in enumerate(batch.schema.names) if name in names]
    return batch.select(at or [0])


def _selected(batch: pa.RecordBatch, step: Select) -> pa.RecordBatch:
    arrays = [each.evaluate(batch) for _, each in step.outputs]
    fields = [pa.field(name, each.type) for name, each in step.outputs]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _output(schema: pa.Schema, chain: Sequence[RowStep]) -> pa.Schema:
    for step in reversed(chain):
        if isinstance(step, Select):
            return pa.schema([pa.field(name, each.type) for name, each in step.outputs])
        if isinstance(step, MapRows):
            return step.output
    return schema


def _joined(chain: Sequence[RowStep]) -> list[RowStep]:
    """Return the chain with conditions in front of columns, and neighbouring columns as one step, where nothing is
    computed twice."""
    done: list[RowStep] = []
    for step in chain:
        at = len(done)
        moved: RowStep = step
        while at and isinstance(moved, Where):
            before = done[at - 1]
            if not isinstance(before, Select) or not _is_plain(before, moved.columns()):
                break
            moved = Where(moved.condition.replaced(dict(before.outputs)))
            at -= 1
        last = done[at - 1] if at else None
        if isinstance(moved, Select) and isinstance(last, Select) and _computes_once(last, moved):
            inner = dict(last.outputs)
            done[at - 1] = Select(tuple((name, each.replaced(inner)) for name, each in moved.outputs))
        else:
            done.insert(at, moved)
    return done


def _pruned(chain: Sequence[RowStep]) -> list[RowStep]:
    """Return the chain without columns of inner steps that no later step looks at."""
    done: list[RowStep] = []
    needed: set[str] | None = None
    for step in reversed(chain):
        if isinstance(step, Select):
            step = step if needed is None else step.wanted(needed or {step.outputs[0][0]})
            needed = set(step.columns())
        elif isinstance(step, MapRows):
            needed = step.needs(step.schema.names if needed is None else needed)
        elif needed is not None:
            needed |= set(step.columns())
        done.append(step)
    return done[::-1]


def _is_plain(step: Select, names: Sequence[str]) -> bool:
    """Tell whether these columns of a step are columns or constants, which cost nothing."""
    given = [name for name, _ in step.outputs]
    inner = dict(step.outputs)
    return all(given.count(name) == 1 and isinstance(inner[name], Column | Literal) for name in names)


def _computes_once(inner: Select, outer: Select) -> bool:
    """Tell whether each column that is computed by the inner step is looked at once at most by the outer one."""
    given = Counter(name for name, _ in inner.outputs)
    used = Counter(
        each.name for _, expression in outer.outputs for each in expression.walk() if isinstance(each, Column)
    )
    for name, expression in inner.outputs:
        if used[name] and given[name] > 1:
            return False
        if used[name] > 1 and not isinstance(expression, Column | Literal):
            return False
    return True
