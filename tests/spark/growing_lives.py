"""A program whose query gets and loses stages all the time, until it is killed, and goes on from its location when it is started
again: ``python growing_lives.py FOLDER [end]``. With ``end`` it changes nothing, lets all rows through and stops.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import flux

#: Keys of each partition of the source; partitions; rows of each key in a batch; seconds between two batches. Rows are under way
#: at each kill, and leave a machine under load time for changes.
KEYS, PARTITIONS, BATCH, PACE_S = 5, 2, 4, 0.02
#: Options of the sessions of ``tests/conftest.py``: no worker is given up because the machine is slow, and workers are forked
#: with Flux loaded.
CONFIGURATION = {
    "spark.ui.enabled": "false",
    "spark.flux.heartbeat.timeout": "5s",
    "spark.python.daemon.module": "spark_integration.daemon",
}
ROWS = pa.schema([("key", pa.int64()), ("n", pa.int64())])
#: The beginning of the names of stages that are added behind the source.
BEHIND_SOURCE = "SinceRows"
#: Seconds for the first files of the stages that are left: a machine under load takes half a minute.
WRITES_S = 90.0
#: Most stages that are there beside the first one.
STAGES_MAX = 4


def read(partition: int, start: int = 0) -> Iterator[pa.RecordBatch]:
    """Give the rows 0, 1, 2, ... of each key, from a batch on."""
    batch = start
    while True:
        time.sleep(PACE_S)
        keys = [partition * KEYS + key for key in range(KEYS) for _ in range(BATCH)]
        yield pa.record_batch([keys, [*range(batch * BATCH, (batch + 1) * BATCH)] * KEYS], schema=ROWS)
        batch += 1


class Since(flux.Aggregate):
    """The rows of each key since the stage began."""

    first = flux.min("n")
    last = flux.max("n")
    n = flux.count()


@flux.stage(name="Seen", key="key", partitions=2)
class Seen(flux.Operator):
    schema = ROWS

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


def since(name: str, given: Any, folder: Path) -> Any:
    counted = flux.stage(name=name, key="key", partitions=2, output_mode="update")(Since)(given)
    return counted.to_parquet(folder / name, roll_every="200ms")


def origin(name: str, source: Any, seen: Any) -> Any:
    """Return the flow behind which a stage is added, by its name: the source, or the first stage."""
    return source if name.startswith(BEHIND_SOURCE) else seen


def there(folder: Path) -> list[str]:
    """Return the added stages that the location has."""
    about = folder / "location" / "flux.json"
    stages = json.loads(about.read_text())["plan"]["stages"] if about.exists() else []
    return [name for name in stages if name.startswith("Since") and "." not in name]


def await_files(folder: Path) -> None:
    """Wait until each added stage that is there has written a file, for at most ``WRITES_S`` seconds."""
    end = time.monotonic() + WRITES_S
    while time.monotonic() < end and not all(any((folder / name).glob("part-*.parquet")) for name in there(folder)):
        time.sleep(0.1)


def main(folder: Path, ends: bool) -> None:
    faulthandler.enable()  # SIGABRT prints the stacks of all threads
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    spark = SparkSession.builder.master("local[4]").config(map=CONFIGURATION).getOrCreate()
    source = flux.source(read, ROWS, PARTITIONS, "rows")
    seen = Seen(source)
    flows = [
        seen.to_parquet(folder / "Seen", roll_every="200ms"),
        *(since(name, origin(name, source, seen), folder) for name in there(folder)),
    ]
    query = flux.start(*flows, spark=spark, checkpointLocation=folder / "location", workers=2, workers_timeout=300)
    query.wait_until_running(200)
    print("running", flush=True)
    rng = random.Random()
    number = len(list(folder.glob("Since*")))
    while not ends:
        names = there(folder)
        if len(names) >= STAGES_MAX or (names and rng.random() < 0.3):
            query.remove(rng.choice(names), timeout=100)
            print("removed", flush=True)
        else:
            name = f"{BEHIND_SOURCE if number % 2 else 'Since'}{number}"
            query.add(since(name, origin(name, query.source("rows"), query["Seen"]), folder), timeout=100)
            number += 1
            print("added", flush=True)
    time.sleep(3)
    await_files(folder)
    query.stop()
    assert query.exception() is None, query.exception()
    print("through", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "end" in sys.argv)
