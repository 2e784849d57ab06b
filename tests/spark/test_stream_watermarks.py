"""Late rows and windows of micro-batches, by Spark's own rule: rows of a batch are late below the greatest time of the batches
before, less the delay. This holds also when the driver is killed in the middle of a batch (design: batch-watermarks)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset
import pytest
from streamed import BACK, DELAY, ROWS, WAIT_S, WINDOW, timed, write_files
from striking import until

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from streamed import timed

builder = SparkSession.builder.master("local[5]").config("spark.ui.enabled", "false")
builder = builder.config("spark.sql.session.timeZone", "UTC")  # times have the zone in their type, which the plan keeps
spark = builder.config("spark.python.daemon.module", "spark_integration.daemon").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
timed(spark, Path(sys.argv[1])).awaitTermination()
"""


def there(folder: Path) -> Any:
    return pyarrow.dataset.dataset(folder, format="parquet", exclude_invalid_files=True).to_table()


def killed_in_the_second_batch(tmp_path: Path) -> None:
    """Run the program until the late rows of one partition of the second batch are there, while the other one stands still, and
    kill all of its processes."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable}
    environment["FLUX_RUNTIME_DIR"] = str(tmp_path / "queries")
    driver = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, cwd=ROOT)

    def in_mid_stream() -> bool:
        time.sleep(0.2)
        late = tmp_path / "rows"
        return driver.poll() is not None or (late.exists() and there(late).num_rows >= ROWS // 10)

    try:
        until(in_mid_stream, "late rows of the second batch", 3 * WAIT_S)
        assert driver.poll() is None, "it must be killed in mid-stream"
        family = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        for process in family:
            process.kill()
        psutil.wait_procs(family[1:], 10)
    finally:
        driver.kill()
        driver.wait()


def test_rows_are_late_by_the_batches_before_also_when_the_driver_is_killed(spark: Any, tmp_path: Path) -> None:
    write_files(spark, tmp_path / "in", 0, 4)
    late = [sequence for sequence in range(2 * ROWS, 5 * ROWS) if sequence % 10 == 0]
    killed_in_the_second_batch(tmp_path)
    (tmp_path / "gate").touch()
    assert timed(spark, tmp_path).awaitTermination(WAIT_S)
    write_files(spark, tmp_path / "in", 4, 1)
    query = timed(spark, tmp_path)
    assert query.awaitTermination(WAIT_S)
    told = query.lastProgress["sources"][0]["eventTime"]
    assert told["lateRows"] == len(late), "of all batches, each once"
    assert told["watermark"] == "1970-01-01T01:21:39.000Z"
    assert sorted(there(tmp_path / "rows")["sequence"].to_pylist()) == late, "each once"

    times = [at - (BACK if at % 10 == 0 else 0) for at in range(5 * ROWS) if at not in set(late)]
    wanted = Counter(at // WINDOW * WINDOW for at in times)
    found = there(tmp_path / "counts")
    given = dict(zip(found["start"].to_pylist(), found["n"].to_pylist(), strict=True))
    assert len(given) == found.num_rows, "each window once"
    assert given == {start: wanted[start] for start in given}
    before, behind = 4 * ROWS - 1 - DELAY, 5 * ROWS - 1 - DELAY  # the watermarks of the last batch, and behind it
    assert {start for start in wanted if start + WINDOW <= before} <= set(given)
    assert all(start + WINDOW <= behind for start in given)
