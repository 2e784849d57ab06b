"""KeyedOperator: state per key in plain Python, without a thought of batches (design: keyed-operator).

    @flux.stage(key="user", schema="user STRING, clicks BIGINT", replicas=2)
    class Visits(flux.KeyedOperator):
        state_schema = "clicks BIGINT, since TIMESTAMP"

        def on_rows(self, key, rows, state):
            state.clicks = (state.clicks or 0) + len(rows)
            state.timer = self.context.now + 30  # seconds: thirty seconds after the last click

        def on_key_timer(self, key, state):
            yield *key, state.clicks
            state.clear()

The exchange gives batches and takes batches. In between, rows become named tuples and are grouped by key, each key's method gets
its rows and its state, and the results become one batch. State travels as one Arrow row per key, and changes as the rows of the
keys that were touched.

Law: state and output depend on the steps alone. Keys have slots in the order of their first rows; those of keys without state are
free until more than half are, and then all keys move together, at the end of a step.
"""

from __future__ import annotations

import heapq
import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from flux.errors import SchemaError, SnapshotError, UsageError
from flux.operators.operator import Batches, Context, Operator
from flux.operators.schema import parse_ddl, position
from flux.operators.user_code import text_of
from flux.windows.durations import microseconds
from partitioning.key_index import KeyIndex

#: Names of a state that are no fields of the user's.
RESERVED = ("clear", "exists", "timer", "event_timer")
#: Below this number of keys they do not move together.
KEYS_MIN = 1024
#: Names of the timers of the partition, one for each clock, and of that for the time to live.
TIMER, EXPIRY = "keys", "time to live"
#: The part of the time to live between two looks for expired keys.
LOOKS = 4


class KeyState:
    """The state of one key: its fields by name, all of them None for a new key.

    ``timer``: the time at which ``on_key_timer`` is called, in seconds since the epoch, or None. ``event_timer``: the same by the
    watermark, in microseconds, for ``on_key_event_timer``. ``exists``: the key had state before this call."""

    __slots__ = ("_gone", "event_timer", "exists", "timer")

    def __init__(self) -> None:
        self.timer: float | None = None
        self.event_timer: int | None = None
        self.exists = False
        self._gone = False
        for name in self._fields:
            setattr(self, name, None)

    #: The fields of the user's, in the order of the schema.
    _fields: ClassVar[tuple[str, ...]] = ()

    def clear(self) -> None:
        """Forget the key at the end of this call, with its timers."""
        self._gone = True


class KeyedOperator(Operator):
    """Base class of operators with a method per key. A subclass gives ``state_schema`` and ``on_rows`` or ``on_row``."""

    #: Schema of the state of a key: DDL string or pyarrow schema. None: keys have no fields, only timers.
    state_schema: Any = None
    #: A key is forgotten this long after its last rows or timer, by the clock of the query ("1 hour"). None: never.
    time_to_live: str | None = None
    snapshot_classes = ()
    restores_in_background = True

    # ---- the user's methods

    def on_rows(self, key: tuple[Any, ...], rows: list[Any], state: Any) -> Any:
        """Handle the rows of one key in one step: named tuples, in their order, at least one. Return or yield results: dicts, or
        tuples in the order of the schema. By default ``on_row`` is called for each."""
        for row in rows:
            yield from _listed(self.on_row(key, row, state))

    def on_row(self, key: tuple[Any, ...], row: Any, state: Any) -> Any:
        """Handle one row of a key, as ``on_rows``."""
        raise NotImplementedError(f"{type(self).__name__} must define on_rows(self, key, rows, state) or on_row")

    def on_key_timer(self, key: tuple[Any, ...], state: Any) -> Any:
        """Handle the timer of a key, which is due and is set no more; as ``on_rows``."""
        raise NotImplementedError(f"{type(self).__name__} sets a timer and must define on_key_timer(self, key, state)")

    def on_key_event_timer(self, key: tuple[Any, ...], state: Any) -> Any:
        """Handle the timer of event time of a key, which the watermark has reached; as ``on_rows``."""
        raise NotImplementedError(
            f"{type(self).__name__} sets a timer of event time and must define on_key_event_timer(self, key, state)"
        )

    # ---- the exchange's side

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        name = type(self).__name__
        if not key:
            raise SchemaError(f"{name} has a state per key: name the key, as in @flux.stage(key='user')")
        self._state_fields()
        if not (self.schema is None or isinstance(self.schema, str | pa.Schema)):
            raise SchemaError(
                f"{name}: its schema must be a DDL string or a pyarrow schema, not {type(self.schema).__name__}"
            )
        if self.time_to_live is not None and microseconds(self.time_to_live, f"{name}.time_to_live") <= 0:
            raise UsageError(f"{name}.time_to_live must be above zero, got {self.time_to_live!r}")
        for number, schema in enumerate(schemas):
            for column in key:
                type_, first = (each.field(position(each, column)).type for each in (schema, schemas[0]))
                if type_ != first:
                    raise SchemaError(
                        f"{name}: key {column!r} is {first} in input 0 but {type_} in input {number}; cast one"
                    )
        return self.schema

    def _state_fields(self) -> pa.Schema:
        given = self.state_schema
        schema = pa.schema([]) if given is None else parse_ddl(given) if isinstance(given, str) else given
        name = type(self).__name__
        if not isinstance(schema, pa.Schema):
            raise SchemaError(f"{name}.state_schema must be a DDL string or a pyarrow schema, not {given!r:.100}")
        for field in schema:
            if field.name in RESERVED or not field.name.isidentifier() or field.name.startswith("_"):
                raise SchemaError(f"{name}: {field.name!r} cannot be a field of the state; give it another name")
        return schema

    def open(self, context: Context) -> None:
        super().open(context)
        self._fields = self._state_fields()
        names = tuple(self._fields.names)
        self._kind = type("State", (KeyState,), {"__slots__": names, "_fields": names})
        self._rows_of: list[Any] = [namedtuple("Row", schema.names, rename=True) for schema in context.schemas]
        self._keys_at = [[position(schema, column) for column in context.key] for schema in context.schemas]
        first = context.schemas[0]
        self._key_fields = [first.field(position(first, column)) for column in context.key]
        self._ttl_s = math.inf
        if self.time_to_live is not None:
            self._ttl_s = microseconds(self.time_to_live, "time_to_live") / 1e6
        self._touched: set[int] | None = None  # since the last call of ``changes``
        self._forget_all()

    def _forget_all(self) -> None:
        self._index = KeyIndex(self._key_fields)
        self._keys: list[tuple[Any, ...]] = []
        self._states: list[KeyState | None] = []  # by slot
        self._expiry: list[float] = []
        self._live = 0
        self._told = 0
        self._due: list[tuple[float, int]] = []  # timers by time and slot; outdated ones stay for a while
        self._event_due: list[tuple[int, int]] = []
        self._noted = True  # timers and the number of keys with state are those of the states

    def process(self, batch: pa.RecordBatch) -> Batches:
        if not batch.num_rows:
            return None
        if not self._noted:
            self._note_loaded()
        number = self.context.input
        slots = self._index.slots([batch.column(i) for i in self._keys_at[number]])
        self._add_keys()
        order = np.argsort(slots, kind="stable")
        rows = list(
            map(self._rows_of[number]._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))
        )
        ordered = slots[order]
        begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        ends = [*begins[1:].tolist(), len(ordered)]
        groups = sorted(zip(order[begins].tolist(), ordered[begins].tolist(), begins.tolist(), ends, strict=True))
        places = order.tolist()
        out: list[Any] = []
        for _, slot, begin, end in groups:  # the key with the first row comes first
            self._call(slot, self.on_rows, out, [rows[place] for place in places[begin:end]])
        return self._given(out)

    def _add_keys(self) -> None:
        """Give new keys their places."""
        known, now = len(self._keys), len(self._index)
        if now > known:
            columns = [column.to_pylist() for column in self._index.keys(np.arange(known, now, dtype=np.int32))]
            self._keys += zip(*columns, strict=True)
            self._states += [None] * (now - known)
            self._expiry += [math.inf] * (now - known)

    def _call(self, slot: int, method: Any, out: list[Any], *rows: list[Any]) -> None:
        """Call a method with the key and state of a slot, and note the timers that it has set."""
        state = self._states[slot]
        if state is None or self._expiry[slot] <= self.context.now:
            self._live += state is None
            state = self._states[slot] = self._kind()
        before = state.timer, state.event_timer
        out += _listed(method(self._keys[slot], *rows, state))
        if self._touched is not None:
            self._touched.add(slot)
        if state._gone:
            self._states[slot] = None
            self._live -= 1
            return
        state.exists = True
        if self._ttl_s < math.inf:
            self._expiry[slot] = self.context.now + self._ttl_s
            if EXPIRY not in self.context.timers.pending:
                self.context.set_timer(self.context.now + self._ttl_s / LOOKS, EXPIRY)
        if (state.timer, state.event_timer) != before:
            self._note_timers(slot, state)

    def _note_timers(self, slot: int, state: KeyState) -> None:
        if state.timer is not None:
            heapq.heappush(self._due, (float(state.timer), slot))
        if state.event_timer is not None:
            if isinstance(state.event_timer, bool) or not isinstance(state.event_timer, int):
                raise UsageError(
                    f"event_timer must be a time in whole microseconds since the epoch, got {state.event_timer!r}"
                )
            heapq.heappush(self._event_due, (state.event_timer, slot))
        self._set_timers()

    def _set_timers(self) -> None:
        """Have the partition called at the earliest timers of its keys."""
        if self._due:
            self.context.set_timer(self._due[0][0], TIMER)
        if self._event_due:
            self.context.set_event_timer(self._event_due[0][0], TIMER)

    def on_timer(self, name: str) -> Batches:
        out: list[Any] = []
        if not self._noted:
            self._note_loaded()
        if name == EXPIRY:
            self._expire()
        else:
            for slot in self._take(self._due, self.context.now, "timer"):
                self._call(slot, self.on_key_timer, out)
            self._set_timers()
        return self._given(out)

    def on_event_timer(self, name: str) -> Batches:
        out: list[Any] = []
        if not self._noted:
            self._note_loaded()
        for slot in self._take(self._event_due, self.context.watermark, "event_timer"):
            self._call(slot, self.on_key_event_timer, out)
        self._set_timers()
        return self._given(out)

    def _take(self, due: list[Any], now: float, which: str) -> list[int]:
        """Take the timers that are due off their keys, and return the slots, the earliest first."""
        slots = []
        while due and due[0][0] <= now:
            at, slot = heapq.heappop(due)
            state = self._states[slot]
            if state is not None and getattr(state, which) == at and self._expiry[slot] > self.context.now:
                setattr(state, which, None)
                slots.append(slot)
        return slots

    def _expire(self) -> None:
        """Forget the keys whose time to live is over, and look again later if there are others."""
        expiry = np.array(self._expiry)
        for slot in np.flatnonzero(expiry <= self.context.now).tolist():
            if self._states[slot] is not None:
                self._states[slot] = None
                self._live -= 1
                if self._touched is not None:
                    self._touched.add(slot)
            self._expiry[slot] = math.inf
        if self._live:
            self.context.set_timer(self.context.now + self._ttl_s / LOOKS, EXPIRY)

    def _given(self, out: list[Any]) -> Batches:
        """Return the results of a step as a batch."""
        if len(self._keys) >= KEYS_MIN and 2 * self._live < len(self._keys):
            self._move_together()
        elif max(len(self._due), len(self._event_due)) > 2 * self._live + KEYS_MIN:
            self._note_loaded()  # most timers there are outdated
        if not out:
            return None
        schema = self._output
        try:
            columns = list(zip(*[_values(result, schema.names) for result in out], strict=True))
            if len(columns) != len(schema):
                raise ValueError(f"a result has {len(columns)} values")
            arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(
                f"{type(self).__name__}: results must be dicts or tuples of ({', '.join(schema.names)}), such as "
                f"{text_of(out[0], repr):.200}: {error}"
            ) from error
        return [pa.RecordBatch.from_arrays(arrays, schema=schema)]

    @property
    def _output(self) -> pa.Schema:
        declared = self.schema
        if declared is None:
            raise SchemaError(
                f"{type(self).__name__} gives rows and declares no schema; give schema=... to the decorator"
            )
        if isinstance(declared, str):
            declared = self.schema = parse_ddl(declared)
        return declared

    def _move_together(self) -> None:
        """Give the keys with state the lowest slots, in their order. The next changes are the whole state."""
        kept = [slot for slot, state in enumerate(self._states) if state is not None]
        keys = pa.Table.from_arrays(self._index.keys(np.array(kept, np.int32)), schema=pa.schema(self._key_fields))
        states, expiry = [self._states[slot] for slot in kept], [self._expiry[slot] for slot in kept]
        self._forget_all()
        self._load(keys, states, expiry)
        self._note_loaded()
        self._touched = None

    def _load(self, keys: pa.Table, states: list[KeyState | None], expiry: list[float]) -> None:
        self._index = KeyIndex.from_arrow(keys)
        self._add_keys()
        self._states, self._expiry = states, expiry
        self._noted = False

    def _note_loaded(self) -> None:
        """Derive the number of keys with state, and the timers, from the states."""
        self._noted = True
        there = [(slot, state) for slot, state in enumerate(self._states) if state is not None]
        self._live = len(there)
        self._due = [(state.timer, slot) for slot, state in there if state.timer is not None]
        self._event_due = [(state.event_timer, slot) for slot, state in there if state.event_timer is not None]
        heapq.heapify(self._due)
        heapq.heapify(self._event_due)

    # ---- on its way

    def snapshot(self) -> dict[str, pa.Table]:
        """Return the keys by slot, and one row per slot of state: fields, timers, the end of the time to live."""
        return {"keys": self._index.to_arrow(), "states": self._rows(range(len(self._states)))}

    def restore(self, snapshot: Any) -> None:
        self._forget_all()
        states, expiry = self._states_of(snapshot["states"])
        self._load(snapshot["keys"], states, expiry)
        self._touched = None

    def changes(self) -> dict[str, Any] | None:
        """Return the states of the keys that were touched since the last call, and the keys that are new. None: there was no call
        before, or the keys have moved together."""
        touched, told = self._touched, self._told
        self._touched, self._told = set(), len(self._keys)
        if touched is None:
            return None
        slots = sorted(touched)
        keys = self._index.keys(np.arange(told, len(self._keys), dtype=np.int32))
        return {"first": told, "keys": keys, "slots": np.array(slots, np.int64), "states": self._rows(slots)}

    def apply_changes(self, changes: Any) -> None:
        if changes["first"] != len(self._keys):
            raise SchemaError(
                f"{type(self).__name__}: changes of a state of {changes['first']} keys cannot be applied to one of "
                f"{len(self._keys)}"
            )
        if len(changes["keys"][0]):
            self._index.slots(changes["keys"])
            self._add_keys()
        states, expiry = self._states_of(changes["states"])
        for slot, state, ends in zip(changes["slots"].tolist(), states, expiry, strict=True):
            self._states[slot], self._expiry[slot] = state, ends
        self._noted = False

    def state_bytes(self) -> int:
        """Return a rough size: that of the keys, and 100 bytes for each field."""
        return self._index.nbytes + self._live * 100 * (2 + len(self._fields))

    def _rows(self, slots: Iterable[int]) -> pa.Table:
        states = [(self._states[slot], self._expiry[slot]) for slot in slots]
        columns: dict[str, pa.Array] = {
            "exists": pa.array([state is not None for state, _ in states], pa.bool_()),
            "timer": pa.array([None if state is None else state.timer for state, _ in states], pa.float64()),
            "event timer": pa.array([None if state is None else state.event_timer for state, _ in states], pa.int64()),
            "expiry": pa.array([ends for _, ends in states], pa.float64()),
        }
        for field in self._fields:
            values = [None if state is None else getattr(state, field.name) for state, _ in states]
            try:
                columns[f"state.{field.name}"] = pa.array(values, field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise SnapshotError(
                    f"{type(self).__name__}: field {field.name!r} of the state is declared as {field.type}, and a value does "
                    f"not fit: {error}"
                ) from error
        return pa.table(columns)

    def _states_of(self, rows: pa.Table) -> tuple[list[KeyState | None], list[float]]:
        expected = ["exists", "timer", "event timer", "expiry", *(f"state.{name}" for name in self._fields.names)]
        if rows.schema.names != expected:
            raise SchemaError(
                f"{type(self).__name__}: the snapshot has columns {rows.schema.names}, expected {expected}: it was taken "
                "from another operator"
            )
        names = self._fields.names
        exists, timers, event_timers, expiry, *fields = (column.to_pylist() for column in rows.columns)
        states: list[KeyState | None] = []
        for slot, there in enumerate(exists):
            if not there:
                states.append(None)
                continue
            state = self._kind()
            state.exists, state.timer, state.event_timer = True, timers[slot], event_timers[slot]
            for name, values in zip(names, fields, strict=True):
                setattr(state, name, values[slot])
            states.append(state)
        return states, expiry


def _listed(given: Any) -> Iterable[Any]:
    """Return results as they were returned or yielded: none, one dict or tuple, or several."""
    if given is None:
        return ()
    return (given,) if isinstance(given, dict | tuple) else given


def _values(result: Any, names: list[str]) -> tuple[Any, ...]:
    """Return the values of a result in the order of the columns; a dict may leave some out. ValueError: it has other columns."""
    if isinstance(result, tuple):
        return result
    if not isinstance(result, dict) or not result.keys() <= set(names):
        raise ValueError(f"{text_of(result, repr):.200} has other columns")
    return tuple(map(result.get, names))
