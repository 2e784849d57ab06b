"""The program that ``soak.py`` kills: counts per key, through real executors, into parquet files, on a checkpoint location.

Each life may have other workers and replicas. The program ends when the source has, or when its standard input is closed.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession, functions
from striking import KEYS, PARTITIONS, ROWS, SEEN, Seen

import flux
from benchmarks import session

#: A round has one row of each key. Slow enough for two cores on which executors start again and again.
ROUND_S = 0.1
EXECUTORS, CORES = 3, 2
READ_EVERY_S = 3.0


class Rounds:
    """The reader of the source. Round n is due n times ``ROUND_S`` after the time in the file ``began``; a file ``end`` says
    how many there are in all. After a loss, all rounds that are due come at once."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __call__(self, partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        began, number = float((self.folder / "began").read_text()), start
        while number < self.in_all():
            if time.time() < began + number * ROUND_S:
                yield None
                continue
            keys = np.arange(KEYS) * PARTITIONS + partition
            yield pa.record_batch([pa.array(keys), pa.array(np.full(KEYS, number))], schema=ROWS)
            number += 1

    def in_all(self) -> float:
        try:
            return int((self.folder / "end").read_text())
        except FileNotFoundError:
            return math.inf


def rows_pass(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


#: Replicas that may protect the two stages in one life.
PROTECTED = (
    ({"replicas": 1}, {"replicas": 1}),
    ({"replicas": 2}, {"replicas": 2}),
    ({"replicas": 2, "recovery": "upstream"}, {"replicas": 2, "recovery": "standby"}),
    ({"replicas": 2, "recovery": "upstream"}, {"replicas": 2}),
    ({"replicas": 1}, {"replicas": 2, "recovery": "standby"}),
)


def flow(folder: Path, protected: int) -> Any:
    first, second = PROTECTED[protected]
    passed = flux.stage(key="key", partitions=4, **first)(rows_pass)
    counted = flux.stage(key="key", partitions=3, schema=SEEN, **second)(Seen)
    source = flux.source(Rounds(str(folder)), ROWS, partitions=PARTITIONS)
    return counted(passed(source)).to_parquet(str(folder / "rows"), partitions=2, roll_every="300ms")


def say(**what: Any) -> None:
    print(json.dumps({"at": time.time(), **what}), flush=True)


def keep_reading(spark: SparkSession, folder: str) -> None:
    """Spark reads the files while they come."""
    while True:
        time.sleep(READ_EVERY_S)
        if any(name.endswith(".parquet") and name[0] != "." for name in os.listdir(folder)):
            began = time.time()
            try:
                say(read=read(spark, folder), began=began)
            except Exception as error:  # an executor with the task in it may be killed, or the session is over
                say(not_read=str(error)[:2000])


def read(spark: SparkSession, folder: str) -> dict[str, int]:
    """Read the folder with Spark, in one task because there are few slots."""
    wrong = functions.sum((functions.col("seen") != functions.col("sequence")).cast("int"))
    row = (
        spark.read.schema(SEEN)
        .parquet(folder)
        .coalesce(1)
        .agg(functions.count("*"), functions.countDistinct("key", "sequence"), wrong)
        .first()
    )
    assert row is not None
    return dict(zip(("rows", "distinct", "wrong"), row, strict=True))


def main(folder: Path, workers: int, protected: int) -> None:
    # No worker is given up because the machine is slow, as in the tests.
    slow = {"spark.flux.workers.timeout": "300s", "spark.flux.heartbeat.timeout": "5s"}
    spark, _ = session.start(EXECUTORS, CORES, 1024, idle_jvm=True, **{"spark.task.maxFailures": "1000"}, **slow)
    say(starts=True)
    query = flow(folder, protected).start(
        spark=spark, workers=workers, checkpointLocation=folder / "location", checkpoint_interval="1s"
    )
    stopped = threading.Event()

    def stop_when_told() -> None:
        sys.stdin.read()
        stopped.set()
        query.stop()

    say(started=True)
    threading.Thread(target=stop_when_told, daemon=True).start()
    threading.Thread(target=keep_reading, args=(spark, str(folder / "rows")), daemon=True).start()
    try:
        query.awaitTermination()
    finally:
        say(events=Counter(event.kind for event in query.events()))
        query.stop()
    say(through=not stopped.is_set())
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
