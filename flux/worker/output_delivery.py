"""Output that leaves the dataflow from a worker: that of last stages, and reports that their partitions are complete.

All output passes here, when it is committed and not before (design: leaving). Egress tasks ask for the output kept for them; the
output of a stage with a sink goes ``Outside``, from the primary; readers come for the output kept for them (``OutputOffers``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from flux.dataflow.plan import Plan
from flux.dataflow.sink import QueryReaders, TentativeNews, TentativeUndo, ahead, shows_tentative
from flux.errors import QueryFailed
from flux.operators.collect import Collect
from flux.replica.output import ReaderBuffer, SinkBuffer
from flux.replica.replica import Replica
from flux.shadows.shown_rows import ShownRows
from flux.wire.control import PartitionFinished
from flux.wire.messages import Chunk, Fetch, Pull, Pulled
from flux.worker.effects import ToConnection, ToController
from partitioning.ids import PartitionKey

#: Seconds for which a reader waits here at most: well below the time after which a reader takes silence for a loss.
WAIT_S = 0.2
#: Limit of bytes in one answer, even if more was asked for: large enough to be fast, small enough not to hold up the data path.
ANSWER_BYTES = 4 << 20


class WaitingReader(NamedTuple):
    """A reader's question that waits for news until a time."""

    connection: Hashable
    pull: Pull
    until: float


class OutputOffers:
    """The answers of one worker to readers of output (design: readers). ``tell`` passes an answer to the shell; ``wake`` is
    called for a replica that has room again.

    A reader that asks for rows that do not exist yet waits here for a moment: it gets new rows as soon as they are committed, and
    need not ask in a loop. One reader may wait for each partition; a later one takes its place."""

    def __init__(
        self,
        replicas: Mapping[PartitionKey, Replica],
        tell: Callable[[ToConnection], None],
        wake: Callable[[PartitionKey], None],
    ) -> None:
        self._replicas = replicas
        self._tell = tell
        self._wake = wake
        self._waiting: dict[PartitionKey, WaitingReader] = {}

    def on_pull(self, connection: Hashable, pull: Pull, now: float) -> bool:
        """Answer a question, or let it wait. Return False if the output of this partition is not offered here."""
        key = PartitionKey(pull.stage, pull.partition)
        offer = self._offer(key)
        if offer is None:
            self._tell(ToConnection(connection, Pulled(pull.stage, pull.partition, pull.position, leads=False)))
            return False
        self.show(self._replicas[key], offer)
        full = not offer.has_room
        offer.acknowledge(pull.acknowledged)
        if full and offer.has_room:
            self._wake(key)
        if pull.waits and not self._has_news(key, offer, pull):
            self._let_go(key)
            self._waiting[key] = WaitingReader(connection, pull, now + WAIT_S)
        else:
            self._answer(connection, pull, offer)
        return True

    def show(self, replica: Replica, offer: ReaderBuffer) -> None:
        """Show the output that is committed by now."""
        offer.leads = True
        offer.show(replica.order.committed)

    def flush(self, now: float) -> None:
        """Answer questions that have waited long enough, or for which there is news."""
        for key, waiting in list(self._waiting.items()):
            offer = self._offer(key)
            if offer is None or now >= waiting.until or self._has_news(key, offer, waiting.pull):
                self._let_go(key)

    def due(self) -> float:
        return min((waiting.until for waiting in self._waiting.values()), default=math.inf)

    def _offer(self, key: PartitionKey) -> ReaderBuffer | None:
        """Return the offer of a primary."""
        replica = self._replicas.get(key)
        if replica is None or not replica.leads or not isinstance(replica.output.exit, ReaderBuffer):
            return None
        return replica.output.exit

    def _has_news(self, key: PartitionKey, offer: ReaderBuffer, pull: Pull) -> bool:
        return offer.shown > pull.position or offer.left > pull.position or self._replicas[key].complete

    def _let_go(self, key: PartitionKey) -> None:
        waiting, offer = self._waiting.pop(key, None), self._offer(key)
        if waiting is not None and offer is not None:
            self._answer(waiting.connection, waiting.pull, offer)

    def _answer(self, connection: Hashable, pull: Pull, offer: ReaderBuffer) -> None:
        batches = list(offer.since(pull.position, min(pull.bytes_max, ANSWER_BYTES)))
        finished = self._replicas[PartitionKey(pull.stage, pull.partition)].complete
        answer = Pulled(
            pull.stage, pull.partition, pull.position, len(batches), offer.left, offer.shown, finished,
            not offer.has_room,
        )  # fmt: skip
        self._tell(ToConnection(connection, answer, encoded(batches) if batches else None))


def encoded(batches: list[pa.RecordBatch]) -> pa.Buffer:
    """Encode batches with their schema, because a reader has no plan."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return stream.getvalue()


#: Bytes of one answer to an egress task: large enough to be fast, small enough not to hold up the data path.
CHUNK_BYTES = 4 << 20


class Outside(Protocol):
    """The way of committed output of stages with a sink to the outside (design: sink). It is called by the state machine, and
    hands output on without waiting."""

    def has(self, stage: int, partition: int) -> int:
        """Return the number below which the outside has all positions for good; -1: not known yet. Only partitions with a primary
        here are asked for."""

    def begins(self, stage: int, partition: int, position: int, first: bool) -> None:
        """Begin with the batch at this position, because a replica here is primary from now on. The outside may have it and more,
        unless this is the ``first`` primary of the query."""

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        """Take batch ``position`` of a partition's output: one after the other from the position with which it ``begins``."""

    def tell(self, stage: int, partition: int, news: TentativeNews) -> None:
        """Take news of tentative results, in order with ``write``. Sinks that do not define ``tentative`` hear nothing."""

    def recovered(self, stage: int, partition: int, position: int, note: Any) -> None:
        """Note that no earlier primary can have brought outside the batch ``position`` or a later one (design: ahead). ``note``:
        the note of the operator before the sink about the earlier ones; None: there is none."""

    def compared(self, stage: int, partition: int) -> bool:
        """Return whether the outside has been found to have nothing behind the position that ``recovered`` told."""

    def ends(self, stage: int, partition: int) -> None:
        """End, because the replica is primary here no longer. Its successor brings the rest outside."""


def _is_last(replica: Replica) -> bool:
    """Tell whether the query ends with the end of this partition and others: it feeds no other stage, or a sink."""
    return not replica.outlets or replica.output.exit is not None


class OutputDelivery:
    """The output that leaves from one worker. ``tell`` passes a message to the shell; ``wake`` is called for a
    replica that has room again."""

    def __init__(
        self,
        worker: int,
        plan: Plan,
        replicas: Mapping[PartitionKey, Replica],
        tell: Callable[[ToConnection | ToController], None],
        wake: Callable[[PartitionKey], None],
    ) -> None:
        self.outside: Outside | None = None
        #: Time, by the wall clock, at which the last partition here came to its end.
        self.finished_at: float | None = None
        #: Replicas here that have come to their end. It grows before others can hear of the end.
        self.ends = 0
        self._worker = worker
        self._replicas = replicas
        self._tell = tell
        self._wake = wake
        self._plan = plan
        self._sinks = any(stage.sink is not None for stage in plan.stages)
        self._kept_max = plan.settings.sink_max_bytes
        self._offering = OutputOffers(replicas, tell, wake)
        #: By partition whose sink was told of tentative results here: the rows of the newest failure.
        self.shown: dict[PartitionKey, ShownRows] = {}

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next."""
        self._plan, self._sinks = plan, any(stage.sink is not None for stage in plan.stages)

    def open(self, replica: Replica) -> None:
        """Give a new replica an exit, if its stage has a sink."""
        sink = replica.stage.sink
        if isinstance(sink, QueryReaders):
            replica.output.keep_in(ReaderBuffer(sink.kept_max(replica.stage.partitions)))
        elif sink is not None:
            replica.output.keep_in(SinkBuffer(self._kept_max))

    def close(self, replica: Replica) -> None:
        """End the output of a replica that is given up."""
        out = replica.output.exit
        self.shown.pop(replica.key, None)
        if out is not None and out.leads and not isinstance(out, ReaderBuffer) and self.outside is not None:
            self.outside.ends(*replica.key)

    def exits(self) -> Iterator[SinkBuffer]:
        """Yield the output kept here for sinks. It includes that of secondaries, because their kept output is not certainly
        outside. Output kept for readers is yielded only from the primary, which knows the rows that they can read."""
        if self._sinks:
            for replica in self._replicas.values():
                if replica.output.exit is not None and (
                    replica.leads or not isinstance(replica.output.exit, ReaderBuffer)
                ):
                    yield replica.output.exit

    def flush(self, now: float) -> None:
        """Hand on the output that is committed by now."""
        if self._sinks:
            for replica in self._replicas.values():
                out = replica.output.exit
                if out is not None:
                    if replica.leads and isinstance(out, ReaderBuffer):
                        self._offering.show(replica, out)
                    elif replica.leads and self.outside is not None:
                        self._hand_on(replica, out, self.outside)
                    self.report(replica)
            self._offering.flush(now)

    def due(self) -> float:
        """Return the time at which ``flush`` has something to do, if nothing happens before."""
        return self._offering.due()

    def _hand_on(self, replica: Replica, out: SinkBuffer, outside: Outside) -> None:
        """Hand on output. It is kept until the outside has it, because the next primary may have to hand it on again."""
        if not out.leads:
            out.leads = True
            outside.begins(*replica.key, out.left, replica.leads_since == replica.birth)
        if out.unplaced and (has := outside.has(*replica.key)) >= 0:
            out.place(has)
            self._wake(replica.key)
        shown = self.shown.get(replica.key)
        for position, batch in out.hand_on(replica.order.committed):
            if shown is not None:
                shown.write(batch)
            if (made := out.recovered(position)) is not None:
                outside.recovered(*replica.key, made, out.note)
            outside.write(*replica.key, position, batch)
        if (made := out.recovered()) is not None:
            outside.recovered(*replica.key, made, out.note)
        # Each of the two holds the replica back, so it is woken when one of them ends.
        was_full, was_uncompared = not out.has_room, out.uncompared
        out.outside_has(outside.has(*replica.key), was_uncompared and outside.compared(*replica.key))
        if (was_full and out.has_room) or out.uncompared != was_uncompared:
            self._wake(replica.key)

    def tell(self, replica: Replica, news: TentativeNews) -> None:
        """Hand news of tentative results to the sink, behind the output that is committed by now. Only a primary shows any: all
        rows go outside by one door. An undo goes in front of that output, which takes the place of the rows that it voids."""
        out, outside = replica.output.exit, self.outside
        if not replica.leads or outside is None or out is None or not shows_tentative(replica.stage.sink):
            return
        if not isinstance(news, TentativeUndo) or not out.leads:
            self._hand_on(replica, out, outside)
        self.shown.setdefault(replica.key, ShownRows()).tell(news)
        outside.tell(*replica.key, news)

    def note_end(self, replica: Replica, wall: float) -> None:
        """Note that a replica has come to its end."""
        self.ends += 1
        if _is_last(replica):
            self.finished_at = wall

    def report(self, replica: Replica) -> None:
        """Report once that the end of a last stage's partition is committed and the outside has all of its output. The report may
        end the query."""
        if replica.complete and _is_last(replica) and not replica.said_complete and self._has_left(replica):
            out = replica.output.exit
            if out is not None and out.left > out.position:
                if self._plan.durable:
                    where = f"sink {replica.stage.sink!r} of stage {replica.stage.name}, partition {replica.partition}"
                    what = f"the outside has {out.left} batches, and the whole output is {out.position}"
                    raise QueryFailed(ahead(where, what, self._plan.location))
                raise QueryFailed(
                    f"{replica.where}: its sink says that the outside has {out.left} batches, but its whole output is "
                    f"{out.position}. Positions count anew in each query: keep them with SinkContext.query"
                )
            replica.said_complete = True
            finished = PartitionFinished(node=self._worker, stage=replica.stage.id, partition=replica.partition)
            self._tell(ToController(finished))

    @staticmethod
    def _has_left(replica: Replica) -> bool:
        out = replica.output.exit
        return out is None or (out.left >= out.position and not out.uncompared)

    def on_asked(self, connection: Hashable, asked: Fetch | Pull, now: float) -> bool:
        """Answer an egress task or a reader. Return False if the output is not here, or not complete."""
        return (
            self._on_fetch(connection, asked)
            if isinstance(asked, Fetch)
            else self._offering.on_pull(connection, asked, now)
        )

    def _on_fetch(self, connection: Hashable, fetch: Fetch) -> bool:
        replica = self._replicas.get(PartitionKey(fetch.stage, fetch.partition))
        if replica is None or not isinstance(replica.operator, Collect) or not replica.complete:
            return False
        found = replica.operator.read(fetch.offset, CHUNK_BYTES)
        if found is not None:
            data, total = found
            self._tell(ToConnection(connection, Chunk(fetch.stage, fetch.partition, fetch.offset, total), data))
        return True
