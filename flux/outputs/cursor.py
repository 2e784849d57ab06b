"""The place of a reader in an output (design: output-cursor)."""

from __future__ import annotations

import re
from typing import NamedTuple

from flux.errors import FluxError, UsageError

_CURSOR = re.compile(r"([0-9a-f]{32})-([0-9]{1,19}(?:\.[0-9]{1,19}){0,63})", re.ASCII)
#: Places without a cursor: the oldest row that is there, and the row that comes next.
OLDEST, NEWEST = "oldest", "newest"


class CursorGone(FluxError):
    """Refusal of a cursor of another output that had the same name."""


class OutputCursor(NamedTuple):
    """The rows that a reader has: in each partition those below a position. Its text is opaque to readers, and fits into a
    header and a URL."""

    #: The id of the output's registration.
    output: str
    #: By partition, the position of the next row.
    positions: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.output}-{'.'.join(map(str, self.positions))}"

    def at(self, partition: int, position: int) -> OutputCursor:
        """Return the cursor with another position in one partition."""
        return self._replace(positions=(*self.positions[:partition], position, *self.positions[partition + 1 :]))


def cursor_of(text: str, output: str, partitions: int) -> OutputCursor:
    """Return the cursor with this text. UsageError: no output has given it; CursorGone: an output that is gone has."""
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise UsageError(f"after: expected a cursor from an answer, {OLDEST!r} or {NEWEST!r}; got {text!r:.120}")
    if found[1] != output:
        raise CursorGone(
            "the cursor is of a query that had this name before and was removed: its rows are gone, and the new ones have "
            f"other positions. Begin with after={OLDEST}"
        )
    positions = tuple(map(int, found[2].split(".")))
    if len(positions) != partitions or max(positions) >= 1 << 62:
        raise UsageError(f"after: expected a cursor with {partitions} positions below 2^62; got {text!r:.120}")
    return OutputCursor(output, positions)
