"""The law of requests: each comes to an end (``controller.decide.request_book``).

every request ends            none is open when all is at rest, unless workers are missing for good, and none once the query
                              is over
an outcome stands             a request that is done or given up stays so, and a request that is given up has a reason
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controller.decide.board import Tell
from controller.decide.request_book import OVER, Asked, Standing, State
from controller.replicas.moves import replicas_by_worker
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Requests end within this time after everything else is at rest. Moves that even out the replicas get more time: each has to
#: wait for the bytes of the moves before it.
PATIENCE_S = 10.0


class Outcomes:
    """The requests of a run, open ones and ended ones, and the law about them."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._open: dict[int, Asked] = {}
        self._over: dict[int, tuple[Asked, Standing]] = {}
        self._at_rest_since: float | None = None

    def ask(self, request: Callable[[int], list[Tell]]) -> list[Tell]:
        """Make a request under a new number. Raise UsageError if the request is refused."""
        controller = self.sim.controller
        number = controller.next_request()
        effects = request(number)
        asked = controller.people.book.known(number)
        if asked is not None:
            self._open[number] = asked
        return effects

    def look(self) -> None:
        """Look at the requests after a decision of the controller."""
        for number, asked in list(self._open.items()):
            if asked.over:
                del self._open[number]
                self._over[number] = asked, asked.standing
                self.sim.counts[f"requests: {asked.standing.state}"] += 1
                if asked.standing.state == State.GIVEN_UP and not asked.standing.why:
                    raise Violation(
                        "an outcome stands", f"request {number}, {asked.what}, was given up without a reason"
                    )

    def all_over(self) -> bool:
        """Tell whether no request is open, now that everything else is at rest."""
        sim, now = self.sim, self.sim.world.now
        for number, (asked, standing) in self._over.items():
            if asked.standing != standing:
                raise Violation("an outcome stands", f"request {number}: {standing}, then {asked.standing}")
        still = sim.controller.open_requests()
        self.look()
        if not still or self._workers_are_missing() or sim.moves.held_up:
            return True
        self._at_rest_since = now if self._at_rest_since is None else self._at_rest_since
        if now > self._at_rest_since + PATIENCE_S + self._evening_out_s():
            raise Violation("every request ends", _said(still))
        return False

    def _evening_out_s(self) -> float:
        """Return the time in which the replicas are evened out: a round of balance for each replica, since a round may make one
        move only, and no replica is a surplus twice."""
        controller = self.sim.controller
        if controller.table is None or not controller.rounds.evening_out:
            return 0.0
        return controller.rounds.round_s * sum(replicas_by_worker(controller.table).values())

    def _workers_are_missing(self) -> bool:
        """Tell whether an open slot has no worker and will get none, like the slot of a worker that died for good."""
        controller = self.sim.controller
        filled = {member.about.index for member in controller.members.workers.values()}
        return not filled.issuperset(controller.places.open)

    def check_at_the_end(self) -> None:
        """Check that a query that is over leaves no request open."""
        still = self.sim.controller.open_requests()
        self.look()
        if still:
            raise Violation("every request ends", f"the query is over: {_said(still)}")
        assert all(asked.standing.state in OVER for asked, _ in self._over.values())


def _said(requests: list[Asked]) -> str:
    return "; ".join(f"request {each.number}, {each.what}: {each.standing}" for each in requests)
