"""``flow.writeStream``: the sinks of a flow under the names that Structured Streaming has for them (design: public-api).

A thin layer. Features of Spark that Flux does not have are refused by name, with their replacement: a program that is carried
over must not run with another meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flux
from flux.arguments import partition_names
from flux.dataflow.flow import OUTPUT_MODES, WINDOW_MODES, Flow, Stage, check_mode
from flux.dataflow.relations.lookups import LookupSource
from flux.dataflow.row_operators import AS_THEY_COME, CHANGES, ONCE
from flux.dataflow.sink import FlowTo
from flux.dataflow.source import Source, StreamSource, checked_trigger
from flux.errors import UsageError
from flux.operators.aggregate import Aggregate
from flux.settings import PREFIX, TABLE

#: The options of each format. Capitals and underscores make no difference: ``rollBytes`` is ``roll_bytes``.
FORMATS = {
    "parquet": ("path", "partitions", "roll_bytes", "roll_every"),
    "kafka": (
        "topic", "key", "value", "format", "schema", "schemas", "register_schemas", "headers", "timestamp", "partition",
        "partitioner", "guarantee", "compression", "partitions", "topic_partitions", "timeout", "tentative",
    ),
}  # fmt: skip
#: Options that are numbers. They may be given as text, as Spark's often are.
NUMBERS = ("partitions", "topic_partitions")
SERVERS = "kafka.bootstrap.servers"
#: Formats of Spark that Flux does not have, and their replacements.
OTHERS = {
    "console": "flow.show() prints the output of a flow that ends; foreachBatch(function) gets each batch",
    "memory": "flow.to_readers() and query.rows() give the output while the query runs; where the input ends, flow.toDF() does",
    "flux": "flow.to_readers() keeps the output for spark.readStream.format('flux')",
    "noop": "end in a stage without a schema, or use foreachBatch",
    "csv": "format('parquet') writes files, and foreachBatch(function) anything",
    "json": "format('parquet') writes files, format('kafka') JSON records, and foreachBatch(function) anything",
}


class FlowWriter:
    """A builder of the query that ``start()`` runs. Each call returns the builder itself, as in Spark."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._format: str | None = None
        self._function: Callable[..., Any] | None = None
        self._exactly: dict[str, Any] = {}
        self._name: str | None = None
        self._mode: str | None = None
        self._trigger: tuple[tuple[str, Any], ...] = ()
        self._options: dict[str, Any] = {}
        self._partition_by: tuple[str, ...] = ()

    def format(self, source: str) -> FlowWriter:
        """Choose the format: "parquet" or "kafka"."""
        if source not in FORMATS:
            instead = OTHERS.get(source, "") if isinstance(source, str) else ""
            raise UsageError(
                f"writeStream.format: expected one of {', '.join(FORMATS)}, got {source!r:.100}"
                + (f"; {instead}" if instead else ". foreachBatch(function) and flow.to(sink) write anywhere else")
            )
        self._format = source
        return self

    def option(self, key: str, value: Any) -> FlowWriter:
        """Set an option of the format, ``checkpointLocation``, or a setting of Flux such as ``spark.flux.workers``."""
        if not isinstance(key, str) or not key:
            raise UsageError(f"writeStream.option: the name of an option must be text, got {key!r:.100}")
        self._options[key] = value
        return self

    def options(self, **options: Any) -> FlowWriter:
        for key, value in options.items():
            self.option(key, value)
        return self

    def queryName(self, queryName: str) -> FlowWriter:  # noqa: N802, N803
        if not isinstance(queryName, str) or not queryName.strip():
            raise UsageError(f"writeStream.queryName: expected text that is not empty, got {queryName!r:.100}")
        self._name = queryName
        return self

    def outputMode(self, outputMode: str) -> FlowWriter:  # noqa: N802, N803
        """Choose the output of an aggregate at the end of the flow, also if conditions and columns are behind it: "append": each
        group once, when the watermark has passed its window; "update": the changed groups after every step; or "complete": all
        groups once, at the end of the input. Rows of any other stage are appended; those of ``flux.top`` without a window and of
        ``flux.last`` are "update", because later rows take the places of earlier ones."""
        stage = self._flow._own_stage
        aggregates = not stage.passes and isinstance(stage.make(), Aggregate)
        if aggregates or outputMode not in ("append", "update"):
            check_output_mode(stage, outputMode, "writeStream.outputMode")
        elif outputMode == "append" and self._flow._gives == CHANGES:
            raise UsageError(
                f"writeStream.outputMode('append'): rows of stage {stage.name} take the places of earlier ones. Say 'update' or "
                "leave it out, and keep the newest row of each key by an upsert; ranks within windows are appended"
            )
        elif outputMode == "update" and self._flow._gives == ONCE:
            raise UsageError(
                f"writeStream.outputMode('update'): stage {stage.name} gives each row once, when it is final: leave it out"
            )
        self._mode = outputMode if aggregates else None
        return self

    def trigger(self, **trigger: Any) -> FlowWriter:
        """Choose when Spark makes the next batch for ``flux.stream(streaming_df)``: processingTime="10 seconds" or
        availableNow=True. Rows of other sources flow all the time."""
        self._trigger = checked_trigger(trigger, "writeStream.trigger")
        return self

    def foreachBatch(self, func: Callable[..., Any], **exactly: Any) -> FlowWriter:  # noqa: N802
        """Call ``func(batch, position)`` in the workers with a pyarrow.RecordBatch and its position: at least once, with the same
        position when it comes again; exactly once with ``committed=...``. As ``flow.foreach_batch``."""
        self._function, self._exactly = func, exactly
        return self

    def foreach(self, *_: Any) -> FlowWriter:
        raise UsageError("writeStream.foreach calls for each row; use foreachBatch(function), with batch.to_pylist()")

    def partitionBy(self, *cols: Any) -> FlowWriter:  # noqa: N802
        """Put the rows of parquet files into folders by the values of these columns: names, or one list of them."""
        self._partition_by = partition_names(cols[0] if len(cols) == 1 else cols)
        return self

    def toTable(self, *_: Any, **__: Any) -> Any:  # noqa: N802
        raise UsageError("writeStream.toTable: there are no tables; format('parquet') writes files into a folder")

    def start(
        self,
        path: str | None = None,
        format: str | None = None,
        outputMode: str | None = None,  # noqa: N803
        partitionBy: Any = None,  # noqa: N803
        queryName: str | None = None,  # noqa: N803
        **options: Any,
    ) -> Any:
        """Check everything, and run in the background; returns the query."""
        if format is not None:
            self.format(format)
        if outputMode is not None:
            self.outputMode(outputMode)
        if partitionBy is not None:
            self.partitionBy(partitionBy)
        if queryName is not None:
            self.queryName(queryName)
        self.options(**options)
        given, settings, location = self._sorted_options()
        if path is not None:
            if "path" in given:
                raise UsageError(
                    f"writeStream: option('path', {given['path']!r:.90}) and start({path!r:.90}) both say where; give one"
                )
            given["path"] = path  # for this start alone
        ended = self._ended(self._flow_in_mode(), given)
        if self._trigger:
            ended = FlowTo(self._triggered(ended.flow), ended.sink)
        return flux.start(ended, queryName=self._name, checkpointLocation=location, **settings)

    # ---- steps of start()

    def _sorted_options(self) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Return the options of the format, the settings of Flux by keyword, and the checkpoint location."""
        keywords = {f"{PREFIX}{setting.key}".lower(): setting.keyword for setting in TABLE}
        given: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        location = None
        seen: dict[str, str] = {}
        for key, value in self._options.items():
            lower = key.lower()
            if (other := seen.setdefault(lower.replace("_", ""), key)) != key:
                raise UsageError(f"writeStream: option {key!r:.100} is given twice, as {other!r:.100}, too")
            if lower == "checkpointlocation":
                location = value
            elif lower in keywords:
                settings[keywords[lower]] = value
            elif lower.startswith(PREFIX):
                raise UsageError(f"writeStream: there is no setting {key!r:.100}; docs/settings.md lists them")
            else:
                given[lower] = value
        return given, settings, location

    def _flow_in_mode(self) -> Flow:
        if self._mode is None or self._mode == self._flow._own_stage.output_mode:
            return self._flow
        return self._flow._in_mode(self._mode)

    def _ended(self, flow: Flow, given: dict[str, Any]) -> FlowTo:
        if self._partition_by and (self._function is not None or self._format not in (None, "parquet")):
            raise UsageError("writeStream.partitionBy: only format('parquet') puts rows into folders by columns")
        if self._function is not None:
            if self._format is not None:
                raise UsageError(
                    f"writeStream: foreachBatch and format({self._format!r}) are two sinks; give one of them"
                )
            self._refuse_others("foreachBatch", given, ())
            return flow.foreach_batch(self._function, **self._exactly)
        if self._format is None:
            raise UsageError(
                f"writeStream: say where rows go, with format(...), one of {', '.join(FORMATS)}, or foreachBatch(function)"
            )
        servers = given.pop(SERVERS, None)
        known = {name.replace("_", ""): name for name in FORMATS[self._format]}
        self._refuse_others(f"format({self._format!r})", given, known)
        options = {known[key.replace("_", "")]: value for key, value in given.items()}
        for name in NUMBERS:
            if isinstance(options.get(name), str):
                options[name] = _number(name, options[name])
        if self._format == "parquet":
            return flow.to_parquet(self._needed(options, "path"), partitionBy=self._partition_by or None, **options)
        if servers is None:
            raise UsageError(f"writeStream.format('kafka') needs option({SERVERS!r}, 'host:9092')")
        return flow.to_kafka(self._needed(options, "topic"), servers, **options)

    def _needed(self, options: dict[str, Any], name: str) -> Any:
        value = options.pop(name, None)
        if value is None:
            raise UsageError(f"writeStream.format({self._format!r}) needs option({name!r}, ...)")
        return value

    def _refuse_others(self, what: str, given: dict[str, Any], known: Any) -> None:
        spelled = {key.lower(): key for key in self._options}
        for key in given:
            if key.replace("_", "") in known:
                continue
            there = [*(map(_as_in_spark, known.values()) if isinstance(known, dict) else known), "checkpointLocation"]
            if self._format == "kafka":
                there.insert(0, SERVERS)
                if key.startswith("kafka."):
                    raise UsageError(
                        f"writeStream.{what} has no option {spelled[key]!r:.100}: for TLS and logins call flow.to_kafka(..., "
                        "security_protocol=...), which takes the names of kafka-python"
                    )
            raise UsageError(
                f"writeStream.{what} has no option {spelled.get(key, key)!r:.100}; it has {', '.join(there)}, and settings of "
                f"Flux such as {PREFIX}workers"
            )

    def _triggered(self, flow: Flow) -> Flow:
        """Return a copy of the flow with the trigger at its streaming DataFrames; the given flow stays as it is."""
        copies: dict[int, Any] = {}  # by id: an input that feeds several stages is copied once

        def copy(given: Flow | Source) -> Any:
            if id(given) in copies:
                return copies[id(given)]
            if isinstance(given, Source):
                copies[id(given)] = self._source(given)
            else:
                made = copies[id(given)] = given.copied([])  # before its inputs: a cycle is found later
                made.inputs.extend(map(copy, given.inputs))
            return copies[id(given)]

        triggered: Flow = copy(flow)
        if not any(_has_batches(each) for each in copies.values()):
            raise UsageError(
                "writeStream.trigger: rows of this flow come without batches, so there is nothing to trigger; leave it out. It "
                "is for flux.stream(streaming_df)"
            )
        return triggered

    def _source(self, given: Source) -> Source:
        if not isinstance(given, StreamSource) or not _has_batches(given):
            return given
        if given.how.trigger not in ((), self._trigger):
            raise UsageError(
                f"writeStream.trigger: source {given.name} has another trigger already; give it in one place"
            )
        return StreamSource(given.name, given.declared, given.dataframe, replace(given.how, trigger=self._trigger))


def _has_batches(given: Any) -> bool:
    """Tell whether an input is a streaming DataFrame, whose batches a trigger begins."""
    return isinstance(given, StreamSource) and given.dataframe is not None and not isinstance(given, LookupSource)


def in_mode(flow: Flow, output_mode: str) -> Flow:
    """Return a flow with another output mode of its last stage. UsageError: the stage has none, or not this one."""
    check_output_mode(flow._own_stage, output_mode, "in_mode", operators=flow._gives == AS_THEY_COME)
    return flow._in_mode(output_mode)


def check_output_mode(stage: Stage, mode: Any, called: str, operators: bool = False) -> None:
    """Raise UsageError unless a stage is an aggregate that has this output mode. ``operators``: an operator of the user's may go
    by its mode, too."""
    if mode not in WINDOW_MODES:
        raise UsageError(f"{called}: expected {', '.join(WINDOW_MODES[:-1])} or {WINDOW_MODES[-1]}, got {mode!r:.100}")
    aggregates = not stage.passes and isinstance(stage.make(), Aggregate)
    if operators and not (aggregates or stage.passes) and inspect.isclass(stage.target):
        if mode not in OUTPUT_MODES:
            raise UsageError(
                f"{called}({mode!r}): stage {stage.name} has no window: expected {' or '.join(OUTPUT_MODES)}"
            )
        return
    if not aggregates:
        raise UsageError(
            f"{called}({mode!r}): an output mode is for an aggregate, whose groups change, and "
            + ("there is none" if stage.passes else f"stage {stage.name} is no aggregate")
            + " at the end of this flow: leave it out"
        )
    if mode == WINDOW_MODES[0] and stage.window is None:
        raise UsageError(
            f"{called}({mode!r}): stage {stage.name} is an aggregate without a window, whose groups change. 'update' gives the "
            "changed groups after every step, 'complete' all groups once, at the end of the input"
        )
    check_mode(mode, stage.window)


def _as_in_spark(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"writeStream: option {name!r} must be a whole number, got {value!r:.100}") from None
