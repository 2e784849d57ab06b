"""Sinks, which bring the output of a flow outside: their contract, and the flow that ends in one (design: sink).

Every replica runs an operator, so an effect on the outside would happen once per replica. A sink is the exception: only the
primary calls it, and only with committed output.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

import flux
from flux.arguments import checked
from flux.errors import NoSuchAttribute, UsageError
from flux.operators.user_code import named, signature, takes
from flux.settings import parse_bytes

if TYPE_CHECKING:
    from flux.dataflow.flow import Flow
    from flux.dataflow.plan import Plan, StagePlan
    from flux.dataflow.write_stream import FlowWriter


#: Errors that ``Sink.is_transient`` takes for transient by default.
TRANSIENT = (ConnectionError, TimeoutError, InterruptedError)


class Position(NamedTuple):
    """The position of a batch in the output of a stage: the same on every replica, and after every take-over. ``sequence`` counts
    the batches of the partition from 0."""

    partition: int
    sequence: int


class TentativeOutput(NamedTuple):
    """Results for a sink that may still change: those of event time before ``through``, beyond earlier ones. Times are in
    microseconds since the epoch."""

    batch: pa.RecordBatch
    through: int


class TentativeUndo(NamedTuple):
    """End of all ``TentativeOutput`` of a sink with ``start < through <= end``; None: without that bound."""

    start: int | None
    end: int | None

    def reaches(self, through: int) -> bool:
        """Return whether output up to this time is void."""
        return (self.start is None or self.start < through) and (self.end is None or through <= self.end)


class TentativeEnd(NamedTuple):
    """End of a failure: all results of event time before ``through`` are stable, and none of them comes again."""

    through: int


#: News of tentative results for a sink, in order with its stable output.
TentativeNews = TentativeOutput | TentativeUndo | TentativeEnd


class SinkAhead(Exception):
    """Output outside that this query cannot have made yet. A sink that finds it raises this error, with a text that names it."""


@dataclass(frozen=True)
class SinkContext:
    """The place of a sink, given to ``open``. Query, number and partition together name a place for positions."""

    #: The id of the query: another one for each start without a ``checkpointLocation``, and after
    #: ``flux checkpoints --forget-output``.
    query: str
    #: The number, in the query, of the stage whose output the sink takes.
    number: int
    #: The name of that stage, for messages.
    stage: str
    #: The partition whose output this copy of the sink takes.
    partition: int
    #: The number of partitions of that stage.
    partitions: int


@dataclass(frozen=True, slots=True)
class SinkTraits:
    """The abilities of a sink, which the rest of the product goes by."""

    #: Whether each row lands once, also after a take-over. Shown in ``query.status``.
    exactly_once: bool = False
    #: Whether ``committed`` changes something outside, as in a sink that cleans up after earlier writers. Then each primary calls
    #: it once; otherwise it is asked again when a write has failed: the outside may have got that batch from an earlier primary.
    committed_changes: bool = False
    #: The most bytes that ``write`` may leave unwritten (it has returned a sequence number): the replicas keep them.
    holds_bytes: int = 0
    #: Batches that wait are given to ``write_joined``, up to this many bytes of them; the result None means that all of them are
    #: outside. 0: one at a time.
    joins_bytes: int = 0
    #: Whether ``send`` may be called before ``write``. Then a write of output that is outside already must change nothing.
    sends_ahead: bool = False
    #: Whether ``write`` is called for batches without rows, too.
    takes_empty: bool = False

    def __post_init__(self) -> None:
        for trait in fields(self):
            given = getattr(self, trait.name)
            if trait.name.endswith("_bytes"):
                if not isinstance(given, int) or isinstance(given, bool) or given < 0:
                    raise UsageError(f"SinkTraits: {trait.name} must be a number of bytes, got {given!r:.100}")
            elif not isinstance(given, bool):
                raise UsageError(f"SinkTraits: {trait.name} must be True or False, got {given!r:.100}")


class Sink:
    """The end of a flow, which takes the committed output of its last stage: derive from it, define ``write``, and give an
    instance to ``flow.to``. The instance is a pattern: each partition works with a copy of its own, in threads besides the
    worker's. The calls of a copy come one after the other, but not always in the same thread.

    A primary that was given up may still have a ``write`` under way while its successor asks ``committed``. Output is
    therefore exactly once only if such a late write cannot land behind that answer: because the rows and their position are
    stored in one transaction that checks the position, or because both primaries write the same. A sink that ensures this says
    ``traits = flux.SinkTraits(exactly_once=True)``; any other is at least once. ``flux.testing.check_sink`` tries it out."""

    #: The abilities of the sink, in the class or, where they depend on its arguments, in the instance.
    traits: SinkTraits = SinkTraits()

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        _check_traits(cls.__name__, vars(cls))
        _check_names(cls)

    def destination(self) -> str | None:
        """Name the place to which the output goes. The name is the same in each life of a query while the place is the same. If
        the name differs at a start on a checkpoint location, the sink begins anew there. None: not known."""
        return None

    def check(self, schema: pa.Schema) -> None:
        """Check the schema of the output; any error refuses it. Called before the query starts, in the program that starts it."""

    def prepare(self, partitions: int, kept: Any) -> Any:
        """Settle everything on which all primaries of the ``partitions`` and all later lives of the query must agree, and
        remember it. Called on a copy of the pattern, in the program that starts the query, before it starts. ``kept``: None, or
        the result of this call when a query with the same ``checkpointLocation`` was started for the first time. Returns data
        for JSON."""
        return None

    def open(self, context: SinkContext) -> None:
        """Prepare for writing. Called before everything else, when a replica of the partition becomes primary."""

    def committed(self, partition: int) -> int | None:
        """Return the sequence number of the first batch of this query (``SinkContext.query``: each begins at 0) that the outside
        does not have yet. None: the outside cannot tell; then batches may come again after a take-over."""
        return None

    def write(self, batch: pa.RecordBatch, position: Position) -> int | None:
        """Bring a batch outside. Returns None when it is there; a sink that collects returns the sequence number of the first
        batch that the outside does not have yet. Batches come in order, without gaps. A write at a position that the outside
        has already, perhaps from a primary that was given up, must change nothing. It may raise: ``committed`` is asked again a
        second later, and batches that have reached the outside meanwhile count as written."""
        raise NotImplementedError(f"{type(self).__name__} must define write(self, batch, position)")

    def write_joined(self, batches: Sequence[tuple[Position, pa.RecordBatch]]) -> int | None:
        """Bring several batches outside in one go; called in place of ``write`` where ``traits.joins_bytes`` is set and several
        wait. Unless a sink defines it, they come to ``write`` as one batch under the position of the first. A sink that stores
        positions with its rows defines it, or the next primary would not know of the others. Result and errors: see ``write``."""
        return self.write(pa.concat_batches([batch for _, batch in batches]), batches[0][0])

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        """Show results that may still change, because input is missing (``availability=``): those of event time before
        ``through``, in microseconds since the epoch, beyond the ones shown already. Only a sink that defines this method gets
        tentative results, and it defines ``undo``, too. Calls come in order with those of ``write``, and errors count as there.
        A call that failed is left out where ``write`` or ``undo`` waits behind it: stable output does not wait for tentative."""
        raise NotImplementedError(f"{type(self).__name__} shows no tentative results")

    def undo(self, start: int | None, end: int | None) -> None:
        """Take back the rows of each earlier call of ``tentative``, by any primary, with ``start < through <= end``; None:
        without that bound. The stable rows of that time come by ``write``. May come twice, and for rows that were never shown.
        Each primary but the first one of a query begins with ``undo(None, None)``: earlier ones may have shown anything."""
        raise NotImplementedError(f"{type(self).__name__} shows no tentative results")

    def corrected(self, through: int) -> None:
        """Hear that a failure is over: all results before ``through`` are stable and written. At the end of all inputs
        ``through`` is ``2**63 - 1``. Optional."""

    def recovered(self, sequence: int) -> None:
        """Hear which batch is the first that no earlier primary can have written. Called after a restart from a checkpoint
        location, before ``write`` of that batch, which has this sequence number. All earlier ones were given to ``write``, or
        were outside before. Raises SinkAhead if the outside has later ones though ``committed`` cannot tell: the location is an
        older copy."""

    def send(self, batch: pa.RecordBatch, position: Position) -> Collection[int] | None:
        """Begin the ``write`` of the same batch without waiting: one thread does so for several partitions. Returns the numbers
        of the files on which the outside will answer; None: it would have had to wait. An error is forgotten, because ``write``
        comes all the same."""
        return None

    def is_transient(self, error: Exception) -> bool:
        """Return whether a call that raised this error is repeated, with growing pauses, for up to
        ``spark.flux.sink.retryTimeout``. Any other error ends the query."""
        return isinstance(error, TRANSIENT)

    def close(self) -> None:
        """Release resources. Called once: the partition has moved, or the query has ended."""

    def __repr__(self) -> str:
        return type(self).__name__


def _check_names(kind: type[Sink]) -> None:
    """Raise UsageError for a method whose name is nearly one of the contract, because it would never be called. Helpers may have
    any other name, and names of other base classes are free."""
    contract = {name for name in vars(Sink) if not name.startswith("_")}
    others = {name for base in kind.__mro__ if not issubclass(base, Sink) for name in vars(base)}
    for name, value in vars(kind).items():
        is_method = callable(value) or isinstance(value, property | classmethod | staticmethod)
        if name.startswith("_") or name in contract | others or not is_method:
            continue
        # Some letters of a name are wrong. A longer word of its own is none, as "closed" or "write_rows".
        if near := [each for each in get_close_matches(name, contract, 1, 0.8) if not name.startswith(each)]:
            raise UsageError(
                f"{kind.__name__}.{name} is not part of flux.Sink, so nothing would ever call it, did you mean {near[0]!r}? "
                f"Methods are {', '.join(sorted(contract - {'traits'}))}; a helper needs another name, such as _{name}"
            )


def _check_traits(called: str, attributes: Mapping[str, Any]) -> None:
    """Raise UsageError for a class or an instance that tells its abilities in another way than by ``traits``."""
    given = attributes.get("traits", Sink.traits)
    if not isinstance(given, SinkTraits):
        raise UsageError(f"{called}.traits must be flux.SinkTraits(...), not {given!r:.100}")
    for trait in fields(SinkTraits):
        if trait.name in attributes:
            said = f"flux.SinkTraits({trait.name}={attributes[trait.name]!r:.100})"
            raise UsageError(f"{called}.{trait.name} is not looked at: a sink tells its abilities in traits = {said}")


def shows_tentative(sink: Sink | None) -> bool:
    """Return whether a sink gets tentative results: it defines ``tentative``."""
    return sink is not None and type(sink).tentative is not Sink.tentative


#: The methods of sinks for tentative results, with their arguments.
_TENTATIVE = {"tentative": "(batch, through)", "undo": "(start, end)", "corrected": "(through)"}


def _check_tentative(sink: Sink) -> None:
    """Raise UsageError for a sink that shows tentative results and cannot take them back, or the other way round, or with
    something else in place of the methods."""
    kind = type(sink)
    for name, arguments in _TENTATIVE.items():
        method = getattr(sink, name)
        said = signature(method) if callable(method) else None
        if not callable(method) or (said is not None and not takes(said, arguments.count(",") + 1)):
            is_ = f"is {name}{said}" if callable(method) else f"is {method!r:.100}"
            raise UsageError(
                f"{kind.__name__}.{name} {is_}: for a sink it is a method that is called as {name}{arguments}, with tentative "
                "results or their end. Anything else needs another name"
            )
    defined = [name for name in _TENTATIVE if getattr(kind, name) is not getattr(Sink, name)]
    if "tentative" in defined and "undo" not in defined:
        raise UsageError(
            f"class {kind.__name__} defines tentative() and not undo(start, end): rows that turn out wrong would stay outside. "
            "Define both; undo() may do nothing where the outside forgets by itself"
        )
    if defined and "tentative" not in defined:
        raise UsageError(
            f"class {kind.__name__} defines {defined[0]}() and not tentative(batch, through), so nothing would ever call it: a "
            f"sink that shows tentative results defines both; a helper needs another name, such as _{defined[0]}"
        )


class FunctionSink(Sink):
    """A sink that calls a function for each batch; see ``Outputs.foreach_batch``."""

    def __init__(self, function: Callable[..., Any], transient: tuple[type[Exception], ...] = ()) -> None:
        self._function = function
        self._transient: tuple[type[Exception], ...] = (*TRANSIENT, *transient)

    def write(self, batch: pa.RecordBatch, position: Position) -> None:
        self._function(batch, position)

    def is_transient(self, error: Exception) -> bool:
        return isinstance(error, self._transient)

    def __repr__(self) -> str:
        return f"foreach_batch({getattr(self._function, '__name__', type(self._function).__name__)})"


class CommittedFunctionSink(FunctionSink):
    """A function sink that stores positions with its rows, and tells them again."""

    traits = SinkTraits(exactly_once=True)

    def __init__(
        self,
        function: Callable[..., Any],
        transient: tuple[type[Exception], ...],
        committed: Callable[[SinkContext], int | None],
    ) -> None:
        super().__init__(function, transient)
        self._committed = committed

    def open(self, context: SinkContext) -> None:
        self._context = context

    def committed(self, partition: int) -> int | None:
        return self._committed(self._context)

    def write(self, batch: pa.RecordBatch, position: Position) -> None:
        self._function(batch, position, self._context)


#: Names of methods of a flow that a flow with a sink does not have.
_OF_FLOWS = (
    "toDF",
    "show",
    "collect",
    "to",
    "to_parquet",
    "to_kafka",
    "to_readers",
    "foreach_batch",
    "writeStream",
    "connect",
)


class FlowTo:
    """A flow whose output goes into a sink. It only has to be started."""

    def __getattr__(self, name: str) -> Any:
        if name in _OF_FLOWS:
            raise NoSuchAttribute(
                f"{self!r} has no {name}(): its output goes to {self.sink!r}. Keep the flow in a variable, call "
                f"{name}() of that, and start both with flux.start(...)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __init__(self, flow: Flow, sink: Sink) -> None:
        self.flow = flow
        self.sink = sink

    def start(self, queryName: str | None = None, spark: Any = None, **options: Any) -> Any:  # noqa: N803
        """Run as a query of its own in the background, as ``Flow.start`` does."""
        return flux.start(self, queryName=queryName, spark=spark, **options)

    def explain(self, spark: Any = None, **options: Any) -> None:
        """Print a description of the query, as ``Flow.explain`` does."""
        print(flux.explain(self, spark=spark, **options))

    def __repr__(self) -> str:
        return f"<{self.flow!r} to {self.sink!r}>"


def ahead(where: str, what: str, location: str) -> str:
    """Return a text for output outside that is unknown to the checkpoint location, with the remedy."""
    place = location or "LOCATION"
    return (
        f"{where}: {what}. So the checkpoint location {location} is an older copy, or has lost the end of its journal: to go on "
        "from it would mix two outputs. Restore the newest copy of the location. If there is none, choose: a new location with a "
        f"new folder or topic; or 'flux checkpoints {place} --forget-output', after which the next start shows again what was "
        "shown since that copy"
    )


def guarantee(sink: Sink) -> str:
    return "exactly once" if sink.traits.exactly_once else "at least once"


def flow_of(given: Flow | FlowTo) -> Flow:
    return given.flow if isinstance(given, FlowTo) else given


class Outputs:
    """The possible ends of a flow, as methods of it."""

    @checked("flow.to")
    def to(self, sink: Sink) -> FlowTo:
        """Return the flow with its output going into a sink: partition p of its last stage writes partition p. Start it with
        ``start()``, or several with ``flux.start``."""
        if not isinstance(sink, Sink):
            hint = ""
            if inspect.isclass(sink) and issubclass(sink, Sink):
                hint = f"; make one: flow.to({sink.__name__}(...))"
            elif callable(sink):
                hint = "; flow.foreach_batch(function) takes a function"
            raise UsageError(f"flow.to() wants an instance of a class derived from flux.Sink, got {sink!r}{hint}")
        if type(sink).write is Sink.write:
            raise UsageError(f"class {type(sink).__name__} must define write(self, batch, position) to be a sink")
        _check_traits(type(sink).__name__, vars(sink))
        _check_tentative(sink)
        return FlowTo(self, sink)  # type: ignore[arg-type]

    @property
    def writeStream(self) -> FlowWriter:  # noqa: N802
        """Return a writer that has Structured Streaming's names: ``flow.writeStream.format("parquet").option(...).start()``."""
        from flux.dataflow.write_stream import FlowWriter

        return FlowWriter(self)  # type: ignore[arg-type]

    @checked("in_mode")
    def in_mode(self, output_mode: str) -> Flow:
        """Return the same flow with another output mode of the aggregate at its end, also if conditions and columns are behind:
        "append", "update" or "complete", as in ``writeStream.outputMode``. Operators of your own find it in
        ``context.output_mode``."""
        from flux.dataflow.write_stream import in_mode

        return in_mode(self, output_mode)  # type: ignore[arg-type]

    @checked("foreach_batch")
    def foreach_batch(
        self,
        function: Callable[..., Any],
        *,
        committed: Callable[[SinkContext], int | None] | None = None,
        transient: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> FlowTo:
        """Call a function in the workers with each batch of committed output and its position, in several threads if
        several partitions are on one worker: at least once, because after a take-over the last batches come again, under the
        same positions.

        committed  makes it exactly once. ``committed(context)`` tells the sequence number of the first batch that the outside
                   does not have, and the function, which is called with the batch, its position and the context, stores rows and
                   position in one transaction that changes nothing if the outside has that position already. context: as for
                   ``flux.Sink.open``; query, number and partition name the place of a position
        transient  errors after which a call is repeated, beside errors of connections and time-outs"""
        wanted = 2 if committed is None else 3
        if not callable(function):
            raise UsageError(f"foreach_batch wants a function of a batch and its position, got {function!r}")
        _check_takes(
            "the function of foreach_batch",
            function,
            wanted,
            "the batch and its position" if committed is None else "batch, position and context",
        )
        kinds = transient if isinstance(transient, tuple) else (transient,)
        if not all(inspect.isclass(kind) and issubclass(kind, Exception) for kind in kinds):
            raise UsageError(f"transient must be an exception class, or a tuple of them; got {transient!r}")
        if committed is None:
            return self.to(FunctionSink(function, kinds))
        if not callable(committed):
            raise UsageError(f"committed must be a function of the context, got {committed!r}")
        _check_takes("committed", committed, 1, "the context")
        return self.to(CommittedFunctionSink(function, kinds, committed))

    @checked("to_parquet")
    def to_parquet(
        self,
        path: str | os.PathLike[str],
        *,
        partitionBy: str | Sequence[str] | None = None,  # noqa: N803
        partitions: int = 1,
        roll_bytes: int | str = "32m",
        roll_every: float | str = "10s",
    ) -> FlowTo:
        """Write the output as parquet files into a folder; see ``flux.to_parquet``."""
        from flux.connectors.files.parquet_sink import to_parquet

        return to_parquet(
            self,  # type: ignore[arg-type]
            path,
            partitionBy=partitionBy,
            partitions=partitions,
            roll_bytes=roll_bytes,
            roll_every=roll_every,
        )

    @checked("to_readers")
    def to_readers(self, *, max_bytes: int | str = "128m") -> FlowTo:
        """Keep the output in the workers until it is read: with ``query.rows()`` in the program of the query, or as a stream of
        Spark's with ``spark.readStream.format("flux")``. ``max_bytes`` limits the unread output of all partitions together: at
        the limit the query waits for its reader."""
        return to_readers(self, max_bytes=max_bytes)  # type: ignore[arg-type]

    def to_kafka(self, topic: str, bootstrap: str | Sequence[str], **options: Any) -> FlowTo:
        """Write the output as records of a topic of Kafka; see ``flux.to_kafka``."""
        return flux.to_kafka(self, topic, bootstrap, **options)  # type: ignore[arg-type]


def _check_takes(called: str, function: Callable[..., Any], arguments: int, what: str) -> None:
    said = signature(function)
    if said is not None and not takes(said, arguments):
        count = ("one argument", "two arguments", "three arguments")[arguments - 1]
        raise UsageError(f"{called} must take {count}, {what}; got {named(function)}{said}")


def to_readers(flow: Flow, *, max_bytes: int | str = "128m") -> FlowTo:
    """Keep the output in the workers; see ``Outputs.to_readers``."""
    most = parse_bytes("max_bytes", max_bytes)
    if most < 1:
        raise UsageError(f"max_bytes must be above zero, got {max_bytes!r}")
    return FlowTo(flow, QueryReaders(most))


class QueryReaders(Sink):
    """Mark of a stage whose output the workers keep until it is read from outside (design: readers), up to ``max_bytes`` in all
    partitions together. No method of it is called: readers fetch the output themselves."""

    traits = SinkTraits(exactly_once=True)

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    def kept_max(self, partitions: int) -> int:
        """Return the bytes that one of ``partitions`` partitions keeps."""
        return max(self.max_bytes // partitions, 1)

    def write(self, batch: pa.RecordBatch, position: Position) -> None:
        raise AssertionError("output for readers is not written anywhere")

    def __repr__(self) -> str:
        return "readers"


def offered(plan: Plan, stage: str | None) -> StagePlan:
    """Return the stage whose output is kept for readers: the one of that name, or the only one."""
    found = [each for each in plan.stages if isinstance(each.sink, QueryReaders)]
    names = ", ".join(each.name for each in found)
    if not found:
        raise UsageError(
            "the query keeps no output for readers now: end a flow with to_readers(), at the start or in query.add()"
        )
    if stage is not None:
        found = [each for each in found if stage in (each.name, each.name.removesuffix(".sink"))]
        if not found:
            raise UsageError(f"no output of a stage {stage!r} is kept for readers; there is that of {names}")
    if len(found) > 1:
        raise UsageError(f"the query keeps the output of several stages for readers, say which: {names}")
    return found[0]
