"""Operators, the work of a stage on its rows: the contract between the exchange and the user's code.

One operator instance lives per partition (and, with replicas, per replica of a partition). The exchange calls it from
one thread only, in this order: ``open`` once, perhaps ``restore`` and then ``apply_changes``, then ``process`` for every slice
of rows of that partition and ``on_timer`` for every due timer, ``finish`` when every input has ended, ``close``
once. An operator must be deterministic: the same batches in the same order give the same output, because a second replica or a
repaired one repeats the steps of another. Take time, timers and randomness from the context, never from the clock.

``Timers`` are the timers of a partition; ``Chained`` is an operator made of two.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from flux.errors import SchemaError, UsageError, UserCodeError
from flux.operators.attributes import check_transient, empty_containers, open_operator, put_state, state_of
from flux.operators.batches import conform, given_batches
from flux.operators.user_code import gives_nothing
from flux.windows.window import END_OF_TIME, NEVER, SessionWindow, Window

if TYPE_CHECKING:
    from flux.operators.tentative import TentativeRows

#: Ways to tentative results (``tentative_kind``): the state is read, a copy of the operator goes on, or there are none.
PEEK, FORK, BARRIER = "peek", "fork", "barrier"
#: Rows per batch of results: enough to be cheap per row, few enough to let other messages in between.
RESULT_ROWS_MAX = 65_536
#: The most timers of one partition. An operator that needs more has a timer per key, which belongs in its state.
TIMERS_MAX = 1024


def seconds_at(at: Any, what: str) -> float:
    """Return a time that a user gave, in seconds since the epoch. UsageError, in the name of ``what``: it is no finite number."""
    try:
        seconds = float(at)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UsageError(f"{what}: expected a time in seconds since the epoch, got {at!r:.100}")
    return seconds


class Timers:
    """The timers that the operator of one partition has set: part of the replica's state (design: timers).

    Law: the set of timers follows from the applied steps and nothing else, so it is the same on every replica at the same step.
    Each name has one timer. Timers are few: an operator with a deadline per key keeps the deadlines in its own state, as columns,
    and sets one timer for the earliest.

    Left to others: deciding when a timer is due for all replicas (``flux.replica.step_queue``), waking up in time
    (``flux.worker.core``)."""

    def __init__(self) -> None:
        #: By name, the time in seconds since the epoch.
        self.pending: dict[str, float] = {}
        #: The earliest of these times, infinite if there is none.
        self.next = math.inf

    def set(self, at: float, name: str) -> None:
        self._set(seconds_at(at, "set_timer"), name, "set_timer")

    def _set(self, at: float, name: str, what: str) -> None:
        if not isinstance(name, str):
            raise UsageError(f"{what}: the name of a timer must be a string, got {name!r}")
        if name not in self.pending and len(self.pending) >= TIMERS_MAX:
            raise UsageError(
                f"{what}: {TIMERS_MAX} timers are set, no more are taken; keep deadlines of keys in the operator's "
                "state and set one timer for the earliest"
            )
        self.pending[name] = at
        self._note_next()

    def cancel(self, name: str) -> None:
        self.pending.pop(name, None)
        self._note_next()

    def due(self, now: float) -> list[str]:
        """Return the names of the due timers, the earliest first."""
        return [name for at, name in sorted((at, name) for name, at in self.pending.items() if at <= now)]

    def take(self, name: str, now: float) -> bool:
        """Take off a timer that fires now. False: it is no longer due, because a timer that has just fired cancelled it or put it
        off."""
        if self.pending.get(name, math.inf) > now:
            return False
        self.cancel(name)
        return True

    def replace(self, pending: dict[str, float]) -> None:
        self.pending = dict(pending)
        self._note_next()

    def _note_next(self) -> None:
        self.next = min(self.pending.values(), default=math.inf)


class EventTimers(Timers):
    """The timers of event time that the operator of one partition has set, by name, in microseconds since the epoch. Law and
    limits are those of ``Timers``."""

    def __init__(self) -> None:
        super().__init__()
        self.next: float = END_OF_TIME

    def set(self, at: float, name: str) -> None:
        if isinstance(at, bool) or not isinstance(at, int | np.integer):
            raise UsageError(f"set_event_timer: expected a time in whole microseconds since the epoch, got {at!r}")
        # Before the first watermark, "the watermark less a minute" is below all numbers of 64 bits.
        self._set(max(NEVER + 1, min(int(at), END_OF_TIME)), name, "set_event_timer")

    def _note_next(self) -> None:
        self.next = min(self.pending.values(), default=END_OF_TIME)


Batches = Iterable[pa.RecordBatch] | None


class JointOutput(NamedTuple):
    """Output of several partitions, one behind the other: rows ``ends[k - 1]`` to ``ends[k]``, exclusive, are of partition k."""

    batch: pa.RecordBatch
    ends: list[int]


@dataclass
class Context:
    """An operator's knowledge of its place and its step. Mutable fields change with every step.

    stage          name of the stage
    partition      0 <= partition < partitions
    key            names of the key columns, empty for a stage without a key
    schemas        schema of each input, in the order in which the inputs were given
    output_mode    "complete": results once, when the input has ended; "update": changed results after every step
    input          index into ``schemas`` of the batch being processed
    now            time of the current step in seconds since the epoch, the same on every replica; never goes back; 0
                   before the first step
    created        time at which the oldest row of the current step entered the query, in seconds since the epoch
    step           number of the current step, counted from 0
    timers         the pending timers, by name: ``timers.pending``
    watermarks     watermark of each input in microseconds since the epoch: no row with a time below it comes any more, unless its
                   source was idle. ``flux.NEVER`` before the first; ``flux.END_OF_TIME`` when the input has ended
    event_timers   the pending timers of event time, by name: ``event_timers.pending``
    """

    stage: str
    partition: int = 0
    partitions: int = 1
    key: tuple[str, ...] = ()
    schemas: tuple[pa.Schema, ...] = ()
    output_mode: str = "complete"
    input: int = 0
    now: float = 0.0
    created: float = 0.0
    step: int = 0
    timers: Timers = field(default_factory=Timers, repr=False, compare=False)
    watermarks: list[int] = field(default_factory=list)
    event_timers: EventTimers = field(default_factory=EventTimers, repr=False, compare=False)
    #: The method that the step calls, for messages: a watermark fires timers first, and the end moves the watermark first.
    _flux_method: str = field(default="", init=False, repr=False, compare=False)
    #: Results come at marks, in canonical order: other copies apply the same rows in another order (design: independent).
    _flux_at_marks: bool = field(default=False, init=False, repr=False, compare=False)

    def aside(self) -> Context:
        """Return a context with the same values, whose changes leave this one as it is."""
        made = replace(self, timers=Timers(), event_timers=EventTimers(), watermarks=list(self.watermarks))
        made.timers.replace(self.timers.pending)
        made.event_timers.replace(self.event_timers.pending)
        made._flux_at_marks = self._flux_at_marks
        return made

    @property
    def watermark(self) -> int:
        """The least watermark of all inputs."""
        return min(self.watermarks, default=NEVER)

    def set_event_timer(self, at: int, name: str = "") -> None:
        """Have ``on_event_timer(name)`` called when the watermark has reached ``at``, in microseconds since the epoch; replaces
        an earlier timer of event time of this name. Such timers are few, each with a name, like those of ``set_timer``, and are
        kept with the state of the partition. At the end of the input all of them fire."""
        self.event_timers.set(at, name)

    def cancel_event_timer(self, name: str = "") -> None:
        """Remove a timer of event time, if one of this name is set."""
        self.event_timers.cancel(name)

    def set_timer(self, at: float, name: str = "") -> None:
        """Have ``on_timer(name)`` called when the time ``at`` has come, in seconds since the epoch; replaces an earlier timer
        of this name. A time that has passed means as soon as possible.

        Timers are few, each with a name: an operator that has a deadline per key keeps the deadlines in its own state and sets
        one timer for the earliest. Timers are kept with the state of the partition: a replica that takes over fires them."""
        self.timers.set(at, name)

    def cancel_timer(self, name: str = "") -> None:
        """Remove a timer, if one of this name is set."""
        self.timers.cancel(name)

    @property
    def random(self) -> np.random.Generator:
        """Return a generator seeded by stage, partition and step: replicas draw the same numbers."""
        return np.random.default_rng([*self.stage.encode(), self.partition, self.step])


class Operator:
    """Base class of stateful stages. Override the methods that the stage needs; all but ``process`` have a harmless default."""

    #: Schema of the output: DDL string, pyarrow schema or pyspark StructType. None: the stage is a sink.
    schema: Any = None
    #: True: ``restore`` and ``apply_changes`` may be called from another thread than the one that calls the rest, after ``open``
    #: and before anything else, so that a large state does not hold up other partitions of its worker.
    restores_in_background: bool = False
    #: Classes whose objects a snapshot, or changes, may hold beside plain data (numbers, strings, collections, dates, decimals,
    #: numpy, pyarrow). None: any. The reader of a copied state calls the classes that it names, so fewer are safer. The classes
    #: may be defined in a notebook.
    snapshot_classes: tuple[type, ...] | None = None
    #: Names of attributes that are no state, where the class defines neither ``snapshot`` nor ``restore``: ``open`` makes them at
    #: each worker. They must not refer to the values of other attributes from the time of ``open``: a state that comes later
    #: replaces those values.
    transient: tuple[str, ...] = ()
    #: The windows of event time by which the operator groups rows; None: it groups by none, as an operator of a user.
    _flux_window: Window | SessionWindow | None = None
    #: Set before ``open`` is called.
    context: Context
    #: Names of attributes that ``open`` of a base class makes: a subclass must call that ``open``.
    _made_in_open: tuple[str, ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError if the class is called with inputs as if it were a stage, but is not decorated."""
        if any(_is_input(given) for given in args):
            raise UsageError(
                f"{cls.__name__} is no stage of a flow yet: decorate the class with @flux.stage, or @flux.stage(key=...), and "
                "call that with its input"
            )
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        return super().__new__(cls)

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        check_transient(cls)
        cls._flux_empty = empty_containers(cls)
        listed = cls.__dict__.get("snapshot_classes")
        if listed is not None and not (isinstance(listed, tuple) and all(isinstance(kind, type) for kind in listed)):
            raise UsageError(
                f"{cls.__name__}.snapshot_classes must be a tuple of classes, as in (Sketch,), not {listed!r}"
            )
        version = cls.__dict__.get("state_version")
        if not (version is None or isinstance(version, int | str)):
            raise UsageError(
                f"{cls.__name__}.state_version must be a number or a text, as in 1 or '2026-11', not {version!r}"
            )
        if "snapshot" in cls.__dict__ and "snapshot_classes" not in cls.__dict__:
            cls.snapshot_classes = None  # the snapshot differs from that of the built-in operator it derives from
        own = cls.__dict__.keys() & {"changes", "apply_changes"}
        if not own and cls.__dict__.keys() & {
            "snapshot",
            "restore",
        }:  # the inherited changes belong to another state
            cls.changes, cls.apply_changes = Operator.changes, Operator.apply_changes  # type: ignore[method-assign]
        gives, takes = cls.changes is not Operator.changes, cls.apply_changes is not Operator.apply_changes
        if gives != takes:
            has, lacks = ("changes", "apply_changes") if gives else ("apply_changes", "changes")
            raise UsageError(
                f"{cls.__name__} defines {has}() and not {lacks}(): define both, so that what changes() gives can be applied to "
                "an earlier snapshot, or neither, so that whole snapshots travel"
            )

    #: Version of the meaning and form of the state, a number or a text. A start on a checkpoint location is refused if the state
    #: there has another version. None: not checked. Change it when new code cannot go on with state of the code before.
    state_version: int | str | None = None

    #: Whether each row has to be a row of its own: a flow that gives a row for each change of a group is refused in front.
    _flux_counts_rows = False
    #: Whether each row that it gives is a change of an earlier one.
    _flux_gives_changes = False
    #: Whether rows that it is given as changes of earlier ones leave it as such.
    _flux_passes_changes = False
    #: Whether it gives rows by the watermark of all inputs, so that it never would without one.
    _flux_waits = False
    #: Whether all rows are one group where the stage has no key, so that they belong into one partition.
    _flux_grouped = False
    #: ``on_watermark`` is called also where the watermark of an input has moved and the least of all has not.
    _flux_each_watermark = False
    #: The stage whose call made the operator, as in ``Sessions(gap=30)``; None if no stage did.
    _flux_stage: Any = None
    #: The attributes at the end of ``open`` (``attributes.Opened``).
    _flux_opened: Any = None
    #: Names of containers in the body of the class that were empty when the class was made.
    _flux_empty: tuple[str, ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        """Add a stage whose operators are made with the arguments of this one: ``Sessions(gap=30)(clicks)``."""
        if self._flux_stage is None:
            raise UsageError(
                f"{type(self).__name__} is no stage of a flow: decorate the class with @flux.stage and call that, as in "
                f"{type(self).__name__}(...)(input)"
            )
        from flux.dataflow.flow import Flow, node  # it imports this module

        return Flow(self._flux_stage, [node(given) for given in inputs])

    def open(self, context: Context) -> None:
        """Prepare for rows. Called once, before any row. Keep the context: it has input, time and randomness of each step."""
        object.__setattr__(self, "context", context)  # also where the class is frozen

    def process(self, batch: pa.RecordBatch) -> Batches:
        """Apply rows of this partition, in their stream's order; return or yield zero or more output batches.

        The batch may be a view into a larger one: copy the rows that the operator keeps."""
        raise NotImplementedError(f"{type(self).__name__} must define process(self, batch)")

    @property
    def processes_many(self) -> bool:
        """Whether ``process_many`` serves this operator. Asked once, after ``open``; the same for all operators of a stage.

        By default True if the class defines ``process_many``. A subclass that defines only ``process`` does not have it."""
        kind = type(self)
        return kind._defines("process_many") is not Operator and issubclass(
            kind._defines("process_many"), kind._defines("process")
        )

    @classmethod
    def process_many(
        cls, operators: Sequence[Self], batch: pa.RecordBatch, rows: Sequence[int]
    ) -> JointOutput | list[Batches] | None:
        """Do the ``process`` of several partitions in one call, because a small batch touches most partitions and costs little
        more than the call.

        The operators belong to partitions of one stage, each with the ``context`` of its own step, and all rows are of the same
        input. ``batch`` has the rows of all: ``rows[k]`` rows, at least one, for operator k, one operator behind the other.
        Returns the output of all as one batch, or as a list of that which ``process`` returns, by operator; None: there is none.
        A JointOutput stands for one batch of each operator that has rows in it. Law: state and output of each operator are those
        of its ``process`` with its own rows, in the same batches. Raises FailedPartition to name the partition whose rows do not
        fit; any other error is told of the first partition. Few rows are applied like this, about a thousand for each partition
        at most."""
        raise NotImplementedError(f"{cls.__name__} does not define process_many")

    @property
    def _keeps_attributes(self) -> bool:
        """Whether the values of attributes are the state, or part of it."""
        return type(self).snapshot is Operator.snapshot

    @classmethod
    def _defines(cls, method: str) -> type:
        """Return the class whose definition of a method is in use."""
        return next(kind for kind in cls.__mro__ if method in vars(kind))

    def on_timer(self, name: str) -> Batches:
        """Handle a due timer: return or yield zero or more output batches. The timer is no longer set; set it again to be
        called again.

        The call comes in a step of its own, the same on every replica, with ``context.now`` at or after the timer's time. Timers
        that are due at the same step are called one after the other, earliest first. An operator that sets timers in advance sees
        no row at or after their time before they have fired: a due timer goes before the rows that wait. A timer that
        ``on_timer`` itself sets for a time that has passed lets waiting rows go first. Timers that are not due when the input
        has ended are dropped, as in Flink: ``finish`` takes care of their work."""
        raise NotImplementedError(f"{type(self).__name__} sets a timer and must define on_timer(self, name)")

    def on_event_timer(self, name: str) -> Batches:
        """Handle a timer of event time that the watermark has reached: return or yield zero or more output batches.

        The call comes in the step that moved the watermark, the same on every replica: after the rows of the step, the earliest
        timer first, and before ``on_watermark``."""
        raise NotImplementedError(
            f"{type(self).__name__} sets a timer of event time and must define on_event_timer(self, name)"
        )

    def on_watermark(self) -> Batches:
        """Handle a new ``context.watermark``: return or yield the output that is final by it. Called in the step that moved it,
        after the rows of the step; at the end of the input the watermark is ``flux.END_OF_TIME``, and ``finish`` follows."""
        return None

    def output_watermark(self) -> int:
        """Return a time, in microseconds since the epoch, below which no later row of the output will be: by default the
        watermark of the input. An operator that keeps rows back, and gives them later with their own times, must return less.
        Asked after each step that has moved the watermark. A time above ``context.watermark`` counts as that, and one below the
        last answer as the last."""
        return self.context.watermark

    def finish(self) -> Batches:
        """Return or yield the last output batches. Called once, when every input has ended; no timer fires after it."""
        return None

    def snapshot(self) -> Any:
        """Return the whole state, as bytes, pyarrow data or anything picklable. None: no state. The result may refer to the state
        itself: bytes are made of it before the next batch is processed, perhaps in another thread.

        By default the state is the values of all attributes but the context and those named in ``transient``. Define ``snapshot``
        for a form that is smaller or quicker to make, and ``restore`` with it."""
        return state_of(self)

    def restore(self, snapshot: Any) -> None:
        """Replace the state by that of an earlier ``snapshot``; called after ``open`` on a fresh instance."""
        put_state(self, snapshot)

    def changes(self) -> Any:
        """Return the changes since the last call of ``changes``, in any form that a snapshot may have: for states that are
        large and change little. None: the changes are unknown, or too much to be worth it; then the whole snapshot travels.
        Called between two steps, with or without a call of ``snapshot`` beside it, only where checkpoints are kept (standbys, a
        checkpoint location). The result of the first call is not used, because there was no call before it: mark changes from
        then on, for ever.

        Law, for any steps a, b, c in this order: an operator that restores the snapshot taken at ``a``, where ``changes`` was
        called too, and applies the changes of ``b`` and of ``c``, has the state of ``c``. Define ``apply_changes`` with
        ``changes``, or neither of them. A subclass with a ``snapshot`` or ``restore`` of its own needs its own ``changes`` too;
        else whole snapshots travel."""
        return None

    def apply_changes(self, changes: Any) -> None:
        """Bring the state from one call of ``changes`` to the next one, which returned ``changes``. Called after ``restore``, for
        each of the changes in turn, and before any row."""
        raise NotImplementedError(
            f"{type(self).__name__} defines changes() and must define apply_changes(self, changes)"
        )

    def needs_from(self) -> int | None:
        """Return the first step (``context.step``) whose rows still matter for later output; ``context.step + 1``: none
        yet. None: all of them. Asked between two steps; never goes back. Makes ``recovery="upstream"`` possible.

        Law, for any r that was returned when the steps below s were applied: an operator that begins empty, without ``restore``,
        at step r gives from step s on the same output as this operator. Timers that were set before r are set then too."""
        return None

    @property
    def _flux_timed(self) -> bool:
        """Whether the operator may set timers, because it defines ``on_timer``."""
        return getattr(self.on_timer, "__func__", None) is not Operator.on_timer

    def _flux_says_needs(self, output_mode: str) -> bool:
        """Return whether the class defines ``needs_from``."""
        return type(self).needs_from is not Operator.needs_from

    def peek(self, watermark: int, overlay: Sequence[TentativeRows] = (), after: int = NEVER) -> list[pa.RecordBatch]:
        """Return the output that the rows of ``overlay``, and then this watermark of all inputs, would give beyond the output of
        the applied steps, in its order, and change nothing: neither state, nor context, nor timers. Called between two steps.

        ``after``: an earlier tentative watermark. Left out is the output that it gives, and that of the rows through it. Only
        operators whose state can be read so define it; of others a shadow has a copy (design: peek, fork)."""
        raise NotImplementedError(f"{type(self).__name__} cannot be read for tentative results")

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Operator:
        """Return an operator with the part of the state that decides on the output of a ``peek``, and with a context of its own.
        Changes of it leave this operator as it is."""
        raise NotImplementedError(f"{type(self).__name__} cannot be read in part")

    @property
    def _flux_tentative(self) -> str:
        """The way to tentative results: ``PEEK``, ``FORK`` or ``BARRIER``, see ``tentative_kind``."""
        return FORK if type(self).peek is Operator.peek else PEEK

    def _flux_needs_order(self, schemas: Sequence[pa.Schema], output_mode: str) -> str:
        """Return the reason why the output depends on the order of rows, or comes otherwise than at watermarks, for an error;
        empty: the operator commutes, and may work in independent replicas (design: independent)."""
        return "its state may depend on the order of rows"

    @property
    def _flux_reach(self) -> int | None:
        """Microseconds of event time behind its own for which a row has a part in output. None: there is no known limit."""
        return None

    def state_bytes(self) -> int:
        """Return about how large the state is; asked for once a second, so it must be cheap. 0: not known, then the size of the
        last copy is taken. Load balance weighs the size, nothing else depends on it."""
        return 0

    def close(self) -> None:
        """Release resources. Called once, at the end of the operator's life, also after an error."""

    @property
    def _flux_event_timed(self) -> str:
        """The method that the class defines for timers of event time; empty: none."""
        return "" if type(self).on_event_timer is Operator.on_event_timer else "on_event_timer"

    def _flux_left_out(self) -> tuple[int, int]:
        """Return the rows that were left out: those below the watermark of their step, and those without a time."""
        return 0, 0

    def _flux_times(self, inputs: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
        """Return the columns of the output that have the event time of its rows; empty: they have none. ``inputs``: those of each
        input. None: the stage tells."""
        return None

    def _flux_looks_at(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> list[int] | None:
        """Return the columns of the first input that the operator looks at, by position; the others are given on as they come, at
        the beginning of its output, and may be left out. None: it looks at all of them, or gives others."""
        return None

    def _flux_narrowed(self, make: Callable[[], Operator], names: Sequence[str]) -> Callable[[], Operator]:
        """Return a function that makes the operator, as ``make`` does, for a first input with these columns alone."""
        return make

    def _flux_text(self) -> str | None:
        """Return the work of the operator in words, for people. None: its class and its arguments are known to them."""
        return None

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        """Return the meaning of named parts of the state, for the check of a checkpoint location."""
        return {}

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        """Return the schema of the output for the schemas of the inputs. Called at planning time, before ``open``. None: a
        sink."""
        return self.schema


def move_watermarks(operator: Operator, context: Context, watermarks: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Set the watermarks of the inputs, and yield the output: of timers of event time that are due, then of ``on_watermark``.

    A timer may set others: these fire now, too, if they are later than the timers before them and the watermark has reached them.
    At the end of time they are dropped, because a timer that always sets the next one would have no last one."""
    before, each_before, context.watermarks = context.watermark, context.watermarks, list(watermarks)
    now, timers = context.watermark, context.event_timers
    if now == before and not (operator._flux_each_watermark and each_before != context.watermarks):
        return
    fired, context._flux_method = NEVER, "on_event_timer"
    while names := [name for name in timers.due(now) if timers.pending[name] > fired]:
        fired = max(int(timers.pending[name]) for name in names)
        for name in names:
            if timers.take(name, now):
                yield from given_batches(operator.on_event_timer(name))
        if now == END_OF_TIME:
            timers.replace({})
    context._flux_method = "on_watermark"
    yield from given_batches(operator.on_watermark())


def last_output(operator: Operator, context: Context) -> Iterator[pa.RecordBatch]:
    """Yield the output at the end of all inputs: the watermark is at the end of time, then comes ``finish``."""
    yield from move_watermarks(operator, context, [END_OF_TIME] * max(len(context.schemas), 1))
    context._flux_method = "finish"
    yield from given_batches(operator.finish())


def gives_changes(operator: Operator) -> bool:
    """Return whether an operator defines ``changes`` and ``apply_changes``."""
    return type(operator).changes is not Operator.changes


def _is_input(given: Any) -> bool:
    from flux.dataflow.flow import is_input  # it imports this module

    return is_input(given)


def never_gives(operator: Operator) -> bool:
    """Return whether it is certain that no method of an operator gives rows."""
    kind = type(operator)
    methods = (kind.process, kind.on_timer, kind.on_event_timer, kind.on_watermark, kind.finish)
    known = (Operator.process, Operator.on_timer, Operator.on_event_timer, Operator.on_watermark)
    return all(any(method is none for none in known) or gives_nothing(method) for method in methods)


def says_needs(operator: Operator, output_mode: str) -> bool:
    """Return whether ``needs_from`` of an operator of a stage with this output mode may forget steps."""
    return operator._flux_says_needs(output_mode)


class Chained(Operator):
    """An operator made of two in one stage: the output of the first goes to the second in the same step (design: chained).

    ``first`` is the user's operator. ``then`` belongs to Flux: it sets no timers, gives nothing at the end, and its state is
    small enough to travel whole with all changes of the first. ``schema`` is that of the output of ``first``.

    A stage behind another costs an exchange, with replicas and an order of its own. If the second operator needs neither other
    keys nor other partitions, it works in the steps of the first."""

    def __init__(self, first: Operator, then: Operator, schema: pa.Schema) -> None:
        self.first, self.then = first, then
        self._given = schema
        self.restores_in_background = first.restores_in_background
        self._flux_each_watermark = first._flux_each_watermark
        ours, theirs = then.snapshot_classes, first.snapshot_classes
        self.snapshot_classes = None if ours is None or theirs is None else theirs + ours

    def open(self, context: Context) -> None:
        super().open(context)
        open_operator(self.first, context)
        open_operator(self.then, context)

    def process(self, batch: pa.RecordBatch) -> Batches:
        return self.through(self.first.process(batch))

    def on_timer(self, name: str) -> Batches:
        return self.through(self.first.on_timer(name))

    def on_event_timer(self, name: str) -> Batches:
        return self.through(self.first.on_event_timer(name))

    def on_watermark(self) -> Batches:
        return self.through(self.first.on_watermark())

    def output_watermark(self) -> int:
        return self.first.output_watermark()

    def finish(self) -> Batches:
        return self.through(self.first.finish())

    def peek(self, watermark: int, overlay: Sequence[TentativeRows] = (), after: int = NEVER) -> list[pa.RecordBatch]:
        aside = copy.copy(self)
        aside.then = self.then._flux_part(watermark, (), after)
        return list(aside.through(self.first.peek(watermark, overlay, after)))

    @property
    def _flux_tentative(self) -> str:
        kinds = {self.first._flux_tentative, self.then._flux_tentative}
        return BARRIER if BARRIER in kinds else FORK if FORK in kinds else PEEK

    def through(self, output: Batches) -> Iterator[pa.RecordBatch]:
        """Yield the output of the second operator for an output of the first."""
        for batch in given_batches(output):
            try:
                checked = conform(batch, self._given, f"output of stage {self.context.stage}")
            except SchemaError as error:  # no row is at fault
                where = f"stage {self.context.stage}, partition {self.context.partition}"
                raise UserCodeError(f"{where}: {error}") from None
            yield from given_batches(self.then.process(checked))

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        return self.then.output_schema((self._given,), ())

    def snapshot(self) -> Any:
        return {"first": self.first.snapshot(), "then": self.then.snapshot()}

    def restore(self, snapshot: Any) -> None:
        if snapshot["first"] is not None:
            self.first.restore(snapshot["first"])
        self.then.restore(snapshot["then"])

    def state_bytes(self) -> int:
        known = self.first.state_bytes()
        return known and known + self.then.state_bytes()

    def close(self) -> None:
        try:
            self.first.close()
        finally:
            self.then.close()


class ChainedWithChanges(Chained):
    """A chained operator whose first operator tells the changes of its state."""

    def changes(self) -> Any:
        changed = self.first.changes()
        return None if changed is None else {"first": changed, "then": self.then.snapshot()}

    def apply_changes(self, changes: Any) -> None:
        self.first.apply_changes(changes["first"])
        self.then.restore(changes["then"])


@dataclass(frozen=True)
class Chain:
    """Factory of the operators of a stage that has two in one."""

    first: Callable[[], Operator]
    then: Callable[[], Operator]
    schema: pa.Schema

    def __call__(self) -> Operator:
        first = self.first()
        kind = ChainedWithChanges if gives_changes(first) else Chained
        return kind(first, self.then(), self.schema)


def chain_of(operator: Operator) -> list[Operator]:
    """Return the operators that work in one stage, in order."""
    return [operator.first, operator.then] if isinstance(operator, Chained) else [operator]


class OperatorFacts(NamedTuple):
    """Facts about the operator of a stage that its classes decide, found once when it is opened."""

    #: The operator, or the first one of a chain.
    first: Operator
    #: It defines ``changes`` and ``apply_changes``.
    gives_changes: bool
    #: Several partitions of its stage may go through one call of ``process_many``.
    goes_together: bool
    #: It may set timers.
    timed: bool


def facts_of(operator: Operator) -> OperatorFacts:
    first = chain_of(operator)[0]
    return OperatorFacts(first, gives_changes(operator), first.processes_many, operator._flux_timed)


def note_of_output(operator: Operator) -> Any:
    """Return the note of a stage's last operator on the whole output until now, for a sink behind it; None if it has none."""
    tell = getattr(chain_of(operator)[-1], "note_of_output", None)
    return None if tell is None else tell()
