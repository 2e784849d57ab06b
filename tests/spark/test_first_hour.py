"""What somebody who knows PySpark tries in the first hour."""

from __future__ import annotations

from typing import Any

import pytest

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

pytest.importorskip("pyspark")


@flux.stage(key="k", partitions=2)
class Totals(flux.Aggregate):
    total = flux.sum("v")


def test_a_flow_is_shown_collected_and_explained_like_a_dataframe(spark: Any, capsys: Any) -> None:
    df = spark.range(0, 20, 1, 2).selectExpr("id % 2 as k", "id as v")
    flow = Totals(df)
    assert sorted(flow.collect(workers=1)) == [(0, 90), (1, 100)]
    flow.show(1, workers=1)
    assert "+---+-----+" in capsys.readouterr().out
    flow.explain(partitions=4)
    shown = capsys.readouterr().out
    assert "source DataFrame" in shown
    assert "    reads source DataFrame, rows by hash of k" in shown
    query = flow.start(workers=1)
    query.explain()
    assert "    workers: 1" in capsys.readouterr().out
    query.awaitTermination()
    with pytest.raises(flux.SchemaError, match="key 'k' is not a column"):
        Totals(spark.range(3)).explain()
