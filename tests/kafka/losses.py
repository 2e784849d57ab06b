"""``python -m tests.kafka.losses --situations 20 --seed 7``: queries over a topic that loses records again and again, among kills
and stops, against a broker of its own. ``make test`` does not run it.

Each situation is a query with a checkpoint location: one or two stages, with and without a key, with both values of
``fail_on_data_loss``. In each of its lives records are written, and perhaps a worker is killed. Then the query is stopped, and
retention or compaction takes records that have been applied, and perhaps some that have not. Another client reads the records
that are there before they are deleted.

A worker that is killed leaves steps to be repeated, and compaction here takes records within a tenth of a second. With
``fail_on_data_loss=True`` such a query ends with DataLost, and is started again with False: it has to go on.

Law: each record that is there is in the output once, and none is there twice. A record that is gone must be in the output, too,
if it was there when a life could read it, unless a kill has left it to be repeated.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import flux
from flux.errors import DataLost
from tests.kafka.broker import Broker, create_topic
from tests.kafka.losing import COMPACTED, compact, delete_before, query_of, written
from tests.kafka.topics import all_of, send

LIVES, RECORDS, WAIT_S = 3, 80, 120.0
MARKER = b"-1"
#: Seconds between two looks at the topic while records do not come.
LOOK_S = 5.0


class Situation:
    def __init__(self, number: int, rng: random.Random, address: str, spark: Any) -> None:
        self._rng, self._address, self._spark = rng, address, spark
        self.compacted, self.fails = rng.random() < 0.4, rng.random() < 0.5
        self.stages, self.key = rng.choice([1, 2]), rng.choice([None, "key"])
        self.replicas = rng.choice([1, 2])
        self.topic = f"losses-{number}"
        create_topic(address, self.topic, **(COMPACTED if self.compacted else {}))
        self._next = self._offset = 0
        self.lost: set[int] = set()
        self.gone: set[int] = set()
        self.killed = 0
        self.goes_on = False

    def __str__(self) -> str:
        kind = "compaction" if self.compacted else "retention"
        return (
            f"{kind}, {self.stages} stages, key {self.key}, {self.replicas} replicas, fail_on_data_loss={self.fails}, "
            f"{self.killed} kills, {len(self.lost)} lost unread, {len(self.gone)} gone after a kill"
            f"{', went on after DataLost' if self.goes_on else ''}"
        )

    def _write(self) -> list[int]:
        numbers = list(range(self._next, self._next + self._rng.randint(1, RECORDS)))
        self._next += len(numbers)
        send(self._address, self.topic, [(b"key %d" % (n % 5), b"%d" % n, None, 0) for n in numbers])
        return numbers

    def run(self, folder: Path) -> None:
        for life in range(LIVES):
            try:
                self._live(folder)
            except DataLost:
                if not (self.fails and self.compacted and self.killed):
                    raise
                self.fails, self.goes_on = False, True
                before = self._next
                self._live(folder)
                # Compaction may have taken records of the life that has ended, before the next one could read them.
                self.gone |= set(range(before)) - self._there() - set(written(folder / "rows"))
            if life + 1 < LIVES:
                self._lose()
        found = written(folder / "rows")
        del found[int(MARKER)]
        twice = sorted(number for number, times in found.items() if times > 1)
        missing = sorted(set(range(self._next)) - set(found) - self.lost - self.gone)
        assert not twice, f"{len(twice)} records are there twice: {twice[:5]}"
        assert not missing, f"{len(missing)} records are missing: {missing[:5]}"

    def _live(self, folder: Path) -> None:
        flow = query_of(
            self.topic,
            self._address,
            folder / "rows",
            self.stages,
            self.key,
            self.replicas,
            fail_on_data_loss=self.fails,
        )
        query = flow.start(
            spark=self._spark, workers=3, checkpointLocation=folder / "location", progress_interval="100ms"
        )
        try:
            for _ in range(self._rng.randint(1, 3)):
                numbers = self._write()
                if self._rng.random() < 0.4:
                    self._kill(query)
                self._until_read(query, folder, numbers)
            # All that is there, also of lives that have ended with DataLost.
            self._until_read(query, folder, sorted(self._there() - {int(MARKER)}))
        finally:
            query.stop()

    def _kill(self, query: flux.Query) -> None:
        from striking import strike, until

        core = query._server.core
        until(lambda: core.table is not None and query.members(), "the query runs")
        self.killed += 1
        assert core.table is not None
        there = [worker for worker in core.table.endpoints if worker in query.members()]
        strike(query, signal.SIGKILL, worker=self._rng.choice(there))

    def _until_read(self, query: flux.Query, folder: Path, numbers: list[int]) -> None:
        end, look = time.monotonic() + WAIT_S, time.monotonic() + LOOK_S
        while True:
            found = written(folder / "rows")
            if all(found[number] or number in self.lost or number in self.gone for number in numbers):
                return
            if self.compacted and self.killed and time.monotonic() > look:
                look = time.monotonic() + LOOK_S
                self.gone |= {*numbers} - self._there()
            if query.exception() is not None:
                raise query.exception()
            missing = [number for number in numbers if not found[number]]
            progress = query.lastProgress
            assert time.monotonic() < end, (
                f"{len(missing)} of {len(numbers)} records do not come: {missing[:5]}; {progress and progress.json}"
            )
            time.sleep(0.05)

    def _there(self) -> set[int]:
        return {int(message.value()) for message in all_of(self._address, self.topic)}

    def _lose(self) -> None:
        """Delete or compact records; note those that were there before and after."""
        if not self.fails and not self.compacted and self._rng.random() < 0.5:
            self.lost |= set(self._write())
        there = all_of(self._address, self.topic)
        if self.compacted:
            compact(self._address, self.topic, 5, (b"marker", MARKER))
        elif there:
            last = there[-1].offset() + 1
            unread = len(self.lost) > 0
            delete_before(self._address, self.topic, last if unread else self._rng.randint(there[0].offset(), last))


def situations(numbers: range, seed: int, address: str, spark: Any) -> Iterator[bool]:
    for number in numbers:
        situation = Situation(number, random.Random(f"{seed} {number}"), address, spark)
        with tempfile.TemporaryDirectory() as folder:
            try:
                situation.run(Path(folder))
            except Exception as error:
                typer.echo(f"{number}: {situation}: {type(error).__name__}: {error}\n{traceback.format_exc(-3)}")
                yield False
                continue
        typer.echo(f"{number}: {situation}: right")
        yield True


def main(
    situations_: Annotated[int, typer.Option("--situations", help="try so many")] = 20,
    seed: Annotated[int, typer.Option(help="of the choices; the timing is another one each time")] = 0,
    first: Annotated[int, typer.Option(help="the number of the first one, as the output names it")] = 0,
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "spark"))
    from tests.conftest import _session

    session = _session("local-cluster[3,2,1024]", {"spark.task.maxFailures": "1000"})
    session.sparkContext.setLogLevel("OFF")
    try:
        with Broker(quick=True) as broker:
            numbers = range(first, first + situations_)
            wrong = [right for right in situations(numbers, seed, broker.address, session) if not right]
    finally:
        session.stop()
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
