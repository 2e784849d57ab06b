"""What is still to come of something that was asked for, read off the status; empty when all is done.

For whoever waits: the commands and the handle of a query say the same.
"""

from __future__ import annotations

from collections.abc import Collection

from controller.requests import MoveStatus, Status

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
    leaving = [str(row.worker) for row in status.workers if row.leaving]
    if leaving:
        return f"workers that are leaving: {', '.join(leaving)}"
    here = len(status.workers)
    if here != workers or status.missing_slots:
        slots = f", slots {', '.join(map(str, status.missing_slots))} are empty" if status.missing_slots else ""
        return f"{here} workers are there, {workers} are wanted{slots}"
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


def count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
