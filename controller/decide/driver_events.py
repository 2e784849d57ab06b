"""Events of Spark's driver: jobs and tasks that end, room for workers, executors that go, and the end that its program asks
for (design: slot).

The driver starts the Spark tasks that bring workers. It asks here for the slots that are to get one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from controller.course.query_phases import QueryPhase
from controller.decide.board import Board, Tell
from controller.decide.departures import Departures
from controller.decide.slots import Slots
from controller.text import named
from flux.errors import QueryFailed
from flux.windows.window import NEVER
from flux.wire.control import EdgeComplete, EdgeWatermark


class DriverEvents:
    """The events of the driver. An event that leads to commands returns them, as one of ``Controller`` does."""

    def __init__(self, board: Board, slots: Slots, departures: Departures) -> None:
        self._board = board
        self._slots = slots
        self._departures = departures
        #: The number of workers that there is room for, and the reason why not for more; None: not known.
        self.room: tuple[int | None, str] = None, ""

    # ---- jobs and the program

    def on_edge_complete(self, edge: int, producers: list[int]) -> list[Tell]:
        """Note that the Spark job that feeds this edge is over. ``producers`` are the partitions that it had."""
        board = self._board
        board.complete[edge] = producers
        for member in board.members.ingress.values():
            member.left |= edge in member.about.edges  # also attempts that died without a goodbye
        if board.table is not None:
            board.tell_all(EdgeComplete(edge=edge, producers=producers))
        return board.take()

    def on_edge_watermark(self, edge: int, watermark: int) -> list[Tell]:
        """Note the watermark of an edge from micro-batches. It never falls."""
        board = self._board
        if watermark > board.watermarks.get(edge, NEVER):
            board.watermarks[edge] = watermark
            if board.table is not None:
                board.tell_all(EdgeWatermark(edge=edge, watermark=watermark))
        return board.take()

    def on_job_failed(self, what: str, reason: str, edges: Collection[int] = ()) -> list[Tell]:
        """Note that a Spark job, or another part of the driver, has failed. ``edges``: those that the job feeds."""
        plan = self._board.plan
        readers = [plan.edges[edge].consumer for edge in edges if edge in plan.edges]
        if readers or not edges:  # else nothing reads its source any more
            self._board.fail(QueryFailed(f"{what} failed: {reason}"), readers)
        return self._board.take()

    def on_stop(self) -> list[Tell]:
        self._board.end(None)
        return self._board.take()

    def on_pause(self, now: float) -> list[Tell]:
        """Stop the query by its program; if it may go on later, with last checkpoints."""
        if self._board.plan.durable and self._board.phase == QueryPhase.RUNNING:
            self._departures.wait_for_checkpoints(now)
        else:
            self._board.end(None)
        return self._board.take()

    # ---- tasks of workers

    def on_tasks_ended(self, slots: Sequence[int], what: str, reason: str) -> list[Tell]:
        """Note that the Spark tasks for these slots are over and will not be started again. This ends the query unless the
        slots are closed."""
        for slot in slots:
            self._slots.vacate(slot)
        wanted = [slot for slot in slots if slot not in self._slots.closed]
        if wanted:
            self._board.fail(QueryFailed(f"{what} failed: {reason} ({named('slot', wanted)})"))
        return self._board.take()

    def allow(self, workers: int, why: str) -> None:
        """Note that there is room for this number of workers; ``why`` explains why not for more. Called again whenever the task
        slots change."""
        self.room = workers, why

    def replace(self, workers: Sequence[int], room: int, now: float) -> list[Tell]:
        """Open other slots in place of workers whose executors leave, as far as there is ``room`` for that many workers on
        executors that stay. Call it again later, as there may be more room then. A later request for another number of workers
        overrides it."""
        board, slots = self._board, self._slots
        for worker in workers:
            member = board.members.workers.get(worker)
            if member is not None:
                slots.owe(member.about.index)
        if board.phase == QueryPhase.RUNNING:
            for slot in slots.replace(room):
                board.note(f"another worker in place of the one in slot {slot}, whose executor goes", now, "scale")
        return board.take()

    @property
    def awaits_workers(self) -> bool:
        """True if an open slot has no worker."""
        return not self._filled().issuperset(self._slots.open)

    def missing_slots(self) -> list[int]:
        """Return the open slots that have neither a worker nor a task that will bring one, as far as there is room. The caller
        starts tasks for them, and then calls ``tasks_started``.

        A query that waits for workers in place of those that are lost has such slots, too: where the last one was given up and
        lives, its task ends well, and Spark starts none in its place. A query that has not begun has none."""
        if self._board.phase not in (QueryPhase.STARTING, QueryPhase.RUNNING):
            return []
        # There was room for the open ones at the time of the request.
        room = max(self.room[0] or 0, len(self._slots.open))
        return self._slots.missing(self._filled(), room)

    def tasks_started(self, slots: Sequence[int]) -> None:
        """Note that tasks for these slots are on their way; Spark starts them again if they die."""
        self._slots.tasked |= set(slots)

    def _filled(self) -> set[int]:
        return {member.about.index for member in self._board.members.workers.values()}
