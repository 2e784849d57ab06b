"""Deltas, the changes of a state from cut to cut, for standbys: for each standby, the checkpoint to which the next changes of its
primary apply (design: changes).

A cut is a moment between two steps at which the operator was asked for its changes since the cut before. Several standbys, and
the vault among them, have checkpoints of different cuts. A standby with that of cut j gets the changes of all cuts after j.

Law: changes that are sent for a checkpoint are those since that very checkpoint was taken, by this primary in this term, and
they are sent only to a standby that has said that it has it. If this is not known, a whole checkpoint is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from flux.wire.parts import PartLimits


@dataclass
class StandbyCheckpoint:
    """The newest checkpoint of a standby, as its primary sees it: a whole one, and changes after it."""

    #: That of the standby.
    incarnation: int
    #: That of the newest copy, whole or changes, and of the cut at which it was taken.
    number: int
    cut: int
    #: Bytes of the whole checkpoint.
    whole: int
    #: Limits of the changes after it.
    limits: PartLimits
    #: Bytes of all changes after it, their number, and bytes of the last ones.
    changes: int = 0
    count: int = 0
    newest: int = 0
    #: The standby has said that it has the newest copy.
    confirmed: bool = False

    @property
    def room(self) -> int:
        """Bytes that further changes may have."""
        limits = self.limits
        return int(self.whole * limits.changes_share) - self.changes if self.count < limits.changes_max else 0


class DeltaTracker:
    """The cuts of one replica, while it leads. ``cut`` is the number of the newest one."""

    def __init__(self) -> None:
        self.cut = 0
        self._term = -1
        self._limits = PartLimits()
        self._held: dict[int, StandbyCheckpoint] = {}
        self._changes: deque[memoryview] = deque()  # of the newest cuts, as far as any standby may need them

    @property
    def nbytes(self) -> int:
        """Bytes of the changes that are kept."""
        return sum(changes.nbytes for changes in self._changes)

    @property
    def wanted(self) -> bool:
        """The changes of the next cut may be of use."""
        return bool(self._held)

    def follow(self, term: int, standbys: Mapping[int, int], limits: PartLimits) -> None:
        """Lead in this term, with these standbys: worker -> incarnation. Other standbys are forgotten."""
        self._limits = limits
        if term != self._term:
            self._term = term
            self._held.clear()
        for worker, held in list(self._held.items()):
            if standbys.get(worker) != held.incarnation:
                del self._held[worker]
        self._trim()

    def base(self, worker: int) -> StandbyCheckpoint | None:
        """Return the checkpoint of a standby to which it may get changes. None: it gets a whole one."""
        held = self._held.get(worker)
        return held if held is not None and held.confirmed and held.room > 0 else None

    def expected(self, worker: int, whole: int) -> int:
        """Estimate the bytes of the next checkpoint of a standby. ``whole`` are those of the state."""
        held = self.base(worker)
        return whole if held is None or not held.count else held.newest

    def since(self, held: StandbyCheckpoint) -> list[memoryview]:
        """Return the changes of all cuts after that of a checkpoint, in their order."""
        after = self.cut - held.cut
        assert after <= len(self._changes), (
            f"changes since cut {held.cut} of {self.cut} are wanted, {len(self._changes)} are kept"
        )
        return list(self._changes)[len(self._changes) - after :]

    def add(self, changes: memoryview | None) -> None:
        """Add a cut, with the changes since the one before. None: they are not known."""
        self.cut += 1
        if changes is None:
            self._held.clear()
        else:
            self._changes.append(changes)
            for worker, held in list(self._held.items()):
                if sum(each.nbytes for each in self.since(held)) > max(held.room, 0):
                    del self._held[worker]  # a whole checkpoint is not much larger
        self._trim()

    def sent_whole(self, worker: int, incarnation: int, number: int, nbytes: int) -> None:
        """Note that a whole checkpoint of the newest cut is on its way."""
        self._held[worker] = StandbyCheckpoint(incarnation, number, self.cut, nbytes, self._limits)
        self._trim()

    def sent_changes(self, worker: int, number: int, nbytes: int) -> None:
        """Note that changes since the checkpoint of a standby, up to the newest cut, are on their way."""
        held = self._held[worker]
        held.number, held.cut, held.confirmed = number, self.cut, False
        held.changes, held.count, held.newest = held.changes + nbytes, held.count + 1, nbytes
        self._trim()

    def confirm(self, worker: int, number: int) -> None:
        """Note that a standby has the checkpoint of this number."""
        held = self._held.get(worker)
        if held is not None and held.number == number:
            held.confirmed = True

    def forget(self, worker: int) -> None:
        """Forget the checkpoint that a standby was thought to have and lacks."""
        self._held.pop(worker, None)
        self._trim()

    def _trim(self) -> None:
        needed = max((self.cut - held.cut for held in self._held.values()), default=0)
        while len(self._changes) > needed:
            self._changes.popleft()

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        for worker, held in self._held.items():
            assert self.cut - len(self._changes) <= held.cut <= self.cut, (
                f"worker {worker} has cut {held.cut}, kept are {len(self._changes)} up to {self.cut}"
            )
