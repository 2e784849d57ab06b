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
keys that were touched. Attributes of a subclass are state, too (``attributes``), and travel whole with each copy.

Law: state and output depend on the steps alone, and not on copies in between. Keys have slots in the order of their first rows;
those of keys without state are free until more than half are, and then all keys move together, at the end of a step. At the end
of each step, values have the types and the precision that a copy would give them: a method that is given 1 on one replica and
1.0 on another may give other output.
"""

from __future__ import annotations

import heapq
import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from flux.errors import SchemaError, SnapshotError, UsageError
from flux.operators.attributes import put_state, state_of
from flux.operators.operator import Batches, Context, Operator, seconds_at
from flux.operators.schema import parse_ddl, position
from flux.operators.user_code import text_of
from flux.windows.durations import microseconds
from flux.windows.window import END_OF_TIME
from partitioning.key_index import KeyIndex

#: Names of a state that are no fields of the user's.
RESERVED = ("clear", "exists", "timer", "event_timer")
#: Below this number of keys they do not move together.
KEYS_MIN = 1024
#: Names of the timers of the partition, one for each clock, and of that for the time to live.
TIMER, EXPIRY = "keys", "time to live"
#: The part of the time to live between two looks for expired keys.
LOOKS = 4
#: Classes of values of which a copy makes an equal one, by the declared type. Values of other classes and types are converted.
SAME_IN_COPIES: dict[pa.DataType, type] = {
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.int64()), int),
    pa.bool_(): bool,
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): bytes,
}


#: Types of times that numpy makes dates of, and the first and the last microsecond that Python has a date for.
TIMES = (pa.timestamp("us"), pa.timestamp("us", "UTC"))
DATES = (-62_135_596_800_000_000, 253_402_300_799_999_999)


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
    #: Attributes that this class sets itself. A subclass's own attributes are state beside that of the keys.
    _set_here = frozenset(
        (
            "schema", "_fields", "_plain_fields", "_kind", "_rows_of", "_keys_at", "_key_fields", "_ttl_s", "_index",
            "_keys", "_states", "_expiry", "_live", "_told", "_due", "_event_due", "_noted", "_touched", "_called",
        )
    )  # fmt: skip

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        own = {name for name in vars(cls) if name.startswith("_") and not name.startswith(("__", "_flux"))}
        cls._check_names(own & (vars(KeyedOperator).keys() | KeyedOperator._set_here))

    @classmethod
    def _check_names(cls, taken: AbstractSet[str]) -> None:
        if taken:
            raise UsageError(
                f"{cls.__name__}: {', '.join(sorted(taken))} cannot be a name of its own, KeyedOperator uses it; rename it"
            )

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
        self._check_names((self._set_here - {"schema"}) & vars(self).keys())
        super().open(context)
        self._fields = self._state_fields()
        self._plain_fields = [field for field in self._fields if not pa.types.is_nested(field.type)]
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
        self._called: list[int] = []  # slots whose methods were called in this step
        self._forget_all()

    @property
    def _keeps_attributes(self) -> bool:
        return type(self).snapshot is KeyedOperator.snapshot

    @property
    def _flux_timed(self) -> bool:
        kind = type(self)
        own = kind.on_timer is not KeyedOperator.on_timer or kind.on_key_timer is not KeyedOperator.on_key_timer
        return own or self.time_to_live is not None

    @property
    def _flux_event_timed(self) -> str:
        kind = type(self)
        names = ("on_event_timer", "on_key_event_timer")
        return next((name for name in names if getattr(kind, name) is not getattr(KeyedOperator, name)), "")

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
        make = partial(tuple.__new__, self._rows_of[number])  # as its _make does, without a frame for each row
        rows = list(map(make, zip(*map(_listed_column, batch.columns), strict=True)))
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
        timer, event_timer = state.timer, state.event_timer
        given = method(self._keys[slot], *rows, state)
        if type(given) is tuple:
            out.append(given)
        elif given is not None:
            out += _listed(given)
        self._called.append(slot)
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
        if state.timer != timer or state.event_timer != event_timer:
            self._note_timers(slot, state)

    def _note_timers(self, slot: int, state: KeyState) -> None:
        if state.timer is not None:
            state.timer = seconds_at(state.timer, "timer")
            if type(self).on_key_timer is KeyedOperator.on_key_timer:
                self.on_key_timer(self._keys[slot], state)  # raises: the timer would fire in vain, perhaps hours later
            heapq.heappush(self._due, (state.timer, slot))
        if state.event_timer is not None:
            state.event_timer = _microseconds(state.event_timer)
            if type(self).on_key_event_timer is KeyedOperator.on_key_event_timer:
                self.on_key_event_timer(self._keys[slot], state)
            heapq.heappush(self._event_due, (state.event_timer, slot))
        self._set_timers()

    def _set_timers(self) -> None:
        """Have the partition called at the earliest timers of its keys.

        Outdated timers are taken off first: a copy of the state has none of them, and would set another time."""
        context = self.context
        if self._earliest(self._due, "timer"):
            context.set_timer(self._due[0][0], TIMER)
        else:
            context.cancel_timer(TIMER)
        if self._earliest(self._event_due, "event_timer"):
            context.set_event_timer(self._event_due[0][0], TIMER)
        else:
            context.cancel_event_timer(TIMER)

    def _earliest(self, due: list[Any], which: str) -> bool:
        """Take off the outdated timers in front of the earliest one that is set. False: none is set."""
        while due:
            at, slot = due[0]
            if self._is_set(at, slot, which):
                return True
            heapq.heappop(due)
        return False

    def _is_set(self, at: float, slot: int, which: str) -> bool:
        state = self._states[slot]
        return state is not None and getattr(state, which) == at

    def on_timer(self, name: str) -> Batches:
        out: list[Any] = []
        if not self._noted:
            self._note_loaded()
        if name == EXPIRY:
            self._expire()
        else:
            self.context._flux_method = "on_key_timer"
            for slot in self._take_due():
                self._call(slot, self.on_key_timer, out)
            self._set_timers()
        return self._given(out)

    def _take_due(self) -> list[int]:
        """Take the timers that are due off their keys, and return the slots, the earliest first."""
        slots, due, now = [], self._due, self.context.now
        while due and due[0][0] <= now:
            at, slot = heapq.heappop(due)
            if self._is_set(at, slot, "timer") and self._take_off(slot, "timer"):
                slots.append(slot)
        return slots

    def _take_off(self, slot: int, which: str) -> bool:
        """Take a timer off its key, and tell whether the key is to be called. A key whose time to live is over is not called; it
        is noted as changed, because a copy would set the timer again."""
        setattr(self._states[slot], which, None)
        if self._touched is not None:
            self._touched.add(slot)
        return self._expiry[slot] > self.context.now

    def on_event_timer(self, name: str) -> Batches:
        """Call the keys whose timers the watermark has reached, the earliest first.

        A timer that a key sets then is called now, too, if the watermark has reached it and it is later than the one before.
        Others wait for the next watermark, or there might be no last one; at the end of time all others do."""
        out: list[Any] = []
        if not self._noted:
            self._note_loaded()
        self.context._flux_method = "on_key_event_timer"
        due, now = self._event_due, self.context.watermark
        fired: dict[int, int] = {}  # by slot, the time of its last timer
        waiting: list[tuple[int, int]] = []
        while due and due[0][0] <= now:
            at, slot = heapq.heappop(due)
            if not self._is_set(at, slot, "event_timer"):
                continue
            if slot in fired and (at <= fired[slot] or now == END_OF_TIME):
                waiting.append((at, slot))
                continue
            fired[slot] = at
            if self._take_off(slot, "event_timer"):
                self._call(slot, self.on_key_event_timer, out)
        for each in waiting:
            heapq.heappush(due, each)
        self._set_timers()
        return self._given(out)

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
        self._settle()
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

    def _settle(self) -> None:
        """Give the values of this step the form that they have in a copy. SnapshotError: one does not fit its declared type.

        Values inside of lists, structs and maps stay as they are, because they may be many."""
        states = [state for slot in dict.fromkeys(self._called) if (state := self._states[slot]) is not None]
        self._called.clear()
        for field in self._plain_fields if states else ():
            values = list(map(attrgetter(field.name), states))
            classes, same = set(map(type, values)) - {type(None)}, SAME_IN_COPIES.get(field.type)
            as_in_copies = same is not None and classes <= {same}
            if not classes or (as_in_copies and same in (bool, float)):
                continue
            column = self._column(field, values)
            if not as_in_copies:
                self._give(states, field, values, column.to_pylist())

    def _give(self, states: list[KeyState], field: pa.Field, values: list[Any], copied: list[Any]) -> None:
        for state, value, copy in zip(states, values, copied, strict=True):
            if pa.types.is_integer(field.type) and copy != value:  # Arrow leaves out the rest of 0.5
                raise self._misfit(field, repr(value))
            setattr(state, field.name, copy)

    def _column(self, field: pa.Field, values: list[Any]) -> pa.Array:
        try:
            return pa.array(values, field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise self._misfit(field, error) from error

    def _misfit(self, field: pa.Field, why: object) -> SnapshotError:
        return SnapshotError(
            f"{type(self).__name__}: field {field.name!r} of the state is declared as {field.type}, and a value does not fit: "
            f"{why}"
        )

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
        keys = self._index.table(np.array(kept, np.int32))
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

    def snapshot(self) -> dict[str, Any]:
        """Return the keys by slot, and one row per slot of state: fields, timers, the end of the time to live. If a subclass has
        attributes and defines no ``snapshot``, these are in it, too."""
        own = self._own_attributes()
        found = {"keys": self._index.to_arrow(), "states": self._rows(range(len(self._states)))}
        return found if own is None else found | {"attributes": own}

    def _own_attributes(self) -> Any:
        """Return the attributes of a subclass. None: it has no attributes, or a ``snapshot`` of its own gives its state."""
        return state_of(self, self._set_here) if self._keeps_attributes else None

    def restore(self, snapshot: Any) -> None:
        put_state(self, snapshot.get("attributes"))
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
        found = {"first": told, "keys": keys, "slots": np.array(slots, np.int64), "states": self._rows(slots)}
        own = self._own_attributes()
        return found if own is None else found | {"attributes": own}

    def apply_changes(self, changes: Any) -> None:
        if changes["first"] != len(self._keys):
            raise SchemaError(
                f"{type(self).__name__}: changes of a state of {changes['first']} keys cannot be applied to one of "
                f"{len(self._keys)}"
            )
        put_state(self, changes.get("attributes"))
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
            columns[f"state.{field.name}"] = self._column(field, values)
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


def _microseconds(at: Any) -> int:
    """Return a time of event time; one behind the end of time, such as the last watermark and a little more, is the end."""
    if isinstance(at, bool) or not isinstance(at, int | np.integer):
        raise UsageError(f"event_timer must be a time in whole microseconds since the epoch, got {at!r:.100}")
    return max(-END_OF_TIME, min(int(at), END_OF_TIME))


def _listed(given: Any) -> Iterable[Any]:
    """Return results as they were returned or yielded: none, one dict or tuple, or several."""
    if given is None:
        return ()
    return (given,) if isinstance(given, (dict, tuple)) else given


def _listed_column(column: pa.Array) -> list[Any]:
    """Return the values of a column as ``to_pylist`` does, numbers and times several times as fast."""
    if column.type in TIMES and len(column) and not column.null_count:
        at = column.view(pa.int64()).to_numpy()
        if DATES[0] <= at.min() and at.max() <= DATES[1]:
            zone = column[0].as_py().tzinfo
            times: list[Any] = at.view("datetime64[us]").tolist()
            return times if zone is None else [each.replace(tzinfo=zone) for each in times]
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_float64(column.type)):
        values: list[Any] = column.to_pylist()
        return values
    return list(column.to_numpy().tolist())


def _values(result: Any, names: list[str]) -> tuple[Any, ...]:
    """Return the values of a result in the order of the columns; a dict may leave some out. ValueError: it has other columns."""
    if isinstance(result, tuple):
        return result
    if not isinstance(result, dict) or not result.keys() <= set(names):
        raise ValueError(f"{text_of(result, repr):.200} has other columns")
    return tuple(map(result.get, names))
