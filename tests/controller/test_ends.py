"""Flows that would wait for the end of an input that never ends are refused in a sentence (design: public-api)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from harness import dataframe

import flux
from controller.planning.checks import check_ends
from controller.planning.compiler import compile_plan
from flux.dataflow.source import StreamOptions, StreamSource
from flux.settings import Settings

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


@flux.stage(key="k")
class Sums(flux.Aggregate):
    total = flux.sum("v")


@flux.stage
def same(batch: Any) -> Any:
    return batch


class Reads:
    def __init__(self, endless: bool) -> None:
        self.endless = endless

    def __call__(self, partition: int) -> Iterator[Any]:
        yield from ()


def source(endless: bool = True) -> Any:
    return flux.source(Reads(endless), SCHEMA, 2, "clicks")


def stream(**how: Any) -> Any:
    return StreamSource("ticks", SCHEMA, object(), StreamOptions(**how))  # type: ignore[arg-type]


def check(*flows: Any, collect: int = 0, goes_on: bool = False) -> None:
    check_ends(compile_plan(flows, Settings.of(), lambda schema: schema, "q", b"", collect), goes_on)


NOW = {"trigger": (("availableNow", True),)}


@pytest.mark.parametrize(
    ("given", "goes_on", "why"),
    [
        (source(), False, "source clicks never ends"),
        (stream(), False, "source ticks never ends"),
        (flux.stream(SCHEMA, name="written"), False, "source written never ends"),
        (stream(**NOW), True, r"source ticks goes on with the next start \(checkpointLocation\)"),
    ],
)
def test_what_waits_for_the_end_is_refused(given: Any, goes_on: bool, why: str) -> None:
    table = same(same(dataframe(SCHEMA)), same(given))  # one endless input of several, some way before
    with pytest.raises(flux.UsageError, match=rf"toDF\(\) and keep_output.*{why}.*to_readers.*query\.rows.*a sink"):
        check(table, collect=1, goes_on=goes_on)
    for flow in (Sums(table).to_readers(), same(Sums(table)), Sums(table).to_parquet("/x")):
        with pytest.raises(
            flux.UsageError, match=rf'stage Sums has output_mode="complete".*{why}.*output_mode="update"'
        ):
            check(flow, goes_on=goes_on)
    check(Sums(table), goes_on=goes_on)  # no stage waits for its rows
    check(flux.stage(key="k", output_mode="update")(Sums.target)(table).to_readers(), goes_on=goes_on)
    check(same(table).to_readers(), goes_on=goes_on)


def test_final_windows_of_an_input_without_end_are_refused() -> None:
    schema = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
    endless = flux.source(Reads(True), schema, 2, "clicks")
    declared = flux.stage(key="k", window=flux.window("ts", "1 minute"))
    counts = type("Counts", (flux.Aggregate,), {"n": flux.count()})
    with pytest.raises(
        flux.UsageError,
        match=r"stage Counts has windows.*source clicks has no watermark.*clicks\.withWatermark.*output_mode=\"update\"",
    ):
        check(declared(counts)(endless).to_readers())
    check(declared(counts)(flux.source(Reads(False), schema, 2, "clicks")).to_readers())
    update = flux.stage(key="k", window=flux.window("ts", "1 minute"), output_mode="update")
    check(update(counts)(endless).to_readers())


@pytest.mark.parametrize("given", [source(endless=False), stream(**NOW), dataframe(SCHEMA)])
def test_an_input_that_ends_is_waited_for(given: Any) -> None:
    check(Sums(given), collect=1)
    check(Sums(given).to_readers())


def test_an_aggregate_that_gives_something_by_itself_may_do_so() -> None:
    @flux.stage(key="k")
    class Timed(flux.Aggregate):
        total = flux.sum("v")

        def on_timer(self, name: str) -> Any:
            return super().finish()

    @flux.stage(key="k")
    class Now(flux.Aggregate):
        total = flux.sum("v")

        def process(self, batch: pa.RecordBatch) -> Any:
            super().process(batch)
            return super().finish()

    for stage in (Timed, Now):
        check(stage(source()).to_readers())


def test_sources_without_end_say_so(tmp_path: Any) -> None:
    from flux.connectors.kafka.source import KafkaReader
    from spark_integration.datasource.stream import StreamReading

    assert flux.files(tmp_path, schema="k BIGINT").reader.endless  # type: ignore[attr-defined]
    assert KafkaReader.endless
    assert StreamReading.endless
