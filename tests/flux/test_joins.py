"""Joins against a model in plain Python: nested loops, row by row, with any cuts, copies and changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.errors import SchemaError
from flux.expressions.tree import Column, FunctionCall
from flux.joins import join, waiting_rows
from flux.joins.join import Join
from flux.joins.join_spec import EITHER, KINDS, LEFT, RIGHT, JoinSpec, TimeBound
from flux.operators import batches
from flux.operators.attributes import open_operator
from flux.operators.batches import given_batches
from flux.operators.operator import last_output, move_watermarks, says_needs
from flux.replica.snapshot import decode_snapshot, encode_snapshot
from flux.windows.window import END_OF_TIME, NEVER
from partitioning.errors import KeyTypeError

TIME = pa.timestamp("us", tz="UTC")
#: Keys of one row: possible values of a key column, by kind.
KEY_TYPES: dict[str, tuple[list[pa.DataType], list[tuple]]] = {
    "number": ([pa.int64()], [(1,), (2,), (3,), (None,)]),
    "double": ([pa.float64()], [(0.0,), (-0.0,), (math.nan,), (1.5,), (None,)]),
    "text": ([pa.string()], [("",), ("a",), ("long" * 9,), (None,)]),
    "several": (
        [pa.string(), pa.decimal128(9, 2), pa.float64()],
        [("a", Decimal("1.00"), 0.0), ("a", Decimal("1.00"), -0.0), ("b", Decimal("2.50"), math.nan), ("a", None, 1.0)],
    ),
}
STRUCT = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.int64())), ("z", pa.decimal128(12, 3))])
#: Columns of each side behind the keys: time, another time, a number, payload of several types.
BEHIND = [TIME, TIME, pa.int64(), pa.string(), STRUCT]
AT_TIME, AT_OTHER, AT_NUMBER = 0, 1, 2


def schema_of(keys: str) -> pa.Schema:
    types = [*KEY_TYPES[keys][0], *BEHIND]
    return pa.schema([(f"c{at}", type_) for at, type_ in enumerate(types)])


def batch_of(schema: pa.Schema, rows: list[tuple]) -> pa.RecordBatch:
    arrays = [
        pa.array([row[at] for row in rows], pa.int64() if f.type == TIME else f.type).cast(f.type)
        for at, f in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def payload(number: int | None) -> tuple:
    """Return the columns behind the number, which follow from it."""
    if number is None:
        return None, None
    struct = {
        "x": number if number % 2 else None,
        "y": [number] * (number % 3),
        "z": Decimal(number).quantize(Decimal("1.000")),
    }
    return "t" * number, struct


@dataclass
class Waiting:
    row: tuple
    key: tuple
    until: float
    matched: bool = False


@dataclass
class Model:
    """A join in plain Python. Rows are tuples, times integers."""

    spec: JoinSpec
    keys: int
    clock: int = 0
    marks: list[int] = field(default_factory=lambda: [NEVER, NEVER])
    waiting: tuple[list[Waiting], list[Waiting]] = field(default_factory=lambda: ([], []))
    limits: list[float] = field(default_factory=lambda: [-math.inf, -math.inf])
    behind: int = 0

    def width(self) -> int:
        return self.keys + len(BEHIND)

    def key(self, row: tuple) -> tuple | None:
        parts = row[: self.keys]
        if any(part is None for part in parts):
            return None
        return tuple("nan" if part != part else part + 0.0 if isinstance(part, float) else part for part in parts)

    def time(self, side: int, row: tuple) -> int | None:
        at = self.spec.times[side]
        return None if at is None else row[at]

    def matches(self, left: tuple, right: tuple) -> bool:
        rows = left, right
        for bound in self.spec.bounds:
            time, limit = self.time(bound.side, rows[bound.side]), rows[1 - bound.side][bound.column]
            if time is None or limit is None:
                return False
            if not (time <= limit + bound.offset if bound.upper else time >= limit + bound.offset):
                return False
        if self.spec.rest is None:
            return True
        one, other = left[self.keys + AT_NUMBER], right[self.keys + AT_NUMBER]
        return one is not None and other is not None and one <= other

    def hopeless(self, side: int, row: tuple) -> bool:
        """Return whether no row of the other side can match this one any more, given the watermark of that side."""
        other, mark = 1 - side, self.marks[1 - side]
        if self.key(row) is None:
            return True
        if self.spec.times[other] is not None and mark == END_OF_TIME:
            return True
        for bound in self.spec.bounds:
            mine = row[bound.column] if bound.side == other else self.time(side, row)
            if mine is None:
                return True
            if bound.side == other and bound.upper and mine + bound.offset < mark:
                return True
            at_time = bound.side == side and bound.column == self.spec.times[other]
            if at_time and not bound.upper and mine - bound.offset < mark:
                return True
        return False

    def until(self, side: int, row: tuple) -> float:
        if self.spec.ttl is None:
            return math.inf
        if self.spec.times[side] is None:
            return self.clock + self.spec.ttl
        time = self.time(side, row)
        return -math.inf if time is None else time + self.spec.ttl

    def out(self, left: tuple | None, right: tuple | None) -> tuple:
        none = (None,) * self.width()
        whole = (left or none) + (right or none)
        return tuple(whole[at] for _, at in self.spec.outputs)

    def add(self, side: int, rows: list[tuple]) -> list[tuple]:
        given_: list[tuple] = self.forget()
        for row in rows:
            given_ += self.one(side, row)
        return given_

    def one(self, side: int, row: tuple) -> list[tuple]:
        spec, given_, matched = self.spec, [], False
        time = self.time(side, row)
        if spec.judges(side) and time is not None and time < self.marks[side]:
            self.behind += 1
            return []
        semi, anti = spec.how == "left_semi", spec.how == "left_anti"
        for other in list(reversed(self.waiting[1 - side])):
            pair = (row, other.row) if side == LEFT else (other.row, row)
            if self.key(row) is None or other.key != self.key(row) or not self.matches(*pair):
                continue
            if semi and not (side == LEFT and matched):
                given_.append(self.out(pair[0], None))
            if not (semi or anti):
                given_.append(self.out(*pair))
            other.matched = matched = True
            if (semi or anti) and side == RIGHT:
                self.waiting[LEFT].remove(other)
        until = self.until(side, row)
        if self.hopeless(side, row) or until < self.limits[side] or until == -math.inf:
            if not matched and spec.outer[side]:
                given_.append(self.out(row, None) if side == LEFT else self.out(None, row))
        elif not (spec.once and side == LEFT and matched):
            self.waiting[side].append(Waiting(row, self.key(row), until, matched))
        return given_

    def forget(self, everything: bool = False) -> list[tuple]:
        given_: list[tuple] = []
        for side in (LEFT, RIGHT):
            if self.spec.ttl is not None and self.spec.times[side] is None:
                self.limits[side] = self.clock
            elif self.spec.ttl is not None and self.marks[side] != END_OF_TIME:
                self.limits[side] = self.marks[side]
            for each in list(self.waiting[side]):
                if everything or self.hopeless(side, each.row) or each.until < self.limits[side]:
                    self.waiting[side].remove(each)
                    if self.spec.outer[side] and not each.matched:
                        given_.append(self.out(each.row, None) if side == LEFT else self.out(None, each.row))
        return given_

    def move(self, marks: list[int]) -> list[tuple]:
        self.marks = [mark if at is not None else END_OF_TIME for mark, at in zip(marks, self.spec.times, strict=True)]
        return self.forget()


# ---- drawn rows and steps


def spec_of(how: str, keys: str, bounds: tuple[TimeBound, ...] = (), **more: Any) -> JoinSpec:
    count = len(KEY_TYPES[keys][0])
    width = count + len(BEHIND)
    at = list(range(width if how in ("left_semi", "left_anti") else 2 * width))
    places = tuple(range(count))
    times = (count + AT_TIME, count + AT_TIME)
    return JoinSpec(
        how, (places, places), tuple((f"o{each}", each) for each in at), **({"times": times, "bounds": bounds} | more)
    )


def rest_of(keys: str) -> FunctionCall:
    """Return the condition that the number on the left is at most that on the right."""
    count = len(KEY_TYPES[keys][0])
    one, other = count + AT_NUMBER, 2 * count + len(BEHIND) + AT_NUMBER
    return FunctionCall("less_or_equal", (Column(str(one), pa.int64()), Column(str(other), pa.int64())), pa.bool_())


def bounds_of(draw: Random, keys: str) -> tuple[TimeBound, ...]:
    count = len(KEY_TYPES[keys][0])
    time, other = count + AT_TIME, count + AT_OTHER
    low, high = draw.randint(-6, 4), draw.randint(-2, 8)
    return draw.choice([
        (TimeBound(LEFT, False, time, low), TimeBound(LEFT, True, time, high)),
        (TimeBound(RIGHT, False, time, -high), TimeBound(LEFT, False, time, low)),
        (TimeBound(LEFT, False, time, low), TimeBound(LEFT, True, other, high)),
        (TimeBound(RIGHT, True, other, 3), TimeBound(LEFT, True, other, 3)),
        (TimeBound(LEFT, False, time, low),),
    ])  # fmt: skip


def bounded(draw: Random, keys: str) -> JoinSpec:
    how = draw.choice(KINDS)
    time_of = draw.choice([None, LEFT] if how in ("left_semi", "left_anti") else [None, LEFT, RIGHT, EITHER])
    rest = draw.choice([None, rest_of(keys)])
    return spec_of(how, keys, bounds_of(draw, keys), rest=rest, ttl=draw.choice([None, None, 6]), time_of=time_of)


def unbounded(draw: Random, keys: str) -> JoinSpec:
    count = len(KEY_TYPES[keys][0])
    times = tuple(draw.choice([None, count + AT_TIME]) for _ in range(2))
    rest = draw.choice([None, None, rest_of(keys)])
    return spec_of(draw.choice(KINDS), keys, rest=rest, times=times, ttl=draw.choice([None, 5]))


#: Steps: rows of an input, watermarks of both, or a time of the clock in microseconds.
Step = tuple[str, Any, Any]


def steps_of(draw: Random, keys: str, spec: JoinSpec, late: bool = True) -> list[Step]:
    steps: list[Step] = []
    now, marks, clock = draw.randint(-40, 20), [NEVER, NEVER], 1_000_000
    timed = [side for side in (LEFT, RIGHT) if spec.times[side] is not None]
    for _ in range(draw.randint(1, 30)):
        now += draw.randint(0, 4)
        if draw.random() < 0.3 and timed:
            side, marks = draw.choice(timed), list(marks)
            marks[side] = END_OF_TIME if draw.random() < 0.04 else max(marks[side], now - draw.randint(0, 9))
            steps.append(("marks", marks, None))
            continue
        if draw.random() < 0.5:
            clock += draw.randint(0, 3)
            steps.append(("clock", clock, None))
        side = draw.randint(0, 1)
        if marks[side] == END_OF_TIME:
            continue
        rows: list[tuple] = []
        for _ in range(draw.randint(1, 6)):
            time: int | None = now - draw.randint(0, 8)
            if not (late and draw.random() < 0.1):
                time = max(marks[side], time)
            time = None if draw.random() < 0.06 else time
            other = None if draw.random() < 0.06 else now + draw.randint(-3, 9)
            key = draw.choice(KEY_TYPES[keys][1][: draw.choice([2, 4])])
            number = draw.choice([None, 1, 2, 3, 4])
            rows.append((*key, time, other, number, *payload(number)))
        steps.append(("rows", side, rows))
    return steps


def opened(spec: JoinSpec, schema: pa.Schema) -> Join:
    operator = Join(spec, schema, schema)
    open_operator(
        operator, flux.Context("Joined", schemas=(schema, schema), output_mode="append", watermarks=[NEVER, NEVER])
    )
    return operator


def travelled(state: Any) -> Any:
    return decode_snapshot(bytes(encode_snapshot(state, "here", classes=())), classes=())


class Applied:
    """An operator under steps, which is cut, copied and brought up to date by changes as drawn."""

    def __init__(self, spec: JoinSpec, schema: pa.Schema, draw: Random) -> None:
        self.spec, self.schema, self.draw = spec, schema, draw
        self.operator = opened(spec, schema)
        self.standby: Join | None = None
        #: The watermarks that were stated for later rows.
        self.stated = NEVER

    def apply(self, step: Step) -> list[tuple]:
        kind, what, rows = step
        context = self.operator.context
        context.step += 1
        if kind == "clock":
            context.now = what / 1_000_000
            found = [each for name in context.timers.due(context.now) if context.timers.take(name, context.now)
                     for each in given_batches(self.operator.on_timer(name))]  # fmt: skip
            return self.rows(found)
        if kind == "marks":
            marks = [mark if at is not None else END_OF_TIME for mark, at in zip(what, self.spec.times, strict=True)]
            given_ = self.rows(move_watermarks(self.operator, context, marks))
            self.stated = max(self.stated, min(context.watermark, self.operator.output_watermark()))
            return given_
        context.input, given_ = what, []
        while rows:
            cut = self.draw.randint(1, len(rows))
            given_ += self.rows(given_batches(self.operator.process(batch_of(self.schema, rows[:cut]))))
            rows = rows[cut:]
        return given_

    def rows(self, batches: Any) -> list[tuple]:
        found = [row for batch in batches for row in rows_of(batch)]
        assert all(time >= self.stated for time in map(self.time_of, found) if time is not None)
        return found

    def time_of(self, row: tuple) -> int | None:
        """Return the event time that a given row has."""
        at = self.spec.times[LEFT]
        times = [None if at is None else row[side * len(self.schema) + at] for side in self.spec.sides_of_time]
        return next((time for time in times if time is not None), None)

    def between(self) -> None:
        """Take copies between two steps, as drawn."""
        what = self.draw.choice(["", "", "copy"] if self.standby is None else ["", "changes", "changes", "take over"])
        if what == "" and self.standby is None:
            self.operator.changes()
            self.standby = self.other()
            self.standby.restore(travelled(self.operator.snapshot()))
        elif what in ("changes", "take over"):
            self.standby.apply_changes(travelled(self.operator.changes()))
            if what == "take over":
                self.placed(self.standby.context)
                self.operator, self.standby = self.standby, None
        elif what == "copy":
            state, self.operator = travelled(self.operator.snapshot()), self.other()
            self.operator.restore(state)

    def other(self) -> Join:
        made = opened(self.spec, self.schema)
        self.placed(made.context)
        return made

    def placed(self, context: flux.Context) -> None:
        """Put a context to the place of the operator: its time, watermarks and timers."""
        mine = self.operator.context
        context.watermarks, context.now, context.step = list(mine.watermarks), mine.now, mine.step
        context.timers.replace(mine.timers.pending)


def rows_of(batch: pa.RecordBatch) -> list[tuple]:
    batch.validate(full=True)
    columns = []
    for column in batch.columns:
        column = column.view(pa.int64()) if column.type == TIME else column
        columns.append(column.to_pylist())
    return list(zip(*columns, strict=True))


def said(rows: list[tuple]) -> list[str]:
    return [repr(row) for row in rows]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few rows move together, few pairs be found at once, and little text be taken at once."""
    monkeypatch.setattr(join, "PAIRS_MAX", 3)
    monkeypatch.setattr(batches, "TAKEN_BYTES_MAX", 5)
    monkeypatch.setattr(join, "KEYS_MIN", 1)
    monkeypatch.setattr(waiting_rows, "ROWS_MIN", 2)


@pytest.mark.parametrize("keys", KEY_TYPES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_join_gives_what_the_model_gives_in_its_order_whatever_the_cuts_and_copies(keys: str, seed: int) -> None:
    draw = Random(seed)
    spec = draw.choice([bounded, bounded, unbounded])(draw, keys)
    steps = steps_of(draw, keys, spec)
    model, applied = Model(spec, len(KEY_TYPES[keys][0]), 0), Applied(spec, schema_of(keys), draw)
    for step in steps:
        kind, what, rows = step
        if kind == "clock":
            model.clock = what
            # rows of inner joins are forgotten when they are looked at, which is not seen
            expected = model.forget() if applied.operator._flux_timed and any(model.waiting) else []
        else:
            expected = model.move(what) if kind == "marks" else model.add(what, rows)
        assert said(applied.apply(step)) == said(expected)
        if spec.ttl is None:
            assert [len(rows) for rows in applied.operator._waiting] == [len(rows) for rows in model.waiting]
        applied.between()
    end = said(applied.rows(last_output(applied.operator, applied.operator.context)))
    assert end == said(model.move([END_OF_TIME] * 2) + model.forget(everything=True))
    assert applied.operator._behind == model.behind
    assert not any(len(waiting) for waiting in applied.operator._waiting)
    assert not len(applied.operator._index)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_pairs_and_rows_without_any_are_those_of_a_batch_join_whatever_the_interleaving(seed: int) -> None:
    draw = Random(seed)
    spec = bounded(draw, "number").with_ttl_as_bounds()  # times at most ``ttl`` apart, whichever side is faster
    steps = steps_of(draw, "number", spec, late=False)
    applied, model = Applied(spec, schema_of("number"), draw), Model(spec, 1)
    found = [row for step in steps for row in applied.apply(step)]
    found += applied.rows(last_output(applied.operator, applied.operator.context))
    lefts, rights = (
        [row for kind, side, rows in steps if kind == "rows" and side == of for row in rows] for of in (0, 1)
    )
    pairs = [
        (left, right) for left in lefts for right in rights if _equal(model, left, right) and model.matches(left, right)
    ]
    matched = [{id(pair[side]) for pair in pairs} for side in (0, 1)]
    expected = [] if spec.once else [model.out(*pair) for pair in pairs]
    if spec.how == "left_semi":
        expected = [model.out(left, None) for left in lefts if id(left) in matched[LEFT]]
    if spec.outer[LEFT]:
        expected += [model.out(left, None) for left in lefts if id(left) not in matched[LEFT]]
    if spec.outer[RIGHT]:
        expected += [model.out(None, right) for right in rights if id(right) not in matched[RIGHT]]
    assert sorted(said(found)) == sorted(said(expected))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_join_of_the_columns_that_are_wanted_gives_the_same_rows(seed: int) -> None:
    draw = Random(seed)
    keys = draw.choice(["number", "several"])
    schema = schema_of(keys)
    spec = draw.choice([bounded, unbounded])(draw, keys)
    wanted = sorted(draw.sample(range(len(spec.outputs)), draw.randint(1, 4)))
    fewer, reads = spec.only(wanted, len(schema))
    assert [name for name, _ in fewer.outputs] == [spec.outputs[at][0] for at in wanted]
    whole, narrow = opened(spec, schema), Join(fewer, *(pa.schema([schema.field(at) for at in read]) for read in reads))
    open_operator(narrow, replace(whole.context, schemas=narrow._schemas, watermarks=[NEVER, NEVER]))
    for kind, side, rows in steps_of(draw, keys, spec):
        found = []
        for operator in (whole, narrow):
            given_: Any = ()
            if kind == "clock":
                operator.context.now = side / 1_000_000
            elif kind == "marks":
                marks = [mark if at is not None else END_OF_TIME for mark, at in zip(side, spec.times, strict=True)]
                given_ = move_watermarks(operator, operator.context, marks)
            else:
                operator.context.input = side
                batch = batch_of(schema, rows)
                given_ = operator.process(batch if operator is whole else batch.select(reads[side]))
            found.append([row for each in given_batches(given_) for row in rows_of(each)])
        assert said([tuple(row[at] for at in wanted) for row in found[0]]) == said(found[1])
        assert whole.output_watermark() == narrow.output_watermark()


def _equal(model: Model, left: tuple, right: tuple) -> bool:
    return model.key(left) is not None and model.key(left) == model.key(right)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_an_inner_join_that_begins_empty_at_the_step_it_needs_gives_the_same(seed: int) -> None:
    draw = Random(seed)
    spec = replace(bounded(draw, "number"), how="inner", ttl=6)
    steps = steps_of(draw, "number", spec) or [("marks", [0, 0], None)]
    assert says_needs(opened(spec, schema_of("number")), "append")

    def applied_from(first: int) -> Any:
        applied = Applied(spec, schema_of("number"), draw)
        applied.operator.context.step = first - 1
        marks = [what for kind, what, _ in steps[:first] if kind == "marks"]
        applied.operator.context.watermarks = marks[-1] if marks else [NEVER, NEVER]
        clocks = [what for kind, what, _ in steps[:first] if kind == "clock"]
        applied.operator.context.now = clocks[-1] / 1_000_000 if clocks else 0.0
        for step in steps[first:]:
            yield said(applied.apply(step)), applied.operator.needs_from()

    whole = list(applied_from(0))
    at = draw.randrange(len(steps))
    needed = whole[at][1]
    assert all(before <= needed <= at + 1 for _, before in whole[:at])
    again = list(applied_from(needed))
    assert [rows for rows, _ in again[at + 1 - needed :]] == [rows for rows, _ in whole[at + 1 :]]


def test_only_an_inner_join_that_forgets_may_be_upstream() -> None:
    within = (TimeBound(LEFT, False, 1, 0), TimeBound(LEFT, True, 1, 9))
    schema = schema_of("number")
    for how in KINDS:
        assert says_needs(opened(spec_of(how, "number", within), schema), "append") is (how == "inner")
    assert not says_needs(opened(spec_of("inner", "number", within[:1]), schema), "append")


def test_rows_wait_for_the_watermark_of_the_other_input_and_not_for_their_own() -> None:
    spec = spec_of("left_outer", "number", (TimeBound(LEFT, False, 1, 0), TimeBound(LEFT, True, 1, 9)))
    applied = Applied(spec, schema_of("number"), Random(0))
    assert not applied.apply(("rows", LEFT, [(1, 20, None, 1, *payload(1))]))
    assert not applied.apply(("marks", [1000, 20], None))  # a right row at 20 may still come
    (row,) = applied.apply(("marks", [1000, 21], None))
    assert row[:2] == (1, 20)
    assert row[6:] == (None,) * 6


def test_an_input_without_event_time_has_not_ended() -> None:
    """Wait for rows of that input, although its watermark is at the end of time from the start."""
    spec = spec_of("left_outer", "number", times=(1, None), ttl=None)
    applied = Applied(spec, schema_of("number"), Random(0))
    assert not applied.apply(("rows", LEFT, [(1, 20, None, 1, *payload(1))]))
    assert not applied.apply(("marks", [50, NEVER], None))
    (pair,) = applied.apply(("rows", RIGHT, [(1, 3, None, 1, *payload(1))]))
    assert (pair[1], pair[7]) == (20, 3)


def test_state_is_empty_when_all_has_expired_and_bounded_before() -> None:
    spec = spec_of("full_outer", "text", (TimeBound(LEFT, False, 1, -50), TimeBound(LEFT, True, 1, 50)))
    schema = schema_of("text")
    operator, sizes, given_ = opened(spec, schema), [], 0
    context = operator.context
    with pytest.MonkeyPatch.context() as patch:
        for name, value, of in (
            ("PAIRS_MAX", 65_536, join),
            ("KEYS_MIN", 1024, join),
            ("ROWS_MIN", 1024, waiting_rows),
            ("TAKEN_BYTES_MAX", 1 << 26, batches),  # or each row alone is a batch of its own
        ):
            patch.setattr(of, name, value)
        for turn in range(20):  # keys that never come back
            for context.input in (LEFT, RIGHT):
                keys = [f"{turn} {at + 400 * context.input}" for at in range(1200)]
                rows = [(key, turn * 100 + at % 100, None, 1, *payload(1)) for at, key in enumerate(keys)]
                given_ += sum(batch.num_rows for batch in operator.process(batch_of(schema, rows)))
            given_ += sum(batch.num_rows for batch in move_watermarks(operator, context, [turn * 100] * 2))
            sizes.append(operator.state_bytes())
        given_ += sum(batch.num_rows for batch in move_watermarks(operator, context, [10_000] * 2))
    assert max(sizes[10:]) <= 1.2 * max(sizes[:10])
    assert operator.state_bytes() < 50_000 < min(sizes[2:])
    assert not any(len(waiting) for waiting in operator._waiting)
    assert given_ == 20 * 1600  # 800 pairs, 400 rows alone on each side


@pytest.mark.parametrize("how", ["left_semi", "left_anti"])
def test_a_row_that_is_given_once_looks_for_one_partner(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop at the first partner: a key with many rows on both sides has too many pairs to look at all of them."""
    monkeypatch.setattr(join, "PAIRS_MAX", 65_536)
    monkeypatch.setattr(waiting_rows, "ROWS_MIN", 1 << 20)  # rows that are gone stay
    schema = pa.schema([("key", pa.int64())])
    spec = JoinSpec(how, ((0,), (0,)), (("key", 0),), ttl=1 << 40)
    made, calls = opened(spec, schema), []
    pair_rows = waiting_rows.kernels.pair_rows

    def counted(*given_: Any) -> Any:
        calls.append(pair_rows(*given_))
        return calls[-1]

    monkeypatch.setattr(waiting_rows.kernels, "pair_rows", counted)

    def give(side: int, key: int, rows: int) -> int:
        made.context.input = side
        batch = pa.record_batch([pa.array([key] * rows)], schema=schema)
        return sum(each.num_rows for each in given_batches(made.process(batch)))

    for side in (RIGHT, LEFT):
        give(side, 1, 1000)
    assert sum(count for count, _, _ in calls) == 1000
    for side, key in ((LEFT, 9), (LEFT, 2), (RIGHT, 2), (LEFT, 2)):
        give(side, key, 1000)
    left = made._waiting[LEFT]
    assert left._heads[made._index.slots([pa.array([2])])[0]] == -1, "nothing is walked through"
    assert give(LEFT, 3, 1) == 0
    assert give(RIGHT, 3, 2) == (how == "left_semi")


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_long_text_that_many_pairs_repeat_comes_in_parts_which_are_those_of_a_copy(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split long output: a text of a megabyte with a thousand partners is a gigabyte, and 2 GiB do not fit into a
    column."""
    monkeypatch.setattr(join, "PAIRS_MAX", 65_536)
    monkeypatch.setattr(batches, "TAKEN_BYTES_MAX", 1 << 16)
    schema = pa.schema([("key", pa.int64()), ("text", pa.string()), ("within", pa.struct([("text", pa.binary())]))])
    spec = JoinSpec("full_outer", ((0,), (0,)), tuple((f"c{at}", at) for at in range(6)), ttl=1 << 40)
    # Bytes under a null are of no account: a copy has none.
    null = pa.Array.from_buffers(
        pa.string(), 1, [pa.py_buffer(b"\0"), pa.py_buffer(b"\0\0\0\0\0\1\0\0"), pa.py_buffer(bytes(256))]
    )
    long = pa.array([{"text": b"x" * 9_000}], schema.field(2).type)
    wide = pa.concat_batches([
        pa.RecordBatch.from_arrays([pa.array([1]), null, long], schema=schema),
        pa.RecordBatch.from_arrays([pa.array([1]), pa.array(["y" * 20_000]), pa.nulls(1, long.type)], schema=schema),
    ])  # fmt: skip
    many = pa.RecordBatch.from_pylist([{"key": 1, "text": str(at)} for at in range(100)], schema=schema)
    made, copy = opened(spec, schema), opened(spec, schema)
    made.context.input = copy.context.input = side
    assert not list(given_batches(made.process(wide)))
    copy.restore(travelled(made.snapshot()))
    for first, second in ((many, 1 - side), (many, side), (wide, 1 - side)):
        found = []
        for operator in (made, copy):
            operator.context.input = second
            found.append(list(given_batches(operator.process(first))))
        assert found[0] == found[1]
        assert all(each.nbytes < (1 << 16) + 40_000 for each in found[0])
    alone = opened(spec, schema)
    alone.context.input = side
    for _ in range(9):
        assert not list(given_batches(alone.process(wide)))
    kept = travelled(alone.snapshot())["sides"][side]["rows"].to_batches()
    given_ = list(given_batches(last_output(alone, alone.context)))
    for each in (kept, given_):
        assert sum(batch.num_rows for batch in each) == 18
        assert all(batch.nbytes < (1 << 16) + 40_000 for batch in each)


def test_a_declaration_that_does_not_fit_the_columns_is_refused() -> None:
    schema = schema_of("number")
    with pytest.raises(
        SchemaError, match=r"keys c0 \(int64\) and c0 \(string\) have different types; cast one of them"
    ):
        Join(spec_of("inner", "number"), schema, schema_of("text"))
    with pytest.raises(SchemaError, match="columns of the left input alone"):
        Join(replace(spec_of("left_semi", "number"), outputs=(("a", 9),)), schema, schema)
    with pytest.raises(KeyTypeError):
        Join(replace(spec_of("inner", "number"), keys=((5,), (5,))), schema, schema)


def test_state_of_another_join_is_refused() -> None:
    schema = schema_of("number")
    state = opened(spec_of("inner", "number"), schema).snapshot()
    other = replace(spec_of("inner", "number"), outputs=(("a", 0),))
    with pytest.raises(SchemaError, match="taken from another operator"):
        opened(other, schema).restore(state)
