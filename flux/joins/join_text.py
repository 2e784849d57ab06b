"""A join as text for people: its keys, its bounds of event time, the rest of its condition, and for how long rows wait."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa

from flux.expressions.sql import sql
from flux.expressions.tree import Column
from flux.joins.join_spec import LEFT, RIGHT, JoinSpec, TimeBound
from flux.operators.user_code import shortened
from flux.windows.durations import words

_SIDES = ("left", "right")
#: A column of a side as one quoted name.
_QUALIFIED = r"`(left|right)\.([A-Za-z_]\w*)`"


def told_join(spec: JoinSpec, schemas: Sequence[pa.Schema]) -> Iterator[str]:
    """Yield a join, line by line. ``schemas``: the columns of both inputs."""

    def named(side: int, at: int) -> str:
        return f"{_SIDES[side]}.{schemas[side].names[at]}"

    pairs = zip(spec.keys[LEFT], spec.keys[RIGHT], strict=True)
    yield f"keys: {', '.join(f'{named(LEFT, one)} = {named(RIGHT, other)}' for one, other in pairs)}"
    if spec.bounds:
        yield f"bounds: {' and '.join(_bound(spec, each, named) for each in spec.bounds)}"
    if spec.rest is not None:
        names = [named(side, at) for side in (LEFT, RIGHT) for at in range(len(schemas[side]))]
        types = {column.name: column.type for each in spec.rest.walk() if isinstance(column := each, Column)}
        rest = spec.rest.replaced({name: Column(names[int(name)], types[name]) for name in types if name.isdigit()})
        text = re.sub(_QUALIFIED, r"\1.\2", sql(rest))
        yield f"rest of the condition, for each pair: {shortened(text)}"
    for side in (LEFT, RIGHT):
        yield f"{_SIDES[side]} rows wait {_waits(spec, side)}"


def _bound(spec: JoinSpec, bound: TimeBound, named: object) -> str:
    assert callable(named)
    time = spec.times[bound.side]
    assert time is not None, "checked when the declaration was made"
    away = "" if bound.offset == 0 else f" {'+' if bound.offset > 0 else '-'} {words(abs(bound.offset))}"
    return f"{named(bound.side, time)} {'<=' if bound.upper else '>='} {named(1 - bound.side, bound.column)}{away}"


def _waits(spec: JoinSpec, side: int) -> str:
    """Tell for how long a row of a side waits for others."""
    ends = []
    if spec.evicts(side):
        ends.append(f"until the watermark of the {_SIDES[1 - side]} side has passed their bounds")
    if spec.ttl is not None:
        ends.append(f"for {words(spec.ttl)} (ttl)")
    return " or ".join(ends) or "until the input ends (no bounds, no ttl)"


def told_table(refresh_us: int) -> str:
    """Describe a table that is read anew after these microseconds."""
    return f"a table, read anew every {words(refresh_us)} and sent to the stage that looks rows up in it"
