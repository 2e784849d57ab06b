"""What the user holds: the decorator, and the flow that decorated stages build up (DESIGN 1).

Nothing here runs anything. A flow is a description; ``controller.dag`` turns it into a plan and
``spark_integration`` runs that.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import pyarrow as pa

import flux
from flux.errors import UsageError
from flux.operator import Batches, Operator

#: pyspark's DataFrame and SparkSession, and the query handle: this layer does not import what lies above it.
DataFrame = Any
SparkSession = Any
Query = Any

OUTPUT_MODES = ("complete", "update")


class FunctionOperator(Operator):
    """A plain function from batch to batch (or to an iterable of batches, or to None) as a stage without state."""

    def __init__(self, function: Callable[[pa.RecordBatch], Any], schema: Any) -> None:
        self._function = function
        self.schema = schema

    def process(self, batch: pa.RecordBatch) -> Batches:
        result = self._function(batch)
        return [result] if isinstance(result, pa.RecordBatch) else result

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        """Without a declaration the output has the schema of the input."""
        return self.schema if self.schema is not None else schemas[0]


class Stage:
    """A decorated class or function. Called with inputs it adds a stage to a flow; called with anything else it is the
    class or function itself, so that it can be tested without Spark."""

    def __init__(
        self,
        target: Any,
        key: tuple[str, ...],
        partitions: int | None,
        replicas: int,
        schema: Any,
        output_mode: str,
        name: str | None,
    ) -> None:
        functools.update_wrapper(self, target, updated=())
        self.target: Any = target
        self.key = key
        self.partitions = partitions
        self.replicas = replicas
        self.output_mode = output_mode
        self.name = str(name or getattr(target, "__name__", type(target).__name__))
        self._schema = schema

    def make(self) -> Operator:
        """A fresh operator: an instance of the class, or the function wrapped."""
        target: Any = self.target
        if inspect.isclass(target):
            made: Any = target()
            if self._schema is not None:
                made.schema = self._schema
            return made
        return FunctionOperator(target, self._schema)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        if inputs and not kwargs and all(_is_input(given) for given in inputs):
            return Flow(self, [_node(given) for given in inputs])
        if any(_is_input(given) for given in inputs):
            got = ", ".join(type(given).__name__ for given in inputs)
            raise UsageError(
                f"stage {self.name}: all inputs must be DataFrames, flows or sources and there are no keyword "
                f"arguments; got ({got}{', ' if kwargs else ''}{', '.join(kwargs)})"
            )
        return self.target(*inputs, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or attribute == "target":
            raise AttributeError(attribute)
        return getattr(self.target, attribute)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By reference where the module can be imported, as any class or function is shipped. By value the class would
        be a copy, with methods taken from the module's own class, and their super() would not know the copy."""
        return self.__qualname__ if _importable(self) else super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"<flux stage {self.name}>"


@overload
def stage(target: Callable[..., Any], /) -> Stage: ...
@overload
def stage(
    *,
    key: str | Sequence[str] | None = None,
    partitions: int | None = None,
    replicas: int = 1,
    schema: Any = None,
    output_mode: str = "complete",
    name: str | None = None,
) -> Callable[[Any], Stage]: ...
def stage(
    target: Any = None,
    /,
    *,
    key: str | Sequence[str] | None = None,
    partitions: int | None = None,
    replicas: int = 1,
    schema: Any = None,
    output_mode: str = "complete",
    name: str | None = None,
) -> Any:
    """Make a stage of a Flux dataflow out of an Operator class, an Aggregate class or a function batch -> batch.

    key          column or columns by which rows find their partition; nulls form one group. None: batches go to
                 partitions in rotation
    partitions   1 to 4096; default ``spark.flux.partitions``
    replicas     copies of each partition, all counted
    schema       of the output: DDL string, StructType or pyarrow schema; a function without one keeps its input's
    output_mode  of an Aggregate: "complete" gives the result once, at the end of the input; "update" gives the changed
                 groups after every step
    name         default: the name of the class or function
    """
    if output_mode not in OUTPUT_MODES:
        raise UsageError(f"output_mode must be one of {', '.join(OUTPUT_MODES)}; got {output_mode!r}")
    columns = (key,) if isinstance(key, str) else tuple(key or ())
    if not all(isinstance(column, str) for column in columns):
        raise UsageError(f"key must be a column name or a sequence of column names; got {key!r}")

    def decorate(decorated: Any) -> Stage:
        if inspect.isclass(decorated) and not issubclass(decorated, Operator):
            raise UsageError(
                f"class {decorated.__name__} must derive from flux.Operator or flux.Aggregate to be a stage"
            )
        if not callable(decorated):
            raise UsageError(f"flux.stage decorates a class or a function, got {type(decorated).__name__}")
        return Stage(decorated, columns, partitions, replicas, schema, output_mode, name)

    return decorate if target is None else decorate(target)


class Source:
    """Where rows come from: a Spark DataFrame, or (``read``) a Python iterator per partition inside the workers."""

    def __init__(
        self,
        name: str,
        dataframe: DataFrame | None = None,
        read: Callable[..., Iterable[pa.RecordBatch | None]] | None = None,
        partitions: int | None = None,
        schema: Any = None,
        seeks: bool = False,
    ) -> None:
        self.name = name
        self.dataframe = dataframe
        self.read = read
        self.partitions = partitions
        self.schema = schema
        self.seeks = seeks

    def __repr__(self) -> str:
        return f"<flux source {self.name}>"


def source(
    read: Callable[..., Iterable[pa.RecordBatch | None]],
    schema: Any,
    partitions: int,
    name: str | None = None,
) -> Source:
    """A source read inside the workers: ``read(p)`` gives the batches of partition p, 0 <= p < partitions.

    ``read`` is shipped with the task and called once per life of the worker that reads the partition. It must not
    block: yield None for "nothing just now". When that worker is lost, another calls ``read`` again and must get the
    same batches from the start; a function of two arguments, ``read(p, start)``, may leave out the first ``start``
    batches (those without rows not counted), and its batches must stay within ``spark.flux.batch.*``. schema: DDL
    string, StructType or pyarrow schema of the batches."""
    if not callable(read):
        raise UsageError(f"flux.source: read must be a function of the partition number, got {type(read).__name__}")
    if not isinstance(partitions, int) or not 1 <= partitions <= 4096:
        raise UsageError(f"flux.source: partitions must be 1 to 4096, got {partitions!r}")
    try:
        required = [p for p in inspect.signature(read).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        required = []
    named = str(name or getattr(read, "__name__", "source"))
    return Source(named, read=read, partitions=partitions, schema=schema, seeks=len(required) == 2)


class Flow:
    """A stage with its inputs. Stages chain: ``Second(First(df))``; a flow may feed several stages."""

    def __init__(self, stage: Stage, inputs: list[Flow | Source]) -> None:
        self.stage = stage
        self.inputs = inputs

    def connect(self, *inputs: Any) -> Flow:
        """Add inputs after the fact; returns the flow itself."""
        self.inputs.extend(_node(given) for given in inputs)
        return self

    def start(self, queryName: str | None = None, spark: SparkSession | None = None, **options: Any) -> Query:  # noqa: N803
        """Run as a query of its own in the background; ``keep_output=True`` for ``query.toDF()``. Other options are
        those of ``spark.flux.*`` with underscores."""
        return flux.start(self, queryName=queryName, spark=spark, **options)

    def toDF(self, spark: SparkSession | None = None, progress: bool = False, **options: Any) -> DataFrame:  # noqa: N802
        """Run to the end of the input and return the output as a DataFrame, held by Spark like a local checkpoint.

        progress: show rows in, rows/s and backlog on the screen meanwhile. Options as for ``start``."""
        return flux.to_df(self, spark=spark, progress=progress, **options)

    def collect(self, spark: SparkSession | None = None, **options: Any) -> list[Any]:
        """Run to the end of the input; the output as a list of Spark's Rows. Options as for ``start``."""
        return self.toDF(spark=spark, **options).collect()

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
        """Print what would run: sources, stages with keys, partitions and replicas, and policies. Options as for
        ``start``; raises what that would raise for a flow that does not fit."""
        print(flux.explain(self, spark=spark, **options))

    def __repr__(self) -> str:
        return f"<flow {self.stage.name}({', '.join(repr(given) for given in self.inputs)})>"


def _importable(stage: Stage) -> bool:
    """Whether another process finds this very stage by module and name."""
    name = str(stage.__module__)
    by_value: set[str] = set()
    for pickler in ("cloudpickle", "pyspark.cloudpickle"):
        listed = getattr(sys.modules.get(pickler), "list_registry_pickle_by_value", set)
        by_value |= listed()
    if name == "__main__" or any(name == shipped or name.startswith(f"{shipped}.") for shipped in by_value):
        return False
    try:
        return operator.attrgetter(stage.__qualname__)(sys.modules.get(name)) is stage
    except AttributeError:
        return False


def _is_dataframe(given: Any) -> bool:
    return any(t.__name__ == "DataFrame" and t.__module__.startswith("pyspark.sql") for t in type(given).__mro__)


def _is_input(given: Any) -> bool:
    return isinstance(given, Flow | Source) or _is_dataframe(given)


def _node(given: Any) -> Flow | Source:
    if isinstance(given, Flow | Source):
        return given
    if _is_dataframe(given):
        known = getattr(given, "_flux_source", None)
        if known is None:
            known = Source("DataFrame", dataframe=given)
            given._flux_source = known  # one DataFrame that feeds two stages is read once
        return known
    raise UsageError(f"an input must be a DataFrame, a flow or a source, got {type(given).__name__}")
