"""The condition of a join, resolved by Spark's analyser and split into keys, bounds of event time and a rest (design:
join-conditions).

Spark joins two empty DataFrames with the columns, names and aliases of both flows. An equality between an expression of
one side and one of the other is a key; a comparison of an event time with a time of the other side is a bound; all
else is the rest, which is computed on pairs. Projections above the join, as ``on="key"`` makes one, are the steps behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from controller.planning.names import free_names
from flux.dataflow.relations.join_flow import Joining, JoinInput, ResolvedJoin
from flux.errors import UsageError
from flux.expressions.steps import MapRows, RowStep, RowSteps, Select, Where
from flux.expressions.tree import And, Column, Expression, FunctionCall, With
from flux.joins.join import Join
from flux.joins.join_spec import EITHER, LEFT, RIGHT, JoinSpec, TimeBound
from flux.windows.durations import words
from partitioning.clustering import check_key_type
from partitioning.errors import KeyTypeError
from spark_integration.expressions.analysed_operators import (
    AnalysedPlan,
    check_policy,
    empty_like,
    ids_of,
    sparks_errors,
    steps_behind,
)
from spark_integration.expressions.classes import BOOLEAN, Translator
from spark_integration.expressions.intervals import DAY_US, shifted
from spark_integration.expressions.nodes import Node, arrow_type, tree_of

#: By kind: whether a condition on the left side alone, and on the right side alone, may be a step in front of the join. Elsewhere
#: a row that does not fulfil it is given all the same, without a match.
_IN_FRONT = {
    "inner": (True, True),
    "left_outer": (False, True),
    "right_outer": (True, False),
    "full_outer": (False, False),
    "left_semi": (True, True),
    "left_anti": (False, True),
}
#: Comparisons, each with the one for sides that have changed places.
_MIRRORED = {
    "equal": "equal",
    "less": "greater",
    "less_or_equal": "greater_or_equal",
    "greater": "less",
    "greater_or_equal": "less_or_equal",
}
_DECLARE = "declare it where rows are read, as in source.withWatermark('ts', '10 seconds')"


def join_of(
    spark: SparkSession,
    left: JoinInput,
    right: JoinInput,
    joining: Joining,
    behind: Callable[[DataFrame], DataFrame] = lambda joined: joined,
) -> ResolvedJoin:
    """Return a join of two flows as workers compute it, with operators behind it. UsageError has the words of Spark for a name or
    type that is wrong, or names the missing part: an equality, or an end of the wait of each row."""
    with sparks_errors(pa.schema([*left.schema, *right.schema])):
        frames = [side.frame(partial(empty_like, spark)) for side in (left, right)]
        result = behind(joining.of(*frames))
        plan = AnalysedPlan(result._jdf.queryExecution().analyzed())
    return _JoinResolution((left, right), joining, frames, plan).resolved(spark, result)


class _Side:
    """One side of a join: its columns in the condition, and the columns that travel."""

    def __init__(self, given: JoinInput, names: Sequence[str], kept: bool) -> None:
        """``names``: those of the columns in the condition, which no column of the other side has. ``kept``: all columns travel,
        because the join gives them."""
        self.given = given
        self.names = list(names)
        #: By name in the condition, the column of the input.
        self._own = {name: Column(field.name, field.type) for name, field in zip(names, given.schema, strict=True)}
        #: The columns that travel, by the texts and types of their expressions.
        self._travels: dict[tuple[str, pa.DataType], int] = {}
        self.outputs: list[tuple[str, Expression]] = []
        #: Conditions in front of the join.
        self.conditions: list[Expression] = []
        if kept:
            for column in self._own.values():
                self._add(column.name, column)

    def has(self, expression: Expression) -> bool:
        """Tell whether an expression looks at columns of this side, and no others."""
        looks_at = expression.columns()
        return bool(looks_at) and all(name in self._own for name in looks_at)

    def own(self, expression: Expression) -> Expression:
        """Return an expression of the condition over the columns of the input."""
        types = {column.name: column.type for each in expression.walk() if isinstance(column := each, Column)}
        return expression.replaced(
            {name: Column(self._own[name].name, type_) for name, type_ in types.items() if name in self._own}
        )

    def position(self, expression: Expression, wanted: str = "") -> int:
        """Return the position of an expression of the condition among the columns that travel. It is added if it is not there."""
        found = self.own(expression)
        at = self._travels.get((str(found), found.type))
        return self._add(wanted or str(found), found) if at is None else at

    def position_of(self, name: str) -> int:
        """Return the position of a column of the condition, in the type in which it comes."""
        column = self._own[name]
        at = self._travels.get((str(column), column.type))
        return self._add(column.name, column) if at is None else at

    def time_at(self, expression: Expression) -> int:
        """Return the position of a time; that of a column is the column as it comes, whatever its unit and zone."""
        return self.position_of(expression.name) if isinstance(expression, Column) else self.position(expression)

    def _add(self, wanted: str, expression: Expression) -> int:
        taken = {name.lower() for name, _ in self.outputs}
        name, number = wanted, 2
        while name.lower() in taken:
            name, number = f"{wanted} {number}", number + 1
        self._travels.setdefault((str(expression), expression.type), len(self.outputs))
        self.outputs.append((name, expression))
        return len(self.outputs) - 1

    def is_time(self, expression: Expression) -> bool:
        """Tell whether an expression of the condition is the event time of the rows of this side."""
        found = self.own(expression)
        steps = self.given.steps
        for step in reversed(steps.chain if steps is not None else ()):
            if isinstance(step, Select):
                found = found.replaced(dict(step.outputs))
            elif isinstance(step, MapRows) and not (isinstance(found, Column) and found.name in step.kept()):
                return False
        return isinstance(found, Column) and found.name in self.given.times

    def event_time(self) -> int | None:
        """Return the position of the event time, as it comes; None: there is none among the columns."""
        for name in self.names:
            if self.is_time(self._own[name]):
                return self.position_of(name)
        return None

    def before(self) -> RowSteps | None:
        """Return the steps in front of the join; None: rows come as they are."""
        chain: list[RowStep] = [Where(each) for each in self.conditions]
        schema = self.given.schema
        same = [(field.name, Column(field.name, field.type)) for field in schema]
        if self.outputs != same:
            chain.append(Select(tuple(self.outputs)))
        return RowSteps.of(schema, chain) if chain else None

    def schema(self) -> pa.Schema:
        """Return the schema of the rows that travel."""
        steps = self.before()
        return self.given.schema if steps is None else steps.output


@dataclass
class _Found:
    """Parts of a condition."""

    keys: list[tuple[Expression, Expression]] = field(default_factory=list)
    bounds: list[TimeBound] = field(default_factory=list)
    #: By side, the column with the event time.
    times: list[int | None] = field(default_factory=lambda: [None, None])
    rest: list[Expression] = field(default_factory=list)
    #: Comparisons of times neither of which is the event time of its side, in words.
    no_times: list[str] = field(default_factory=list)


class _Translator(Translator):
    """A translation of the condition, in which windows are equal if their starts and ends are."""

    def translate(self, node: Node) -> Expression:
        if node.name == "EqualTo":
            sides = self.all(node)
            if all(pa.types.is_struct(each.type) and [f.name for f in each.type] == ["start", "end"] for each in sides):
                starts, ends = ([_part(each, at) for each in sides] for at in (0, 1))
                return And(*(FunctionCall("equal", tuple(pair), BOOLEAN) for pair in (starts, ends)))
        return super().translate(node)


def _part(window: Expression, at: int) -> Expression:
    return FunctionCall("field", (window,), window.type.field(at).type, (("ordinal", at),))


class _JoinResolution:
    """A resolution of one join."""

    def __init__(
        self, given: tuple[JoinInput, JoinInput], joining: Joining, frames: Sequence[DataFrame], plan: AnalysedPlan
    ) -> None:
        self._joining, self._plan = joining, plan
        self._join = plan.leaf()
        names = [list(given[LEFT].schema.names)]
        names.append(free_names(given[RIGHT].schema.names, names[LEFT]))
        kept = True, joining.how not in ("left_semi", "left_anti")
        self._sides = [_Side(given[number], names[number], kept[number]) for number in (LEFT, RIGHT)]
        self._attributes: dict[int, Expression] = {}
        for number, child in enumerate((self._join.left(), self._join.right())):
            for id_, name, struct in zip(ids_of(child.output()), names[number], frames[number].schema, strict=True):
                self._attributes[id_] = Column(name, arrow_type(struct.dataType))
        self._found = _Found()

    def resolved(self, spark: SparkSession, result: DataFrame) -> ResolvedJoin:
        """Return the join; ``result`` is Spark's, with the operators behind it."""
        for each in self._conjuncts():
            self._take(each)
        if not self._found.keys:
            raise UsageError(self._without_key())
        keys = self._key_columns()
        outputs = [(name, self._position(name)) for side in self._sides for name in side.names if self._is_given(side)]
        spec = self._spec(keys, outputs)
        self._check_waits(spec)
        check_policy(spark, [Where(each) for each in (*self._found.rest, *self._conditions())])
        before = self._sides[LEFT].before(), self._sides[RIGHT].before()
        schemas = self._sides[LEFT].schema(), self._sides[RIGHT].schema()
        make = partial(Join, spec, *schemas)
        named = tuple(tuple(schemas[number].names[at] for at in keys[number]) for number in (LEFT, RIGHT))
        columns = [*schemas[LEFT], *schemas[RIGHT]]
        given = pa.schema([columns[at].with_name(name) for name, at in outputs])
        after, twice = steps_behind(spark, self._plan, given, result)
        return ResolvedJoin(before, (named[LEFT], named[RIGHT]), spec, make, after, twice)

    def _is_given(self, side: _Side) -> bool:
        return side is self._sides[LEFT] or self._joining.how not in ("left_semi", "left_anti")

    def _position(self, name: str) -> int:
        """Return the position of a column of the condition in the concatenated columns. All columns of the left side that
        travel must be known by then."""
        left, right = self._sides
        if name in left.names:
            return left.position_of(name)
        return len(left.outputs) + right.position_of(name)

    # ---- parts of the condition

    def _conjuncts(self) -> Iterator[Expression]:
        condition = self._join.condition()
        if condition.isEmpty():
            return iter(())
        root: Any = condition.get()
        return _conjuncts(_Translator(self._attributes).translate(tree_of(json.loads(root.toJSON()), lambda: root)))

    def _take(self, condition: Expression) -> None:
        """Take one of the conditions that must hold together."""
        for side, in_front in zip(self._sides, _IN_FRONT[self._joining.how], strict=True):
            if in_front and side.has(condition):
                side.conditions.append(side.own(condition))
                return
        pair = self._pair(condition)
        if pair is None:
            self._found.rest.append(condition)
            return
        kind, one, other = pair
        if kind == "equal":
            self._found.keys.append((one, other))
            if pa.types.is_timestamp(one.type):
                self._take_bounds(("less_or_equal", "greater_or_equal"), one, other)
        elif not self._take_bounds((kind,), one, other):
            self._found.rest.append(condition)

    def _pair(self, condition: Expression) -> tuple[str, Expression, Expression] | None:
        """Return a comparison of both sides, that of the left side first; None: the condition is something else."""
        if not isinstance(condition, FunctionCall) or condition.function not in _MIRRORED:
            return None
        left, right = self._sides
        one, other = condition.arguments
        if left.has(one) and right.has(other):
            return condition.function, one, other
        if right.has(one) and left.has(other):
            return _MIRRORED[condition.function], other, one
        return None

    # ---- bounds

    def _take_bounds(self, kinds: Sequence[str], one: Expression, other: Expression) -> bool:
        """Take comparisons of times as bounds. False: they are no bounds, or say less than the comparison."""
        if not pa.types.is_timestamp(one.type):
            return False
        left, right = shifted(one), shifted(other)
        timed = self._sides[LEFT].is_time(left.base), self._sides[RIGHT].is_time(right.base)
        if not any(timed):
            pairs = zip((one, other), self._sides, strict=True)
            self._found.no_times.append(" with ".join(f"{side.own(time)} of {side.given.name}" for time, side in pairs))
            return False
        exact = left.exact and right.exact
        at = [side.time_at(time.base) for side, time in zip(self._sides, (left, right), strict=True)]
        for number in (LEFT, RIGHT):
            if timed[number] and self._found.times[number] not in (None, at[number]):
                return False  # the same time, cast to another type
        for number in (LEFT, RIGHT):
            if timed[number]:
                self._found.times[number] = at[number]
        for kind in kinds:
            upper = kind in ("less", "less_or_equal")
            strict = 0 if kind.endswith("_or_equal") else -1 if upper else 1
            offset = right.offset - left.offset + strict
            if not exact:
                offset += DAY_US if upper else -DAY_US
            bound = TimeBound(LEFT, upper, at[RIGHT], offset)
            if not timed[LEFT]:
                bound = TimeBound(RIGHT, not upper, at[LEFT], -offset)
            self._found.bounds.append(bound)
        return exact

    # ---- the declaration

    def _key_columns(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        made: tuple[list[int], list[int]] = [], []
        for pair in self._found.keys:
            for number in (LEFT, RIGHT):
                try:
                    check_key_type(str(pair[number]), pair[number].type)
                except KeyTypeError as error:
                    raise UsageError(f"join: {error}") from error
                made[number].append(self._sides[number].position(pair[number]))
        return tuple(made[LEFT]), tuple(made[RIGHT])

    def _spec(self, keys: tuple[tuple[int, ...], tuple[int, ...]], outputs: Sequence[tuple[str, int]]) -> JoinSpec:
        times = [
            self._sides[number].event_time() if at is None and self._sides[number].given.times else at
            for number, at in enumerate(self._found.times)
        ]
        spec = JoinSpec(
            self._joining.how, keys, tuple(outputs), (times[LEFT], times[RIGHT]), tuple(self._found.bounds),
            self._rest(), self._joining.ttl,
        )  # fmt: skip
        return with_time(spec.with_ttl_as_bounds())

    def _rest(self) -> Expression | None:
        if not self._found.rest:
            return None
        rest = self._found.rest[0]
        for each in self._found.rest[1:]:
            rest = And(rest, each)
        types = {column.name: column.type for each in rest.walk() if isinstance(column := each, Column)}
        names = {name for side in self._sides for name in side.names}
        return rest.replaced(
            {name: Column(str(self._position(name)), type_) for name, type_ in types.items() if name in names}
        )

    def _conditions(self) -> list[Expression]:
        return [each for side in self._sides for each in side.conditions]

    def _check_waits(self, spec: JoinSpec) -> None:
        """Raise UsageError if rows would wait for ever and the user has not said so, or not for as long as rows may be late."""
        given = [side.given for side in self._sides]
        for side in given:
            if spec.ttl is not None and spec.ttl < side.delay:
                raise UsageError(
                    f"join: ttl={words(spec.ttl)!r} is shorter than the {words(side.delay)} by which rows of {side.name} may be "
                    "late (withWatermark), and rows that they match would be forgotten by then: say at least "
                    f"ttl={words(side.delay)!r}"
                )
        kept = [number for number in (LEFT, RIGHT) if not spec.forgets(number)]
        if not kept or self._joining.says_ttl or all(side.ends for side in given):
            return
        raise UsageError(
            f"join: rows of {' and of '.join(given[number].name for number in kept)} would be kept for ever, because "
            f"{self._why_kept(kept)}. Say for how long a row waits: by bounds between event times, as in F.expr('c.ad = v.ad AND "
            "c.ts BETWEEN v.ts AND v.ts + INTERVAL 10 MINUTES'); by ttl='1 day'; or by ttl=None, for ever"
        )

    def _why_kept(self, kept: Sequence[int]) -> str:
        given = [side.given for side in self._sides]
        if self._found.no_times:
            return f"its condition compares {self._found.no_times[0]}, and neither is the event time of its side: {_DECLARE}"
        others = [given[1 - number] for number in kept]
        without = [other.name for other in others if not other.times]
        if without and self._found.bounds:
            return f"{' and '.join(without)} {'has' if len(without) == 1 else 'have'} no event time: {_DECLARE}"
        return f"its condition has no upper bound of the event time of {' and of '.join(each.name for each in others)}"

    def _without_key(self) -> str:
        on = self._joining.on
        return (
            "join: the condition has no equality between a column of the left side and one of the right side"
            + ("" if on is None else f": {_said(on)}")
            + ". Rows of equal keys meet in one partition, so there must be one, as in a.join(b, 'key') or "
            "F.expr('a.k = b.k AND ...')"
        )


def _said(on: Any) -> str:
    return ", ".join(map(str, on)) if isinstance(on, tuple) else str(on)


def with_time(spec: JoinSpec) -> JoinSpec:
    """Return a join with the event time of the rows that it gives, if they have one: bounds say how old a row may be."""
    wanted = {"right_outer": RIGHT, "full_outer": EITHER}.get(spec.how, LEFT)
    sides = (LEFT, RIGHT) if wanted == EITHER else (wanted,)
    if any(spec.times[side] is None or spec.held_back(side) is None for side in sides):
        return spec
    if not all(spec.evicts(side) for side in (LEFT, RIGHT) if spec.outer[side]):
        return spec  # rows without a match come at the end of the input
    return replace(spec, time_of=wanted)


def _conjuncts(condition: Expression) -> Iterator[Expression]:
    """Yield the conditions that must hold together. A value that several of them have in common is computed in each."""
    if isinstance(condition, With):
        yield from _conjuncts(condition.body.replaced({condition.name: condition.value}))
    elif isinstance(condition, And):
        for each in condition.children:
            yield from _conjuncts(each)
    else:
        yield condition
