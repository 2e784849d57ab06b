"""Variants of the code in which watermarks go wrong: most variants of ``tests/laws/watermark_model.py``, and others."""

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
    """Let a secondary take the watermark that it would order itself, instead of the ordered one."""

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
    """Let a partition go by a statement although the partition lacks elements in front of that statement, which its worker has
    received for other partitions."""

    def broken(said: Any, received: int, before: int | None, ended: bool) -> StreamBound:
        return bound_of(said, max(received, said.sequence), before, ended)

    patch.setattr(watermarks, "bound_of", broken)
    patch.setattr(inbounds, "bound_of", broken)


def states_before_rows_are_ordered(patch: Patch) -> None:
    """Count a statement before the rows in front of it are ordered."""
    patch.setattr(StepQueue, "first_unordered", lambda self, stream: None)


def reads_again_without_the_newest_time(patch: Patch) -> None:
    """Begin reading in the middle without the newest time of the rows before."""
    begin = SourceStreams._begin_judging

    def broken(self: SourceStreams, beginning: Beginning) -> None:
        begin(self, beginning._replace(watermark=NEVER))

    patch.setattr(SourceStreams, "_begin_judging", broken)


def states_in_front_of_its_rows(patch: Patch) -> None:
    """Send the watermark that a step brings with the rows of that same step."""
    call = Replica.call

    def broken(self: Replica, step: ReplicaStep) -> Any:
        if step.entry.kind is StepKind.WATERMARK:
            for outlet in self.outlets:
                outlet.producer.watermark = min(step.entry.watermarks)
        return call(self, step)

    patch.setattr(Replica, "call", broken)


def begins_below_what_was_ordered(patch: Patch) -> None:
    """Let a new primary begin without the watermarks that its predecessor ordered."""

    def broken(self: EventClock, known: Any, ordered: Any) -> None:
        self.offered = None
        self.ordered = [NEVER if number in self.timed else END_OF_TIME for number in range(len(known))]

    patch.setattr(EventClock, "lead", broken)


def takes_silence_for_idleness(patch: Patch) -> None:
    """Count a reader as idle that is gone, or of which no message has come."""
    bound, leave = WatermarkScheduler._bound, Inbound.leave

    def broken(self: WatermarkScheduler, replica: Replica, stream: StreamId) -> StreamBound:
        return bound(self, replica, stream) if stream in self._streams else StreamBound(idle=True)

    def left(self: Inbound) -> None:
        leave(self)
        self.said = self.said._replace(idle=True)

    patch.setattr(WatermarkScheduler, "_bound", broken)
    patch.setattr(Inbound, "leave", left)


def ended_streams_hold_the_watermark(patch: Patch) -> None:
    """Wait for an ended stream as for the others."""
    least = WatermarkScheduler._least

    def broken(self: WatermarkScheduler, replica: Replica, number: int) -> int:
        ended, replica.waits.ended = replica.waits.ended, {edge: set() for edge in replica.waits.ended}
        try:
            return least(self, replica, number)
        finally:
            replica.waits.ended = ended

    patch.setattr(WatermarkScheduler, "_least", broken)


def says_each_watermark_once(patch: Patch) -> None:
    """Never repeat a statement that was lost."""
    init = OutgoingBounds.__init__
    patch.setattr(OutgoingBounds, "__init__", lambda self, stream, pace, again_s: init(self, stream, pace, 1e9))


def hears_statements_behind_lost_messages(patch: Patch) -> None:
    """Count a statement although messages before it are missing."""
    hear = Inbound.hear

    def broken(self: Inbound, message: Any, *given: Any) -> bool:
        return hear(self, msgspec.structs.replace(message, number=self.feed.number, first=0), *given)

    patch.setattr(Inbound, "hear", broken)


def judges_rows_by_the_batch(patch: Patch) -> None:
    """Judge a row as late by the newest row of its batch, although that newest row comes behind it."""

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
    """Number rows only after late ones are left out."""
    with_numbers = source_streams.with_numbers

    def broken(rows: Any, numbers: np.ndarray) -> Any:
        return with_numbers(rows, np.arange(len(numbers)) + (numbers[0] if len(numbers) else 0))

    patch.setattr(source_streams, "with_numbers", broken)


def inputs_without_watermark_hold_nothing(patch: Patch) -> None:
    """Do not wait for a DataFrame beside a source with a watermark."""
    least = WatermarkScheduler._least

    def broken(self: WatermarkScheduler, replica: Replica, number: int) -> int:
        states = any(edge.states for edge in self._edges(replica, number))
        return least(self, replica, number) if states else END_OF_TIME

    patch.setattr(WatermarkScheduler, "_least", broken)


def needs_no_rows_of_open_windows(patch: Patch) -> None:
    """Set a replay point that leaves out rows of windows that are not final."""
    patch.setattr(Aggregate, "needs_from", lambda self: self.context.step + 1)


def states_what_is_not_committed(patch: Patch) -> None:
    """State the watermark of steps that are not committed."""
    state = ReplicaOutput.state_watermark

    def broken(self: ReplicaOutput, step: int, watermark: int, committed: int) -> None:
        state(self, step, watermark, max(committed, step + 1))

    patch.setattr(ReplicaOutput, "state_watermark", broken)


def counts_no_batch_without_rows(patch: Patch) -> None:
    """Give no number to a counted batch of which no row travels."""
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
    """Order a watermark only when no rows are pending: a worker that always has rows closes no window."""
    due = StepQueue.watermark_due
    patch.setattr(StepQueue, "watermark_due", lambda self, order: not self.by_stream and due(self, order))


def waits_for_readers_without_a_watermark(patch: Patch) -> None:
    """Let a partition that has given no row yet hold the others back."""
    note = Alignment.note

    def broken(self: Alignment, worker: int, told: Iterable[Any]) -> None:
        times = [SourceTime(*each) for each in told]
        note(self, worker, [time._replace(watermark=max(time.watermark, NEVER + 1)) for time in times])

    patch.setattr(Alignment, "note", broken)


def takes_waiting_for_idleness(patch: Patch) -> None:
    """Count a reader that is held back as idle."""
    align = SourceScheduler._align

    def broken(self: SourceScheduler) -> None:
        align(self)
        for key, streams in self.sources.items():
            if self._is_ahead(key, streams) and not streams.idle:
                streams.fall_idle()

    patch.setattr(SourceScheduler, "_align", broken)


def forgets_lost_readers(patch: Patch) -> None:
    """Forget partitions whose worker is lost: none holds others back until another worker reads it."""
    look = Alignment.look

    def broken(self: Alignment) -> None:
        look(self)
        self._known.clear()

    patch.setattr(Alignment, "look", broken)


def reads_again_without_doubted_rows(patch: Patch) -> None:
    """Begin reading in the middle without the earlier rows that were too far ahead."""
    begin = SourceStreams._begin_judging

    def broken(self: SourceStreams, beginning: Beginning) -> None:
        begin(self, beginning._replace(doubted=0, doubted_from=NEVER))

    patch.setattr(SourceStreams, "_begin_judging", broken)


def believes_each_time(patch: Patch) -> None:
    """Believe the time of each row: a single one from the future makes all rows behind it late."""
    init = Lateness.__init__

    def broken(self: Lateness, delay: int, known: Judgement = NOTHING, *ahead: Any, **more: Any) -> None:
        init(self, delay, known)

    patch.setattr(Lateness, "__init__", broken)
