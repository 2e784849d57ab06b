"""Structured Streaming as a source: a streaming DataFrame, or an input that a streaming query writes into (design:
micro-batches)."""

from __future__ import annotations

import os
from typing import Any

from flux.calls import checked
from flux.dataflow.given import check_columns
from flux.dataflow.sources import Source, StreamOptions, StreamSource
from flux.errors import UsageError

#: Kinds of ``DataStreamWriter.trigger``. ``continuous`` and ``realTime`` run no Python sink.
TRIGGERS = ("processingTime", "availableNow")
OUTPUT_MODES = ("append", "update", "complete")


@checked("flux.stream")
def stream(
    streaming: Any,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    trigger: dict[str, Any] | None = None,
    output_mode: str = "append",
    name: str | None = None,
) -> Source:
    """Make a source of the rows of a streaming query of Spark. Each row counts once: by batch, partition and row, also where
    Spark tries a task again, repeats a batch after a restart, or cuts batches into other numbers of partitions.

    streaming    a streaming DataFrame (``spark.readStream...``). It is started and stopped together with the flow. Or a
                 schema (DDL, StructType, pyarrow): then start a streaming query yourself that writes into the flow,
                 ``df.writeStream.format("flux").option("query", name of the flow's query)``
    checkpoint   Spark's checkpoint location of the streaming query. Default: in the ``checkpointLocation`` of the flow's query,
                 or without that a temporary one. The rows that it counts as done are in the state of the flow's query, so a
                 checkpoint that has batches already needs the ``checkpointLocation`` of the query that has read them
    trigger      as for ``DataStreamWriter.trigger``: {"processingTime": "1 second"} or {"availableNow": True}. Default: the next
                 batch begins when the one before has ended
    output_mode  "append", "update" or "complete", where the streaming DataFrame aggregates
    name         name of the source in reports, and for ``option("input", name)``"""
    called = _name(name)
    if _is_dataframe(streaming):
        if not streaming.isStreaming:
            raise UsageError(
                "flux.stream: expected a streaming DataFrame (spark.readStream), got a batch DataFrame: call the stage with it"
            )
        how = StreamOptions(
            _checkpoint(checkpoint), checked_trigger(trigger, "flux.stream, trigger"), _output_mode(output_mode)
        )
        return StreamSource(called, streaming, streaming, how)
    given = [what for what, value in (("checkpoint", checkpoint), ("trigger", trigger)) if value is not None]
    if given or output_mode != "append":
        raise UsageError(
            f"flux.stream: {' and '.join(given) or 'output_mode'} belongs to the streaming query that writes here: "
            "df.writeStream.format('flux') takes it"
        )
    if streaming is None or not (isinstance(streaming, str) or hasattr(streaming, "names")):
        raise UsageError(
            "flux.stream: expected a streaming DataFrame (spark.readStream...load()), or the schema of what a streaming query "
            f"will write; got {type(streaming).__name__}"
        )
    check_columns(f"source {called}", streaming)
    return StreamSource(called, streaming)


def _is_dataframe(given: Any) -> bool:
    return any(t.__name__ == "DataFrame" and t.__module__.startswith("pyspark.sql") for t in type(given).__mro__)


def _name(name: Any) -> str:
    if name is None:
        return "stream"
    if not isinstance(name, str) or not name.strip() or len(name) > 200 or not name.isprintable():
        raise UsageError(f"flux.stream: name must be printable text of up to 200 characters, got {name!r:.250}")
    return name


def _checkpoint(checkpoint: Any) -> str | None:
    if checkpoint is None:
        return None
    text = os.fspath(checkpoint) if isinstance(checkpoint, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"flux.stream: checkpoint must be the path of a directory, got {checkpoint!r:.200}")
    return text


def checked_trigger(trigger: Any, what: str) -> tuple[tuple[str, Any], ...]:
    if trigger is None:
        return ()
    fits = isinstance(trigger, dict) and len(trigger) == 1 and next(iter(trigger)) in TRIGGERS
    (kind, value) = next(iter(trigger.items())) if fits else ("", None)
    if not fits or not (isinstance(value, str) and value if kind == "processingTime" else value is True):
        raise UsageError(
            f'{what}: expected processingTime="1 second" or availableNow=True, got {trigger!r:.200}. Other triggers of Spark run '
            "no Python sink"
        )
    return ((kind, value),)


def _output_mode(mode: Any) -> str:
    if mode not in OUTPUT_MODES:
        raise UsageError(f"flux.stream: output_mode must be one of {', '.join(OUTPUT_MODES)}; got {mode!r:.200}")
    return str(mode)
