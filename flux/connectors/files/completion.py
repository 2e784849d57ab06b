"""The wait until files are complete, as a state machine: time and sightings of files come in (design: files-that-come).

A file has to rest, unchanged, for ``settle_s``. Then its format tells whether the file lacks anything. A file that lacks
something is looked at again when it has changed, and now and then besides. It is bad when it has not changed for
``bad_after_s``.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from flux.connectors.files.listing import FoundFile

#: Seconds between two looks at an incomplete file that seems unchanged, and between two warnings of it in the log: some file
#: systems show size and time late.
AGAIN_S = 60.0
#: Reports name a file that has been incomplete for this long: most files are incomplete for a moment.
SHOWN_S = 5.0


@dataclass
class _Waiting:
    """A file that is not known to be complete."""

    found: FoundFile
    since: float  # when it was first seen in this state
    due: float  # when it is to be looked at
    lacks: str = ""
    told: bool = False


class Completion:
    """The files of a folder that are not known to be complete, and the times at which they are to be looked at."""

    def __init__(self, settle_s: float, bad_after_s: float) -> None:
        self._settle_s, self._bad_after_s = settle_s, bad_after_s
        self._waiting: dict[str, _Waiting] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, names: Container[str]) -> None:
        """Forget files that are gone."""
        for gone in [name for name in self._waiting if name not in names]:
            del self._waiting[gone]

    def forget(self, name: str) -> None:
        self._waiting.pop(name, None)

    def is_due(self, found: FoundFile, now: float) -> bool:
        """Take in a file that is there; return whether it has to be looked at."""
        self._now = now
        waiting = self._waiting.get(found.name)
        if waiting is None or waiting.found != found:
            waiting = self._waiting[found.name] = _Waiting(found, now, now + self._settle_s)
        return now >= waiting.due

    def note(self, name: str, lacks: str, now: float) -> bool:
        """Note the defect of a file that is not complete; return whether this is worth a warning."""
        waiting = self._waiting[name]
        waiting.lacks = lacks
        bad_at = waiting.since + self._bad_after_s
        waiting.due = min(now + AGAIN_S, bad_at) if now < bad_at else now + AGAIN_S
        warns = not waiting.told and now - waiting.since >= AGAIN_S
        waiting.told |= warns
        return warns

    def bad(self, now: float) -> dict[FoundFile, str]:
        """Return files that have not changed for too long, each with its defect."""
        return {
            waiting.found: waiting.lacks
            for waiting in self._waiting.values()
            if waiting.lacks and now - waiting.since >= self._bad_after_s
        }

    def lacking(self) -> dict[str, str]:
        """Return the defects of files that have been incomplete for a while, by name."""
        return {
            name: waiting.lacks
            for name, waiting in self._waiting.items()
            if waiting.lacks and self._now - waiting.since >= SHOWN_S
        }
