"""The end of a replica's output inside the dataflow: output is kept until the outside has it (design: sink)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from flux.dataflow.batches import BATCH_BYTES, logical_bytes

#: Step, position, batch.
Held = tuple[int, int, pa.RecordBatch]


class Kept(NamedTuple):
    """A batch of output that is kept. ``nbytes`` count against the bound."""

    step: int
    position: int
    batch: pa.RecordBatch
    nbytes: int


class Exit:
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
        self._bytes_max = bytes_max
        self._handed: deque[Kept] = deque()
        self._waiting: deque[Kept] = deque()

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

    @property
    def has_room(self) -> bool:
        return self.bytes < self._bytes_max

    def add(self, step: int, batch: pa.RecordBatch) -> None:
        if self.position >= self.left:  # else an earlier primary has handed it on
            self._keep(step, self.position, batch)
        self.position += 1

    def _keep(self, step: int, position: int, batch: pa.RecordBatch) -> None:
        kept = Kept(step, position, batch, BATCH_BYTES + logical_bytes(batch))
        self._waiting.append(kept)
        self.bytes += kept.nbytes

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
