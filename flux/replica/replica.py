"""One replica of a partition of a stage: its pending slices, its next step, and its end (design: order-log, release-rule).

The primary takes slices in the order of their arrival, joins small ones into one step, writes the step into the order log and
applies it at once; a secondary applies committed steps in the order of that log. Release rule: the output of a step is not
sent before the step is committed. With one replica every step is committed at once.

Timers fire in steps of their own, ticks, which the primary orders like any other step. The other replicas fire their timers at
the same step, because they have set the same timers. A due timer goes before pending slices, so that an operator sees no rows
of a later time first. But no two ticks follow each other while rows are pending, so that a timer that is always due cannot keep
the rows out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa

from flux.dataflow.plan import StagePlan
from flux.errors import DataLost
from flux.exchange.checksum import extend
from flux.exchange.inbound import Slice, WordSlice
from flux.exchange.log import LogRoom
from flux.operators.aggregate import keeps_attributes
from flux.operators.attributes import attribute_count, open_operator
from flux.operators.operator import Batches, Context, Operator, chain_of, gives_changes, note_of_output
from flux.operators.user_code import closed
from flux.replica.deltas import DeltaTracker
from flux.replica.kinds import ReplicaKind, active, compared
from flux.replica.order_log import NO_CLAIM, OrderClaim, OrderLog
from flux.replica.output import EdgeOutput, SinkBuffer, cut_output, fits
from flux.replica.output_checksums import OutputChecksums, other_output
from flux.replica.snapshot import check_snapshot
from flux.replica.step_queue import StepQueue, entry_of, rows_of
from flux.replica.user_code_guard import UserCodeGuard, joined
from flux.settings import Settings
from flux.wire.messages import OrderEntry, StepKind
from partitioning.clustering import Clustered
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import ReplicaAt

log = logging.getLogger("flux")

#: Limit of uncommitted steps above which no tick is ordered. Credit bounds the number of rows, but nothing else bounds ticks.
UNCOMMITTED_MAX = 1024
#: The clustered form of one output batch for each outlet.
ByOutlet = Sequence[Clustered | None]
#: Kinds of steps under module names, because they are looked up often.
_TICK, _FINISH = StepKind.TICK, StepKind.FINISH


class Replica:
    """A replica: the caller ``add``s slices and calls ``step`` while the replica is ``ready``."""

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
        #: The logs of all outlets tell it when they fill and drain.
        self.room = LogRoom()
        for outlet in outlets:
            outlet.producer.log.tell(self.room)
        #: The kept output for the outside, if the stage has a sink.
        self.exit: SinkBuffer | None = None
        self.finished = False
        self.rows_in = self.rows_out = 0
        self.busy_s = 0.0
        self.slices = 0
        #: Size of the last copy of its state.
        self.copy_bytes = 0
        #: Output of the steps below this is thrown away, because every consumer has it (design: replay-point).
        self._silent = 0
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
        self.context = Context(
            stage.name, partition, stage.partitions, stage.key, stage.schemas, stage.output_mode
        )  # fmt: skip
        self.primary = True
        #: The epoch in which it became primary; -1: it has led in no epoch yet.
        self.leads_since = -1
        #: The epoch since which it reads streams.
        self.reads_since = incarnation
        #: The controller knows that it is complete.
        self.said_complete = False
        self.order = OrderLog()
        #: Number of applied steps.
        self.applied = 0
        #: Running checksum of the output, with that of the step under way.
        self.checksum = 0
        self._checksums = OutputChecksums()
        self.limits = limits
        #: It applies steps while another replica is primary.
        self._applies = kind.applies
        #: Its output is compared with that of other replicas.
        self.compared = compared(stage)
        #: Steps that went on without rows that are gone, and the number of these rows (design: rows-that-are-gone).
        self.gone: list[tuple[int, int]] = []
        #: By stream from a source: rows that this primary has passed over.
        self.lost: dict[StreamId, int] = {}
        #: Rows of a source may be gone when they are read again, so the two fields that follow are kept up to date.
        self.may_lose = False
        #: Each step with rows has given one batch of output until now.
        self.steady = True
        #: Batches of output of the step under way.
        self._given = 0
        #: The tick under way has no timer, because a step that would have set it went on without its rows.
        self._vain = False
        #: Number of steps that were applied when it came to life.
        self._alive_since = 0
        self.waits = StepQueue(stage.edges_in, partition, self.where)
        self.add: Callable[[Slice], None] = self.waits.add
        self._waiting = self.waits.by_stream
        self._held = kind.release(outlets)
        #: As primary: time of the newest step. A new primary's clock may be behind it.
        self._latest = 0.0
        #: As primary: the newest step is a tick.
        self._ticked = False
        #: Kind of the step under way, or of the last applied one.
        self.kind = StepKind.SLICES
        #: Method of the operator that this step calls.
        self.method = "process"
        #: Slices of this step.
        self.applying: list[Slice] = []
        #: Output of the step under way; None: no step is under way.
        self._output: Iterator[pa.RecordBatch] | None = None
        #: A batch of output for which the logs had no room.
        self._unsent: pa.RecordBatch | None = None
        self.blame = UserCodeGuard(self.where, stage, self.context)
        self.operator: Operator = self.blame.guard("open", None, self._open)
        self.gives_changes = gives_changes(self.operator)
        # A state that cannot travel cannot be repaired or moved: raise the error before there is any state.
        self.check_state()
        # Most attributes that cannot travel exist after the first rows at the latest.
        first = chain_of(self.operator)[0]
        self._proven = attribute_count(first) if keeps_attributes(first) else None
        self.goes_together = first.processes_many
        self.timed = getattr(self.operator.on_timer, "__func__", None) is not Operator.on_timer

    @property
    def complete(self) -> bool:
        """True if its end is reached for good: any other replica would reach the same end."""
        return self.finished and self.order.committed >= self.applied

    @property
    def between_steps(self) -> bool:
        return self._output is None

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        applied, order = self.applied, self.order
        assert applied <= order.end, f"{applied} steps applied of {order.end}"
        if self.primary:
            assert order.term < max(self.leads_since, 0), f"leads since {self.leads_since}, and has heard {order.term}"
        else:
            # A copy of the state may contain steps that are not committed.
            may = max(order.committed if self._applies else 0, self._alive_since)
            assert applied <= may, f"a secondary has applied {applied} steps, and may {may}"
            assert self.waits.arrivals is None, "a secondary gives slices their turn"
        self._held.validate(applied + (self._output is not None), order.committed)
        for outlet in self.outlets:
            producer = outlet.producer
            assert producer.finished == self.finished, f"stream {producer.stream} and its partition end apart"
        full = sum([not outlet.producer.has_room for outlet in self.outlets])
        assert self.room.full == full, f"{full} logs take nothing, and {self.room.full} have said so"
        if self.compared:
            self._checksums.validate(applied)
        if self.exit is not None:
            assert not self.stage.edges_out, "output of a stage in the middle leaves the dataflow"
            self.exit.validate()
        assert not (self.finished and self._waiting), "rows wait behind the end"
        self.waits.validate()
        self.deltas.validate()

    def check_state(self) -> None:
        """Check that the state can travel. SnapshotError says why it cannot."""
        check_snapshot(self.snapshot(), self.where, self.operator.snapshot_classes)

    def _open(self) -> Operator:
        operator = self.stage.make()
        open_operator(operator, self.context)
        return operator

    # ---- input

    def waiting(self) -> dict[StreamId, list[Slice]]:
        """Return received slices that are not applied, for a caller that discards the replica. The slices of a step that waits
        for room in the logs are among them, because a primary may be dropped in the middle of such a step."""
        slices = {stream: list(slices) for stream, slices in self._waiting.items()}
        for slice_ in [] if self.between_steps else self.applying:
            slices.setdefault(slice_.stream, []).append(slice_)
        return slices

    def expect(self, edge: int, producers: Collection[int]) -> None:
        """Note all streams of an edge. The collection is kept as it is and shared, because all replicas here get the same one."""
        self.waits.expected[edge] = producers

    # ---- copies

    def state(self) -> dict[str, Any]:
        """Return everything but the operator's own state and the output logs, between two steps."""
        assert self.between_steps
        return {
            "applied": self.applied,
            "checksum": self.checksum,
            "compared": self.compared,
            "entries": msgspec.msgpack.encode(self.order.since(self.applied)),
            "committed": self.order.committed,
            "silent": self._silent,
            "marks": self._held.marks(),
            "ended": {edge: sorted(ended) for edge, ended in self.waits.ended.items()},
            "finished": self.finished,
            "now": self.context.now,
            "timers": dict(self.context.timers.pending),
            "rows": (self.rows_in, self.rows_out),
            "exit": None if self.exit is None else self.exit.state(),
            "unsure": self._unsure or self.compares,
            **({} if self.steady else {"steady": False}),
            **({"gone": list(self.gone)} if self.gone else {}),
        }

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over the ``state`` of another replica, once the operator has been restored."""
        self.applied, self.checksum, self.finished = state["applied"], state["checksum"], state["finished"]
        self.compared = state.get("compared", self.compared)
        self._alive_since, self._silent = self.applied, state.get("silent", 0)
        self._checksums = OutputChecksums()
        self._note()
        self.order = OrderLog(self.applied)
        self.order.adopt(msgspec.msgpack.decode(state["entries"], type=list[OrderEntry]), state["committed"])
        self._held.adopt(state["marks"])
        self.waits.ended = {edge: set(ended) for edge, ended in state["ended"].items()}
        self.context.now, self.context.step = state["now"], max(self.applied - 1, 0)
        self.context.timers.replace(state["timers"])  # the fresh operator has set timers of its own
        self.rows_in, self.rows_out = state["rows"]
        if self.exit is not None and state["exit"] is not None:
            self.exit.adopt(state["exit"])
        self._unsure = state.get("unsure", False)
        self.steady, self.gone = state.get("steady", True), [(step, rows) for step, rows in state.get("gone", ())]
        self.follow()
        self.release()

    def succeed(self, order: OrderLog, left: int, claim: OrderClaim = NO_CLAIM, whole: bool = False) -> None:
        """Go on with a standby's order, from the state of the standby's checkpoint, which has been restored.

        ``left``: the outside has the positions of the output below this; ``claim``: the checksum of the output that the
        repeated steps gave before; ``whole``: no earlier primary has shown anything of steps that are not in this order. That is
        also true of a standby, but only a checkpoint of a primary that had not compared its sink yet makes it necessary to
        compare."""
        self.follow()
        self.order, self._claim = order, claim if claim.steps >= self._silent else NO_CLAIM
        if self.exit is not None:
            self.exit.forget(left)
        self._repeats_to = -1
        if whole or self._unsure:
            self._repeat_all()

    def _repeat_all(self) -> None:
        """Repeat the steps of the order, and then compare the sink with the checkpoint location."""
        self._repeats_to, self._unsure = self.order.end, False
        if self.exit is not None:
            self.exit.restores()
        self._note_repeated()

    def _note_repeated(self) -> None:
        if self.applied == self._repeats_to and self.exit is not None:
            self.exit.restored(note_of_output(self.operator))

    @property
    def state_bytes(self) -> int:
        """An estimate of the size of the state, without a snapshot."""
        said = self.blame.guard("state_bytes", None, lambda: int(self.operator.state_bytes() or 0))
        return max(said, 0) or self.copy_bytes

    def snapshot(self) -> Any:
        return self.blame.guard("snapshot", None, self.operator.snapshot)

    def changes(self) -> Any:
        """Return the operator's changes since the last call. None: they are not known."""
        return self.blame.guard("changes", None, self.operator.changes)

    def needs_from(self) -> int | None:
        """Return the first step whose rows still matter. None: all rows matter."""
        return self.blame.guard("needs_from", None, self.operator.needs_from)

    def restore(self, snapshot: Any, changes: Iterable[Any] = ()) -> None:
        if snapshot is not None:
            self.blame.guard("restore", None, lambda: self.operator.restore(snapshot))
        for each in changes:
            self.blame.guard("apply_changes", None, partial(self.operator.apply_changes, each))

    # ---- roles

    def lead(self, epoch: int, others: Iterable[ReplicaAt]) -> None:
        """Become or stay primary, with these other replicas."""
        if not self.primary:
            self.primary, self.leads_since = True, epoch
            self.waits.forget_turns()
            if self._unsure:  # all steps that were shown are in its order, because they were committed
                self._repeat_all()
            ordered = self.order.since(self.applied)
            self._latest, self._ticked = (ordered[-1].now if ordered else self.context.now), False
        elif self.leads_since < 0:
            self.leads_since = epoch
        self.order.lead(others, self.applied)
        if self.compared and not self.order.peers and self.applied >= self._claim.steps:
            self.compared, self._checksums = False, OutputChecksums()  # until another replica gets a copy
        self.release()

    def compare(self) -> None:
        """Compare output from now on, because another replica gets a copy of the present state. The plan does not say so if
        the stage has got other replicas since it was made (design: compared-since)."""
        if not self.compared:
            self.compared, self._checksums = True, OutputChecksums()
            self._note()

    def follow(self) -> None:
        """Become secondary: another replica decides the order."""
        self.primary = False
        self.waits.forget_turns()
        self.order.follow()

    def release(self) -> None:
        """Release the output of the steps that are committed by now."""
        self._held.through(self.order.committed)
        self.order.trim(self.applied)

    # ---- steps

    @property
    def has_room(self) -> bool:
        """True if there is room for more output: in the logs and, on the primary, in the output kept for the sink. A secondary
        learns only later which output has left, so its kept output is no reason to wait."""
        if self.exit is not None and self.primary and not self.exit.has_room:
            return False
        return not self.room.full

    def ready(self, now: float) -> bool:
        """Tell whether there is something to do, and room for its output."""
        if self.finished or self.frozen:
            return False
        if self.room.full or (self.exit is not None and self.primary and not self.exit.has_room):
            return False
        if self._output is not None:
            return True
        if self.applied < self.order.end:
            may_apply = self.primary or (self._applies and self.applied < self.order.committed)
            return may_apply and self.waits.has(self.order[self.applied])
        if not self.primary or self.gathers or self.held_back or self.compares:
            return False
        return bool(self._waiting) or self.waits.all_ended or self._tick_due(now)

    @property
    def held_back(self) -> bool:
        """True if the order log has reached its bound, or the length of a standby's log is not known. Nothing more is ordered
        until the other replicas have caught up; steps that are ordered go on (design: order-bound)."""
        order = self.order
        return order.unanswered or order.end - order.oldest >= self.limits.order_max_steps

    @property
    def compares(self) -> bool:
        """True if nothing new is ordered until the sink has been compared with the checkpoint location (design: ahead)."""
        return self.exit is not None and self.exit.compares

    @property
    def step_s(self) -> float:
        """Average seconds that a step has taken here."""
        return self.busy_s / max(self.applied - self._alive_since, 1)

    @property
    def timer_at(self) -> float:
        """The time at which this replica has to order a tick; infinite if it has none to order."""
        return self.context.timers.next if self.primary and not self.finished else math.inf

    def _tick_due(self, now: float) -> bool:
        if self.context.timers.next > max(now, self._latest) or self.order.end - self.order.committed > UNCOMMITTED_MAX:
            return False
        if self.order.behind > self.limits.replicas_max_steps_behind:
            return False  # a replica that takes over has to make up for these ticks first
        return not self._ticked or not (self._waiting or self.waits.all_ended)

    def missing(self) -> list[StreamId]:
        """List the streams that lack rows of the next ordered step."""
        limit = self.order.end if self.primary else self.order.committed if self._applies else 0
        return self.waits.lacks(self.order[self.applied]) if self.between_steps and self.applied < limit else []

    def note_passed(self, stream: StreamId, below: int) -> bool:
        """Note that no row of a stream below this number comes any more, and tell whether the next ordered step, which wants such
        rows, goes on without them. DataLost: it may not (design: rows-that-are-gone)."""
        return stream in self.missing() and self.waits.note_passed(self.order[self.applied], stream, below)

    def gone_before(self, step: int) -> int:
        """Count the rows that are gone of the steps before this one."""
        return sum([rows for at, rows in self.gone if at < step])

    def step(self, now: float) -> list[Slice]:
        """Apply the next step, or go on with one whose output did not fit into the logs. Return the slices that are applied
        now, in the order of each stream."""
        assert self.ready(now)
        if self._output is None and (rows := self.begin(now)) is not None:
            self.process(rows)
        return self.go_on()

    def begin(self, now: float) -> pa.RecordBatch | None:
        """Begin the next step and return its rows, which ``process`` applies. None: it has no rows."""
        if self.applied == self.order.end:
            self._decide(now)
        entry = self.order[self.applied]
        self.applying, self.kind = self.waits.take(entry), entry.kind
        if self.applied >= self.order.committed:
            self._held.hold_back(self.applied)
        self.context.now, self.context.created, self.context.step = entry.now, entry.created, self.applied
        self._given, self._vain = 0, False
        if self.waits.gone:
            self._pass_over(entry)
        if not self.applying:
            self._begin_without_rows(entry.kind)
            return None
        first = self.applying[0]
        if isinstance(first, WordSlice):
            self.waits.hear(first)
            return None
        self.method, self.context.input = "process", first.input
        return joined(self.applying)

    def _pass_over(self, entry: OrderEntry) -> None:
        """Go on without rows of the step that are gone. DataLost: the numbers of the output behind the step are not known then.

        Consumers and sinks know output by its numbers. They may have output of this step and of the steps behind it, which are
        repeated, and have to have the same numbers again (design: rows-that-are-gone)."""
        gone = self.waits.gone
        numbered = note_of_output(self.operator) is not None
        if numbered or not (self.steady or (not self.outlets and self.exit is None)):
            why = (
                "its sink knows rows by their numbers, which count those that are gone"
                if numbered
                else "its steps give no batch of output or several, so the numbers of later output are not known without the rows"
            )
            raise DataLost(
                f"{self.where}: {gone} rows of a step that has to be repeated are gone, and the stage cannot go on without them: "
                f"{why}. Start with another checkpointLocation to read what the log has. Keep records for longer than a query "
                "may be down after a kill; query.stop() leaves nothing to repeat"
            )
        self.gone.append((self.applied, gone))
        of_logs = [StreamId(*of) for *of, _ in entry.slices if of[0] in self.waits.from_logs]
        if self.primary and of_logs:
            self.lost[of_logs[0]] = self.lost.get(of_logs[0], 0) + gone
            log.warning(
                "%s: %d of %d rows of a step that has to be repeated are gone from the log of partition %d of its input; it goes "
                "on without them", self.where, gone, entry.rows, of_logs[0].producer,
            )  # fmt: skip
        self.order.ask_again()

    def process(self, rows: pa.RecordBatch) -> None:
        """Apply the rows of the step that has begun."""
        self._output = self.blame.guard("process", self.applying, lambda: self._parts(self.operator.process(rows)))

    def give(self, output: list[pa.RecordBatch]) -> None:
        """Take the output of the step that has begun, computed elsewhere; ``go_on`` emits it."""
        self._output = self._parts(output)

    def give_one(self, batch: pa.RecordBatch, clustered: ByOutlet, checksum: int) -> None:
        """Emit a batch of output that needs no cut. ``clustered``: the batch by partition, for each outlet; ``checksum``: that of
        all output, with this batch."""
        self._output = iter(())
        self._hand_on(batch, clustered, checksum)

    def go_on(self) -> list[Slice]:
        """Emit output of the step under way. Return the applied slices once all of it is emitted, as ``step`` does."""
        if self._output is not None:
            if not self.blame.guard(self.method, self.applying, self._emit):
                return []
            self._output = None
            if not self._given and (self.waits.gone or self._vain) and (schema := self.stage.output_schema) is not None:
                self._hand_on(pa.RecordBatch.from_pylist([], schema))  # it takes the number that the step's output had
        return self._complete()

    def _begin_without_rows(self, kind: StepKind) -> None:
        if kind is StepKind.SLICES:  # all its rows are gone
            self.method, self._output = "process", iter(())
        elif kind is _TICK:
            self.method, self._output = "on_timer", self._fired()
        else:
            self.method = "finish"
            self.context.timers.replace({})
            self._output = self.blame.guard("finish", None, lambda: self._parts(self.operator.finish()))

    def _fired(self) -> Iterator[pa.RecordBatch]:
        """Yield the output of the timers that are due when the step begins. Sets ``_vain``: the step had nothing to do."""
        timers, now = self.context.timers, self.context.now
        self._vain = bool(self.gone)
        for name in timers.due(now):
            if timers.take(name, now):
                self._vain = False
                yield from self._parts(self.operator.on_timer(name))

    def _complete(self) -> list[Slice]:
        if self.applying:
            if self._proven is not None:
                self._prove()
            self.rows_in += rows_of(self.applying)
        elif self.kind is _FINISH:
            for outlet in self.outlets:
                outlet.producer.finish(self.context.created)
            self.finished = True
        if self.may_lose and self._given != 1 and not self.waits.gone and self.kind is not _FINISH:
            words = bool(self.applying) and isinstance(self.applying[0], WordSlice)
            self.steady = self.steady and (words or self.applied < self._silent)
        self.applied += 1
        self.slices += len(self.applying)
        if self.compared and self._note():
            self._checksums.forget(self.order.peers.values())
        if self.applied == self._claim.steps:
            self._check_repetition()
        if self.applied == self._repeats_to:
            self._note_repeated()
        self.order.trim(self.applied)
        return self.applying

    def _prove(self) -> None:
        """Check that attributes created by a step, and the contents that the first rows gave to the other attributes, can travel:
        the time of a loss is too late to find out."""
        count = attribute_count(chain_of(self.operator)[0])
        if not self.rows_in or count != self._proven:
            self._proven = count
            self.check_state()

    @property
    def checked(self) -> int:
        """The number of steps that ``last_checksum`` covers."""
        return self._checksums.steps

    @property
    def last_checksum(self) -> int:
        return self._checksums.newest

    def claim(self) -> OrderClaim:
        """Return the claim about the newest committed output, which replicas that keep checkpoints check if they take over."""
        steps = min(self.applied, self.order.committed)
        checksum = self.checksum_at(steps) if self.compared else None
        return NO_CLAIM if checksum is None else OrderClaim(steps, checksum)

    def _note(self) -> bool:
        """Note the checksum after a step whose output is not thrown away. Return whether more checksums are kept than needed."""
        return self.applied >= self._silent and self._checksums.note(self.applied, self.checksum)

    def _check_repetition(self) -> None:
        """Compare repeated output with the lost primary's output, which may be outside and cannot be taken back."""
        if self.compared and self.checksum != self._claim.checksum and not self.gone:
            raise other_output(self.where, self.applied)

    def checksum_at(self, applied: int) -> int | None:
        """Return the checksum of the output of the first ``applied`` steps; None: not reached yet, or no longer kept."""
        return self._checksums.at(applied)

    def decide_ahead(self, now: float) -> None:
        """Order all pending slices for which the order log has room, so that the other replicas need not wait for this replica's
        turn to apply them.

        An operator with timers is an exception: a step that is applied before these slices may set a timer that has to go
        before them. A stage with a sink is another: the other replicas would apply the steps, and keep their output, however
        long this replica waits for the sink."""
        if self.timed or self.gathers or self.stage.sink is not None:
            return
        while self.waits.arrivals and not self.held_back:  # None: it has to catch up with the earlier primary first
            self._decide(now)

    def _decide(self, now: float) -> None:
        """Order a tick if a timer is due. Otherwise order the oldest slice that is not ordered, joined with the following slices
        of the same input while they have few rows together. If there is no slice, the input has ended."""
        self.waits.arrange()
        if self.context.timers.pending:
            if self._tick_due(now):
                self._append(max(now, self._latest), [], _TICK)
                return
            if self.context.timers.next <= now:
                now = self._latest  # timers that are due since then come after this step, so it is not later
        chosen = self.waits.choose(self.limits.step_max_rows, self.busy_s)
        assert chosen or self.waits.all_ended
        self._append(now, chosen, StepKind.SLICES if chosen else _FINISH)

    def _append(self, now: float, chosen: list[Slice], kind: StepKind) -> None:
        self._latest, self._ticked = max(now, self._latest), kind is _TICK
        self.order.append(entry_of(chosen, self._latest, kind))

    def _parts(self, output: Batches) -> Iterator[pa.RecordBatch]:
        if fits(output, self.stage, self.limits):
            return iter(output)
        return cut_output(output, self.stage, self.limits, f"{self.where}, {self.method}()")

    def _emit(self) -> bool:
        """Emit output as long as the logs have room; return False if more is to come. However much output a step has, a log
        exceeds its bound by one batch at most."""
        assert self._output is not None
        while True:
            if self._unsent is None:
                self._unsent = next(self._output, None)
                if self._unsent is None:
                    return True
            if self.applied >= self._silent and not self.has_room:
                return False
            batch, self._unsent = self._unsent, None
            self._hand_on(batch)

    def _hand_on(self, batch: pa.RecordBatch, clustered: ByOutlet = (), checksum: int | None = None) -> None:
        if self.applied < self._silent:
            return
        self.rows_out += batch.num_rows
        self._given += 1
        if self.compared:
            self.checksum = extend(self.checksum, batch) if checksum is None else checksum
        for place, outlet in enumerate(self.outlets):
            outlet.send(batch, self.context.created, clustered[place] if clustered else None)
        if self.exit is not None:
            self.exit.add(self.applied, batch)

    def close(self) -> None:
        """Close the operator. Its exception is logged as a warning once, by the primary: the other replicas raise the same."""
        if self.primary:
            closed(self.where, self.operator.close)
        else:
            closed(f"{self.where}, not the primary", self.operator.close, logging.DEBUG)
