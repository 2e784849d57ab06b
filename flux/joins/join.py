"""The operator of a join: rows of two inputs with equal keys (design: joins).

A row that comes looks for matches among the rows of the other input that wait, and then waits for later ones. Pairs come in the
order of the rows that complete them, and for one row the latest of its partners first. So output depends on the rows, the order
in which both inputs came, and the watermarks: neither on the cut into batches and steps, nor on a restore in between.

A row is forgotten when the watermark of the *other* input has passed all times that may match it: its own watermark says nothing
of rows that are still to come there. Without bounds it waits for ``ttl``: exactly, by the watermark of its own input if this has
event time, otherwise by the time of the steps. With neither it waits until the input ends.

An outer join gives a row without a match once, when it is final: null in its key, or forgotten without a match. Rows that are
final when they come have the place of the row; others come when they are forgotten, in the order of arrival, left ones first. A
left semi join gives a row at its first match, a left anti join when none can come any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Self

import numpy as np
import pyarrow as pa

from flux.errors import SchemaError
from flux.joins.join_spec import LEFT, RIGHT, JoinSpec
from flux.joins.waiting_rows import ArrivedRows, ArrivingRows, WaitingRows, WaitLimits
from flux.operators.batches import at_once, text_cuts, text_lengths
from flux.operators.operator import Batches, Context, JointOutput
from flux.operators.tentative import ReadableOperator, TentativeRows
from flux.windows.times import TIME_MAX, microseconds_at, microseconds_of
from flux.windows.window import END_OF_TIME, NEVER
from partitioning import kernels
from partitioning.clustering import check_key_type
from partitioning.columns import fixed_bytes
from partitioning.errors import FailedPartition, StateMismatchError
from partitioning.key_index import KeyIndex

#: Pairs that are found in one turn, and rows of a batch of output, with those that are final when they come.
PAIRS_MAX = 65_536
#: Keys without rows below which the index is not made anew.
KEYS_MIN = 1024
#: Bytes of output of one call for several partitions beyond which each partition gives its own.
JOINT_BYTES_MAX = 1 << 20
#: The timer by which rows are given that have waited for ``ttl`` by the time of the steps.
TIMER = "flux joins"


class Join(ReadableOperator):
    """The join of one partition."""

    snapshot_classes = ()
    restores_in_background = True
    _flux_each_watermark = True
    _flux_counts_rows = True

    def __init__(self, spec: JoinSpec, left_schema: pa.Schema, right_schema: pa.Schema) -> None:
        """Raises SchemaError or KeyTypeError if the declaration does not fit the columns."""
        self.spec = spec
        self._schemas = (left_schema, right_schema)
        self._width = len(left_schema)
        left, right = ([schema.field(at) for at in keys] for schema, keys in zip(self._schemas, spec.keys, strict=True))
        for one, other in zip(left, right, strict=True):
            check_key_type(one.name, one.type)
            if one.type != other.type:
                raise SchemaError(
                    f"join: keys {one.name} ({one.type}) and {other.name} ({other.type}) have different types; cast one of them"
                )
        if spec.once and any(at >= self._width for _, at in spec.outputs):
            raise SchemaError(f"join: {spec.how} gives columns of the left input alone")
        self._keys = left

    # ---- declaration

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> pa.Schema:
        """Return the given columns; those of a side that may be missing are nullable."""
        missing = (self.spec.outer[RIGHT], self.spec.outer[LEFT] and not self.spec.once)
        fields = []
        for name, at in self.spec.outputs:
            side, own = self._of(at)
            field = self._schemas[side].field(own)
            fields.append(pa.field(name, field.type, field.nullable or missing[side], field.metadata))
        return pa.schema(fields)

    def _of(self, at: int) -> tuple[int, int]:
        """Return the side of a concatenated column, and its position there."""
        return (LEFT, at) if at < self._width else (RIGHT, at - self._width)

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        return {"join": str(self.spec)}

    def _columns_needed(self, side: int) -> list[int]:
        """Return the columns of rows that wait which are looked at later."""
        rest = [] if self.spec.rest is None else [int(name) for name in self.spec.rest.columns()]
        places = [self._of(at) for at in [*(at for _, at in self.spec.outputs), *rest]]
        return sorted({own for of, own in places if of == side})

    # ---- life

    def open(self, context: Context) -> None:
        super().open(context)
        self._output = self.output_schema(context.schemas, context.key)
        self._index = KeyIndex(self._keys)
        self._given_at = [at for _, at in self.spec.outputs]
        self._rest_at = [] if self.spec.rest is None else [int(name) for name in self.spec.rest.columns()]
        self._needed = [self._columns_needed(side) for side in (LEFT, RIGHT)]
        self._waiting = [WaitingRows(self._schemas[side], self._needed[side], self._keys) for side in (LEFT, RIGHT)]
        self._ranges = [self.spec.ranges(side) for side in (LEFT, RIGHT)]
        types = [self._schemas[side].field(at).type for side in (LEFT, RIGHT) for at in self._needed[side]]
        #: All columns of pairs have a fixed width, so a pair repeats no text.
        self._fixed = all(pa.types.is_boolean(type_) or fixed_bytes(type_) is not None for type_ in types)
        #: By side: no row with a time below it comes any more.
        self._watermarks = [NEVER, NEVER]
        #: Rows below the watermark of their step, and rows that match nothing for want of a time and are not given.
        self._behind = self._without_time = 0

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        return self._take(batch, self._arriving(batch, self.context.input, microseconds_at(self.context.now)))

    @classmethod
    def process_many(
        cls, operators: Sequence[Self], batch: pa.RecordBatch, rows: Sequence[int]
    ) -> JointOutput | list[Batches] | None:
        """Find the times of all rows at once. The output is joint if it is small; output in several batches is made when it is
        asked for, as that of ``process``, because a row may have any number of partners."""
        first = operators[0]
        nows = np.repeat([microseconds_at(operator.context.now) for operator in operators], rows)
        arriving, start = first._arriving(batch, first.context.input, nows), 0
        given: list[list[pa.RecordBatch]] = []
        more: dict[int, Iterator[pa.RecordBatch]] = {}
        for at, (operator, count) in enumerate(zip(operators, rows, strict=True)):
            output = operator._take(batch.slice(start, count), arriving.part(slice(start, start + count)))
            try:
                given.append(list(islice(output, 2)))
            except Exception as error:
                raise FailedPartition(at, error) from error
            if len(given[-1]) == 2:
                more[at] = output
            start += count
        parts = [part for each in given for part in each]
        if more or sum(part.nbytes for part in parts) > JOINT_BYTES_MAX:
            return [chain(each, more.get(at, ())) for at, each in enumerate(given)]
        if not parts:
            return None
        ends = np.cumsum([sum(part.num_rows for part in each) for each in given])
        return JointOutput(pa.concat_batches(parts), ends.tolist())

    def _take(self, batch: pa.RecordBatch, arriving: ArrivingRows) -> Iterator[pa.RecordBatch]:
        """Apply rows of one input, and yield their output."""
        side = self.context.input
        yield from self._forget()
        batch, arriving = self._judged(batch, side, arriving)
        if batch.num_rows:
            rows = self._arrived(batch, side, arriving)
            final = self._final(rows, side)
            matched = np.zeros(batch.num_rows, np.bool_)
            yield from self._matches(batch, side, rows, final, matched)
            self._keep(batch, side, rows, final, matched)
        self._set_timer()

    def on_watermark(self) -> Batches:
        return self._forget()

    def on_timer(self, name: str) -> Iterator[pa.RecordBatch]:
        yield from self._forget()
        self._set_timer()

    def finish(self) -> Batches:
        return self._forget(everything=True)

    @property
    def _flux_timed(self) -> bool:
        return self._waits_by_clock(LEFT) or self._waits_by_clock(RIGHT)

    def _waits_by_clock(self, side: int) -> bool:
        """Return whether rows of a side are given when they have waited for ``ttl`` by the time of the steps."""
        return self.spec.outer[side] and self.spec.ttl is not None and self.spec.times[side] is None

    def _set_timer(self) -> None:
        if not self._flux_timed or TIMER in self.context.timers.pending:
            return
        until = min(rows.next_until for side, rows in enumerate(self._waiting) if self._waits_by_clock(side))
        if until < END_OF_TIME:
            self.context.set_timer((until + 1) / 1_000_000, TIMER)

    # ---- rows that come

    def _arriving(self, batch: pa.RecordBatch, side: int, now: int | np.ndarray) -> ArrivingRows:
        """Return the facts that the columns of rows tell. ``now``: microseconds, the time of the step, or of that of each row."""
        spec, rows, at = self.spec, batch.num_rows, self.spec.times[side]
        lows, highs = np.full(rows, NEVER), np.full(rows, END_OF_TIME)
        nulls = [column for key in spec.keys[side] if (column := batch.column(key)).null_count]
        for place, upper, offset in self._ranges[side]:
            column = batch.column(place)
            if column.null_count:
                nulls.append(column)
            limits = np.clip(_microseconds(column, 0), -TIME_MAX, TIME_MAX) + offset
            if upper:
                highs = np.minimum(highs, limits)
            else:
                lows = np.maximum(lows, limits)
        times = np.zeros(rows, np.int64) if at is None else _microseconds(batch.column(at), END_OF_TIME)
        if at is not None and any(bound.side == side for bound in spec.bounds) and batch.column(at).null_count:
            nulls.append(batch.column(at))
        if spec.ttl is None:
            untils = np.full(rows, END_OF_TIME)
        elif at is None:
            untils = np.full(rows, now + spec.ttl)
        else:  # a row without a time does not wait
            untils = np.where(times == END_OF_TIME, NEVER, np.clip(times, -TIME_MAX, TIME_MAX) + spec.ttl)
        valid = None
        if nulls:
            valid = np.ones(rows, np.bool_)
            for column in nulls:
                valid &= column.is_valid().to_numpy(zero_copy_only=False)
        return ArrivingRows(valid, times, lows, highs, untils)

    def _judged(self, batch: pa.RecordBatch, side: int, arriving: ArrivingRows) -> tuple[pa.RecordBatch, ArrivingRows]:
        """Return the rows that are not below the watermark, where times of this side count."""
        if self.spec.times[side] is None or self._watermarks[side] == NEVER or not self.spec.judges(side):
            return batch, arriving
        times = arriving.times
        if not len(times) or times.min() >= self._watermarks[side]:
            return batch, arriving
        kept = times >= self._watermarks[side]
        self._behind += int(len(times) - np.count_nonzero(kept))
        return batch.filter(pa.array(kept)), arriving.part(kept)

    def _arrived(self, batch: pa.RecordBatch, side: int, arriving: ArrivingRows) -> ArrivedRows:
        """Return rows with the slots of their keys; -1: a null in its key or its bounds, so that nothing matches it."""
        valid, *facts = arriving
        keys = [batch.column(at) for at in self.spec.keys[side]]
        if valid is None or valid.all():
            return ArrivedRows(self._index.slots(keys), *facts)
        time = self.spec.times[side]
        if time is not None and not self.spec.outer[side] and self.spec.judges(side):
            self._without_time += batch.column(time).null_count
        owners = np.full(batch.num_rows, -1, np.int32)
        if valid.any():
            owners[valid] = self._index.slots([column.filter(pa.array(valid)) for column in keys])
        return ArrivedRows(owners, *facts)

    def _final(self, rows: ArrivedRows, side: int) -> np.ndarray:
        """Return which rows no later row of the other side can match."""
        waiting = self._waiting[side]
        if self._ended(1 - side):
            return np.ones(len(rows.owners), np.bool_)
        final = (rows.owners < 0) | (rows.highs < waiting.high_limit)
        final |= (rows.untils < waiting.until_limit) | (rows.untils == NEVER)
        return final

    def _matches(
        self, batch: pa.RecordBatch, side: int, rows: ArrivedRows, final: np.ndarray, matched: np.ndarray
    ) -> Iterator[pa.RecordBatch]:
        """Yield pairs of rows that came and rows that waited, and among them rows that are final without a match. Notes both as
        ``matched``."""
        other, done, row = self._waiting[1 - side], 0, -2
        first_is_enough = self.spec.once and side == LEFT and self.spec.rest is None
        room = min(PAIRS_MAX, max(2 * batch.num_rows, KEYS_MIN))
        while done < batch.num_rows:
            mine, found, end, row = other.pairs(rows, done, row, room, len(self._index), first_is_enough)
            if self.spec.rest is not None and len(mine):
                parts = self._parts(side, batch, mine, found, self._rest_at)
                holds = np.concatenate([self._holds(batch, side, *part) for part in parts])
                mine, found = mine[holds], found[holds]
            if self.spec.once:
                mine, found = self._first_matches(side, mine, found, matched)
            else:
                matched[mine] = True
                if self.spec.outer[1 - side]:
                    other.match(found)
            if self.spec.outer[side]:
                alone = done + np.flatnonzero(final[done:end] & ~matched[done:end])
                if len(alone):
                    mine, found = _merged(mine, found, alone)
            for part in self._parts(side, batch, mine, found, self._given_at) if len(mine) else ():
                yield self._given(side, batch, *part)
            done = end

    def _parts(
        self, side: int, batch: pa.RecordBatch, mine: np.ndarray, found: np.ndarray, columns: Sequence[int]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pairs in parts of which concatenated columns can be taken at once: a pair repeats the text of its rows."""
        theirs = self._waiting[1 - side].columns
        if self._fixed:
            yield mine, found
            return
        ours = [text_lengths(batch.column(own)) for of, own in map(self._of, columns) if of == side]
        others = [own for of, own in map(self._of, columns) if of != side]
        longest = sum(int(np.max(each)) for each in ours) + sum(map(theirs.longest, others))
        if at_once(len(mine), longest):
            yield mine, found
            return
        there, lengths = found >= 0, np.zeros(len(mine), np.int64)
        for each in ours:
            lengths += each[mine] if isinstance(each, np.ndarray) else each
        for own in others:
            lengths[there] += theirs.lengths(own, found[there])
        for part in text_cuts(lengths, len(mine)):
            yield mine[part], found[part]

    def _first_matches(
        self, side: int, mine: np.ndarray, found: np.ndarray, matched: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Note the first matches of left rows, which wait no more. Return the pairs by which they are given."""
        if side == LEFT:
            keep = np.empty(len(mine), np.bool_)
            kernels.first_of_each(mine, matched, keep)
        else:
            keep = self._waiting[LEFT].match(found)
            self._waiting[LEFT].remove(found[keep])
        if self.spec.outer[LEFT]:  # anti
            keep[:] = False
        return mine[keep], found[keep]

    def _holds(self, batch: pa.RecordBatch, side: int, mine: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Return for which pairs the rest of the condition is true."""
        assert self.spec.rest is not None
        names = self.spec.rest.columns()
        columns = [self._column(side, batch, int(name), pa.array(mine), pa.array(found)) for name in names]
        if not columns:
            names, columns = ["0"], [pa.array(mine)]  # a constant needs the number of pairs
        holds = self.spec.rest.evaluate(pa.RecordBatch.from_arrays(columns, names=names))
        true: np.ndarray = holds.fill_null(False).to_numpy(zero_copy_only=False)
        return true

    def _column(self, side: int, batch: pa.RecordBatch, at: int, mine: pa.Array, found: pa.Array) -> pa.Array:
        """Return a concatenated column of pairs."""
        of, own = self._of(at)
        return batch.column(own).take(mine) if of == side else self._waiting[of].columns.take(own, found)

    def _given(self, side: int, batch: pa.RecordBatch, mine: np.ndarray, found: np.ndarray) -> pa.RecordBatch:
        """Return output: rows of a batch with rows that waited; -1: with none."""
        alone = found < 0
        ours, theirs = pa.array(mine), pa.array(found, mask=alone if alone.any() else None)
        columns = [self._column(side, batch, at, ours, theirs) for _, at in self.spec.outputs]
        return pa.RecordBatch.from_arrays(columns, schema=self._output)

    def _keep(
        self, batch: pa.RecordBatch, side: int, rows: ArrivedRows, final: np.ndarray, matched: np.ndarray
    ) -> None:
        """Let the rows wait that later rows may match."""
        keep = ~(final | matched) if self.spec.once and side == LEFT else ~final
        waiting = self._waiting[side]
        columns = [batch.column(at) for at in self._needed[side]]
        if not keep.all():
            if not keep.any():
                return
            rows = ArrivedRows(*(each[keep] for each in rows))
            chosen = pa.array(keep)
            columns, matched = [column.filter(chosen) for column in columns], matched[keep]
        waiting.add(rows, matched, columns, self.context.step, len(self._index))

    # ---- rows that wait no more

    def _forget(self, everything: bool = False) -> Iterator[pa.RecordBatch]:
        """Forget the rows that no later row can match, and yield those among them that are given alone."""
        for side, watermark in enumerate(self.context.watermarks):
            if self.spec.times[side] is not None:
                self._watermarks[side] = max(self._watermarks[side], watermark)
        for side, waiting in enumerate(self._waiting):
            limits = self._limits(side)
            if waiting.forgot(limits) and not everything:
                continue
            alone = waiting.forget(limits.high, limits.until, everything=everything or limits.over)
            if self.spec.outer[side]:
                for first in range(0, len(alone), PAIRS_MAX):
                    for part in waiting.columns.parts(alone[first : first + PAIRS_MAX]):
                        yield self._alone(side, part)
        self._tidy()

    def _limits(self, side: int) -> WaitLimits:
        """Return the limits by which rows of a side are forgotten now."""
        return WaitLimits(self._watermarks[1 - side], self._until_limit(side), self._ended(1 - side))

    def _ended(self, side: int) -> bool:
        """Return whether an input with event time has ended. The watermark of one without says nothing."""
        return self.spec.times[side] is not None and self._watermarks[side] == END_OF_TIME

    def _until_limit(self, side: int) -> int:
        """Return the time until which rows of a side must wait at least, to wait still."""
        if self.spec.ttl is None:
            return NEVER
        if self.spec.times[side] is None:
            return microseconds_at(self.context.now)
        return (
            NEVER if self._ended(side) else self._watermarks[side]
        )  # after the end, the time of the side stands still

    def _alone(self, side: int, rows: np.ndarray) -> pa.RecordBatch:
        """Return output: rows that waited, without a match."""
        places, columns = pa.array(rows), []
        for (_, at), field in zip(self.spec.outputs, self._output, strict=True):
            of, own = self._of(at)
            columns.append(
                self._waiting[of].columns.take(own, places) if of == side else pa.nulls(len(rows), field.type)
            )
        return pa.RecordBatch.from_arrays(columns, schema=self._output)

    def _tidy(self) -> None:
        """Give memory back: of forgotten rows, and of keys that have no rows."""
        for waiting in self._waiting:
            if waiting.untidy:
                waiting.move_together()
        rows, keys = sum(map(len, self._waiting)), len(self._index)
        if keys and (not rows or keys > 2 * rows + KEYS_MIN):
            used = np.zeros(keys, np.bool_)
            for waiting in self._waiting:
                used[waiting.owners()] = True
            self._index = self._index.only(np.flatnonzero(used).astype(np.int32))
            for waiting in self._waiting:
                waiting.move_together(np.cumsum(used) - 1)

    # ---- beside the steps

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside = self._flux_aside()
        touched = np.zeros(len(self._index) + 1, np.bool_)
        for rows in overlay:
            touched[self._index.find([rows.batch.column(at) for at in self.spec.keys[rows.input]])] = True
        touched[-1] = False  # of keys that no row has
        before = [waiting.limits for waiting in self._waiting] if after == NEVER else aside._limits_at(after)
        then = aside._limits_at(watermark)
        aside._watermarks, aside._index = list(self._watermarks), KeyIndex(self._keys)
        aside._waiting = [
            waiting.part(
                self._index, touched, (before[side], then[side]) if self.spec.outer[side] else None, aside._index
            )
            for side, waiting in enumerate(self._waiting)
        ]
        return aside

    def _limits_at(self, watermark: int) -> list[WaitLimits]:
        """Return by side the limits by which rows are forgotten at a watermark."""
        self._watermarks = [
            now if self.spec.times[side] is None else max(now, watermark, self.context.watermarks[side])
            for side, now in enumerate(self._watermarks)
        ]
        return [self._limits(side) for side in (LEFT, RIGHT)]

    # ---- event time and steps

    def output_watermark(self) -> int:
        """Return the least watermark, less what rows that wait may hold back."""
        watermark = self.context.watermark
        found = watermark
        for side in self.spec.sides_of_time:
            held = self.spec.held_back(side)
            if held is None:
                found = min(found, self._waiting[side].earliest)
            elif NEVER + held < watermark < END_OF_TIME:
                found = min(found, watermark - held)
        return found

    def needs_from(self) -> int | None:
        """Return the step of the first row that waits. Rows of other joins may have matched rows that are forgotten, so only
        inner joins begin empty."""
        if not self._flux_says_needs(self.context.output_mode):
            return None
        needed = [first for waiting in self._waiting if (first := waiting.needs_from) is not None]
        return min(needed, default=self.context.step + 1)

    def _flux_says_needs(self, output_mode: str) -> bool:
        return self.spec.how == "inner" and all(self.spec.forgets(side) for side in (LEFT, RIGHT))

    def _flux_left_out(self) -> tuple[int, int]:
        return self._behind, self._without_time

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        """Return the rows that wait, by side, as a table each."""
        return {**self._facts(), "sides": [waiting.snapshot(self._index) for waiting in self._waiting]}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._take_facts(snapshot)
        self._index = KeyIndex(self._keys)
        try:
            for waiting, state in zip(self._waiting, snapshot["sides"], strict=True):
                waiting.restore(state, self._index)
        except StateMismatchError as error:
            raise SchemaError(f"join: {error}; the snapshot was taken from another operator") from error

    def changes(self) -> dict[str, Any] | None:
        """Return new rows, and which older ones have a match now; rows that were forgotten follow from the limits."""
        sides = [waiting.changes(self._index) for waiting in self._waiting]
        return None if None in sides else {**self._facts(), "sides": sides}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        self._take_facts(changes)
        try:
            for side, state in enumerate(changes["sides"]):
                self._waiting[side].apply_changes(state, self._index, once=self.spec.once and side == LEFT)
        except StateMismatchError as error:
            raise SchemaError(f"join: {error}") from error
        self._tidy()

    def _facts(self) -> dict[str, Any]:
        return {"watermarks": list(self._watermarks), "behind": self._behind, "no_time": self._without_time}

    def _take_facts(self, state: Mapping[str, Any]) -> None:
        self._watermarks = list(state["watermarks"])
        self._behind, self._without_time = state["behind"], state["no_time"]

    def state_bytes(self) -> int:
        return self._index.nbytes + sum(waiting.nbytes for waiting in self._waiting)


def _microseconds(column: pa.Array, null: int) -> np.ndarray:
    """Return times in an array of their own, with a number in place of null."""
    if not column.null_count:
        return np.array(microseconds_of(column))
    missing = column.is_null().to_numpy(zero_copy_only=False)
    return np.where(missing, null, microseconds_of(column.fill_null(pa.scalar(0, pa.int64()).cast(column.type))))


def _merged(mine: np.ndarray, found: np.ndarray, alone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs with rows that have none at their places."""
    mine = np.concatenate([mine, alone])
    found = np.concatenate([found, np.full(len(alone), -1)])
    order = np.argsort(mine, kind="stable")
    return mine[order], found[order]
