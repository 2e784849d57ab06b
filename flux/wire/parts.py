"""Bytes on their way to another worker in parts, of which a few are under way at the same time (design: copy-in-parts).

They end with a code (HMAC) under the query's secret, which may come later than they do: it is computed while they travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from flux.wire.handshake import MAC_BYTES


@dataclass(frozen=True)
class PartLimits:
    """Limits of copies on their way.

    ``part_bytes`` are those of one message; ``parts`` may be under way at a time; states of up to ``inline_bytes`` are copied
    and restored at once, because giving them to another thread would take longer. ``changes_max`` is the number of checkpoints
    in a row that are only changes, because a standby that takes over applies each of them; ``changes_share`` their bytes, as a
    part of the whole one before them, because a standby keeps all of them, and beyond it another whole one is not much larger."""

    part_bytes: int = 1 << 20
    parts: int = 4
    inline_bytes: int = 1 << 20
    changes_max: int = 64
    changes_share: float = 1 / 2

    def within(self, message_max_bytes: int) -> PartLimits:
        """Return limits with parts that a port accepts. A larger part would cut the connection, again and again."""
        return replace(self, part_bytes=min(self.part_bytes, message_max_bytes))


class StatePart(NamedTuple):
    """The beginning of a part, and its bytes. An empty part asks how many bytes the other end has."""

    offset: int
    payload: bytes | memoryview


@dataclass
class StateParts:
    """A copy on its way. ``sent`` and ``acked`` count its bytes; ``heard`` is the time at which the other end last said
    anything new; ``asked``: it was silent, and was asked how many bytes it has."""

    data: memoryview = field(default_factory=lambda: memoryview(b""))
    signature: bytes | None = None
    sent: int = 0
    acked: int = 0
    heard: float = 0.0
    asked: bool = False

    @property
    def total(self) -> int:
        return len(self.data) + MAC_BYTES

    def due(self, now: float, again_s: float, limits: PartLimits) -> Iterator[StatePart]:
        """Yield the parts to send now."""
        total = self.total
        if self.sent > 0 and now - self.heard >= again_s:
            # A connection has broken, and the parts on it are lost.
            self.sent, self.heard, self.asked = self.acked, now, True
            if self.acked == total:
                yield StatePart(total, b"")
        ready = total if self.signature is not None else len(self.data)
        while self.sent < ready and self.sent < self.acked + limits.parts * limits.part_bytes:
            start = self.sent
            if start < len(self.data):
                self.sent = min(start + limits.part_bytes, len(self.data))
                yield StatePart(start, self.data[start : self.sent])
            else:
                assert self.signature is not None
                self.sent = total
                yield StatePart(start, self.signature)

    def on_received(self, received: int, now: float) -> None:
        """Note the bytes that the other end has received. They may be fewer than before, once it was asked: it had no use for
        the copy, and does not remember it. Its answer to the whole copy was lost, so it gets that again."""
        if self.acked < received <= self.total:
            self.acked, self.heard, self.asked = received, now, False
        elif received < self.acked and self.asked:
            self.sent = self.acked = received
            self.heard, self.asked = now, False

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        most = max(self.acked, self.sent)
        assert most <= self.total, f"{self.acked} bytes acked, {self.sent} sent of {self.total}"
