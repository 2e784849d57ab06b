"""Aggregate: the built-in operator for count, sum, min, max and mean per key, with Spark SQL's answers.

    class Delays(flux.Aggregate):
        flights = flux.count()
        delay = flux.mean("arr_delay")

Law: the output depends on the rows and their order alone, neither on how the rows were cut into batches nor on a
snapshot and restore in between. Output columns are the key, then the measures in the order of their
definition.

The state is one ``KeyedState``. Attributes that a subclass sets are state, too (``attributes``), and travel whole with each copy
of the state. Small steps of several partitions are one call (design: together).
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa

from flux.arguments import checked
from flux.errors import SchemaError, UsageError
from flux.marks.canonical import in_canonical_order
from flux.operators.attributes import put_state, state_of
from flux.operators.operator import BARRIER, FORK, PEEK, RESULT_ROWS_MAX, Batches, Context, JointOutput, Operator
from flux.operators.schema import position, positions
from flux.operators.tentative import ReadableOperator, TentativeRows
from flux.operators.windowed_groups import CLOCK_TYPE, TIMER, WindowedGroups, check_time, window_columns, window_type
from flux.windows.window import END_OF_TIME, NEVER, Closing, SessionWindow, Window
from partitioning.accumulators import EXACT_MEAN, EXACT_SUM, Rounded, accumulator
from partitioning.clustering import check_key_type
from partitioning.errors import StateMismatchError
from partitioning.keyed_state import JointUpdate, KeyedState, TypedMeasure


@dataclass(frozen=True, slots=True)
class Measure:
    """One value per key: ``kind`` (count, count_distinct, sum, min, max or mean) of ``column``; None as the column stands for the
    rows."""

    kind: str
    column: str | None = None
    #: A condition in SQL over columns of the input: only rows for which it is true count. None: all do.
    where: str | None = None
    #: Sums of doubles are kept exactly, so that they do not depend on the order of rows.
    exact: bool = False

    def __post_init__(self) -> None:
        if (self.kind, self.column) == ("count", "*"):
            object.__setattr__(self, "column", None)
        wanted = "the name of a column, or nothing" if self.kind == "count" else "the name of a column"
        if not isinstance(self.column, str) and not (self.kind == "count" and self.column is None):
            hint = ""
            if type(self.column).__module__.startswith("pyspark."):
                hint = "; compute it in the DataFrame, as in df.withColumn('total', ...), and name it here"
            raise UsageError(
                f"flux.{self.kind} takes {wanted}, as in flux.{self.kind}('price'); got {self.column!r}{hint}"
            )
        if not isinstance(self.exact, bool):
            raise UsageError(f"flux.{self.kind}: exact must be True or False; got {self.exact!r:.100}")
        if self.where is not None and (not isinstance(self.where, str) or not self.where.strip()):
            raise UsageError(
                f"flux.{self.kind}: where must be a condition as text of SQL, as in where='price > 100'; got {self.where!r}"
            )

    @property
    def reads(self) -> str | None:
        """The column whose values count: with a condition a column that is null in all other rows, and is computed before rows
        travel."""
        return self.column if self.where is None else f"{self.column or '*'} where {self.where}"

    def computed(self) -> str | None:
        """Return that column in SQL; None: the input has it."""
        if self.where is None:
            return None
        value, name = (_quoted(each) for each in (self.column or "", self.reads or ""))
        return f"CASE WHEN ({self.where}\n) THEN {value if self.column else 'true'} END AS {name}"

    def of_type(self, type_: pa.DataType | None) -> TypedMeasure:
        """Return the measure of a column of this type, as states keep it."""
        kind = {"sum": EXACT_SUM, "mean": EXACT_MEAN}[self.kind] if self.exact else self.kind
        return TypedMeasure(kind, self.reads, type_)

    def __str__(self) -> str:
        name, where = (
            f"exact {self.kind}" if self.exact else self.kind,
            "" if self.where is None else f" where {self.where}",
        )
        return f"{name}({self.column or ''}){where}"


def _quoted(name: str) -> str:
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


@checked("flux.count")
def count(column: str | None = None, *, where: str | None = None) -> Measure:
    """Count rows, also written ``count("*")`` as in Spark, or the values of a column that are not null. ``where``: a condition in
    SQL over columns of the input; only rows for which it is true count. It is resolved by Spark."""
    return Measure("count", column, where)


@checked("flux.count_distinct")
def count_distinct(column: str, *, where: str | None = None) -> Measure:
    """Count the distinct values of a column that are not null, exactly. The state has each of them. ``where`` as for
    ``count``."""
    return Measure("count_distinct", column, where)


@checked("flux.sum")
def sum(column: str, *, where: str | None = None, exact: bool = False) -> Measure:
    """Sum integers (to bigint), floats (to double) or decimals; overflow is an error. ``where`` as for ``count``. ``exact``:
    doubles are summed without rounding errors, so that the sum does not depend on the order of rows. It may differ from Spark's
    in the last digit, and takes several times as long and more memory for each group."""
    return Measure("sum", column, where, exact)


@checked("flux.min")
def min(column: str, *, where: str | None = None) -> Measure:
    """Take the least value; NaN is greater than any number, strings compare byte by byte. ``where`` as for ``count``."""
    return Measure("min", column, where)


@checked("flux.max")
def max(column: str, *, where: str | None = None) -> Measure:
    """Take the greatest value; NaN is greater than any number, strings compare byte by byte. ``where`` as for ``count``."""
    return Measure("max", column, where)


@checked("flux.mean")
def mean(column: str, *, where: str | None = None, exact: bool = False) -> Measure:
    """Take the mean as a double; the mean of decimals is a decimal with four more digits. ``where`` as for ``count``, ``exact``
    as for ``sum``."""
    return Measure("mean", column, where, exact)


class Aggregate(ReadableOperator):
    """Base class of aggregates: a subclass lists its measures as class attributes, and inherits the measures of its bases."""

    #: "complete", "update" or, with windows, "append"; None leaves the choice to the decorator.
    output_mode: str | None = None
    restores_in_background = True
    snapshot_classes = ()
    _made_in_open = ("_flux_groups",)
    _measures: dict[str, Measure] = {}
    #: ``changes`` gives nothing if more than this part of the keys has changed: the whole snapshot is not much larger then.
    _told_share = 1 / 2
    _flux_counts_rows = True
    _flux_grouped = True
    #: The groups of the partition. The name is one that no subclass gives to an attribute of its own.
    _flux_groups: KeyedState | WindowedGroups
    #: Attributes that this class sets itself. A subclass's own attributes are state beside the groups.
    _set_here = frozenset(
        ("schema", "_output", "_updates", "_keys_at", "_columns_at", "_flux_groups", "_flux_window", "_measures")
    )

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        inherited: dict[str, Measure] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited.update(base.__dict__.get("_measures", {}))
        own = {name: value for name, value in cls.__dict__.items() if isinstance(value, Measure)}
        for name, value in cls.__dict__.items():
            if any(value is function for function in (count, count_distinct, sum, min, max, mean)):
                called = f"{name} = flux.{value.__name__}({'' if value is count else repr(name)})"
                raise UsageError(
                    f"{cls.__name__}: {name} is the function flux.{value.__name__} itself; call it: {called}"
                )
        for name in own:
            if name.startswith("_") or name == "context" or hasattr(Aggregate, name):
                raise UsageError(f"{cls.__name__}: {name!r} cannot be a measure, Aggregate uses that name; rename it")
        # An inherited measure whose name a subclass gives to something else is no measure any more.
        kept = {name: measure for name, measure in inherited.items() if name not in cls.__dict__}
        cls._measures = kept | own

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> pa.Schema:
        """Return the key fields, then the measures. Raises SchemaError, KeyTypeError or ColumnTypeError for unfit
        columns."""
        name = type(self).__name__
        if not self._measures:
            raise SchemaError(f"{name} has no measure; give it at least one, as in: n = flux.count()")
        if not schemas:
            raise SchemaError(f"{name} has no input")
        window = () if self._flux_window is None else window_columns(self._flux_window)
        clash = sorted({*key, *window} & self._measures.keys())
        if isinstance(self._flux_window, Closing) and window[0] in key:
            raise SchemaError(
                f"{name}: closes={window[0]!r} is a part of each group by itself; leave it out of the key"
            )
        if window and set(window) & set(key):
            raise SchemaError(
                f"{name}: the names {' and '.join(window)} are those of the window; rename the key column"
            )
        if clash and set(clash) <= set(window):
            raise SchemaError(f"{name}: measures {clash} have names of the window's columns; rename them")
        if clash:
            raise SchemaError(f"{name}: measures {clash} have names of key columns; rename them")
        used = [*key, *(m.reads for m in self._measures.values() if m.reads is not None)]
        for number, schema in enumerate(schemas):
            who = name if len(schemas) == 1 else f"{name}, input {number}"
            for column in used:
                type_ = _field(schema, column, who).type
                first = schemas[0].field(position(schemas[0], column)).type
                if type_ != first:
                    raise SchemaError(
                        f"{name}: column {column!r} is {first} in input 0 but {type_} in input {number}; cast one of them"
                    )
        for column in key:
            check_key_type(column, schemas[0].field(position(schemas[0], column)).type)
        measures = [
            pa.field(column, accumulator(*measure).result_type)
            for column, measure in self._typed_measures(schemas[0]).items()
        ]
        time = self._time_type(schemas)
        times = [pa.field(column, time) for column in window]
        return pa.schema([*(_nullable(schemas, column) for column in key), *times, *measures])

    def _time_type(self, schemas: Sequence[pa.Schema]) -> pa.DataType:
        """Return the type of the window's times, which is one in all inputs."""
        name, column = type(self).__name__, None if self._flux_window is None else self._flux_window.column
        if column is None:
            return CLOCK_TYPE
        fields = [check_time(schema, column, name) for schema in schemas]
        for number, field in enumerate(fields):
            if field.type != fields[0].type:
                raise SchemaError(
                    f"{name}: column {column!r} is {fields[0].type} in input 0 but {field.type} in input {number}; cast one of "
                    "them"
                )
        return window_type(fields[0].type)

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        def said(measure: Measure) -> str:
            if measure.reads is None:
                return str(measure)
            return f"{measure} of {schemas[0].field(position(schemas[0], measure.reads or '')).type}"

        window = {} if self._flux_window is None else {"window": str(self._flux_window)}
        return window | {f"measure {name}": said(measure) for name, measure in self._measures.items()}

    def check_case(self, schema: pa.Schema) -> None:
        """Raise SchemaError if a measure spells a column with other capitals. Used in sessions that are case sensitive."""
        used = [measure.reads for measure in self._measures.values()]
        for column in [*used, None if self._flux_window is None else self._flux_window.column]:
            if column is not None and not positions(schema, column, case_sensitive=True):
                raise SchemaError(
                    f"{type(self).__name__}: no column {column!r} (spark.sql.caseSensitive is true); there are "
                    f"{', '.join(schema.names)}"
                )

    def open(self, context: Context) -> None:
        super().open(context)
        self._output = self.output_schema(context.schemas, context.key)
        window = self._flux_window
        modes = ("complete", "update") if window is None else ("append", "complete", "update")
        if context.output_mode not in modes:
            raise UsageError(f"output_mode must be one of {', '.join(modes)}, not {context.output_mode!r}")
        self._updates = context.output_mode == "update"
        measures = self._measures.values()
        self._keys_at = [[position(schema, column) for column in context.key] for schema in context.schemas]
        self._columns_at = [
            [None if m.reads is None else position(schema, m.reads) for m in measures] for schema in context.schemas
        ]
        typed = self._typed_measures(context.schemas[0])
        if window is not None:
            column = window.column
            times_at = [] if column is None else [position(schema, column) for schema in context.schemas]
            self._flux_groups = WindowedGroups(
                window, times_at, self._output, len(context.key), typed, context.output_mode, context._flux_at_marks
            )
        else:
            self._flux_groups = KeyedState([self._output.field(i) for i in range(len(context.key))], typed)

    def process(self, batch: pa.RecordBatch) -> Batches:
        rows = batch.num_rows
        if rows == 0:
            return None
        groups, number = self._flux_groups, self.context.input
        if isinstance(groups, WindowedGroups):
            return groups.add(batch, self.context, self._keys_at[number], self._columns_at[number])
        slots = groups.slots([batch.column(i) for i in self._keys_at[self.context.input]], rows)
        groups.update(slots, self._values(batch))
        touched = groups.touched(slots) if self._updates else slots
        groups.note(touched)
        return [self._results(groups, touched)] if self._updates else None

    @property
    def processes_many(self) -> bool:
        return super().processes_many and self._flux_groups.joins

    def on_watermark(self) -> Batches:
        groups = self._flux_groups
        return groups.advance(self.context.watermark) if isinstance(groups, WindowedGroups) else None

    def on_timer(self, name: str) -> Batches:
        """Close windows of processing time. A subclass with timers of its own hands other names on to this method."""
        groups = self._flux_groups
        if name == TIMER and isinstance(groups, WindowedGroups):
            return groups.tick(self.context)
        return super().on_timer(name)

    @property
    def _flux_timed(self) -> bool:
        if getattr(self.on_timer, "__func__", None) is not Aggregate.on_timer:
            return True
        return self._flux_window is not None and self._flux_window.by_clock

    @classmethod
    def process_many(cls, operators: Sequence[Self], batch: pa.RecordBatch, rows: Sequence[int]) -> JointOutput | None:
        first, number = operators[0], operators[0].context.input
        if isinstance(first._flux_groups, WindowedGroups):
            windows = [cast(WindowedGroups, operator._flux_groups) for operator in operators]
            contexts = [operator.context for operator in operators]
            WindowedGroups.add_each(
                windows, contexts, batch, rows, first._keys_at[number], first._columns_at[number]
            )  # fmt: skip
            return None
        states = [cast(KeyedState, operator._flux_groups) for operator in operators]
        update = JointUpdate(states, rows)
        slots = update.slots([batch.column(i) for i in first._keys_at[number]])
        update.update(slots, first._values(batch))
        if not first._updates:
            update.note(slots)
            return None
        touched = update.touched(slots)
        ends = touched.ends.tolist()
        update.note(touched.slots, ends)
        return JointOutput(pa.RecordBatch.from_arrays(update.results(touched), schema=first._output), ends)

    def _values(self, batch: pa.RecordBatch) -> list[pa.Array | None]:
        """Return the column of each measure; None where it counts rows."""
        return [None if at is None else batch.column(at) for at in self._columns_at[self.context.input]]

    def finish(self) -> Batches:
        groups = self._flux_groups
        if isinstance(groups, WindowedGroups):
            return groups.finish(END_OF_TIME)
        if self._updates:
            return None
        if not self.context.key and self.context.partition == 0:
            groups.make_single()  # as in Spark, the aggregate of no rows is one row
        results = self._all_results(groups)
        if self.context._flux_at_marks:
            keys = len(self.context.key)
            return in_canonical_order(results, keys, keys, RESULT_ROWS_MAX)
        return results

    def _flux_needs_order(self, schemas: Sequence[pa.Schema], output_mode: str) -> str:
        """Return the reason why the output depends on the order of rows: sums of doubles that are rounded row by row, changed
        groups after every step, windows of processing time, or methods of a subclass."""
        if _has_methods(type(self)):
            return f"class {type(self).__name__} has methods of its own, of which it is not known whether the order matters"
        if output_mode == "update":
            return 'output_mode="update" gives groups as often as they change, in the order of the rows'
        if self._flux_window is not None and self._flux_window.by_clock:
            return "windows of processing time take the time of the step, which is another on each replica"
        rounded = [
            name for name, each in self._typed_measures(schemas[0]).items() if isinstance(accumulator(*each), Rounded)
        ]
        if rounded:
            measure = self._measures[rounded[0]]
            return (
                f"{rounded[0]} = {measure} is a sum of doubles that is rounded after each row; exact=True keeps it without "
                f"rounding errors: flux.{measure.kind}({measure.column!r}, exact=True)"
            )
        return ""

    @property
    def _flux_tentative(self) -> str:
        if type(self).peek is Aggregate.peek and _has_methods(type(self)):
            return FORK  # they may keep state of their own
        window, updates = self._flux_window, getattr(self, "_updates", True)
        return PEEK if (updates if window is None else not window.by_clock) else BARRIER

    @property
    def _flux_reach(self) -> int | None:
        return self._flux_window.size if isinstance(self._flux_window, Window) else None

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Self:
        aside, groups = self._flux_aside(), self._flux_groups
        if isinstance(groups, WindowedGroups):
            aside._flux_groups = groups.part(overlay, self._keys_at, watermark, after)
        else:
            aside._flux_groups = groups.part(
                [[rows.batch.column(i) for i in self._keys_at[rows.input]] for rows in overlay]
            )
        return aside

    def _flux_left_out(self) -> tuple[int, int]:
        groups = self._flux_groups
        return (groups.behind_watermark, groups.without_time) if isinstance(groups, WindowedGroups) else (0, 0)

    def output_watermark(self) -> int:
        """Return the watermark of the output. A session is final when the watermark is *above* its end, and its time is that of
        its last instant: one microsecond less."""
        groups = self._flux_groups
        at_marks = self.context._flux_at_marks and isinstance(groups, WindowedGroups)
        watermark = cast(WindowedGroups, groups).mark if at_marks else self.context.watermark
        ends_later = isinstance(self._flux_window, SessionWindow) and NEVER < watermark < END_OF_TIME
        return watermark - 1 if ends_later else watermark

    def needs_from(self) -> int | None:
        """Return the first step that an open window has a row of. Without windows each group has all of its rows."""
        groups = self._flux_groups
        if not isinstance(groups, WindowedGroups):
            return None
        first = groups.needs_from
        return self.context.step + 1 if first is None else first

    def _flux_says_needs(self, output_mode: str) -> bool:
        """Return whether ``needs_from`` may forget steps: windows are all of the state, because methods of a subclass set no
        attributes, and windows end before the input does."""
        kind = type(self)
        if kind.needs_from is not Aggregate.needs_from:
            return True
        return self._flux_window is not None and output_mode != "complete" and not _has_methods(kind)

    def snapshot(self) -> pa.Table | dict[str, Any]:
        """Return one row per key: its columns, then the state of each measure. If a subclass has attributes and defines no
        ``snapshot``, return a dictionary of the rows and the attributes."""
        own = self._own_attributes()
        groups = self._flux_groups.snapshot()
        return groups if own is None else {"groups": groups, "attributes": own}

    def _own_attributes(self) -> Any:
        """Return the attributes of a subclass. None: it has no attributes, or a ``snapshot`` of its own gives its state."""
        return state_of(self, self._set_here) if type(self).snapshot is Aggregate.snapshot else None

    @property
    def _keeps_attributes(self) -> bool:
        return type(self).snapshot is Aggregate.snapshot and _has_methods(type(self))

    def restore(self, snapshot: pa.Table | pa.RecordBatch | dict[str, Any]) -> None:
        if isinstance(snapshot, dict) and "attributes" in snapshot:
            put_state(self, snapshot["attributes"])
            snapshot = snapshot["groups"]
        if isinstance(snapshot, pa.RecordBatch):
            snapshot = pa.Table.from_batches([snapshot])
        try:
            self._flux_groups.restore(snapshot)
        except StateMismatchError as error:
            raise SchemaError(
                f"{type(self).__name__}: {error}; the snapshot was taken from another operator"
            ) from error

    def changes(self) -> dict[str, Any] | None:
        """Return the slots that changed since the last call: for older slots their numbers and the state of each measure, for new
        slots the key too. The state has one row per slot. None: too many slots have changed."""
        changed = self._flux_groups.changes(self._told_share)
        own = None if changed is None else self._own_attributes()
        return changed if changed is None or own is None else changed | {"attributes": own}

    def apply_changes(self, changes: dict[str, Any]) -> None:
        if "attributes" in changes:
            put_state(self, changes["attributes"])
        try:
            self._flux_groups.apply_changes(changes)
        except StateMismatchError as error:
            raise SchemaError(f"{type(self).__name__}: {error}") from error

    def state_bytes(self) -> int:
        """Return the bytes of memory that keys and accumulators hold."""
        return self._flux_groups.nbytes

    def _typed_measures(self, schema: pa.Schema) -> dict[str, TypedMeasure]:
        return {
            name: m.of_type(None if m.reads is None else schema.field(position(schema, m.reads)).type)
            for name, m in self._measures.items()
        }

    def _all_results(self, groups: KeyedState) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(groups), RESULT_ROWS_MAX):
            end = builtins.min(start + RESULT_ROWS_MAX, len(groups))
            yield self._results(groups, np.arange(start, end, dtype=np.int32))

    def _results(self, groups: KeyedState, slots: np.ndarray) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(groups.results(slots), schema=self._output)


class GroupedRows(Aggregate):
    """The aggregate of ``groupBy(...).agg(...)``, whose measures and windows each operator has for itself."""


def grouped_rows(measures: dict[str, Measure], window: Window | SessionWindow | None) -> GroupedRows:
    """Make the operator of resolved groups. A method of the class would count as one of a user's (``columns_read``)."""
    made: GroupedRows = GroupedRows()
    made._measures, made._flux_window = measures, window
    return made


def computed_columns(operator: Operator) -> list[str]:
    """Return the columns that an aggregate reads and its inputs have to be given first, in SQL: those of conditions."""
    if not isinstance(operator, Aggregate):
        return []
    return list(dict.fromkeys(text for each in operator._measures.values() if (text := each.computed()) is not None))


def columns_read(operator: Operator, schema: pa.Schema, key: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the positions of the columns of an input that the operator reads. There is at least one, because rows are counted by
    it (design: columns-read). None: the operator may read all columns, because it is no aggregate or has methods of its own."""
    if not isinstance(operator, Aggregate) or _has_methods(type(operator)):
        return None
    named = [*key, *(measure.reads for measure in operator._measures.values() if measure.reads is not None)]
    window = operator._flux_window
    named += [] if window is None or window.column is None else [window.column]
    read = {position(schema, column) for column in named}
    narrow = (at for at, type_ in enumerate(schema.types) if pa.types.is_primitive(type_))
    return tuple(sorted(read or {next(narrow, 0)})) if len(schema) else None


def takes_any_input(kind: type) -> bool:
    """Tell whether objects of a class are aggregates that treat rows of all inputs alike: they have no methods of their own."""
    return issubclass(kind, Aggregate) and not _has_methods(kind)


def _has_methods(kind: type[Aggregate]) -> bool:
    """Return whether a class, or a base on the way to Aggregate, defines more than measures and settings."""
    below = kind.__mro__[: kind.__mro__.index(Aggregate)]
    own = [value for each in below for value in vars(each).values()]
    return any(callable(value) or isinstance(value, property | classmethod) for value in own)


def _field(schema: pa.Schema, column: str, who: str) -> pa.Field:
    found = positions(schema, column)
    if len(found) != 1:
        problem = f"{len(found)} columns called" if found else "no column"
        raise SchemaError(f"{who}: {problem} {column!r}; there are {', '.join(schema.names)}")
    return schema.field(found[0])


def _nullable(schemas: Sequence[pa.Schema], column: str) -> pa.Field:
    """Return the key field of the output, with the user's spelling of its name; it is nullable if it is so in any input."""
    fields = [schema.field(position(schema, column)) for schema in schemas]
    return pa.field(column, fields[0].type, any(field.nullable for field in fields), fields[0].metadata)
