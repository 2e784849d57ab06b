"""Sources whose rows bring their offsets, out of a log that loses records at any moment: by retention at its beginning, by
compaction anywhere.

Law: each record that some life could read, and that no replica has applied, is applied once, and none twice. So the log loses two
kinds of records: records that no reader has ever come to, which no sink will see, and records that every replica has applied,
standbys in their checkpoints. The log keeps the records between, because to lose these is a loss of data, which ends a query.

After a stop that came to its end, a log loses each record that its reader has given: all of them are in checkpoints.

``LogFaults`` are losses of data besides: records between, and topics that are made anew between two lives. The law for these
losses is in ``lost_rows``."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import flux
from flux.connectors.kafka.client.topic_ids import GENERATION, LogPosition, differ, text_of
from flux.dataflow.plan import FromSource
from flux.dataflow.source import RowStart
from flux.errors import DataLost
from flux.replica.order_log import OrderLog
from flux.state.standby import Standby
from partitioning.ids import DISK, PartitionKey, StreamId
from tests.simulation.evidence import order_of
from tests.simulation.numbered_rows import THE_END, is_end
from tests.simulation.stage_kinds import ROW, Row, make_batch

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: The mean time between two losses of records of a source, and the largest share of its records that a partition loses then.
EVERY_S, SHARE = 0.05, 0.6
#: The share of losses that take records which are still needed, among losses that may take such records.
TAKES_NEEDED = 0.2


@dataclass(frozen=True)
class LogFaults:
    """Losses of data."""

    #: Whether the source goes on after a loss, as with ``fail_on_data_loss=False``.
    goes_on: bool
    #: Whether logs also lose records that some reader has come to and some replica lacks.
    needed: bool = False
    #: Whether the topic is deleted and made anew between two lives.
    anew: bool = False


@dataclass
class Log:
    """One partition of a topic: all its records, and the offsets that are gone."""

    #: All rows that the partition has had.
    rows: pa.Table
    #: The offset of each row, ascending.
    offsets: np.ndarray
    #: Offsets of rows that the log has lost.
    gone: set[int] = field(default_factory=set)
    #: Offsets that were gone before any reader came to them.
    lost: set[int] = field(default_factory=set)
    #: The offset behind the last row that any reader has come to.
    read: int = 0
    #: Losses of data: offsets that were gone before all replicas had applied them.
    needed: set[int] = field(default_factory=set)
    #: Needed offsets whose loss ends the query, unless the query goes on after a loss.
    told: set[int] = field(default_factory=set)
    #: The first offset that retention has left.
    begins: int = 0
    #: Whether retention took records that had just been applied: producers may not know yet that these are needed no more.
    soon: bool = False
    #: The number of times that the topic was made anew.
    topic: int = 0
    #: The log of the topic before.
    before: Log | None = None
    #: The generation that readers give this topic; None: no reader has come to it.
    generation: int | None = 0

    @classmethod
    def of(cls, batches: list[pa.RecordBatch], rng: random.Random) -> Log:
        rows = pa.Table.from_batches(batches, ROW).combine_chunks() if batches else ROW.empty_table()
        # Some offsets have never had a row, like the ends of transactions in a topic.
        steps = [rng.choice([1, 1, 1, 2, 5]) for _ in range(rows.num_rows)]
        return cls(rows, np.cumsum(np.array([rng.choice([-1, 0, 7]), *steps], np.int64))[1:])

    def lose(self, offset: int) -> None:
        self.gone.add(offset)
        if offset >= self.read:
            self.lost.add(offset)

    def lose_needed(self, offset: int, told: bool) -> None:
        self.gone.add(offset)
        self.needed.add(offset)
        if told:
            self.told.add(offset)

    @property
    def topics(self) -> Iterator[Log]:
        """The logs of all topics of this name, the newest first."""
        log: Log | None = self
        while log is not None:
            yield log
            log = log.before

    def number(self, offset: int) -> int | None:
        """Return the number of the row at an offset; None if no reader has come to this topic."""
        return None if self.generation is None else self.generation * GENERATION + offset

    def has_lost(self, number: int) -> bool:
        """Tell whether the row with a number was gone before all replicas had applied it. This holds also for a number of a
        generation that no topic has any more: its row has another number now."""
        generation, offset = divmod(number, GENERATION)
        log = next((log for log in self.topics if log.generation == generation), None)
        return log is None or offset in log.needed

    def there(self, start: int) -> np.ndarray:
        """Return the places of the rows from an offset on that the log still has."""
        first = int(np.searchsorted(self.offsets, start))
        places = np.arange(first, len(self.offsets))
        return places[~np.isin(self.offsets[first:], list(self.gone))] if self.gone else places


@dataclass
class Logs:
    """The logs of all partitions of a source."""

    of: list[Log]
    #: Losses of data; None: there are none.
    faults: LogFaults | None = None
    #: The topic that the program found when it started the query.
    prepared: int = 0
    #: Whether the model of the rows has only rows that count for sure; otherwise it has all rows that may count.
    sure: bool = False

    def go_on(self, earlier: Logs) -> None:
        self.of[:], self.prepared = earlier.of, earlier.prepared

    def lost_rows(self) -> list[Row]:
        """List the rows that do not count: no reader could come to them, or, if only sure rows count, a needed one was lost."""
        return [row for first in self.of for log in first.topics for row in _rows_at(log, log.lost | self._unsure(log))]

    def _unsure(self, log: Log) -> set[int]:
        assert self.faults is not None or not log.needed
        if self.faults is None or not self.sure:
            return set()
        return log.needed if self.faults.goes_on else log.needed - log.told

    def later_rows(self) -> list[Row]:
        """List the rows of topics that were made anew."""
        return [
            row
            for first in self.of
            for log in first.topics
            if log.topic
            for row in _rows_at(log, {*log.offsets.tolist()})
        ]

    def made_anew(self) -> bool:
        return any(log.topic for log in self.of)

    def needed(self) -> int:
        """Count the lost records that some replica may have lacked."""
        return sum(len(log.needed) for first in self.of for log in first.topics)

    def taken_soon(self) -> bool:
        """Tell whether retention has taken records as soon as they were applied."""
        return any(log.soon for first in self.of for log in first.topics)


def _rows_at(log: Log, offsets: set[int]) -> list[Row]:
    rows = log.rows.take(np.flatnonzero(np.isin(log.offsets, list(offsets)))).to_pylist() if offsets else []
    return [(row["id"], row["key"], row["word"]) for row in rows]


class OffsetReader:
    """A reader of logs, called as ``read(partition, start)``. It cuts its rows elsewhere each time, and gives positions now and
    then."""

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


class TopicReader(OffsetReader):
    """A reader of topics that may be made anew, and that lose needed records. It finds its place as the reader of Kafka does,
    with the same positions."""

    def __init__(self, logs: Logs, idle: float, rng: random.Random, faults: LogFaults) -> None:
        super().__init__(logs, idle, rng)
        self.goes_on_after_loss = faults.goes_on

    def __call__(self, partition: int, start: Any) -> Iterator[Any]:
        log, rng = self._logs.of[partition], self._rng
        most, often = rng.choice([1, 5, 20, 60]), rng.choice([0.3, 1.0, 1.0])
        place = self._place(log, start)
        log.generation = place.generation
        while True:
            while rng.random() < self._idle:
                yield None
            if place.offset < log.begins:
                if not self.goes_on_after_loss:
                    raise DataLost(f"offset {place.offset} was to be read next, but the log begins with {log.begins}")
                place = place._replace(offset=log.begins)
            places = log.there(place.offset)
            if not len(places):
                return
            places = places[: rng.randint(1, most)]
            offsets = log.offsets[places]
            (batch,) = log.rows.take(places).combine_chunks().to_batches()
            place = place._replace(offset=int(offsets[-1]) + 1)
            log.read = max(log.read, place.offset)
            position = place.position if rng.random() < often else None
            yield flux.Positioned(batch, position, place.first_number + offsets)

    def _place(self, log: Log, start: Any) -> LogPosition:
        place = LogPosition(0, _topic_id(self._logs.prepared), self._logs.prepared)
        newest = None
        if isinstance(start, RowStart):
            newest = None if start.newest is None else LogPosition.of(start.newest)
            place = place.at(start.number, start.position, newest)
        elif start is not None:
            place = LogPosition.of(start)
        known = newest or place
        topic_id = _topic_id(log.topic)
        if any(differ(each.topic_id, topic_id) for each in (place, known)) and not self.goes_on_after_loss:
            raise DataLost("the topic was made anew")
        if differ(place.topic_id, topic_id):
            anew = known.topic_id != topic_id
            behind = max(place.generation, known.generation) + 1
            generation = max(behind, self._logs.prepared) if anew else known.generation
            return LogPosition(0, topic_id, generation)
        if newest is not None:
            found = place.behind_cut(newest)
            assert found is not None, "no log of the simulation is cut off"
            place = found
        return place._replace(topic_id=topic_id)


def _topic_id(topic: int) -> str:
    return text_of(uuid.UUID(int=topic + 1))


def _is_committed(order: OrderLog, stream: StreamId, number: int) -> bool:
    """Tell whether a step that is committed, and in no checkpoint yet, has a row."""
    entries = order.since(order.base)[: max(order.committed - order.base, 0)]
    return any(
        (edge, producer) == stream and through >= number
        for entry in entries
        for edge, producer, through in entry.slices
    )


class Losses:
    """Losses of the logs of a run, until it is calm."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._rng = random.Random(f"losses {sim.seed} {0 if sim.life is None else sim.life.number}")
        self._logs = {source: data.logs for source, data in sim.source_data.items() if data.logs is not None}
        if self._logs:
            sim.ledger.is_gone = self._is_gone
            faults = [logs.faults for logs in self._logs.values()]
            sim.ledger.goes_on = any(each is not None and each.goes_on for each in faults)
            if sim.life is not None and sim.life.number:
                for log in (log for logs in self._logs.values() for log in logs.of):
                    self._lose_unread(log)
                for source, logs in self._logs.items():
                    self._while_away(source, logs)
            sim.world.after(self._rng.expovariate(1 / EVERY_S), self._strike)

    def _is_gone(self, stream: StreamId, number: int) -> bool:
        edge = self._sim.plan.edges[stream.edge]
        logs = self._logs.get(edge.source) if isinstance(edge, FromSource) else None
        return logs is not None and logs.of[stream.producer].has_lost(number)

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
        """Lose the rows that the readers of this moment have given, after a stop of the query."""
        for core in self._sim.hosts():
            for (source, partition), streams in core.sources.items():
                log = self._logs[source].of[partition] if source in self._logs else None
                given = [] if log is None else log.offsets[:-1][log.offsets[:-1] < streams.next_number].tolist()
                for offset in given:
                    if offset not in log.gone:  # type: ignore[union-attr]
                        log.lose(offset)  # type: ignore[union-attr]
                        self._sim.counts["records that a log has lost after a stop"] += 1

    def _lose_unread(self, log: Log) -> None:
        """Lose rows that no reader has come to, because time goes by while nothing runs."""
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
        faults = self._logs[source].faults
        takes_needed = faults is not None and faults.needed and self._rng.random() < TAKES_NEEDED
        if retention and faults is not None and not faults.goes_on:  # otherwise hardly any run would go far
            wanted = [place for place in wanted if log.offsets[place] < log.read]
        for offset in log.offsets[np.sort(np.array(wanted, np.int64))].tolist():
            if offset < log.read and not self._applied_everywhere(source, partition, offset):
                if takes_needed:
                    self._lose_needed(source, partition, log, offset, retention)
                    continue
                if retention:
                    return
                continue
            log.lose(offset)
            if retention:
                log.begins, log.soon = offset + 1, True
            self._sim.counts["records that a log has lost" + ("" if offset < log.read else " unread")] += 1

    def _lose_needed(self, source: int, partition: int, log: Log, offset: int, retention: bool) -> None:
        """Lose a record that some replica may lack."""
        log.lose_needed(offset, retention or self._committed(source, partition, log, offset))
        if retention:
            log.begins = offset + 1
        self._note_loss(source)
        self._sim.counts["records that a log has lost while they were needed"] += 1

    def _note_loss(self, source: int) -> None:
        """Note that batches made of the rows of this source may be made again with fewer rows, from now on."""
        plan, ledger = self._sim.plan, self._sim.ledger
        ledger.lossy = True
        edges, seen = [edge.id for edge in plan.edges_of_source(source)], set[int]()
        while edges:
            stage = plan.stages[plan.edges[edges.pop()].consumer]
            fresh = [edge for edge in stage.edges_out if edge not in seen]
            seen.update(fresh)
            edges += fresh
            ledger.unsteady.update(StreamId(edge, producer) for edge in fresh for producer in range(stage.partitions))

    def _while_away(self, source: int, logs: Logs) -> None:
        """Make a topic anew, or let it lose records that were read, while nothing runs."""
        sim, faults, rng = self._sim, logs.faults, self._rng
        if faults is None or rng.random() < 0.3:
            return
        streams = [StreamId(edge.id, p) for edge in sim.plan.edges_of_source(source) for p in range(len(logs.of))]
        given = [sim.ledger.newest_given(stream) for stream in streams]
        ended = any(each is not None and is_end(each) for each in given)
        if faults.anew and not ended and rng.random() < 0.7:
            for partition, log in enumerate(logs.of):
                logs.of[partition] = self._made_anew(source, partition, log)
            logs.prepared = logs.of[0].topic if faults.goes_on else logs.prepared
            sim.counts["topics that were made anew"] += 1
            self._note_loss(source)
        elif faults.needed:
            for partition, log in enumerate(logs.of):
                retention, share = rng.random() < 0.5, rng.random()
                read = [offset for offset in log.offsets[:-1].tolist() if offset < log.read and offset not in log.gone]
                for offset in read:
                    if retention or rng.random() < share:
                        self._lose_in_vain(source, partition, log, offset, retention)
                    if retention and rng.random() > share:
                        break

    def _made_anew(self, source: int, partition: int, log: Log) -> Log:
        """Make the log of the next topic of this name, longer or shorter."""
        for offset in log.offsets.tolist():
            if offset not in log.gone:
                if offset < log.read:
                    self._lose_in_vain(source, partition, log, offset, True)
                else:
                    log.lose(offset)
        topic, rng = log.topic + 1, self._rng
        first = topic * 1_000_000 + source * 100_000 + partition * 10_000
        rows = [
            (first + i, rng.randrange(50), "w" * rng.choice([1, 5]))
            for i in range(rng.randint(1, 2 * len(log.offsets) + 2))
        ]
        batch = make_batch(rows, partition, first)
        return replace(Log.of([batch], rng), topic=topic, before=log, generation=None)

    def _lose_in_vain(self, source: int, partition: int, log: Log, offset: int, retention: bool) -> None:
        """Lose a record while nothing runs: the directory alone says whether it is needed."""
        assert self._sim.life is not None
        kept, number = self._sim.life.kept(), log.number(offset)
        has, committed = True, True
        for edge in self._sim.plan.edges_of_source(source):
            stream = StreamId(edge.id, partition)
            given = None if number is None else self._sim.ledger._given_rows[stream].get(number)
            for whose in () if given is None else given[0]:
                standby = kept.get(PartitionKey(edge.consumer, whose))
                has = has and standby is not None and standby.checkpoint.next.get(stream, 0) > (number or 0)
                committed = committed and standby is not None and _is_committed(standby.order, stream, number or 0)
            has, committed = has and given is not None, committed and given is not None
        if retention:
            log.begins, log.soon = offset + 1, True
        if has:
            log.lose(offset)
            return
        log.lose_needed(offset, told=retention or committed)
        self._note_loss(source)
        self._sim.counts["records that a log has lost while nothing ran"] += 1

    def _committed(self, source: int, partition: int, log: Log, offset: int) -> bool:
        """Tell whether each consumer has the row at an offset in a step that is committed."""
        sim, number = self._sim, log.number(offset)
        for edge in sim.plan.edges_of_source(source):
            stream = StreamId(edge.id, partition)
            given = None if number is None else sim.ledger._given_rows[stream].get(number)
            if given is None or number is None:
                return False
            for whose in given[0]:
                key = PartitionKey(edge.consumer, whose)
                found = [core.replicas.get(key) or core.hosted.followers.get(key) for core in sim.hosts()]
                orders = [order for each in found if each is not None and (order := order_of(each)) is not None]
                if not any(_is_committed(order, stream, number) for order in orders):
                    return False
        return True

    def _applied_everywhere(self, source: int, partition: int, offset: int) -> bool:
        return all(
            self._applied(StreamId(edge.id, partition), edge.consumer, self._logs[source].of[partition].number(offset))
            for edge in self._sim.plan.edges_of_source(source)
        )

    def _applied(self, stream: StreamId, stage: int, number: int | None) -> bool:
        """Tell whether no replica lacks a row of a stream, and no replica that may still be made lacks it."""
        sim, ledger = self._sim, self._sim.ledger
        given = None if number is None else ledger._given_rows[stream].get(number)
        if number is None or given is None or given[1] is THE_END:
            return False  # a reader has the row, and has not handed it on
        table = sim.controller.table
        for partition in given[0]:
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
                    if kept.checkpoint.next.get(stream, 0) <= number:
                        return False
                elif replica is None and key in core.awaited:
                    continue  # the state of this replica is to come from one of the others
                elif replica is None or not ledger._has_applied(replica, stream, number):
                    return False
        return True


def losing_reader(
    batches: Callable[[int], list[pa.RecordBatch]],
    partitions: int,
    idle: float,
    rng: random.Random,
    faults: LogFaults | None = None,
) -> tuple[OffsetReader, Logs]:
    logs = Logs([Log.of(batches(partition), rng) for partition in range(partitions)], faults)
    return OffsetReader(logs, idle, rng) if faults is None else TopicReader(logs, idle, rng, faults), logs
