"""Inputs that do not answer, and that results go on without: by the reports of workers, and by signs that a worker cannot give
itself (design: silent-inputs).

A reader that does not come back holds up the thread of its worker, which sends no report then: its pulse names the reader. A
Spark task that is lost is tried again, and its partition is silent until the next attempt registers.
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.replicas.membership import Membership
from flux.dataflow.plan import FromSource, Plan, WorkerSourcePlan
from flux.dataflow.source_reader import SILENCE_TOLD_S
from flux.wire.pulse import READS
from flux.wire.statistics import SilentStream

#: Reasons for which a partition is silent, as the controller sees them.
NOT_BACK = "its reader has not come back since"
TRIED_AGAIN = "its Spark task does not answer, and is tried again if it is lost"


def silent_streams(plan: Plan, members: Membership, now: float, wall: float) -> list[SilentStream]:
    """Return the silent partitions, each once, by source and partition. ``now``: the time by the clock of the members' signs of
    life; ``wall``: the same by the wall clock."""
    found: dict[tuple[int, int], SilentStream] = {}
    for said in (*_told(plan, members), *_not_back(plan, members, now, wall), *_tried_again(plan, members, now, wall)):
        known = found.setdefault((said.source, said.partition), said)
        if said.since < known.since:
            found[said.source, said.partition] = said
    return [found[key] for key in sorted(found)]


def _told(plan: Plan, members: Membership) -> Iterator[SilentStream]:
    for member in members.workers.values():
        for told in member.stats.get("silent", ()):
            said = SilentStream(*told)
            if said.source in plan.sources:
                yield said


def _not_back(plan: Plan, members: Membership, now: float, wall: float) -> Iterator[SilentStream]:
    """Yield the partitions whose readers hold up their workers."""
    for member in members.workers.values():
        pulse = member.pulse
        if pulse is None or pulse.kind != READS or pulse.what not in plan.sources:
            continue
        if now >= member.turned + SILENCE_TOLD_S:
            source = plan.sources[pulse.what]
            if source.may_be_silent:
                yield SilentStream(source.id, pulse.partition, round(wall - (now - member.turned), 3), NOT_BACK)


def _tried_again(plan: Plan, members: Membership, now: float, wall: float) -> Iterator[SilentStream]:
    """Yield the partitions of DataFrames whose tasks are not heard."""
    for task, member in members.ingress.items():
        if member.left or now < member.heard + plan.settings.heartbeat_timeout:
            continue
        for edge in [plan.edges[edge] for edge in task.edges[:1] if edge in plan.edges]:
            if isinstance(edge, FromSource) and plan.sources[edge.source].may_be_silent:
                yield SilentStream(edge.source, task.partition, round(wall - (now - member.heard), 3), TRIED_AGAIN)


def stream_name(plan: Plan, said: SilentStream) -> str:
    """Return the name of a silent partition for people: the name that its reader gives it, or that of the source with its number,
    as "events/3"."""
    source, number = plan.sources[said.source], str(said.partition)
    name = str(source.reader.partition_name(said.partition)) if isinstance(source, WorkerSourcePlan) else number
    return f"{source.name}/{number}" if name == number else name
