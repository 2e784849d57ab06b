"""Sources whose rows bring their offsets, out of a log that loses records at any moment: by retention at its beginning, by
compaction anywhere.

Law: each record that some life could read, and that no replica has applied, is applied once, and none twice. So the log loses two
kinds of records: those that no reader has ever come to, which no sink will see, and those that every replica has applied,
standbys in their checkpoints. It keeps the records between, because to lose these is a loss of data, which ends a query.

After a stop that was waited for to its end, a log loses each record that its reader has given: all of them are in checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import flux
from flux.dataflow.source import RowStart
from flux.state.standby import Standby
from partitioning.ids import DISK, PartitionKey, StreamId
from tests.simulation.numbered_rows import THE_END
from tests.simulation.stage_kinds import ROW, Row

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: How often a partition of a source loses some records, and at most how large a part of them.
EVERY_S, SHARE = 0.05, 0.6


@dataclass
class Log:
    """One partition: what stood at each offset, and still does unless it is ``gone``. ``read``: behind the last offset that any
    reader has come to; ``lost``: offsets that were gone before any reader came to them. ``rows``: all there were."""

    rows: pa.Table
    offsets: np.ndarray
    gone: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    read: int = 0

    @classmethod
    def of(cls, batches: list[pa.RecordBatch], rng: random.Random) -> Log:
        rows = pa.Table.from_batches(batches, ROW).combine_chunks() if batches else ROW.empty_table()
        # Some offsets have never had a row, as the ends of transactions have none.
        steps = [rng.choice([1, 1, 1, 2, 5]) for _ in range(rows.num_rows)]
        return cls(rows, np.cumsum(np.array([rng.choice([-1, 0, 7]), *steps], np.int64))[1:])

    def lose(self, offset: int) -> None:
        self.gone.add(offset)
        if offset >= self.read:
            self.lost.add(offset)

    def there(self, start: int) -> np.ndarray:
        """Places of the rows from an offset on that are there."""
        first = int(np.searchsorted(self.offsets, start))
        places = np.arange(first, len(self.offsets))
        return places[~np.isin(self.offsets[first:], list(self.gone))] if self.gone else places


@dataclass
class Logs:
    """All partitions of a source."""

    of: list[Log]

    def lost_rows(self) -> list[Row]:
        """Rows that no reader could come to."""
        found = []
        for log in self.of:
            for place in np.flatnonzero(np.isin(log.offsets, list(log.lost))).tolist():
                (row,) = log.rows.slice(place, 1).to_pylist()
                found.append((row["id"], row["key"], row["word"]))
        return found


class OffsetReader:
    """``read(partition, start)``; it cuts its rows elsewhere each time, and gives positions now and then."""

    row_numbers = True

    def __init__(self, logs: Logs, idle: float, rng: random.Random) -> None:
        self._logs, self._idle, self._rng = logs, idle, rng

    def __call__(self, partition: int, start: Any) -> Iterator[Any]:
        log, rng = self._logs.of[partition], self._rng
        # A broken variant that counts rows gives positions.
        at = start.number if isinstance(start, RowStart) else start[0] if start else 0
        most, often = rng.choice([1, 5, 20, 60]), rng.choice([0.3, 1.0, 1.0])
        while True:
            while rng.random() < self._idle:
                yield None
            places = log.there(at)
            if not len(places):
                return
            places = places[: rng.randint(1, most)]
            numbers = log.offsets[places]
            (batch,) = log.rows.take(places).combine_chunks().to_batches()
            at = int(numbers[-1]) + 1
            log.read = max(log.read, at)
            yield flux.Positioned(batch, [at] if rng.random() < often else None, numbers)


class Losses:
    """Of a run: what the logs of its sources lose, until it is calm."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._rng = random.Random(f"losses {sim.seed} {0 if sim.life is None else sim.life.number}")
        self._logs = {
            source.id: data.logs
            for source, data in zip(sim.plan.sources, sim.dataflow.sources, strict=True)
            if data.logs is not None
        }
        if self._logs:
            if sim.life is not None and sim.life.number:
                for log in (log for logs in self._logs.values() for log in logs.of):
                    self._lose_unread(log)
            sim.world.after(self._rng.expovariate(1 / EVERY_S), self._strike)

    def _strike(self) -> None:
        sim = self._sim
        if sim.world.now >= sim.strikes.calm_at:
            return
        for source, logs in self._logs.items():
            for partition, log in enumerate(logs.of):
                if self._rng.random() < 0.5:
                    self._lose_some(source, partition, log)
        sim.world.after(self._rng.expovariate(1 / EVERY_S), self._strike)

    def lose_what_was_read(self) -> None:
        """Lose what the readers of this moment have given, after a stop of the query."""
        for core in self._sim.hosts():
            for (source, partition), streams in core.sources.items():
                log = self._logs[source].of[partition] if source in self._logs else None
                given = [] if log is None else log.offsets[:-1][log.offsets[:-1] < streams.next_number].tolist()
                for offset in given:
                    if offset not in log.gone:  # type: ignore[union-attr]
                        log.lose(offset)  # type: ignore[union-attr]
                        self._sim.counts["records that a log has lost after a stop"] += 1

    def _lose_unread(self, log: Log) -> None:
        """While nothing runs, time goes by."""
        for offset in log.offsets[:-1].tolist():
            if offset >= log.read and self._rng.random() < SHARE / 4:
                log.lose(offset)

    def _lose_some(self, source: int, partition: int, log: Log) -> None:
        places = log.there(0)[:-1]  # no log loses its last record while it is read to its end
        if not len(places):
            return
        retention = self._rng.random() < 0.5
        wanted = places[: self._rng.randint(1, len(places))] if retention else self._rng.sample(
            places.tolist(), self._rng.randint(1, max(int(SHARE * len(places)), 1))
        )  # fmt: skip
        for offset in log.offsets[np.sort(np.array(wanted))].tolist():
            if offset < log.read and not self._applied_everywhere(source, partition, offset):
                if retention:
                    return
                continue
            log.lose(offset)
            self._sim.counts["records that a log has lost" + ("" if offset < log.read else " unread")] += 1

    def _applied_everywhere(self, source: int, partition: int, offset: int) -> bool:
        return all(
            self._applied(StreamId(edge.id, partition), edge.consumer, offset)
            for edge in self._sim.plan.edges_of_source(source)
        )

    def _applied(self, stream: StreamId, stage: int, offset: int) -> bool:
        """Whether no replica, and none that may come of what there is, lacks a row of a stream."""
        sim, ledger = self._sim, self._sim.ledger
        given = ledger._given[stream]
        if offset >= len(given) or given[offset] is None or given[offset][1] is THE_END:
            return False  # a reader has it, and has not handed it on
        table = sim.controller.table
        for partition in given[offset][0]:
            if table is None or (stage, partition) in sim.controller.repairs.under_way:
                return False
            rows = (each.stages[stage][partition] for each in (table, sim.controller.board.shown))
            for listed in {replica for row in rows for replica in row}:
                core = sim.core_of(listed.worker)
                if core is None:
                    if listed.kind == DISK:
                        return False
                    continue
                key = PartitionKey(stage, partition)
                replica, kept = core.replicas.get(key), core.hosted.followers.get(key)
                if isinstance(kept, Standby):
                    if kept.checkpoint.next.get(stream, 0) <= offset:
                        return False
                elif replica is None and key in core.awaited:
                    continue  # its state is to come from one of the others
                elif replica is None or not ledger._has_applied(replica, stream, offset):
                    return False
        return True


def losing_reader(
    batches: Callable[[int], list[pa.RecordBatch]], partitions: int, idle: float, rng: random.Random
) -> tuple[OffsetReader, Logs]:
    logs = Logs([Log.of(batches(partition), rng) for partition in range(partitions)])
    return OffsetReader(logs, idle, rng), logs
