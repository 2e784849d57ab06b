"""One replica of a partition of a stage: its pending slices, its next step, and its end (design: order-log, release-rule).

The primary takes slices in the order of their arrival, joins small ones into one step, writes the step into the order log and
applies it at once; a secondary applies committed steps in the order of that log. Release rule: the output of a step is not
sent before the step is committed. With one replica every step is committed at once.

A step is a value: ``next_step`` gives it, and ``apply`` takes it. Left to others: the choice of steps (``step_queue``), output
(``output``), calls of user code (``user_code_guard``), and the exchange of orders with other replicas (``order_exchange``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from flux.dataflow.plan import StagePlan
from flux.errors import DataLost
from flux.exchange.inbound import Slice
from flux.operators.batches import given_batches
from flux.operators.operator import Batches, Context, Operator, move_watermarks, note_of_output
from flux.operators.user_code import closed
from flux.replica.deltas import DeltaTracker
from flux.replica.event_clock import EventClock, Forfeits
from flux.replica.kinds import ReplicaKind, active, compared
from flux.replica.order_log import NO_CLAIM, OrderClaim, OrderLog, OwnOrder
from flux.replica.output import EdgeOutput, ReplicaOutput
from flux.replica.output_checksums import other_output
from flux.replica.step_queue import ReplicaStep, StepQueue
from flux.replica.user_code_guard import UserCodeGuard
from flux.settings import Settings
from flux.wire.messages import OrderEntry, StepKind
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import FIRST_EPOCH, ReplicaAt

log = logging.getLogger("flux")

#: More rows than the steps of a partition lack.
EXTRA = 1 << 32
#: Kinds of steps under module names, because they are looked up often.
_TICK, _FINISH, _WATERMARK = StepKind.TICK, StepKind.FINISH, StepKind.WATERMARK
_FORFEIT, _CHANGE = StepKind.FORFEIT, StepKind.CHANGE


class Replica:
    """A replica: the caller ``add``s slices, and while the replica is ``ready``, asks for the ``next_step`` and ``apply``s it."""

    def __init__(
        self,
        stage: StagePlan,
        partition: int,
        incarnation: int,
        outlets: list[EdgeOutput],
        limits: Settings,
        kind: ReplicaKind = active,
    ) -> None:
        self.stage = stage
        self.partition = partition
        self.key = PartitionKey(stage.id, partition)
        self.where = f"stage {stage.name}, partition {partition}"
        self.incarnation = incarnation
        self.outlets = outlets
        self.context = Context(
            stage.name, partition, stage.partitions, stage.key, stage.schemas, stage.output_mode
        )  # fmt: skip
        self.context._flux_at_marks = stage.at_marks
        self.output = ReplicaOutput(
            stage, outlets, kind.release(outlets), limits, self.where, self.context, compared(stage)
        )  # fmt: skip
        self.finished = False
        self.rows_in = 0
        self.busy_s = 0.0
        self.slices = 0
        #: Size of the last copy of its state.
        self.copy_bytes = 0
        #: The claim of a lost primary about the output of the steps that this replica repeats.
        self._claim = NO_CLAIM
        #: Steps below this may have been shown by earlier primaries; -1: not known.
        self._repeats_to = -1
        #: It is a copy of a replica that came from a checkpoint location and had not yet compared its sink with that location.
        self._unsure = False
        #: As primary: the checkpoints of its standbys, and their changes.
        self.deltas = DeltaTracker()
        #: As primary: it orders nothing yet, because more slices are expected soon.
        self.gathers = False
        #: Copies of its state that are being taken now. It takes no step until they are done.
        self.frozen = 0
        #: It orders steps: the others follow it, or it orders its own beside others that do so, too (design: independent).
        self.primary = True
        #: It orders its own steps, whichever replica stands first.
        self.orders_itself = kind.orders_itself
        #: It is the first replica in the row of the table. Others may order their own steps beside it.
        self.stands_first = not kind.orders_itself
        #: The epoch in which it became primary; -1: it has led in no epoch yet.
        self.leads_since = -1
        #: The epoch since which it reads streams.
        self.reads_since = incarnation
        #: The epoch in which its stage began empty.
        self.birth = FIRST_EPOCH
        #: The version of the plan whose edges it feeds: that of the newest change that it has applied (design: edge-begins).
        self.version = stage.since
        #: Makes the outlets that begin with a version. Set by its owner.
        self.new_outlets: Callable[[Replica, int], list[EdgeOutput]] = lambda replica, version: []
        #: The controller knows that it is complete.
        self.said_complete = False
        self.order = OwnOrder() if kind.orders_itself else OrderLog()
        #: Number of applied steps.
        self.applied = 0
        self.limits = limits
        #: It applies steps while another replica is primary.
        self._applies = kind.applies
        #: Steps that went on without rows that are gone, and the number of these rows; negative: with rows that the primary
        #: that ordered the step had not got (design: rows-that-are-gone).
        self.gone: list[tuple[int, int]] = []
        #: Rows that its operator had left out before it began empty (``left_out``).
        self.left_out_before = (0, 0)
        #: By stream from a source: rows that this primary has passed over.
        self.lost: dict[StreamId, int] = {}
        #: Rows of a source may be gone when they are read again, so the two fields that follow are kept up to date.
        self.may_lose = False
        #: Each step with rows has given one batch of output until now.
        self.steady = True
        #: The tick under way has no timer, because a step that would have set it went on without its rows.
        self._vain = False
        #: Number of steps that were applied when it came to life.
        self._alive_since = 0
        #: The watermarks; None: the stage has no event time.
        self.clock = EventClock(len(stage.edges_in), stage.timed_inputs) if stage.timed_inputs else None
        if self.clock is not None:
            self.context.watermarks = list(self.clock.ordered)
        #: The event time of which it has given results without some streams.
        self.forfeits = Forfeits()
        self.waits = StepQueue(self.key, stage.edges_in, self.context.timers, limits, self.where, self.clock)
        self.add: Callable[[Slice], None] = self.waits.add
        self._waiting = self.waits.by_stream
        #: The step that has begun and is not applied yet, because its output waits for room; None: there is none.
        self.under_way: ReplicaStep | None = None
        #: A step has failed for good. The replica does nothing more, its step stays under way, and so no copy is made of it.
        self.failed = False
        self.guard = UserCodeGuard(self.where, stage, self.context)
        self.operator: Operator = self.guard.operator
        _, self.gives_changes, self.goes_together, self.timed = self.guard.facts

    @property
    def complete(self) -> bool:
        """True if its end is reached for good: any other replica would reach the same end."""
        return self.finished and self.order.committed >= self.applied

    @property
    def leads(self) -> bool:
        """True if it is the primary of its partition by the table."""
        return self.primary and self.stands_first

    @property
    def progress(self) -> int:
        """The number that replicas of the partition have in common: of steps, or of batches of output if each orders its own
        steps."""
        return self.output.batches if self.orders_itself else self.applied

    @property
    def between_steps(self) -> bool:
        """Whether a copy of its state may be taken. The position of the next output is part of that state."""
        return self.under_way is None and (self.output.exit is None or not self.output.exit.unplaced)

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        applied, order = self.applied, self.order
        assert applied <= order.end, f"{applied} steps applied of {order.end}"
        if self.leads:
            assert order.term < max(self.leads_since, 0), f"leads since {self.leads_since}, and has heard {order.term}"
        elif not self.primary:
            # A copy of the state may contain steps that are not committed.
            may = max(order.committed if self._applies else 0, self._alive_since)
            assert applied <= may, f"a secondary has applied {applied} steps, and may {may}"
            assert self.waits.arrivals is None, "a secondary gives slices their turn"
        begun = applied + (self.under_way is not None)
        self.output.validate(begun, self.progress, order.committed, self.finished)
        assert not (self.finished and self._waiting), "rows wait behind the end"
        self.waits.validate()
        self.deltas.validate()

    # ---- input

    def waiting(self) -> dict[StreamId, list[Slice]]:
        """Return received slices that are not applied, for a caller that discards the replica. The slices of a step that waits
        for room in the logs are among them, because a primary may be dropped in the middle of such a step."""
        slices = {stream: list(slices) for stream, slices in self._waiting.items()}
        for slice_ in () if self.under_way is None else self.under_way.slices:
            slices.setdefault(slice_.stream, []).append(slice_)
        return slices

    # ---- copies

    def state(self) -> dict[str, Any]:
        """Return everything but the operator's own state and the output logs, between two steps (``adopt`` reads it). Checkpoint
        locations keep it, and later releases read it: never rename a key, and read a new key with a default."""
        assert self.between_steps
        return {
            "applied": self.applied,
            "entries": msgspec.msgpack.encode(self.order.since(self.applied)),
            "committed": self.order.committed,
            "ended": {edge: sorted(ended) for edge, ended in self.waits.ended.items()},
            "finished": self.finished,
            "now": self.context.now,
            "timers": dict(self.context.timers.pending),
            **({"event timers": dict(pending)} if (pending := self.context.event_timers.pending) else {}),
            **({} if self.clock is None else {"watermarks": list(self.context.watermarks)}),
            "rows": (self.rows_in, self.output.rows),
            "unsure": self._unsure or self.output.uncompared,
            **self.output.state(),
            **({} if self.steady else {"steady": False}),
            **({"gone": list(self.gone)} if self.gone else {}),
            **({"left out before": list(self.left_out_before)} if any(self.left_out_before) else {}),
            **self.forfeits.state(),
            **self._edges(),
        }

    def _edges(self) -> dict[str, Any]:
        """Return the edges that it feeds, in the order of the output logs, for a copy; nothing: those of its beginning."""
        edges = [outlet.edge.id for outlet in self.outlets]
        as_born = self.version == self.stage.since and edges == list(self.stage.edges_at_birth)
        return {} if as_born else {"edges": edges, "version": self.version}

    def begin_behind_lost(self) -> None:
        """Begin empty in place of replicas that are lost with their state (design: converge)."""
        if self.output.exit is not None:
            self.output.exit.unplaced = True

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over the ``state`` of another replica, once the operator has been restored."""
        self.applied, self.finished = state["applied"], state["finished"]
        self._alive_since = self.applied
        entries = msgspec.msgpack.decode(state["entries"], type=list[OrderEntry])
        self.order = type(self.order).copied_from(self.applied, entries, state["committed"])
        self.output.adopt(state)
        self.waits.ended = {edge: set(ended) for edge, ended in state["ended"].items()}
        self.context.now, self.context.step = state["now"], max(self.applied - 1, 0)
        self.context.timers.replace(state["timers"])  # the fresh operator has set timers of its own
        self.context.event_timers.replace(state.get("event timers", {}))
        if self.clock is not None and "watermarks" in state:
            self.context.watermarks = list(state["watermarks"])
        self.rows_in, self.output.rows = state["rows"]
        self._unsure, self.version = state.get("unsure", False), state.get("version", self.version)
        self.steady, self.gone = state.get("steady", True), [(step, rows) for step, rows in state.get("gone", ())]
        behind, without_time = state.get("left out before", (0, 0))
        self.left_out_before = (behind, without_time)
        if self.orders_itself:
            self.waits.latest = self.context.now
            if self.clock is not None:
                self.clock.lead(self.context.watermarks, ())
        self.forfeits.adopt(state.get("forfeits"))
        self.follow()
        self.release()

    def succeed(
        self, order: OrderLog, left: int, claim: OrderClaim = NO_CLAIM, whole: bool = False, steady: bool = True
    ) -> None:
        """Go on with a standby's order, from the state of the standby's checkpoint, which has been restored.

        ``left``: the outside has the positions of the output below this; ``claim``: the checksum of the output that the
        repeated steps gave before; ``steady``: by the word of the lost primary, each of its steps gave one batch; ``whole``: no
        earlier primary has shown anything of steps that are not in this order. That is also true of a standby, but only a
        checkpoint of a primary that had not compared its sink yet makes it necessary to compare."""
        self.follow()
        self.steady = self.steady and steady
        self.order, self._claim = order, claim if claim.steps >= self.output.silent else NO_CLAIM
        if self.output.exit is not None:
            self.output.exit.forget(left)
        self._repeats_to = -1
        if whole or self._unsure:
            self._repeat_all()

    def _repeat_all(self) -> None:
        """Repeat the steps of the order, and then compare the sink with the checkpoint location."""
        self._repeats_to, self._unsure = self.order.end, False
        if self.output.exit is not None:
            self.output.exit.restores()
        self._note_repeated()

    def _note_repeated(self) -> None:
        if self.applied == self._repeats_to and self.output.exit is not None:
            self.output.exit.restored(note_of_output(self.operator))

    def left_out(self) -> tuple[int, int]:
        """Return the rows of all steps that the operator has left out: those below the watermark of their step, and those without
        a time."""
        (behind, without_time), own = self.left_out_before, self.guard.left_out()
        return behind + own[0], without_time + own[1]

    @property
    def state_bytes(self) -> int:
        """An estimate of the size of the state, without a snapshot."""
        return self.guard.state_bytes() or self.copy_bytes

    # ---- roles

    def lead(self, epoch: int, others: Iterable[ReplicaAt]) -> None:
        """Become or stay primary, with these other replicas."""
        if self.orders_itself:
            self._stand_first(epoch, others)
            return
        if not self.primary:
            self.primary = True
            self.output.lead()
            self.leads_since = epoch
            if self._unsure:  # all steps that were shown are in its order, because they were committed
                self._repeat_all()
            ordered = self.order.since(self.applied)
            self.waits.lead(ordered, self.context.now, self.version)
            if self.clock is not None:
                self.clock.lead(self.context.watermarks, ordered)
        elif self.leads_since < 0:
            self.leads_since = epoch
        self.order.lead(others, self.applied)
        if self.output.compared and not self.order.peers and self.applied >= self._claim.steps:
            self.output.compare_no_more()
        self.release()

    def _stand_first(self, epoch: int, others: Iterable[ReplicaAt]) -> None:
        """Become or stay the first of the replicas that order their own steps: it speaks for the partition, and has copies taken
        of its state."""
        if not self.stands_first:
            self.stands_first, self.leads_since = True, epoch
            self.output.lead()
        self.order.lead(others, self.applied)
        self.release()

    def follow(self) -> None:
        """Become secondary: another replica decides the order. A replica that orders its own steps goes on, and only stands
        first no more."""
        if self.orders_itself:
            self.stands_first = False
            self.output.follow()
            self.order.follow()
            return
        self.primary = False
        self.output.follow()
        self.waits.forget_turns()
        self.order.follow()

    def release(self) -> None:
        """Release the output of the steps that are committed by now."""
        self.output.release(self.order.committed)
        self.order.trim(self.applied)

    # ---- steps

    def ready(self, now: float) -> bool:
        """Tell whether there is something to do, and room for its output."""
        output = self.output
        if self.failed:
            return False
        if self.finished:
            return self._may_change()
        if self.frozen or output.room.full:
            return False
        if self.under_way is not None:
            return True
        if self.applied < self.order.end:
            may_apply = self.primary or (self._applies and self.applied < self.order.committed)
            return may_apply and self.waits.has(self.order[self.applied])
        if not self.primary or self.gathers or self.held_back or (output.exit is not None and output.exit.waits):
            return False
        waits = self.waits
        return (
            bool(self._waiting) or waits.all_ended or waits.change_due or waits.tick_due(self.order, now)
            or waits.watermark_due(self.order)
        )  # fmt: skip

    def _may_change(self) -> bool:
        """Tell whether a replica that has come to its end has a change of the plan to apply: new edges end where they begin."""
        if self.frozen:
            return False
        if self.applied < self.order.end:
            may_apply = self.primary or (self._applies and self.applied < self.order.committed)
            return may_apply and self.waits.has(self.order[self.applied])
        return self.primary and self.waits.change_due

    @property
    def held_back(self) -> bool:
        """True if the order log has reached its bound, or the length of a standby's log is not known. Nothing more is ordered
        until the other replicas have caught up; steps that are ordered go on (design: order-bound)."""
        order = self.order
        return order.unanswered or order.end - order.oldest >= self.limits.order_max_steps

    @property
    def step_s(self) -> float:
        """Average seconds that a step has taken here."""
        return self.busy_s / max(self.applied - self._alive_since, 1)

    @property
    def timer_at(self) -> float:
        """The time at which this replica has to order a tick; infinite if it has none to order."""
        return self.context.timers.next if self.primary and not self.finished else math.inf

    @property
    def watermark_offered(self) -> bool:
        """True if this replica has a watermark to order."""
        return self.clock is not None and self.clock.offered is not None

    def missing(self) -> list[StreamId]:
        """List the streams that lack rows of the next ordered step."""
        limit = self.order.end if self.primary else self.order.committed if self._applies else 0
        return self.waits.lacks(self.order[self.applied]) if self.between_steps and self.applied < limit else []

    def note_passed(self, stream: StreamId, below: int) -> bool:
        """Note that no row of a stream below this number comes any more, and tell whether the next ordered step, which wants such
        rows, goes on without them. DataLost: it may not (design: rows-that-are-gone)."""
        return stream in self.missing() and self.waits.note_passed(self.order[self.applied], stream, below)

    def gone_before(self, step: int) -> int:
        """Count the rows that are gone of the steps before this one. A row too many counts ``EXTRA`` times, so that it makes up
        for none that is gone."""
        return sum([rows if rows > 0 else -rows * EXTRA for at, rows in self.gone if at < step])

    def next_step(self, now: float) -> ReplicaStep:
        """Return the step to apply now, of a replica that is ``ready``: the next one, or the one whose output waited for room."""
        if self.under_way is None:
            self.under_way = self._begin(now)
        return self.under_way

    def _begin(self, now: float) -> ReplicaStep:
        try:
            step = self.waits.next(self.order, self.applied, now, self.busy_s)
        except AssertionError as error:
            error.add_note(self._standing())
            raise
        if step.number >= self.order.committed:
            self.output.hold_back(step.number)
        entry, context = step.entry, self.context
        context.now, context.created, context.step = entry.now, entry.created, step.number
        context._flux_method = step.method
        self._vain, self.output.given = False, 0
        if step.gone:
            self._pass_over(step)
        if step.rows is not None:
            context.input = step.slices[0].input
        return step

    def _standing(self) -> str:
        """Describe the place of this replica in its order, for an error that shows that the order and its rows do not fit."""
        order = self.order
        entry = order[self.applied] if self.applied < order.end else None
        return (
            f"{'primary' if self.primary else 'secondary'} of epoch {self.incarnation}, leads since {self.leads_since}, version "
            f"{self.version}; step {self.applied} of {order.base} to {order.end}, {order.committed} committed, {order.verified} "
            f"verified in term {order.term}, alive since step {self._alive_since}: {entry}"
        )

    def apply(self, step: ReplicaStep) -> bool:
        """Apply a step, or go on with its output, for which there was no room. Return False if there is none for the rest."""
        output = self.call(step) if self.output.parts is None else None
        return self.conclude(step, output)

    def call(self, step: ReplicaStep) -> Batches:
        """Call the operator for a step. Return its output, which ``conclude`` emits."""
        kind = step.entry.kind
        if step.rows is not None:
            return self.guard.process(step)
        if kind is _TICK:
            return self._fired()
        if kind is _WATERMARK or kind is _FORFEIT:
            if kind is _FORFEIT:
                self.forfeits.close(self.context.watermark, min(step.entry.watermarks), self.left_out()[0])
            return move_watermarks(self.operator, self.context, step.entry.watermarks)
        if kind is _FINISH:
            self.context.timers.replace({})
            return self.guard.finish()
        if kind is _CHANGE:
            self._begin_edges(step)
        for slice_ in step.slices:  # an element without rows; there is none if all rows of the step are gone
            self.waits.hear(slice_)
        return None

    def _begin_edges(self, step: ReplicaStep) -> None:
        """Feed the edges that begin with a version of the plan, behind this step."""
        version = step.entry.version
        for outlet in self.new_outlets(self, version):
            self.output.open(outlet, step.number, self.order.committed)
            if self.finished:
                outlet.producer.finish(step.entry.created)
        self.version = max(self.version, version)

    def _fired(self) -> Iterator[Any]:
        """Yield the output of the timers that are due when a step begins. Sets ``_vain``: the step had nothing to do."""
        timers, now = self.context.timers, self.context.now
        self._vain = bool(self.gone)
        for name in timers.due(now):
            if timers.take(name, now):
                self._vain = False
                yield from given_batches(self.operator.on_timer(name))

    def conclude(self, step: ReplicaStep, output: Batches) -> bool:
        """Emit output of a step, and once all of it is emitted, count the step as applied. Return False if more is to come."""
        if not self.guard.call("", step, self.output.emit, step, output):
            return False
        if step.gone or self._vain:
            self.output.fill(step)
        self._count(step)
        self.under_way = None  # behind ``_count``, whose proof of the state may fail: then no copy is made of it
        return True

    def _pass_over(self, step: ReplicaStep) -> None:
        """Go on without rows of the step that are gone. DataLost: the numbers of the output behind the step are not known then.

        Consumers and sinks know output by its numbers. They may have output of this step and of the steps behind it, which are
        repeated, and have to have the same numbers again (design: rows-that-are-gone)."""
        entry, gone = step.entry, step.gone
        numbered = note_of_output(self.operator) is not None
        if numbered or not (self.steady or (not self.outlets and self.output.exit is None)):
            why = (
                "its sink knows rows by their numbers, which count those that are gone"
                if numbered
                else "its steps give no batch of output or several, so the numbers of later output are not known without the rows"
            )
            raise DataLost(
                f"{self.where}: {abs(gone)} rows of a step that has to be repeated are gone{' elsewhere' * (gone < 0)}, and the "
                f"stage cannot go on without them: {why}. Start with another checkpointLocation to read what the log has. Keep "
                "records for longer than a query may be down after a kill; query.stop() leaves nothing to repeat"
            )
        self.gone.append((step.number, gone))
        of_logs = [StreamId(*of) for *of, _ in entry.slices if of[0] in self.waits.from_logs]
        if self.primary and of_logs and gone > 0:
            self.lost[of_logs[0]] = self.lost.get(of_logs[0], 0) + gone
            log.warning(
                "%s: %d of %d rows of a step that has to be repeated are gone from the log of partition %d of its input; it goes "
                "on without them", self.where, gone, entry.rows, of_logs[0].producer,
            )  # fmt: skip
        self.order.ask_again()

    def _count(self, step: ReplicaStep) -> None:
        """Count a step as applied."""
        output, kind = self.output, step.entry.kind
        if step.slices:
            self.guard.prove(first=not self.rows_in)
            self.rows_in += 0 if step.rows is None else step.rows.num_rows
            if self.forfeits.spans and self.forfeits.counts(self.context.watermark):
                self.forfeits.count(self.left_out()[0])
        elif kind is _FINISH:
            output.finish(step.entry.created)
            self.finished = True
        elif kind is _WATERMARK or kind is _FORFEIT:
            self._state_watermark(step.number)
        vain = kind is _FINISH or kind is _CHANGE or (kind.moves_watermarks and not output.given)
        if self.may_lose and output.given != 1 and not step.gone and not vain:
            words = bool(step.slices) and step.rows is None
            self.steady = self.steady and (words or step.number < output.silent)
        self.applied += 1
        self.slices += len(step.slices)
        if output.compared and not self.orders_itself:
            output.note(self.applied, self.order.peers.values())
        if self.applied == self._claim.steps:
            self._check_repetition()
        if self.applied == self._repeats_to:
            self._note_repeated()
        self.order.trim(self.applied)

    def _state_watermark(self, step: int) -> None:
        """State the watermark behind the output of a step, once the step is committed."""
        watermark = min(self.guard.output_watermark(), self.context.watermark)
        self.output.state_watermark(step, watermark, self.order.committed)

    def _check_repetition(self) -> None:
        """Compare repeated output with the lost primary's output, which may be outside and cannot be taken back."""
        if self.output.compared and self.output.checksum != self._claim.checksum and not self.gone:
            raise other_output(self.where, self.applied)

    def decide_ahead(self, now: float) -> None:
        """Order all pending slices for which the order log has room, so that the other replicas need not wait for this replica's
        turn to apply them.

        An operator with timers is an exception: a step that is applied before these slices may set a timer that has to go
        before them. A stage with a sink is another: the other replicas would apply the steps, and keep their output, however
        long this replica waits for the sink."""
        if self.timed or self.gathers or self.stage.sink is not None or self.orders_itself:
            return
        while self.waits.arrivals and not self.held_back:  # None: it has to catch up with the earlier primary first
            self.waits.decide(self.order, now, self.busy_s)

    def close(self) -> None:
        """Close the operator. Its exception is logged as a warning once, by the primary: the other replicas raise the same."""
        if self.primary:
            closed(self.where, self.operator.close)
        else:
            closed(f"{self.where}, not the primary", self.operator.close, logging.DEBUG)
