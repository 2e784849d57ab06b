"""One copy of one partition of a stage: what waits for it, in which order it is applied, when it is through (DESIGN 4).

The primary takes slices in the order in which they came, groups small ones into one step, writes the step into the
order log and applies it at once; a secondary applies committed steps in the order of that log. Release rule: what a
step gives out is not sent before the step is committed. With one replica every step is committed at once.

Timers fire in steps of their own, ticks, which the primary orders like any other step: the others fire theirs at the same
step, because they have set the same. A timer that is due goes before what waits, so that an operator sees no rows of a
later time first; but no two ticks while rows wait, so that a timer that is always due cannot keep them out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pyarrow as pa

from flux.batches import conform, given_batches, split
from flux.checksum import extend
from flux.errors import SchemaError, UserCodeError
from flux.messages import Entry, StepKind
from flux.operator import Batches, Context, Operator
from flux.order import OrderLog
from flux.plan import StagePlan
from flux.producer import NEVER, Producer
from flux.receiver import Slice
from flux.settings import Settings
from flux.snapshot import check_snapshot
from flux.timers import Timers
from flux.user_code import closed, user_traceback
from partitioning.cluster import cluster_by_key, whole
from partitioning.ids import StreamId


@dataclass(frozen=True)
class Outlet:
    """Where output goes: the stream of this partition on one outgoing edge. ``key`` empty: rotate over partitions."""

    producer: Producer
    key: tuple[int, ...]

    def send(self, batch: pa.RecordBatch, created: float) -> None:
        order, partitions = self.producer.order, self.producer.partitions
        if self.key:
            data = cluster_by_key(batch, self.key, partitions, order)
        else:
            turn = (self.producer.stream.producer + self.producer.next_sequence) % partitions
            data = whole(batch, turn, partitions, order)
        self.producer.append(data, created)


#: Checksums of steps that are kept in any case: for a replica that may become primary. A primary keeps those that a
#: secondary has not been compared with, however far that is behind, up to a limit on the memory that they take.
CHECKSUMS_KEPT, CHECKSUMS_MAX = 1024, 1 << 16
#: Steps that may wait for their commit when a tick is ordered. Rows are bounded by credit, ticks by nothing else.
UNCOMMITTED_MAX = 1024
#: Steps that a live secondary may be behind when a tick is ordered: whoever takes over has to make up for them first. Rows
#: have their bound in the logs of their producers, which wait for its acks.
BEHIND_MAX = 1024
#: Looked up often.
_TICK, _FINISH = StepKind.TICK, StepKind.FINISH


class Replica:
    """``add`` slices, ``step`` while ``ready``."""

    def __init__(
        self, stage: StagePlan, partition: int, incarnation: int, outlets: list[Outlet], limits: Settings
    ) -> None:
        self.stage = stage
        self.partition = partition
        self.incarnation = incarnation
        self.outlets = outlets
        self.finished = False
        self.rows_in = 0
        self.rows_out = 0
        self.busy_s = 0.0
        self.slices = 0
        self.copy_bytes = 0  # size of the last copy of its state
        self.frozen = 0  # copies of its state that are being taken now: no step until they are
        self.context = Context(
            stage.name, partition, stage.partitions, stage.key, stage.schemas, stage.output_mode
        )  # fmt: skip
        self.primary = True
        self.leads_since = -1  # the epoch in which it became primary
        self.reported = False  # the controller knows that it is through
        self.order = OrderLog()
        self.applied = 0  # steps
        self.checksum = 0  # running, of the output, step under way included
        self._checksums: deque[tuple[int, int]] = deque(maxlen=CHECKSUMS_MAX)  # steps applied, checksum then
        self._limits = limits
        self._waiting: dict[StreamId, deque[Slice]] = {}
        self._arrivals: deque[StreamId] | None = deque()  # one per waiting slice; None: to be made up when needed
        self._decided: dict[StreamId, int] = {}  # of those that wait, by this primary
        self._marks: deque[tuple[int, list[int]]] = deque()  # uncommitted step -> where its output begins in each log
        self._latest = (
            0.0  # time of the newest step, as primary: a new one's clock may be behind that of the one before it
        )
        self._ticked = False  # as primary: the newest step is a tick
        self.kind = StepKind.SLICES  # of the step applied last, or under way
        self.method = "process"  # of the operator, for that step
        self.applying: list[Slice] = []
        self._output: Iterator[pa.RecordBatch] | None = None  # of the step under way
        self._unsent: pa.RecordBatch | None = None  # came when the logs were full
        self._ended: dict[int, set[int]] = {edge: set() for edge in stage.edges_in}
        self._expected: dict[int, set[int]] = {}
        self.operator = self._guard("open", None, self._open)
        # A state that cannot travel cannot be repaired or moved: say so before there is any.
        check_snapshot(self.snapshot(), self.where, self.operator.snapshot_classes)
        self._timed = getattr(self.operator.on_timer, "__func__", None) is not Operator.on_timer

    @property
    def where(self) -> str:
        return f"stage {self.stage.name}, partition {self.partition}"

    @property
    def queued(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def through(self) -> bool:
        """Whether its end is reached for good: another replica would come to the same."""
        return self.finished and self.order.committed >= self.applied

    @property
    def between_steps(self) -> bool:
        return self._output is None

    def _open(self) -> Operator:
        operator = self.stage.make()
        operator.open(self.context)
        return operator

    # ---- input

    def add(self, slice_: Slice) -> None:
        self._waiting.setdefault(slice_.stream, deque()).append(slice_)
        if self._arrivals is not None:
            self._arrivals.append(slice_.stream)

    def waiting(self) -> dict[StreamId, list[Slice]]:
        """Slices received and not yet applied, for whoever discards the replica. Those of a step that waits for room in the
        logs are among them: a primary may be dropped in the middle of it."""
        slices = {stream: list(slices) for stream, slices in self._waiting.items()}
        for slice_ in [] if self.between_steps else self.applying:
            slices.setdefault(slice_.stream, []).append(slice_)
        return slices

    def expect(self, edge: int, producers: Iterable[int]) -> None:
        """These are all the streams of an edge."""
        self._expected[edge] = set(producers)

    @property
    def _input_ended(self) -> bool:
        return all(edge in self._expected and self._expected[edge] <= self._ended[edge] for edge in self.stage.edges_in)

    # ---- copies

    def state(self) -> dict[str, Any]:
        """Everything but the operator's own state and the output logs, between two steps."""
        assert self.between_steps
        return {
            "applied": self.applied,
            "checksum": self.checksum,
            "entries": msgspec.msgpack.encode(self.order.since(self.applied)),
            "committed": self.order.committed,
            "marks": list(self._marks),
            "ended": {edge: sorted(ended) for edge, ended in self._ended.items()},
            "finished": self.finished,
            "now": self.context.now,
            "timers": dict(self.context.timers.pending),
            "rows": (self.rows_in, self.rows_out),
        }

    def adopt(self, state: dict[str, Any]) -> None:
        """Become what ``state`` describes; the operator has been restored."""
        self.applied, self.checksum, self.finished = state["applied"], state["checksum"], state["finished"]
        self._checksums.append((self.applied, self.checksum))
        self.order = OrderLog(self.applied)
        self.order.adopt(msgspec.msgpack.decode(state["entries"], type=list[Entry]), state["committed"])
        self._marks = deque((step, list(starts)) for step, starts in state["marks"])
        self._ended = {edge: set(ended) for edge, ended in state["ended"].items()}
        self.context.now = state["now"]
        self.context.timers.replace(state["timers"])  # instead of what the fresh operator has set
        self.rows_in, self.rows_out = state["rows"]
        self.follow()
        self.release()

    @property
    def state_bytes(self) -> int:
        """About, without taking a snapshot."""
        return self._guard("state_bytes", None, self.operator.state_bytes) or self.copy_bytes

    def snapshot(self) -> Any:
        return self._guard("snapshot", None, self.operator.snapshot)

    def restore(self, snapshot: Any) -> None:
        self._guard("restore", None, lambda: self.operator.restore(snapshot))

    # ---- roles

    def lead(self, epoch: int, peers: dict[int, tuple[int, bool]]) -> None:
        """Be primary with these other replicas: worker -> (incarnation, live)."""
        if not self.primary:
            self.primary, self._arrivals, self.leads_since = True, None, epoch
            ordered = self.order.since(self.applied)
            self._latest, self._ticked = (ordered[-1].now if ordered else self.context.now), False
        elif self.leads_since < 0:
            self.leads_since = epoch
        self.order.lead(peers, self.applied)
        self.release()

    def follow(self) -> None:
        """Be secondary: somebody else decides the order."""
        self.primary, self._arrivals = False, None
        self.order.follow()

    def release(self) -> None:
        """Let go what is committed by now."""
        while self._marks and self._marks[0][0] < self.order.committed:
            self._marks.popleft()
        starts = self._marks[0][1] if self._marks else [NEVER] * len(self.outlets)
        for outlet, start in zip(self.outlets, starts, strict=True):
            producer = outlet.producer
            # Only what was held back has something new to send.
            producer.dirty |= producer.release_from < min(start, producer.next_sequence)
            producer.release_from = start
        self.order.trim(self.applied)

    # ---- steps

    @property
    def has_room(self) -> bool:
        """Whether the logs of its output take more."""
        return all(outlet.producer.has_room for outlet in self.outlets)

    def ready(self, now: float) -> bool:
        """Whether there is something to do and room for what comes of it."""
        if self.finished or self.frozen:
            return False
        for outlet in self.outlets:  # asked more than once for every step
            if not outlet.producer.has_room:
                return False
        if self._output is not None:
            return True
        if self.applied < self.order.end:
            return (self.primary or self.applied < self.order.committed) and self._has(self.order[self.applied])
        return self.primary and (bool(self._waiting) or self._input_ended or self._tick_due(now))

    @property
    def timer_at(self) -> float:
        """When this replica has to order a tick; infinite if it has none to order."""
        return self.context.timers.next if self.primary and not self.finished else math.inf

    def _tick_due(self, now: float) -> bool:
        if self.context.timers.next > max(now, self._latest) or self.order.end - self.order.committed > UNCOMMITTED_MAX:
            return False
        if self.order.behind > BEHIND_MAX:
            return False
        return not self._ticked or not (self._waiting or self._input_ended)

    def _has(self, entry: Entry) -> bool:
        """Whether all slices of an ordered step are here: rows and order come by different ways."""
        if len(entry.slices) == 1:  # the most common, and asked often
            edge, producer, _ = entry.slices[0]
            return StreamId(edge, producer) in self._waiting
        return not self._lacks(entry)

    def _lacks(self, entry: Entry) -> list[StreamId]:
        wanted: dict[StreamId, int] = {}
        for edge, producer, _ in entry.slices:
            stream = StreamId(edge, producer)
            wanted[stream] = wanted.get(stream, 0) + 1
        return [stream for stream, count in wanted.items() if len(self._waiting.get(stream, ())) < count]

    def missing(self) -> list[StreamId]:
        """Streams of which the next ordered step wants rows that have not come."""
        limit = self.order.end if self.primary else self.order.committed
        return self._lacks(self.order[self.applied]) if self.between_steps and self.applied < limit else []

    def step(self, now: float) -> list[Slice]:
        """Apply the next step, or go on with one whose output did not fit into the logs; returns the slices that are
        applied now, in the order of each stream."""
        assert self.ready(now)
        if self._output is None and not self._begin(now):
            return self._complete()  # the end of a stream, which the operator does not see
        if not self._guard(self.method, self.applying, self._emit):
            return []
        self._output = None
        return self._complete()

    def _begin(self, now: float) -> bool:
        if self.applied == self.order.end:
            self._decide(now)
        entry = self.order[self.applied]
        self.applying, self.kind = self._ordered(entry), entry.kind
        if self.applied >= self.order.committed:
            self._hold_back()
        self.context.now, self.context.created, self.context.step = entry.now, entry.created, self.applied
        if not self.applying:
            self._begin_without_rows(entry.kind)
            return True
        self.method = "process"
        first = self.applying[0]
        if first.last:
            self._ended[first.stream.edge].add(first.stream.producer)
            return False
        batch = self._joined(self.applying)
        self.context.input = first.input
        self._output = self._guard("process", self.applying, lambda: self._parts(self.operator.process(batch)))
        return True

    def _begin_without_rows(self, kind: StepKind) -> None:
        if kind is _TICK:
            self.method, self._output = "on_timer", self._fired()
        else:
            self.method = "finish"
            self.context.timers.replace({})
            self._output = self._guard("finish", None, lambda: self._parts(self.operator.finish()))

    def _fired(self) -> Iterator[pa.RecordBatch]:
        """What the timers give that are due when the step begins."""
        timers, now = self.context.timers, self.context.now
        for name in timers.due(now):
            if timers.take(name, now):
                yield from self._parts(self.operator.on_timer(name))

    def _hold_back(self) -> None:
        """The output of the step that begins now waits for its commit, behind that of those before it."""
        starts = [outlet.producer.next_sequence for outlet in self.outlets]
        self._marks.append((self.applied, starts))
        if len(self._marks) == 1:
            for outlet, start in zip(self.outlets, starts, strict=True):
                outlet.producer.release_from = start

    def _complete(self) -> list[Slice]:
        if self.applying:
            for slice_ in self.applying:
                if slice_.batch is not None:
                    self.rows_in += slice_.batch.num_rows
        elif self.kind is _FINISH:
            for outlet in self.outlets:
                outlet.producer.finish(self.context.created)
            self.finished = True
        self.applied += 1
        self.slices += len(self.applying)
        if self.stage.replicas > 1:
            self._checksums.append((self.applied, self.checksum))
            if len(self._checksums) > CHECKSUMS_KEPT:
                self._forget_checksums()
        self.order.trim(self.applied)
        return self.applying

    def _forget_checksums(self) -> None:
        """Those that every other replica has been compared with."""
        compared = min((peer.checked for peer in self.order.peers.values()), default=self.applied)
        while len(self._checksums) > CHECKSUMS_KEPT and self._checksums[0][0] <= compared:
            self._checksums.popleft()

    @property
    def checked(self) -> int:
        """Steps that ``last_checksum`` is about."""
        return self._checksums[-1][0] if self._checksums else 0

    @property
    def last_checksum(self) -> int:
        return self._checksums[-1][1] if self._checksums else 0

    def checksum_at(self, applied: int) -> int | None:
        """Checksum of the output of the first ``applied`` steps; None: not there yet, or long ago."""
        newest = self.checked
        if not self._checksums or not self._checksums[0][0] <= applied <= newest:
            return None
        return self._checksums[applied - newest - 1][1]

    def decide_ahead(self, now: float) -> None:
        """Order all that waits, so that the others need not wait for this replica's turn to apply it.

        Not where there are timers: a step that is applied before these may set one that has to go before them."""
        if self._timed:
            return
        if self._arrivals is not None:  # else it has not caught up with the order of the primary before it
            while self._arrivals:
                self._decide(now)

    def _decide(self, now: float) -> None:
        """Order a tick if a timer is due; else the oldest slice that is not ordered, and with it the following ones of the
        same input as long as they are few rows together; if there is none, the input has ended."""
        if self._arrivals is None:
            self._arrivals = deque(stream for stream, slices in self._waiting.items() for _ in slices)
            self._decided = {}
        if self.context.timers.pending:
            if self._tick_due(now):
                self._append(max(now, self._latest), [], _TICK)
                return
            if self.context.timers.next <= now:
                now = self._latest  # what has become due since then has its turn after this step, so this is not later
        chosen: list[Slice] = []
        rows, limit = 0, self._limits.step_max_rows
        while self._arrivals and (rows < limit or not chosen):
            stream = self._arrivals[0]
            before = self._decided.get(stream, 0)
            head = self._waiting[stream][before]
            batch = head.batch
            if chosen and (batch is None or head.input != chosen[0].input or rows + batch.num_rows > limit):
                break
            self._arrivals.popleft()
            self._decided[stream] = before + 1
            chosen.append(head)
            if batch is None:
                break
            rows += batch.num_rows
        assert chosen or self._input_ended
        self._append(now, chosen, StepKind.SLICES if chosen else _FINISH)

    def _append(self, now: float, chosen: list[Slice], kind: StepKind) -> None:
        if now < self._latest:
            now = self._latest
        self._latest, self._ticked = now, kind is _TICK
        created = min([slice_.created for slice_ in chosen], default=now)
        self.order.append(Entry(now, created, [(*slice_.stream, slice_.sequence) for slice_ in chosen], kind))

    def _ordered(self, entry: Entry) -> list[Slice]:
        slices = []
        for edge, producer, sequence in entry.slices:
            slice_ = self._pop(StreamId(edge, producer))
            assert slice_.sequence == sequence, (self.where, slice_.stream, slice_.sequence, entry.slices)
            slices.append(slice_)
        return slices

    def _pop(self, stream: StreamId) -> Slice:
        waiting = self._waiting[stream]
        slice_ = waiting.popleft()
        if not waiting:
            del self._waiting[stream]
        if self._arrivals is not None:
            self._decided[stream] -= 1
        return slice_

    @staticmethod
    def _joined(slices: list[Slice]) -> pa.RecordBatch:
        if len(slices) == 1:
            assert slices[0].batch is not None
            return slices[0].batch
        return pa.concat_batches([slice_.batch for slice_ in slices])

    def _parts(self, output: Batches) -> Iterator[pa.RecordBatch]:
        """Output batches checked and cut to size."""
        what = f"output of stage {self.stage.name}"
        for batch in given_batches(output):
            try:
                checked = conform(batch, self.stage.output_schema, what)
            except SchemaError as error:  # no row is at fault
                raise UserCodeError(f"{self.where}, {self.method}(): {error}") from None
            yield from split(checked, self._limits.batch_max_rows, self._limits.batch_max_bytes)

    def _emit(self) -> bool:
        """Hand on output as long as the logs have room; False if more is to come. However much a step gives, a log
        stays within its bound and one batch."""
        assert self._output is not None
        while True:
            if self._unsent is None:
                self._unsent = next(self._output, None)
                if self._unsent is None:
                    return True
            if not self.has_room:
                return False
            batch, self._unsent = self._unsent, None
            self.rows_out += batch.num_rows
            if self.stage.replicas > 1:
                self.checksum = extend(self.checksum, batch)
            for outlet in self.outlets:
                outlet.send(batch, self.context.created)

    def close(self) -> None:
        closed(self.where, self.operator.close)

    # ---- whose fault

    def _guard(self, doing: str, slices: list[Slice] | None, call):  # type: ignore[no-untyped-def]
        try:
            return call()
        except UserCodeError:
            raise
        except BaseException as error:  # also sys.exit() in it: a worker that obeys looks like a lost one
            raise self._blame(doing, slices, error) from error

    def _blame(self, doing: str, slices: list[Slice] | None, error: BaseException) -> UserCodeError:
        text = f"{self.where}: {doing}() raised {type(error).__name__}: {error}"
        if slices:
            names = ", ".join(f"stream {s.stream} sequence {s.sequence}" for s in slices[:3])
            text += f" (at {names}{', ...' if len(slices) > 3 else ''}; {self._first_bad_row(slices, type(error))})"
        return UserCodeError(text, user_traceback(error))

    def _first_bad_row(self, slices: list[Slice], kind: type[BaseException]) -> str:
        """Look for the shortest prefix that fails on a fresh operator: the failing one may be half-way through."""
        batch = self._joined(slices)

        def fails(rows: int) -> bool:
            try:
                operator = self.stage.make()
                operator.open(replace(self.context, timers=Timers()))
                for _ in operator.process(batch.slice(0, rows)) or ():
                    pass
            except BaseException as error:
                return isinstance(error, kind)
            return False

        if not fails(batch.num_rows):
            return f"no single row is at fault, it fails with the state built before, {batch.num_rows} rows in the step"
        low, high = 0, batch.num_rows  # fails(high), not fails(low)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle, high)
        text = str(batch.slice(high - 1, 1).to_pylist()[0])
        return f"first bad row is number {high - 1} of the step: {text if len(text) < 500 else text[:500] + '...'}"
