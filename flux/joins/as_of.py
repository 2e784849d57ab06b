"""The operator of an as-of join: each left row with the newest right row of its key, at or before its time (design: as-of).

A left row waits until the watermark of both inputs is above its time, because until then a right row of its time may come. So
its partner follows from the rows alone. Left rows are given by time, and those of one time in the order of their arrival; they
keep their times. A left row without a time has no partner, and is given at once if rows without one are given. Among right rows
of one key and one time the last one by all columns counts, whichever came first.

The state is the rows that wait, and for each key the newest right row below the watermark. With a tolerance, keys whose newest
row is too old for any left row are forgotten.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.errors import SchemaError
from flux.joins.held_back_rows import HeldBackRows
from flux.operators.operator import RESULT_ROWS_MAX, Batches, Context
from flux.operators.schema import position
from flux.operators.tentative import ReadableOperator, TentativeRows
from flux.ranks.order_keys import SortColumn, check_order, order_keys
from flux.ranks.row_arena import RowArena, lengths_of, text_parts
from flux.ranks.warm_up import warm_up
from flux.windows.durations import words
from flux.windows.timely_rows import TimelyRows
from flux.windows.window import NEVER
from partitioning.errors import StateMismatchError
from partitioning.key_index import KeyIndex
from partitioning.keyed_state import ChangedSlots
from partitioning.slot_tables import grown

#: Below this number of keys they do not move together.
KEYS_MIN = 1024
#: Rows that are joined at once, and bytes of their text.
ROWS_MAX, TEXT_MAX = 262_144, 1 << 28


@dataclass(frozen=True)
class AsOfSpec:
    """An as-of join by the key of its stage, whose names are those of both inputs."""

    #: The columns with the event times of left and right rows.
    times: tuple[str, str]
    #: The most microseconds by which a right row may be older; None: any number.
    tolerance: int | None = None
    #: Left rows without a partner are given, with nulls.
    outer: bool = False

    def __str__(self) -> str:
        said = f"the newest right row at or before {self.times[0]}, by {self.times[1]}"
        said += "" if self.tolerance is None else f", at most {words(self.tolerance)} older"
        return said + (", or nulls" if self.outer else "")


class AsOfJoin(ReadableOperator):
    """An as-of join of one partition."""

    snapshot_classes = ()
    restores_in_background = True
    _flux_counts_rows = True
    _flux_waits = True

    def __init__(self, spec: AsOfSpec) -> None:
        self._spec = spec

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        warm_up()
        left, right = schemas
        for column in key:
            ours, theirs = (schema.field(position(schema, column)).type for schema in schemas)
            if ours != theirs:
                raise SchemaError(
                    f"column {column!r} is {ours} on the left and {theirs} on the right; cast one of them, as in "
                    f"withColumn({column!r}, F.col({column!r}).cast(...))"
                )
        try:
            check_order(right, map(SortColumn, range(len(right))))
        except SchemaError as error:
            raise SchemaError(f"{error}; all columns decide between right rows of one time") from None
        others = [field for field in right if field.name.casefold() not in {name.casefold() for name in key}]
        twice = sorted({field.name.casefold() for field in others} & {name.casefold() for name in left.names})
        if twice:
            raise SchemaError(
                f"column {twice[0]!r} is on both sides: rename it on one of them, as in "
                f"withColumnRenamed({twice[0]!r}, {'right_' + twice[0]!r}), or leave it out with drop()"
            )
        return pa.schema([*left, *(field.with_nullable(True) for field in others)])

    def open(self, context: Context) -> None:
        super().open(context)
        self._output = self.output_schema(context.schemas, context.key)
        self._keys_at = [[position(schema, column) for column in context.key] for schema in context.schemas]
        pairs = zip(context.schemas, self._spec.times, strict=True)
        self._times_at = [position(schema, column) for schema, column in pairs]
        self._others_at = [at for at in range(len(context.schemas[1])) if at not in self._keys_at[1]]
        self._rows = [TimelyRows(), TimelyRows()]
        self._waiting = [HeldBackRows(schema) for schema in context.schemas]
        self._newest = NewestRows(context.schemas[1], self._keys_at[1])

    def process(self, batch: pa.RecordBatch) -> Batches:
        number = self.context.input
        rows = self._rows[number]
        rows.advance(self.context.watermark)
        alone = self._without_time(batch) if number == 0 and self._spec.outer else None
        if alone is not None:
            batch = batch.filter(batch.column(self._times_at[0]).is_valid())
        batch, times = rows.take(batch, batch.column(self._times_at[number]))
        if number == 1:
            there = _without_nulls(batch, self._keys_at[1])
            if there is not None:
                batch, times = batch.filter(pa.array(there)), times[there]
        if len(times):
            self._waiting[number].add(batch, times)
        return alone

    def _without_time(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the left rows without a time, with nulls in place of a partner. None: all have one."""
        times = batch.column(self._times_at[0])
        if not times.null_count:
            return None
        left = batch.filter(times.is_null())
        others = self._output.types[len(left.columns) :]
        columns = [*left.columns, *(pa.nulls(len(left), type_) for type_ in others)]
        return pa.RecordBatch.from_arrays(columns, schema=self._output)

    def on_watermark(self) -> Iterator[pa.RecordBatch]:
        watermark = self.context.watermark
        for rows in self._rows:
            rows.advance(watermark)
        for at in [*self._cuts(watermark), watermark]:
            yield from self._join(at)
        if self._spec.tolerance is not None and watermark != NEVER:
            self._newest.forget(watermark - self._spec.tolerance)

    def _cuts(self, watermark: int) -> list[int]:
        """Return the times at which rows are joined, as if the watermark had stood there, so that few rows and little text are
        joined at once."""
        ready = [waiting.times < watermark for waiting in self._waiting]
        every = np.concatenate([waiting.times[which] for waiting, which in zip(self._waiting, ready, strict=True)])
        order = np.argsort(every, kind="stable")
        times = every[order]
        cuts = times[ROWS_MAX::ROWS_MAX]
        if len(times) * max(waiting.longest for waiting in self._waiting) >= TEXT_MAX:
            lengths = [waiting.lengths(which) for waiting, which in zip(self._waiting, ready, strict=True)]
            text = np.cumsum(np.concatenate(lengths)[order]) // TEXT_MAX
            cuts = np.concatenate([cuts, times[1:][np.diff(text) > 0]])
        found: list[int] = np.unique(cuts).tolist()
        return found

    def _join(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Join the left rows below the watermark, and keep the newest right rows."""
        left, left_times = self._waiting[0].take(watermark)
        right, right_times = self._waiting[1].take(watermark)
        order = np.argsort(left_times, kind="stable")
        left, left_times = left.take(pa.array(order)), left_times[order]
        slots = np.full(len(left_times), -1, np.int64)
        there = _without_nulls(left, self._keys_at[0])
        some = left if there is None else left.filter(pa.array(there))
        slots[slice(None) if there is None else there] = self._newest.slots(
            [some.column(at) for at in self._keys_at[0]]
        )
        found = self._newest.partners(slots, left_times, right, right_times)
        if self._spec.tolerance is not None:
            found.places[found.times < left_times - self._spec.tolerance] = -1
        if not self._spec.outer:
            kept = np.flatnonzero(found.places >= 0)
            left, places = left.take(pa.array(kept)), found.places[kept]
        else:
            places = found.places
        for start in range(0, len(places), RESULT_ROWS_MAX):
            some, some_places = left.slice(start, RESULT_ROWS_MAX), places[start : start + RESULT_ROWS_MAX]
            for part in found.parts(some, some_places):
                partners = found.taken(some_places[part])
                mine = some.slice(part.start, part.stop - part.start)
                columns = [*mine.columns, *(partners.column(at) for at in self._others_at)]
                yield pa.RecordBatch.from_arrays(columns, schema=self._output)

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside, (left, right) = self._flux_aside(), self._waiting
        ready = (left.times < watermark) & (left.times >= after)
        asked = [left.columns(ready, self._keys_at[0])]
        asked += [[rows.batch.column(at) for at in self._keys_at[0]] for rows in overlay if rows.input == 0]
        aside._rows = [copy.copy(rows) for rows in self._rows]
        aside._newest = self._newest.part(asked)
        aside._waiting = [left.part(ready), right.part(right.times < watermark)]
        return aside

    def _flux_left_out(self) -> tuple[int, int]:
        behind, without = zip(*(rows.left_out for rows in self._rows), strict=True)
        return sum(behind), sum(without)

    def _flux_times(self, inputs: Sequence[Sequence[str]]) -> tuple[str, ...]:
        return tuple(inputs[0])

    def _flux_looks_at(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> list[int]:
        # All columns of right rows decide between two of one time; left rows keep the order in which they came.
        return [position(schemas[0], column) for column in [*key, self._spec.times[0]]]

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        return {"as of": str(self._spec)}

    def _flux_text(self) -> str:
        return f"as-of join, {self._spec}"

    # ---- on its way

    @property
    def _parts(self) -> list[HeldBackRows | NewestRows]:
        return [*self._waiting, self._newest]

    def snapshot(self) -> dict[str, Any]:
        return self._state([each.snapshot() for each in self._parts])

    def _state(self, parts: list[Any]) -> dict[str, Any]:
        return {"rows": [each.state() for each in self._rows], "parts": parts}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._put(snapshot, [each.restore for each in self._parts])

    def changes(self) -> dict[str, Any] | None:
        parts = [each.changes() for each in self._parts]
        return None if any(part is None for part in parts) else self._state(parts)

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        self._put(changes, [each.apply_changes for each in self._parts])

    def _put(self, state: Mapping[str, Any], puts: Sequence[Any]) -> None:
        for rows, counts in zip(self._rows, state["rows"], strict=True):
            rows.put(counts)
        try:
            for put, part in zip(puts, state["parts"], strict=True):
                put(part)
        except StateMismatchError as error:
            raise SchemaError(f"{type(self).__name__}: {error}; the state is that of another operator") from error

    def state_bytes(self) -> int:
        return self._newest.nbytes + sum(each.nbytes for each in self._waiting)


class Partners(NamedTuple):
    """The right rows of left rows. A row is there once, however many left rows it is the partner of."""

    rows: pa.RecordBatch
    #: Rows that were kept before; they stay here when others replace them.
    kept: RowArena
    #: For each left row, the place of its partner in ``rows``, or behind them its number in ``kept``; -1: it has none.
    places: np.ndarray
    #: The time of the partner.
    times: np.ndarray

    def taken(self, places: np.ndarray) -> pa.RecordBatch:
        """Return the rows of places; nulls for -1."""
        before = places >= len(self.rows)
        near, at = pa.array(places[~before], mask=places[~before] < 0), np.arange(len(places))
        if not before.any():
            return self.rows.take(near)
        at[~before], at[before] = np.arange(len(near)), len(near) + np.arange(len(places) - len(near))
        parts = [self.rows.take(near), self.kept.take(places[before] - len(self.rows))]
        return pa.concat_batches(parts).take(pa.array(at)) if len(near) else parts[1]

    def parts(self, left: pa.RecordBatch, places: np.ndarray) -> Iterator[slice]:
        """Yield parts of left rows that can be given with the rows of these places."""
        ours = lengths_of(left)
        longest = int(np.max(ours)) + max(self.kept.longest, int(np.max(lengths_of(self.rows), initial=0)))
        return text_parts(len(places), longest, lambda: ours + self.lengths(places))

    def lengths(self, places: np.ndarray) -> np.ndarray:
        """Return the bytes of text of the rows of places."""
        found, of_rows = np.zeros(len(places), np.int64), lengths_of(self.rows)
        before, near = places >= len(self.rows), (places >= 0) & (places < len(self.rows))
        found[near] = of_rows[places[near]] if isinstance(of_rows, np.ndarray) else of_rows
        found[before] = self.kept.lengths(places[before] - len(self.rows))
        return found


class NewestRows:
    """The newest right row of each key below the watermark. Arrays are by slot of the key."""

    def __init__(self, schema: pa.Schema, keys_at: Sequence[int]) -> None:
        self._schema, self._keys_at = schema, list(keys_at)
        self._told: int | None = None  # the number of keys at the last call of ``changes``
        self._changed = ChangedSlots()
        self._clear()

    def _clear(self) -> None:
        self._index = KeyIndex([self._schema.field(at) for at in self._keys_at])
        self._numbers, self._times = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._arena = RowArena(self._schema)
        self._live = 0  # keys with a row

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._numbers.nbytes + self._times.nbytes + self._arena.nbytes

    def __len__(self) -> int:
        """Return the number of keys in memory, some perhaps without a row."""
        return len(self._index)

    def slots(self, keys: Sequence[pa.Array]) -> np.ndarray:
        """Return the slots of keys. Keys without a row go when the others move together."""
        if not len(keys[0]):
            return np.zeros(0, np.int64)
        found = self._index.slots(keys)
        self._make_room()
        return found.astype(np.int64)

    def part(self, keys: Sequence[Sequence[pa.Array]]) -> NewestRows:
        """Return copies of the rows of these keys, given by batch."""
        made = NewestRows(self._schema, self._keys_at)
        slots = np.unique(np.concatenate([np.zeros(0, np.int32), *map(self._index.find, keys)]))
        slots = slots[slots >= 0]
        made._index = self._index.only(slots)
        made._make_room()
        made._put(np.arange(len(slots)), self._rows_of(slots))
        return made

    def _make_room(self) -> None:
        known = len(self._numbers)
        if len(self._index) > known:
            room = max(2 * known, len(self._index), 64)
            self._numbers, self._times = grown(self._numbers, room), grown(self._times, room)
            self._numbers[known:], self._times[known:] = -1, NEVER

    def partners(
        self, slots: np.ndarray, times: np.ndarray, right: pa.RecordBatch, right_times: np.ndarray
    ) -> Partners:
        """Find the partners of left rows, which have these slots and times, among the kept rows and further ones, none of which
        is older than a kept row of its key. The newest of these are kept from now on."""
        right_slots = self.slots([right.column(at) for at in self._keys_at])
        rows, lefts = len(right_times), len(times)
        ties = _ties(right, right_slots, right_times)
        all_slots, all_times = np.concatenate([right_slots, slots]), np.concatenate([right_times, times])
        is_left = np.arange(rows + lefts) >= rows
        order = np.lexsort((np.concatenate([ties, np.zeros(lefts, np.int64)]), is_left, all_times, all_slots))
        sorted_slots, sorted_left = all_slots[order], is_left[order]
        last = np.maximum.accumulate(np.where(sorted_left, -1, np.arange(len(order))))
        known = (last >= 0) & (sorted_slots[last] == sorted_slots)
        places, partner_times = np.full(lefts, -1, np.int64), np.full(lefts, NEVER, np.int64)
        new = order[sorted_left & known] - rows  # left rows whose partner is among the further rows
        places[new] = order[last[sorted_left & known]]
        partner_times[new] = right_times[places[new]]
        old = np.flatnonzero((places < 0) & (slots >= 0))
        old = old[self._numbers[slots[old]] >= 0]
        kept = self._arena
        places[old], partner_times[old] = rows + self._numbers[slots[old]], self._times[slots[old]]
        of_right = order[~sorted_left]
        newest = of_right[np.append(right_slots[of_right][1:] != right_slots[of_right][:-1], True)[: len(of_right)]]
        self._keep(right, right_slots, right_times, newest)
        return Partners(right, kept, places, partner_times)

    def _keep(self, right: pa.RecordBatch, slots: np.ndarray, times: np.ndarray, newest: np.ndarray) -> None:
        """Keep these of further rows in place of those of their keys."""
        newest = np.sort(newest)  # by arrival
        if len(newest):
            mine = slots[newest]
            self._live += int(np.count_nonzero(self._numbers[mine] < 0))
            self._numbers[mine], self._times[mine] = len(self._arena) + np.arange(len(newest)), times[newest]
            self._arena.append(right.take(pa.array(newest)))
            self._changed.note(mine.astype(np.int32), len(self._index))
        if len(self._arena) >= KEYS_MIN and 2 * self._live < len(self._arena):
            self._move_rows()
        if len(self) >= KEYS_MIN and 2 * self._live < len(self):
            self._move_keys(np.flatnonzero(self._numbers[: len(self)] >= 0))

    def forget(self, before: int) -> None:
        """Forget rows before a time, if most are."""
        if len(self) >= KEYS_MIN:
            kept = np.flatnonzero((self._numbers[: len(self)] >= 0) & (self._times[: len(self)] >= before))
            if 2 * len(kept) < len(self):
                self._move_keys(kept)

    def _move_rows(self) -> None:
        """Leave out rows of the arena that others have replaced."""
        there = np.flatnonzero(self._numbers >= 0)
        rows = self._arena.table(self._numbers[there])
        self._arena = RowArena(self._schema)
        self._arena.append_table(rows)
        self._numbers[there] = np.arange(len(there))

    def _move_keys(self, kept: np.ndarray) -> None:
        """Give these keys the lowest slots. The next changes are the whole state."""
        state = self._rows_of(kept)
        index = self._index.only(kept.astype(np.int32))
        self._clear()
        self._index = index
        self._make_room()
        self._put(np.arange(len(kept)), state)
        self._told, self._changed = None, ChangedSlots()

    # ---- on its way

    def _rows_of(self, slots: np.ndarray) -> dict[str, Any]:
        """Return the rows of slots that have one, and which do."""
        there = self._numbers[slots] >= 0
        rows = self._arena.table(self._numbers[slots[there]])
        return {"there": there, "times": self._times[slots[there]], "rows": rows}

    def _put(self, slots: np.ndarray, state: Mapping[str, Any]) -> None:
        slots = slots[np.asarray(state["there"], np.bool_)]
        self._live += int(np.count_nonzero(self._numbers[slots] < 0))
        self._numbers[slots], self._times[slots] = len(self._arena) + np.arange(len(slots)), state["times"]
        for batch in state["rows"].to_batches():
            self._arena.append(batch)

    def snapshot(self) -> dict[str, Any]:
        return {"keys": self._index.to_arrow(), **self._rows_of(np.arange(len(self)))}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by a ``snapshot``. Raises StateMismatchError if it has other columns."""
        if snapshot["rows"].schema.types != self._schema.types:
            raise StateMismatchError(f"the snapshot has rows of {snapshot['rows'].schema.types}")
        self._clear()
        for batch in snapshot["keys"].to_batches():
            self.slots(batch.columns)
        self._put(np.arange(len(self)), snapshot)
        self._told, self._changed = None, ChangedSlots()

    def changes(self) -> dict[str, Any] | None:
        """Return new keys, and the rows of keys that changed since the last call. None: there was no call before, or keys have
        moved together."""
        told, slots = self._told, self._changed.take().astype(np.int64)
        self._told = len(self)
        if told is None:
            return None
        new = self._index.keys(np.arange(told, len(self), dtype=np.int32))
        return {"first": told, "keys": new, "slots": slots, **self._rows_of(slots)}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        if changes["first"] != len(self):
            raise StateMismatchError(
                f"changes of a state of {changes['first']} keys cannot be applied to one of {len(self)}"
            )
        self.slots(changes["keys"])
        self._put(np.asarray(changes["slots"]), changes)


def _ties(rows: pa.RecordBatch, slots: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return numbers whose order is that of all columns, for rows that share key and time with another one; 0 for others."""
    ties = np.zeros(len(times), np.int64)
    order = np.lexsort((times, slots))
    same = (slots[order][1:] == slots[order][:-1]) & (times[order][1:] == times[order][:-1])
    if same.any():
        tied = order[np.append(same, False) | np.append(False, same)]
        some = rows.take(pa.array(tied))
        keys = order_keys(some.columns, map(SortColumn, range(some.num_columns)), some.num_rows).column()
        ties[tied] = pc.rank(keys, tiebreaker="dense").to_numpy().astype(np.int64)
    return ties


def _without_nulls(rows: pa.RecordBatch, keys_at: Sequence[int]) -> np.ndarray | None:
    """Tell which rows have no null in their key; None: all."""
    columns = [rows.column(at) for at in keys_at]
    if not any(column.null_count for column in columns):
        return None
    there = np.ones(rows.num_rows, np.bool_)
    for column in columns:
        there &= column.is_valid().to_numpy(zero_copy_only=False)
    return there
