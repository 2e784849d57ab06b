"""The laws that every run must keep, checked from outside with the simulation's own bookkeeping.

Two kinds of evidence: what the operators of the simulation see (rows), and what passes the seams of the state
machines (appended, applied, acked, evicted). The ledger knows the whole cluster at once, which no process does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from flux.log import Entry, Log
from flux.messages import Ack, Resume
from flux.operator import Context
from flux.plan import Plan
from flux.producer import MESSAGE_BYTES, Producer
from flux.replica import Replica
from flux.stage_worker import StageWorker
from partitioning.ids import StreamId
from partitioning.table import Table


class Violation(Exception):
    """A law was broken."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law
        self.detail = detail


class Ledger:
    def __init__(self) -> None:
        self.plan: Plan
        self.table: Table
        self.counts: Counter[str] = Counter()
        self.arrived: dict[str, Counter[Any]] = {}
        self.totals: dict[str, dict[int, tuple[int, int]]] = {}
        self.keys: dict[str, tuple[str, ...]] = {}
        #: Streams whose batches differ between attempts: their sequence numbers prove nothing.
        self.unsteady: set[StreamId] = set()
        self._ticks: dict[tuple[str, int, int, int], int] = {}
        self._home: dict[tuple[str, Any], int] = {}
        self._touching: dict[tuple[StreamId, int], list[int]] = defaultdict(list)
        self._touches: dict[StreamId, list[np.ndarray]] = defaultdict(list)
        self._applied: dict[tuple[StreamId, int], int] = defaultdict(int)  # how many of the touching batches
        self._largest: dict[StreamId, int] = defaultdict(int)
        self._credit: dict[StreamId, int] = defaultdict(int)

    # ---- rows, as operators see them

    def saw(self, stage: str, context: Context, batch: pa.RecordBatch) -> None:
        hops, ticks = batch.column("hop").to_pylist(), batch.column("tick").to_pylist()
        for hop, tick in zip(hops, ticks, strict=True):
            at = (stage, context.partition, context.input, hop)
            if tick <= self._ticks.get(at, -1):
                raise Violation("order within a stream", f"{at} got row {tick} after row {self._ticks[at]}")
            self._ticks[at] = tick
        self._one_home(stage, context, batch)

    def _one_home(self, stage: str, context: Context, batch: pa.RecordBatch) -> None:
        if self.keys[stage]:
            for key in set(zip(*(batch.column(name).to_pylist() for name in self.keys[stage]), strict=True)):
                if self._home.setdefault((stage, key), context.partition) != context.partition:
                    raise Violation("one partition per key", f"{stage}: {key} came to two partitions")

    def totals_arrived(self, stage: str, context: Context, batch: pa.RecordBatch) -> None:
        self._one_home(stage, context, batch)
        for row in batch.to_pylist():
            before = self.totals[stage].get(row["key"], (0, 0))
            if row["n"] <= before[0]:
                raise Violation(
                    "order within a stream", f"{stage}: count of {row['key']} fell from {before[0]} to {row['n']}"
                )
            self.totals[stage][row["key"]] = (row["n"], row["total"])

    # ---- producers

    def watch_producer(self, producer: Producer, careless: Callable[[], bool] | None = None) -> None:
        """``careless``: whether it shall send again, this time, what nobody asked for."""
        if careless is not None:
            self._make_careless(producer, careless)
        stream, log = producer.stream, producer.log
        append, evict = log.append, log.evict

        def watched_append(entry: Entry) -> None:
            self._appended(stream, entry)
            append(entry)

        def watched_evict(acked: np.ndarray) -> int:
            base, entries = log.base, list(log._entries)
            dropped = evict(acked)
            for sequence in range(base, base + dropped):
                self._evicted(stream, entries[sequence - base])
            return dropped

        log.append, log.evict = watched_append, watched_evict  # type: ignore[method-assign]

    def _make_careless(self, producer: Producer, chance: Callable[[], bool]) -> None:
        """Now and then it goes on from the start of its log instead of where it was told to."""
        on_resume = producer.on_resume

        def careless_resume(worker: int, message: Resume, now: float) -> None:
            on_resume(worker, message, now)
            cursor = producer._cursors.get(worker)
            if cursor is not None and cursor.nonce == message.nonce and producer.log.base < cursor.next and chance():
                self.counts["resumed too early on purpose"] += 1
                cursor.first = cursor.next = producer.log.base
                cursor.catching_up_to = 0

        producer.on_resume = careless_resume  # type: ignore[method-assign]

    def _appended(self, stream: StreamId, entry: Entry) -> None:
        self._largest[stream] = max(self._largest[stream], entry.nbytes)
        known = self._touches[stream]
        if entry.sequence < len(known):
            if stream not in self.unsteady and not np.array_equal(known[entry.sequence], entry.touches):
                raise Violation("a retried task sends the same batches", f"stream {stream}, batch {entry.sequence}")
            self.counts["batches made again by a retry"] += 1
            return
        known.append(entry.touches.copy())
        for partition in np.flatnonzero(entry.touches).tolist():
            self._touching[stream, partition].append(entry.sequence)

    def _evicted(self, stream: StreamId, entry: Entry) -> None:
        self.counts["batches evicted"] += 1
        if stream in self.unsteady:
            return
        for partition in np.flatnonzero(entry.touches).tolist():
            if not self._has_applied(stream, partition, entry.sequence):
                raise Violation(
                    "no batch leaves the log before it is applied",
                    f"stream {stream} dropped batch {entry.sequence}, which partition {partition} has not applied",
                )

    def _has_applied(self, stream: StreamId, partition: int, through: int) -> bool:
        needed = bisect_right(self._touching[stream, partition], through)
        return self._applied[stream, partition] >= needed

    def check_log(self, log: Log, stream: StreamId, where: str) -> None:
        held = sum(entry.nbytes for entry in log._entries)
        if held != log.bytes:
            raise Violation("the log counts its bytes", f"{where}, stream {stream}: {log.bytes} counted, {held} held")
        newest = log._entries[-1].nbytes if log._entries else 0
        if held - newest >= log.bytes_max and len(log._entries) > 1 and held - newest > 0:
            # The empty entry that ends a stream costs nothing and may follow a full log.
            last = log._entries[-1]
            before = log._entries[-2].nbytes if last.last else 0
            if not last.last or held - before >= log.bytes_max:
                raise Violation(
                    "log bytes <= bound + one batch", f"{where}, stream {stream}: {held} bytes, bound {log.bytes_max}"
                )

    # ---- consumers

    def watch_replica(self, replica: Replica) -> None:
        step, partition = replica.step, replica.partition

        def watched_step(now: float) -> Any:
            slices = step(now)
            for slice_ in slices:
                self._apply(slice_.stream, partition, slice_.sequence)
            return slices

        replica.step = watched_step  # type: ignore[method-assign]

    def _apply(self, stream: StreamId, partition: int, sequence: int) -> None:
        touching, count = self._touching[stream, partition], self._applied[stream, partition]
        self._applied[stream, partition] += 1
        if stream not in self.unsteady and (count >= len(touching) or touching[count] != sequence):
            expected = touching[count] if count < len(touching) else "nothing more"
            raise Violation(
                "each partition applies each batch once and in order",
                f"stream {stream}, partition {partition}: applied {sequence} where {expected} was next",
            )

    def watch_worker(self, core: StageWorker) -> None:
        answer = core._answer

        def watched_answer(connection: Any, message: Any) -> None:
            if isinstance(message, Ack | Resume):
                stream = StreamId(message.edge, message.producer)
                self._credit[stream] = max(self._credit[stream], core._inbound[stream].credit)
                self._acked(core, stream, message)
            self.counts["resets"] += type(message).__name__ == "Reset"
            self.counts["stale producers refused"] += getattr(message, "code", "") == "stale"
            answer(connection, message)

        core._answer = watched_answer  # type: ignore[method-assign]

    def _acked(self, core: StageWorker, stream: StreamId, message: Ack | Resume) -> None:
        if stream in self.unsteady:
            return
        behind = dict(message.behind)
        consumer = self.plan.edges[stream.edge].consumer
        for partition, replicas in enumerate(self.table.stages[consumer]):
            if any(replica.worker == core.worker for replica in replicas):
                through = behind.get(partition, message.through)
                if not self._has_applied(stream, partition, through):
                    raise Violation(
                        "an ack never exceeds what was applied",
                        f"worker {core.worker} acked stream {stream} through {through} for partition {partition}",
                    )

    def check_worker(self, core: StageWorker) -> None:
        for stream, producer in core.producers.items():
            self.check_log(producer.log, stream, f"worker {core.worker}")
        held: dict[StreamId, dict[int, int]] = {}
        for replica in core.replicas.values():
            for slice_ in replica._queue:
                held.setdefault(slice_.stream, {})[id(slice_.packet)] = slice_.packet.nbytes
        for stream, packets in held.items():
            bound = self._credit[stream] + self._largest[stream] + MESSAGE_BYTES
            if sum(packets.values()) > bound:
                raise Violation(
                    "bytes held <= credit + one message",
                    f"worker {core.worker} holds {sum(packets.values())} of stream {stream}, bound {bound}",
                )
