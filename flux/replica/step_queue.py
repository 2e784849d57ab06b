"""The pending slices of a replica, received and not yet applied, and the steps that are made of them.

Slices of one stream are pending in the order of the stream. A primary takes them from all streams in the order of their arrival
(``choose``); the other replicas take those that the order log names (``take``). ``next`` gives either as a ``ReplicaStep``, a
value that travels: the replica applies it, its output is emitted, and the worker returns the credit of its slices.

Timers fire in steps of their own, ticks, which the primary orders like any other step. The other replicas fire their timers at
the same step, because they have set the same timers. A due timer goes before pending slices, so that an operator sees no rows
of a later time first. But no two ticks follow each other while rows are pending, so that a timer that is always due cannot keep
the rows out.

Watermarks move in steps of their own, too, which the primary orders before pending slices: they are true for all that is not
ordered yet. Operators that set timers of event time may still have their slices ordered ahead, because the watermark of a step
follows from the order alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import pyarrow as pa

from flux.dataflow.plan_change import PlanVersions
from flux.errors import DataLost, NonDeterministicInputError
from flux.exchange.inbound import RowSlice, Slice, WordSlice
from flux.exchange.log import End
from flux.operators.operator import Timers
from flux.replica.event_clock import EventClock
from flux.replica.order_log import OrderLog
from flux.settings import Settings
from flux.wire.messages import OrderEntry, StepKind
from partitioning.ids import PartitionKey, StreamId

#: Slices are joined as long as their step takes at most ``STEP_S`` seconds, by the recent cost of a row here. ``STEP_ROWS`` rows
#: are joined at any cost; above that number, at most ``STEP_BYTES`` bytes are.
STEP_S, STEP_ROWS, STEP_BYTES = 0.005, 4096, 16 << 20
#: Slices of other inputs that the choice of a step passes over, at most. A rare input beside a long queue of another one would
#: cost a walk through the queue for each of its slices.
PASSED_MAX = 256
#: Limit of uncommitted steps above which no tick is ordered. Credit bounds the number of rows, but nothing else bounds ticks.
UNCOMMITTED_MAX = 1024
#: Kinds of steps under module names, because they are looked up often.
_SLICES, _TICK, _FINISH, _WATERMARK = StepKind.SLICES, StepKind.TICK, StepKind.FINISH, StepKind.WATERMARK
_FORFEIT, _CHANGE = StepKind.FORFEIT, StepKind.CHANGE
#: The method of an operator that a step calls, by the kind of the step.
_METHODS = {
    _SLICES: "process", _TICK: "on_timer", _FINISH: "finish", _WATERMARK: "on_watermark", _FORFEIT: "on_watermark",
    _CHANGE: "process",
}  # fmt: skip


class ReplicaStep(msgspec.Struct, frozen=True):
    """One step of a replica, on its way from the pending slices to the operator, the output and the credit."""

    #: Stage and partition.
    key: PartitionKey
    #: The number of steps before it.
    number: int
    #: Its entry in the order log.
    entry: OrderEntry
    #: Its slices, in the order of each stream. A step with an element without rows has no other slice.
    slices: Sequence[Slice]
    #: The rows of its slices as one batch. None: a timer, the end, an element without rows, or all its rows are gone.
    rows: pa.RecordBatch | None
    #: Its rows that are gone, without which it goes on (design: rows-that-are-gone). Negative: it has more rows than were
    #: ordered, because the primary that ordered it had not got some that were gone by then.
    gone: int = 0
    #: The method of the operator that it calls.
    method: str = "process"


class StepQueue:
    """The pending slices of one replica, by stream, and as primary the choice of the next step."""

    def __init__(
        self, key: PartitionKey, edges: Iterable[int], timers: Timers, limits: Settings, where: str,
        clock: EventClock | None = None,
    ) -> None:  # fmt: skip
        """Begin empty. ``timers``: those of the operator; ``where``: stage and partition, for messages; ``clock`` of event time;
        None: the stage has none."""
        self._key = key
        self._timers = timers
        self._limits = limits
        self._where = where
        self._clock = clock
        #: As primary: the newest step is a watermark.
        self.marked = False
        #: As primary: time of the newest step. A new primary's clock may be behind it.
        self.latest = 0.0
        #: As primary: the newest step is a tick.
        self.ticked = False
        #: As primary: the version of the newest change of the plan in the order, and the one to be ordered (design: edge-begins).
        self.changed_to = self.change_to = 0
        #: The versions of the plan that are known here; None: no step changes it.
        self.plans: PlanVersions | None = None
        #: Edges whose streams are read again after a loss.
        self.from_sources: AbstractSet[int] = frozenset()
        #: Edges from sources whose rows carry their own numbers. Such rows may be gone when they are read again.
        self.from_logs: AbstractSet[int] = frozenset()
        #: Edges whose rows are passed over if they are gone, because a source goes on after a loss (design: rows-that-are-gone).
        self.loses: AbstractSet[int] = frozenset()
        #: By stream: rows below this number do not come any more, though steps may want them.
        self._passed: dict[StreamId, int] = {}
        #: Rows that the step taken last lacked; see ``ReplicaStep.gone``.
        self._gone = 0
        #: Pending slices. A stream without any is not in it.
        self.by_stream: dict[StreamId, deque[Slice]] = {}
        #: As primary: the stream of each slice that is not ordered, the oldest first; None: to be made up when needed.
        self.arrivals: deque[StreamId] | None = deque()
        #: Number of pending slices of a stream that this primary has ordered.
        self._ordered: dict[StreamId, int] = {}
        #: Rows that were taken.
        self._rows = 0
        #: Recent seconds per row; None: not known.
        self._row_s: float | None = None
        #: Rows taken and seconds spent on them when ``_row_s`` was computed.
        self._known = 0, 0.0
        #: Producers whose streams have ended, by edge.
        self.ended: dict[int, set[int]] = {edge: set() for edge in edges}
        #: All producers of an edge, once they are known.
        self.expected: dict[int, Collection[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.by_stream.values()))

    def add(self, slice_: Slice) -> None:
        self.by_stream.setdefault(slice_.stream, deque()).append(slice_)
        if self.arrivals is not None:
            self.arrivals.append(slice_.stream)

    @property
    def all_ended(self) -> bool:
        for edge, ended in self.ended.items():
            expected = self.expected.get(edge)
            if expected is None or len(ended) < len(expected) or not ended.issuperset(expected):
                return False
        return True

    def hear(self, slice_: Slice) -> None:
        """Apply an element without rows, which the operator does not see."""
        assert isinstance(slice_, WordSlice)
        match slice_.word:
            case End():
                self.ended[slice_.stream.edge].add(slice_.stream.producer)

    def next(self, order: OrderLog, number: int, now: float, busy_s: float) -> ReplicaStep:
        """Return step ``number``, as it is ordered, or as the primary chooses and orders it now. Its slices are pending no more.
        ``busy_s``: seconds that the operator has spent on all taken rows."""
        entry = self.decide(order, now, busy_s) if number == order.end else order[number]
        slices = self.take(entry)
        rows = joined(slices) if slices and isinstance(slices[0], RowSlice) else None
        return ReplicaStep(self._key, number, entry, slices, rows, self._gone, _METHODS[entry.kind])

    # ---- for a primary

    def forget_turns(self) -> None:
        """Forget the turns, because another replica orders the pending slices now, or has done so until now."""
        self.arrivals = None

    def lead(self, ordered: Sequence[OrderEntry], now: float, version: int = 0) -> None:
        """Order steps from now on, behind those that are ordered and not applied. ``now``: time of the newest applied step;
        ``version``: that of the newest applied change of the plan."""
        self.forget_turns()
        self.changed_to = max([version, *(entry.version for entry in ordered)])
        self.latest, self.ticked, self.marked = (ordered[-1].now if ordered else now), False, False

    @property
    def change_due(self) -> bool:
        """The next step to order is a change of the plan."""
        return self.change_to > self.changed_to

    def decide(self, order: OrderLog, now: float, busy_s: float) -> OrderEntry:
        """Order a change of the plan, a tick if a timer is due, or a watermark that has risen. Otherwise order the oldest slice
        that is not ordered, joined with later slices of the same input while they have few rows together. If there is no slice,
        the input has ended."""
        if self.change_due:
            return self._append(order, now, [], _CHANGE)
        self.arrange()
        if self._timers.pending:
            if self.tick_due(order, now):
                return self._append(order, max(now, self.latest), [], _TICK)
            if self._timers.next <= now:
                now = self.latest  # timers that are due since then come after this step, so it is not later
        if self.watermark_due(order):
            assert self._clock is not None
            return self._append(order, now, [], _FORFEIT if self._clock.forfeits else _WATERMARK)
        chosen = self.choose(self._limits.step_max_rows, busy_s)
        assert chosen or self.all_ended
        return self._append(order, now, chosen, _SLICES if chosen else _FINISH)

    def _append(self, order: OrderLog, now: float, chosen: list[Slice], kind: StepKind) -> OrderEntry:
        marks = kind is _WATERMARK or kind is _FORFEIT
        self.latest, self.ticked, self.marked = max(now, self.latest), kind is _TICK, marks
        watermarks = self._clock.take() if self._clock is not None and self.marked else []
        version = 0
        if kind is _CHANGE:
            version = self.changed_to = self.change_to
        entry = entry_of(chosen, self.latest, kind, watermarks, version)
        order.append(entry)
        return entry

    def tick_due(self, order: OrderLog, now: float) -> bool:
        """Tell whether the next step to order is a tick."""
        if self._timers.next > max(now, self.latest) or not self._may_add(order):
            return False
        return not self.ticked or not (self.by_stream or self.all_ended)

    def watermark_due(self, order: OrderLog) -> bool:
        """Tell whether the next step to order is a watermark, unless it is a tick."""
        if self._clock is None or self._clock.offered is None or not self._may_add(order):
            return False
        return not self.marked or not self.by_stream

    def _may_add(self, order: OrderLog) -> bool:
        """Tell whether a step without rows may be ordered: a replica that takes over has to make up for all of them first."""
        return order.end - order.committed <= UNCOMMITTED_MAX and order.behind <= self._limits.replicas_max_steps_behind

    def first_unordered(self, stream: StreamId) -> Slice | None:
        """Return the first pending slice of a stream that this primary has not ordered; None: there is none. A primary that has
        still to repeat steps of another may return a slice of such a step."""
        slices = self.by_stream.get(stream)
        if not slices:
            return None
        at = 0 if self.arrivals is None else self._ordered.get(stream, 0)
        return slices[at] if at < len(slices) else None

    def arrange(self) -> None:
        """Give each pending slice its turn if there are no turns. None of them is ordered then."""
        if self.arrivals is None:
            self.arrivals = deque(stream for stream, slices in self.by_stream.items() for _ in slices)
            self._ordered = {}

    def choose(self, most: int, busy_s: float) -> list[Slice]:
        """Choose the oldest slice that is not ordered, and later ones of the same input while they have few rows together:
        ``most``, or fewer if a row is expensive. Slices of other inputs between them keep their turn, so that inputs whose slices
        alternate are not taken one slice at a time. The chosen slices stay pending until they are taken. ``busy_s``: seconds that
        the operator has spent on all taken rows."""
        chosen: list[Slice] = []
        passed: list[StreamId] = []
        rows, nbytes, arrivals, ordered = 0, 0, self.arrivals, self._ordered
        rows_max = self._few(most, busy_s) if arrivals and len(arrivals) > 1 else most
        while arrivals and (rows < rows_max or not chosen):
            stream = arrivals[0]
            before = ordered.get(stream, 0)
            head = self.by_stream[stream][before]
            if chosen and head.input != chosen[0].input:
                if len(passed) == PASSED_MAX:
                    break
                passed.append(arrivals.popleft())
                continue
            few = isinstance(head, RowSlice) and rows + head.batch.num_rows <= rows_max
            if chosen and not few:
                break
            if chosen and rows + head.rows > STEP_ROWS:
                nbytes = (nbytes or bytes_of(chosen)) + bytes_of([head])
                if nbytes > STEP_BYTES:
                    break
            arrivals.popleft()
            ordered[stream] = before + 1
            chosen.append(head)
            if not isinstance(head, RowSlice):
                break
            rows += head.batch.num_rows
        if arrivals is not None:
            arrivals.extendleft(reversed(passed))
        return chosen

    def _few(self, most: int, busy_s: float) -> int:
        """Return the number of rows that may be joined. The cost of a row is updated after each step: it rises at once to a
        higher cost, and falls half-way to a lower one."""
        rows, seconds = self._rows - self._known[0], busy_s - self._known[1]
        if rows:
            before = self._row_s
            self._row_s = seconds / rows if before is None else max(seconds / rows, (before + seconds / rows) / 2)
            self._known = self._rows, busy_s
        if self._row_s is None:
            return min(most, STEP_ROWS)
        return most if self._row_s * most <= STEP_S else min(most, max(int(STEP_S / self._row_s), STEP_ROWS))

    @property
    def next_rows(self) -> int:
        """The rows of the slice with which ``choose`` begins. 0: it has none, or the slice is not known."""
        if not self.arrivals:
            return 0
        stream = self.arrivals[0]
        return self.by_stream[stream][self._ordered.get(stream, 0)].rows

    # ---- for a step that is ordered

    def has(self, entry: OrderEntry) -> bool:
        """Tell whether all slices of an ordered step are here, or the plan that it names: rows, plans and order arrive by
        different ways."""
        for edge, producer, through in entry.slices:
            if not self._come(StreamId(edge, producer), through):
                return False
        return not entry.version or self.plans is None or entry.version <= self.plans.newest.version

    def lacks(self, entry: OrderEntry) -> list[StreamId]:
        """List the streams that lack slices of a step."""
        wanted = {StreamId(edge, producer): through for edge, producer, through in entry.slices}
        return [stream for stream, through in wanted.items() if not self._come(stream, through)]

    def _come(self, stream: StreamId, through: int) -> bool:
        """Tell whether slices of a stream have come through this number, or its end has come. Nothing comes behind the end: if a
        slice behind it is wanted, ``take`` raises."""
        waiting = self.by_stream.get(stream)
        if waiting is not None and (waiting[-1].sequence >= through or waiting[-1].ends_stream):
            return True
        return bool(self._passed) and through < self._passed.get(stream, 0)

    def note_passed(self, entry: OrderEntry, stream: StreamId, below: int) -> bool:
        """Note that no row of a stream below this number comes any more, and tell whether a step that wants such rows may go on
        without them. DataLost: it may not."""
        wanted = {StreamId(edge, producer): through for edge, producer, through in entry.slices}
        through = wanted.get(stream, below)
        if through >= below or self._come(stream, through):
            return False
        if stream.edge not in self.loses:
            raise self._other_rows(stream, through)
        self._passed[stream] = below
        return True

    def lacks_rows(self, entry: OrderEntry) -> bool:
        """Tell whether rows of a step are gone, of which all the others are here."""
        if not self.loses or entry.rows < 0:
            return False
        there = 0
        for edge, producer, through in entry.slices:
            for slice_ in self.by_stream.get(StreamId(edge, producer), ()):
                there += slice_.rows_through(through) if isinstance(slice_, RowSlice) else 0
                if slice_.sequence >= through:
                    break
        return there < entry.rows

    def take(self, entry: OrderEntry) -> list[Slice]:
        """Remove and return the slices of a step. A slice is cut if its batches arrived here in other runs than at the primary
        that ordered the step."""
        if self.loses:
            self._gone = 0
            if all(edge in self.loses for edge, _, _ in entry.slices):
                return self._take_there(entry)
        slices: list[Slice] = []
        for edge, producer, through in entry.slices:
            stream = StreamId(edge, producer)
            waiting = self.by_stream.get(stream, deque())
            last = -1
            while waiting and last < through:
                slice_ = waiting.popleft()
                if self.arrivals is not None:
                    self._ordered[stream] -= 1
                if slice_.sequence > through:
                    parts = slice_.cut(through, self._key.partition) if isinstance(slice_, RowSlice) else None
                    if parts is None:
                        waiting.appendleft(slice_)
                        raise self._other_rows(stream, through)
                    slice_, rest = parts
                    waiting.appendleft(rest)
                slices.append(slice_)
                last = slice_.sequence
            if not waiting:
                self.by_stream.pop(stream, None)
            if last != through or (len(slices) > 1 and not isinstance(slice_, RowSlice)):
                raise self._other_rows(stream, through)
        rows = rows_of(slices)
        self._rows += rows
        if entry.rows >= 0 and entry.rows != rows:
            read_again = [StreamId(*of) for *of, _ in entry.slices if of[0] in self.from_sources]
            raise self._other_rows((read_again or [stream])[0], through)
        return slices

    def _take_there(self, entry: OrderEntry) -> list[Slice]:
        """Remove and return the slices of a step as far as they are here, and count the rows that are gone.

        A log may lose rows that one replica has got and the primary has not. An order names the last row only, so this replica
        applies the others with the step (design: rows-that-are-gone)."""
        slices: list[Slice] = []
        for edge, producer, through in entry.slices:
            stream = StreamId(edge, producer)
            waiting = self.by_stream.get(stream, deque())
            while waiting and waiting[0].first <= through:
                if slices and not (isinstance(slices[-1], RowSlice) and isinstance(waiting[0], RowSlice)):
                    break  # a word is a step of its own
                slice_ = waiting.popleft()
                if self.arrivals is not None:
                    self._ordered[stream] -= 1
                if isinstance(slice_, RowSlice) and slice_.sequence > through:
                    parts = slice_.cut(through, self._key.partition, exact=False)
                    assert parts is not None, (self._where, stream, through)
                    slice_, rest = parts
                    waiting.appendleft(rest)
                slices.append(slice_)
            if not waiting:
                self.by_stream.pop(stream, None)
        rows = rows_of(slices)
        self._rows += rows
        self._gone = entry.rows - rows if entry.rows >= 0 else 0
        return slices

    def _other_rows(self, stream: StreamId, through: int) -> Exception:
        """Return the error for a stream that lacks rows that an earlier primary had (design: same-rows)."""
        if stream.edge not in self.from_sources:
            pending = [(slice_.first, slice_.sequence) for slice_ in self.by_stream.get(stream, ())]
            return AssertionError((self._where, stream, through, f"pending: {pending[:3]}"))
        if stream.edge in self.from_logs:
            return DataLost(
                f"{self._where}: a step that was ordered before has to be repeated, and rows of it are gone from the log of "
                f"partition {stream.producer} of the input of edge {stream.edge}, at or before number {through}, or are other "
                "ones now. Output that was shown of them cannot be repeated. Keep records for longer than a query may be down "
                "after a kill; query.stop() leaves nothing to repeat. Start again on the same checkpointLocation with a source "
                "that goes on after a loss (flux.kafka: fail_on_data_loss=False) to pass over the rows that are gone"
            )
        return self._nondeterministic(stream, through)

    def _nondeterministic(self, stream: StreamId, through: int) -> Exception:
        return NonDeterministicInputError(
            f"{self._where}: partition {stream.producer} of the input of edge {stream.edge} was read again and gave other rows "
            f"at or before batch {through} than it had given before: the input is not deterministic. Sort it within partitions, "
            "or write it out (df.checkpoint(), df.write) and read that"
        )

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        waits = 0
        for stream, slices in self.by_stream.items():
            count = len(slices)
            waits += count
            assert count, f"stream {stream}: noted as waiting, and nothing does"
            first, last = slices[0].first, slices[-1].sequence
            assert last - first >= count - 1, f"stream {stream}: {count} slices from {first} to {last}"
        if self.arrivals is not None:
            due, ordered = len(self.arrivals), sum(self._ordered.values())
            assert due + ordered == waits, f"{due} slices have their turn, {ordered} are ordered, {waits} wait"


def entry_of(
    chosen: Iterable[Slice], now: float, kind: StepKind, watermarks: Sequence[int] = (), version: int = 0
) -> OrderEntry:
    """Return the order entry of a step with these slices, or watermarks, or of a change to a version of the plan."""
    created = min([slice_.created for slice_ in chosen], default=now)
    slices: list[tuple[int, int, int]] = []
    for slice_ in chosen:
        if slices and slices[-1][:2] == slice_.stream:
            slices.pop()  # the later number covers both
        slices.append((*slice_.stream, slice_.sequence))
    return OrderEntry(now, created, slices, kind, rows_of(chosen), list(watermarks), version)


def joined(slices: Sequence[Slice]) -> pa.RecordBatch:
    """Join the rows of one step to one batch."""
    if len(slices) == 1:
        assert isinstance(slices[0], RowSlice)
        return slices[0].batch
    return pa.concat_batches([slice_.batch for slice_ in slices if isinstance(slice_, RowSlice)])


def rows_of(slices: Iterable[Slice]) -> int:
    return sum([slice_.batch.num_rows for slice_ in slices if isinstance(slice_, RowSlice)])


def bytes_of(slices: Iterable[Slice]) -> int:
    return sum([int(slice_.batch.nbytes) for slice_ in slices if isinstance(slice_, RowSlice)])
