"""The laws at the end of a run: nothing has failed, everything is drained, and each row is counted once at the sinks."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

from controller.replicas.additions import under_replicated
from flux.errors import NonDeterministicInputError, QueryFailed
from tests.simulation import lost_rows
from tests.simulation.evidence import orders_of
from tests.simulation.stage_kinds import Sink
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation


#: The error of a query of which only the directory is left.
NO_WORKER = "no worker is left"
#: The note of a query that loses its last worker.
WAITS = "no worker is left; the query waits for others"


class RunEnd:
    """The laws at the end of a run. ``check`` raises Violation."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.plan, self.counts, self.controller = sim.plan, sim.counts, sim.controller

    def check(self) -> None:
        for worker in self.sim.by_node.values():
            if worker.core is not None:
                counters = worker.core.counters
                self.counts["duplicates refused"] += counters.duplicate
                self.counts["stale messages refused"] += counters.stale
                self.counts["gaps noticed"] += counters.gap
                self.counts["subscriptions that switched their source"] += counters.switched
                for feeds in worker.core.subscriptions.feeds.counts.values():
                    self.counts["second feeds"] += feeds.opened
                    self.counts["races that second feeds won"] += feeds.won
                    self.counts["bytes that came over several feeds"] += feeds.repeated_bytes
                self.counts["slices lent to a primary"] += worker.core.subscriptions.borrower.slices
                self.counts["slices cut as an order says"] += sum(
                    i.cuts for i in worker.core.subscriptions.streams.values()
                )
                self._count_handshakes(worker.core.producers.values())
        for attempt in self.sim.spark.attempts:
            if attempt.core is not None:
                self._count_handshakes(attempt.core.producers.values())
        self.counts["order entries cut by a new primary"] += self.sim.ledger.entries_cut
        self.counts["take-overs"] += self.controller.repairs.take_overs
        self.counts["repairs"] += self.controller.repairs.done
        self.counts["queries that waited for new workers"] += sum(
            e.kind == "warning" and WAITS in e.why for e in self.controller.repairs.history
        )
        self.counts["replicas far behind"] += sum(e.kind == "behind" for e in self.controller.repairs.history)
        self.sim.outcomes.check_at_the_end()
        error = self.controller.error
        if error is not None:
            if self.sim.divergences.end_it():
                self.counts["runs ended by divergences"] += 1
                self.check_rows(partly=True)
                return
            if isinstance(error, NonDeterministicInputError) and self.sim.faults.nondeterministic:
                self.counts["runs ended by non-deterministic input"] += 1
                return
            if lost_rows.explains(self.sim, error):
                self.counts["runs ended by lost data"] += 1
                self.check_rows(partly=True)
                return
            if isinstance(error, QueryFailed) and NO_WORKER in str(error) and self.plan.durable:
                self.counts["runs that lost all workers"] += 1
                return
            if isinstance(error, QueryFailed) and "the only safe replica of" in str(error):
                reckless = self.sim.faults.reckless
                self.counts["runs ended by a loss" + (" that was meant" if reckless else "")] += 1
                self.check_rows(partly=True)
                return
            raise Violation("no run fails", f"{type(error).__name__}: {error}")
        if self.sim.settled and not self.sim.some_are_gone:
            self.check_drained()
        lost_rows.check_told(self.sim)
        self.check_rows()
        if self.sim.ledger.event_time is not None:
            self.sim.ledger.event_time.check_late_counts(self.sim)
        self.sim.outside.check()

    def _count_handshakes(self, producers: Any) -> None:
        self.counts["handshakes repeated after silence"] += sum(producer.resent_handshakes for producer in producers)

    def check_drained(self) -> None:
        self.counts["runs that came to rest"] += 1
        for core in self.sim.hosts():
            queued = sum(len(replica.waits) for replica in core.replicas.values())
            ordered = sum(len(order.since(0)) for order in orders_of(core))
            if core.subscriptions.held_bytes or core.log_meter.bytes or queued or ordered:
                raise Violation(
                    "logs and queues drain",
                    f"worker {core.worker}: {core.log_meter.bytes} bytes in logs, {core.subscriptions.held_bytes} held, {queued} "
                    f"slices queued, {ordered} steps in order logs",
                )

    def check_rows(self, partly: bool = False) -> None:
        """Check that each row is counted once at the sinks. ``partly``: the query has ended early, so that rows may be
        missing, but no row is there twice or made up."""
        unsure = [key for key, versions in self.sim.spark.versions.items() if len(versions) > 1 and self._differs(key)]
        for choice in itertools.product((0, 1), repeat=min(len(unsure), 8)):
            version = {key: max(versions) for key, versions in self.sim.spark.versions.items()} | dict(
                zip(unsure, choice, strict=False)
            )
            wrong = self._wrong(version, partly)
            if wrong is None:
                return
        if partly:
            raise Violation("no row twice or made up, also where a query is lost", wrong or "")
        raise Violation("every row counted once at the sink", wrong or "")

    def _differs(self, key: tuple[str, int]) -> bool:
        return any(data.name == key[0] and key[1] in data.other for data in self.sim.dataflow.sources)

    def states(self, name: str) -> list[dict[str, Any]]:
        """Return the state of each partition of a sink. All replicas that have ever finished must agree on it."""
        stage = next(stage for stage in self.plan.stages if stage.name == name)
        states = []
        for partition in range(stage.partitions):
            # Replicas dropped since count as well: the query may end when the source of a move has finished and been
            # dropped, and the target is about to finish.
            found = self.sim.ledger.replicas_of(stage.id, partition)
            finished: list[Any] = [replica for replica in found if replica.complete]
            if not finished:
                raise Violation("every row counted once at the sink", f"nobody has finished {name}/{partition}")
            self.counts["replicas compared at the end"] += len(finished) - 1
            if self.sim.ledger.lossy:  # replicas that were lost may have had more rows
                finished = finished[-1:]
            for other in finished[1:]:
                if other.operator.state != finished[0].operator.state:
                    raise Violation("replicas agree", f"{name}/{partition}")
            states.append(finished[0].operator.state)
        return states

    def _states_so_far(self, name: str) -> list[dict[str, Any]]:
        """Return, for each partition of a sink, the state of the replica that has come farthest, dead ones included."""
        stage = next(stage for stage in self.plan.stages if stage.name == name)
        of_each = [self.sim.ledger.replicas_of(stage.id, partition) for partition in range(stage.partitions)]
        farthest: list[Any] = [max(found, key=lambda replica: replica.applied) for found in of_each if found]
        return [replica.operator.state for replica in farthest]

    def _wrong_fetched(self, version: dict[tuple[str, int], int], partly: bool) -> str | None:
        for sink, got in zip(self.sim.dataflow.sinks, self.sim.fetches.rows.values(), strict=True):
            found, expected = Counter(got), Counter(sink.model(version))
            sure = expected if not self.sim.ledger.lossy else Counter(lost_rows.sure_rows(self.sim, sink, version))
            if found - expected or (sure - found and not partly):
                missing, extra = list((sure - found).items())[:3], list((found - expected).items())[:3]
                return f"output of {sink.name}: missing {missing}, too many {extra}"
        return None

    def _wrong(self, version: dict[tuple[str, int], int], partly: bool = False) -> str | None:
        if self.sim.ledger.event_time is not None:
            return self.sim.ledger.event_time.wrong(self.sim, partly)
        if self.sim.dataflow.collected:
            return self._wrong_fetched(version, partly)
        for sink in self.sim.dataflow.sinks:
            if sink.name in self.controller.plans.failed:
                continue  # all replicas of a partition were lost, and only its stage has ended
            expected = Counter(sink.model(version))
            states = self._states_so_far(sink.name) if partly else self.states(sink.name)
            if issubclass(sink.kind, Sink):
                outside = self.sim.outside.rows_of(sink.name)
                in_state = states and "rows" in states[0]  # a query that lost all replicas has no states left
                got = Counter((row for state in states for row in state["rows"]) if in_state else outside)
                sure = expected if not self.sim.ledger.lossy else Counter(lost_rows.sure_rows(self.sim, sink, version))
                for rows in (got, Counter(outside)) if self.sim.ledger.lossy and outside else (got,):
                    if rows - expected or (sure - rows and not partly):
                        missing, extra = list((sure - rows).items())[:3], list((rows - expected).items())[:3]
                        return f"{sink.name}: missing {missing}, too many {extra}"
                self.counts["rows at sinks of runs that were lost" if partly else "rows at sinks"] += got.total()
            else:
                totals: dict[int, tuple[int, int]] = {}
                for i, key, _ in expected.elements():
                    n, total = totals.get(key, (0, 0))
                    totals[key] = (n + 1, total + i)
                found = {key: value for state in states for key, value in state["totals"].items()}
                early = partly and all(n <= totals.get(key, (0, 0))[0] for key, (n, _) in found.items())
                if self.sim.ledger.lossy:
                    early = partly or lost_rows.sure_totals(self.sim, sink, version, found, totals)
                if found != totals and not early:
                    return f"{sink.name}: {found} instead of {totals}"
        return None

    def check_replicated(self) -> None:
        """Check that the stages have as many replicas again as they ask for, as far as there are workers for them."""
        table, members = self.controller.table, self.controller.members.workers
        assert table is not None
        for stage, partition in under_replicated(self.controller.wished, table):
            workers = {replica.worker for replica in table.stages[stage][partition]}
            executors = {members[worker].about.executor for worker in workers}
            for worker, member in members.items():
                apart = self.plan.settings.same_executor or member.about.executor not in executors
                if worker not in workers and apart and not member.leaving:
                    raise Violation("everything is repaired", f"{stage}/{partition}: worker {worker} could hold a copy")
            self.counts["partitions that cannot be repaired"] += 1
        self.counts["runs that were repaired before their end"] += 1
        if any(not replica.live for stage_ in table.stages for replicas in stage_ for replica in replicas):
            raise Violation("everything is repaired", "a replica is listed and not live")
        self.sim.protects.check_at_rest()
