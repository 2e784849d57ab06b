"""Running checksums of a replica's output, by which it is compared with the others (design: divergence)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from flux.errors import QueryFailed
from flux.replica.order_log import Peer

#: Checksums that are kept in any case, for a replica that may become primary. A primary keeps all with which another replica
#: has not been compared yet, however far that is behind: the bound on the order log is theirs as well.
CHECKSUMS_KEPT = 1024


class OutputChecksums:
    """The checksums of the newest steps, one after each without a gap. ``steps`` were applied when the newest was noted."""

    def __init__(self, steps: int = 0, newest: int | None = None) -> None:
        """Begin after ``steps`` steps, with the checksum after these, if it is known."""
        self.steps = steps if newest is not None else 0
        self._kept: deque[int] = deque(() if newest is None else (newest,))

    @property
    def newest(self) -> int:
        return self._kept[-1] if self._kept else 0

    def at(self, steps: int) -> int | None:
        """Return the checksum of the output of the first ``steps`` steps; None: it is not there yet, or long gone."""
        ago = self.steps - steps
        return self._kept[-1 - ago] if 0 <= ago < len(self._kept) else None

    def note(self, steps: int, checksum: int) -> bool:
        """Note the checksum after a step, and tell whether there are more than are kept in any case."""
        self.steps = steps
        self._kept.append(checksum)
        return len(self._kept) > CHECKSUMS_KEPT

    def forget(self, peers: Iterable[Peer]) -> None:
        """Forget the checksums with which every other replica has been compared, or never will be, because its copy of the
        state is still to be taken."""
        known = (peer.checked for peer in peers if peer.acked is not None and peer.kind.applies)
        compared = min(known, default=self.steps)
        while len(self._kept) > CHECKSUMS_KEPT and self.steps - len(self._kept) < compared:
            self._kept.popleft()

    def validate(self, applied: int) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        assert not self._kept or self.steps == applied, f"the newest is that of {self.steps} steps of {applied}"


def other_output(where: str, steps: int) -> QueryFailed:
    """Make the error for steps that were repeated after a loss, and whose output differs from the lost primary's statement."""
    return QueryFailed(
        f"{where}: the steps through {steps - 1} were repeated after a loss and gave other output than before, some of which may "
        "have been shown: the operator is not deterministic. Take times from context.now, use no random numbers, and nothing "
        "from sets or from outside whose order or content may be another the next time"
    )
