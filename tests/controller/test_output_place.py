"""The way of a reader to the output that is kept for it: its answers, and facts that no other reader learns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.operate.request_handler import Reach, masked, output_place
from controller.operate.requests import OutputPlace
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import Plan
from flux.dataflow.sink import QueryReaders
from flux.dataflow.source import DataFrameSource
from flux.errors import UsageError
from flux.settings import Settings

SECRET, SHARED = b"the secret of the workers, of 32", b"that of the connection file"
SCHEMA = pa.schema([("x", pa.int64())])


@flux.stage(partitions=3)
def first(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(partitions=2)
def second(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def plan(*flows: Any) -> Plan:
    return compile_plan(list(flows), Settings.of(), lambda given: given, "q", SECRET)


def place(plan: Plan, stage: str | None = None) -> OutputPlace:
    return output_place(plan, "clicks", Reach("tcp://here:1", SHARED, b"public", b"private key"), stage)


def test_only_who_has_the_secret_of_the_file_learns_that_of_the_workers() -> None:
    given = place(plan(first(DataFrameSource("rows", SCHEMA)).to_readers()))
    assert masked(given.masked, SHARED, given.nonce) == SECRET
    assert masked(given.masked, b"another", given.nonce) != SECRET
    assert SECRET not in given.masked
    again = place(plan(first(DataFrameSource("rows", SCHEMA)).to_readers()))
    assert again.masked != given.masked, "each answer has a mask of its own"


def test_no_secret_is_shown_where_it_is_printed() -> None:
    given = place(plan(first(DataFrameSource("rows", SCHEMA)).to_readers()))
    for shown in (repr(given), repr(Reach("tcp://here:1", SHARED, b"public", b"private key"))):
        assert all(hidden not in shown for hidden in ("private key", SHARED.decode(), SECRET.decode(), "masked"))


def test_it_says_which_output_of_which_stage() -> None:
    rows = DataFrameSource("rows", SCHEMA)
    given = place(plan(first(rows).to_readers(), second(rows).to_readers()), "second")
    assert (given.id, given.name, given.stage_name, given.partitions, given.endpoint) == (
        "q", "clicks", "second", 2, "tcp://here:1",
    )  # fmt: skip
    assert pa.ipc.read_schema(pa.py_buffer(given.schema)) == SCHEMA


def test_what_cannot_be_read_is_refused_with_what_can() -> None:
    rows = DataFrameSource("rows", SCHEMA)
    for of, stage, why in (
        (plan(first(rows)), None, r"keeps no output for readers now: end a flow with to_readers\(\)"),
        (
            plan(first(rows).to_readers(), second(rows).to_readers()),
            None,
            "several stages for readers, say which: first, second",
        ),
        (
            plan(first(rows).to_readers()),
            "second",
            "no output of a stage 'second' is kept for readers; there is that of first",
        ),
    ):
        with pytest.raises(UsageError, match=why):
            place(of, stage)
    with pytest.raises(UsageError, match="cannot be read from outside"):
        output_place(plan(first(rows).to_readers()), None, None, None)


def test_the_bound_is_shared_by_the_partitions_and_is_checked() -> None:
    flow = first(DataFrameSource("rows", SCHEMA))
    assert isinstance(flow.to_readers(max_bytes="3k").sink, QueryReaders)
    assert QueryReaders(3072).kept_max(3) == 1024
    assert QueryReaders(1).kept_max(3) == 1
    for wrong in (0, -1, "much", None, 1.5j):
        with pytest.raises(UsageError, match="max_bytes"):
            flow.to_readers(max_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"has no rows\(\)|has no to_readers\(\)"):
        flow.to_readers().to_readers()
