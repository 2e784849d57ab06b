"""The shadow of one replica: tentative results while its watermark stands still (design: shadow).

It stands beside the replica, never in it: the order, commits, logs, acks and checksums do not know of it, and its loss, lateness
or mistakes touch no stable row. It is soft state. Its results are void when the stable watermark has passed them: the stable
watermark is the undo, and no message takes anything back.

Rules: a mark that was heard of is due when 0.9 of the bound X have passed since its date, less one hop for each stage behind, so
that results go through a chain within one X (D1); at once if every stream has come to it and one of them by tentative marks (D2);
after the first tentative mark the policy of the failure, or of stabilization, says how long a mark waits (D3, D6). A mark whose
overlay has changed, or whose rows other stages have voided because stable rows came behind them, is given again, at most ten
times a second (T5). The newest output of each mark that is not stable is kept, for stages that have missed it (T6).

``now`` and dates are seconds by the wall clock, because dates come from other machines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import pyarrow as pa

from flux.dataflow.availability import Availability
from flux.replica.step_queue import ReplicaStep
from flux.shadows.calendar import DatedMark, MarkCalendar
from flux.shadows.overlay import Overlay, TentativeEntry, TentativeRoom
from flux.shadows.tentative_operator import TentativeOperator
from flux.windows.statements import StreamBound
from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.statistics import TentativeState
from partitioning.ids import StreamId

#: The share of the bound X after which a mark is overdue: the rest is for the work and the way.
ALPHA = 0.9
#: Seconds for one hop from a stage to the next.
HOP_S = 0.05
#: Seconds for which a mark waits at least once it was heard of. When a backlog comes in, each mark is old when one stream brings
#: it, and the others follow at once: without this, each would be shown tentatively a moment before it is stable.
GRACE_S = 0.02
#: Seconds that later marks wait with the policy "process".
PROCESS_S = 0.35
#: Seconds between two revisions of a mark.
REVISE_S = 0.1
#: Seconds without news after which a stream that holds the watermark back stands still, at least.
STANDS_S = 0.3
#: The share of X after which missing tentative marks are asked for again.
ASK_SHARE = 0.25


class MarkOutput(NamedTuple):
    """Effect: the tentative results of one mark, in place of earlier ones for the same mark."""

    #: The marks in event time of the input, exclusive and inclusive.
    after: int
    through: int
    #: Both marks in event time of the output, as consumers know it.
    output_after: int
    output_through: int
    #: The date of the mark.
    created: float
    revision: int
    batches: list[pa.RecordBatch]
    #: By outgoing edge of the stage: elements of the output stream that were stable when the results were made.
    sequences: Sequence[int] = ()

    @property
    def rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches)

    @property
    def nbytes(self) -> int:
        return sum(int(batch.nbytes) for batch in self.batches)


class Undone(NamedTuple):
    """Effect: tentative results of event time ``start`` to ``end`` are void; ``end`` None: all later ones, too."""

    start: int
    end: int | None


class CorrectionDone(NamedTuple):
    """Effect: everything up to this event time is stable, and nothing tentative is left."""

    through: int


class WantedMarks(NamedTuple):
    """Effect: the tentative marks of a stream behind ``after`` are wanted, again."""

    stream: StreamId
    after: int


ShadowEffect = MarkOutput | Undone | CorrectionDone | WantedMarks


@dataclass
class StreamNews:
    """The stable bound of one stream, as the shadow has heard of it."""

    bound: int = NEVER
    idle: bool = False
    ended: bool = False
    #: Time of its last rise; infinite before the first.
    risen_at: float = inf
    #: Creation of the newest element that was applied since then; infinite: none was.
    created: float = inf
    #: Elements of it wait for the partition: it is not the stream that is late.
    waits: bool = False
    #: The newest element with rows that was applied.
    applied: int = -1
    #: Time at which tentative marks were asked for last.
    asked_at: float = -inf

    @property
    def waited_for(self) -> bool:
        return not (self.idle or self.ended)


@dataclass
class FiredMark:
    """A tentative mark that was given and that is not stable yet."""

    after: int
    through: int
    created: float
    at: float
    rows: int = 0
    #: Its overlay has changed since.
    dirty: bool = False
    #: The time of the last stable rows in front of it, which have voided its rows in other stages; infinite: there were none.
    voided_at: float = inf
    #: Its output, for stages behind; None: there are none.
    output: MarkOutput | None = None

    @property
    def again_at(self) -> float:
        """The time at which it is to be given again; infinite: it stands. It waits for the last of several stable rows."""
        if self.dirty:
            return self.at + REVISE_S
        return max(self.at + REVISE_S, self.voided_at + GRACE_S)


class Shadow:
    """The tentative work beside one replica. Its owner calls ``look`` with news, ``work`` when ``due_at`` has come, and takes the
    effects of both."""

    def __init__(
        self,
        operator: TentativeOperator,
        availability: Availability,
        quantum: int,
        room: TentativeRoom,
        lanes: Collection[int] = (),
        stages_behind: int = 0,
        to_sink: bool = False,
        again: bool = False,
        watermark: int = NEVER,
        to_stages: bool | None = None,
    ) -> None:
        """Begin at a stable ``watermark``. ``lanes``: the edges whose streams may have tentative marks; ``stages_behind``: on the
        longest way to an end; ``to_sink``: results go to a sink; ``again``: an earlier shadow of the partition may have shown
        something to the sink (rule O1); ``to_stages``: results go to other stages, None: where there is no sink."""
        self.operator = operator
        self.calendar = MarkCalendar(quantum)
        self.overlay = Overlay(room)
        self.state = TentativeState.STABLE
        #: Time of the first tentative mark of the present failure, or of the last one; 0: there was none.
        self.since = 0.0
        self.watermark = watermark
        #: The newest tentative mark, or the stable watermark.
        self.reached = watermark
        self.due_at = inf
        #: Counts: tentative marks, revisions of marks, marks that were merged into later ones, tentative rows.
        self.fired = self.revised = self.skipped = self.rows = 0
        #: Rows of that failure.
        self.rows_in_failure = 0
        #: Bytes of kept output.
        self.kept_bytes = 0
        self._availability = availability
        self._room = room
        self._hops_s = stages_behind * HOP_S
        self._to_sink = to_sink
        self._to_stages = not to_sink if to_stages is None else to_stages
        self._lanes = lanes
        self._revision = 0
        self._streams: dict[StreamId, StreamNews] = {}
        self._marks: list[FiredMark] = []
        #: Seconds that the last mark has taken.
        self._cost_s = 0.0
        self._effects: list[ShadowEffect] = [Undone(watermark, None)] if to_sink and again else []

    # ---- news

    def look(
        self,
        now: float,
        watermark: int,
        bounds: Mapping[StreamId, StreamBound],
        applied: Mapping[StreamId, int] = {},
        waiting: Collection[StreamId] = (),
    ) -> list[ShadowEffect]:
        """Take the stable watermark of the replica, and the bounds of all its streams, as far as the replica has applied them.
        ``applied``: by stream, the newest element that may be in the state, for streams of which no step was seen yet;
        ``waiting``: streams with elements that the replica has still to apply."""
        for stream in self._streams.keys() - bounds.keys():
            del self._streams[stream]
        for stream, bound in bounds.items():
            known = self._streams.get(stream)
            if known is None:
                known = self._streams[stream] = StreamNews(applied=applied.get(stream, -1))
            known.waits = stream in waiting
            self._hear(stream, known, bound, now, watermark)
        if watermark > self.watermark:
            self._rise(watermark, now)
        if self.state is not TentativeState.STABLE:
            self._settle(now)
            self._ask(now)
        self.due_at = self._due(now)
        return self._taken()

    def note_step(self, step: ReplicaStep) -> None:
        """Take a step that the replica has just applied."""
        for slice_ in step.slices:
            known = self._streams.setdefault(slice_.stream, StreamNews())
            known.created = slice_.created
            if step.rows is not None:
                self.note_rows(slice_.stream, slice_.sequence)
        self.operator.stable(step)

    def note_rows(self, stream: StreamId, sequence: int) -> None:
        """Note that the replica has applied a stable element with rows."""
        known = self._streams.setdefault(stream, StreamNews())
        known.applied = max(known.applied, sequence)
        if changed := self.overlay.applied(stream, sequence):
            self.operator.forget()
            self._revise(changed)

    def take(self, entry: TentativeEntry, now: float) -> bool:
        """Take a tentative mark of an upstream shadow. Return False if it is of no use."""
        known = self._streams.setdefault(entry.stream, StreamNews())
        told = self.overlay.told(entry.stream)
        since = told if told < inf else known.risen_at if known.risen_at < inf else -inf
        end = self.overlay.end_of(entry.stream, known.bound)
        changed = self.overlay.take(entry, known.bound, known.applied)
        if changed is None:
            return False
        self.calendar.hear_tentative(entry.through, entry.created, now, self.watermark, since)
        if entry.after > end > NEVER:
            self._want(entry.stream, end, known, now)
        self._revise(changed)
        self.due_at = self._due(now)
        return True

    def _hear(self, stream: StreamId, known: StreamNews, bound: StreamBound, now: float, watermark: int) -> None:
        known.idle, known.ended = bound.idle, bound.ended
        if known.bound < bound.watermark < END_OF_TIME:
            self.calendar.hear(bound.watermark, min(known.created, now), now, watermark)
            known.bound, known.risen_at, known.created = bound.watermark, now, inf
        if bound.ended:
            known.bound = END_OF_TIME
        self._void(stream, known.bound)

    def _void(self, stream: StreamId, bound: int) -> None:
        """Void tentative marks of a stream that are stable by now."""
        if self.overlay.void(stream, bound):
            self.operator.forget()

    def _rise(self, watermark: int, now: float) -> None:
        """Follow the stable watermark. Marks up to it are stable; one that it has passed in part is given again. Stable rows that
        came with it have voided the rows of later marks in other stages, which would lack them until all is corrected."""
        before, self.watermark = self.watermark, watermark
        self.reached = max(self.reached, watermark)
        self.calendar.drop(watermark)
        stable = self.calendar.floor(watermark) if self.operator.aligned else watermark
        passed = [mark for mark in self._marks if mark.after < stable]
        if any(mark.rows for mark in passed) and self._to_sink:
            self._effects.append(Undone(before, max(watermark, passed[-1].through)))
        self._marks = [mark for mark in self._marks if mark.through > watermark]
        for mark in passed:
            self._keep(mark, None)
            mark.after, mark.rows, mark.dirty = watermark, 0, True
        for mark in self._marks:
            if mark.output is not None and mark.rows:
                mark.voided_at = now

    def _revise(self, changed: Sequence[int]) -> None:
        """Have the fired marks given again in which the rows of overlay marks have a part."""
        if changed and self._marks:
            least, reach = min(changed), self.operator.reach
            last = END_OF_TIME if reach is None else max(changed) + reach
            for mark in self._marks:
                mark.dirty |= mark.through >= least and mark.after < max(last, least + 1)

    # ---- states

    def _settle(self, now: float) -> None:
        """Follow the streams: the failure goes on, is being corrected, or is over."""
        following = self.calendar.after(self.watermark)
        overdue = following is not None and now >= following.created + ALPHA * self._bound_s
        if self.reached <= self.watermark and not overdue:
            self.state = TentativeState.STABLE
            self._effects.append(CorrectionDone(self.watermark))
            return
        self.state = TentativeState.UP_FAILURE if self.standing(now) else TentativeState.STABILIZATION

    def standing(self, now: float) -> list[StreamId]:
        """List the streams that hold the watermark back and do not move."""
        return [stream for stream, known in self._holding(self.reached) if now > self._stands_at(known)]

    def _holding(self, mark: int) -> Iterator[tuple[StreamId, StreamNews]]:
        """Yield the streams that the partition waits for in front of a mark."""
        for stream, known in self._streams.items():
            if known.waited_for and known.bound < mark:
                yield stream, known

    def _stands_at(self, known: StreamNews) -> float:
        """Return the time from which on a stream stands still, unless it moves before."""
        return inf if known.waits else -inf if known.risen_at == inf else known.risen_at + self._patience_s

    @property
    def windows(self) -> int:
        """The number of marks that are to be corrected."""
        return len(self._marks)

    @property
    def calm(self) -> bool:
        """Whether nothing is tentative or to be corrected."""
        return self.idle and self.state is TentativeState.STABLE

    @property
    def idle(self) -> bool:
        """Whether it holds nothing tentative."""
        return not self._marks and not len(self.overlay)

    @property
    def _bound_s(self) -> float:
        return self._availability.bound_us / 1e6

    @property
    def _patience_s(self) -> float:
        return max(STANDS_S, ASK_SHARE * self._bound_s)

    # ---- deadlines

    def _policy(self) -> str:
        stabilizes = self.state is TentativeState.STABILIZATION
        return self._availability.stabilization if stabilizes else self._availability.failure

    def _suspended(self) -> bool:
        """Tell whether nothing is given until the failure is over. That goes by the state: marks beyond the stable watermark may
        be overdue when it has reached the last tentative one (rule D6)."""
        return self.state is not TentativeState.STABLE and self._policy() == "suspend"

    def deadline(self, mark: DatedMark) -> float:
        """Return the time at which a mark is due, unless all streams have come to it before (rules D1, D3). A failure begins only
        where a stream stands still: streams that move, or wait here, are late by load, and so is a watermark that all streams
        have passed."""
        wait_s = ALPHA * self._bound_s
        if self.state is not TentativeState.STABLE and self._policy() == "process":
            wait_s = min(wait_s, PROCESS_S)
        due = max(mark.created + wait_s - self._hops_s, mark.heard + GRACE_S)
        if self.state is TentativeState.STABLE:
            stands_at = min((self._stands_at(known) for _, known in self._holding(mark.mark)), default=inf)
            due = max(due, stands_at)
        return due

    def _front(self) -> tuple[int, int]:
        """Return the event time to which every stream has come, by stable bounds alone, and by these or tentative marks. Marks
        between the two are due at once (rule D2); up to the first of them, the stable watermark is on its way."""
        stable = tentative = END_OF_TIME
        for stream, known in self._streams.items():
            if known.waited_for:
                stable = min(stable, known.bound)
                tentative = min(tentative, max(known.bound, self.overlay.newest(stream)))
        return stable, tentative

    def _due(self, now: float) -> float:
        """Return the time of the next mark or revision, or the next look at a failure."""
        if self.state is not TentativeState.STABLE:
            at = now + self._patience_s / 3
            if self._suspended():
                return at
            at = min(at, *(mark.again_at for mark in self._marks), inf)
        else:
            at = inf
        following = self.calendar.after(self.reached)
        if following is not None:
            stable, come = self._front()
            at = min(at, now if stable < following.mark <= come else self.deadline(following))
        return at

    # ---- work

    def work(self, now: float, sequences: Sequence[int] = ()) -> list[ShadowEffect]:
        """Give one mark, or one anew, if it is due. ``sequences``: see ``MarkOutput``. The caller notes the cost."""
        if not self._suspended():
            if (again := self._anew(now)) is not None:
                self.revised += 1
                self._give(again, now, sequences)
            elif (mark := self._next(now)) is not None:
                self._begin(now)
                fired = FiredMark(self.reached, mark.mark, mark.created, now)
                self.reached = mark.mark
                self.fired += 1
                if self._give(fired, now, sequences):
                    self._marks.append(fired)
        self.due_at = self._due(now)
        return self._taken()

    def note_cost(self, seconds: float) -> None:
        """Note the time that the last mark has taken."""
        self._cost_s = seconds

    def _begin(self, now: float) -> None:
        if self.state is TentativeState.STABLE:
            self.state, self.since, self.rows_in_failure = TentativeState.UP_FAILURE, now, 0

    def _anew(self, now: float) -> FiredMark | None:
        return next((mark for mark in self._marks if now >= mark.again_at), None)

    def _next(self, now: float) -> DatedMark | None:
        """Return the mark to give now. If a mark has taken longer than the quantum, all that are due are given as one (rule
        D5)."""
        stable, come = self._front()
        due: list[DatedMark] = []
        for mark in self.calendar.between(self.reached, self.calendar.newest):
            if not (stable < mark.mark <= come or now >= self.deadline(mark)):
                break
            due.append(mark)
            if self._cost_s * 1e6 <= mark.mark - self.reached:
                break
        if not due:
            return None
        self.skipped += len(due) - 1
        return due[-1]._replace(created=due[0].created)

    def _give(self, mark: FiredMark, now: float, sequences: Sequence[int]) -> bool:
        """Give the results of a mark. Return False if the operator cannot give it again."""
        rows = self.overlay.rows(mark.through)
        mark.dirty, mark.voided_at, mark.at = False, inf, now
        batches = self.operator.mark(mark.after, mark.through, rows)
        if batches is None:
            return False
        self._revision += 1
        output_after, output_through = map(self.operator.output_watermark, (mark.after, mark.through))
        out = MarkOutput(
            mark.after, mark.through, output_after, output_through, mark.created, self._revision, batches, sequences
        )  # fmt: skip
        if self._to_sink and mark.rows:
            self._effects.append(Undone(mark.after, mark.through))
        mark.rows = out.rows
        self.rows += out.rows
        self.rows_in_failure += out.rows
        if out.rows or self._to_stages:
            self._effects.append(out)
        self._keep(mark, out if self._to_stages else None)
        return True

    def _keep(self, mark: FiredMark, output: MarkOutput | None) -> None:
        """Keep the output of a mark in place of an earlier one, and give up that of the oldest marks while the worker's shadows
        hold too much (rule T7)."""
        for old, new in ((mark.output, None), (None, output)):
            change = (0 if new is None else new.nbytes) - (0 if old is None else old.nbytes)
            self.kept_bytes += change
            self._room.bytes += change
        mark.output = output
        for oldest in self._marks if self._room.full else ():
            if oldest is not mark and oldest.output is not None and self._room.full:
                self._room.dropped += 1
                self._keep(oldest, None)

    # ---- other shadows

    def kept(self, after: int) -> list[MarkOutput]:
        """Return the newest output of the marks behind ``after``, in event time of the output (rule T6)."""
        return [mark.output for mark in self._marks if mark.output is not None and mark.output.output_through > after]

    def _ask(self, now: float) -> None:
        """Ask again for marks of streams that hold the newest one back, while nothing comes."""
        for stream, known in self._streams.items():
            if stream.edge not in self._lanes:
                continue
            if known.waited_for and known.bound < self.reached and now - known.asked_at >= ASK_SHARE * self._bound_s:
                end = self.overlay.end_of(stream, known.bound)
                if end < self.reached:
                    self._want(stream, end, known, now)

    def _want(self, stream: StreamId, after: int, known: StreamNews, now: float) -> None:
        if now - known.asked_at >= ASK_SHARE * self._bound_s:
            known.asked_at = now
            self._effects.append(WantedMarks(stream, after))

    def _taken(self) -> list[ShadowEffect]:
        taken, self._effects = self._effects, []
        return taken

    def close(self) -> None:
        """Give up overlay, kept output and operator."""
        self.overlay.clear()
        for mark in self._marks:
            self._keep(mark, None)
        self._marks.clear()
        self.operator.close()

    @property
    def nbytes(self) -> int:
        """The bytes of overlay, kept output and clone."""
        return self.overlay.bytes + self.kept_bytes + self.operator.nbytes
