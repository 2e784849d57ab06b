"""``flow.writeStream``: Spark's names for the sinks that there are, and a sentence for each that is missing."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from harness import dataframe
from one_worker import SCHEMA

import flux
from flux.connectors.files.parquet_sink import ParquetFiles
from flux.dataflow.sink import FlowTo, FunctionSink
from flux.dataflow.source import StreamOptions, StreamSource


@flux.stage(key="x")
class Totals(flux.Aggregate):
    n = flux.count()


@flux.stage
def same(batch: Any) -> Any:
    return batch


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FlowTo, dict[str, Any]]]:
    """Collect the flows and options that would be started."""
    calls: list[tuple[FlowTo, dict[str, Any]]] = []
    monkeypatch.setattr(flux, "start", lambda flow, **options: calls.append((flow, options)))
    return calls


def flow() -> Any:
    return same(dataframe(SCHEMA))


def test_a_parquet_program_of_spark_runs(started: list[Any], tmp_path: Any) -> None:
    writer = flow().writeStream.format("parquet").queryName("q").outputMode("append")
    writer.option("checkpointLocation", "/data/c").option("rollBytes", "1m").option("roll_every", "2s").option(
        "partitions", "2"
    ).option("spark.flux.log.maxBytes", "64m").start(str(tmp_path))
    ((to, options),) = started
    assert options == {"queryName": "q", "checkpointLocation": "/data/c", "log_max_bytes": "64m"}
    assert isinstance(to.sink, ParquetFiles)
    plain = flow().to_parquet(str(tmp_path), partitions=2, roll_bytes="1m", roll_every="2s")
    assert repr(to.sink) == repr(plain.sink)
    assert to.flow.stage.partitions == 2
    assert to.flow.stage._args == plain.flow.stage._args


def test_the_path_of_one_start_is_not_that_of_the_next(started: list[Any], tmp_path: Any) -> None:
    """Keep no path for the next start, as Spark's writer does not."""
    writer = flow().writeStream.format("parquet")
    writer.start(str(tmp_path / "one"))
    writer.start(str(tmp_path / "two"))
    for name, (to, _) in zip(("one", "two"), started, strict=True):
        assert str(tmp_path / name) in repr(to.sink)
    with pytest.raises(flux.UsageError, match="needs option"):
        writer.start()


def test_files_go_into_folders_by_columns(started: list[Any], tmp_path: Any) -> None:
    flow().writeStream.format("parquet").partitionBy("x").start(str(tmp_path))
    flow().writeStream.start(str(tmp_path), "parquet", partitionBy=["x"])
    assert [to.sink.destination() for to, _ in started] == [f"parquet files in {tmp_path} by x"] * 2


def test_foreach_batch_calls_a_function(started: list[Any]) -> None:
    def write(batch: Any, position: Any) -> None: ...

    flow().writeStream.foreachBatch(write).start(queryName="q")
    ((to, options),) = started
    assert isinstance(to.sink, FunctionSink)
    assert options["queryName"] == "q"
    flow().writeStream.foreachBatch(lambda batch, position, context: None, committed=lambda context: 0).start()
    assert started[1][0].sink.traits.exactly_once


def test_a_topic_is_written_with_the_options_of_spark_and_of_flux(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(flux, "to_kafka", lambda *given, **options: called.append((given[1:], options)))
    writer = flow().writeStream.format("kafka").option("kafka.bootstrap.servers", "host:9092").option("topic", "out")
    writer.options(key="x", topicPartitions="3").start()
    assert called == [(("out", "host:9092"), {"key": "x", "topic_partitions": 3})]


def test_the_output_mode_is_that_of_the_aggregate_at_the_end(started: list[Any], tmp_path: Any) -> None:
    totals = Totals(dataframe(SCHEMA))
    totals.writeStream.outputMode("update").format("parquet").start(str(tmp_path))
    to, _ = started[0]
    (before,) = to.flow.inputs
    assert before.stage.output_mode == "update"
    assert before.stage.make().__class__ is Totals.target
    assert totals.stage.output_mode == "complete", "the flow itself is as it was"
    for mode, why in (
        ("append", "is an aggregate without a window, whose groups change"),
        ("newest", "expected append, update or complete"),
    ):
        with pytest.raises(flux.UsageError, match=why):
            totals.writeStream.outputMode(mode)
    with pytest.raises(flux.UsageError, match="stage same is no aggregate"):
        flow().writeStream.outputMode("complete")


@pytest.fixture
def unresolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flows be written without a session, also after tests that have made one."""
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


def timed() -> Any:
    schema = pa.schema([("x", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
    return flux.source(lambda partition: iter(()), schema, 1, "rows").withWatermark("ts", "10 seconds")


def test_rows_that_change_are_not_appended_and_those_that_come_once_are_no_update(unresolved: None) -> None:
    counts = flux.stage(key="x", window=flux.window("ts", "1 minute"))(Totals.target)(timed())
    changing = [
        flux.top(timed(), 3, by="x"),
        same(flux.last(timed(), key="x", by="ts")),
        same(counts.in_mode("update")),
        timed().union(flux.top(timed(), 3, by="x")),
    ]
    for rows in changing:
        with pytest.raises(
            flux.UsageError, match=r"outputMode\('append'\): rows of stage .* take the places of earlier ones"
        ):
            rows.writeStream.outputMode("append")
        rows.writeStream.outputMode("update")
    once = [
        timed().join(timed(), "x", ttl="1 hour"),
        flux.top(timed(), 3, by="x", window=flux.window("ts", "1 minute")),
        flux.asof_join(timed(), timed(), on="x"),
    ]
    for rows in once:
        with pytest.raises(
            flux.UsageError, match=r"outputMode\('update'\): stage .* gives each row once, when it is final"
        ):
            rows.writeStream.outputMode("update")
        rows.writeStream.outputMode("append")
    for rows in (flow(), timed(), flux.dedup(timed(), key="x", ttl="1 hour"), same(timed())):
        for mode in ("append", "update"):  # the same in Spark
            rows.writeStream.outputMode(mode)


def test_an_output_mode_is_chosen_for_an_aggregate_or_an_operator_of_ones_own(unresolved: None) -> None:
    @flux.stage
    class Own(flux.Operator):
        def process(self, batch: Any) -> Any:
            return batch

    for rows, name in (
        (timed().join(timed(), "x", ttl="1 hour"), "rows.join.rows"),
        (flux.top(timed(), 3, by="x"), "rows.top"),
        (flux.last(timed(), key="x", by="ts"), "rows.last"),
        (flow(), "same"),
    ):
        for mode in ("append", "update", "complete"):
            with pytest.raises(
                flux.UsageError, match=rf"in_mode\('{mode}'\): .* stage {name} is no aggregate at the end"
            ):
                rows.in_mode(mode)
    with pytest.raises(flux.UsageError, match="there is none at the end of this flow"):
        timed().union(timed()).in_mode("update")
    with pytest.raises(flux.UsageError, match=r"in_mode\('append'\): stage Totals is an aggregate without a window"):
        Totals(flow()).in_mode("append")
    with pytest.raises(flux.UsageError, match="in_mode: expected append, update or complete, got 'newest'"):
        Totals(flow()).in_mode("newest")
    with pytest.raises(flux.UsageError, match="stage Own has no window: expected complete or update"):
        Own(flow()).in_mode("append")
    assert Own(flow()).in_mode("update").stage.output_mode == "update"
    assert Totals(flow()).in_mode("update").stage.output_mode == "update"


def test_a_trigger_is_that_of_the_streaming_dataframe(started: list[Any], tmp_path: Any) -> None:
    source = StreamSource("clicks", SCHEMA, object(), StreamOptions())  # type: ignore[arg-type]
    twice = same(source)
    both = same(twice, same(twice, source))
    both.writeStream.trigger(availableNow=True).format("parquet").start(str(tmp_path))
    (files,) = started[0][0].flow.inputs
    first, second = files.inputs
    assert second.inputs[0] is first, "one stage that feeds two is one still"
    assert first.inputs == [second.inputs[1]]
    assert first.inputs[0].how.trigger == (("availableNow", True),)
    assert first.inputs[0].dataframe is source.dataframe
    assert source.how.trigger == (), "another query of the same flow has no trigger"
    assert both.inputs[0].inputs == [source]
    given = StreamSource("clicks", SCHEMA, object(), StreamOptions(trigger=(("availableNow", True),)))  # type: ignore[arg-type]
    with pytest.raises(flux.UsageError, match="source clicks has another trigger already"):
        same(given).writeStream.trigger(processingTime="1 second").format("parquet").start(str(tmp_path))
    with pytest.raises(flux.UsageError, match="there is nothing to trigger"):
        flow().writeStream.trigger(availableNow=True).format("parquet").start(str(tmp_path))
    for wrong in ({"continuous": "1 second"}, {"availableNow": False}, {}, {"processingTime": 1}):
        with pytest.raises(flux.UsageError, match="expected processingTime"):
            flow().writeStream.trigger(**wrong)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda w: w.format("console"), r"one of parquet, kafka, got 'console'; flow\.show\(\)"),
        (lambda w: w.format("memory"), r"query\.rows\(\) .* while the query runs; where the input ends, flow\.toDF"),
        (lambda w: w.format("delta"), r"flow\.to\(sink\) write anywhere else"),
        (lambda w: w.format(3), "got 3"),
        (lambda w: w.start(), r"say where rows go, with format\(...\), one of parquet, kafka"),
        (lambda w: w.format("parquet").start(), r"needs option\('path'"),
        (
            lambda w: w.format("parquet").start("/x", mergeSchema=True),
            "has no option 'mergeSchema'; it has path, partitions, rollBytes, rollEvery, checkpointLocation, and settings of "
            "Flux such as spark.flux.workers$",
        ),
        (
            lambda w: w.option("path", "/x").format("parquet").start("/x"),
            r"option\('path', '/x'\) and start\('/x'\) both",
        ),
        (lambda w: w.option("rollBytes", 1).option("roll_bytes", 2).format("parquet").start("/x"), "'rollBytes', too"),
        (
            lambda w: w.format("kafka").start(schemaRegistry="x"),
            "topic, key, value, .* registerSchemas, .* topicPartitions",
        ),
        (lambda w: w.format("flux"), r"flow\.to_readers\(\) keeps the output for spark\.readStream"),
        (lambda w: w.format("kafka").start(topic="t"), "needs option.'kafka.bootstrap.servers'"),
        (lambda w: w.format("kafka").option("kafka.bootstrap.servers", "h:1").start(), r"needs option\('topic'"),
        (lambda w: w.format("kafka").option("kafka.security.protocol", "SSL").start(topic="t"), "for TLS and logins"),
        (lambda w: w.format("parquet").option("spark.flux.worker", 1).start("/x"), "no setting 'spark.flux.worker'"),
        (lambda w: w.format("parquet").start("/x", partitions="many"), "must be a whole number, got 'many'"),
        (lambda w: w.option("Path", "/x").option("path", "/y").format("parquet").start(), "given twice"),
        (lambda w: w.option("", 1), "name of an option must be text"),
        (lambda w: w.queryName(" "), "text that is not empty"),
        (lambda w: w.foreachBatch(print).format("parquet").start("/x"), "are two sinks"),
        (lambda w: w.foreachBatch(3).start(), "wants a function"),
        (lambda w: w.foreachBatch(lambda b, p: None).start(path="/x"), "foreachBatch has no option 'path'"),
        (lambda w: w.foreach(print), "use foreachBatch"),
        (lambda w: w.partitionBy(3), "must be the name of a column"),
        (lambda w: w.foreachBatch(lambda b, p: None).start(partitionBy="x"), "only format.'parquet'. puts rows into"),
        (lambda w: w.toTable("t"), "no tables"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(call: Any, why: str, started: list[Any]) -> None:
    with pytest.raises(flux.UsageError, match=why):
        call(flow().writeStream)
    assert not started


def test_flux_stream_refuses_what_it_cannot_take() -> None:
    for given, options, why in (
        (None, {}, "expected a streaming DataFrame"),
        (3, {}, "expected a streaming DataFrame"),
        ("x BIGINT, x BIGINT", {}, "column 'x' twice"),
        ("x BIGINT", {"checkpoint": "/c"}, "checkpoint belongs to the streaming query that writes here"),
        ("x BIGINT", {"output_mode": "update"}, "output_mode belongs to the streaming query"),
        ("x BIGINT", {"name": " "}, "printable text"),
        ("x BIGINT", {"name": "a\nb"}, "printable text"),
    ):
        with pytest.raises(flux.FluxError, match=why):
            flux.stream(given, **options)
    assert flux.stream("x BIGINT", name="clicks 東京").name == "clicks 東京"
