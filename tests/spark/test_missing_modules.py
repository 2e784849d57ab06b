"""A module that the program has and the executors have not: the query ends at once, with its name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

#: Failed tasks of a query that ends at once. Spark tries each of five tasks up to a thousand times here, which takes minutes.
FAILED_MAX = 100
MODULE = """
def same(batches):
    yield from batches

def filtered(batch):
    return batch
"""


@pytest.fixture
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "only_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("only_here")
    sys.modules.pop("only_here", None)


def failed_tasks(spark: Any, query: str) -> int:
    tracker = spark.sparkContext.statusTracker()
    jobs = [job for group in ("", "-ingress") for job in tracker.getJobIdsForGroup(f"flux-{query}{group}")]
    return sum(tracker.getStageInfo(stage).numFailedTasks for job in jobs for stage in tracker.getJobInfo(job).stageIds)


@pytest.mark.parametrize("where", [pytest.param("the DataFrame", marks=pytest.mark.long), "a stage"])
def test_a_missing_module_ends_the_query_at_once_with_its_name(cluster: Any, only_here: Any, where: str) -> None:
    df = cluster.range(100)
    if where == "a stage":
        flow = flux.stage(schema=pa.schema([("id", pa.int64())]), name="Filtered")(only_here.filtered)(df)
    else:
        flow = flux.stage(name="Same")(lambda batch: batch)(df.mapInArrow(only_here.same, df.schema))
    query = flow.start(workers=3, keep_output=True)
    try:
        with pytest.raises(flux.QueryFailed) as failed:
            query.toDF()
    finally:
        query.stop()
    assert 1 <= failed_tasks(cluster, query.id) <= FAILED_MAX
    assert "ModuleNotFoundError: No module named 'only_here'. The executors do not find it" in str(failed.value)
    assert "addPyFile" in str(failed.value)
