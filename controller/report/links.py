"""Links between workers over which nothing comes, and the workers that are read instead (design: reachability)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from controller.replicas.membership import Membership
from controller.text import count
from flux.wire.statistics import Detour


def links_down(members: Membership) -> list[dict[str, Any]]:
    """Return what each worker reads elsewhere, by the newest reports. ``inStep``: the worker from which nothing comes is in a
    step of user code, so its link may be well."""
    found = []
    for member in sorted(members.workers.values(), key=lambda member: member.node):
        for told in member.stats.get("detours", ()):
            detour = Detour(*told)
            other = members.workers.get(detour.source)
            if other is not None:
                since = datetime.fromtimestamp(detour.since, UTC).isoformat(timespec="milliseconds")
                found.append(
                    {
                        "worker": member.node,
                        "nothingFrom": detour.source,
                        "since": since.replace("+00:00", "Z"),
                        "readsFrom": detour.instead,
                        "streams": detour.streams,
                        "inStep": other.heard > other.turned,
                    }
                )
    return found


def told(link: dict[str, Any]) -> str:
    """Put one of these into words."""
    since = datetime.fromisoformat(link["since"]).astimezone().strftime("%H:%M:%S")
    why = ", which is busy in a step" if link["inStep"] else ""
    return (
        f"worker {link['worker']} reads {count(link['streams'], 'stream')} from worker {link['readsFrom']} since {since}: "
        f"nothing came from worker {link['nothingFrom']}{why}"
    )
