"""Streams that are read over several feeds: the workers that brought rows first, and the price of it (design: feeds)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controller.replicas.membership import Membership
from controller.text import count
from flux.wire.statistics import FeedRows

#: Seconds without a second feed that wins, after which the races of a worker are one entry of the history.
OVER_S = 5.0


def feeds(members: Membership) -> list[dict[str, Any]]:
    """Return the feeds of each worker that may have several of a stream, by the newest reports."""
    return [
        {
            "worker": member.node,
            "from": rows.source,
            "firsts": rows.firsts,
            "repeatedBytes": rows.repeated_bytes,
            "secondFeeds": rows.opened,
            "won": rows.won,
        }
        for member in sorted(members.workers.values(), key=lambda member: member.node)
        for rows in (FeedRows(*each) for each in member.stats.get("feeds", ()))
    ]


def told_feeds(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Put the feeds of each worker into words."""
    by_worker: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        by_worker.setdefault(entry["worker"], []).append(entry)
    for worker, mine in by_worker.items():
        firsts = ", ".join(f"{entry['firsts']:,} from worker {entry['from']}" for entry in mine)
        opened, won = sum(entry["secondFeeds"] for entry in mine), sum(entry["won"] for entry in mine)
        twice = sum(entry["repeatedBytes"] for entry in mine) / (1 << 20)
        yield (
            f"worker {worker} reads over several feeds: first came {firsts}; {count(opened, 'second feed')}, {won} won; "
            f"{twice:.1f} MiB came twice"
        )


@dataclass
class Races:
    """The races of one worker that second feeds have won: since when, the last report of one, their number now, and before."""

    since: float
    seen: float
    won: int
    before: int


class FeedRaces:
    """Races that second feeds have won: one entry of the history for each worker and each time of them."""

    def __init__(self) -> None:
        self._won: dict[int, int] = {}
        self._under_way: dict[int, Races] = {}

    def note(self, entries: Iterable[dict[str, Any]], wall: float) -> None:
        """Take the feeds of a report."""
        totals: dict[int, int] = {}
        for entry in entries:
            totals[entry["worker"]] = totals.get(entry["worker"], 0) + entry["won"]
        for worker, won in totals.items():
            before = self._won.get(worker, 0)
            if won > before:
                races = self._under_way.setdefault(worker, Races(wall, wall, won, before))
                races.seen, races.won = wall, won
        self._won = totals

    def over(self, wall: float) -> Iterator[tuple[str, float]]:
        """Yield the text of the races of a worker of which the last one is long ago, and the seconds that they took."""
        for worker, races in list(self._under_way.items()):
            if wall > races.seen + OVER_S:
                del self._under_way[worker]
                times = count(races.won - races.before, "time")
                yield (
                    f"second feeds brought rows to worker {worker} first {times} from {_clock(races.since)} to "
                    f"{_clock(races.seen)}: links from the replicas that it read before stood still",
                    races.seen - races.since,
                )


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")
