"""``availability`` in a plan: the stages and sources that a bound reaches, and plain refusals of flows that cannot have one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.availability import told_unused
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.availability import Availability
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource, StreamSource
from flux.errors import UsageError
from flux.operators.tentative import BARRIER
from flux.settings import Settings
from spark_integration.query.same_plan import description

READINGS = pa.schema([("ts", pa.timestamp("us", "UTC")), ("site", pa.string()), ("n", pa.int64())])
DAY_S, MS = 86_400, 1000


def readings(name: str = "readings", **given: Any) -> Any:
    read = flux.source(lambda partition, start: [], schema=READINGS, partitions=3, name=name)
    return read.withWatermark("ts", "0 seconds", **given)


@flux.stage(key="site", window=flux.window("ts", "1 second"))
class PerSite(flux.Aggregate):
    n = flux.sum("n")


@flux.stage(key="site", window=flux.window("window_end", "2 seconds"))
class Over(flux.Aggregate):
    n = flux.sum("n")


@flux.stage(schema=READINGS, event_time="ts")
def cleaned(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class OfTheClock(flux.Operator):
    """An operator with results that no event time decides, like windows of processing time."""

    _flux_tentative = BARRIER

    def process(self, batch: pa.RecordBatch) -> Any:
        return batch


by_clock = flux.stage(schema=READINGS, event_time="ts", name="by_clock")(OfTheClock)


class Shown(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: Any) -> None: ...


def planned(*flows: Any, **options: Any) -> Plan:
    return compile_plan(list(flows), Settings.of(None, **options), lambda schema: schema, "q", b"")


def refusal(*flows: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as raised:
        planned(*flows, **options)
    return str(raised.value)


def found(plan: Plan) -> dict[str, Availability | None]:
    return {stage.name: stage.availability for stage in plan.stages}


# ---- reach of a bound


def test_without_it_no_stage_has_any() -> None:
    plan = planned(PerSite(cleaned(readings())))
    assert set(found(plan).values()) == {None}
    assert not plan.sources[0].may_be_silent


def test_options_that_say_how_it_is_kept_are_told_where_there_is_none() -> None:
    options = {"availability_failure": "delay", "availability_overflow": "forfeit"}
    without, own = PerSite(readings()), PerSite(readings()).withStage(availability="3s")
    told = told_unused(planned(without, **options), options)
    assert told is not None
    assert told.startswith(
        "availability_failure, availability_overflow without availability: no stage of this query has"
    )
    assert told_unused(planned(without), {"replicas": 2}) is None
    assert told_unused(planned(own), {"availability_failure": "delay"}) is None


def test_a_bound_of_the_query_is_that_of_all_its_stages() -> None:
    plan = planned(PerSite(cleaned(readings())), availability="3s", availability_failure="delay")
    site = Availability(3_000 * MS, "delay")
    assert found(plan) == {"cleaned": Availability(3_000 * MS, "delay", stages_behind=1), "PerSite": site}
    assert plan.sources[0].may_be_silent
    assert plan.settings.availability_max_bytes == 64 << 20


def test_a_bound_of_a_stage_reaches_everything_before_it_and_nothing_behind() -> None:
    sites = PerSite(cleaned(readings())).withStage(availability="3 seconds")
    plan = planned(Over(sites), cleaned(readings("others")))
    assert {name: each and (each.bound_us, each.stages_behind) for name, each in found(plan).items()} == {
        "cleaned": (3_000 * MS, 1), "PerSite": (3_000 * MS, 0), "Over": None, "cleaned#2": None,
    }  # fmt: skip
    assert [source.may_be_silent for source in plan.sources] == [True, False]


def test_the_shortest_of_several_bounds_counts() -> None:
    first = flux.stage(availability=9, schema=READINGS, event_time="ts", name="first")(lambda batch: batch)
    before = first(readings())
    plan = planned(PerSite(before).withStage(availability="5s"), Over(PerSite(before)), availability="8s")
    assert [each and each.bound_us // MS for each in found(plan).values()] == [5_000, 5_000, 8_000, 8_000]


def test_a_stage_that_passes_rows_to_a_second_sink_follows_the_watermark() -> None:
    flow = PerSite(readings())
    plan = planned(flow.to(Shown()), flow.to(Shown()), availability="3s")
    assert [stage.timed_inputs for stage in plan.stages] == [(0,), (0,)]
    assert all(stage.availability for stage in plan.stages)
    assert [stage.timed_inputs for stage in planned(flow.to(Shown()), flow.to(Shown())).stages] == [(0,), ()]


def test_explain_names_it() -> None:
    lines = explain(planned(PerSite(readings(idle="1 minute")), availability="3s")).splitlines()
    assert "    availability: results within 3 seconds (failure: process, stabilization: process)" in lines
    assert "    availability: results go on without a partition that does not answer, and are corrected" in lines
    assert any(line.startswith("    idle='1 minute' is for a partition that answers and has no rows") for line in lines)


def test_a_later_start_may_change_it() -> None:
    """Bounds are no part of the state, so a checkpoint location does not hold on to them."""
    with_it = planned(PerSite(readings()), availability="3s")
    assert description(with_it) == description(planned(PerSite(readings())))


# ---- refusals


@pytest.mark.parametrize("given", ["0s", "-1s", "2 days", DAY_S + 1])
def test_a_bound_is_a_time_of_up_to_a_day(given: Any) -> None:
    with pytest.raises(UsageError, match="availability: expected a time above zero and up to 1 day"):
        flux.stage(availability=given)


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(UsageError, match=r"availability: cannot read 'soon' as seconds"):
        flux.stage(availability="soon")
    for given in (float("nan"), float("inf")):
        with pytest.raises(UsageError, match=rf"availability: cannot read {given} as seconds"):
            flux.stage(availability=given)
        assert f"cannot read {given} as seconds" in refusal(PerSite(readings()), availability=given)
    assert "out of range, at most 86400" in refusal(PerSite(readings()), availability="25h")
    assert "cannot read 'redo' as process, delay or suspend" in refusal(
        PerSite(readings()), availability="3s", availability_failure="redo"
    )


@pytest.mark.parametrize(
    ("given", "least"), [("1.5s", "2100 milliseconds"), ("2099ms", "2100 milliseconds"), ("60ms", "2100 milliseconds")]
)
def test_a_bound_shorter_than_two_steps_of_the_windows_and_two_hops_is_refused(given: str, least: str) -> None:
    why = refusal(PerSite(readings()), availability=given)
    assert "two steps of its windows (1 second each, at most) and 2 hops between workers" in why
    assert f"say {least} or more" in why
    planned(PerSite(readings()), availability="2.1s")


def test_long_windows_need_no_longer_bound() -> None:
    """Rows of long windows come more often than the windows end."""
    hourly = flux.stage(key="site", window=flux.window("ts", "1 hour"))(PerSite.target)
    planned(hourly(readings()), availability="3s")
    assert "(1 second each, at most)" in refusal(hourly(readings()), availability="2s")


def test_each_stage_of_a_chain_needs_a_hop() -> None:
    flow: Any = readings()
    for _ in range(4):
        flow = cleaned(flow)
    assert "is shorter than 4 hops" in refusal(flow, availability="150ms")
    planned(flow, availability="200ms")


def test_rows_without_event_time_are_never_late() -> None:
    plain = flux.source(lambda partition: [], schema=READINGS, partitions=1, name="plain")
    assert "no source of this query tells one before its end" in refusal(cleaned(plain), availability="3s")
    assert "stage cleaned: it asks for availability" in refusal(cleaned(plain).withStage(availability="3s"))
    of_frame = PerSite(DataFrameSource("flights", READINGS).withWatermark("ts", "0 seconds"))
    assert "source flights is a DataFrame" in refusal(of_frame.withStage(availability="3s"))
    assert "a DataFrame tells none" in refusal(of_frame, availability="3s")


def test_a_barrier_is_named() -> None:
    flow = PerSite(by_clock(readings()))
    assert "stage by_clock is a barrier" in refusal(flow, availability="3s")
    why = refusal(flow.withStage(availability="3s"))
    assert "stage by_clock is a barrier" in why
    assert "stage PerSite asks for availability" in why
    planned(by_clock(PerSite(readings()).withStage(availability="3s")))  # only the stages before it count


def test_a_sink_of_stable_rows_is_no_mistake(tmp_path: Any) -> None:
    plan = planned(PerSite(readings()).to_parquet(tmp_path), availability="3s")
    assert [stage.availability is not None for stage in plan.stages] == [True, False]
    assert plan.sources[0].may_be_silent
    assert "takes stable ones alone" in refusal(by_clock(readings()), availability="3s")


def test_readers_that_wait_for_each_other_cannot_go_on_without_one() -> None:
    why = refusal(PerSite(readings()), availability="3s", watermark_drift="10s")
    assert "spark.flux.watermark.drift lets partitions wait" in why


def test_a_stage_that_gives_nothing_has_no_results() -> None:
    @flux.stage
    class Ends(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None: ...

    assert "its operator gives none" in refusal(Ends(readings()).withStage(availability="3s"))
    assert found(planned(Ends(PerSite(readings())), availability="3s"))["Ends"] is None


def test_complete_output_comes_at_the_end() -> None:
    whole = flux.stage(key="site", window=flux.window("ts", "1 second"), output_mode="complete")(PerSite.target)
    assert 'has output_mode="complete"' in refusal(whole(readings()), availability="3s")


def test_micro_batches_are_refused_with_the_reason() -> None:
    batches = StreamSource("batches", READINGS, object()).withWatermark("ts", "0 seconds")
    why = refusal(PerSite(batches), availability="3s")
    assert "source batches comes in micro-batches" in why
    assert "Nothing is sent between two batches" in why


def test_the_clock_and_corrections_exclude_each_other() -> None:
    why = refusal(PerSite(readings(idle="1 second", advance=True)), availability="3s")
    assert "advance=True lets the watermark of an idle partition go on with the clock" in why
    planned(PerSite(readings(idle="1 second")), availability="3s")


def test_windows_over_sources_may_forfeit() -> None:
    options = {"availability": "3s", "availability_overflow": "forfeit", "availability_max_state": "1m"}
    plan = planned(Over(PerSite(readings())), **options)
    assert {stage.name: stage.availability and stage.availability.overflow for stage in plan.stages} == {
        "PerSite": "forfeit", "Over": "stop",
    }  # fmt: skip
    assert {stage.availability and stage.availability.max_state for stage in plan.stages} == {1 << 20}
    assert "needs that limit" in refusal(PerSite(readings()), **{**options, "availability_max_state": "0"})
    assert "whose inputs are sources" in refusal(PerSite(cleaned(readings())), **options)
    assert "has idle=" in refusal(PerSite(readings(idle="1 minute")), **options)


def test_values_are_checked_where_they_are_made() -> None:
    for wrong in (
        {"failure": "redo"},
        {"stabilization": "x"},
        {"overflow": "drop"},
        {"bound_us": 0},
    ):
        with pytest.raises(UsageError):
            Availability(**{"bound_us": 3_000 * MS, **wrong})
