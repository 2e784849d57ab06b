"""The order log that keeps the replicas of a partition identical, as a state machine without I/O (DESIGN 4).

Law: a step is committed when every live replica has received its entry. What is committed survives: any live replica
can go on from there and do the same. What a secondary has received beyond that may be cut by the next primary.

The primary appends entries and counts acks; a secondary follows. Entries are kept until they are applied here and
nobody else can need them from here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flux.messages import Entry


@dataclass
class Peer:
    """Another replica, as its primary sees it. ``acked``: it has received all entries below; None: it has no state yet.
    ``applied``: steps that it has applied; ``checked``: steps below have been compared; ``copied_at``: steps that its
    copy of the state had; ``reported``, ``safe``: what the controller has been told; ``stall_ms``: how long the copy took."""

    incarnation: int
    live: bool
    acked: int | None
    sent: int
    sent_at: float = -1.0
    heard_commit: int = -1
    applied: int = 0
    checked: int = 0
    copied_at: int = 0
    reported: bool = False
    safe: bool = False
    stall_ms: float = 0.0


class OrderLog:
    """Entries ``base`` .. ``end`` - 1. ``committed``: all entries below are committed, as far as is known here."""

    def __init__(self, start: int = 0) -> None:
        self.base = start
        self.committed = start
        self.heard_epoch = -1
        self.peers: dict[int, Peer] = {}
        self._entries: deque[Entry] = deque()

    @property
    def end(self) -> int:
        return self.base + len(self._entries)

    def __getitem__(self, step: int) -> Entry:
        assert self.base <= step < self.end, (self.base, step, self.end)
        return self._entries[step - self.base]

    def since(self, step: int) -> list[Entry]:
        return [self[number] for number in range(max(step, self.base), self.end)]

    # ---- the primary's side

    def lead(self, peers: dict[int, tuple[int, bool]], applied: int) -> None:
        """Be primary with these other replicas: worker -> (incarnation, live). Known ones keep what they have acked."""
        known, self.peers = self.peers, {}
        for worker, (incarnation, live) in peers.items():
            peer = known.get(worker)
            if peer is not None and peer.incarnation == incarnation:
                # Every new table is answered anew, also where there is no step to tell of.
                peer.live, peer.reported, peer.safe, peer.heard_commit = live, False, False, -1
            else:
                # A live replica has received everything committed; one that is not live waits for its copy of state.
                start = self.committed if live else None
                peer = Peer(incarnation, live, start, start if start is not None else 0, checked=applied)
            self.peers[worker] = peer
        self._commit()

    def follow(self) -> None:
        self.peers = {}

    def copied(self, worker: int, applied: int) -> None:
        """A copy of the state after ``applied`` steps is on its way to a new replica. It may be the second one: which of
        them arrives is not known, so entries are kept and sent from the first on."""
        peer = self.peers[worker]
        if peer.acked is None:
            peer.acked = peer.applied = peer.checked = applied
        peer.sent = peer.acked
        peer.copied_at = applied
        peer.heard_commit = -1  # ask, even if there is no step to tell of

    def append(self, entry: Entry) -> int:
        self._entries.append(entry)
        self._commit()
        return self.end - 1

    def on_seen(self, worker: int, incarnation: int, through: int) -> bool:
        """A replica has received all entries below ``through``. False: the ack is of another life."""
        peer = self.peers.get(worker)
        if peer is None or peer.incarnation != incarnation or peer.acked is None:
            return False
        peer.acked = max(peer.acked, min(through, self.end))
        if through < peer.sent and through <= peer.acked:
            peer.sent = max(peer.acked, through)  # something was lost on the way
        self._commit()
        return True

    def _commit(self) -> None:
        acks = [peer.acked for peer in self.peers.values() if peer.live]
        reached = min([self.end, *(ack for ack in acks if ack is not None)])
        self.committed = max(self.committed, reached)

    def trim(self, applied: int) -> None:
        """Forget what is applied and nobody can ask for: as primary what all have acked, else what is committed."""
        needed = [peer.acked for peer in self.peers.values() if peer.acked is not None]
        limit = min([applied, self.committed, *needed])
        while self.base < limit:
            self._entries.popleft()
            self.base += 1

    # ---- a secondary's side

    def adopt(self, entries: list[Entry], committed: int) -> None:
        """Start as the copy of another replica's log, which had not applied these entries yet."""
        self._entries.extend(entries)
        self.committed = committed

    def on_orders(self, epoch: int, first: int, entries: list[Entry], committed: int, end: int, applied: int) -> bool:
        """Take entries from a primary that speaks in ``epoch``; ``end`` is the end of its log. False: it is deposed."""
        if epoch < self.heard_epoch:
            return False
        if epoch > self.heard_epoch:
            self.heard_epoch = epoch
            # What goes beyond the new primary's log was never committed, hence never applied.
            self._cut(max(end, applied))
        if first <= self.end:
            for step, entry in enumerate(entries, first):
                if step == self.end:
                    self._entries.append(entry)
                elif step >= max(self.base, applied):
                    self._entries[step - self.base] = entry
        self.committed = max(self.committed, min(committed, self.end))
        return True

    def _cut(self, end: int) -> None:
        while self.end > end and self._entries:
            self._entries.pop()
