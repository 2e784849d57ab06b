"""What waits for a replica: slices that have come and are not applied, whose turn it is, and whether anything is still to come.

Slices of one stream wait in the order of the stream. A primary takes them from all streams in the order in which they came
(``choose``); the others take those that the order log names (``take``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from flux.errors import NonDeterministicInputError, QueryFailed
from flux.stream.elements import End
from flux.stream.receiver import RowSlice, Slice, WordSlice
from flux.wire.messages import OrderEntry, StepKind
from partitioning.ids import StreamId

#: Slices are joined as long as their step takes so many seconds, by what rows have cost here lately. So many rows are joined
#: anyway, and more than these only up to so many bytes.
STEP_S, STEP_ROWS, STEP_BYTES = 0.005, 4096, 16 << 20


class Waiting:
    """``by_stream``: what waits, no stream without any. ``arrivals``: for a primary, the stream of each slice that is not
    ordered, the oldest first; None: to be made up when needed."""

    def __init__(self, edges: Iterable[int], partition: int, where: str) -> None:
        """``where``: stage and partition, for messages."""
        self._partition = partition
        self._where = where
        self.from_sources: AbstractSet[int] = frozenset()  # edges whose streams are read again after a loss
        self.from_logs: AbstractSet[int] = frozenset()  # those of them whose rows bring their numbers, and may be gone
        self.by_stream: dict[StreamId, deque[Slice]] = {}
        self.arrivals: deque[StreamId] | None = deque()
        self._ordered: dict[StreamId, int] = {}  # of those that wait, by this primary
        self._rows = 0  # taken by now
        self._row_s: float | None = None  # that a row has cost lately; None: not known
        self._known = 0, 0.0  # rows taken, and seconds for them, when that was found
        self.ended: dict[int, set[int]] = {edge: set() for edge in edges}  # streams that have come to their end
        self.expected: dict[int, Collection[int]] = {}  # all streams of an edge, once that is known

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

    def hear(self, slice_: WordSlice) -> None:
        """An element without rows is applied, which the operator does not see."""
        match slice_.word:
            case End():
                self.ended[slice_.stream.edge].add(slice_.stream.producer)

    # ---- for a primary

    def forget_turns(self) -> None:
        """Somebody else orders what waits now, or has done so far."""
        self.arrivals = None

    def arrange(self) -> None:
        """Give what waits its turn, if nobody has: nothing of it is ordered."""
        if self.arrivals is None:
            self.arrivals = deque(stream for stream, slices in self.by_stream.items() for _ in slices)
            self._ordered = {}

    def choose(self, most: int, busy_s: float) -> list[Slice]:
        """The oldest slice that is not ordered, and with it the following ones of the same input as long as they are few rows
        together: ``most``, or fewer where rows cost much. They wait on, until they are taken. ``busy_s``: how long the operator
        was busy with all rows that were taken."""
        chosen: list[Slice] = []
        rows, nbytes, arrivals, ordered = 0, 0, self.arrivals, self._ordered
        rows_max = self._few(most, busy_s) if arrivals and len(arrivals) > 1 else most
        while arrivals and (rows < rows_max or not chosen):
            stream = arrivals[0]
            before = ordered.get(stream, 0)
            head = self.by_stream[stream][before]
            few = isinstance(head, RowSlice) and rows + head.batch.num_rows <= rows_max
            if chosen and not (few and head.input == chosen[0].input):
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
        return chosen

    def _few(self, most: int, busy_s: float) -> int:
        """Rows that may be joined. What they cost is looked at once more after each step: more counts at once, less by and by."""
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
        """Of the slice that ``choose`` begins with. 0: it has none, or it is not known which it is."""
        if not self.arrivals:
            return 0
        stream = self.arrivals[0]
        return self.by_stream[stream][self._ordered.get(stream, 0)].rows

    # ---- for a step that is ordered

    def has(self, entry: OrderEntry) -> bool:
        """Whether all slices of an ordered step are here: rows and order come by different ways."""
        for edge, producer, through in entry.slices:  # noqa: SIM110 - asked often, and all() takes several times as long
            if not self._come(StreamId(edge, producer), through):
                return False
        return True

    def lacks(self, entry: OrderEntry) -> list[StreamId]:
        """Streams of which slices of a step are missing."""
        wanted = {StreamId(edge, producer): through for edge, producer, through in entry.slices}
        return [stream for stream, through in wanted.items() if not self._come(stream, through)]

    def _come(self, stream: StreamId, through: int) -> bool:
        """Nothing comes behind the end: where it is waited for in vain, ``take`` finds out."""
        waiting = self.by_stream.get(stream)
        return waiting is not None and (waiting[-1].sequence >= through or waiting[-1].ends_stream)

    def take(self, entry: OrderEntry) -> list[Slice]:
        """The slices of a step, which wait no more. Where batches have come in other runs than to who has ordered the step, a
        slice is cut."""
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
                    parts = slice_.cut(through, self._partition) if isinstance(slice_, RowSlice) else None
                    if parts is None:
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

    def _other_rows(self, stream: StreamId, through: int) -> Exception:
        """An earlier primary had rows that the stream does not have any more (design: same-rows)."""
        if stream.edge not in self.from_sources:
            return AssertionError((self._where, stream, through))
        if stream.edge in self.from_logs:
            return QueryFailed(
                f"{self._where}: a step that was ordered before has to be repeated, and rows of it are gone from the log of "
                f"partition {stream.producer} of the input of edge {stream.edge}, at or before number {through}, or are other "
                "ones now. What was shown of them cannot be repeated. Keep records for longer than a query may be down after a "
                "kill; query.stop() leaves nothing to repeat. Start with another checkpointLocation to read what the log has"
            )
        return NonDeterministicInputError(
            f"{self._where}: partition {stream.producer} of the input of edge {stream.edge} was read again and gave other rows "
            f"at or before batch {through} than it had given before: the input is not deterministic. Sort it within partitions, "
            "or write it out (df.checkpoint(), df.write) and read that"
        )

    def validate(self) -> None:
        """What holds between any two events. AssertionError says what does not."""
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


def entry_of(chosen: Iterable[Slice], now: float, kind: StepKind) -> OrderEntry:
    """A step with these slices, as it is ordered."""
    created = min([slice_.created for slice_ in chosen], default=now)
    slices: list[tuple[int, int, int]] = []
    for slice_ in chosen:
        if slices and slices[-1][:2] == slice_.stream:
            slices.pop()  # the later one says both
        slices.append((*slice_.stream, slice_.sequence))
    return OrderEntry(now, created, slices, kind, rows_of(chosen))


def rows_of(slices: Iterable[Slice]) -> int:
    return sum([slice_.rows for slice_ in slices])


def bytes_of(slices: Iterable[Slice]) -> int:
    return sum([int(slice_.batch.nbytes) for slice_ in slices if isinstance(slice_, RowSlice)])
