"""The end of a replica's output inside the dataflow: output is kept until the outside has it (design: sink).

``SinkBuffer`` keeps output for a sink, ``ReaderBuffer`` for readers, and ``EdgeOutput`` is the way of output to another stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple, TypeGuard

import pyarrow as pa

from flux.dataflow.plan import StagePlan
from flux.errors import SchemaError, UserCodeError
from flux.exchange.producer import Producer
from flux.operators.batches import BATCH_BYTES, conform, given_batches, is_tiny, logical_bytes, split
from flux.operators.operator import Batches
from flux.operators.schema import picked
from flux.settings import Settings
from partitioning.clustering import Clustered, Clustering

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
        self.compares = False
        self.bytes = 0
        #: There is room for one more batch.
        self.has_room = bytes_max > 0
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

    def _fits(self) -> bool:
        """Tell whether one more batch may be kept."""
        return self.bytes < self._bytes_max

    def add(self, step: int, batch: pa.RecordBatch) -> None:
        if self.position >= self.left:  # else an earlier primary has handed it on
            self._keep(step, self.position, batch)
        self.position += 1

    def _keep(self, step: int, position: int, batch: pa.RecordBatch) -> None:
        kept = BufferedBatch(step, position, batch, BATCH_BYTES + logical_bytes(batch))
        self._waiting.append(kept)
        self.bytes += kept.nbytes
        self.has_room = self._fits()

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
        self.compares = True

    def restored(self, note: Any) -> None:
        """Note that all restored steps are applied: no earlier primary can have made the next batch."""
        self.made, self.note = self.position, note

    def outside_has(self, below: int, compared: bool) -> None:
        """Take the answer of the outside: it has the positions ``below``. ``compared``: that is no more than the location
        knows of. Until this is certain, only output that was made here counts, because ``left`` goes to the location, too."""
        if compared:
            self.compares = False
        self.forget(min(below, self.position) if self.compares else below)

    def forget(self, below: int) -> None:
        """Note that the outside has the positions ``below`` for good."""
        self.left = max(self.left, below)
        for kept in (self._handed, self._waiting):
            while kept and kept[0].position < below:
                self.bytes -= kept.popleft().nbytes
        self.has_room = self._fits()

    # ---- copies

    def state(self) -> tuple[int, int, list[Held]]:
        """Return the part of a copy of the replica, which may have to hand on the kept batches."""
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
    """Output for readers. Batches are shown from their commit on, and forgotten when a reader says that it has them for good.

    Output that is kept until readers have it for good (design: readers).

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
    """The stream of this partition on one outgoing edge. Empty ``key``: rotate over partitions. ``columns`` are those that
    travel, with ``schema``; None: all columns, with the schema of the output.

    These are the ways of a replica's output inside the dataflow, one per outgoing edge."""

    producer: Producer
    key: tuple[int, ...]
    columns: tuple[int, ...] | None = None
    schema: pa.Schema | None = None
    _clustering: Clustering | None = field(default=None, init=False)

    def send(self, batch: pa.RecordBatch, created: float, clustered: Clustered | None = None) -> None:
        """Send a batch. ``clustered`` are the same rows by partition, if they are so already."""
        self.producer.append(clustered or self._clustered(picked(batch, self.columns)), created)

    def _clustered(self, batch: pa.RecordBatch) -> Clustered:
        producer, clustering = self.producer, self._clustering_of(batch)
        if self.key:
            return clustering.by_key(batch, producer.by_rank)
        return clustering.whole(batch, (producer.stream.producer + producer.next_sequence) % producer.partitions)

    def clustered_each(self, batch: pa.RecordBatch, rows: Sequence[int]) -> Sequence[Clustered | None]:
        """Cluster batches of ``rows`` rows that lie one behind the other, for this outlet, and for those of other partitions on
        the same edge. They share memory.

        None: each outlet has to do it. Without a key only the outlet knows which partition has its turn; and the share of text
        in a log would depend on the rows beside it (design: log-share)."""
        batch = picked(batch, self.columns)
        clustering = self._clustering_of(batch)
        if not self.key or not clustering.counts_rows:
            return [None] * len(rows)
        return clustering.each_by_key(batch, rows, self.producer.by_rank)

    def _clustering_of(self, batch: pa.RecordBatch) -> Clustering:
        if self._clustering is None:
            self._clustering = Clustering(batch.schema, self.key, self.producer.partitions)
        return self._clustering


def fits(output: Batches, stage: StagePlan, limits: Settings) -> TypeGuard[list[pa.RecordBatch]]:
    """Tell whether an operator has given a list of one batch that needs neither a check nor a cut, as most do for small steps."""
    if type(output) is not list or len(output) != 1 or type(output[0]) is not pa.RecordBatch:
        return False
    batch = output[0]
    small = 0 < batch.num_rows <= limits.batch_max_rows and is_tiny(batch, limits.batch_max_bytes)
    return small and stage.output_schema is not None and bool(batch.schema.equals(stage.output_schema))


def cut_output(output: Batches, stage: StagePlan, limits: Settings, where: str) -> Iterator[pa.RecordBatch]:
    """Yield the output batches of an operator, checked and cut to size. ``where`` names their origin in errors."""
    takes_empty = stage.sink is not None and stage.sink.traits.takes_empty
    for batch in given_batches(output):
        try:
            checked = conform(batch, stage.output_schema, f"output of stage {stage.name}")
        except SchemaError as error:  # no row is at fault
            raise UserCodeError(f"{where}: {error}") from None
        if takes_empty and not checked.num_rows:
            yield checked
        yield from split(checked, limits.batch_max_rows, limits.batch_max_bytes)
