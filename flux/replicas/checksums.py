"""Running checksums of a replica's output, by which it is compared with the others (design: divergence)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from flux.errors import QueryFailed
from flux.replicas.order import Peer

#: Kept in any case: for a replica that may become primary. A primary keeps those that another replica has not been compared
#: with, however far that is behind: the bound on the order log is theirs as well.
CHECKSUMS_KEPT = 1024


class Checksums:
    """Of the newest steps, one after each without a gap. ``steps``: applied when the newest was noted."""

    def __init__(self) -> None:
        self.steps = 0
        self._kept: deque[int] = deque()

    @property
    def newest(self) -> int:
        return self._kept[-1] if self._kept else 0

    def at(self, steps: int) -> int | None:
        """Checksum of the output of the first ``steps`` steps; None: not there yet, or long ago."""
        ago = self.steps - steps
        return self._kept[-1 - ago] if 0 <= ago < len(self._kept) else None

    def note(self, steps: int, checksum: int) -> bool:
        """After a step. Whether there are more than are kept in any case."""
        self.steps = steps
        self._kept.append(checksum)
        return len(self._kept) > CHECKSUMS_KEPT

    def forget(self, peers: Iterable[Peer]) -> None:
        """Those that every other replica has been compared with, or will never be: its copy of the state is still to be
        taken."""
        known = (peer.checked for peer in peers if peer.acked is not None and peer.kind.applies)
        compared = min(known, default=self.steps)
        while len(self._kept) > CHECKSUMS_KEPT and self.steps - len(self._kept) < compared:
            self._kept.popleft()

    def validate(self, applied: int) -> None:
        """What holds between any two events. AssertionError says what does not."""
        assert not self._kept or self.steps == applied, f"the newest is that of {self.steps} steps of {applied}"


def other_output(where: str, steps: int) -> QueryFailed:
    """The first ``steps`` steps were repeated after a loss, and differ from what the lost primary has said of them."""
    return QueryFailed(
        f"{where}: the steps through {steps - 1} were repeated after a loss and gave other output than before, some of which may "
        "have been shown: the operator is not deterministic. Take times from context.now, use no random numbers, and nothing "
        "from sets or from outside whose order or content may be another the next time"
    )
