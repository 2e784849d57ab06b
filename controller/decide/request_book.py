"""The requests of people, by number, with their states (design: request, request-ends).

Every request gets a number, which its answer and its events carry. A client that waits asks by number for the state of the
request, until it is over. Law: every request ends, once, as done or given up; no later event changes this outcome. A later
request that contradicts an open one gives it up, and its reason names the later one. The end of the query gives up all open
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from controller.balance.load import Move
from controller.balance.rounds import Rounds
from controller.course.plan_phases import PlanPhase
from controller.course.plan_requests import PlanRequest
from controller.course.query_phases import QueryPhase
from controller.decide.board import Board
from controller.decide.departures import Departures
from controller.decide.slots import held_by
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.moves import MoveJob, MovePhase, replicas_by_worker
from controller.replicas.protection_wishes import Change, ChangePhase, in_words
from controller.text import count, named
from flux.dataflow.plan import StagePlan
from flux.errors import UsageError
from partitioning.ids import PartitionKey

#: Requests that are remembered after they are over. Clients that wait for a request ask several times a second, so this is
#: plenty.
KEPT = 1000
#: Reason for giving up open requests at the end of a query that has not failed.
AT_THE_END = "the query has come to its end"
#: Moves that a sentence names; further ones are only counted.
NAMED = 4


class State(StrEnum):
    WAITING = "waiting"
    UNDER_WAY = "under way"
    DONE = "done"
    GIVEN_UP = "given up"


OVER = (State.DONE, State.GIVEN_UP)


@dataclass(frozen=True)
class Standing:
    """State of a request. ``left`` is the rest of the work, in words; ``done`` the part of ``total``; ``why`` the reason for
    giving it up."""

    state: State
    left: str = ""
    done: int = 1
    total: int = 1
    why: str = ""


def of_moves(jobs: Sequence[MoveJob], name: Callable[[Move], str], phases: Mapping[PartitionKey, str]) -> Standing:
    """Determine the state of a request for moves. ``phases`` are those of the additions under way."""
    still = [job for job in jobs if job.phase in (MovePhase.WAITING, MovePhase.UNDER_WAY)]
    done = len(jobs) - len(still)
    if still:
        begun = any(job.phase == MovePhase.UNDER_WAY for job in still)
        said = ", ".join(
            f"{name(job.move)} to worker {job.move.target} ({phases.get(job.key, 'waiting')})" for job in still[:NAMED]
        )
        more = f" and {len(still) - NAMED} more" if len(still) > NAMED else ""
        return Standing(State.UNDER_WAY if begun or done else State.WAITING, f"moves of {said}{more}", done, len(jobs))
    given_up = [job for job in jobs if job.phase == MovePhase.GIVEN_UP]
    if given_up:
        event = given_up[0].ended
        return Standing(State.GIVEN_UP, done=done, total=len(jobs), why="" if event is None else event.why)
    return Standing(State.DONE, done=done, total=len(jobs))


def of_drain(held: Mapping[int, int], lost: Sequence[int], most: int) -> Standing:
    """Determine the state of a drain. ``held`` counts the replicas on each worker that is still leaving; ``most`` is the number
    on all of them at the beginning; ``lost`` are workers that were lost before they were empty."""
    copies = sum(held.values())
    if held:
        on = f"{count(copies, 'replica')} on {named('worker', held)}"
        return Standing(State.UNDER_WAY, on if copies else f"{named('worker', held)} leaving", most - copies, most)
    if lost:
        was = "was" if len(lost) == 1 else "were"
        return Standing(State.GIVEN_UP, why=f"{named('worker', lost)} {was} lost before being empty")
    return Standing(State.DONE)


def of_scale(wanted: int, here: int, leaving: Collection[int], missing: Sequence[int], held: Sequence[int]) -> Standing:
    """Determine the state of a change of scale, which is done when new workers have their share. ``here`` is the number of
    workers that take part; ``held`` has the replicas on each worker while they are evened out, else it is empty."""
    done, total = min(here, wanted), max(here, wanted)
    if leaving:
        return Standing(State.UNDER_WAY, f"{named('worker', leaving)} leaving", done, total)
    if here != wanted or missing:
        slots = f", {named('slot', missing)} empty" if missing else ""
        return Standing(State.WAITING, f"{count(here, 'worker')} there, {wanted} wanted{slots}", done, total)
    if held:
        left = f"workers hold {min(held)} to {max(held)} replicas, which are being evened out"
        return Standing(State.UNDER_WAY, left, done, total)
    return Standing(State.DONE, done=done, total=total)


def of_change(change: Change | None, stage: StagePlan) -> Standing:
    """Determine the state of a change of a stage; None: there was nothing to change."""
    most = stage.partitions
    if change is None or change.phase == ChangePhase.DONE:
        return Standing(State.DONE, done=most, total=most)
    if change.phase == ChangePhase.GIVEN_UP:
        return Standing(State.GIVEN_UP, done=most - change.left, total=most, why=change.ended)
    left = f"{count(change.left, 'partition')} of {stage.name}, {change}"
    return Standing(State.UNDER_WAY, left, most - change.left, most)


def of_plan_change(asked: PlanRequest | None) -> Standing:
    """Determine the state of a change of the plan; None: there was nothing to change."""
    if asked is None or asked.phase == PlanPhase.RUNNING:
        return Standing(State.DONE)
    if asked.phase == PlanPhase.REFUSED:
        return Standing(State.GIVEN_UP, done=0, why=asked.why)
    waits = asked.phase == PlanPhase.REQUESTED
    return Standing(State.WAITING if waits else State.UNDER_WAY, f"{asked.what}: {asked.phase}", 0)


@dataclass
class FlowAddition:
    """A flow that the program of the query adds for a person, or a stage that it restarts, in a thread of its own, which sets
    the fields."""

    #: The request in words, as in ``addition of flows:alarm`` and ``restart of Alarm``.
    what: str
    over: bool = False
    #: Reason for refusing it.
    error: str = ""

    def stands(self) -> Standing:
        if not self.over:
            return Standing(State.UNDER_WAY, f"{self.what}, by the program of the query", 0)
        return Standing(State.GIVEN_UP, done=0, why=self.error) if self.error else Standing(State.DONE)


@dataclass
class Asked:
    """One request. ``what`` is its name in sentences; ``look`` determines its state; ``jobs`` are its moves; ``workers`` is the
    number of workers that it asks for, if it is a change of scale."""

    number: int
    what: str
    look: Callable[[], Standing]
    jobs: list[MoveJob] = field(default_factory=list)
    workers: int | None = None
    standing: Standing = field(default_factory=lambda: Standing(State.WAITING))

    @property
    def over(self) -> bool:
        return self.standing.state in OVER


class RequestBook:
    """The requests of a query. ``missing_slots``: see ``DriverEvents``."""

    def __init__(
        self,
        board: Board,
        repairs: AdditionTracker,
        departures: Departures,
        rounds: Callable[[], Rounds],
        missing_slots: Callable[[], list[int]],
    ) -> None:
        self._board = board
        self._repairs = repairs
        self._departures = departures
        self._rounds = rounds
        self._missing_slots = missing_slots
        self._asked: dict[int, Asked] = {}
        self._numbers = 0

    # ---- asking

    def next_number(self) -> int:
        """Return the number of a request that is about to be carried out. The number of a refused request is not used again."""
        self._numbers += 1
        return self._numbers

    def moves(self, number: int, jobs: list[MoveJob]) -> None:
        def look() -> Standing:
            phases = {key: str(addition.phase) for key, addition in self._repairs.under_way.items()}
            return of_moves(jobs, self._name, phases)

        self._note(Asked(number, count(len(jobs), "move"), look, jobs))

    def drain(self, number: int, workers: Sequence[int], most: int) -> None:
        """Note a drain. ``most`` is the number of replicas on these workers at the time of the request."""

        def look() -> Standing:
            departures = self._departures
            held = {worker: self._held(worker) for worker in workers if worker in departures.drains}
            lost = [worker for worker in workers if worker not in held and worker not in departures.dismissed]
            return of_drain(held, lost, most)

        self._note(Asked(number, f"drain of {named('worker', workers)}", look))

    def scale(self, number: int, workers: int) -> None:
        def look() -> Standing:
            members, table = self._board.members.workers, self._board.table
            held = replicas_by_worker(table) if table is not None and self._rounds().evening_out else {}
            shares = [held.get(worker, 0) for worker in members] if held else []
            return of_scale(workers, len(members), list(self._departures.drains), self._missing_slots(), shares)

        self._note(Asked(number, f"scale to {count(workers, 'worker')}", look, workers=workers))

    def wanted_now(self, workers: int, why: str) -> None:
        """Give up the open requests for another number of workers than the query is to have from now on: no worker would
        come, or leave, for their sake any more."""
        for asked in self._asked.values():
            if asked.workers not in (None, workers) and not asked.over:
                self._give_up(asked, why)

    def protect(self, number: int, wish: StagePlan, change: Change | None) -> None:
        what = f"protection of {wish.name} by {in_words(wish)}"
        self._note(Asked(number, what, lambda: of_change(change, wish)))

    def plan_change(self, number: int, what: str, asked: PlanRequest | None) -> None:
        self._note(Asked(number, what, lambda: of_plan_change(asked)))

    def flow(self, number: int, addition: FlowAddition) -> None:
        self._note(Asked(number, addition.what, addition.stands))

    def fail(self, number: int, worker: int) -> None:
        self._note(Asked(number, f"loss of worker {worker}", lambda: Standing(State.DONE)))

    def _note(self, asked: Asked) -> None:
        self._asked[asked.number] = asked
        over = [number for number, each in self._asked.items() if each.over]
        for number in over[: max(len(over) - KEPT, 0)]:
            del self._asked[number]
        self.look()

    def _held(self, worker: int) -> int:
        table = self._board.table
        return 0 if table is None else len(held_by(table, worker))

    def _name(self, move: Move) -> str:
        return f"{self._board.plan.stages[move.stage].name}/{move.partition}"

    # ---- how they stand

    def look(self) -> None:
        """Renew the states of all requests, after every event that may change them. Once the query has come to its end, nothing
        is carried out any more, and open requests are given up."""
        phase = self._board.phase
        for asked in self._asked.values():
            if not asked.over and phase != QueryPhase.ENDED:
                asked.standing = asked.look()
            if not asked.over and phase in (QueryPhase.FINISHED, QueryPhase.ENDED):
                error = self._board.error
                self._give_up(asked, AT_THE_END if error is None else f"the query has failed: {error}")

    def _give_up(self, asked: Asked, why: str) -> None:
        asked.standing = replace(asked.standing, state=State.GIVEN_UP, left="", why=why)

    def of(self, number: int) -> Asked:
        """Return the request of this number. UsageError: there is none, or it is forgotten already."""
        if number not in self._asked:
            raise UsageError(f"there is no request {number}; the newest is {self._numbers}")
        return self._asked[number]

    def known(self, number: int) -> Asked | None:
        """Return the request of this number without a new look; None if there is none, or it is forgotten already."""
        return self._asked.get(number)

    def open(self) -> list[Asked]:
        """Return the open requests, the oldest first."""
        return [asked for asked in self._asked.values() if not asked.over]

    def validate(self) -> None:
        assert all(number == asked.number <= self._numbers for number, asked in self._asked.items())
        for asked in self._asked.values():
            jobs_over = all(job.phase in (MovePhase.DONE, MovePhase.GIVEN_UP) for job in asked.jobs)
            ended = self._board.phase == QueryPhase.ENDED  # moves keep their states then
            assert ended or jobs_over or not asked.over, f"{asked.what} is over, and its moves are not"
