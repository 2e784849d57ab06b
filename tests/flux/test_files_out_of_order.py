"""Files whose times are older in later files, shared by several partitions of a source: late rows and windows are those of a
plain model of the rule, also when a worker is lost half-way (design: late-rows)."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import ThreadQuery
from outside_store import lose, until

import flux

PARTITIONS, DELAY, SIZE = 3, 5_000_000, 10_000_000
#: Files that are there at the start, and files that come later, whichever times of modification they have.
FIRST, LATER, ROWS = 10, 9, 60
SCHEMA = pa.schema([("file", pa.int64()), ("row", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
#: In seconds: the beginnings of files go back by this much, at most, while time goes on by a few seconds with each.
BACK, ONWARD = 25, 4

Row = tuple[int, int, int | None]


def file(number: int) -> list[Row]:
    """Make the rows of a file: number of the file, number of the row, microseconds. Some have no time."""
    rng = random.Random(number)
    at = (number * ONWARD - rng.randrange(BACK)) * 1_000_000
    found: list[Row] = []
    for row in range(ROWS):
        at += rng.randrange(200_000)
        time = at - rng.choice([0, 0, 0, 2_000_000, 9_000_000])
        found.append((number, row, None if rng.random() < 0.03 else time // 1000 * 1000))
    return found


def write(folder: Path, number: int, modified: int) -> None:
    """Write a file. Its name says nothing about its number, and its time of modification is given."""
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*file(number), strict=True), SCHEMA, strict=True)
    ]
    hidden = folder / f".{number}"
    pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), hidden, row_group_size=17)
    os.utime(hidden, ns=(0, modified))
    os.replace(hidden, folder / f"{(number * 7) % 19:02}.parquet")


class Answer:
    """The answer of the rule: partition p has every n-th file, and a row is late if its time is below the greatest time of the
    rows before it there, less the delay."""

    def __init__(self, order: list[int]) -> None:
        self.late: list[Row] = []
        windows = Counter[int]()
        watermarks = []
        for partition in range(PARTITIONS):
            newest: int | None = None
            for row in (row for number in order[partition::PARTITIONS] for row in file(number)):
                at = row[2]
                if at is None:
                    continue
                if newest is not None and at < newest - DELAY:
                    self.late.append(row)
                    continue
                newest = at if newest is None else max(newest, at)
                windows[at // SIZE * SIZE] += 1
            assert newest is not None
            watermarks.append(newest - DELAY)
        self.watermark = min(watermarks)
        self.windows = {start: n for start, n in windows.items() if start + SIZE <= self.watermark}


@flux.stage(replicas=2, window=flux.window("ts", "10 seconds"))
class Counted(flux.Aggregate):
    n = flux.count()


@flux.stage(partitions=2, replicas=2)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("part-*.parquet")) if folder.exists() else []
    return [row for each in files for row in pq.read_table(each).to_pylist()]


def files_known(ledger: Path) -> int:
    entries = [json.loads(line) for each in ledger.glob("*.json") for line in each.read_text().splitlines()]
    return sum(len(entry.get("files", ())) for entry in entries)


def microseconds(time: Any) -> int:
    return round(time.timestamp() * 1_000_000)


@pytest.mark.parametrize("fault", ["none", "a worker is lost"])
def test_late_rows_and_windows_of_files_that_come_out_of_order_follow_from_the_order_of_the_files(
    tmp_path: Path, fault: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    # Files that are found together come in the order of their last writes: here the last one comes first.
    for number in range(FIRST):
        write(folder, number, modified=10**18 - number)
    order = [*reversed(range(FIRST)), *range(FIRST, FIRST + LATER)]
    wanted, events = Answer(order), flux.files(folder, schema=SCHEMA, partitions=PARTITIONS, poll="20ms", name="events")
    events.reader.prepare(None)
    timed = events.withWatermark("ts", "5 seconds")
    sinks = [
        Counted(timed).to_parquet(str(tmp_path / "windows"), roll_every="100ms"),
        passed(timed.late).to_parquet(str(tmp_path / "late"), roll_every="100ms"),
    ]
    with ThreadQuery(
        *sinks, workers=3, operate=False, replicas_allow_same_executor=True, batch_max_rows=25, step_max_rows=40
    ) as query:
        query.started()
        core = query.server.core
        until(lambda: rows_of(tmp_path / "late"), "late rows of the first files")
        if fault != "none":
            assert core.table is not None
            lose(query, core.table.sources[0][1])
        for number in range(FIRST, FIRST + LATER):
            write(folder, number, modified=10**17 - number)
            until(lambda number=number: files_known(events.reader.ledger) > number, "the ledger has the file")
        until(
            lambda: (
                query.server.error is not None
                or (
                    len(rows_of(tmp_path / "windows")) >= len(wanted.windows)
                    and len(rows_of(tmp_path / "late")) >= len(wanted.late)
                )
            ),
            "all windows and late rows",
        )
    windows = [(microseconds(row["window_start"]), row["n"]) for row in rows_of(tmp_path / "windows")]
    assert sorted(windows) == sorted(wanted.windows.items())
    late = [(row["file"], row["row"], microseconds(row["ts"])) for row in rows_of(tmp_path / "late")]
    assert sorted(late) == sorted(wanted.late)
    assert 50 < len(late) < (FIRST + LATER) * ROWS * 2 / 3, "the test shows something"
