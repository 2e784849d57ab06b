"""The output of a replica, from its operator to its consumers (design: sink, release-rule).

``EdgeOutput`` is the way of output to another stage, ``SinkBuffer`` keeps output until a sink has it, and ``ReaderBuffer`` until
readers have it. ``ReplicaOutput`` has them all: it emits the output of a step as long as there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple, TypeGuard

import pyarrow as pa

from flux.dataflow.plan import EdgePlan, StagePlan
from flux.errors import SchemaError, UserCodeError
from flux.exchange.log import LogRoom
from flux.exchange.producer import Producer, state_watermark
from flux.operators.batches import BATCH_BYTES, conform, given_batches, is_tiny, logical_bytes, split
from flux.operators.operator import Batches, Context
from flux.operators.schema import picked
from flux.replica.order_log import Peer
from flux.replica.output_checksums import OutputChecksums
from flux.replica.release import ReleasePolicy
from flux.replica.step_queue import ReplicaStep
from flux.settings import Settings
from flux.windows.window import NEVER
from flux.wire.checksum import extend
from partitioning.clustering import Clustered, Clustering

#: Rows of output after which a step lets others go first: four large batches, which take some ten milliseconds. A batch costs as
#: much as ``BATCH_ROWS_MIN`` rows at least.
EMIT_ROWS_MAX, BATCH_ROWS_MIN = 1 << 18, 1024
#: Step, position, batch.
Held = tuple[int, int, pa.RecordBatch]


class BufferedBatch(NamedTuple):
    """A batch of output that is kept. ``nbytes`` count against the bound."""

    step: int
    position: int
    batch: pa.RecordBatch
    nbytes: int


class SinkBuffer:
    """The output of a replica for the outside.

    ``position`` is that of the next batch: every replica numbers its output alike, because it is the same. A batch is kept
    until the outside has it, whichever replica has handed it on, because this replica may have to do it again. ``left``: the
    outside has the positions below this; ``leads``: the outside has been told the position at which this replica goes on;
    ``bytes`` are those of kept batches."""

    def __init__(self, bytes_max: int) -> None:
        self.position = 0
        self.left = 0
        self.leads = False
        #: Positions below this may have been made by earlier primaries, those from here on by none. None: not known, or told.
        self.made: int | None = None
        #: The note of the operator before the sink about the output below ``made``.
        self.note: Any = None
        #: The outside has still to be compared with the checkpoint location. Until then this replica orders no new steps: they
        #: would be written to the location, and at the next start it would seem to know of everything that is outside.
        self.uncompared = False
        #: The replica has begun empty, and its output goes on behind that of lost ones, at a position that only the outside
        #: knows. Until that is told this replica orders no steps (design: converge).
        self.unplaced = False
        self.bytes = 0
        #: There is room for one more batch.
        self.has_room = bytes_max > 0
        self._room = LogRoom()
        self._bytes_max = bytes_max
        self._handed: deque[BufferedBatch] = deque()
        self._waiting: deque[BufferedBatch] = deque()

    def __len__(self) -> int:
        return len(self._handed) + len(self._waiting)

    # ---- as a log, for the count of times at which everything has left (``drained``)

    @property
    def base(self) -> int:
        return self.left

    @property
    def end(self) -> int:
        return self.position

    # ---- in and out

    def tell(self, room: LogRoom) -> None:
        """Tell another owner from now on when the buffer fills and drains (design: told-room)."""
        self._room.full -= not self.has_room
        room.full += not self.has_room
        self._room = room

    def _fits(self) -> bool:
        """Tell whether one more batch may be kept."""
        return self.bytes < self._bytes_max

    def _note_room(self) -> None:
        """Tell the owner if the buffer has filled or drained."""
        fits = self._fits()
        if fits != self.has_room:
            self.has_room = fits
            self._room.full += -1 if fits else 1

    @property
    def waits(self) -> bool:
        """Whether this replica orders no steps before the outside has answered."""
        return self.uncompared or self.unplaced

    def add(self, step: int, batch: pa.RecordBatch) -> None:
        if self.position >= self.left:  # else an earlier primary has handed it on
            self._keep(step, self.position, batch)
        self.position += 1

    def _keep(self, step: int, position: int, batch: pa.RecordBatch) -> None:
        kept = BufferedBatch(step, position, batch, BATCH_BYTES + logical_bytes(batch))
        self._waiting.append(kept)
        self.bytes += kept.nbytes
        self._note_room()

    def hand_on(self, below: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield position and batch of the output of the steps below ``below``, each once."""
        while self._waiting and self._waiting[0].step < below:
            kept = self._waiting.popleft()
            self._handed.append(kept)
            yield kept.position, kept.batch

    def recovered(self, handed: int | None = None) -> int | None:
        """Return the first position that no earlier primary can have made, once: when all positions below it have been handed
        on. ``handed`` is the next position, if it is not the first that waits."""
        if handed is None:
            handed = self._waiting[0].position if self._waiting else self.position
        if self.made is None or handed < self.made:
            return None
        made, self.made = self.made, None
        return made

    def restores(self) -> None:
        """Note that restored steps are repeated now, after which the outside is compared."""
        self.uncompared = True

    def restored(self, note: Any) -> None:
        """Note that all restored steps are applied: no earlier primary can have made the next batch."""
        self.made, self.note = self.position, note

    def place(self, position: int) -> None:
        """Begin with this position: the outside has all before it."""
        self.unplaced, self.position, self.left = False, position, position

    def outside_has(self, below: int, compared: bool) -> None:
        """Take the answer of the outside: it has the positions ``below``. ``compared``: that is no more than the location
        knows of. Until this is certain, only output that was made here counts, because ``left`` goes to the location, too."""
        if compared:
            self.uncompared = False
        self.forget(min(below, self.position) if self.uncompared else below)

    def forget(self, below: int) -> None:
        """Note that the outside has the positions ``below`` for good."""
        self.left = max(self.left, below)
        for kept in (self._handed, self._waiting):
            while kept and kept[0].position < below:
                self.bytes -= kept.popleft().nbytes
        self._note_room()

    # ---- copies

    def state(self) -> tuple[int, int, list[Held]]:
        """Return position, ``left`` and the kept batches for a copy of the replica, which may have to hand the batches on
        (``adopt`` reads it). Checkpoint locations keep it, and later releases read it: its form must not change."""
        return self.position, self.left, [kept[:3] for kept in chain(self._handed, self._waiting)]

    def adopt(self, state: tuple[int, int, list[Held]]) -> None:
        self.position, self.left, kept = state
        for held in kept:
            self._keep(*held)

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        kept = [each.position for each in chain(self._handed, self._waiting)]
        assert kept == list(range(self.left, self.position)), f"kept are {kept}, of {self.left} to {self.position}"
        assert self.leads or not self._handed, "a replica that does not lead has handed on output"
        assert self.has_room == self._fits(), (
            f"{self.bytes} of {self._bytes_max} bytes are kept, has_room is {self.has_room}"
        )


#: Batches for which there is always room.
ALWAYS = 2


class ReaderBuffer(SinkBuffer):
    """Output that is kept until readers have it for good (design: readers). Batches are shown from their commit on, and forgotten
    when a reader says so.

    Readers come to the worker of the primary and ask from a position on. Nothing is handed on, so a reader that is slow, or that
    is not there, is a bound that is reached, and nothing else."""

    def __len__(self) -> int:
        return len(self._waiting)

    def _fits(self) -> bool:
        """Tell whether one more batch may be kept. It always may if there are fewer than two: Spark acknowledges a batch when it
        has got another one (design: full-readers)."""
        return super()._fits() or len(self._handed) + len(self._waiting) < ALWAYS

    @property
    def base(self) -> int:
        """The first batch that readers cannot read yet. Rows count as through when they can be read, because readers may never
        come."""
        return self.shown

    @property
    def shown(self) -> int:
        """Positions below this are committed. A new primary may not have made all of them again: it need not make batches that
        readers have."""
        return max(self._waiting[0].position if self._waiting else self.position, self.left)

    def restores(self) -> None:
        """Do nothing: readers say themselves which batches they have."""

    def restored(self, note: Any) -> None:
        """Do nothing, for the same reason."""

    def show(self, below: int) -> None:
        """Note that the steps below are committed."""
        for _ in self.hand_on(below):
            pass

    def acknowledge(self, below: int) -> None:
        """Note that a reader has the positions below for good. It cannot have batches that were not shown: then it is told
        nothing, and asks again."""
        self.forget(min(below, self.shown))

    def since(self, position: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
        """Yield shown batches from ``position`` on: up to ``bytes_max`` bytes, at least one if there is any."""
        if position < self.left or not bytes_max:
            return
        for kept in islice(self._handed, position - self.left, None):
            yield kept.batch
            bytes_max -= kept.nbytes
            if bytes_max <= 0:
                return


@dataclass
class EdgeOutput:
    """The stream of this partition on one outgoing edge.

    These are the ways of a replica's output inside the dataflow, one per outgoing edge."""

    producer: Producer
    edge: EdgePlan
    _clustering: Clustering | None = field(default=None, init=False)

    @property
    def schema(self) -> pa.Schema:
        return self.edge.schema

    def send(self, batch: pa.RecordBatch, created: float, where: Callable[[], str]) -> None:
        """Send a batch. ``where`` tells its place for errors.

        A batch of which steps leave nothing is no element: whether they do is decided by the batch alone, and so alike by each
        replica. The output of a stage that may go on without rows that are gone always is one: such a batch may have left some
        rows when it was made with all of its input, and has to take the same number again (design: rows-that-are-gone)."""
        rows, _ = self.edge.rows_of(batch, where)
        if rows.num_rows or not batch.num_rows or self.producer.may_lose:
            self.producer.append(self._clustered(rows), created)

    def _clustered(self, batch: pa.RecordBatch) -> Clustered:
        producer, clustering = self.producer, self._clustering_of(batch)
        if self.edge.key:
            return clustering.by_key(batch, producer.by_rank)
        return clustering.whole(batch, (producer.stream.producer + producer.next_sequence) % producer.partitions)

    def clustered_each(self, batch: pa.RecordBatch, rows: Sequence[int]) -> Sequence[Clustered | None]:
        """Cluster batches of ``rows`` rows that lie one behind the other, for this outlet, and for those of other partitions on
        the same edge. They share memory.

        None: each outlet has to do it. Without a key only the outlet knows which partition has its turn; the share of text in a
        log would depend on the rows beside it (design: log-share); and a row for which a step has no answer is to be told by its
        own partition."""
        if self.edge.steps is not None:
            return [None] * len(rows)
        batch = picked(batch, self.edge.columns)
        clustering = self._clustering_of(batch)
        if not self.edge.key or not clustering.counts_rows:
            return [None] * len(rows)
        return clustering.each_by_key(batch, rows, self.producer.by_rank)

    def _clustering_of(self, batch: pa.RecordBatch) -> Clustering:
        if self._clustering is None:
            self._clustering = Clustering(batch.schema, self.edge.key, self.producer.partitions)
        return self._clustering


def fits(output: Batches, stage: StagePlan, limits: Settings) -> TypeGuard[list[pa.RecordBatch]]:
    """Tell whether an operator has given a list of one batch that needs neither a check nor a cut, as most do for small steps."""
    if type(output) is not list or len(output) != 1 or type(output[0]) is not pa.RecordBatch:
        return False
    batch = output[0]
    small = 0 < batch.num_rows <= limits.batch_max_rows and is_tiny(batch, limits.batch_max_bytes)
    return small and stage.output_schema is not None and bool(batch.schema.equals(stage.output_schema))


def cut_output(
    output: Batches, stage: StagePlan, limits: Settings, where: Callable[[], str]
) -> Iterator[pa.RecordBatch]:
    """Yield the output batches of an operator, checked and cut to size. ``where`` tells their origin for errors."""
    takes_empty = stage.sink is not None and stage.sink.traits.takes_empty
    for batch in given_batches(output):
        try:
            checked = conform(batch, stage.output_schema, f"output of stage {stage.name}")
        except SchemaError as error:  # no row is at fault
            raise UserCodeError(f"{where()}: {error}") from None
        if takes_empty and not checked.num_rows:
            yield checked
        yield from split(checked, limits.batch_max_rows, limits.batch_max_bytes)


#: The clustered form of one output batch for each outlet.
ByOutlet = Sequence[Clustered | None]


def output_at(state: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return what ``ReplicaOutput.state`` keeps by outlet, with the outlets at these places alone."""
    found: dict[str, Any] = {"marks": [(step, [starts[at] for at in places]) for step, starts in state["marks"]]}
    if "watermark" in state:
        watermark, stated, said = state["watermark"]
        stated = [(step, at, [ends[place] for place in places]) for step, at, ends in stated]
        found["watermark"] = watermark, stated, [said[place] for place in places]
    return found


class ReplicaOutput:
    """The output of one replica: its ways to other stages, the output kept for the outside, and its checksums.

    The output of a step goes into the logs at once. The release policy holds it back there until the step is committed."""

    def __init__(
        self, stage: StagePlan, outlets: list[EdgeOutput], policy: ReleasePolicy, limits: Settings, where: str,
        context: Context, compared: bool,
    ) -> None:  # fmt: skip
        """Begin without output. ``where``: stage and partition, for messages; ``context``: that of the operator."""
        self._stage = stage
        self._limits = limits
        self._where, self._context = where, context
        self._policy = policy
        self.outlets = outlets
        #: The logs of all outlets tell it when they fill and drain, and on the primary the output kept for the outside. A
        #: secondary learns only later which output has left, so its kept output is no reason to wait.
        self.room = LogRoom()
        for outlet in outlets:
            outlet.producer.log.tell(self.room)
        #: The kept output for the outside, if the stage has a sink: see ``keep_in``.
        self.exit: SinkBuffer | None = None
        #: The replica is primary: see ``lead`` and ``follow``.
        self.leads = True
        #: Rows of output until now.
        self.rows = 0
        #: Batches of output until now.
        self.batches = 0
        #: Batches of output of the step under way, or of the last one.
        self.given = 0
        #: The watermark of the output of the steps until now.
        self.watermark = NEVER
        #: Watermarks behind steps that are not committed yet, in order: step, watermark, and the end of each outlet's log then.
        self._stated: deque[tuple[int, int, list[int]]] = deque()
        #: Output of the steps below this is thrown away, because every consumer has it (design: replay-point).
        self.silent = 0
        #: The output is compared with that of other replicas.
        self.compared = compared
        #: It is compared batch by batch, because the replicas have no steps in common.
        self._by_batch = stage.at_marks
        #: Running checksum of the output, with that of the step under way.
        self.checksum = 0
        self.checksums = OutputChecksums()
        #: Output of the step under way that is still to be emitted; None: all of it is.
        self.parts: Iterator[pa.RecordBatch] | None = None
        #: A batch of output for which there was no room.
        self._unsent: pa.RecordBatch | None = None

    def keep_in(self, exit: SinkBuffer) -> None:
        """Keep output for the outside, too."""
        self.exit = exit
        exit.tell(self.room if self.leads else LogRoom())

    def lead(self) -> None:
        """Note that the replica is primary from now on."""
        self.leads = True
        if self.exit is not None:
            self.exit.tell(self.room)

    def follow(self) -> None:
        """Note that the replica is secondary from now on."""
        self.leads = False
        if self.exit is not None:
            self.exit.tell(LogRoom())

    @property
    def uncompared(self) -> bool:
        """True if nothing new is ordered until the sink has been compared with the checkpoint location (design: ahead)."""
        return self.exit is not None and self.exit.uncompared

    def validate(self, begun: int, progress: int, committed: int, finished: bool) -> None:
        """Check the invariants that hold between any two events, when ``begun`` steps have begun; ``progress``: the newest step
        or batch with a checksum. AssertionError names the broken one."""
        self._policy.validate(begun, committed)
        for outlet in self.outlets:
            producer = outlet.producer
            assert producer.finished == finished, f"stream {producer.stream} and its partition end apart"
        full = sum([not outlet.producer.has_room for outlet in self.outlets])
        if self.compared:
            self.checksums.validate(progress)
        if self.exit is not None:
            self.exit.validate()
            full += self.leads and not self.exit.has_room
        assert self.room.full == full, f"{full} logs take nothing, and {self.room.full} have said so"

    # ---- the output of a step

    def emit(self, step: ReplicaStep, output: Batches) -> bool:
        """Emit the output of the operator for a step as long as there is room, and at most ``EMIT_ROWS_MAX`` rows at a time
        (design: long-output). Return False if more is to come: the next call goes on, whatever its ``output``. However much
        output a step has, a log exceeds its bound by one batch at most."""
        if self.parts is None:
            self.parts = self._checked(step, output)
        emitted = 0
        while True:
            if emitted >= EMIT_ROWS_MAX:
                return False
            if self._unsent is None:
                self._unsent = next(self.parts, None)
                if self._unsent is None:
                    self.parts = None
                    return True
            if step.number >= self.silent and self.room.full:
                return False
            batch, self._unsent = self._unsent, None
            emitted += max(batch.num_rows, BATCH_ROWS_MIN)
            self.send(step, batch)

    def _checked(self, step: ReplicaStep, output: Batches) -> Iterator[pa.RecordBatch]:
        """Return output of the operator, to be made, checked and cut to size while it is emitted."""
        if output is None:
            return iter(())
        if fits(output, self._stage, self._limits):
            return iter(output)
        return cut_output(output, self._stage, self._limits, lambda: f"{self._where}, {self._context._flux_method}()")

    def fill(self, step: ReplicaStep) -> None:
        """Give an empty batch in place of the output of a step that had nothing to do, because rows are gone. It takes the number
        that the step's output had."""
        if not self.given and self._stage.output_schema is not None:
            self.send(step, pa.RecordBatch.from_pylist([], self._stage.output_schema))

    def send(
        self, step: ReplicaStep, batch: pa.RecordBatch, clustered: ByOutlet = (), checksum: int | None = None
    ) -> None:
        """Send a batch that needs no cut. ``clustered``: the batch by partition, for each outlet, if that is known; ``checksum``:
        that of all output, with this batch, if that is known."""
        if step.number < self.silent:
            return
        self.rows += batch.num_rows
        self.given += 1
        self.batches += 1
        if self.compared:
            self.checksum = extend(self.checksum, batch) if checksum is None else checksum
            if self._by_batch and self.checksums.note(self.batches, self.checksum):
                self.checksums.forget(())
        for place, outlet in enumerate(self.outlets):
            known = clustered[place] if clustered else None
            if known is not None:
                outlet.producer.append(known, step.entry.created)
            else:
                outlet.send(batch, step.entry.created, self._origin)
        if self.exit is not None:
            self.exit.add(step.number, batch)

    def _origin(self) -> str:
        return f"{self._where}, output of {self._context._flux_method}()"

    def finish(self, created: float) -> None:
        """End the streams of the partition."""
        for outlet in self.outlets:
            outlet.producer.finish(created)

    # ---- outlets that come and go

    def open(self, outlet: EdgeOutput, step: int, committed: int) -> None:
        """Begin with an outlet, in a step of its own (design: edge-begins). Its consumers hear the present watermark when the
        step is committed."""
        self.outlets.append(outlet)
        outlet.producer.log.tell(self.room)
        self._policy.open()
        for _, _, ends in self._stated:
            ends.append(0)
        if self.watermark > NEVER:
            outlet.producer.watermark = self.watermark
            self._stated.append((step, self.watermark, [each.producer.next_sequence for each in self.outlets]))
            self._release_statements(committed)

    def close(self, edge: int) -> Producer | None:
        """End an outlet without another word, because its edge was removed, and return its producer. None: there is none."""
        for place, outlet in enumerate(self.outlets):
            if outlet.edge.id == edge:
                del self.outlets[place]
                self._policy.close(place)
                for _, _, ends in self._stated:
                    del ends[place]
                outlet.producer.log.clear()
                outlet.producer.log.tell(LogRoom())
                return outlet.producer
        return None

    # ---- release

    def hold_back(self, step: int) -> None:
        """Hold back the output of a step that begins, until the step is committed."""
        self._policy.hold_back(step)

    def release(self, committed: int) -> None:
        """Release the output of the steps below ``committed``, and the statements about it."""
        self._policy.through(committed)
        if self._stated:
            self._release_statements(committed)

    def state_watermark(self, step: int, watermark: int, committed: int) -> None:
        """State the watermark behind the output of a step that has been applied, once the step is committed. Batches of later
        steps carry it."""
        if watermark <= self.watermark:
            return
        self.watermark = watermark
        for outlet in self.outlets:
            outlet.producer.watermark = watermark
        self._stated.append((step, watermark, [outlet.producer.next_sequence for outlet in self.outlets]))
        self._release_statements(committed)

    def _release_statements(self, committed: int) -> None:
        while self._stated and self._stated[0][0] < committed:
            _, watermark, ends = self._stated.popleft()
            for outlet, end in zip(self.outlets, ends, strict=True):
                state_watermark(outlet.producer, end, watermark)

    # ---- checksums

    def compare(self, applied: int) -> None:
        """Compare output from now on, because another replica gets a copy of the present state. The plan does not say so if
        the stage has got other replicas since it was made (design: compared-since)."""
        if not self.compared:
            self.compared, self.checksums = True, OutputChecksums()
            self.note(self.batches if self._by_batch else applied)

    def compare_no_more(self) -> None:
        """Compare no output until another replica gets a copy of the state."""
        self.compared, self.checksums = False, OutputChecksums()

    def note(self, applied: int, peers: Collection[Peer] = ()) -> None:
        """Note the checksum after a step whose output is not thrown away, and forget those that no other replica needs."""
        if applied >= self.silent and self.checksums.note(applied, self.checksum):
            self.checksums.forget(peers)

    # ---- copies

    def state(self) -> dict[str, Any]:
        """Return the output's part in a copy of the replica (``adopt`` reads it). Checkpoint locations keep it, and later
        releases read it: never rename a key, and read a new key with a default."""
        return {
            "checksum": self.checksum,
            "compared": self.compared,
            "silent": self.silent,
            # Steps that are held back, and where their output begins in each log.
            "marks": self._policy.marks(),
            "exit": None if self.exit is None else self.exit.state(),
            **({"batches": self.batches} if self._by_batch else {}),
            **({} if self.watermark == NEVER else {"watermark": (self.watermark, self._still_stated(), self._said())}),
        }

    def _still_stated(self) -> list[tuple[int, int, list[int]]]:
        """Return the statements that are held back, as they are now: a copy of a replica is written in another thread, and an
        outlet may close meanwhile."""
        return [(step, watermark, list(ends)) for step, watermark, ends in self._stated]

    def _said(self) -> list[tuple[int, int]]:
        """Return the newest statement that was released, for each outlet: the element behind which it counts, and the
        watermark."""
        bounds = [outlet.producer.bounds for outlet in self.outlets]
        return [(0, NEVER) if each is None else each.said[:2] for each in bounds]

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over the ``state`` of another replica's output, and its checksum after the steps that it had applied."""
        self.checksum, self.compared = state["checksum"], state.get("compared", self.compared)
        self.silent, self.batches = state.get("silent", 0), state.get("batches", 0)
        applied = self.batches if self._by_batch else state["applied"]
        self.checksums = OutputChecksums(applied, self.checksum if applied >= self.silent else None)
        self._policy.adopt(state["marks"])
        if self.exit is not None and state["exit"] is not None:
            self.exit.adopt(state["exit"])
        if "watermark" in state:
            self.watermark, stated, said = state["watermark"]
            self._stated = deque((step, watermark, list(ends)) for step, watermark, ends in stated)
            for outlet, (end, watermark) in zip(self.outlets, said, strict=True):
                outlet.producer.watermark = self.watermark
                state_watermark(outlet.producer, end, watermark)
