"""Since which checkpoint a primary has to tell each of its standbys what has changed (design: changes).

A cut is a moment between two steps at which the operator was asked for its changes: those since the cut before. Several standbys,
and the vault among them, have checkpoints of different cuts. Who has that of cut j gets the changes of all cuts after j.

Law: what is sent as changes to a checkpoint is what has changed since that very checkpoint was taken, by this primary in this
term, and only to who has said that it has it. Where this is not known, a whole checkpoint is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from flux.replicas.parts import Limits


@dataclass
class Held:
    """The newest checkpoint of a standby, as its primary sees it. ``number`` of the copy, and its ``cut``; ``confirmed``: the
    standby has said that it has it. ``whole``: bytes of the newest one that was whole; ``changes``: bytes, and ``count``, of
    those after it; ``newest``: bytes of the last one; ``limits`` of all of them."""

    incarnation: int
    number: int
    cut: int
    whole: int
    limits: Limits
    changes: int = 0
    count: int = 0
    newest: int = 0
    confirmed: bool = False

    @property
    def room(self) -> int:
        """Bytes that further changes may have."""
        limits = self.limits
        return int(self.whole * limits.changes_share) - self.changes if self.count < limits.changes_max else 0


class Cuts:
    """Of one replica, while it leads. ``cut``: number of the newest one."""

    def __init__(self) -> None:
        self.cut = 0
        self._term = -1
        self._limits = Limits()
        self._held: dict[int, Held] = {}
        self._changes: deque[memoryview] = deque()  # of the newest cuts, as far as anybody may need them

    @property
    def nbytes(self) -> int:
        """Of the changes that are kept."""
        return sum(changes.nbytes for changes in self._changes)

    @property
    def wanted(self) -> bool:
        """Whether the changes of the next cut may be of use."""
        return bool(self._held)

    def follow(self, term: int, standbys: Mapping[int, int], limits: Limits) -> None:
        """Lead in this term, with these standbys: worker -> incarnation. What was known of others is forgotten."""
        self._limits = limits
        if term != self._term:
            self._term = term
            self._held.clear()
        for worker, held in list(self._held.items()):
            if standbys.get(worker) != held.incarnation:
                del self._held[worker]
        self._trim()

    def base(self, worker: int) -> Held | None:
        """The checkpoint that a standby has and to which it may get changes. None: it gets a whole one."""
        held = self._held.get(worker)
        return held if held is not None and held.confirmed and held.room > 0 else None

    def expected(self, worker: int, whole: int) -> int:
        """About how many bytes the next checkpoint of a standby will have. ``whole``: bytes of the state."""
        held = self.base(worker)
        return whole if held is None or not held.count else held.newest

    def since(self, held: Held) -> list[memoryview]:
        """The changes of all cuts after that of a checkpoint, in their order."""
        after = self.cut - held.cut
        assert after <= len(self._changes), (
            f"changes since cut {held.cut} of {self.cut} are wanted, {len(self._changes)} are kept"
        )
        return list(self._changes)[len(self._changes) - after :]

    def add(self, changes: memoryview | None) -> None:
        """A cut was made, and these are the changes since the one before. None: they are not known."""
        self.cut += 1
        if changes is None:
            self._held.clear()
        else:
            self._changes.append(changes)
            for worker, held in list(self._held.items()):
                if sum(each.nbytes for each in self.since(held)) > max(held.room, 0):
                    del self._held[worker]  # a whole checkpoint is not much more
        self._trim()

    def sent_whole(self, worker: int, incarnation: int, number: int, nbytes: int) -> None:
        """A whole checkpoint of the newest cut is on its way."""
        self._held[worker] = Held(incarnation, number, self.cut, nbytes, self._limits)
        self._trim()

    def sent_changes(self, worker: int, number: int, nbytes: int) -> None:
        """Changes since the checkpoint that a standby has, up to the newest cut, are on their way."""
        held = self._held[worker]
        held.number, held.cut, held.confirmed = number, self.cut, False
        held.changes, held.count, held.newest = held.changes + nbytes, held.count + 1, nbytes
        self._trim()

    def confirm(self, worker: int, number: int) -> None:
        """A standby has the checkpoint of this number."""
        held = self._held.get(worker)
        if held is not None and held.number == number:
            held.confirmed = True

    def forget(self, worker: int) -> None:
        """A standby lacks the checkpoint that it was held to have."""
        self._held.pop(worker, None)
        self._trim()

    def _trim(self) -> None:
        needed = max((self.cut - held.cut for held in self._held.values()), default=0)
        while len(self._changes) > needed:
            self._changes.popleft()

    def validate(self) -> None:
        """What holds between any two events. AssertionError says what does not."""
        for worker, held in self._held.items():
            assert self.cut - len(self._changes) <= held.cut <= self.cut, (
                f"worker {worker} has cut {held.cut}, kept are {len(self._changes)} up to {self.cut}"
            )
