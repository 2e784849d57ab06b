"""Rows of ``python -m tests.netlab.faults``: a process that makes them, their readers, the sink, and the answer.

The process appends each row to a file of its partition, and gives those of the first partitions to a topic as well, if there is
a broker. The files are the evidence: DuckDB counts them in the end, by itself. The files of the last partitions are read by a
thread that hangs for as long as there is a file ``hang``. The sink writes down each of its calls.

``python -m tests.netlab.feeder FOLDER [ADDRESS TOPIC]`` runs until there is a file ``stop``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

import flux
from flux.dataflow.threaded_reader import ThreadedReader

SCHEMA = pa.schema([("key", pa.int64()), ("value", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
COLUMNS = "key BIGINT, value BIGINT, at TIMESTAMP"
#: Partitions of the topic, or of files in its place, and those whose reader may hang.
EVEN, HANGING = 4, 2
#: Rows of a partition per second, and seconds between two deliveries.
RATE, EVERY_S = 60, 0.05
KEYS = 20
SIZE_US = 250_000
#: The last row of each partition is this far ahead, so that all windows before it end.
AHEAD_S = 30.0
#: Seconds between two looks of a reader at its file, and the longest time for which it hangs.
LOOK_S, HANG_MAX_S = 0.05, 60.0
FLUSH_S = 60.0
PARTITIONS, REPLICAS = 6, 2
OUTPUT = "key BIGINT, window_start TIMESTAMP, window_end TIMESTAMP, n BIGINT, total BIGINT"
STABLE, TENTATIVE = "stable", "tentative"


class Group(NamedTuple):
    """A key in a window, by the start of the window in microseconds."""

    key: int
    start: int


class Values(NamedTuple):
    n: int
    total: int


class Noted(NamedTuple):
    """A call of the sink. ``sequence`` is -1 for tentative rows."""

    kind: str
    partition: int
    sequence: int
    rows: tuple[tuple[int, int, int, int], ...]


# ---- the process


def made(folder: Path, partition: int) -> Path:
    return folder / f"made-{partition}.jsonl"


def feed(folder: Path, address: str, topic: str) -> None:
    """Make rows until there is a file ``stop``; then a last one of each partition. ``end`` has the end of the last window."""
    chance, newest = random.Random(7), [0.0] * (EVEN + HANGING)
    files = [made(folder, partition).open("ab", buffering=0) for partition in range(EVEN + HANGING)]
    lost: list[str] = []

    def answered(error: Any, _: Any) -> None:
        if error is not None:
            lost.append(str(error))

    producer: Any = None
    if address:
        from confluent_kafka import Producer

        # In order and once, also when the broker has stood still meanwhile.
        settings = {"bootstrap.servers": address, "enable.idempotence": True, "message.timeout.ms": 300_000}
        producer = Producer(settings | {"linger.ms": 5})

    def bring(partition: int, times: Iterable[float]) -> None:
        for at in times:
            newest[partition] = at = max(at, newest[partition] + 1e-5)
            moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")
            row = {"key": chance.randrange(KEYS), "value": chance.randrange(1000), "at": moment}
            line = json.dumps(row)
            files[partition].write(f"{line}\n".encode())
            if producer is not None and partition < EVEN:
                producer.produce(topic, line, partition=partition, on_delivery=answered)

    while not (folder / "stop").exists():
        time.sleep(EVERY_S)
        now = time.time()
        for partition in range(len(files)):
            bring(partition, (now + number * 1e-4 for number in range(round(RATE * EVERY_S))))
        if producer is not None:
            producer.poll(0)
    end = round(time.time() * 1e6) // SIZE_US * SIZE_US
    for partition in range(len(files)):
        bring(partition, [time.time() + AHEAD_S])
    if producer is not None and (producer.flush(FLUSH_S) or lost):
        sys.exit(f"the broker has not taken all rows: {lost[:1]}")
    (folder / "end.new").write_text(str(end))
    (folder / "end.new").rename(folder / "end")


# ---- the readers


def batch_of(lines: Iterable[str]) -> pa.RecordBatch:
    rows = [json.loads(line) for line in lines]
    return pa.RecordBatch.from_pylist([row | {"at": datetime.fromisoformat(row["at"])} for row in rows], schema=SCHEMA)


def following(path: Path, start: int | None) -> Iterator[flux.Positioned | None]:
    """Yield the rows of a file behind a number of bytes, as they come; None: there are none now. It ends with the feeder."""
    at = start or 0
    while True:
        ended = (path.parent / "end").exists()  # before the look: later rows are not needed
        with path.open("rb") if path.exists() else open(os.devnull, "rb") as file:
            file.seek(at)
            found = file.read()
        found = found[: found.rfind(b"\n") + 1]
        if found:
            at += len(found)
            yield flux.Positioned(batch_of(found.decode().splitlines()), at)
        elif ended:
            return
        else:
            yield None


class Hanging(flux.SourceReader):
    """A source whose reader does not come back while there is a file ``hang``."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def read(self, partition: int, start: Any) -> HangingRows:
        return HangingRows(Path(self._folder), EVEN + partition, start)


class HangingRows(ThreadedReader):
    """Rows of one file, read by a thread that may hang."""

    def __init__(self, folder: Path, number: int, start: int | None) -> None:
        self._folder, self._number, self._start = folder, number, start
        super().__init__(self._rows, f"hanging {number}")

    def _rows(self) -> Iterator[flux.Positioned | float]:
        for item in following(made(self._folder, self._number), self._start):
            yield LOOK_S if item is None else item
            end = time.monotonic() + HANG_MAX_S
            while (self._folder / "hang").exists() and time.monotonic() < end:
                time.sleep(LOOK_S)


def sources(folder: Path, address: str, topic: str) -> Any:
    """Return the rows of all partitions, with their event time."""
    if address:
        even: Any = flux.kafka(topic, address, format="json", schema=COLUMNS, name="even")
    else:
        place = str(folder)

        def read(partition: int, start: int | None) -> Iterator[flux.Positioned | None]:
            return following(made(Path(place), partition), start)

        even = flux.source(read, SCHEMA, EVEN, "even", positions=True)
    hanging: Any = flux.source(Hanging(folder), SCHEMA, HANGING, "hanging")
    return even.withWatermark("at", "0 seconds").union(hanging.withWatermark("at", "0 seconds"))


# ---- the windows


class Sums(flux.Aggregate):
    n = flux.count()
    total = flux.sum("value")


def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def flow(folder: Path, address: str, topic: str, chain: int) -> Any:
    """Return counts and sums per key and window, through ``chain`` stages, to the sink."""
    options: dict[str, Any] = {"partitions": PARTITIONS, "replicas": REPLICAS}
    window = flux.window("at", f"{SIZE_US // 1000} milliseconds")
    made: Any = flux.stage(key="key", window=window, **options)(Sums)(sources(folder, address, topic))
    for number in range(1, chain):
        step = flux.stage(key="key", event_time="window_end", name=f"passed_{number}", schema=OUTPUT, **options)
        made = step(passed)(made)
    return made.to(Written(folder))


# ---- the sink


class Written(flux.Sink):
    """A sink that writes each call as a line. A line that a kill has torn was not written: its batch comes again."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def open(self, context: flux.SinkContext) -> None:
        self._partition = context.partition
        self._file = open(Path(self._folder, f"out-{uuid.uuid4().hex}.jsonl"), "ab", buffering=0)  # noqa: SIM115

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        self._note(STABLE, position.sequence, batch)

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self._note(TENTATIVE, -1, batch)

    def undo(self, start: int | None, end: int | None) -> None:
        """Do nothing: stable rows are compared, and tentative ones counted."""

    def close(self) -> None:
        self._file.close()

    def _note(self, kind: str, sequence: int, batch: pa.RecordBatch) -> None:
        starts = batch.column("window_start").cast(pa.int64()).to_pylist()
        rest = [batch.column(name).to_pylist() for name in ("n", "total")]
        rows = list(zip(batch.column("key").to_pylist(), starts, *rest, strict=True))
        self._file.write((json.dumps([kind, self._partition, sequence, rows]) + "\n").encode())


def notes_in(folder: Path) -> list[Noted]:
    """Return the calls of all sinks whose lines are whole."""
    found = []
    for path in sorted(folder.glob("out-*.jsonl")):
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            kind, partition, sequence, rows = json.loads(line)
            found.append(Noted(kind, partition, sequence, tuple(tuple(row) for row in rows)))
    return found


# ---- the answer


def answer(folder: Path, end: int) -> dict[Group, Values]:
    """Count the rows of the files in windows that end by ``end``, with DuckDB."""
    import duckdb

    rows = f"read_json('{folder}/made-*.jsonl', columns={{key: 'BIGINT', value: 'BIGINT', \"at\": 'TIMESTAMPTZ'}})"
    start = f'epoch_us("at") - epoch_us("at") % {SIZE_US}'
    counted = f"SELECT key, {start} AS start, count(*), sum(value) FROM {rows} WHERE {start} < {end} GROUP BY ALL"
    with duckdb.connect() as connection:
        found = connection.execute(counted).fetchall()
    return {Group(key, start): Values(n, int(total)) for key, start, n, total in found}


@dataclass(frozen=True)
class Judgement:
    """The comparison of the stable results with the answer, in rows of the source and in groups."""

    rows: int = 0
    groups: int = 0
    #: Rows that the results lack, and rows that they have too many.
    lost: int = 0
    doubled: int = 0
    #: Groups with another result than the answer's, with several, or in a position with two contents.
    wrong: int = 0
    #: Rows that were shown as tentative.
    tentative: int = 0

    @property
    def exact(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)


def judged(notes: Iterable[Noted], wanted: dict[Group, Values], end: int) -> Judgement:
    """Compare stable results with the answer. A batch that came again at its position counts once, if it is the same."""
    batches: dict[tuple[int, int], tuple[tuple[int, int, int, int], ...]] = {}
    contradictions, tentative = 0, 0
    for note in notes:
        if note.kind == TENTATIVE:
            tentative += len(note.rows)
        elif batches.setdefault((note.partition, note.sequence), note.rows) != note.rows:
            contradictions += 1
    found: defaultdict[Group, list[Values]] = defaultdict(list)
    for rows in batches.values():
        for key, start, n, total in rows:
            if start < end:
                found[Group(key, start)].append(Values(n, total))
    missing = Counter({group: values.n for group, values in wanted.items()})
    missing.subtract({group: sum(each.n for each in values) for group, values in found.items()})
    return Judgement(
        rows=sum(values.n for values in wanted.values()),
        groups=len(wanted),
        lost=sum(max(each, 0) for each in missing.values()),
        doubled=sum(max(-each, 0) for each in missing.values()),
        wrong=contradictions + sum(values != [wanted.get(group)] for group, values in found.items()),
        tentative=tentative,
    )


def complete(notes: Iterable[Noted], wanted: dict[Group, Values]) -> bool:
    """Return whether each group of the answer has a stable result."""
    there = {Group(key, start) for note in notes if note.kind == STABLE for key, start, _, _ in note.rows}
    return wanted.keys() <= there


if __name__ == "__main__":
    feed(Path(sys.argv[1]), *(sys.argv[2:] or ["", ""]))
