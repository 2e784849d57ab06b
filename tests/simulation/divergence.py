"""A replica gives other output than its primary, once: a fault of its machine, or an operator that is not deterministic.

What differs is where a row says that it comes from, which no key, order or state depends on: whoever reads from that replica
gets the right rows all the same, so that the laws about rows stay as they are. Its own laws:

only a diverging replica is named    no partition is named in an event whose replicas have all given the same
a diverging replica is dropped       no live replica is left on the worker that the event names
a divergence is noticed              before a query is whole again, all live replicas of each partition have given the same
four divergences end the query       of one partition, one soon after the other; and no fewer do. A query that is over by then,
                                     because its output is there or for an error before, stays as it ended
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from controller.replicas.addition_tracker import DIVERGENCES_MAX
from controller.report.events import Event
from flux.errors import QueryFailed
from flux.joins.as_of import AsOfJoin
from flux.operators.operator import chain_of
from flux.ranks.dedup import Dedup
from flux.replica.replica import Replica
from tests.simulation import stage_kinds
from tests.simulation.timed_kinds import GivesOn
from tests.simulation.violation import Key, Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Replicas are compared with each answer of a secondary: what is not noticed by then, never is.
NOTICED_S = 5.0
#: So often a partition is struck that was before, if it can be.
AGAIN_SHARE = 0.7


class Divergences:
    """``strike``: some replica gives other output at its next step. ``named``: how often partitions were."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.named: Counter[Key] = Counter()
        self._struck: set[Key] = set()
        self._unnoticed_since: float | None = None
        self._rng = random.Random(f"divergences {sim.seed}")

    def expect(self, key: Key) -> None:
        """A story sees to it that replicas of this partition differ."""
        self._struck.add(key)

    def strike(self) -> None:
        table = self.sim.controller.table
        if table is None or self.sim.controller.phase != "running":
            return
        copies = [
            (key, replica)
            for core in self.sim.hosts()
            for key, replica in core.replicas.items()
            if replica.outlets and len(table.row(*key)) > 1 and not replica.finished
        ]
        fit = [(key, copy) for key, copy in copies if self._may_differ(copy)]
        again = [(key, copy) for key, copy in fit if self.named[key]]
        if again and self._rng.random() < AGAIN_SHARE:
            fit = again
        if fit:
            self._disturb(*self._rng.choice(fit))

    def _may_differ(self, replica: Replica) -> bool:
        """Tell whether other output of a replica stays where it is: operators that give rows on as they came differ, too."""
        stages = self.sim.plan.stages
        fed = [outlet.edge.consumer for outlet in replica.outlets if outlet.edge.consumer in stages]
        consumers = [chain_of(stages[each].make())[0] for each in fed]
        gives_on = any(isinstance(each, AsOfJoin | Dedup | GivesOn) for each in consumers)
        return isinstance(replica.operator, stage_kinds.Watched) and not gives_on

    def _disturb(self, key: Key, replica: Replica) -> None:
        operator: Any = replica.operator

        def stamped(rows: list[stage_kinds.Row]) -> Any:
            if not rows:
                return type(operator).stamped(operator, rows)
            del operator.stamped
            self._struck.add(key)
            self.sim.ledger.altered.update(outlet.producer.stream for outlet in replica.outlets)
            self.sim.counts["replicas that gave other output once"] += 1
            self.sim.counts["primaries that gave other output once"] += replica.primary
            return operator.stamped(rows, stage_kinds.ELSEWHERE)

        operator.stamped = stamped

    def look(self, events: list[Event]) -> None:
        """After a decision of the controller."""
        table, names = self.sim.controller.table, self.sim.stage_names
        for event in events:
            if event.kind != "divergence":
                continue
            key = next(stage for stage, name in names.items() if name == event.stage), event.partition
            self.named[key] += 1
            self.sim.counts["divergences noticed"] += 1
            if key not in self._struck and not self.sim.ledger.lossy:
                raise Violation("only a diverging replica is named", str(event))
            hopeless = self.named[key] > DIVERGENCES_MAX
            ended = self._ended_for_them() and not any(named > DIVERGENCES_MAX for named in self.named.values())
            if ended or (hopeless and not self._ended_for_them() and self.sim.controller.phase != "ended"):
                raise Violation("four divergences end the query", f"{event}, for the time {self.named[key]}")
            assert table is not None
            left = [replica for replica in table.row(*key) if replica.live and replica.worker == event.worker]
            if left and not hopeless and self.sim.controller.phase != "ended":  # then no table follows any more
                raise Violation("a diverging replica is dropped", f"{event}: {left}")

    def _ended_for_them(self) -> bool:
        """Whether the query has ended as one does whose operator is not deterministic."""
        error = self.sim.controller.error
        return isinstance(error, QueryFailed) and "keep giving different output" in str(error)

    def end_it(self) -> bool:
        """Whether the query has ended for that, and had reason to. One that differs from a primary that was lost is enough."""
        error = self.sim.controller.error
        if isinstance(error, QueryFailed) and "gave other output than before" in str(error):
            return any(self.sim.stage_names[stage] in str(error) for stage, _ in self._ever_struck())
        return self._ended_for_them() and max(self.named.values(), default=0) > DIVERGENCES_MAX

    def _ever_struck(self) -> set[Key]:
        """Also in the lives before: what was given then is repeated now."""
        earlier = self.sim.life.earlier if self.sim.life is not None else None
        return self._struck | (earlier.divergences._ever_struck() if earlier is not None else set())

    def all_noticed(self) -> bool:
        """Whether all live replicas of each partition have given the same, as far as both have come."""
        unlike = next(self._unlike(), None) if self._struck else None
        now = self.sim.world.now
        if unlike is None:
            self._unnoticed_since = None
        elif self._unnoticed_since is None:
            self._unnoticed_since = now
        elif now > self._unnoticed_since + NOTICED_S:
            raise Violation("a divergence is noticed", unlike)
        return unlike is None

    def _unlike(self) -> Any:
        table = self.sim.controller.table
        assert table is not None
        cores = {core.worker: core for core in self.sim.hosts()}
        for stage, partition in self._struck:
            copies = [
                cores[listed.worker].replicas.get((stage, partition))
                for listed in table.row(stage, partition)
                if listed.live and listed.worker in cores
            ]
            primary = next((copy for copy in copies if copy is not None and copy.primary), None)
            for copy in copies:
                if copy is None or primary is None or copy is primary:
                    continue
                expected = primary.output.checksums.at(copy.output.checksums.steps)
                if expected is not None and expected != copy.output.checksums.newest:
                    yield f"{copy.where}: other output for the first {copy.output.checksums.steps} steps"
