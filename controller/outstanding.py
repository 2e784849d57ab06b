"""What is still to come of something that was asked for, read off the status (empty when all is done), and what has
become of it.

For whoever waits: the commands and the handle of a query say the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from controller.events import Event
from controller.requests import MoveStatus, ReplicaStatus, Status
from controller.wording import count, named

#: Moves that are named; more are counted.
NAMED = 4


def of_drain(status: Status, worker: int) -> str:
    here = [row for row in status.workers if row.worker == worker]
    if not here:
        return ""
    left = here[0].replicas
    return f"{count(left, 'copy', 'copies')} on worker {worker}" if left else f"worker {worker} leaving"


def of_scale(status: Status, workers: int) -> str:
    """Workers that join are there for good when they have their share of the partitions (where load is balanced)."""
    leaving = [row.worker for row in status.workers if row.leaving]
    if leaving:
        return f"{named('worker', leaving)} leaving"
    here = len(status.workers)
    if here != workers or status.missing_slots:
        slots = f", {named('slot', status.missing_slots)} empty" if status.missing_slots else ""
        return f"{count(here, 'worker')} there, {workers} wanted{slots}"
    if status.evening_out:
        held = [row.replicas for row in status.workers]
        return f"workers hold {min(held)} to {max(held)} copies, which are being evened out"
    return ""


def moves_left(status: Status, moves: Collection[MoveStatus]) -> list[MoveStatus]:
    """Those that are on the controller's list still."""
    mine = {(move.stage, move.partition, move.target) for move in moves}
    return [m for m in status.moves_pending if (m.stage, m.partition, m.target) in mine]


def of_moves(status: Status, moves: Collection[MoveStatus]) -> str:
    left = moves_left(status, moves)
    named = ", ".join(f"{m.stage}/{m.partition} to worker {m.target} ({m.phase})" for m in left[:NAMED])
    more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
    return f"moves of {named}{more}" if left else ""


@dataclass(frozen=True)
class Carried:
    """What has become of a move. ``event``: the last that is known of it."""

    move: MoveStatus
    done: bool
    event: Event | None

    def __str__(self) -> str:
        return f"{self.move.stage}/{self.move.partition} from worker {self.move.source} to worker {self.move.target}"


def carried(
    moves: Sequence[MoveStatus], before: Status, replicas: Sequence[ReplicaStatus], events: Sequence[Event]
) -> list[Carried]:
    """Of moves that are on the controller's list no more. ``before``: the status when they were asked for; what happened
    earlier was to others."""
    since = before.started + before.uptime_s - 0.001  # uptimes are rounded
    at = {(replica.stage, replica.partition, replica.worker) for replica in replicas}
    last = {(e.stage, e.partition): e for e in events if e.at >= since and e.kind.startswith("move")}
    return [
        Carried(
            move,
            (move.stage, move.partition, move.target) in at and (move.stage, move.partition, move.source) not in at,
            last.get((move.stage, move.partition)),
        )
        for move in moves
    ]
