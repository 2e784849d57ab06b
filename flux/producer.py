"""The sending end of one stream, as a state machine without I/O (DESIGN 3).

Law: a batch is in the log until every replica of every partition with rows in it has acked it; to each worker its
slices go in order, each once per handshake, never beyond the credit granted. A destination without credit holds back
its own cursor and nobody else's.

Left to others: clustering (partitioning.cluster), frames (codec), sockets (transport).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from flux.errors import FluxError, NonDeterministicInputError, RefusedError
from flux.log import Entry, Log, Meter
from flux.messages import Ack, Data, Hello, Install, Mark, Orders, Refuse, Reset, Resume, Standby
from partitioning.cluster import Clustered
from partitioning.ids import StreamId
from partitioning.table import Table

#: Ack of a partition that a worker does not host: never the minimum.
_NOT_MINE = np.iinfo(np.int64).max
#: No sequence is held back.
NEVER = 1 << 62
#: What a message costs in credit beside its rows, so that credit also bounds the number of small messages.
MESSAGE_BYTES = 256
#: Times the resend timeout: how often a replica that nobody reads from asks whether that is still so.
STANDBY_PATIENCE = 4
#: Times the resend timeout: a stream that owes rows stands still for no longer, whatever was lost and however long the
#: silence before that was. A consumer that comes back from a long step finds one greeting for each such time, which cost
#: little: all that was sent before them is received before them.
PATIENCE_MAX = 4.0


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Effect: send a message (and, for Data, its record batches) to the data port of a worker."""

    worker: int
    message: Hello | Data | Orders | Install
    batches: tuple[pa.RecordBatch, ...] = ()
    payload: bytes | memoryview | None = None


@dataclass
class Cursor:
    """How far one worker has been served. ``since[p]``: incarnation of the replica of p on this worker; ``coming[p]``: that
    replica is not live; ``epoch``: of the table that brought the last change of what it hosts."""

    hosts: np.ndarray
    since: np.ndarray
    acked: np.ndarray
    coming: np.ndarray
    epoch: int
    answered: bool = False
    nonce: int | None = None
    number: int = 0
    next: int = 0
    first: int = 0
    wanted_from: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    catching_up_to: int = 0
    sent_bytes: int = 0
    granted: int = 0
    hello_due: float = 0.0
    heard: float = 0.0
    patience: float = 1.0


class Producer:
    """Appended to by its owner, drained by ``poll``; told of answers by ``on_*``."""

    def __init__(
        self,
        stream: StreamId,
        incarnation: int,
        partitions: int,
        log_bytes_max: int,
        resend_s: float,
        meter: Meter | None = None,
        worker: int = -1,
        base: int = 0,
    ) -> None:
        self.stream = stream
        self.incarnation = incarnation
        self.partitions = partitions
        self.log = Log(log_bytes_max, meter, base, partitions)
        self.dirty = True  # poll may have something to send
        self.finished = False
        #: Batches from here on may not be sent yet: the step that made them is not committed (release rule).
        self.release_from = NEVER
        self.rows = 0
        self.resent_handshakes = 0
        self._resend_s = resend_s
        self._worker = worker
        self._epoch = -1
        self._now = self._patient_until = 0.0
        self._table: Table | None = None
        self._stage = -1
        self._cursors: dict[int, Cursor] = {}
        self._acked = np.full(partitions, -1, np.int64)
        self._last = np.full(partitions, -1, np.int64)  # newest batch with rows for a partition
        self._everyone = np.ones(partitions, bool)
        self._checksum = 0
        self._expected: dict[int, tuple[int, int]] = {}  # sequence -> (checksum, worker that said so)
        self.order: np.ndarray | None = None

    # ---- the owner's side

    @property
    def has_room(self) -> bool:
        """Whether the owner may append. False is back-pressure: wait for acks."""
        return self.log.has_room and not self.finished

    @property
    def drained(self) -> bool:
        return self.finished and not self.log

    @property
    def awaited(self) -> bool:
        """Whether any worker has answered a greeting."""
        return any(cursor.answered for cursor in self._cursors.values())

    @property
    def next_sequence(self) -> int:
        return self.log.end

    def floor(self) -> tuple[int, int] | None:
        """Where a retried producer may begin: a batch through which all is applied, and the checksum of the stream before
        it. What is only received does not count: a new replica may come to need it; and that last batch is made once
        more, because it may be the end of the stream. None: not all workers have answered yet, or a new replica is about
        to get its state, which is worth waiting for: without it everything has to be made again; (0, 0): at the start."""
        if not self._cursors or not all(cursor.answered for cursor in self._cursors.values()):
            return None
        found = self._known_before(min(int(cursor.acked.min()) for cursor in self._cursors.values()))
        if found == (0, 0) and self._now < self._patient_until:
            known = [np.where(cursor.coming, _NOT_MINE, cursor.acked).min() for cursor in self._cursors.values()]
            if self._known_before(int(min(known))) != (0, 0):
                return None
        return found

    def _known_before(self, applied: int) -> tuple[int, int]:
        """The last batch through ``applied`` before which somebody has shown the checksum, and that."""
        at = max((at for at in self._expected if at < applied), default=-1)
        return (at + 1, self._expected[at][0]) if at >= 0 else (0, 0)

    def begin_at(self, sequence: int, checksum: int) -> None:
        """Leave out the batches before ``sequence``, which nobody needs. ``checksum``: of the stream before it."""
        assert not self.log
        assert self.log.base == 0
        self.log.base, self._checksum = sequence, checksum
        self.log.gone[:] = sequence - 1
        self._expected = {at: shown for at, shown in self._expected.items() if at >= sequence}

    def append(self, data: Clustered, created: float, checksum: int = 0) -> None:
        """Take the next batch. ``checksum``: running checksum of the stream including this batch (0: not kept)."""
        assert not self.finished
        rows = np.diff(data.offsets)
        touches = np.zeros(self.partitions, bool)
        touches[data.order] = rows > 0
        self.rows += data.batch.num_rows
        self._push(Entry(self.log.end, data, touches, data.nbytes, False, checksum, created))

    def finish(self, created: float) -> None:
        """End the stream: its last entry has no rows and goes to every partition."""
        if not self.finished:
            self._push(Entry(self.log.end, None, self._everyone, 0, True, self._checksum, created))
            self.finished = True
            if self._expected:  # an earlier attempt read more
                sequence = max(self._expected)
                raise self._not_deterministic(sequence, self._expected[sequence][1])

    def _push(self, entry: Entry) -> None:
        self.dirty = True
        self._last[entry.touches] = entry.sequence
        self._checksum = entry.checksum
        self.log.append(entry)
        if entry.sequence in self._expected:
            self._compare(entry.sequence, *self._expected.pop(entry.sequence))
        if (self._acked[entry.touches] >= entry.sequence).all():
            self._evict()  # a retried task makes again what is applied already

    # ---- the other side

    def on_table(self, table: Table, stage: int, now: float) -> None:
        """Follow the newest table: greet new workers, forget those that are gone, keep what new replicas will need."""
        if table.epoch <= self._epoch:
            return
        if self._epoch < 0:
            self._patient_until = now + self._resend_s
        self._epoch, self._table, self._stage = table.epoch, table, stage
        self.order = table.rank_order(stage)
        self.dirty = True
        hosts: dict[int, np.ndarray] = {}
        since: dict[int, np.ndarray] = {}
        coming: dict[int, np.ndarray] = {}
        for partition, replicas in enumerate(table.stages[stage]):
            for replica in replicas:
                if replica.worker not in hosts:
                    hosts[replica.worker] = np.zeros(self.partitions, bool)
                    since[replica.worker] = np.full(self.partitions, -1, np.int64)
                    coming[replica.worker] = np.zeros(self.partitions, bool)
                hosts[replica.worker][partition] = True
                since[replica.worker][partition] = replica.incarnation
                coming[replica.worker][partition] = not replica.live
        for worker in set(self._cursors) - set(hosts):
            del self._cursors[worker]
        for worker, mine in hosts.items():
            known = self._cursors.get(worker)
            if known is not None and (known.since == since[worker]).all():
                known.coming = coming[worker]
                continue
            acked = np.where(mine, -1, _NOT_MINE)
            if known is not None:
                same = known.since == since[worker]
                acked[same] = known.acked[same]
            self._cursors[worker] = Cursor(
                mine, since[worker], acked, coming[worker], table.epoch, hello_due=now, heard=now
            )  # fmt: skip
        self._settle()

    def on_answer(self, worker: int, message: Ack | Resume | Standby | Reset | Refuse, now: float) -> None:
        """What a consumer answers. RefusedError if it will not have us."""
        self.dirty = True
        match message:
            case Ack():
                self.on_ack(worker, message, now)
            case Resume():
                self.on_resume(worker, message, now)
            case Standby():
                self.on_standby(worker, message, now)
            case Reset():
                self.on_reset(worker, now)
            case Refuse() if worker in self._cursors:
                raise RefusedError(message.code, f"worker {worker} refuses stream {self.stream}: {message.reason}")

    def on_resume(self, worker: int, message: Resume, now: float) -> None:
        cursor = self._cursors.get(worker)
        if cursor is None or self._outdated(cursor, message.epoch, now):
            return
        for mark in message.shown:
            self._check(worker, mark)
        cursor.answered = True
        wanted = np.full(self.partitions, _NOT_MINE, np.int64)
        for partition, sequence in message.next:
            if 0 <= partition < self.partitions:
                wanted[partition] = sequence
        wanted[~cursor.hosts] = _NOT_MINE
        start = int(wanted.min())
        if start == _NOT_MINE:
            return
        self._still_here(worker, cursor, wanted)
        cursor.nonce, cursor.number = message.nonce, 0
        cursor.wanted_from = wanted
        # Partitions whose state has not come yet want nothing until they say so in another Resume.
        absent = (wanted[cursor.hosts] == _NOT_MINE).any()
        cursor.catching_up_to = NEVER if absent else int(wanted[cursor.hosts].max())
        # What lies below the log was acked by every listed replica, so nobody can need it.
        cursor.first = start
        cursor.next = max(start, self.log.base)
        cursor.sent_bytes, cursor.granted = 0, message.granted
        cursor.hello_due, cursor.heard = np.inf, now
        self._take_ack(cursor, message.epoch, message.through, message.behind)
        self._evict()  # it may have been waited for

    def _outdated(self, cursor: Cursor, epoch: int, now: float) -> bool:
        """Whether an answer goes by a table before the one that changed what its sender hosts: it will hear of that one;
        greet it again then. Epochs that changed other workers only come by the dozen during repairs and do not count."""
        if epoch >= cursor.epoch:
            return False
        cursor.hello_due = min(cursor.hello_due, now + self._resend_s / 10)
        return True

    def _still_here(self, worker: int, cursor: Cursor, wanted: np.ndarray) -> None:
        # An old Resume may ask for what its sender has acked since. Anything else that is gone is a new replica's, of
        # which this process did not know: only another life of it, reading again from the start, can serve that.
        lost = (wanted <= self.log.gone) & (cursor.acked < self.log.gone)
        if lost.any():
            raise RefusedError(
                "stale", f"worker {worker} needs batches of stream {self.stream} that this process has forgotten"
            )

    def on_ack(self, worker: int, message: Ack, now: float) -> None:
        cursor = self._cursors.get(worker)
        if cursor is None:
            return
        # An ack is cumulative and true whatever handshake it belongs to; only its incarnations matter.
        news = self._take_ack(cursor, message.epoch, message.through, message.behind)
        if message.nonce == cursor.nonce:
            if news or message.granted > cursor.granted:  # else it does not show that what was sent has come
                cursor.heard, cursor.patience = now, 1.0
            cursor.granted = max(cursor.granted, message.granted)

    def on_standby(self, worker: int, message: Standby, now: float) -> None:
        """The consumer reads from another replica. Greet it again now and then, in case its change of mind is lost."""
        cursor = self._cursors.get(worker)
        if cursor is not None and not self._outdated(cursor, message.epoch, now):
            cursor.nonce = None
            cursor.answered = True
            cursor.hello_due = now + self._resend_s * STANDBY_PATIENCE
            cursor.patience = 1.0  # it listens: what is lost after its change of mind is missed soon
            self._take_ack(cursor, message.epoch, message.through, message.behind)
            self._evict()

    def on_reset(self, worker: int, now: float) -> None:
        cursor = self._cursors.get(worker)
        # Without a nonce a greeting is out already, and this answers data sent before it: every message under way on a
        # lost connection is answered by a Reset, and one new handshake is enough for all of them.
        if cursor is not None and cursor.nonce is not None:
            cursor.nonce = None
            cursor.hello_due = min(cursor.hello_due, now)

    def _take_ack(self, cursor: Cursor, epoch: int, through: int, behind: list[tuple[int, int]]) -> bool:
        """Whether it says anything new."""
        # A replica introduced after the sender's table is another life than the one that acked.
        meant = cursor.hosts & (cursor.since <= epoch)
        acked = np.where(meant, through, -1)
        for partition, sequence in behind:
            if 0 <= partition < self.partitions and meant[partition]:
                acked[partition] = sequence
        if not (acked > cursor.acked).any():
            return False
        np.maximum(cursor.acked, acked, out=cursor.acked)
        self._settle()
        return True

    def _settle(self) -> None:
        if self._cursors:
            self._acked = np.minimum.reduce([cursor.acked for cursor in self._cursors.values()])
            self._acked[self._acked == _NOT_MINE] = -1  # a partition without any replica: keep everything
            self._evict()

    def _evict(self) -> None:
        # A batch that nobody needs from this attempt must still be here when a worker shows the checksum of what it
        # has applied of an earlier attempt.
        if self._cursors and all(cursor.answered for cursor in self._cursors.values()):
            self.log.evict(self._acked)

    # ---- determinism of a retried producer

    def _check(self, worker: int, mark: Mark) -> None:
        if mark.sequence >= self.log.end:
            if self.finished:
                raise self._not_deterministic(mark.sequence, worker)
            self._expected[mark.sequence] = (mark.checksum, worker)
        elif mark.sequence >= self.log.base:
            self._compare(mark.sequence, mark.checksum, worker)

    def _compare(self, sequence: int, expected: int, worker: int) -> None:
        if self.log[sequence].checksum != expected:
            raise self._not_deterministic(sequence, worker)

    def _not_deterministic(self, sequence: int, worker: int) -> FluxError:
        return NonDeterministicInputError(
            f"partition {self.stream.producer} of the input of edge {self.stream.edge} was read again after a retry and gave "
            f"other rows at or before batch {sequence} than worker {worker} had applied: the input is not deterministic. "
            "Sort it within partitions, or write it out (df.checkpoint(), df.write) and read that"
        )

    # ---- sending

    def poll(self, now: float) -> Iterator[ToWorker]:
        """What is to be sent now: greetings that are due, and data that credit allows."""
        self._now = now
        self.dirty = False
        for worker, cursor in list(self._cursors.items()):
            if cursor.nonce is not None and cursor.next < min(self.log.end, self.release_from):
                yield from self._data(worker, cursor, now)
            if cursor.nonce is not None and self._silent(cursor, now):
                cursor.hello_due = min(cursor.hello_due, now)
                self.resent_handshakes += 1
            if now >= cursor.hello_due:
                cursor.hello_due = now + self._resend_s * cursor.patience
                cursor.heard = now
                # Each try waits twice as long as the one before: a consumer that is busy for long in user code finds
                # few greetings when it comes back, and not a queue of them with a retransmission each.
                cursor.patience = min(2 * cursor.patience, PATIENCE_MAX)
                yield ToWorker(
                    worker,
                    Hello(
                        self.stream.edge,
                        self.stream.producer,
                        self.incarnation,
                        self._epoch,
                        self._worker,
                    ),
                )

    def _silent(self, cursor: Cursor, now: float) -> bool:
        """Whether a worker owes an ack for too long. Not only for the head of the log: that may be held by another, who
        waits in the end for what was lost on the way to this one."""
        owed = self._last if self.release_from == NEVER else np.minimum(self._last, self.release_from - 1)
        if not (cursor.acked < owed).any():
            cursor.heard = now  # it owes nothing: its time begins with what is sent next
            return False
        return now >= cursor.heard + self._resend_s * cursor.patience

    def _data(self, worker: int, cursor: Cursor, now: float) -> Iterator[ToWorker]:
        # Entries without rows for this worker may have been evicted while it was out of credit.
        cursor.next = max(cursor.next, self.log.base)
        end = min(self.log.end, self.release_from)
        while cursor.next < end and cursor.sent_bytes < cursor.granted:
            entry = self.log[cursor.next]
            cursor.next += 1
            mine = entry.touches & cursor.hosts
            if entry.sequence < cursor.catching_up_to:
                mine &= cursor.wanted_from <= entry.sequence
            if not mine.any():
                continue
            yield ToWorker(worker, *self._message(cursor, entry, mine))
            cursor.first = entry.sequence + 1

    def _message(self, cursor: Cursor, entry: Entry, mine: np.ndarray) -> tuple[Data, tuple[pa.RecordBatch, ...]]:
        assert cursor.nonce is not None
        partitions: list[int] = []
        rows: list[int] = []
        runs: list[int] = []
        batches: list[pa.RecordBatch] = []
        nbytes = MESSAGE_BYTES
        if entry.data is not None:
            data = entry.data
            counts = np.diff(data.offsets)
            ranks = np.flatnonzero(mine[data.order] & (counts > 0))
            partitions = data.order[ranks].tolist()
            rows = counts[ranks].tolist()
            # Slices whose rows lie next to each other travel as one payload frame.
            breaks = np.flatnonzero(data.offsets[ranks[1:]] != data.offsets[ranks[:-1] + 1]) + 1
            starts = [0, *breaks.tolist(), len(ranks)]
            for low, high in zip(starts, starts[1:], strict=False):
                begin, end = int(data.offsets[ranks[low]]), int(data.offsets[ranks[high - 1] + 1])
                runs.append(high - low)
                batches.append(data.batch.slice(begin, end - begin))
            total = data.batch.num_rows
            nbytes += entry.nbytes * sum(rows) // total
        message = Data(
            self.stream.edge, self.stream.producer, cursor.nonce, cursor.number, cursor.first, entry.sequence,
            partitions, rows, runs, nbytes, entry.last, entry.checksum, entry.created,
        )  # fmt: skip
        cursor.number += 1
        cursor.sent_bytes += nbytes
        return message, tuple(batches)
