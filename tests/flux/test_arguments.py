"""Operators with arguments: ``Sessions(gap=30)`` is an operator, ``Sessions(gap=30)(clicks)`` a flow."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery, dataframe

import flux
from controller.planning.compiler import compile_plan
from flux.settings import Settings

CLICKS = pa.schema([("user", pa.int64()), ("at", pa.int64())])


@flux.stage(key="user", partitions=2, schema=CLICKS)
class Sessions(flux.Operator):
    """An operator that passes rows that come after a gap."""

    def __init__(self, gap: int, *, first: bool = True) -> None:
        super().__init__()
        self.gap, self.first = gap, first
        self.last: dict[int, int] = {}

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        keep = []
        for user, at in zip(*batch.to_pydict().values(), strict=True):
            before = self.last.get(user)
            keep.append(self.first if before is None else at - before > self.gap)
            self.last[user] = at
        yield batch.filter(pa.array(keep))

    def snapshot(self) -> dict[int, int]:
        return self.last

    def restore(self, snapshot: dict[int, int]) -> None:
        self.last = snapshot


@flux.stage(key="user")
class Least(flux.Aggregate):
    at = flux.min("at")


def clicks(*rows: tuple[int, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"user": user, "at": at} for user, at in rows], schema=CLICKS)


ROWS = clicks((1, 0), (1, 10), (2, 0), (1, 60), (2, 100), (2, 129))
LATE = [{"user": 1, "at": 60}, {"user": 2, "at": 100}]


def test_an_operator_with_arguments_can_be_tried_by_itself() -> None:
    sessions = Sessions(30, first=False)
    assert isinstance(sessions, Sessions.target)
    assert (sessions.gap, sessions.first) == (30, False)
    (made,) = sessions.process(ROWS)
    assert made.to_pylist() == LATE


def test_the_test_kit_takes_it_and_makes_a_fresh_one_for_each_life() -> None:
    sessions = Sessions(gap=30, first=False)
    made = flux.testing.apply(sessions, ROWS.slice(0, 3), ROWS.slice(3), restart_after=1)
    assert made.to_pylist() == LATE
    assert sessions.last == {}


def test_called_with_an_input_it_is_a_stage_with_the_settings_of_the_class() -> None:
    flow = Least(Sessions(gap=30)(dataframe(CLICKS)), Sessions(gap=60)(dataframe(CLICKS)))
    plan = compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"")
    assert [(stage.name, stage.partitions, stage.key) for stage in plan.stages] == [
        ("Sessions", 2, ("user",)), ("Sessions#2", 2, ("user",)), ("Least", 32, ("user",)),
    ]  # fmt: skip
    assert [stage.make().gap for stage in list(plan.stages)[:2]] == [30, 60]
    assert repr(flow.inputs[0].stage) == "<flux stage Sessions(gap=30)>"


def test_it_runs_in_a_query() -> None:
    rows = Rows()
    with ThreadQuery(rows.stage(Sessions(30, first=False)(dataframe(CLICKS))), workers=2) as query:
        query.started().feed([[ROWS]])
        query.wait()
    assert rows.sorted() == LATE


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_it_is_shipped_with_its_arguments(pickler: Any) -> None:
    flow = Sessions(gap=30)(dataframe(CLICKS))
    stage = pickle.loads(pickler.dumps(flow.stage))
    assert isinstance(stage.make(), Sessions.target), "the same class, not a copy of it"
    assert stage.make().gap == 30


def test_a_class_of_the_main_program_is_shipped_by_value() -> None:
    source = """
import cloudpickle, flux, pyarrow as pa

@flux.stage(key="k")
class Scaled(flux.Operator):
    def __init__(self, by): self.by = by
    def process(self, batch): pass

flow = Scaled(by=3)(flux.source(lambda p: [], pa.schema([("k", pa.int64())]), 1))
print(cloudpickle.dumps(flow.stage).hex())
"""
    import subprocess
    import sys

    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    assert pickle.loads(bytes.fromhex(said)).make().by == 3


def test_a_frozen_class_will_do() -> None:
    @flux.stage(schema=CLICKS)
    @dataclass(frozen=True)
    class Limit(flux.Operator):
        rows: int = 1

        def open(self, context: flux.Context) -> None: ...

        def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            return batch.slice(0, self.rows)

    assert flux.testing.apply(Limit(2), ROWS).num_rows == 2
    assert flux.testing.apply(Limit, ROWS).num_rows == 1
    assert Limit(rows=3)(dataframe(CLICKS)).stage.make().rows == 3


def test_arguments_and_inputs_in_one_call_are_told_apart() -> None:
    with pytest.raises(
        flux.UsageError, match=r"got \(Source, gap=\.\.\.\)\. .* come first.*: Sessions\(gap=30\)\(input\)"
    ):
        Sessions(dataframe(CLICKS), gap=30)


def test_an_operator_that_is_no_stage_says_what_to_do() -> None:
    with pytest.raises(flux.UsageError, match=r"decorate the class with @flux\.stage .* Sessions\(\.\.\.\)\(input\)"):
        Sessions.target(30)(dataframe(CLICKS))
    with pytest.raises(flux.UsageError, match="an input must be a DataFrame, a flow or a source, got int"):
        Sessions(30)(5)
