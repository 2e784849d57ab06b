"""The streams of one partition of a source, the same for both kinds of readers: ingress tasks and workers (design:
stream, seek)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import pyarrow as pa

from flux.dataflow.columns import picked
from flux.dataflow.plan import EdgePlan
from flux.stream.checksum import extend, extend_each
from flux.stream.earlier import Beginning
from flux.stream.numbered import ROTATION_ROWS, with_numbers
from flux.stream.positions import ReaderPosition, position_before, unpacked
from flux.stream.producer import Producer
from partitioning.cluster import Clustered, Clustering, pieces

#: Times the bound of a log and a batch: what the same rows take at most, however small the batches that they are cut into.
AGAIN = 8
#: Positions that wait to be applied, at most. An even number; asked once a second, so many are a good minute, and of more every
#: second one will do.
WAITING_MAX = 128


class SourceStreams:
    """The streams of one partition of a source: one per edge that leaves the source, fed with the same batches."""

    def __init__(
        self,
        edges: Sequence[EdgePlan],
        producers: Sequence[Producer],
        name: str,
        seeks: bool = False,
        positions: bool = False,
        batch_bytes: int = 0,
    ) -> None:
        """``seeks``: the source can begin elsewhere than at its start, and this is not the first life of its partition;
        ``positions``: its reader has positions of its own, and its rows are numbered; ``batch_bytes``: of one batch at most."""
        self.edges = edges
        self.producers = producers
        self.name = name
        self.rows = 0
        self.batches = 0
        self.pauses = 0  # how often the source had nothing just now
        self.ended = False
        self.first: int | None = None if seeks else 0  # element to begin with; None: workers have not said yet
        self._positions = positions
        self._clusterings: list[Clustering | None] = [None] * len(edges)
        wanted = [edge.columns for edge in edges]
        # What nobody looks at may be other when it is read again.
        self._read = None if None in wanted else sorted({column for columns in wanted for column in columns or ()})
        for producer in producers:
            producer.earlier.numbered = positions
        self._again_bytes = AGAIN * (batch_bytes + max((producer.log.bytes_max for producer in producers), default=0))
        self._start = b""  # where the reader begins, packed; empty: at its start
        self._checksum = 0
        self._newest: tuple[int, bytes] | None = (
            None  # position that came since ``applied`` was asked, and the row before it
        )
        self._waiting: list[tuple[int, bytes]] = []  # the same for earlier ones, which were not applied then
        self._awaited = False  # some worker has answered

    def place(self) -> bool:
        """Whether it is known with which element to begin. A source that seeks skips the batches that all consumers
        have applied. It does not begin before a worker waits for rows: reading takes long, and would hold up the
        handshakes of this very worker."""
        if not self._awaited:
            self._awaited = any(producer.awaited for producer in self.producers)
            if not self._awaited:
                return False
        if self.first is None:
            floors = [producer.floor() for producer in self.producers]
            known = [floor for floor in floors if floor is not None]
            if len(known) == len(floors):
                self._begin(min(known))
        return self.first is not None

    def _begin(self, beginning: Beginning) -> None:
        self.first, self._checksum, self._start = beginning
        for producer in self.producers:
            producer.begin_at(self.first, self._checksum)

    @property
    def position(self) -> ReaderPosition:
        """The position at which its reader begins, once that is known."""
        assert self.first is not None
        if not self._positions:
            return position_before(self.first)
        return unpacked(self._start) if self._start else ReaderPosition(None)

    @property
    def has_room(self) -> bool:
        """Whether the reader may go on. If one of its streams makes rows that were there before, all have room beyond the bounds
        of their logs: an ordered step may need rows that were in the log together when batches were cut elsewhere, and rows go
        to all streams alike (design: numbered-rows)."""
        full = [producer for producer in self.producers if not producer.has_room]
        return not full or (self._makes_again and all(map(self._has_more_room, full)))

    @property
    def room_bytes(self) -> int:
        """What all logs have room for, and one batch more."""
        return min([producer.log.bytes_max - producer.log.bytes for producer in self.producers])

    @property
    def _makes_again(self) -> bool:
        return any(each.next_sequence < each.earlier.front for each in self.producers)

    def _has_more_room(self, producer: Producer) -> bool:
        return not producer.finished and not producer.resting and producer.log.bytes < self._again_bytes

    @property
    def drained(self) -> bool:
        return all(producer.drained for producer in self.producers)

    @property
    def elements(self) -> int:
        """How many numbers this life has given, as ``first`` counts: of rows where these are numbered, else of batches."""
        return self.rows if self._positions else self.batches

    def append(self, batch: pa.RecordBatch, created: float, position: bytes = b"") -> None:
        """Append a batch to all streams. It is copied while it is clustered, so the caller may reuse its memory. ``position``
        behind it, packed."""
        self.rows += batch.num_rows
        self.batches += 1
        if self._positions:
            self._append_numbered(batch, created, position)
            return
        # The checksum is of the rows as read, because their clustering depends on the table of the moment.
        self._checksum = extend(self._checksum, picked(batch, self._read))
        for at, (edge, producer) in enumerate(zip(self.edges, self.producers, strict=True)):
            turn = producer.stream.producer + producer.next_sequence
            producer.append(self._clustered(picked(batch, edge.columns), at, turn), created, self._checksum)

    def append_each(self, batches: Sequence[tuple[pa.RecordBatch, float]]) -> int:
        """Append small batches of the same schema, which were read then, as many as there is room for; how many. Not where rows
        are numbered."""
        assert not self._positions
        together, sizes = pa.concat_batches([batch for batch, _ in batches]), [batch.num_rows for batch, _ in batches]
        checksums = extend_each(self._checksum, picked(together, self._read), sizes)
        clustered = [
            self._each_clustered(picked(together, edge.columns), sizes, at) for at, edge in enumerate(self.edges)
        ]
        appended = 0
        while appended < len(batches) and self.has_room:
            self.rows += sizes[appended]
            self.batches += 1
            self._checksum = checksums[appended]
            for producer, each in zip(self.producers, clustered, strict=True):
                producer.append(each[appended], batches[appended][1], self._checksum)
            appended += 1
        return appended

    def _each_clustered(self, together: pa.RecordBatch, sizes: Sequence[int], at: int) -> list[Clustered]:
        edge, producer = self.edges[at], self.producers[at]
        if edge.key:
            return self._clustering(together, at).each_by_key(together, sizes, producer.by_rank)
        first = producer.stream.producer + producer.next_sequence
        return [self._clustered(batch, at, turn) for turn, batch in enumerate(pieces(together, sizes), first)]

    def _clustered(self, batch: pa.RecordBatch, at: int, turn: int) -> Clustered:
        """For the edge at this place. ``turn``: whose turn it is where there is no key."""
        edge, clustering = self.edges[at], self._clustering(batch, at)
        if edge.key:
            return clustering.by_key(batch, self.producers[at].by_rank)
        return clustering.whole(batch, turn % edge.partitions)

    def _clustering(self, batch: pa.RecordBatch, at: int) -> Clustering:
        """For batches like this one."""
        clustering = self._clusterings[at]
        if clustering is None:
            edge = self.edges[at]
            clustering = self._clusterings[at] = Clustering(batch.schema, edge.key, edge.partitions)
        return clustering

    def until_cut(self, rows: int) -> int:
        """How many of the next rows may be one batch. Batches that are counted are never cut."""
        if not self._positions:
            return rows
        first = self.producers[0].next_sequence
        ends = {first + rows}
        for edge, producer in zip(self.edges, self.producers, strict=True):
            ends.update(producer.earlier.cuts(first, first + rows)[:1])
            if not edge.key:
                ends.add(first - first % ROTATION_ROWS + ROTATION_ROWS)
        return min(ends) - first

    def _append_numbered(self, batch: pa.RecordBatch, created: float, position: bytes) -> None:
        first = self.producers[0].next_sequence
        checksum = extend(0, picked(batch, self._read))
        if position:
            self._newest = first + batch.num_rows - 1, position
        for at, (edge, producer) in enumerate(zip(self.edges, self.producers, strict=True)):
            turn = producer.stream.producer + first // ROTATION_ROWS
            numbered = with_numbers(picked(batch, edge.columns), first)
            producer.append(self._clustered(numbered, at, turn), created, checksum, position)

    def applied(self) -> bytes:
        """The newest position, packed, that all replicas of all consumers have applied the rows before (design:
        applied-positions); empty if there is none since it was asked last. It knows the positions that were the newest when it
        was asked: ask it now and then."""
        if self._newest is not None:
            self._waiting.append(self._newest)
            self._newest = None
        if len(self._waiting) == WAITING_MAX:
            del self._waiting[::2]  # the newest stays, because the number is even
        count = bisect_left(self._waiting, True, key=lambda each: not self._applied_through(each[0]))
        if not count:
            return b""
        position = self._waiting[count - 1][1]
        del self._waiting[:count]
        return position

    def _applied_through(self, sequence: int) -> bool:
        return all(producer.applied_through(sequence) for producer in self.producers)

    def finish(self, created: float) -> None:
        self.ended = True
        for producer in self.producers:
            producer.finish(created)
