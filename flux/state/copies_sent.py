"""Copies of states on their way from a worker to new replicas elsewhere, which acks from here must not pass (design: copy,
seek-past-copies)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from flux.dataflow.plan import Plan
from flux.exchange.inbound import Inbound
from flux.replica.replica import Replica
from flux.state.state_copy import StreamPosition
from partitioning.ids import StreamId
from partitioning.table import Table

#: Partition, worker and incarnation of a new replica.
Newcomer = tuple[int, int, int]


class CopiesSent:
    """The copies that are under way from one worker, each until its replica is live, or gone."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        streams: Mapping[StreamId, Inbound],
        of_stream: Callable[[StreamId], Inbound],
        ack_soon: Callable[[Inbound], None],
    ) -> None:
        """Begin without copies. ``streams``: those that the worker reads, a live mapping, to which ``of_stream`` adds one;
        ``ack_soon`` is called for a stream that may be acked further."""
        self._plan = plan
        self._worker = worker
        self._streams = streams
        self._of_stream = of_stream
        self._ack_soon = ack_soon
        #: Streams with copies under way.
        self._copied: set[StreamId] = set()
        #: The new replicas, by stage.
        self._copies: dict[int, set[Newcomer]] = {}

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next."""
        self._plan = plan
        self._copied = {stream for stream in self._copied if stream.edge in plan.edges}
        self._copies = {stage: names for stage, names in self._copies.items() if stage in plan.stages}

    def note(self, replica: Replica, worker: int, incarnation: int, positions: Iterable[StreamPosition]) -> None:
        """Note a copy of the state of a primary here, for a new replica on a worker, with the next batch of each stream that the
        replica will want: acks from here must not pass it. Streams that are not known yet have nothing in the copy: the new
        replica will want all of them."""
        name = replica.partition, worker, incarnation
        self._copies.setdefault(replica.stage.id, set()).add(name)
        for position in positions:
            copies = self._of_stream(position.stream).copies
            # If its state is copied again, the replica may still begin from the earlier copy.
            copies[name] = min(copies.get(name, position.next), position.next)
            self._copied.add(position.stream)

    def begin(self, inbound: Inbound) -> None:
        """Note that a stream is known from now on: new replicas on their way want all of it."""
        for name in self._copies.get(self._plan.edges[inbound.stream.edge].consumer, ()):
            inbound.copies[name] = 0
            self._copied.add(inbound.stream)

    def forget(self, table: Table) -> None:
        """Forget copies for replicas that are live by this table, or gone."""
        for stream in list(self._copied):
            inbound, stage = self._streams[stream], self._plan.edges[stream.edge].consumer
            for name in list(inbound.copies):
                if not self._is_coming(table, stage, *name):
                    del inbound.copies[name]
                    self._ack_soon(inbound)
            if not inbound.copies:
                self._copied.discard(stream)
        for stage, names in self._copies.items():
            names &= {name for name in names if self._is_coming(table, stage, *name)}

    def _is_coming(self, table: Table, stage: int, partition: int, worker: int, incarnation: int) -> bool:
        """Tell whether a replica is still being added, with a state from here."""
        row = table.stages[stage][partition]
        coming = any(r.worker == worker and r.incarnation == incarnation and not r.live for r in row)
        return coming and row[0].worker == self._worker
