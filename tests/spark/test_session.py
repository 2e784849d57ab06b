"""Bulk transfer uses a session of our own; the user's is left as it was."""

import pyarrow as pa
import pytest

from spark_integration.query.follow import line, view
from spark_integration.session import for_bulk_transfer, row_bytes

pytestmark = pytest.mark.spark

KEY = "spark.sql.execution.arrow.maxRecordsPerBatch"


def sizes(batches):  # type: ignore[no-untyped-def]
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"rows": pa.array([batch.num_rows], pa.int64())})


def test_batches_are_as_large_as_the_settings_of_the_clone_say_and_the_users_session_is_unchanged(spark) -> None:  # type: ignore[no-untyped-def]
    before = spark.conf.get(KEY)
    df = spark.range(0, 60_000, 1, 1)
    ours = for_bulk_transfer(df, 131_072).mapInArrow(sizes, "rows long").collect()
    assert [row.rows for row in ours] == [60_000], "the clone's settings do not reach mapInArrow: it will be slow"
    assert spark.conf.get(KEY) == before
    assert max(row.rows for row in df.mapInArrow(sizes, "rows long").collect()) <= int(before)


def test_wide_rows_make_batches_of_fewer_rows(spark) -> None:  # type: ignore[no-untyped-def]
    df = spark.range(0, 60_000, 1, 1).selectExpr("id", *[f"cast(id as string) as s{i}" for i in range(20)])
    assert row_bytes(df.schema) == 8 + 20 * 64
    largest = max(row.rows for row in for_bulk_transfer(df, 131_072).mapInArrow(sizes, "rows long").collect())
    assert largest == (4 << 20) // row_bytes(df.schema)


def test_a_progress_report_fits_the_screen() -> None:
    worker = {"id": 0, "host": "h", "rowsIn": 5, "rowsPerSecond": 2.0, "queued": 0, "logBytes": 1 << 20, "rssBytes": 0}
    stage = {
        "name": "Totals",
        "finished": 1,
        "partitions": 2,
        "rowsIn": 5,
        "rowsOut": 1,
        "rowsPerSecond": 2.0,
        "queued": 0,
    }
    report = {
        "totalInputRows": 1234567,
        "inputRowsPerSecond": 2.0,
        "backlog": {"slices": 3, "bytes": 1 << 20},
        "workers": [worker],
        "stages": [stage],
    }
    assert line(report) == "1,234,567 rows in, 2 input rows/s, backlog 3 slices and 1.0 MiB (worker 0: 2 rows/s)"
    assert len(view(report).renderables) == 3
