"""Divergences: a replica gives other output than its primary, once, by a fault of its machine or a non-deterministic operator.

Only the origin differs that a row names, and no key, order or state depends on it: a consumer that reads from that replica gets
the right rows all the same, so that the laws about rows stay as they are. Divergences have laws of their own:

only a diverging replica is named    no partition is named in an event if all its replicas have given the same
a diverging replica is dropped       no live replica is left on the worker that the event names
a divergence is noticed              before a query is whole again, all live replicas of each partition have given the same
four divergences end the query       of one partition, one soon after the other; fewer do not. A query that is over by then,
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

#: Virtual seconds after which a divergence is noticed, or never will be: replicas are compared with each answer of a secondary.
NOTICED_S = 5.0
#: The share of strikes at a partition that was struck before, if there is one.
AGAIN_SHARE = 0.7


class Divergences:
    """Divergences of one run, and the check of their laws."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        #: By partition: the number of events that named it.
        self.named: Counter[Key] = Counter()
        self._struck: set[Key] = set()
        self._unnoticed_since: float | None = None
        self._rng = random.Random(f"divergences {sim.seed}")

    def expect(self, key: Key) -> None:
        """Note that replicas of a partition will differ: a story sees to it."""
        self._struck.add(key)

    def strike(self) -> None:
        """Let some replica give other output at its next step."""
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
        """Tell whether a deviation in a replica's output ends at its consumers: operators that give rows on unchanged would
        deviate, too."""
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
        """Check the events of a decision of the controller."""
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
        """Tell whether the query has ended like one with a non-deterministic operator."""
        error = self.sim.controller.error
        return isinstance(error, QueryFailed) and "keep giving different output" in str(error)

    def end_it(self) -> bool:
        """Tell whether the query has ended for divergences, and had reason to. A single replica that differs from a lost primary
        is reason enough."""
        error = self.sim.controller.error
        if isinstance(error, QueryFailed) and "gave other output than before" in str(error):
            return any(self.sim.stage_names[stage] in str(error) for stage, _ in self._ever_struck())
        return self._ended_for_them() and max(self.named.values(), default=0) > DIVERGENCES_MAX

    def _ever_struck(self) -> set[Key]:
        """Return the struck partitions of this life and the lives before: output of an earlier life is repeated now."""
        earlier = self.sim.life.earlier if self.sim.life is not None else None
        return self._struck | (earlier.divergences._ever_struck() if earlier is not None else set())

    def all_noticed(self) -> bool:
        """Tell whether all live replicas of each partition have given the same output, through the last step that both took."""
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
