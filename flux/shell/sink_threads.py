"""The threads of a worker in which sinks are called: a slow or failing outside holds up no partition (design: sink).

The jobs for a partition lie in its queue, and one thread at a time does them, in order: open a copy of the sink
and ask for the output that the outside has; write; close. Jobs that an earlier life of the queue has still under way go first.
``ReadyQueues`` chooses the queue, or the several queues, that a thread takes.
"""

from __future__ import annotations

import copy
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from operator import index
from queue import SimpleQueue
from typing import Any, NamedTuple

import pyarrow as pa

from flux.dataflow.plan import Plan, StagePlan
from flux.dataflow.sink import (
    Position,
    Sink,
    SinkAhead,
    SinkContext,
    TentativeNews,
    TentativeOutput,
    TentativeUndo,
    ahead,
    shows_tentative,
)
from flux.errors import FluxError, QueryFailed, UserCodeError
from flux.operators.batches import BATCH_BYTES, logical_bytes
from flux.operators.user_code import closed, described, text_of, user_traceback
from partitioning.ids import PartitionKey

#: Seconds after which other partitions go on without a round that is not over.
LATE_S = 0.02
#: A batch of output with its position.
Given = tuple[Position, pa.RecordBatch]


class SinkCall(NamedTuple):
    """One thing to do for a partition: a write, news of tentative results, or a call of ``do``."""

    #: The life of the primary for which the job is.
    life: int
    #: The batches to write; empty: the job is ``do``.
    given: tuple[Given, ...] = ()
    #: Whether it is not done in a round.
    alone: bool = False
    news: TentativeNews | None = None
    do: Callable[[], None] = lambda: None


class SinkQueue:
    """The jobs for one partition, in order."""

    def __init__(self, stage: StagePlan, partition: int) -> None:
        self.stage = stage
        self.partition = partition
        #: Counts the primaries of the partition here.
        self.life = 0
        #: The life in which a call has failed. No more jobs are done for it, because later output would lie behind a hole.
        self.broken = -1
        #: The outside has the output below this position, as far as this life knows; -1: nothing is known yet.
        self.has = -1
        #: The newest life for which the outside was found to have no more than the checkpoint location knows of.
        self.compared = -1
        self.jobs: deque[SinkCall] = deque()
        #: Whether a thread works for the queue or is to work for it.
        self.served = False
        self.sink: Sink | None = None
        #: The outside had the output below this position when this life began.
        self.first = 0
        #: The position that the sink counts as 0 (design: forgotten-output).
        self.base = 0
        #: Batches that the sink has taken and not brought outside yet: sequence number and bytes.
        self.kept: deque[tuple[int, int]] = deque()
        #: Whether a round does the present job. A call that fails in a round is not tried again at once.
        self.in_round = False
        #: Bytes of the tentative rows among the jobs, and the number of calls of ``tentative`` that were left out.
        self.tentative_bytes = 0
        self.left_out = 0

    @property
    def where(self) -> str:
        return f"sink {text_of(self.stage.sink, repr)} of stage {self.stage.name}, partition {self.partition}"

    def outside(self, position: Position) -> Position:
        """Return the position as the sink counts."""
        return position if not self.base else position._replace(sequence=position.sequence - self.base)

    def lives(self, life: int) -> bool:
        return self.life == life != self.broken

    def leave_out(self, voids: Callable[[TentativeOutput], bool]) -> None:
        """Drop tentative rows among the jobs. The caller holds the lock."""
        kept: deque[SinkCall] = deque()
        for job in self.jobs:
            if isinstance(job.news, TentativeOutput) and voids(job.news):
                self.tentative_bytes -= _cost(job.news)
            else:
                kept.append(job)
        self.jobs = kept

    def clear(self) -> None:
        """Drop all jobs. The caller holds the lock."""
        self.jobs.clear()
        self.tentative_bytes = 0

    @property
    def may_join(self) -> bool:
        """Return whether the next job may be done in a round."""
        if self.sink is None or not self.sink.traits.sends_ahead or not self.jobs:
            return False
        return bool(self.jobs[0].given) and not self.jobs[0].alone


class ReadyQueues:
    """The queues with jobs that no thread works for, and the choice of those that a thread takes next (design: sink-threads).
    Callers of ``put`` and ``take`` hold ``lock``.

    If a sink can begin a write without waiting for the outside, one thread writes for all partitions that have something to
    write: several threads would take turns with the interpreter at every step, and that costs more than the writes. Law: no
    partition waits for such a round longer than ``LATE_S`` while there are threads; the outside may be slow for one of its
    partitions only."""

    def __init__(self, lock: threading.Lock) -> None:
        self._news = threading.Condition(lock)
        self._waiting: deque[tuple[float, SinkQueue]] = deque()
        self._rounds = 0
        self._called = False  # a thread was woken for a queue that may join, and has not looked yet
        self._ended = False

    def put(self, queue: SinkQueue) -> None:
        self._waiting.append((time.monotonic(), queue))
        joins = queue.may_join
        if not (joins and (self._rounds or self._called)):  # else the round's thread, or the woken one, takes it
            self._news.notify()
        self._called |= joins

    def take(self) -> tuple[list[SinkQueue], bool]:
        """Return the queues that a thread takes next, and whether they are a round, whose end the thread must tell. Waits until
        there are some; no queue: there will be none any more."""
        while not self._ended:
            self._called = False
            queues, in_round = self._next()
            if queues:
                if self._waiting and not self._rounds:
                    self._news.notify()
                return queues, in_round
            self._news.wait()
        return [], False

    def _next(self) -> tuple[list[SinkQueue], bool]:
        now = time.monotonic()
        for at, (since, queue) in enumerate(self._waiting):
            if not queue.may_join:
                del self._waiting[at]
                return [queue], False
            if not self._rounds or now >= since + LATE_S:
                joining = [each for _, each in self._waiting if each.may_join]
                self._waiting = deque(waits for waits in self._waiting if not waits[1].may_join)
                self._rounds += 1
                return joining, True
        return [], False

    def round_is_over(self) -> None:
        self._rounds -= 1

    def look(self) -> None:
        """Give a thread of its own to a queue that waits for a slow round. To be called often, without the lock."""
        if self._waiting and self._rounds:
            with self._news:
                if self._waiting and time.monotonic() >= self._waiting[0][0] + LATE_S:
                    self._news.notify()

    def end(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()


def arrived(files: Mapping[int, Collection[int]], limit_s: float) -> Iterator[int]:
    """Yield each key of ``files`` once all of its files have something to read, within ``limit_s`` in all."""
    lacks = {key: {*numbers} for key, numbers in files.items()}
    waiting: dict[int, list[int]] = {}
    poll = select.poll()
    for key, numbers in lacks.items():
        for number in numbers:
            waiting.setdefault(number, []).append(key)
            poll.register(number, select.POLLIN)
    yield from [key for key, numbers in lacks.items() if not numbers]
    end = time.monotonic() + limit_s
    while waiting and (left_s := end - time.monotonic()) > 0:
        for number, _ in poll.poll(1000 * left_s):
            poll.unregister(number)
            for key in waiting.pop(number):
                lacks[key].discard(number)
                if not lacks[key]:
                    yield key


log = logging.getLogger("flux")

#: The most threads of one worker. Sinks wait for the outside, or write files without holding the interpreter.
THREADS_MAX = 8
#: Pause before a failed call is repeated: at first, and the longest; it is twice as long each time. The longest one before
#: ``tentative``, which gives way to other calls between two attempts.
PAUSE_S, PAUSE_MAX_S, TENTATIVE_PAUSE_S = 0.05, 5.0, 0.1
#: The most bytes of tentative rows that wait for a sink, for each partition. Beyond it the oldest are left out: they may be lost
#: at any time, and rows of a later time say more.
TENTATIVE_BYTES = 8 << 20
#: The least time between two lines in the log about retries of a stage's sink: the lines are for people.
RETRY_LINE_S = 1.0
#: Seconds that the end of a worker waits for calls under way.
CLOSE_S = 5.0
#: Seconds that an error waits for the news that the partition has another primary, and seconds between two looks for the news:
#: the outside may have refused a late write.
LED_ELSEWHERE_S, LOOK_S = 1.0, 0.02


class _Over(Exception):
    """End of a job because the partition has another primary by now, or the worker ends."""


class SinkFailed(NamedTuple):
    """A call of a sink that has failed, in one life of a queue."""

    queue: SinkQueue
    life: int
    error: FluxError


class SinkRetries:
    """The choice of the retries that get a line in the log: one in ``RETRY_LINE_S`` for all partitions of a stage. The outside
    fails for all of them at once, and a server that starts again for a minute would fill the log."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}  #: By stage: when the last line was written, on the clock of ``now``.
        self._others: dict[int, int] = {}  #: By stage: retries without a line since then.

    def others(self, stage: int, now: float) -> int | None:
        """Return how many retries had no line since the last one, or None if this one has none either."""
        if now - self._at.get(stage, -inf) < RETRY_LINE_S:
            self._others[stage] = self._others.get(stage, 0) + 1
            return None
        self._at[stage] = now
        return self._others.pop(stage, 0)


class SinkThreads:
    """The sinks of a worker's partitions. ``ring`` wakes the worker's loop when the outside has more, or something has failed."""

    def __init__(self, plan: Plan, ring: Callable[[], None]) -> None:
        self._plan = plan
        self._ring = ring
        self._retry_s = plan.settings.sink_retry_timeout
        self._kept_max = plan.settings.sink_max_bytes
        self._queues: dict[PartitionKey, SinkQueue] = {}
        self._lock = threading.Lock()
        self._ready = ReadyQueues(self._lock)
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._retries = SinkRetries()
        self._failed: SimpleQueue[SinkFailed] = SimpleQueue()

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan. Sinks of removed stages have been told to end."""
        self._plan = plan
        self._queues = {key: queue for key, queue in self._queues.items() if key.stage in plan.stages}

    def check(self) -> None:
        """Raise the error of a sink, as ``failures`` gives it."""
        for _, error in self.failures():
            raise error

    def failures(self) -> Iterator[tuple[int, FluxError]]:
        """Yield the stage and the error of each sink that has failed for good, if its partition still has its primary here. To be
        called often."""
        self._ready.look()
        while not self._failed.empty():
            queue, life, error = self._failed.get()
            if queue.life == life and self._queues.get(PartitionKey(queue.stage.id, queue.partition)) is queue:
                yield queue.stage.id, error
            else:
                _note_led_elsewhere(queue, error)

    # ---- for the state machine

    def has(self, stage: int, partition: int) -> int:
        return self._queues[PartitionKey(stage, partition)].has

    def compared(self, stage: int, partition: int) -> bool:
        queue = self._queues[PartitionKey(stage, partition)]
        return queue.compared == queue.life

    def begins(self, stage: int, partition: int, position: int, first: bool) -> None:
        key = PartitionKey(stage, partition)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = SinkQueue(self._plan.stages[stage], partition)
        with self._lock:
            queue.life, queue.has = queue.life + 1, -1
        self._give(queue, SinkCall(queue.life, do=partial(self._open, queue, queue.life, position, first)))

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        queue = self._queues[PartitionKey(stage, partition)]
        self._give(queue, SinkCall(queue.life, given=((Position(partition, position), batch),)))

    def tell(self, stage: int, partition: int, news: TentativeNews) -> None:
        queue = self._queues[PartitionKey(stage, partition)]
        if not shows_tentative(queue.stage.sink):
            return
        with self._lock:
            if isinstance(news, TentativeUndo):
                queue.leave_out(lambda rows: news.reaches(rows.through))
            elif isinstance(news, TentativeOutput):
                queue.tentative_bytes += _cost(news)
                while queue.tentative_bytes > TENTATIVE_BYTES and (oldest := _oldest(queue)) is not None:
                    queue.leave_out(lambda rows: rows is oldest)
                    queue.left_out += 1
        self._give(queue, SinkCall(queue.life, news=news))

    def recovered(self, stage: int, partition: int, position: int, note: Any = None) -> None:
        queue = self._queues[PartitionKey(stage, partition)]
        self._give(queue, SinkCall(queue.life, do=partial(self._check_not_ahead, queue, queue.life, position, note)))

    def ends(self, stage: int, partition: int) -> None:
        queue = self._queues[PartitionKey(stage, partition)]
        with self._lock:
            queue.life += 1
            queue.clear()
        self._give(queue, SinkCall(queue.life, do=partial(self._close, queue)))

    def _give(self, queue: SinkQueue, job: SinkCall) -> None:
        with self._lock:
            queue.jobs.append(job)
            serve, queue.served = not queue.served, True
            if serve:
                self._ready.put(queue)
        if serve and len(self._threads) < min(THREADS_MAX, len(self._queues)):
            thread = threading.Thread(target=self._run, name="flux-sink", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ---- in the threads

    def _run(self) -> None:
        """Work for queues in turns, call by call."""
        while True:
            with self._lock:
                queues, in_round = self._ready.take()
                taken = [(queue, self._taken(queue)) for queue in queues]
            if not queues:
                return
            if len(queues) > 1:
                self._do_together([(queue, job) for queue, job in taken if job is not None])
            else:
                for queue, job in taken:
                    self._do(queue, job)
                    self._done(queue)
            if in_round:
                with self._lock:
                    self._ready.round_is_over()

    def _taken(self, queue: SinkQueue) -> SinkCall | None:
        """Take the next job. Batches that wait behind a batch go with it, as far as the sink takes them as one: if each call
        costs a way to the outside and back, small batches would come faster than they go."""
        if not queue.jobs:
            return None
        job = queue.jobs.popleft()
        if isinstance(job.news, TentativeOutput):
            queue.tentative_bytes -= _cost(job.news)
        if not queue.jobs or not job.given or job.alone or queue.sink is None or not queue.sink.traits.joins_bytes:
            return job
        joined, left = [*job.given], queue.sink.traits.joins_bytes - logical_bytes(job.given[0][1])
        while queue.jobs and queue.jobs[0].life == job.life and queue.jobs[0].given:
            left -= logical_bytes(queue.jobs[0].given[0][1])
            if left < 0:
                break
            joined += queue.jobs.popleft().given
        return job._replace(given=tuple(joined))

    def _do(self, queue: SinkQueue, job: SinkCall | None) -> None:
        if job is None:
            return
        try:
            if job.given:
                self._write(queue, job.life, job.given)
            elif job.news is not None:
                self._show(queue, job.life, job.news)
            else:
                job.do()
        except _Over:
            pass
        except BaseException as error:  # an error of the user's code, also sys.exit()
            self._fail(queue, job.life, error)

    def _done(self, queue: SinkQueue) -> None:
        with self._lock:
            queue.served = bool(queue.jobs)
            if queue.served:
                self._ready.put(queue)

    def _do_together(self, taken: list[tuple[SinkQueue, SinkCall]]) -> None:
        """Send all, and take the answers as they come. A write that does not go through at once goes on alone, with patience."""
        sent = {at: files for at, each in enumerate(taken) if (files := self._sent(*each)) is not None}
        left = dict(enumerate(taken))
        for at in arrived(sent, LATE_S):
            if self._at_once(*taken[at]):
                self._done(left.pop(at)[0])
        with self._lock:
            for queue, job in left.values():
                queue.jobs.appendleft(job._replace(alone=True))
                self._ready.put(queue)

    def _sent(self, queue: SinkQueue, job: SinkCall) -> Collection[int] | None:
        """Begin a write. Returns the files from which its answer will come; None: the write has not begun."""
        given = _lacking(queue, job.given)
        if queue.sink is None or not given or not queue.lives(job.life):
            return ()
        try:
            files = queue.sink.send(_as_one(given), queue.outside(given[0][0]))
            return None if files is None else [_file(number) for number in files]
        except BaseException:  # write() tells the error
            return None

    def _at_once(self, queue: SinkQueue, job: SinkCall) -> bool:
        """Return whether a job is written, or need not be written any more."""
        queue.in_round = True
        try:
            self._write(queue, job.life, job.given)
        except _Over:
            pass
        except BaseException:
            return False
        finally:
            queue.in_round = False
        return True

    def _open(self, queue: SinkQueue, life: int, position: int, first: bool) -> None:
        self._close(queue)
        stage, partition = queue.stage, queue.partition
        sink = copy.deepcopy(stage.sink)
        assert sink is not None
        forgotten = self._plan.forgotten.get(stage.id)
        query = self._plan.query if forgotten is None else forgotten.query
        queue.base = 0 if forgotten is None else forgotten.first_of(partition)
        context = SinkContext(query, stage.id, stage.name, partition, stage.partitions)
        self._patiently(queue, life, sink, partial(sink.open, context))
        queue.sink = sink
        has = self._patiently(queue, life, sink, partial(sink.committed, partition))
        queue.first = position if has is None else queue.base + _whole(queue, "committed", has)
        if first and queue.first:
            raise QueryFailed(
                f"{queue.where}: the outside has the first {queue.first} batches before this query has written any. Positions "
                "count anew in each query: keep them with the query's id (SinkContext.query), or rows would be left out"
            )
        if queue.first < position:
            raise QueryFailed(
                f"{queue.where}: the outside has the first {queue.first - queue.base} batches, and had {position - queue.base} "
                "before; the batches between are lost there, and no replica keeps them any more" + self._hint()
            )
        if not first and shows_tentative(sink):
            # Earlier primaries may have shown rows of any time and may be gone before they could take them back.
            self._patiently(queue, life, sink, partial(sink.undo, None, None))
        self._note(queue, life, queue.first)

    def _hint(self) -> str:
        if not self._plan.durable:
            return ""
        return (
            ". If the sink goes to another place now, stop the query and run 'flux checkpoints "
            f"{self._plan.location or 'LOCATION'} --forget-output': the new place then gets all later output"
        )

    def _check_not_ahead(self, queue: SinkQueue, life: int, position: int, note: Any) -> None:
        """Raise SinkAhead if the outside has more than earlier primaries can have made, according to the checkpoint location."""
        if queue.first > position:
            raise SinkAhead(
                f"the outside has {queue.first - queue.base} batches, and the location knows of {position - queue.base}"
            )
        if queue.sink is not None:
            # Only a sink of Flux's own takes a note, from the operator before it.
            told: list[Any] = [position - queue.base] if note is None else [position - queue.base, note]
            self._patiently(queue, life, queue.sink, partial(queue.sink.recovered, *told))
        queue.compared = life
        self._ring()

    def _write(self, queue: SinkQueue, life: int, given: Sequence[Given]) -> None:
        sink, given = queue.sink, _lacking(queue, given)
        if not given or sink is None:
            return
        sequence = given[-1][0].sequence
        try:
            lacks = self._patiently(queue, life, sink, partial(_write, queue, sink, given))
        except Exception as error:
            if queue.in_round or isinstance(error, _Over) or not self._landed(queue, life, sink, given[0][0]):
                raise
            self._write(queue, life, given)  # the batches that the outside does not have
            return
        lacks = sequence + 1 if lacks is None else queue.base + _whole(queue, "write", lacks)
        if lacks > sequence + 1:
            said = f"write() of batch {sequence - queue.base} returned {lacks - queue.base}"
            raise UserCodeError(f"{queue.where}: {said}")
        while queue.kept and queue.kept[0][0] < lacks:
            queue.kept.popleft()
        still = [(position.sequence, each) for position, each in given if position.sequence >= lacks]
        queue.kept.extend((number, BATCH_BYTES + logical_bytes(each)) for number, each in still)
        kept = sum([nbytes for _, nbytes in queue.kept]) if not queue.jobs else 0
        if kept >= self._kept_max:
            raise UserCodeError(
                f"{queue.where}: it has collected {kept:,} bytes since batch {lacks - queue.base} and brought nothing outside, "
                "and no more will come: the replicas keep up to spark.flux.sink.maxBytes. Write sooner, and say in "
                "traits = flux.SinkTraits(holds_bytes=...) how much is collected"
            )
        self._note(queue, life, lacks)

    def _show(self, queue: SinkQueue, life: int, news: TentativeNews) -> None:
        """Tell a sink of tentative results. Rows that it cannot take now are left out where other calls wait: they are void soon,
        and stable output does not wait for them."""
        sink = queue.sink
        if sink is None:
            return
        if isinstance(news, TentativeOutput):
            self._patiently(queue, life, sink, partial(sink.tentative, news.batch, news.through), gives_way=True)
        elif isinstance(news, TentativeUndo):
            self._patiently(queue, life, sink, partial(sink.undo, news.start, news.end))
        else:
            self._patiently(queue, life, sink, partial(sink.corrected, news.through))

    def _landed(self, queue: SinkQueue, life: int, sink: Sink, refused: Position) -> bool:
        """Return whether the outside has meanwhile got a batch whose write it has refused: a primary that was given up may have
        had that batch under way when this one asked. Skipped if this primary learns that it was given up itself."""
        if sink.traits.committed_changes or self._hears_the_end(queue, life):
            return False
        try:
            has = sink.committed(refused.partition)
        except Exception:  # the error of the write says more
            return False
        if has is None or (has := queue.base + _whole(queue, "committed", has)) <= refused.sequence:
            return False
        queue.first = has
        self._note(queue, life, has)
        return True

    def _patiently(
        self, queue: SinkQueue, life: int, sink: Sink, call: Callable[[], Any], gives_way: bool = False
    ) -> Any:
        """Return the result of a call, which is repeated after a transient error. ``gives_way``: only while no other call
        waits."""
        began, pause = time.monotonic(), PAUSE_S
        while True:
            if not queue.lives(life) or self._closing.is_set():
                raise _Over
            try:
                return call()
            except Exception as error:
                if queue.in_round or not _is_transient(queue, sink, error):
                    raise
                if gives_way and self._others_wait(queue):
                    queue.left_out += 1
                    return None
                tried_s = time.monotonic() - began
                about = f"{queue.where}: {described(error)}"
                if tried_s >= self._retry_s:
                    raise UserCodeError(
                        f"{about}, still after {tried_s:.1f} s (spark.flux.sink.retryTimeout)", user_traceback(error)
                    ) from error
                self._say_retry(queue, f"{about}; failing for {tried_s:.1f} s, tried again in {pause:g} s")
            self._closing.wait(pause)
            pause = min(2 * pause, TENTATIVE_PAUSE_S if gives_way else PAUSE_MAX_S)

    def _others_wait(self, queue: SinkQueue) -> bool:
        """Return whether a call waits that tentative rows may not hold up: any but that of other tentative rows."""
        with self._lock:
            return any(not isinstance(job.news, TentativeOutput) for job in queue.jobs)

    def _say_retry(self, queue: SinkQueue, text: str) -> None:
        with self._lock:
            others = self._retries.others(queue.stage.id, time.monotonic())
        if others is not None:
            log.warning("%s%s", text, f" (and {others} more retries since the last line)" if others else "")

    def _note(self, queue: SinkQueue, life: int, has: int) -> None:
        with self._lock:
            if not queue.lives(life):
                return
            queue.has = max(queue.has, has)
        self._ring()

    def _close(self, queue: SinkQueue) -> None:
        queue.kept.clear()
        if queue.sink is not None:
            sink, queue.sink = queue.sink, None
            closed(queue.where, sink.close)

    def _fail(self, queue: SinkQueue, life: int, error: BaseException) -> None:
        """Report an error. If the partition has another primary, it only goes to the log: the outside may well refuse the writes
        of a former primary."""
        with self._lock:
            if queue.life == life:
                queue.broken = life
                queue.clear()
        if self._hears_the_end(queue, life):
            if not self._closing.is_set():
                _note_led_elsewhere(queue, error)
            return
        if isinstance(error, SinkAhead):
            error = QueryFailed(ahead(queue.where, str(error), self._plan.location))
        known = isinstance(error, FluxError)
        about = f"{queue.where}: {described(error)}"
        self._failed.put(SinkFailed(queue, life, error if known else UserCodeError(about, user_traceback(error))))  # type: ignore[arg-type]
        self._ring()

    def _hears_the_end(self, queue: SinkQueue, life: int) -> bool:
        """Wait for news of the end: return whether the partition has another primary, or the worker ends."""
        end = time.monotonic() + LED_ELSEWHERE_S
        while queue.life == life and not self._closing.is_set() and time.monotonic() < end:
            self._closing.wait(LOOK_S)
        return queue.life != life or self._closing.is_set()

    # ---- the end

    def close(self) -> None:
        """Begin no more jobs. Wait for calls under way, but not for ever: these threads end with the process."""
        self._closing.set()
        for queue in self._queues.values():
            with self._lock:
                queue.life += 1
                queue.clear()
            self._give(queue, SinkCall(queue.life, do=partial(self._close, queue)))
        end = time.monotonic() + CLOSE_S
        while any(queue.served for queue in self._queues.values()) and time.monotonic() < end:
            time.sleep(LOOK_S)
        self._ready.end()
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), LOOK_S))
        if any(thread.is_alive() for thread in self._threads):
            busy = ", ".join(queue.where for queue in self._queues.values() if queue.served)
            log.warning("still in a call %g s after the end, which ends with its process: %s", CLOSE_S, busy)


def _is_transient(queue: SinkQueue, sink: Sink, error: Exception) -> bool:
    try:
        return bool(sink.is_transient(error))
    except BaseException as failed:  # an error of the user's code, also sys.exit()
        about = f"{queue.where}: is_transient() raised {described(failed)}, asked about {described(error)}"
        raise UserCodeError(about, user_traceback(failed)) from failed


def _note_led_elsewhere(queue: SinkQueue, error: BaseException) -> None:
    log.info("%s: %s; the partition is led elsewhere by now", queue.where, described(error))


def _lacking(queue: SinkQueue, given: Sequence[Given]) -> list[Given]:
    """Return the batches that the outside did not have when this life of a queue began."""
    return [(position, batch) for position, batch in given if position.sequence >= queue.first]


def _cost(rows: TentativeOutput) -> int:
    return BATCH_BYTES + logical_bytes(rows.batch)


def _oldest(queue: SinkQueue) -> TentativeOutput | None:
    return next((job.news for job in queue.jobs if isinstance(job.news, TentativeOutput)), None)


def _write(queue: SinkQueue, sink: Sink, given: Sequence[Given]) -> int | None:
    (position, batch), *others = [(queue.outside(position), batch) for position, batch in given]
    return sink.write_joined([(position, batch), *others]) if others else sink.write(batch, position)


def _as_one(given: Sequence[Given]) -> pa.RecordBatch:
    return given[0][1] if len(given) == 1 else pa.concat_batches([batch for _, batch in given])


def _file(number: int) -> int:
    if index(number) < 0:
        raise ValueError("it is closed")
    return index(number)


def _whole(queue: SinkQueue, method: str, given: Any) -> int:
    try:
        number = -1 if isinstance(given, bool) else index(given)  # also numpy's
    except TypeError:
        number = -1
    if number < 0:
        raise UserCodeError(
            f"{queue.where}: {method}() must return None or the number of a batch, got {text_of(given, repr):.100}"
        )
    return number
