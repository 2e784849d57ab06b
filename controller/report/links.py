"""Links between workers over which nothing comes, and the workers that are read instead (design: reachability)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from controller.replicas.membership import Membership
from controller.text import count
from flux.wire.statistics import Detour, LentRows, RelayedLink

#: Seconds without a report of a detour after which its link is up. A link that lets greetings through, and none of their answers,
#: is left again and again.
UP_S = 5.0


def links_down(members: Membership) -> list[dict[str, Any]]:
    """Return what each worker reads elsewhere, by the newest reports. ``inStep``: the worker from which nothing comes is in a
    step of user code, so its link may be well."""
    found = []
    for member in sorted(members.workers.values(), key=lambda member: member.node):
        for told in member.stats.get("detours", ()):
            detour = Detour(*told)
            other = members.workers.get(detour.source)
            if other is not None:
                found.append(
                    {
                        "worker": member.node,
                        "nothingFrom": detour.source,
                        "since": _shown(detour.since),
                        "readsFrom": detour.instead,
                        "streams": detour.streams,
                        "inStep": other.heard > other.turned,
                    }
                )
    return found


def loans(members: Membership) -> list[dict[str, Any]]:
    """Return what each worker has lately got from secondaries of its primaries, by the newest reports."""
    return [
        {
            "worker": member.node,
            "lentBy": lent.lender,
            "since": _shown(lent.since),
            "streams": lent.streams,
            "slices": lent.slices,
        }
        for member in sorted(members.workers.values(), key=lambda member: member.node)
        for lent in (LentRows(*each) for each in member.stats.get("lent", ()))
    ]


def relays(members: Membership) -> list[dict[str, Any]]:
    """Return the workers whose answers come to others over a third one, by the newest reports."""
    return [
        {"worker": member.node, "nothingFrom": link.to, "over": link.over, "since": _shown(link.since)}
        for member in sorted(members.workers.values(), key=lambda member: member.node)
        for link in (RelayedLink(*each) for each in member.stats.get("relays", ()))
    ]


@dataclass
class LinkDown:
    """A link over which nothing came: since when, the last report of it, the streams and the workers that were read instead, and
    whether the other end was in a step of user code in all reports."""

    since: float
    seen: float
    streams: int
    instead: set[int]
    busy: bool


class LinksDown:
    """Links that are down, until each is up for a while: one entry of the history for each of them. A worker that is only busy in
    a step has none."""

    def __init__(self) -> None:
        self._down: dict[tuple[int, int], LinkDown] = {}

    def note(self, links: Iterable[dict[str, Any]], wall: float) -> None:
        """Take the links of a report."""
        for link in links:
            since = datetime.fromisoformat(link["since"]).timestamp()
            down = self._down.setdefault(
                (link["nothingFrom"], link["worker"]), LinkDown(since, wall, link["streams"], set(), True)
            )
            down.seen, down.streams = wall, max(down.streams, link["streams"])
            down.instead.add(link["readsFrom"])
            down.busy &= link["inStep"]

    def over(self, wall: float) -> Iterator[tuple[str, float]]:
        """Yield the text of each link that is up again, and the seconds for which it was down."""
        for (source, worker), down in list(self._down.items()):
            if wall > down.seen + UP_S:
                del self._down[source, worker]
                if not down.busy:
                    instead = " and ".join(f"worker {other}" for other in sorted(down.instead))
                    yield (
                        f"nothing came from worker {source} to worker {worker} from {_clock(down.since)} to "
                        f"{_clock(down.seen)}: it read {count(down.streams, 'stream')} from {instead}",
                        down.seen - down.since,
                    )


def lent(loan: dict[str, Any]) -> str:
    """Put a loan into words."""
    since = _clock(datetime.fromisoformat(loan["since"]).timestamp())
    return (
        f"worker {loan['worker']} gets rows of {count(loan['streams'], 'stream')} from secondaries on worker {loan['lentBy']} "
        f"since {since}: their producers do not bring them"
    )


def relayed(relay: dict[str, Any]) -> str:
    """Put answers that come over a third worker into words."""
    since = _clock(datetime.fromisoformat(relay["since"]).timestamp())
    return (
        f"worker {relay['worker']} and worker {relay['nothingFrom']} reach each other over worker {relay['over']} since {since}: "
        f"no answers came directly from worker {relay['nothingFrom']}"
    )


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def told(link: dict[str, Any]) -> str:
    """Put a link that is down into words."""
    since = _clock(datetime.fromisoformat(link["since"]).timestamp())
    why = ", which is busy in a step" if link["inStep"] else ""
    return (
        f"worker {link['worker']} reads {count(link['streams'], 'stream')} from worker {link['readsFrom']} since {since}: "
        f"nothing came from worker {link['nothingFrom']}{why}"
    )
