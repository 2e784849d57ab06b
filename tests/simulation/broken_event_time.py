"""Variants of the code in which watermarks go wrong: most of those of ``tests/laws/watermark_model.py``, and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from controller.alignment import Alignment
from flux.exchange import inbound as inbounds
from flux.exchange import source_streams
from flux.exchange.bounds import OutgoingBounds
from flux.exchange.inbound import Inbound
from flux.exchange.replay_check import Beginning
from flux.exchange.source_streams import SourceStreams
from flux.operators.aggregate import Aggregate
from flux.replica.event_clock import EventClock
from flux.replica.output import ReplicaOutput
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep, StepQueue
from flux.windows.lateness import NOTHING, Judgement, Lateness
from flux.windows.statements import StreamBound, bound_of
from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.messages import StepKind
from flux.wire.statistics import SourceTime
from flux.worker import watermarks
from flux.worker.source_scheduler import SourceScheduler
from flux.worker.watermarks import WatermarkScheduler
from partitioning.ids import StreamId

Patch = pytest.MonkeyPatch


def takes_its_own_watermark(patch: Patch) -> None:
    """A secondary takes the watermark that it would order, instead of the ordered one."""

    def everybody(self: WatermarkScheduler, stage: int) -> Iterator[Replica]:
        return (replica for replica in self._hosted.of_stage[stage].values() if not replica.finished)

    call = Replica.call

    def broken(self: Replica, step: ReplicaStep) -> Any:
        if step.entry.kind is StepKind.WATERMARK and not self.primary and self.clock is not None and self.clock.offered:
            own = [max(pair) for pair in zip(self.context.watermarks, self.clock.offered, strict=True)]
            step = msgspec.structs.replace(step, entry=msgspec.structs.replace(step.entry, watermarks=own))
        return call(self, step)

    patch.setattr(WatermarkScheduler, "_primaries", everybody)
    patch.setattr(Replica, "call", broken)


def believes_what_others_have_heard(patch: Patch) -> None:
    """A partition goes by a statement though it lacks elements in front of it, which its worker has received for others."""

    def broken(said: Any, received: int, before: int | None, ended: bool) -> StreamBound:
        return bound_of(said, max(received, said.sequence), before, ended)

    patch.setattr(watermarks, "bound_of", broken)
    patch.setattr(inbounds, "bound_of", broken)


def states_before_rows_are_ordered(patch: Patch) -> None:
    """A statement counts before the rows in front of it are ordered."""
    patch.setattr(StepQueue, "first_unordered", lambda self, stream: None)


def reads_again_without_the_newest_time(patch: Patch) -> None:
    """A reader that begins in the middle knows no row before."""
    begin = SourceStreams._begin_judging

    def broken(self: SourceStreams, beginning: Beginning) -> None:
        begin(self, beginning._replace(watermark=NEVER))

    patch.setattr(SourceStreams, "_begin_judging", broken)


def states_in_front_of_its_rows(patch: Patch) -> None:
    """The rows of a step say the watermark that the step brings."""
    call = Replica.call

    def broken(self: Replica, step: ReplicaStep) -> Any:
        if step.entry.kind is StepKind.WATERMARK:
            for outlet in self.outlets:
                outlet.producer.watermark = min(step.entry.watermarks)
        return call(self, step)

    patch.setattr(Replica, "call", broken)


def begins_below_what_was_ordered(patch: Patch) -> None:
    """A new primary orders what it has heard of itself."""

    def broken(self: EventClock, known: Any, ordered: Any) -> None:
        self.offered = None
        self.ordered = [NEVER if number in self.timed else END_OF_TIME for number in range(len(known))]

    patch.setattr(EventClock, "lead", broken)


def takes_silence_for_idleness(patch: Patch) -> None:
    """A reader that is gone, or has not been heard of, counts as idle."""
    bound, leave = WatermarkScheduler._bound, Inbound.leave

    def broken(self: WatermarkScheduler, replica: Replica, stream: StreamId) -> StreamBound:
        return bound(self, replica, stream) if stream in self._streams else StreamBound(idle=True)

    def left(self: Inbound) -> None:
        leave(self)
        self.said = self.said._replace(idle=True)

    patch.setattr(WatermarkScheduler, "_bound", broken)
    patch.setattr(Inbound, "leave", left)


def ended_streams_hold_the_watermark(patch: Patch) -> None:
    """An ended stream is waited for like the others."""
    least = WatermarkScheduler._least

    def broken(self: WatermarkScheduler, replica: Replica, number: int) -> int:
        ended, replica.waits.ended = replica.waits.ended, {edge: set() for edge in replica.waits.ended}
        try:
            return least(self, replica, number)
        finally:
            replica.waits.ended = ended

    patch.setattr(WatermarkScheduler, "_least", broken)


def says_each_watermark_once(patch: Patch) -> None:
    """A statement that was lost is not repeated."""
    init = OutgoingBounds.__init__
    patch.setattr(OutgoingBounds, "__init__", lambda self, stream, pace, again_s: init(self, stream, pace, 1e9))


def hears_statements_behind_lost_messages(patch: Patch) -> None:
    """A statement counts though messages before it are missing."""
    hear = Inbound.hear

    def broken(self: Inbound, message: Any, *given: Any) -> bool:
        return hear(self, msgspec.structs.replace(message, number=self.feed.number, first=0), *given)

    patch.setattr(Inbound, "hear", broken)


def judges_rows_by_the_batch(patch: Patch) -> None:
    """A row is late by the newest row of its batch, though that comes behind it."""

    def broken(self: Lateness, times: np.ndarray, sure: Any = None) -> np.ndarray | None:
        if not len(times):
            return None
        newest = max(self.newest, int(times.max()))
        late: np.ndarray = times < newest - self.delay
        count = int(np.count_nonzero(late))
        self.known = Judgement(newest, self.late + count)
        return late if count else None

    patch.setattr(Lateness, "judge", broken)


def numbers_what_is_left(patch: Patch) -> None:
    """Rows are numbered when late ones have been left out."""
    with_numbers = source_streams.with_numbers

    def broken(rows: Any, numbers: np.ndarray) -> Any:
        return with_numbers(rows, np.arange(len(numbers)) + (numbers[0] if len(numbers) else 0))

    patch.setattr(source_streams, "with_numbers", broken)


def inputs_without_watermark_hold_nothing(patch: Patch) -> None:
    """A DataFrame beside a source with a watermark is not waited for."""
    least = WatermarkScheduler._least

    def broken(self: WatermarkScheduler, replica: Replica, number: int) -> int:
        states = any(edge.states for edge in self._edges(replica, number))
        return least(self, replica, number) if states else END_OF_TIME

    patch.setattr(WatermarkScheduler, "_least", broken)


def needs_no_rows_of_open_windows(patch: Patch) -> None:
    """A replay point leaves out rows of windows that are not final."""
    patch.setattr(Aggregate, "needs_from", lambda self: self.context.step + 1)


def states_what_is_not_committed(patch: Patch) -> None:
    """A statement says what steps give that are not committed."""
    state = ReplicaOutput.state_watermark

    def broken(self: ReplicaOutput, step: int, watermark: int, committed: int) -> None:
        state(self, step, watermark, max(committed, step + 1))

    patch.setattr(ReplicaOutput, "state_watermark", broken)


def counts_no_batch_without_rows(patch: Patch) -> None:
    """A counted batch of which nothing travels has no number."""
    append = SourceStreams.append

    def broken(self: SourceStreams, batch: Any, created: float, *more: Any) -> None:
        judged = None if self._positions or self.timed is None else self.timed.judged(batch, [len(batch)], self._place)
        if judged is None or any(len(rows) for rows, _ in judged.of_edges()):
            append(self, batch, created, *more)
        else:
            self._accept(judged.behind[0])

    def each(self: SourceStreams, batches: Any) -> int:
        for batch, created in batches:
            broken(self, batch, created)
        return len(batches)

    patch.setattr(SourceStreams, "append", broken)
    patch.setattr(SourceStreams, "append_each", each)


def rows_go_before_watermarks(patch: Patch) -> None:
    """A watermark is ordered when no rows are pending: a worker that is never through closes no window."""
    due = StepQueue.watermark_due
    patch.setattr(StepQueue, "watermark_due", lambda self, order: not self.by_stream and due(self, order))


def waits_for_readers_without_a_watermark(patch: Patch) -> None:
    """A partition that has given no row yet holds the others back."""
    note = Alignment.note

    def broken(self: Alignment, worker: int, told: Iterable[Any]) -> None:
        times = [SourceTime(*each) for each in told]
        note(self, worker, [time._replace(watermark=max(time.watermark, NEVER + 1)) for time in times])

    patch.setattr(Alignment, "note", broken)


def takes_waiting_for_idleness(patch: Patch) -> None:
    """A reader that is held back counts as idle."""
    align = SourceScheduler._align

    def broken(self: SourceScheduler) -> None:
        align(self)
        for key, streams in self.sources.items():
            if self._is_ahead(key, streams) and not streams.idle:
                streams.fall_idle()

    patch.setattr(SourceScheduler, "_align", broken)


def forgets_lost_readers(patch: Patch) -> None:
    """A partition whose worker is lost holds nobody back until another one reads it."""
    look = Alignment.look

    def broken(self: Alignment) -> None:
        look(self)
        self._known.clear()

    patch.setattr(Alignment, "look", broken)


def reads_again_without_doubted_rows(patch: Patch) -> None:
    """A reader that begins in the middle knows nothing of the rows before that were too far ahead."""
    begin = SourceStreams._begin_judging

    def broken(self: SourceStreams, beginning: Beginning) -> None:
        begin(self, beginning._replace(doubted=0, doubted_from=NEVER))

    patch.setattr(SourceStreams, "_begin_judging", broken)


def believes_each_time(patch: Patch) -> None:
    """A single row from the future makes all rows behind it late."""
    init = Lateness.__init__

    def broken(self: Lateness, delay: int, known: Judgement = NOTHING, *ahead: Any, **more: Any) -> None:
        init(self, delay, known)

    patch.setattr(Lateness, "__init__", broken)
