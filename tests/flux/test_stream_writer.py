"""``format("flux")``: its way to the query, and its refusals (design: micro-batches)."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from one_worker import SCHEMA, planned

import flux
from controller.operate import connection_file
from flux.dataflow.plan import StreamSourcePlan
from flux.errors import UsageError
from flux.shell.process import Rendezvous
from spark_integration.streaming import ingress_file
from spark_integration.streaming.stream_writer import columns_for, writer_of
from spark_integration.tasks.entry_points import in_types

types = pytest.importorskip("pyspark.sql.types")
RENDEZVOUS = Rendezvous("tcp://127.0.0.1:1", None, b"secret of the workers")


def at(zone: str) -> pa.DataType:
    kind = pa.timestamp("us", zone)
    return pa.struct([("t", kind), ("l", pa.list_(kind))])


ARROW = pa.schema([("x", pa.int64()), ("at", at("Asia/Tokyo"))])


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Write the files of a running query that takes rows, and return their folder."""
    folder = tmp_path / "queries"
    monkeypatch.setenv(connection_file.FOLDER_VARIABLE, str(folder))
    monkeypatch.setattr("controller.operate.client.listening", lambda endpoint: True)
    about: Any = {"application": "a", "started": 1.0, "endpoint": "tcp://127.0.0.1:1", "secret": b"s"}
    plan = planned(
        flux.stage(partitions=1, name="kept")(lambda batch: batch), source=flux.stream(SCHEMA, name="clicks")
    )
    connection_file.write(connection_file.of_this_process(id=plan.query, name="totals", **about))
    path = ingress_file.write(plan, "totals", RENDEZVOUS)
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"lambda" not in path.read_bytes(), "no code of the user's"
    return folder


def struct(ddl: str) -> Any:
    return types.StructType([types.StructField(*each) for each in ddl_fields(ddl)])


def ddl_fields(ddl: str) -> list[tuple[str, Any]]:
    known = {"BIGINT": types.LongType(), "STRING": types.StringType()}
    return [(name, known[kind]) for name, kind in (each.split() for each in ddl.split(", "))]


def test_a_writer_finds_the_query_and_its_input(query: Path) -> None:
    for options in ({"query": "totals"}, {"QUERY": "totals", "input": "clicks", "checkpointLocation": "/c"}):
        writer = writer_of(options, struct("x BIGINT"))
        assert writer._inputs.rendezvous == RENDEZVOUS
        assert writer._source == 0


def test_a_table_that_is_read_anew_is_no_input() -> None:
    table = StreamSourcePlan(1, "prices", SCHEMA, refresh_us=1)
    plan: Any = SimpleNamespace(sources=[StreamSourcePlan(0, "clicks", SCHEMA, written=True), table])
    inputs = ingress_file.Inputs(ingress_file.VERSION, "totals", plan, RENDEZVOUS)
    assert inputs.source(None).name == "clicks"
    with pytest.raises(UsageError, match="no input 'prices' that a streaming query can write into; it has 'clicks'"):
        inputs.source("prices")


@pytest.mark.parametrize(
    ("options", "columns", "why"),
    [
        ({}, "x BIGINT", r"needs option\('query', ...\)"),
        (
            {"query": "totals", "inputs": "clicks"},
            "x BIGINT",
            "has no option 'inputs'; it has query, input and",
        ),
        ({"query": "totals", "path": "/x"}, "x BIGINT", "writes to no path"),
        ({"query": "total"}, "x BIGINT", "no running query is called 'total'"),
        ({"query": "totals", "input": "c"}, "x BIGINT", "has no input 'c' .* it has 'clicks'"),
        ({"query": "totals"}, "x STRING", r"\(x bigint\), in any order; .* has \(x string\): x has another"),
        ({"query": "totals"}, "y BIGINT", r"it has no x, y is too much\. Choose, rename and cast .* df\.select"),
        ({"query": "totals"}, "x BIGINT, y BIGINT", "y is too much"),
        ({"query": "totals"}, "x BIGINT, x BIGINT", "x is there twice"),
        ({"query": "totals"}, "X BIGINT", "it has no x, X is too much"),
    ],
)
def test_what_does_not_fit_is_refused(query: Path, options: Any, columns: str, why: str) -> None:
    with pytest.raises(flux.FluxError, match=why):
        writer_of(options, struct(columns))


def test_a_file_that_others_may_have_written_is_not_read(query: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_file, "_starts", lambda connection: False)  # it would wait for the answer of the driver
    (path,) = query.glob("*.ingress")
    path.chmod(0o644)
    with pytest.raises(flux.UsageError, match="not a file of this user's alone"):
        ingress_file.find("totals")
    path.unlink()
    with pytest.raises(flux.UsageError, match="has no input that a streaming query can write into"):
        ingress_file.find("totals")
    path.symlink_to("/dev/null")
    with pytest.raises(OSError, match="symbolic links"):
        ingress_file.find("totals")


def test_the_file_goes_with_that_of_the_query(query: Path) -> None:
    (path,) = query.glob("*.json")
    connection_file.remove(path)
    assert os.listdir(query) == []


def test_time_zones_are_those_of_the_input() -> None:
    time, field = types.TimestampType(), types.StructField
    inner = types.StructType([field("t", time), field("l", types.ArrayType(time))])
    assert columns_for(types.StructType([field("at", inner), field("x", types.LongType())]), ARROW, "it") == [1, 0]
    rows = pa.RecordBatch.from_pylist(
        [{"c0": 1, "c1": {"t": 5, "l": [6, None]}}, {"c0": 2, "c1": None}],
        schema=pa.schema([("c0", pa.int64()), ("c1", at("UTC"))]),
    )
    cast = in_types(rows, ARROW)
    assert cast.schema == ARROW
    assert cast.column(1)[0]["t"].value == 5
    assert cast.column(1)[0]["l"][0].value == 6
    assert cast.column(1)[1].as_py() is None
