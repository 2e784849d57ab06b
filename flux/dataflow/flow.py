"""The decorator ``flux.stage``, and the flow that is built of decorated stages (design: public-api).

Nothing here runs anything. A flow is a description; ``controller.planning.compiler`` turns it into a plan, and
``spark_integration`` runs the plan.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

import pyarrow as pa

import flux
from flux.arguments import FAIL, STEPS, check_counts, check_feeds, check_on_loss, check_recovery, checked, key_columns
from flux.dataflow.availability import bound_of_stage
from flux.dataflow.row_operators import AS_THEY_COME, CHANGES, OF_DATAFRAMES, ONCE, RowOperators, gives_of_all
from flux.dataflow.sink import FlowTo, Outputs
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import NoSuchAttribute, UsageError
from flux.operators.operator import Batches, Operator
from flux.operators.schema import check_columns
from flux.operators.tentative import ReadableOperator, TentativeRows
from flux.operators.user_code import gives_nothing, importable, named, signature, takes, text_of
from flux.windows.window import Closing, SessionWindow, Window
from partitioning.ids import ACTIVE

if TYPE_CHECKING:
    from flux.dataflow.row_flow import RowFlow
    from flux.expressions.steps import RowSteps

#: pyspark's DataFrame and SparkSession, and the query handle: this layer does not import the layers above it.
DataFrame = Any
SparkSession = Any
Query = Any

OUTPUT_MODES = ("complete", "update")
#: The modes of a stage with windows; the first is the default.
WINDOW_MODES = ("append", "update", "complete")


class FunctionOperator(ReadableOperator):
    """A plain function from batch to batch (or to an iterable of batches, or to None) as a stage without state."""

    __former_names__: ClassVar = [("flux.dataflow.api", "FunctionOperator")]

    snapshot_classes = ()
    _flux_reach = 0

    def __init__(self, function: Callable[[pa.RecordBatch], Any], schema: Any) -> None:
        self._function = function
        self.schema = schema

    def process(self, batch: pa.RecordBatch) -> Batches:
        given: Batches = self._function(batch)
        return given

    def snapshot(self) -> None:
        """Return nothing, as a function has no state."""

    def restore(self, snapshot: Any) -> None:
        """Do nothing, as a function has no state."""

    def needs_from(self) -> int:
        """Return the step after this one: a function needs no earlier row."""
        return self.context.step + 1

    def _flux_part(self, watermark: int, overlay: Sequence[TentativeRows], after: int) -> Operator:
        return self._flux_aside()

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        """Return the declared schema; without a declaration the output has the schema of the input."""
        return self.schema if self.schema is not None else schemas[0]


class StepsOperator(FunctionOperator):
    """Conditions and columns at the end of a flow, behind the operator of its last stage."""

    def __init__(self, steps: RowSteps) -> None:
        super().__init__(steps.apply, steps.output)
        self.steps = steps


class Stage:
    """A decorated class or function. A call with inputs adds a stage to a flow. A call with anything else is a call of the
    class or function itself, so that it can be tested without Spark.

    A class that takes arguments is called with its arguments first: ``Sessions(gap=30)`` makes an operator as without Flux, and a
    call of that operator with inputs adds a stage whose operators are all made with these arguments."""

    #: The arguments of the operators, as they are written in a call.
    _arguments = ""
    #: Whether the operator works in the steps of the stage before, where that stage feeds no other (design: chained).
    chained = False
    #: Whether it gives the rows that it gets, as they are.
    passes = False
    #: Whether Flux has made it for a sink of the stage that it reads.
    for_sink = False

    def __init__(
        self,
        target: Any,
        key: tuple[str, ...],
        partitions: int | None,
        replicas: int | None,
        schema: Any,
        output_mode: str,
        name: str | None,
        recovery: str = ACTIVE,
        durable: bool = True,
        window: Window | SessionWindow | None = None,
        event_time: str | None = None,
        availability: int | None = None,
        order: str = STEPS,
        feeds: str | None = None,
        on_loss: str = FAIL,
    ) -> None:
        functools.update_wrapper(self, target, updated=())
        self.target: Any = target
        self.key = key
        self.partitions = partitions
        self.replicas = replicas
        self.recovery = recovery
        self.durable = durable
        self.output_mode = output_mode
        self.window = window
        self.event_time = event_time
        #: Microseconds to a result, also while an input is missing; None: the setting of the query.
        self.availability = availability
        self.order = order
        #: The way in which its copies are read; None: the setting of the query.
        self.feeds = feeds
        self.on_loss = on_loss
        self.name = str(name or getattr(target, "__name__", type(target).__name__))
        self._schema = schema

    def make(self) -> Operator:
        """Make a fresh operator: an instance of the class, or the function in a FunctionOperator."""
        return self._made((), {})

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operator:
        target: Any = self.target
        if inspect.isclass(target):
            made: Any = target(*args, **kwargs)
            if self._schema is not None:
                object.__setattr__(made, "schema", self._schema)  # also where the class is frozen
            if self.window is not None:
                object.__setattr__(made, "_flux_window", self.window)
            operator: Operator = made
            return operator
        if self.window is not None:
            from flux.operators.windowed_rows import GroupsFunction  # it loads kernels, which other stages may not need

            return GroupsFunction(target, self._schema, self.window)
        return FunctionOperator(target, self._schema)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        if inputs and not kwargs and all(is_input(given) for given in inputs):
            return Flow(self, [node(given) for given in inputs])
        if any(is_input(given) for given in inputs):
            raise UsageError(self._mixed(inputs, kwargs))
        if not inspect.isclass(self.target):
            self._refuse_tables(inputs)
            return self.target(*inputs, **kwargs)
        if not _takes_arguments(self.target):
            self._refuse_arguments(inputs)
        made = self.target(*inputs, **kwargs)
        if isinstance(made, Operator):
            object.__setattr__(made, "_flux_stage", StageWith(self, inputs, kwargs))
        return made

    def in_mode(self, output_mode: str) -> Stage:
        """Return the same stage with another output mode."""
        return Stage(*self._declared(output_mode))

    def _declared(self, output_mode: str) -> tuple[Any, ...]:
        """Return the arguments of an equal stage with this output mode."""
        return (
            self.target, self.key, self.partitions, self.replicas, self._schema, output_mode, self.name, self.recovery,
            self.durable, self.window, self.event_time, self.availability, self.order, self.feeds, self.on_loss,
        )  # fmt: skip

    def _mixed(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        got = ", ".join([*(_kind(given) for given in inputs), *(f"{name}=..." for name in kwargs)])
        first = ", ".join(
            [
                *(text_of(given, repr) for given in inputs if not is_input(given)),
                *(f"{k}={text_of(v, repr)}" for k, v in kwargs.items()),
            ]
        )
        return (
            f"stage {self.name}: all inputs must be DataFrames, flows or sources; got ({got}). Arguments of the operator come "
            f"first, in a call of their own: {self.name}({first[:200]})(input)"
        )

    def _refuse_tables(self, inputs: tuple[Any, ...]) -> None:
        """Raise UsageError if a function is called with a value that is no batch and is often mistaken for an input."""
        for given in inputs:
            if wrong := _no_input(given, tables=False):
                raise UsageError(f"stage {self.name}: {wrong}")

    def _refuse_arguments(self, inputs: tuple[Any, ...]) -> None:
        for given in inputs:
            wrong = _no_input(given) or f"an input must be a DataFrame, a flow or a source, got {type(given).__name__}"
            raise UsageError(f"stage {self.name}: {wrong}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Raise UsageError. Python calls this method if a class names the stage among its bases."""
        raise UsageError(
            f"stage {self.name} is no class any more, so no other can derive from it: derive from the class before it is "
            f"decorated, or from {self.name}.target, and decorate the new class"
        )

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or attribute == "target":
            raise AttributeError(attribute)
        return getattr(self.target, attribute)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the stage by reference where its module can be imported, as any class or function is shipped. By value the class
        would be a copy whose methods come from the module's own class, and their super() would not know the copy."""
        return self.__qualname__ if importable(self) else super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"<flux stage {self.name}>"


class StageWith(Stage):
    """A stage whose operators are made with arguments."""

    def __init__(self, stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(*stage._declared(stage.output_mode))
        self._stage, self._args, self._kwargs = stage, args, kwargs
        self._arguments = ", ".join(
            [
                *(text_of(value, repr) for value in args),
                *(f"{name}={text_of(value, repr)}" for name, value in kwargs.items()),
            ]
        )

    def make(self) -> Operator:
        return self._stage._made(self._args, self._kwargs)

    def in_mode(self, output_mode: str) -> Stage:
        return StageWith(self._stage.in_mode(output_mode), self._args, self._kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the stage, which decides itself how it is shipped, and the arguments."""
        return StageWith, (self._stage, self._args, self._kwargs)

    def __repr__(self) -> str:
        return f"<flux stage {self.name}({self._arguments})>"


class ChangedStage(Stage):
    """A stage with another name, or other partitions or replicas. Its operators are made as before."""

    def __init__(self, stage: Stage, changes: Mapping[str, Any]) -> None:
        super().__init__(*stage._declared(stage.output_mode))
        self._stage, self.changes = stage, dict(changes)
        self._arguments, self.chained, self.passes = stage._arguments, stage.chained, stage.passes
        self.for_sink = stage.for_sink
        for name, value in changes.items():
            setattr(self, name, value)

    def make(self) -> Operator:
        return self._stage.make()

    def in_mode(self, output_mode: str) -> Stage:
        return ChangedStage(self._stage.in_mode(output_mode), self.changes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the stage, which decides itself how it is shipped, and the changes."""
        return ChangedStage, (self._stage, self.changes)


def arguments_of(make: Callable[[], Operator]) -> str:
    """Return the arguments of the operators that ``make`` makes, as they are written in a call; "" without any."""
    stage = getattr(make, "__self__", None)
    return stage._arguments if isinstance(stage, Stage) else ""


@overload
def stage(target: Callable[..., Any], /) -> Stage: ...
@overload
def stage(
    *,
    key: str | Sequence[str] | None = None,
    partitions: int | None = None,
    replicas: int | None = None,
    schema: Any = None,
    output_mode: str | None = None,
    name: str | None = None,
    recovery: str = ACTIVE,
    durable: bool = True,
    window: Window | SessionWindow | None = None,
    event_time: str | None = None,
    closes: str | None = None,
    availability: float | str | None = None,
    order: str = STEPS,
    feeds: str | None = None,
    on_loss: str = FAIL,
) -> Callable[[Any], Stage]: ...
@checked("flux.stage")
def stage(
    target: Any = None,
    /,
    *,
    key: str | Sequence[str] | None = None,
    partitions: int | None = None,
    replicas: int | None = None,
    schema: Any = None,
    output_mode: str | None = None,
    name: str | None = None,
    recovery: str = ACTIVE,
    durable: bool = True,
    window: Window | SessionWindow | None = None,
    event_time: str | None = None,
    closes: str | None = None,
    availability: float | str | None = None,
    order: str = STEPS,
    feeds: str | None = None,
    on_loss: str = FAIL,
) -> Any:
    """Make a stage of a Flux dataflow out of an Operator class, an Aggregate class or a function batch -> batch.

    key          column or columns by which rows find their partition; nulls form one group. None: batches go to
                 partitions in rotation
    partitions   1 to 4096; default ``spark.flux.partitions``
    replicas     number of replicas of each partition, the primary included; default ``spark.flux.replicas``
    schema       schema of the output: DDL string, StructType or pyarrow schema; a function without one keeps its input's
    output_mode  for an Aggregate: "complete", the default, gives the result once, at the end of the input; "update" gives the
                 changed groups after every step. The class may say it, too: ``output_mode = "update"``. With windows "append" is
                 the default: each group once, when the watermark has passed its window
    name         default: the name of the class or function
    recovery     work of the replicas beside the primary: "active" ones apply every step and go on at once when the primary is
                 lost; a "standby" keeps a checkpoint and repeats the steps after it: slower then, cheaper until then;
                 "upstream" ones keep nothing but the order: the rows since the last replay point are sent once more by their
                 producers. For functions, aggregates with windows that end, and operators that define ``needs_from``
    window       for an Aggregate: ``flux.window(...)`` or ``flux.session_window(...)``. Its groups are those of key and window,
                 and rows have the columns ``window_start`` and ``window_end`` behind the key. For a function of (rows, offsets):
                 it is called with the rows of the groups that end together, one group behind the other, those of group g from
                 ``offsets[g]`` to ``offsets[g + 1]``; each row has ``window_start`` and ``window_end``, too
    event_time   the column of the output that has the times of its rows: it says that no row is given with a time below the
                 watermark of the step before. Then windows may stand behind the stage. Rows below the watermark are left out
                 there, and counted. An aggregate with windows needs no word: a result has the time at which its window ends
    closes       for an Aggregate, in place of a window: the column with the time at which a group is complete, such as the end of
                 an auction. Groups are those of key and this time, and are given when the watermark has passed it
    availability the longest time from a row's coming to a result with it, as "3s", also while an input is missing: results are
                 tentative then, and corrected when it is back; default ``spark.flux.availability`` (docs/availability.md)
    order        "steps": replicas apply the same steps in one order. "marks": each applies rows as they come, so that one that is
                 lost or stands still holds up no other (docs/recovery.md#replicas-without-an-order)
    feeds        the way in which the stages behind it read its copies: "one" of them, "hedged" for a second one while nothing
                 comes from the first, or "all"; default ``spark.flux.feeds`` (docs/stages.md#feeds-of-a-stage)
    on_loss      the consequence of the loss of a partition's last replica: "fail" ends the query; "converge", for windows with
                 replicas=1, begins empty, and says which results lack rows (docs/availability.md#a-lost-partition)
    durable      whether a query with a ``checkpointLocation`` keeps the stage there. A query keeps all of its stages or none:
                 with False it does not start, and says why
    """
    check_recovery(recovery, replicas, order)
    check_feeds(feeds, replicas, recovery)
    check_on_loss(on_loss, replicas)
    if not isinstance(durable, bool):
        raise UsageError(f"durable must be True or False; got {durable!r}")
    if event_time is not None and not (isinstance(event_time, str) and event_time):
        raise UsageError(f"event_time must be the name of a column of the output, as in 'ts'; got {event_time!r:.100}")
    columns, bound = key_columns(key), bound_of_stage(availability)
    if closes is not None:
        window = _closing(closes, window)

    def decorate(decorated: Any) -> Stage:
        _check_window(decorated, window)
        _check_decorated(decorated, window)
        mode = _output_mode(decorated, output_mode, window)
        about = (
            columns, partitions, replicas, schema, mode, name, recovery, durable, window, event_time, bound, order, feeds,
            on_loss,
        )  # fmt: skip
        made = Stage(decorated, *about)
        declared = getattr(decorated, "schema", None) if schema is None else schema
        check_columns(f"stage {made.name}", declared)
        check_counts(made.name, partitions, replicas)
        return made

    return decorate if target is None else decorate(target)


def _closing(closes: Any, window: Any) -> Closing:
    if not isinstance(closes, str) or not closes:
        raise UsageError(
            f"closes must be the name of a column with a time, as in closes='expires'; got {closes!r:.100}"
        )
    if window is not None:
        raise UsageError("a stage has window= or closes=: both say when a group is complete")
    return Closing(closes)


def _check_window(decorated: Any, window: Any) -> None:
    """Raise UsageError if a value is no window, or if the decorated object has no groups that could be of windows."""
    if window is None:
        return
    if not isinstance(window, Window | SessionWindow):
        raise UsageError(
            "window must be flux.window('ts', '10 minutes') or flux.session_window('ts', '5 minutes'), not a function of Spark; "
            f"got {window!r:.100}"
        )
    from flux.operators.aggregate import Aggregate  # it loads kernels, which other stages may not need

    if inspect.isclass(decorated) and not issubclass(decorated, Aggregate):
        raise UsageError(
            f"window= and closes= are for a function of (rows, offsets), or a class that derives from flux.Aggregate, and "
            f"{named(decorated)} does not: an operator of your own sets timers of event time (context.set_event_timer)"
        )


def _output_mode(decorated: Any, given: Any, window: Any) -> str:
    """Return the output mode of the decorator, or else that of the class of an aggregate."""
    own = getattr(decorated, "output_mode", None) if inspect.isclass(decorated) else None
    if given is not None and own is not None and given != own:
        raise UsageError(
            f"class {decorated.__name__} says output_mode = {own!r}, and its decorator output_mode={given!r}: say it once"
        )
    modes = OUTPUT_MODES if window is None else WINDOW_MODES
    mode = given if given is not None else own if own is not None else modes[0]
    if mode not in modes:
        hint = "; append is for a stage with window=" if mode == WINDOW_MODES[0] else ""
        raise UsageError(f"output_mode must be one of {', '.join(modes)}; got {mode!r}{hint}")
    if given is not None and not inspect.isclass(decorated):
        raise UsageError(
            f"output_mode={given!r} is for an aggregate, whose groups change, and {named(decorated)} is a function: leave it "
            "out. A function gives its rows as they come"
        )
    check_mode(mode, window)
    return str(mode)


def check_mode(mode: str, window: Any) -> None:
    """Raise UsageError for an output mode that sessions and closing columns do not have."""
    if mode == "update" and isinstance(window, Closing):
        raise UsageError("closes= gives each group once, when it is complete: leave it out for output_mode='update'")
    if mode == "update" and isinstance(window, SessionWindow):
        raise UsageError(
            "a session window has output_mode 'append' or 'complete', as in Spark: a row may join sessions that update mode has "
            "given already"
        )


def _check_decorated(decorated: Any, window: Any) -> None:
    if inspect.isclass(decorated) and not issubclass(decorated, Operator):
        raise UsageError(f"class {decorated.__name__} must derive from flux.Operator or flux.Aggregate to be a stage")
    if not callable(decorated) or isinstance(decorated, Operator | Stage):
        raise UsageError(
            f"flux.stage decorates a class or a function, got {type(decorated).__name__}. key, schema and the like are "
            "given by name: @flux.stage(key='user')"
        )
    if inspect.isclass(decorated):
        kind: Any = decorated
        if kind.process is Operator.process:
            raise UsageError(f"class {kind.__name__} must define process(self, batch)")
        _check_both(kind)
    elif (said := signature(decorated)) is not None and not takes(said, 1 if window is None else 2):
        wanted = "exactly one argument, the batch," if window is None else "two arguments, (rows, offsets),"
        has = "" if window is None else " with window= or closes="
        raise UsageError(f"a function must take {wanted} to be a stage{has}; got {named(decorated)}{said}")
    elif gives_nothing(decorated):
        raise UsageError(
            f"function {named(decorated)} returns nothing, so the stage would lose all rows: return a batch, or yield batches. "
            "To bring rows outside, end a flow in a sink: flow.foreach_batch(function)"
        )


def _check_both(decorated: type[Operator]) -> None:
    """Raise UsageError if a class defines only one of two methods that need each other."""
    gives, takes_ = decorated.snapshot is not Operator.snapshot, decorated.restore is not Operator.restore
    if gives != takes_:
        has, lacks = (
            ("snapshot(self)", "restore(self, snapshot)") if gives else ("restore(self, snapshot)", "snapshot(self)")
        )
        raise UsageError(
            f"class {decorated.__name__} defines {has} and not {lacks}: define both, so that the state comes back as it was "
            "given, or neither: then it is what the attributes hold"
        )


class Flow(Outputs, RowOperators):
    """A stage with its inputs. Stages chain: ``Second(First(df))``; a flow may feed several stages."""

    def __init__(self, stage: Stage, inputs: list[Flow | Source]) -> None:
        self.stage = stage
        self.inputs = inputs

    def connect(self, *inputs: Any) -> Flow:
        """Add inputs to the flow that is there already; return the flow itself."""
        self.inputs.extend(node(given) for given in inputs)
        return self

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        """Return the same flow over other inputs."""
        return Flow(self.stage, inputs)

    def _in_mode(self, output_mode: str) -> Flow:
        return Flow(self.stage.in_mode(output_mode), list(self.inputs))

    @checked("withStage")
    def withStage(  # noqa: N802
        self,
        name: str | None = None,
        partitions: int | None = None,
        replicas: int | None = None,
        recovery: str | None = None,
        availability: float | str | None = None,
        order: str | None = None,
        feeds: str | None = None,
        on_loss: str | None = None,
    ) -> Flow:
        """Return the same flow with another name, or other partitions or replicas, of its stage. Arguments as for ``flux.stage``;
        those that are left out stay as they are. Use the result: the flow itself keeps its stage."""
        bound = bound_of_stage(availability)
        given = {
            "name": name, "partitions": partitions, "replicas": replicas, "recovery": recovery, "availability": bound,
            "order": order, "feeds": feeds, "on_loss": on_loss,
        }  # fmt: skip
        changes = {each: value for each, value in given.items() if value is not None}
        if not changes:
            raise UsageError(f"withStage: expected at least one of {', '.join(given)}")
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise UsageError(f"withStage: name must be text, got {name!r:.100}")
        check_counts(str(name or self._own_stage.name), partitions, replicas)
        own = self._own_stage
        check_recovery(recovery or own.recovery, replicas or own.replicas, order or own.order)
        check_feeds(feeds or own.feeds, replicas or own.replicas, recovery or own.recovery)
        check_on_loss(on_loss or own.on_loss, replicas or own.replicas)
        return self._with_stage(changes)

    @property
    def _own_stage(self) -> Stage:
        return self.stage

    @property
    def _gives(self) -> str:
        """The meaning of the rows: one of ``CHANGES``, ``ONCE`` and ``AS_THEY_COME``."""
        made = self.stage.make()
        if isinstance(made, FunctionOperator):
            return gives_of_all(self.inputs)
        if made._flux_grouped and self.stage.output_mode == "update":
            return CHANGES
        return AS_THEY_COME if self.stage.window is None else ONCE

    def _with_stage(self, changes: Mapping[str, Any]) -> Flow:
        made = self.copied(list(self.inputs))
        made.stage = ChangedStage(self.stage, changes)
        return made

    def start(self, queryName: str | None = None, spark: SparkSession | None = None, **options: Any) -> Query:  # noqa: N803
        """Run as a query of its own in the background; ``keep_output=True`` for ``query.toDF()``, where the input ends. A flow
        that gives rows and ends in no sink is refused without it; ``keep_output=False`` throws the rows away. Other options are
        those of ``spark.flux.*`` with underscores. Returns before the workers have joined: ``query.wait_until_running(60)`` waits
        for them."""
        return flux.start(self, queryName=queryName, spark=spark, **options)

    def toDF(self, spark: SparkSession | None = None, progress: bool = False, **options: Any) -> DataFrame:  # noqa: N802
        """Run to the end of the input and return the output as a DataFrame, held by Spark like a local checkpoint.

        progress: show rows in, rows/s and backlog on the screen meanwhile. Options as for ``start``."""
        return flux.to_df(self, spark=spark, progress=progress, **options)

    def collect(self, spark: SparkSession | None = None, **options: Any) -> list[Any]:
        """Run to the end of the input and return the output as a list of Spark's Rows. Options as for ``start``."""
        return list(self.toDF(spark=spark, **options).collect())

    def show(
        self,
        n: int = 20,
        truncate: bool | int = True,
        vertical: bool = False,
        spark: SparkSession | None = None,
        **options: Any,
    ) -> None:
        """Run to the end of the input and print the first ``n`` rows of the output, as ``DataFrame.show`` does. Every call
        runs the flow once more: keep ``toDF()`` to look twice. Options as for ``start``."""
        self.toDF(spark=spark, **options).show(n, truncate, vertical)

    def explain(self, spark: SparkSession | None = None, **options: Any) -> None:
        """Print a description of the query: sources, stages with keys, partitions and replicas, and policies. Options as for
        ``start``; raises the errors that ``start`` would raise for a flow that does not fit."""
        print(flux.explain(self, spark=spark, **options))

    def _with_watermark(self, *arguments: Any) -> RowFlow:
        raise self._no_watermark()

    def _no_watermark(self) -> UsageError:
        return UsageError(
            f"withWatermark behind stage {self.stage.name}: a watermark is declared where rows are read, because lateness is "
            f"judged there: {self.stage.name}(source.withWatermark('ts', '10 seconds')). Times that have to be computed first "
            "are columns in front of it, as in source.withColumn('ts', ...).withWatermark('ts', '10 seconds'); a stage that "
            "keeps a time says so: @flux.stage(event_time='ts')"
        )

    def __getattr__(self, name: str) -> Any:
        if name in OF_DATAFRAMES:
            raise NoSuchAttribute(
                f"a flow has no {name}: {OF_DATAFRAMES[name]}. It is no DataFrame; flow.toDF() gives its output as one, "
                "where the input ends"
            )
        return self._column_or_error(name)

    def __repr__(self) -> str:
        return f"<flow {self.stage.name}({', '.join(repr(given) for given in self.inputs)})>"


def _takes_arguments(target: type) -> bool:
    return any("__init__" in base.__dict__ for base in target.__mro__[:-1])


def _is_dataframe(given: Any) -> bool:
    return any(t.__name__ == "DataFrame" and t.__module__.startswith("pyspark.sql") for t in type(given).__mro__)


def is_input(given: Any) -> bool:
    """Return whether a value can be an input of a stage: a flow, a source or a DataFrame."""
    return isinstance(given, Flow | Source) or _is_dataframe(given)


def node(given: Any) -> Flow | Source:
    """Return an input as part of a flow. Raises UsageError for any other value, with the way to make an input of it."""
    if isinstance(given, Flow | Source):
        return given
    if _is_dataframe(given):
        if getattr(given, "isStreaming", False):
            raise UsageError(
                "an input must be a batch DataFrame; this one is streaming (spark.readStream): give flux.stream(df, "
                "checkpoint=...), which says where Spark keeps how far it is"
            )
        known = getattr(given, "_flux_source", None)
        if known is None:
            known = DataFrameSource("DataFrame", given)
            given._flux_source = known  # one DataFrame that feeds two stages is read once
        return known
    raise UsageError(
        _no_input(given) or f"an input must be a DataFrame, a flow or a source, got {type(given).__name__}"
    )


@checked("flux.batch")
def batch(dataframe: DataFrame) -> Source:
    """Make a source of a batch DataFrame, with the methods of sources: conditions, columns, ``withWatermark``. A stage takes the
    DataFrame itself, too; both are one source, which is read once."""
    if not _is_dataframe(dataframe):
        kind = type(dataframe)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise UsageError(f"flux.batch: {_no_input(dataframe) or f'expected a DataFrame, got {name}'}")
    if getattr(dataframe, "isStreaming", False):
        raise UsageError(
            "flux.batch: expected a batch DataFrame, got a streaming one (spark.readStream): flux.stream(df)"
        )
    made = node(dataframe)
    assert isinstance(made, Source)
    return made


def _kind(given: Any) -> str:
    return "Source" if isinstance(given, Source) else type(given).__name__


def _no_input(given: Any, tables: bool = True) -> str | None:
    """Return the remedy for a value that is often mistaken for an input; None: there is none to name."""
    kind = type(given)
    wanted = "an input must be a DataFrame, a flow or a source, got "
    if kind.__module__.startswith("pandas.") and kind.__name__ == "DataFrame":
        return f"{wanted}a pandas DataFrame; spark.createDataFrame(df) makes one of it"
    if kind.__module__.startswith("pyspark.pandas"):
        return f"{wanted}a pandas-on-Spark {kind.__name__}; df.to_spark() makes one of it"
    if kind.__name__ == "GroupedData" and kind.__module__.startswith("pyspark."):
        return f"{wanted}the result of groupBy; give the DataFrame itself, and name the columns in @flux.stage(key=...)"
    if kind.__name__ in ("RDD", "PipelinedRDD") and kind.__module__.startswith("pyspark."):
        return f"{wanted}an RDD; rdd.toDF(schema) makes one of it"
    if isinstance(given, pa.Table) or (isinstance(given, pa.RecordBatch) and tables):
        return (
            f"{wanted}a pyarrow {kind.__name__}; spark.createDataFrame(table) makes one of it, and "
            "flux.testing.apply(stage, batch) tries a stage on batches"
        )
    if isinstance(given, FlowTo):
        return f"{wanted}{given!r}; its output goes into the sink, call this stage with the flow itself"
    if isinstance(given, Stage):
        return f"{wanted}the stage {given.name} itself; call it with its own input first: {given.name}(df)"
    if inspect.isfunction(given) or (inspect.isclass(given) and issubclass(given, Operator)):
        return f"{wanted}{named(given)}, which is no stage: decorate it with @flux.stage, and call that with its input first"
    return None
