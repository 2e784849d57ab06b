"""Times of the parts of a service's start, which it tells at its end: a slow start names its cause."""

from __future__ import annotations

import time
from collections.abc import Callable


class StartTimes:
    """The parts of a start, one behind the other. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        #: Seconds of each part, in the order of the parts.
        self.parts: dict[str, float] = {}

    def end(self, part: str) -> None:
        """End a part, which began with the end of the part before."""
        now = self._clock()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def told(self) -> str:
        """Return the times in words."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.parts.items())
        return f"started in {self._last - self._began:.2f} s: {parts}"
