"""The order log that keeps the replicas of a partition identical, as a state machine without I/O (design: order-log, commit).

Law: a step is committed when every live replica has received its entry; a sole secondary knows that itself, and need not be
told. Committed steps survive: any live replica can go on from there and do the same. Further entries of a secondary may be cut
by the next primary.

The primary appends entries and counts acks; a secondary follows. Entries are kept until they are applied here and no other
replica can need them from here. A primary's ``term`` is the epoch in which it became primary: there is one primary per term,
and an ack speaks of the log of one term only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from flux.replica.kinds import AckMeaning, ReplicaKind, kind_of
from flux.wire.messages import OrderEntry
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt


class OrderClaim(NamedTuple):
    """A replica's claim that the output of the first ``steps`` steps of a partition has this checksum."""

    steps: int
    checksum: int


NO_CLAIM = OrderClaim(0, 0)


@dataclass
class Peer:
    """Another replica of the partition, as its primary sees it."""

    kind: ReplicaKind
    incarnation: int
    live: bool
    #: Nothing is committed without its ack.
    votes: bool
    #: It has received all entries below this; None: it has no state yet.
    acked: int | None
    #: Entries below this are on their way to it.
    sent: int
    #: Committed steps of which it is being told.
    told: int = -1
    #: It has answered in this term.
    greeted: bool = False
    #: It may take all entries below this for committed when it has them.
    promised: int = 0
    #: Steps that it has applied.
    applied: int = 0
    #: Steps below this have given the same output.
    checked: int = 0
    #: Its claim about a step that this primary has not reached yet.
    claim: OrderClaim | None = None
    #: Steps that its copy of the state had.
    copied_at: int = 0
    #: Committed steps when it first answered after its copy.
    live_at_step: int | None = None
    #: Time of that answer.
    live_at_since: float = 0.0
    #: The controller has been told that it has caught up.
    caught_up_reported: bool = False
    #: The controller has been told that it is safe.
    safe: bool = False
    #: Time of the stall for its copy.
    stall_ms: float = 0.0
    #: Size of its copy.
    copy_bytes: int = 0
    #: Its copy is under way, and orders would come too early.
    copying: bool = False
    #: It knows that positions below this have left the dataflow.
    left: int = 0
    #: It is not told of ``left`` alone before this time.
    left_at: float = 0.0
    heard: tuple[int, int] = (-1, -1)  # acked and applied when they last moved
    since: float = 0.0  # time of that, or when it last owed nothing
    applied_as_told: int = -1  # when the controller was last told of the replicas here
    #: Its ack when it last moved, or when it last owed no answer to an order, and the time of that.
    unseen: tuple[int, float] = (-1, 0.0)

    def overdue(self, end: int, committed: int, now: float, again_s: float) -> bool:
        """Tell whether it owes an answer for such a time that a message must have been lost."""
        assert self.acked is not None
        answered = (self.safe if self.live else self.caught_up_reported) and self.claim is None
        heard = (self.acked, self.applied)
        if heard != self.heard or (self.acked >= end and self.applied >= committed and answered):
            self.heard, self.since = heard, now
        return now - self.since >= again_s

    def look(self, now: float) -> None:
        """Note whether it owes an answer to orders that were sent, and has acked none since the last look. Call it before
        others are sent."""
        assert self.acked is not None
        if self.acked != self.unseen[0] or self.acked >= self.sent:
            self.unseen = self.acked, now

    @property
    def catching_up(self) -> bool:
        """It has the order, and still has to apply the steps that came while its state was copied."""
        return self.live_at_step is not None and not self.live and not self.caught_up_reported

    def wants_left(self, left: int, now: float) -> bool:
        """Tell whether it is to be told that positions below ``left`` have left, if there is nothing else to say."""
        return left > self.left and self.kind.commits and now >= self.left_at

    def send_again(self, now: float) -> None:
        assert self.acked is not None
        self.sent, self.told, self.since = self.acked, -1, now


class Heard(IntEnum):
    """The meaning of a primary's orders for the log of another replica."""

    #: They are of an earlier primary. The only false one.
    DEPOSED = 0
    #: They have nothing that is not in the log.
    KNOWN = 1
    NEWS = 2


#: Under module names, because they are looked up for each message.
_DEPOSED, _KNOWN, _NEWS = Heard


class OrderLog:
    """The order log of one replica: entries ``base`` to ``end`` - 1."""

    def __init__(self, start: int = 0) -> None:
        self.base = start
        self.end = start
        #: All entries below are committed, as far as is known here.
        self.committed = start
        #: The epoch in which the primary that this log follows became primary.
        self.term = -1
        #: As a secondary: entries below are those of the primary of ``term``; beyond may lie entries of an earlier one, kept
        #: because they may have been committed.
        self.verified = start
        #: As primary: entries below were promised to replicas that are gone since.
        self.promised = start
        #: As primary: steps that every other replica that applies any has applied, by their answers; None: none has answered.
        self.slowest: int | None = None
        #: Steps that are in the state of every other replica.
        self._applied_by_all: int | None = None
        #: A live replica that keeps checkpoints has not said in this term how far they go.
        self.unanswered = False
        #: The first step that is in the longest log of this partition: in this one, or in that of a replica that has received the
        #: order and whose state is behind.
        self.oldest = start
        #: Number of entries thrown away because a new primary had others.
        self.cut = 0
        self.peers: dict[int, Peer] = {}
        self._entries: deque[OrderEntry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, step: int) -> OrderEntry:
        assert self.base <= step < self.end, (self.base, step, self.end)
        return self._entries[step - self.base]

    def since(self, step: int) -> list[OrderEntry]:
        return list(islice(self._entries, max(step - self.base, 0), None))

    def ordered_below(self, stream: StreamId) -> int:
        """Return the end of the elements of a stream that are in its entries; 0: there are none."""
        for entry in reversed(self._entries):
            for edge, producer, through in entry.slices:
                if (edge, producer) == stream:
                    return through + 1
        return 0

    def ordered_end(self, stream: StreamId) -> int:
        """Return the number of the end of a stream of source rows if a step in its entries has it; -1: none has.

        The end is a step of its own, and the only one without rows. Nothing of the stream is ordered behind it."""
        for entry in reversed(self._entries):
            for edge, producer, through in entry.slices:
                if (edge, producer) == stream:
                    return through if entry.rows == 0 else -1
        return -1

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        assert self.base + len(self._entries) == self.end, "entries are those from base to end"
        assert self.committed <= self.end, f"{self.committed} committed of {self.end}"
        assert self.verified <= self.end, f"{self.verified} verified of {self.end}"
        if len(self._entries) > 1:
            assert self._entries[-2].now <= self._entries[-1].now, "time never goes back"
        for worker, peer in self.peers.items():
            assert peer.sent <= self.end, f"worker {worker} was sent {peer.sent} of {self.end}"
            if peer.acked is not None:
                assert peer.acked <= self.end, f"worker {worker} has acked {peer.acked} of {self.end}"
                assert self.base <= peer.acked, f"worker {worker} needs step {peer.acked}, which is gone"

    # ---- the primary's side

    def lead(self, others: Iterable[ReplicaAt], applied: int) -> None:
        """Be primary with these other replicas. Known ones keep their acks."""
        # Only a safe replica leads: everything in its copy of the state is committed, even if no primary has told it yet.
        self.committed = max(self.committed, self.base)
        known, self.peers = self.peers, {}
        for other in others:
            kind, peer = kind_of(other), known.get(other.worker)
            votes = other.live and kind.commits
            if peer is not None and peer.incarnation == other.incarnation:
                peer.live, peer.votes = other.live, votes
            else:
                # A live replica has received everything committed; one that is not live may wait for its copy of state.
                start = self.committed if other.live or not kind.copies else None
                sent = start if start is not None else 0
                # Replicas are compared from the present step of this one on, that step included: there may be no other for
                # long.
                compared = max(applied - 1, 0)
                peer = Peer(kind, other.incarnation, other.live, votes, start, sent, checked=compared)
            self.peers[other.worker] = peer
        gone = [peer.promised for worker, peer in known.items() if self.peers.get(worker) is not peer]
        self.promised = max([self.promised, *gone])
        self._note_slowest()
        self.report_again()
        self._commit()

    def follow(self) -> None:
        self.peers = {}
        self._note_slowest()

    def report_again(self) -> None:
        """Report to the controller once more which replicas have caught up, are safe or give other output, also if nothing else
        happens."""
        for peer in self.peers.values():
            peer.caught_up_reported, peer.safe, peer.told = False, False, -1

    def ask_again(self) -> None:
        """Ask all other replicas for their progress, also if there is nothing new to tell them."""
        for peer in self.peers.values():
            peer.told = -1

    def note_copy(self, worker: int, applied: int) -> None:
        """Note that a copy of the state after ``applied`` steps is taken for a new replica: later orders are kept for it, and
        sent when the copy has arrived.

        It may be the second copy. It is not known which copy arrives, so entries are kept and sent from the first on."""
        peer = self.peers[worker]
        if peer.acked is None:
            peer.acked = peer.applied = peer.checked = applied
        peer.sent = peer.acked
        peer.copied_at = applied
        peer.copying = True

    def note_copy_arrived(self, worker: int) -> None:
        """Note that the copy of the state has arrived."""
        self.peers[worker].copying = False

    def alone(self, peer: Peer) -> bool:
        """Tell whether an entry is committed when this replica has received it: it is the only other replica that counts, and
        has no entries of an earlier term that it could take for these."""
        return peer.votes and peer.greeted and sum(other.votes for other in self.peers.values()) == 1

    def promise(self, peer: Peer, below: int) -> int:
        """Promise the only other live replica that entries ``below`` are committed as soon as it has them. Another one that
        becomes live must have them, too, before it counts: see ``settled``."""
        peer.promised = max(peer.promised, below)
        return below

    def settled(self, peer: Peer) -> bool:
        """Tell whether a replica that has all committed entries also has all entries that another replica takes for committed,
        and no uncommitted step in its copy of the state."""
        assert peer.acked is not None
        promised = max([self.promised, *(other.promised for other in self.peers.values() if other is not peer)])
        return self.committed >= peer.copied_at and peer.acked >= promised

    @property
    def behind(self) -> int:
        """Steps that the slowest of the other replicas has not applied, as far as they have answered."""
        return 0 if self.slowest is None else self.end - self.slowest

    def _note_slowest(self) -> None:
        greeted = [peer for peer in self.peers.values() if peer.greeted]
        self.slowest = min((peer.applied for peer in greeted if peer.kind.applies), default=None)
        self._applied_by_all = min((peer.applied for peer in greeted), default=None)
        self.unanswered = any(
            peer.live and not peer.greeted and peer.kind.acks is AckMeaning.CHECKPOINT for peer in self.peers.values()
        )
        self._note_oldest()

    def _note_oldest(self) -> None:
        self.oldest = (
            self.base if self._applied_by_all is None or self._applied_by_all > self.base else self._applied_by_all
        )

    @property
    def untold(self) -> bool:
        """A replica has not been told everything."""
        for peer in self.peers.values():
            if peer.acked is not None and not peer.copying and (peer.sent < self.end or peer.told < self.committed):
                return True
        return False

    def append(self, entry: OrderEntry) -> int:
        self._entries.append(entry)
        self.end += 1
        self._commit()
        return self.end - 1

    def on_seen(self, worker: int, incarnation: int, below: int, applied: int = 0) -> bool:
        """Take an ack: a replica has received all entries ``below`` and has taken ``applied`` steps. False: the ack is of
        another life."""
        peer = self.peers.get(worker)
        if peer is None or peer.incarnation != incarnation or peer.acked is None:
            return False
        peer.acked = max(peer.acked, min(below, self.end))
        peer.greeted = True
        peer.applied = max(peer.applied, applied)
        self._note_slowest()
        self._commit()
        return True

    def _commit(self) -> None:
        reached = self.end
        for peer in self.peers.values():
            if peer.votes and peer.acked is not None and peer.acked < reached:
                reached = peer.acked
        if reached > self.committed:
            self.committed = reached

    def trim(self, applied: int) -> None:
        """Forget entries that are applied and that no replica can ask for: as primary those that all have acked, else the
        committed ones."""
        limit = min(applied, self.committed)
        if self.base >= limit:
            return
        for peer in self.peers.values():
            if peer.acked is not None and peer.acked < limit:
                limit = peer.acked
        while self.base < limit:
            self._entries.popleft()
            self.base += 1
        self._note_oldest()

    # ---- a secondary's side

    @classmethod
    def copied_from(cls, start: int, entries: list[OrderEntry], committed: int) -> OrderLog:
        """Make the copy of another replica's log, which had applied ``start`` steps, but not these entries yet."""
        made = cls(start)
        made.adopt(entries, committed)
        return made

    def adopt(self, entries: list[OrderEntry], committed: int) -> None:
        """Start as the copy of another replica's log, which had not applied these entries yet."""
        self._entries.extend(entries)
        self.end += len(entries)
        self.committed = committed

    def on_orders(self, term: int, first: int, entries: list[OrderEntry], committed: int, applied: int) -> Heard:
        """Take entries ``first``, ... from the primary of ``term``, in whose log ``committed`` are committed.

        Entries of an earlier primary are cut only where this one has others in their place: until then they may be committed
        and known to the outside, and this replica may be the next primary."""
        if term < self.term:
            return _DEPOSED
        heard = _KNOWN
        if term > self.term:
            self.term, heard = term, _NEWS
            # Every primary has all committed entries. No others can be committed while this live replica has not acked them.
            self.verified = max(applied, self.committed, min(committed, self.end))
        if first <= self.verified:
            for step, entry in enumerate(entries, first):
                if step >= max(self.base, applied):
                    self._take(step, entry)
            end = first + len(entries)
            if end > self.verified:
                self.verified, heard = end, _NEWS
        if committed > self.committed < self.verified:
            self.committed, heard = min(committed, self.verified), _NEWS
        return heard

    def _take(self, step: int, entry: OrderEntry) -> None:
        if step < self.end and self[step] != entry:
            assert step >= self.committed, f"a new primary contradicts step {step}, which is committed"
            while self.end > step:
                self._entries.pop()
                self.end -= 1
                self.cut += 1
        if step == self.end:
            self._entries.append(entry)
            self.end += 1


class OwnOrder(OrderLog):
    """The order of a replica that shares it with no other (design: independent): each step is committed at once, and no entry is
    kept for another replica. As the first in the table the replica has peers all the same, and asks them whether they have come
    to life: their ``applied`` is the number of batches of output."""

    def lead(self, others: Iterable[ReplicaAt], applied: int) -> None:
        """Know these other replicas. Their output is compared from the first batch on that both have checksums of."""
        known = set(self.peers)
        super().lead(others, applied)
        for worker in self.peers.keys() - known:
            self.peers[worker].checked = 0

    def note_copy(self, worker: int, applied: int) -> None:
        """Note that a copy of the state is taken for a new replica."""
        super().note_copy(worker, applied)
        self.peers[worker].checked = self.peers[worker].applied = 0

    def settled(self, peer: Peer) -> bool:
        """Return True: a copy of the state has no step that is not committed."""
        return True

    def alone(self, peer: Peer) -> bool:
        return False

    @property
    def untold(self) -> bool:
        return False

    def on_seen(self, worker: int, incarnation: int, below: int, applied: int = 0) -> bool:
        """Take the answer of another replica, which has given ``applied`` batches. False: it is of another life."""
        peer = self.peers.get(worker)
        if peer is None or peer.incarnation != incarnation or peer.acked is None:
            return False
        peer.acked, peer.greeted, peer.applied = self.end, True, max(peer.applied, applied)
        return True

    def _note_slowest(self) -> None:
        self.oldest = self.base

    def _commit(self) -> None:
        self.committed = self.end

    def trim(self, applied: int) -> None:
        for peer in self.peers.values():
            if peer.acked is not None:
                peer.acked = peer.sent = self.end
        super().trim(applied)
