"""The balancer, which shows the load to policies and puts the moves that they suggest into the queue (design: balance).

A policy may be code of the user. If it fails, it is not asked again, and the query goes on without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from controller.balance.load import Loads, LoadTable, Move, Suggestion
from controller.balance.load_reports import LoadBook
from controller.balance.rounds import Rounds
from controller.decide.board import Board
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.moves import MoveQueue
from flux.dataflow.plan import Plan


class Balancer:
    """The balancer of one query. ``rounds`` chooses the policy to ask, and handles its suggestions."""

    def __init__(self, board: Board, repairs: AdditionTracker, moving: MoveQueue) -> None:
        self.rounds = Rounds(board.plan.settings)
        self._board = board
        self._repairs = repairs
        self._moving = moving
        self._book = LoadBook(board.plan)

    # ---- load

    def take(self, worker: int, stats: Mapping[str, Any]) -> None:
        """Take a worker's report."""
        self._book.take(worker, stats)

    def follow(self, plan: Plan) -> None:
        """Go by another version of the plan."""
        self._book.follow(plan)

    def forget(self, worker: int) -> None:
        """Forget the reports of a worker that takes part no more."""
        self._book.forget(worker)

    def loads(self) -> Loads:
        """Make the loads for policies, from the newest reports; rates are averages of the last seconds."""
        table = self.load_table()
        if table is None:
            return Loads({}, [])
        return replace(table.loads(), names={stage.id: stage.name for stage in self._board.plan.stages})

    def load_table(self) -> LoadTable | None:
        """Make the loads as arrays; None before the first table."""
        board, repairs = self._board, self._repairs
        columns = board.columns()
        if board.table is None or columns is None:
            return None
        busy_with = {*repairs.under_way, *(job.key for job in self._moving.jobs())}
        return self._book.make(columns, board.members, repairs.safety.unsafe, repairs.low(board.table), busy_with)

    # ---- suggestions

    def suggest(self, policy: str, now: float) -> Suggestion:
        """Return all moves that a policy would make now. UsageError: there is no policy of that name."""
        self._board.require_running("suggest moves")
        return self.rounds.plan(policy, self.loads(), now)

    def prefer(self, now: float) -> list[Move]:
        """Return the moves that the policy ``drain`` suggests for the replicas on workers that leave."""
        if not self.rounds.on:
            return []
        try:
            return self.rounds.plan("drain", self.loads(), now).moves
        except Exception as error:
            text = f"policy drain failed, replicas are counted instead: {type(error).__name__}: {error}"
            self._board.note(text, now)
            return []

    def rebalance(self, now: float) -> None:
        """Ask the policy whose turn it is, and accept the moves that are possible. None is asked as long as a worker rests that
        was out of reach (design: unreached): the policy would see the load that the take-over has moved away from there."""
        board, rounds = self._board, self.rounds
        if board.table is None or self._repairs.attempts.out_of_reach(now) or not rounds.due(now):
            return
        calm = not self._repairs.under_way and all(job.waits for job in self._moving.jobs())
        notes = rounds.notes
        try:
            policy, moves = rounds.ask(self.loads(), now, calm)
        except Exception as error:
            rounds.on = False
            board.note(f"policy {rounds.name} failed and is not asked again: {type(error).__name__}: {error}", now)
            return
        rounds.refused, placement = [], board.placement()
        for move in moves:
            asked = self._moving.ask([move], f"balance: {policy}", board.table, placement)
            if asked.problem is None:
                board.changed = True
            else:
                rounds.refused.append(asked.problem)
        if rounds.evening_out and moves and len(rounds.refused) == len(moves):
            rounds.evened_out()  # even as far as possible: the policy would suggest the same moves for ever
        for note in rounds.notes:
            if note not in notes:
                board.note(note, now, "balance")

    def report(self) -> dict[str, Any]:
        """Make the part of ``lastProgress`` about balance."""
        rounds = self.rounds
        return {"on": rounds.on, "policy": rounds.name, "notes": rounds.notes, "refused": rounds.refused}
