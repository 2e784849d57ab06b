"""The three flows of Nexmark, over any source of their events."""

from __future__ import annotations

from typing import Any

import flux
from examples.nexmark.generator import COLUMNS, KINDS, Generator

#: Longest lateness of an event that still counts.
DELAY = "4 seconds"


class Nexmark:
    """The flows of people, auctions and bids. All of them come from one source, and have one watermark."""

    def __init__(self, source: flux.Source, asked: dict[str, set[str]] | None = None) -> None:
        """Make the flows of a source with the columns of ``examples.nexmark.generator.SCHEMA``. ``asked`` collects the columns of
        each kind that are read, for sources that make no others."""
        self._events = source.withWatermark("dateTime", DELAY)
        self._asked = {kind: set() for kind in KINDS} if asked is None else asked

    @classmethod
    def generated(cls, events: int = 1_000_000, partitions: int = 2, **options: Any) -> Nexmark:
        """Make the flows of generated events. Options are those of ``Generator`` and ``Events``."""
        reader = Generator(events, partitions, **options)
        return cls(flux.source(reader, name="nexmark"), reader.events.asked)

    def person(self, *columns: str) -> Any:
        """Return the people who register, with these columns; none named: all."""
        return self._flow("person", columns)

    def auction(self, *columns: str) -> Any:
        """Return the auctions that open, with these columns; none named: all."""
        return self._flow("auction", columns)

    def bid(self, *columns: str) -> Any:
        """Return the bids, with these columns; none named: all."""
        return self._flow("bid", columns)

    def _flow(self, kind: str, columns: tuple[str, ...]) -> Any:
        wanted = columns or COLUMNS[kind]
        self._asked[kind].update(wanted)
        return self._events.where(f"kind = {KINDS.index(kind)}").select(*wanted)
