"""The sending end of one stream, as a state machine without I/O (design: stream, log, credit).

Law: a batch stays in the log until every replica of every partition with rows in it has acked it. Each worker gets its
slices in order, each once per handshake, never beyond the credit granted. A destination without credit holds back its
own cursor only.

Left to others: clustering (``partitioning.clustering``), frames (``flux.wire.codec``), sockets (``flux.shell.transport``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import numpy as np
import pyarrow as pa

from flux.errors import RefusedError
from flux.exchange.bounds import OutgoingBounds, WatermarkPace, bound_behind
from flux.exchange.consumer_map import Consumers
from flux.exchange.consumer_progress import NOBODY, STANDING_BY, ConsumerProgress, Lent, OutgoingEntries, Sent, Spans
from flux.exchange.log import NEVER, End, Log, LogEntry, LogMeter, Rows, Word
from flux.exchange.replay_check import Beginning, PriorAttempts
from flux.exchange.retention import CheckpointRequests, Settling
from flux.exchange.slices import RUN_ROWS
from flux.windows.window import NEVER as NO_TIME
from flux.wire.messages import (
    Ack,
    Borrow,
    Hello,
    Mark,
    Passed,
    ReadsElsewhere,
    Refuse,
    Reset,
    Resume,
    ToPort,
    ToProducer,
    Unread,
    end_mark,
)
from partitioning import kernels
from partitioning.clustering import Clustered
from partitioning.ids import StreamId
from partitioning.table import Table

_NONE, _NOWHERE = np.empty(0, np.int64), np.empty((0, 0), bool)
#: In resend timeouts: time between two greetings of a consumer that reads from another replica of the producer.
STANDBY_PATIENCE = 4


class ToWorker(msgspec.Struct, frozen=True):
    """Effect: send a message (and, for Data, its record batches) to the data port of a worker."""

    worker: int
    message: ToPort
    batches: tuple[pa.RecordBatch, ...] = ()
    #: For Install: one part of a copy of state, as one frame.
    payload: bytes | memoryview | None = None


class Producer:
    """The sending end of one stream. Its owner appends, ``poll`` gives the messages to send, and ``on_*`` take the answers."""

    def __init__(
        self,
        stream: StreamId,
        incarnation: int,
        partitions: int,
        log_bytes_max: int,
        resend_s: float,
        meter: LogMeter | None = None,
        worker: int = -1,
        base: int = 0,
        run_max_rows: int = 0,
        reads_again: bool = False,
        may_lose: bool = False,
        pace: WatermarkPace | None = None,
        link_s: float = np.inf,
    ) -> None:
        """Begin a life of the stream.

        ``run_max_rows``: small batches that wait for the same worker travel together, up to this number of rows and
        ``RUN_ROWS``; 0: never. ``reads_again``: rows that only checkpoints lack need not be kept, because the source can be
        read again from there. ``may_lose``: it is of a stage that goes on without rows that are gone, so it may repeat its
        batches with fewer rows. ``pace`` of statements about its watermark; None: it makes none. ``link_s``: time after which
        a consumer that reads from another replica, and acks nothing, is told of the elements here."""
        self.stream = stream
        self.incarnation = incarnation
        self.partitions = partitions
        self.log = Log(log_bytes_max, meter, base, partitions)
        #: ``poll`` may have messages to send.
        self.dirty = True
        #: Its last element is in the log.
        self.finished = False
        #: Nothing more comes in this life, and the stream goes on in another.
        self.resting = False
        #: Batches from here on may not be sent yet: the step that made them is not committed (release rule).
        self.release_from = NEVER
        self.rows = 0
        #: As the owner has set them: the watermark behind the next entries, and late and doubted rows through them (``Mark``).
        self.watermark, self.judged = NO_TIME, (0, 0, NO_TIME)
        #: The statements about its watermark; None: the stream has no event time.
        self.bounds = None if pace is None else OutgoingBounds(stream, pace, resend_s)
        self.resent_handshakes = 0
        self.reads_again = reads_again
        self.may_lose = may_lose
        self._run_max_rows = min(run_max_rows, RUN_ROWS)
        self._resend_s, self._link_s = resend_s, link_s
        self._worker = worker
        self._epoch = -1
        self._consumers: Consumers | None = None
        self._pressing = CheckpointRequests(stream, resend_s)
        self._spans = Spans()
        #: The state of the consumers that the cursors follow: ``Consumers.changes``.
        self._changes = -1
        #: By worker with consumers.
        self._cursors: dict[int, ConsumerProgress] = {}
        #: The matrix of acks: the element through which each replica has acked, by partition and ``ConsumersAt.slots``.
        self._acks = np.full((partitions, 1), NOBODY, np.int64)
        #: By partition: the least ack of its replicas.
        self._acked = np.full(partitions, -1, np.int64)
        #: By partition: the newest element with rows for it.
        self._last = np.full(partitions, -1, np.int64)
        #: The first element of this life.
        self._first = base
        #: The end of the elements that may be sent, at the last poll.
        self._sendable = NEVER
        self._checksum = 0
        self.earlier = PriorAttempts(stream)
        self._mark: Mark | None = None
        self._settling = Settling()
        self.by_rank: np.ndarray | None = None
        #: The source has nothing behind the rows that it has given.
        self._at_end = False

    # ---- the owner's side

    @property
    def has_room(self) -> bool:
        """The owner may append. False is back-pressure: wait for acks. An owner of several producers is told (``Log.tell``)."""
        return self.log.has_room and not self.log.closed

    @property
    def drained(self) -> bool:
        return (self.finished or self.resting) and not self.log

    @property
    def awaited(self) -> bool:
        """A worker has answered a greeting."""
        return any(cursor.answered for cursor in self._cursors.values())

    @property
    def readers(self) -> AbstractSet[int]:
        """Workers that host consumers of the stream."""
        return self._cursors.keys()

    @property
    def next_sequence(self) -> int:
        return self.log.end

    def floor(self) -> Beginning | None:
        """Return the beginning of a retried producer; None: wait, because not all workers have answered yet.

        All batches before it are applied everywhere. Batches that are only received do not count, because a new replica may
        still need them. The last applied batch is made once more, because it may be the end of the stream. A replica that has
        no state yet does not count: the primary whose state it gets speaks for it, or there is none that needs more."""
        applied = self.applied_by_all()
        return None if applied is None else self.earlier.before(applied)

    def applied_by_all(self) -> int | None:
        """Return the element through which all consumers have applied the stream, as ``floor`` counts; None: not all workers
        have answered."""
        if not self._cursors or not all(cursor.answered for cursor in self._cursors.values()):
            return None
        applied = NOBODY
        for cursor in self._cursors.values():
            at, acked = cursor.at, cursor.acked
            skipped = (at.coming | at.empty) & (acked < 0)
            if self.reads_again:
                skipped |= ~at.reads  # if such a replica leads later, the source is read again for it
            applied = min(applied, int(np.where(skipped, NOBODY, acked).min()))
        return applied

    def applied_through(self, sequence: int) -> bool:
        """Tell whether every replica has applied its rows of the elements up to this one, and every checkpoint has them.

        The answer may be no until a partition that had no rows among the last ones gets some."""
        if not self._cursors or not all(cursor.answered for cursor in self._cursors.values()):
            return False
        return self._have(self._acks.min(axis=1), sequence)

    def kept_through(self, sequence: int) -> bool:
        """Tell whether every checkpoint has the rows of its partition through this element. Replicas that read may lack some,
        as while they are repaired."""
        kept = self._kept_acks
        return kept is not None and self._have(kept, sequence)

    @property
    def _kept_acks(self) -> np.ndarray | None:
        """The least ack of the replicas that keep checkpoints, by partition; None: the stage has none."""
        consumers = self._consumers
        if consumers is None or not consumers.kept:
            return None
        least: np.ndarray = np.where(consumers.keeps, self._acks, NOBODY).min(axis=1)
        return least

    def _have(self, acks: np.ndarray, sequence: int) -> bool:
        """Tell whether these acks, by partition, are of all rows through an element."""
        # Rows of an earlier life count as well, because a checkpoint may still lack them.
        owed = np.minimum(np.maximum(self._last, self._first - 1), sequence)
        return bool(((acks >= owed) & (acks != NOBODY)).all())

    def settle(self, mark: Mark) -> None:
        """Tell all consumers that every replica has applied the rows through this mark, and every checkpoint has them."""
        if mark.sequence >= self._settling.mark.sequence:
            self._settling.begin(mark, self._epoch)
            self.dirty = True

    def settle_kept(self, mark: Mark) -> None:
        """Tell the workers that keep checkpoints alone that every checkpoint has its rows through this mark."""
        if mark.sequence > self._settling.kept.sequence:
            self._settling.begin_kept(mark, self._epoch)
            self.dirty = True

    @property
    def owes_settled(self) -> bool:
        """The consumers of the newest table have not been told yet which point is settled."""
        return self._settling.epoch < self._epoch

    @property
    def all_settled(self) -> bool:
        """Every checkpoint has all rows that there are, also those of partitions that got none of the last rows, or of this
        life. Without checkpoints, every replica has."""
        return bool((self._last_acks >= self.log.end - 1).all())

    @property
    def lacking(self) -> float:
        """The number of elements that checkpoints may lack, added up over the partitions. It is a measure of progress, and not
        exact: numbers of rows may be so large that their sum fits into no integer."""
        return float(np.maximum(self.log.end - 1 - self._last_acks, 0).sum(dtype=float))

    @property
    def _last_acks(self) -> np.ndarray:
        """The least ack of the replicas that keep checkpoints, by partition. Without checkpoints, that of all replicas."""
        kept = self._kept_acks
        least: np.ndarray = self._acks.min(axis=1) if kept is None else kept
        return least

    def begin_at(self, sequence: int, checksum: int, settled: bool = False) -> None:
        """Leave out the batches before ``sequence``, which no consumer needs. ``checksum`` is that of the stream before it.
        ``settled``: a consumer that asks for a batch before ``sequence`` only says that it has had no rows there, as always where
        the stream is born."""
        assert self.log.end == 0
        born = self.earlier.is_born_at(sequence)
        self._first, self._pressing.idle_at, self._checksum = 0 if born else sequence, 0.0, checksum
        self.log.begin_at(sequence, settled or born)
        self.earlier.forget_below(sequence)

    def come_to_end(self) -> None:
        """Note that the source has given all that its log has by now."""
        if not self._at_end:
            self._at_end = self.dirty = True

    def append(
        self,
        data: Clustered,
        created: float,
        checksum: int = 0,
        position: bytes | None = None,
        numbers: tuple[int, int] | None = None,
        read: int = -1,
    ) -> None:
        """Take the next batch.

        ``checksum`` is the running checksum of the stream including this batch (0: not kept). For numbered rows it is the
        checksum of these rows alone, ``position`` is the reader's position behind them, and ``numbers`` are those of the first
        and the last; None: they are counted. ``read`` is the number of rows as they were read, of which steps may have left
        some out, or all; -1: that of the batch."""
        assert not self.finished
        begin = self.log.end
        self.rows += data.batch.num_rows
        if position is None:
            given = begin, Rows(data), data.by_rank, data.nbytes, checksum, created
            self._push(LogEntry(*given, -1, None, self.watermark, *self.judged))
            return
        rows = data.batch.num_rows if read < 0 else read
        begin, last = numbers or (begin, begin + rows - 1)
        if position:
            self._mark = Mark(last, checksum, begin, position, rows, self.watermark, *self.judged)
        given = last, Rows(data, read), data.by_rank, data.nbytes, checksum, created
        self._push(LogEntry(*given, begin, self._mark, self.watermark, *self.judged))

    def adopt(self, entries: Sequence[LogEntry], gone: np.ndarray, finished: bool) -> None:
        """Begin with the log of a copied replica. ``gone``: by partition, the highest element with rows for it that has left the
        log; ``finished``: the last entry is the end."""
        for entry in entries:
            self._last[entry.touches] = entry.sequence
            self._checksum = entry.checksum
            if isinstance(entry.element, Rows):
                self.rows += entry.element.data.batch.num_rows
        self.dirty = True
        self.log.adopt(entries, gone)
        if finished:
            self.has_ended()

    def say(self, word: Word, created: float, number: int = -1) -> None:
        """Take an element without rows, which goes to every partition. ``number``: its number; -1: the next one."""
        everyone = np.arange(self.partitions, dtype=np.int32)
        sequence = self.log.end if number < 0 else number
        mark = end_mark(sequence) if self.earlier.numbered else None
        self._push(LogEntry(sequence, word, everyone, 0, self._checksum, created, number, mark))

    def finish(self, created: float) -> None:
        """End the stream. Rows that bring their numbers may be gone before its end (``PriorAttempts.end_number``)."""
        if not self.finished:
            number = self.earlier.end_number(self.log.end) if self.earlier.own_numbers else self.log.end
            self.say(End(), created, -1 if number == self.log.end else number)
            self.has_ended()
            if self.earlier.expected or self.earlier.front:
                self.earlier.on_end(self.log.end)

    def has_ended(self) -> None:
        """Note that the end of the stream is given, by this life or by the one whose log is copied."""
        self.finished = True
        self.log.close()

    def rest(self) -> None:
        """Rest: nothing more comes in this life, and another one goes on behind it. NonDeterministicInputError: an earlier one
        gave more."""
        self.resting = self.dirty = True
        self.log.close()
        self.earlier.on_end(self.log.end)

    def _push(self, entry: LogEntry) -> None:
        self.dirty, self._at_end = True, False
        self._last[entry.touches] = entry.sequence
        self._checksum = entry.checksum
        self.log.append(entry)
        if self.bounds is not None:
            self.bounds.note(entry.sequence + 1, entry.watermark)
        if self.earlier.expected:
            self.earlier.on_made(entry)
        touches, acked = entry.touches, self._acked
        # The first is checked alone: that is enough except for a retried task, which makes batches again that are applied
        # already.
        if not len(touches) or (acked[touches[0]] >= entry.sequence and (acked[touches] >= entry.sequence).all()):
            self._evict()

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        log = self.log
        log.validate()
        assert not log.closed or self.finished or self.resting, "more is to come, and its log is closed"
        if self.finished and log:
            assert isinstance(log[log.end - 1].element, End), "nothing comes after the end of the stream"
        listed = np.zeros_like(self._acks, bool)
        for worker, cursor in self._cursors.items():
            places = cursor.at.partitions, cursor.at.slots
            counts = cursor.at.reads if self.reads_again else slice(None)
            assert (self._acked[places[0]] <= cursor.acked)[counts].all(), (
                f"more counts as acked than worker {worker} has acked"
            )
            assert (self._acks[places] == cursor.acked).all(), f"the acks of worker {worker} are booked elsewhere"
            listed[places] = True
            cursor.validate(worker)
        assert (self._acks[~listed] == NOBODY).all(), "an ack where there is no replica"

    # ---- the other side

    def on_table(self, table: Table, stage: int, now: float, consumers: Consumers | None = None) -> None:
        """Follow the newest table: greet new workers, forget those that are gone, and keep the rows that new replicas will
        need. ``consumers`` of the stage are shared by all producers of a process."""
        if table.epoch <= self._epoch:
            return
        self._epoch = table.epoch
        self._consumers = self._consumers or consumers or Consumers(stage)
        if self._consumers.epoch < table.epoch:
            self._consumers.follow(table)
        if self._changes == self._consumers.changes:
            return
        self._changes, self.by_rank = self._consumers.changes, self._consumers.ranks.by_rank
        self.dirty, self._pressing.idle_at = True, now + self._resend_s
        self._follow(self._consumers, now)

    def _follow(self, consumers: Consumers, now: float) -> None:
        """Go on with changed consumers. Only workers whose replicas changed are touched: their columns of acks are cleared, then
        filled anew. A worker with the same lives of the same replicas keeps its cursor; any other begins with a greeting, and
        keeps the acks of the replicas that it still has."""
        if consumers.width > self._acks.shape[1]:
            more = np.full((self.partitions, consumers.width - self._acks.shape[1]), NOBODY, np.int64)
            self._acks = np.hstack([self._acks, more])
        before = {w: c.at for w, c in self._cursors.items() if consumers.of_worker.get(w) is not c.at}
        # A replica may have got the column of one that has left, so columns of replicas that leave are cleared first.
        for worker, at in before.items():
            self._acks[at.partitions, at.slots] = NOBODY
            if worker not in consumers.of_worker:
                del self._cursors[worker]
        touched = [at.partitions for at in before.values()]
        for worker, at in consumers.of_worker.items():
            cursor = self._cursors.get(worker)
            if cursor is not None and cursor.at is at:
                continue
            if cursor is not None and at.same_lives(cursor.at):
                cursor.at = at
            else:
                cursor = self._cursors[worker] = ConsumerProgress.after(cursor, at, self._epoch, now)
            self._acks[at.partitions, at.slots] = cursor.acked
            touched.append(at.partitions)
        if consumers.begun_empty:
            self.log.restore_end()
        self._settle(*touched)

    def on_answer(self, worker: int, message: ToProducer, now: float) -> None:
        """Take the answer of a consumer. RefusedError if it refuses this producer."""
        if isinstance(message, Ack):
            self.on_ack(worker, message, now)
            return
        self.dirty = True
        match message:
            case Resume():
                self.on_resume(worker, message, now)
            case ReadsElsewhere():
                self.on_standby(worker, message, now)
            case Reset():
                self.on_reset(worker, now)
            case Refuse() if worker in self._cursors:
                raise RefusedError(message.code, f"worker {worker} refuses stream {self.stream}: {message.reason}")

    def on_resume(self, worker: int, message: Resume, now: float) -> None:
        """Take the answer to a greeting: check the marks in it under any table, then leave it alone if it is outdated. If it
        wants no batch, the worker stands by, or has only acked; otherwise the stream goes on at the first batches wanted."""
        # Marks of an earlier life are evidence under any table: the worker that shows them may have lost its replica meanwhile.
        for mark in message.shown:
            self._check(worker, mark)
        if not self.may_lose:
            self.earlier.front = max(self.earlier.front, message.front)
        cursor = self._cursors.get(worker)
        if cursor is None or self._outdated(cursor, message.epoch, now) or self._of_another_life(message):
            return
        cursor.answered = True
        wanted = np.full(len(cursor.acked), NOBODY, np.int64)
        for partition, sequence in message.next:
            place = cursor.at.at.get(partition)
            if place is not None:
                wanted[place] = sequence
        if int(wanted.min()) == NOBODY:
            if cursor.at.any_reads:
                self._take_ack(cursor, message.epoch, message.through, message.behind, now)
            else:
                self._stand_by(cursor, message, now)
            return
        self._still_here(worker, cursor, wanted)
        front = message.front if self.earlier.own_numbers or self.may_lose else 0
        cursor.become_catching_up(message, wanted, self.log.base, front, now)
        self._take_ack(cursor, message.epoch, message.through, message.behind, now)
        self._evict()  # the eviction may have waited for this answer

    def _outdated(self, cursor: ConsumerProgress, epoch: int, now: float) -> bool:
        """Tell whether an answer is by a table from before the last change of its sender's replicas.

        The sender will get that table; greet it again soon. Epochs that changed other workers only do not count: during repairs
        they come by the dozen."""
        if epoch >= cursor.epoch:
            return False
        cursor.hello_due = min(cursor.hello_due, now + self._resend_s / 10)
        return True

    def _of_another_life(self, message: Resume) -> bool:
        """Tell whether an answer is to a greeting of an earlier life, which another process, or this worker, has begun. It does
        not show the marks of that life, because its sender has not heard yet that there is a later one."""
        return message.incarnation >= 0 and message.incarnation != self.incarnation

    def _still_here(self, worker: int, cursor: ConsumerProgress, wanted: np.ndarray) -> None:
        # An old Resume may ask for batches that its sender has acked since. Any other batch that is gone is needed by a new
        # replica, of which this process did not know: only another life of the process, reading again from the start, can serve
        # it.
        gone = self.log.gone[cursor.at.partitions]
        lost = (wanted <= gone) & (cursor.acked < gone) & ~cursor.at.empty
        if lost.any():
            raise RefusedError(
                "stale", f"worker {worker} needs batches of stream {self.stream} that this process has forgotten"
            )

    def on_ack(self, worker: int, message: Ack, now: float) -> None:
        if (cursor := self._cursors.get(worker)) is None:
            return
        # An ack is cumulative, and true in whatever handshake it was sent; only its epoch matters.
        news = self._take_ack(cursor, message.epoch, message.through, message.behind, now)
        if cursor.nonce is not None and message.nonce > cursor.nonce:
            cursor.become_greeting(now)  # the Resume of a later handshake was lost (design: lost-resume)
        elif message.nonce == cursor.nonce:
            if news or message.granted > cursor.granted:  # otherwise the ack does not show that messages have arrived
                cursor.heard(now)
                cursor.patience = 1.0
                if news and not self._owes(cursor):
                    cursor.owes_since, cursor.look_again = None, False
            cursor.granted = max(cursor.granted, message.granted)
            self.dirty |= cursor.next < min(self.log.end, self.release_from)  # data may have waited for credit
        self.dirty |= self._presses

    def on_standby(self, worker: int, message: ReadsElsewhere, now: float) -> None:
        """Take the answer of a consumer that reads from another replica. Greet it now and then, in case its Resume for this one
        was lost."""
        cursor = self._cursors.get(worker)
        if cursor is not None and not self._outdated(cursor, message.epoch, now):
            cursor.answered = True
            self._stand_by(cursor, message, now)

    def _stand_by(self, cursor: ConsumerProgress, message: ReadsElsewhere | Resume, now: float) -> None:
        cursor.become_standing_by(now + self._resend_s * STANDBY_PATIENCE)
        self._take_ack(cursor, message.epoch, message.through, message.behind, now)
        self._evict()

    def on_reset(self, worker: int, now: float) -> None:
        cursor = self._cursors.get(worker)
        # Without a nonce, a greeting is on its way already, and this Reset answers data from before it: every message
        # after a gap is answered by a Reset, and one new handshake is enough for all of them.
        if cursor is not None and cursor.nonce is not None:
            cursor.become_greeting(now)

    def _take_ack(
        self, cursor: ConsumerProgress, epoch: int, through: int, behind: Sequence[tuple[int, int]], now: float
    ) -> bool:
        """Take an ack, and tell whether it says anything new."""
        at, places, sequences = cursor.at, _NONE, _NONE
        if behind:
            known = [(at.at[partition], sequence) for partition, sequence in behind if partition in at.at]
            places, sequences = np.array(known, np.int64).reshape(-1, 2).T.copy()
        # A replica introduced after the sender's table is another life than the one that acked.
        news = kernels.raise_marks(
            cursor.acked, through, at.reads, places, sequences, at.since, epoch, self._acks, at.partitions, at.slots,
            self._left_out, NOBODY, self._acked,
        )  # fmt: skip
        if news:
            cursor.look_again = True
            if cursor.owes_since is None:
                cursor.owes_since = now
            if cursor.unread_since < np.inf:
                cursor.note_unread(self._owes(cursor), now)
            self._evict()
        return bool(news)

    @property
    def _left_out(self) -> np.ndarray:
        """Replicas for which nothing is kept, as bool[partitions, width]. Empty: there are none."""
        consumers = self._consumers
        return consumers.keeps if self.reads_again and consumers is not None and consumers.kept else _NOWHERE

    def _settle(self, *changed: np.ndarray) -> None:
        """Follow replicas of these partitions that have acked more, or have changed."""
        for partitions in changed:
            acks = self._acks[partitions]
            if self._left_out.size:
                acks[self._left_out[partitions]] = NOBODY
            least = acks.min(axis=1)
            least[least == NOBODY] = -1  # a partition without any replica: keep everything
            self._acked[partitions] = least
        self._evict()

    def _evict(self) -> None:
        # Even a batch that no consumer needs must still be in the log when a worker shows the checksum of an earlier attempt.
        if self._cursors and all(cursor.answered for cursor in self._cursors.values()):
            self.log.evict(self._acked)

    # ---- determinism of a retried producer

    def _check(self, worker: int, mark: Mark) -> None:
        if mark.sequence >= self.log.end:
            if self.finished:
                raise self.earlier.behind_end(mark.sequence, worker, self.log.end)
            self.earlier.expect(mark, worker)
        elif mark.sequence >= self.log.base:
            self.earlier.compare(self.log[mark.sequence], mark, worker)

    # ---- sending

    def poll(self, now: float) -> Iterator[ToWorker]:
        """Yield the messages to send now: greetings that are due, and data as far as credit allows."""
        self.dirty = False
        end = min(self.log.end, self.release_from)
        if end != self._sendable:
            self._sendable = end
            for cursor in self._cursors.values():
                cursor.look_again |= cursor.owes_since is None
                cursor.unread_look |= cursor.phase is STANDING_BY and cursor.looks_for_unread
        if self._presses:
            assert self._consumers is not None
            ended = self.finished or self.resting
            for worker, press in self._pressing.look(self.log, ended, self._acks, self._consumers, now):
                yield ToWorker(worker, press)
        if now >= self._pressing.idle_at and self._consumers is not None:
            first = self._first if self.earlier.numbered and self.reads_again else 0
            for worker, press in self._pressing.look_for_idle(self._acks, self._last, first, self._consumers, now):
                yield ToWorker(worker, press)
        self._spans.forget()
        for worker, cursor in list(self._cursors.items()):
            if cursor.nonce is not None and cursor.next < end:
                for sent in self._data(worker, cursor, end):
                    yield ToWorker(worker, *sent)
            if cursor.front and cursor.nonce is not None and self._has_passed(cursor):
                yield ToWorker(worker, Passed(*self.stream, cursor.nonce, cursor.number, cursor.front))
                cursor.front = 0
            if cursor.nonce is not None and self._silent(cursor, now):
                cursor.hello_due = min(cursor.hello_due, now)
                self.resent_handshakes += 1
            if self._settling.begun and self._settling.due(worker, cursor.acked, cursor.at.any_reads, now):
                about = self.stream, self.incarnation, worker, cursor.at.any_reads
                yield ToWorker(worker, self._settling.message(*about, now + self._resend_s))
            if now >= cursor.hello_due:
                cursor.greet(now, self._resend_s)
                yield ToWorker(worker, Hello(*self.stream, self.incarnation, self._epoch, self._worker))
            if cursor.phase is STANDING_BY and (unread := self._unread(cursor, now)):
                yield ToWorker(worker, Unread(*self.stream, self._worker, unread))
        if self.bounds is not None:
            for worker, bound in self.bounds.poll(self._cursors, now):
                yield ToWorker(worker, bound)

    def _unread(self, cursor: ConsumerProgress, now: float) -> int:
        """Return the end of the elements that a worker which reads elsewhere could have read here, and has not acked for long; 0:
        it is not time to tell it of any (design: owed-rows)."""
        if cursor.unread_look:
            cursor.note_unread(self._owes(cursor), now)
        if now < cursor.unread_due(self._link_s):
            return 0
        cursor.unread_since = now
        return cursor.unread_end(self.log, self._sendable)

    def _has_passed(self, cursor: ConsumerProgress) -> bool:
        """Tell whether a worker has been sent all rows below its front that this life has, or will have (design:
        rows-that-are-gone)."""
        return cursor.next >= min(cursor.front, self.log.end) and (self.log.end >= cursor.front or self._at_end)

    @property
    def _presses(self) -> bool:
        """Rows may be kept for checkpoints alone."""
        return self._consumers is not None and self._consumers.kept and not self.reads_again

    def _silent(self, cursor: ConsumerProgress, now: float) -> bool:
        """Tell whether a worker owes an ack for too long.

        Every worker is checked, and not only the one that holds the head of the log: that worker may be waiting for another,
        which in turn waits for a message that was lost on its way to this one."""
        since = cursor.owes_since
        late = since is not None and now >= since + self._resend_s * cursor.patience
        if not late and not cursor.look_again:
            return False
        cursor.look_again = False
        if not self._owes(cursor):
            cursor.owes_since = None  # its time begins with the next message
            return False
        if since is None:
            cursor.owes_since = now
        return late

    def _owes(self, cursor: ConsumerProgress) -> bool:
        """Tell whether a worker has still to ack elements that may be sent to it."""
        at = cursor.at
        return bool(kernels.any_owed(cursor.acked, self._last, at.partitions, self.release_from - 1, at.reads))

    def _data(self, worker: int, cursor: ConsumerProgress, end: int) -> Iterator[Sent]:
        """Make the messages that a worker may get now, of elements below ``end``."""
        assert self._consumers is not None
        out = OutgoingEntries(self.stream, cursor, self._consumers.ranks, self._run_max_rows, self._spans)
        return out.messages(self.log, end)


def state_watermark(producer: Producer, sequence: int, watermark: int, idle: bool = False) -> None:
    """State that no row below a watermark comes behind the elements below ``sequence`` of a producer's stream. ``idle``: its
    reader has nothing now. The steps that say so are committed."""
    if producer.bounds is not None:
        producer.bounds.note(sequence, watermark, idle)
        producer.dirty = True


def owing(producer: Producer) -> dict[int, tuple[int, int]]:
    """Return the acks of each worker that has once answered a greeting and has still to ack elements: their sum, which changes
    with every ack of something new, and the least one of a replica that has still to ack some."""
    last, end, cursors = producer._last, producer.release_from - 1, producer._cursors.items()
    return {worker: c.sum_and_least(last, end) for worker, c in cursors if c.known and producer._owes(c)}


def lent_from_log(producer: Producer, worker: int, asked: Borrow) -> Iterator[Lent]:
    """Yield elements of the log for one partition on a worker that cannot get them directly, up to its room; and, behind the last
    one, the statement about the stream, which ends the loan (design: read-loans)."""
    cursor = producer._cursors.get(worker) if asked.incarnation == producer.incarnation else None
    loan = None if cursor is None else cursor.lent(asked, producer.log.gone)
    if loan is not None and producer._consumers is not None:
        end = min(producer.log.end, producer.release_from)
        out = OutgoingEntries(producer.stream, loan, producer._consumers.ranks, producer._run_max_rows, Spans())
        yield from out.messages(producer.log, end)
        if loan.next >= end:
            yield bound_behind(producer.stream, loan, producer.bounds), ()


def unread_due(producer: Producer) -> float:
    """Return the time at which a producer must be polled at the latest for workers that read elsewhere."""
    return min([cursor.unread_due(producer._link_s) for cursor in producer._cursors.values()], default=np.inf)
