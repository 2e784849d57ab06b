"""``explain`` describes a flow in words."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.flow import Flow
from flux.dataflow.source import DataFrameSource
from flux.settings import Settings

FLIGHTS = pa.schema([("dest", pa.string()), ("delay", pa.float64())])


@flux.stage
def late_only(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(key="dest", partitions=16, replicas=2)
class Delays(flux.Aggregate):
    flights = flux.count()
    delay = flux.mean("delay")


@flux.stage
class Sink(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


def explained(flow: Flow, workers: int = 0, collect: int = 0, **options: object) -> str:
    return explain(
        compile_plan([flow], Settings.of(None, **options), lambda schema: schema, "q", b"", collect), workers
    )


def test_every_source_and_stage_has_its_key_partitions_and_replicas() -> None:
    text = explained(Delays(late_only(DataFrameSource("flights", FLIGHTS))))
    before, policies = text.split("\npolicies\n")
    assert before.splitlines() == [
        "Flux plan: 1 source, 2 stages",
        "source flights",
        "    read by Spark tasks, one for each partition of the DataFrame",
        "    gives dest string, delay double",
        "stage late_only: function",
        "    reads source flights, batches in rotation",
        "    32 partitions, 1 replica: the loss of its worker ends the query",
        "    gives dest string, delay double",
        "stage Delays: aggregate, flights = count(), delay = mean(delay)",
        "    reads stage late_only, rows by hash of dest",
        "    16 partitions, 2 replicas: survives the loss of 1 executor",
        "    gives each group once, at the end of the input (output mode complete)",
        "    gives dest string, flights int64, delay double",
    ]
    assert "    workers: as many as there is room for" in policies
    assert "    replicas: on different executors; repaired 1 partition of a stage at a time" in policies
    assert "    balance: policy pairing every 1 s, up to 1 move and 64 MiB per second" in policies


def test_copies_on_one_executor_do_not_survive_its_loss() -> None:
    flow = Sink(Delays(DataFrameSource("flights", FLIGHTS)))
    text = explained(flow, replicas_allow_same_executor=True)
    assert "    16 partitions, 2 replicas: survives the loss of 1 worker" in text.splitlines()


def test_settings_show_in_the_policies() -> None:
    flow = Sink(Delays(DataFrameSource("flights", FLIGHTS)))
    text = explained(flow, 3, balance_enabled=False, replicas_allow_same_executor=True, log_max_bytes="1m")
    for line in (
        "    gives nothing: a sink",
        "    workers: 3",
        "    balance: off: partitions stay where they are",
        "    replicas: on one executor where there are too few; repaired 1 partition of a stage at a time",
        "    memory: logs of 1 MiB per process, 128 MiB under way to one worker, then back-pressure",
    ):
        assert line in text.splitlines()


def test_arguments_of_an_operator_are_shown() -> None:
    @flux.stage
    class Limit(flux.Operator):
        def __init__(self, rows: int = 1) -> None:
            self.rows = rows

        def process(self, batch: pa.RecordBatch) -> None:
            pass

    rows = DataFrameSource("flights", FLIGHTS)
    assert "stage Limit: operator Limit(rows=3)" in explained(Limit(rows=3)(rows)).splitlines()
    assert "stage Limit: operator Limit" in explained(Limit(rows)).splitlines()
    frame = pd.DataFrame({"k": [1, 2]})
    assert "stage Limit: operator Limit(k 0 1 1 2)" in explained(Limit(frame)(rows)).splitlines()


def test_kept_output_and_sources_in_the_workers_are_told_apart() -> None:
    source = flux.source(lambda partition, start: [], schema=FLIGHTS, partitions=3, name="log")
    text = explained(late_only(source), collect=2)
    assert "    3 partitions, read in the workers; after a loss again from where it stopped" in text
    assert "stage late_only.toDF: keeps the output in the workers until Spark has fetched it" in text
    assert "copies:" not in text
