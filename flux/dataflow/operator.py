"""What a stage does with its rows: the contract between the exchange and the user's code.

One operator instance lives per partition (and, with replicas, per copy of a partition). The exchange calls it from
one thread only, in this order: ``open`` once, perhaps ``restore`` and then ``apply_changes``, then ``process`` for every slice
of rows of that partition and ``on_timer`` for every timer whose time has come, ``finish`` when every input has ended, ``close``
once. It must be deterministic: the same batches in the same order give the same output, because a replica or a repaired copy
repeats what another one did. Take time, timers and randomness from the context, never from the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from flux.dataflow.attributes import check_transient, empty_containers, put_state, state_of
from flux.dataflow.given import gives_nothing
from flux.dataflow.timers import Timers
from flux.errors import UsageError

Batches = Iterable[pa.RecordBatch] | None


@dataclass
class Context:
    """What an operator may know about where it runs. Mutable fields change with every step.

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
    timers         those that are set, by name: ``timers.pending``
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

    def set_timer(self, at: float, name: str = "") -> None:
        """Have ``on_timer(name)`` called when the time ``at`` has come, in seconds since the epoch; replaces an earlier timer
        of this name. A time that has passed means as soon as possible.

        Timers are few, each with a name: an operator that has a deadline per key keeps those in its own state and sets one
        timer for the earliest. They are kept with the state of the partition: a copy that takes over fires them."""
        self.timers.set(at, name)

    def cancel_timer(self, name: str = "") -> None:
        """Nothing happens where no such timer is set."""
        self.timers.cancel(name)

    @property
    def random(self) -> np.random.Generator:
        """A generator seeded by stage, partition and step: replicas draw the same numbers."""
        return np.random.default_rng([*self.stage.encode(), self.partition, self.step])


class Operator:
    """Base class of stateful stages. Override what is needed; every method has a harmless default but ``process``."""

    #: Schema of the output: DDL string, pyarrow schema or pyspark StructType. None: the stage is a sink.
    schema: Any = None
    #: True: ``restore`` and ``apply_changes`` may be called from another thread than the one that calls the rest, after ``open``
    #: and before anything else, so that a large state does not hold up other partitions of its worker.
    restores_in_background: bool = False
    #: Classes whose objects a snapshot, or changes, may hold beside plain data (numbers, strings, collections, dates, decimals,
    #: numpy, pyarrow). None: any. Whoever reads a copy of state calls what it names, so fewer is safer. They may be of
    #: a notebook.
    snapshot_classes: tuple[type, ...] | None = None
    #: Names of attributes that are no state, where the class defines neither ``snapshot`` nor ``restore``: ``open`` makes them at
    #: each worker. They must not keep what other attributes held when ``open`` ran: those are replaced when a state comes.
    transient: tuple[str, ...] = ()
    #: Set before ``open`` is called.
    context: Context
    #: Names of attributes that ``open`` of a base class makes, which a subclass has to call.
    _made_in_open: tuple[str, ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """UsageError: the class is called as a stage, and is none."""
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
            cls.snapshot_classes = None  # another snapshot than that of a built-in operator that it derives from
        own = cls.__dict__.keys() & {"changes", "apply_changes"}
        if not own and cls.__dict__.keys() & {
            "snapshot",
            "restore",
        }:  # the inherited changes are not those of this state
            cls.changes, cls.apply_changes = Operator.changes, Operator.apply_changes  # type: ignore[method-assign]
        gives, takes = cls.changes is not Operator.changes, cls.apply_changes is not Operator.apply_changes
        if gives != takes:
            has, lacks = ("changes", "apply_changes") if gives else ("apply_changes", "changes")
            raise UsageError(
                f"{cls.__name__} defines {has}() and not {lacks}(): define both, so that what changes() gives can be applied to "
                "an earlier snapshot, or neither, so that whole snapshots travel"
            )

    #: Version of the meaning and form of the state, a number or a text. A start on a checkpoint location is refused if the state
    #: has another one. None: not checked. Change it when new code cannot go on with state of the code before.
    state_version: int | str | None = None

    #: The stage that it was made by when it was made by calling one, as in ``Sessions(gap=30)``.
    _flux_stage: Any = None
    #: Its attributes when it had been opened (``attributes``).
    _flux_opened: Any = None
    #: Names of containers that the class was made with and that were empty.
    _flux_empty: tuple[str, ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        """Add a stage to a flow, whose operators are made with the arguments of this one: ``Sessions(gap=30)(clicks)``."""
        if self._flux_stage is None:
            raise UsageError(
                f"{type(self).__name__} is no stage of a flow: decorate the class with @flux.stage and call that, as in "
                f"{type(self).__name__}(...)(input)"
            )
        from flux.dataflow.api import Flow, node  # it imports this module

        return Flow(self._flux_stage, [node(given) for given in inputs])

    def open(self, context: Context) -> None:
        """Called once, before any row. Keep the context: it tells input, time and randomness of each step."""
        object.__setattr__(self, "context", context)  # also where the class is frozen

    def process(self, batch: pa.RecordBatch) -> Batches:
        """Apply rows of this partition, in their stream's order; return or yield zero or more output batches.

        The batch may be a view into a larger one: copy what is kept."""
        raise NotImplementedError(f"{type(self).__name__} must define process(self, batch)")

    def on_timer(self, name: str) -> Batches:
        """A timer's time has come: return or yield zero or more output batches. It is no longer set; set it again to be
        called again.

        Comes in a step of its own, the same on every replica, with ``context.now`` at or after the timer's time. Timers
        that are due at the same step are called one after the other, earliest first. Whoever sets timers in advance sees no
        row at or after their time before they have fired: a timer that is due goes before the rows that wait. One set by
        ``on_timer`` itself for a time that has passed lets rows that wait go first. Timers that are not due when the input
        has ended are dropped, as in Flink: ``finish`` sees to what is left."""
        raise NotImplementedError(f"{type(self).__name__} sets a timer and must define on_timer(self, name)")

    def finish(self) -> Batches:
        """Called once, when every input has ended; return or yield the last output batches. No timer fires after it."""
        return None

    def snapshot(self) -> Any:
        """The whole state, as bytes, pyarrow data or anything picklable. None: no state. It may refer to the state itself:
        bytes are made of it before the next batch is processed, perhaps in another thread.

        By default the values of all attributes but the context and those named in ``transient``. Define it for a form that is
        smaller or quicker to make, and ``restore`` with it."""
        return state_of(self)

    def restore(self, snapshot: Any) -> None:
        """Replace the state by that of an earlier ``snapshot``; called after ``open`` on a fresh instance."""
        put_state(self, snapshot)

    def changes(self) -> Any:
        """What has changed since the last call of ``changes``, in any form that a snapshot may have: for states that are large
        and change little. None: not known, or too much to be worth it; then the whole snapshot travels. Called between two
        steps, with or without a call of ``snapshot`` beside it, only where checkpoints are kept (standbys, a checkpoint
        location). What the first call gives is not used, because there was none before: mark changes from then on, for ever.

        Law, for any steps a, b, c in this order: who restores the snapshot taken at ``a``, where ``changes`` was called too, and
        applies what ``changes`` gave at ``b`` and at ``c``, has the state of ``c``. Define ``apply_changes`` with it, or neither
        of them. A subclass with a ``snapshot`` or ``restore`` of its own needs its own ``changes`` too; else whole
        snapshots travel."""
        return None

    def apply_changes(self, changes: Any) -> None:
        """Make the state of one call of ``changes`` that of the next one, which has given ``changes``. Called after ``restore``,
        for each of them in turn, and before any row."""
        raise NotImplementedError(
            f"{type(self).__name__} defines changes() and must define apply_changes(self, changes)"
        )

    def needs_from(self) -> int | None:
        """The first of its steps (``context.step``) whose rows still matter for what it will give; ``context.step + 1``: none so
        far. None: all of them. Asked between two steps; never goes back. Makes ``recovery="upstream"`` possible.

        Law, for any r that it gave when the steps below s were applied: who begins empty, without ``restore``, at step r gives
        from step s on what this operator gives. Timers that were set before r are set then too."""
        return None

    def state_bytes(self) -> int:
        """About how large the state is; asked for once a second, so it must be cheap. 0: not known, then the size of the
        last copy is taken. Load balance weighs it, nothing depends on it."""
        return 0

    def close(self) -> None:
        """Called once, at the end of the operator's life, also after an error."""

    def _flux_meaning(self, schemas: Sequence[pa.Schema]) -> dict[str, str]:
        """Say by name what parts of the state mean, for the check of a checkpoint location."""
        return {}

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        """Schema of the output given the inputs'; called at planning time, before ``open``. None: a sink."""
        return self.schema


def gives_changes(operator: Operator) -> bool:
    """Whether it defines ``changes`` and ``apply_changes``."""
    return type(operator).changes is not Operator.changes


def _is_input(given: Any) -> bool:
    from flux.dataflow.api import is_input  # it imports this module

    return is_input(given)


def never_gives(operator: Operator) -> bool:
    """Whether it is known that none of its methods gives rows."""
    kind = type(operator)
    methods = (kind.process, kind.on_timer, kind.finish)
    known = (Operator.process, Operator.on_timer)
    return all(any(method is none for none in known) or gives_nothing(method) for method in methods)


def says_needs(operator: Operator) -> bool:
    """Whether it defines ``needs_from``."""
    return type(operator).needs_from is not Operator.needs_from
