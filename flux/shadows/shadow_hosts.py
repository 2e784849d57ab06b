"""The shadows of one worker: their places, their turns and their lane (design: shadow-host, tentative-lane).

One replica of each partition with availability has a shadow: the primary's where results go to a sink, because everything that
goes outside leaves by one door; else that of the last live replica that applies steps, so that the primary has its time for
corrections. All processes know the place from the table. Shadows send tentative marks to the places of their consumers' shadows:
without log, credit and ack, because a mark that is lost is asked for again, and one that is late or repeated is refused by its
number.

Law: an error of tentative work ends the shadow, and nothing else. Shadows take at most half of the worker's time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import pyarrow as pa

from flux.dataflow.plan import FromStage, Plan, StagePlan
from flux.dataflow.sink import TentativeEnd, TentativeNews, TentativeOutput, TentativeUndo
from flux.errors import ProtocolError
from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound, RowSlice, WordSlice
from flux.exchange.producer import ToWorker
from flux.operators import operator
from flux.operators.tentative import tentative_kind
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.shadows.forked_operator import ForkedOperator
from flux.shadows.lane import LaneOutput, rows_by_partition
from flux.shadows.overlay import TentativeEntry, TentativeRoom
from flux.shadows.peeked_operator import PeekedOperator
from flux.shadows.shadow import CorrectionDone, MarkOutput, Shadow, ShadowEffect, Undone, WantedMarks
from flux.shadows.shown_rows import ShownRows
from flux.shadows.tentative_operator import TentativeOperator
from flux.windows.statements import StreamBound, bound_of
from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.messages import StepKind, Tentative, WantTentative
from flux.wire.statistics import EndedShadow, TentativeReport, TentativeState
from partitioning.ids import ACTIVE, PartitionKey, StreamId
from partitioning.table import ReplicaAt, Table

log = logging.getLogger("flux")

#: Seconds between two looks of a shadow at its streams, as a share of its bound, and the least.
LOOK_SHARE, LOOK_MIN_S = 0.01, 0.01
#: Lives of shadows of one partition on one worker within an epoch.
LIVES_MAX = 1 << 16
#: The longest error that is reported, in characters.
REASON_CHARS_MAX = 300
#: Microseconds of event time between the marks of an operator without windows whose inputs bring no marks of their own.
MARK_US = 100_000


class ShadowReplicas(Protocol):
    """The replicas that a worker hosts, as its shadows see them."""

    worker: int
    epoch: int
    table: Table | None
    of_stage: dict[int, dict[int, Replica]]


def gives_by_event_time(made: operator.Operator) -> bool:
    """Return whether an operator gives rows when the watermark moves."""
    kind, base = type(operator.chain_of(made)[0]), operator.Operator
    return kind.on_watermark is not base.on_watermark or kind.on_event_timer is not base.on_event_timer


def host_of(stage: StagePlan, row: Sequence[ReplicaAt]) -> int | None:
    """Return the worker whose replica has the shadow of a partition. None: there is none for now."""
    if not row:
        return None
    if stage.sink is not None or stage.recovery != ACTIVE:
        return row[0].worker
    return next((each.worker for each in reversed(row) if each.live and each.kind == ACTIVE), row[0].worker)


def tentative_operator(replica: Replica) -> TentativeOperator | None:
    """Return the operator of a replica for tentative results. None: it gives none."""
    assert replica.stage.availability is not None
    match tentative_kind(replica.operator):
        case operator.PEEK:
            return PeekedOperator(replica)
        case operator.FORK:
            return ForkedOperator(replica, replica.stage.availability.bound_us / 1e6)
    return None


@dataclass
class HostedShadow:
    """A shadow on this worker, with its replica."""

    replica: Replica
    shadow: Shadow
    life: int
    #: Something has come by which its streams may be farther.
    news: bool = True
    looked_at: float = -inf

    @property
    def key(self) -> PartitionKey:
        return self.replica.key


@dataclass(frozen=True)
class GivenUp:
    """A replica that has no shadow again. ``reason``: the error that has ended its shadow, ``at`` by the wall clock; empty: it
    gives no tentative results."""

    replica: Replica
    reason: str = ""
    at: float = 0.0


class ShadowHosting:
    """The shadows of one worker. Its owner tells news by ``on_table``, ``note``, ``after_step`` and ``on_message``, and calls
    ``work`` when ``due_at`` has come. ``wall_ahead`` is that of the worker."""

    def __init__(
        self,
        plan: Plan,
        hosted: ShadowReplicas,
        streams: Mapping[StreamId, Inbound],
        tell: Callable[[Replica, TentativeNews], None],
        send: Callable[[ToWorker], None],
        counters: Counters,
        clock: Callable[[], float],
        make: Callable[[Replica], TentativeOperator | None] = tentative_operator,
    ) -> None:
        """Begin without shadows. ``streams``: those that the worker reads, a live mapping; ``tell``: hands news to the sink of a
        partition; ``send``: sends a message; ``clock`` measures the cost of marks; ``make``: makes the operator of a shadow,
        None: the stage is a barrier."""
        self._plan, self._hosted, self._streams = plan, hosted, streams
        self._tell, self._send, self._counters, self._make, self._clock = tell, send, counters, make, clock
        self._stages: dict[int, StagePlan] = {}
        self._outputs: dict[int, LaneOutput] = {}
        self._shadows: dict[PartitionKey, HostedShadow] = {}
        self.room = TentativeRoom(0)
        self.go_by(plan)
        #: Partitions whose tentative work has failed, with the replica of the time.
        self._given_up: dict[PartitionKey, GivenUp] = {}
        #: Partitions that had a shadow here before.
        self._lives: dict[PartitionKey, int] = {}
        #: By the monotonic clock: time of the next look or work; and the end of the rest after the last mark.
        self.due_at = inf
        self._rests_until = -inf
        #: The newest times, by the monotonic and by the wall clock.
        self._now = self._wall = 0.0

    def __bool__(self) -> bool:
        return bool(self._stages)

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next."""
        self._plan = plan
        self._stages = {stage.id: stage for stage in plan.stages if stage.availability is not None}
        self.room.bytes_max = plan.settings.availability_max_bytes if self._stages else 0
        self._lanes = {edge.id for edge in plan.edges if isinstance(edge, FromStage) and edge.stage in self._stages}
        self._outputs = {edge: self._outputs.get(edge) or LaneOutput(plan.edges[edge]) for edge in self._lanes}
        for key in [key for key in self._shadows if key.stage not in self._stages]:
            self._end(self._shadows.pop(key))

    # ---- places

    def on_table(self, now: float) -> None:
        """Follow the newest table: some replicas have a shadow from now on, others none."""
        if self._stages and self._hosted.table is not None:
            self._place(now)

    def _place(self, now: float) -> None:
        table = self._hosted.table
        assert table is not None
        for key, kept in list(self._shadows.items()):
            mine = self._hosted.of_stage.get(key.stage, {}).get(key.partition)
            if mine is not kept.replica or self._host(key) != self._hosted.worker:
                self._end(self._shadows.pop(key))
        for stage in self._stages:
            for partition, replica in self._hosted.of_stage.get(stage, {}).items():
                key = PartitionKey(stage, partition)
                fails = self._gives_none(replica) is not None
                if key not in self._shadows and not fails and self._host(key) == self._hosted.worker:
                    self._begin(replica, now)

    def _gives_none(self, replica: Replica) -> GivenUp | None:
        """Return the entry of a replica that has no shadow again; None: it may have one."""
        known = self._given_up.get(replica.key)
        return known if known is not None and known.replica is replica else None

    def _host(self, key: PartitionKey) -> int | None:
        table, stage = self._hosted.table, self._stages.get(key.stage)
        if table is None or stage is None or not 0 <= key.partition < len(table.stages[key.stage]):
            return None
        return host_of(stage, table.stages[key.stage][key.partition])

    def _begin(self, replica: Replica, now: float) -> None:
        stage, key = replica.stage, replica.key
        made = self._make(replica)
        if made is None:
            self._given_up[key] = GivenUp(replica)
            return
        assert stage.availability is not None
        lanes = self._lanes.intersection(stage.edges_in)
        quantum = max((self._plan.edges[edge].quantum for edge in stage.edges_in), default=0)
        if not quantum and not lanes and gives_by_event_time(replica.operator):
            quantum = MARK_US
        again, self._lives[key] = key in self._lives, self._lives.get(key, -1) + 1
        shadow = Shadow(
            made, stage.availability, quantum, self.room, lanes, stage.availability.stages_behind,
            stage.sink is not None, again, replica.context.watermark, bool(self._lanes_of(replica)),
        )  # fmt: skip
        life = self._hosted.epoch * LIVES_MAX + self._lives[key] % LIVES_MAX
        self._shadows[key] = HostedShadow(replica, shadow, life)
        self.due_at = min(self.due_at, now)

    def _end(self, hosted: HostedShadow) -> None:
        try:
            hosted.shadow.close()
        except Exception as error:
            log.warning("%s: the end of its tentative work failed: %s", hosted.replica.where, error)

    @property
    def reaches(self) -> set[int]:
        """The workers to which the shadows here send."""
        found: set[int] = set()
        for hosted in self._shadows.values():
            if hosted.shadow.state is not TentativeState.STABLE:
                found |= self._readers(hosted).keys()
        return found - {self._hosted.worker}

    def _lanes_of(self, replica: Replica) -> list[int]:
        return [outlet.edge.id for outlet in replica.outlets if outlet.edge.id in self._lanes]

    def _readers(self, hosted: HostedShadow, edge: int = -1) -> dict[int, list[int]]:
        """Return the workers with shadows of the consumers, and the partitions of each."""
        found: dict[int, list[int]] = {}
        for number in self._lanes_of(hosted.replica) if edge < 0 else (edge,):
            consumer = self._plan.edges[number].consumer
            for partition in range(self._plan.edges[number].partitions):
                host = self._host(PartitionKey(consumer, partition))
                if host is not None:
                    found.setdefault(host, []).append(partition)
        return found

    # ---- news

    def note(self, stage: int, now: float) -> None:
        """Note that streams of a stage are farther than before."""
        if stage not in self._stages:
            return
        for partition in self._hosted.of_stage.get(stage, {}):
            hosted = self._shadows.get(PartitionKey(stage, partition))
            if hosted is not None and not hosted.news:
                self._note(hosted, now)

    def _note(self, hosted: HostedShadow, now: float) -> None:
        hosted.news = True
        self.due_at = min(self.due_at, max(now, hosted.looked_at + self._look_s(hosted)))

    @staticmethod
    def _look_s(hosted: HostedShadow) -> float:
        availability = hosted.replica.stage.availability
        assert availability is not None
        return max(LOOK_MIN_S, LOOK_SHARE * availability.bound_us / 1e6)

    def after_step(self, replica: Replica, step: ReplicaStep, now: float, wall: float) -> None:
        """Take a step that a replica has applied. Tentative results of a watermark's windows are taken back before its stable
        output leaves."""
        hosted = self._shadows.get(replica.key)
        if hosted is None:
            return
        self._now, self._wall = now, wall
        with self._guarded(hosted):
            hosted.shadow.note_step(step)
        if (step.entry.kind.moves_watermarks or step.entry.kind is StepKind.FINISH) and not hosted.shadow.calm:
            self._look(hosted, now, wall)
        elif not hosted.news:
            self._note(hosted, now)

    def _guarded(self, hosted: HostedShadow) -> _Guard:
        return _Guard(self, hosted)

    def give_up(self, hosted: HostedShadow, error: Exception) -> None:
        """End the shadow of a partition because of an error. The partition itself goes on."""
        log.warning("%s: tentative results end here, and stable ones go on: %s", hosted.replica.where, error)
        first_line = str(error).partition("\n")[0] or type(error).__name__
        if self._shadows.get(hosted.key) is hosted:
            del self._shadows[hosted.key]
        self._given_up[hosted.key] = GivenUp(hosted.replica, first_line[:REASON_CHARS_MAX], self._wall)
        self._end(hosted)
        if hosted.replica.stage.sink is not None:
            self._tell(hosted.replica, TentativeUndo(None, None))

    # ---- looks and work

    def _look(self, hosted: HostedShadow, now: float, wall: float) -> None:
        hosted.news, hosted.looked_at = False, now
        replica = hosted.replica
        with self._guarded(hosted):
            bounds, applied = self._bounds(replica)
            waiting = replica.waits.by_stream
            self._do(hosted, hosted.shadow.look(wall, replica.context.watermark, bounds, applied, waiting))

    def _bounds(self, replica: Replica) -> tuple[dict[StreamId, StreamBound], dict[StreamId, int]]:
        """Return the bound of each stream behind the elements that a replica has applied, and the newest element that its state
        may have."""
        bounds: dict[StreamId, StreamBound] = {}
        applied: dict[StreamId, int] = {}
        for edge in replica.stage.edges_in:
            expected, ended = replica.waits.expected.get(edge), replica.waits.ended[edge]
            for producer in (-1,) if expected is None else expected:
                stream = StreamId(edge, producer)
                inbound = self._streams.get(stream)
                if producer in ended or inbound is None:  # marks that an ended stream has brought are due as before
                    said = NEVER if inbound is None else inbound.said.watermark
                    bounds[stream] = StreamBound(said, ended=producer in ended)
                    continue
                pending = replica.waits.by_stream.get(stream)
                first = pending[0] if pending else None
                assert first is None or isinstance(first, RowSlice | WordSlice)
                before = None if first is None else first.watermark
                bounds[stream] = bound_of(inbound.said, inbound.received[replica.partition], before, ended=False)
                applied[stream] = inbound.next_to_apply(replica.partition) - 1
        return bounds, applied

    def work(self, now: float, wall: float) -> bool:
        """Look at the streams of shadows with news, and give one mark that is due. Return whether one was given."""
        given, self._now, self._wall = False, now, wall
        for hosted in list(self._shadows.values()):
            due = hosted.news and now >= hosted.looked_at + self._look_s(hosted)
            if due or wall >= hosted.shadow.due_at:
                self._look(hosted, now, wall)
        if now >= self._rests_until:
            first = min(self._shadows.values(), key=lambda each: each.shadow.due_at, default=None)
            if first is not None and wall >= first.shadow.due_at:
                if first.replica.between_steps:
                    given = self._give(first, now, wall)
                else:  # its output waits for room
                    self._rests_until = now + LOOK_MIN_S
        self.due_at = self._due(now, wall)
        return given

    def _give(self, hosted: HostedShadow, now: float, wall: float) -> bool:
        began, shadow = self._clock(), hosted.shadow
        before = shadow.fired + shadow.revised
        with self._guarded(hosted):
            ends = [outlet.producer.next_sequence for outlet in hosted.replica.outlets]
            self._do(hosted, shadow.work(wall, ends))
        cost_s = self._clock() - began
        shadow.note_cost(cost_s)
        self._rests_until = now + 2 * cost_s
        return shadow.fired + shadow.revised > before

    def _due(self, now: float, wall: float) -> float:
        at = inf
        for hosted in self._shadows.values():
            if hosted.news:
                at = min(at, hosted.looked_at + self._look_s(hosted))
            at = min(at, max(hosted.shadow.due_at - wall + now, self._rests_until))
        return at

    # ---- effects

    def _do(self, hosted: HostedShadow, effects: Sequence[ShadowEffect]) -> None:
        replica = hosted.replica
        for effect in effects:
            match effect:
                case MarkOutput():
                    if replica.stage.sink is not None and effect.rows:
                        for batch in effect.batches:
                            self._tell(replica, TentativeOutput(batch, effect.through))
                    self._send_mark(hosted, effect)  # a stage with a sink may have others behind it
                case Undone(start, end):
                    self._tell(
                        replica, TentativeUndo(None if start == NEVER else start, None if end == END_OF_TIME else end)
                    )
                case CorrectionDone(through):
                    if replica.stage.sink is not None:
                        self._tell(replica, TentativeEnd(through))
                case WantedMarks(stream, after):
                    self._want(stream, after)

    def _send_mark(self, hosted: HostedShadow, output: MarkOutput, to: int = -1) -> None:
        """Send the results of a mark to the shadows of the consumers."""
        replica = hosted.replica
        for place, edge in enumerate([outlet.edge.id for outlet in replica.outlets]):
            if edge not in self._outputs:
                continue
            readers = self._readers(hosted, edge)
            stream = StreamId(edge, replica.partition)
            made = self._outputs[edge].made(output.batches, stream.producer, replica.where)
            for worker, partitions in readers.items():
                if to not in (-1, worker):
                    continue
                rows = [(partition, made[partition]) for partition in partitions if partition in made]
                message = Tentative(
                    *stream, hosted.life, output.revision, output.output_after, output.output_through,
                    output.sequences[place], output.created, [partition for partition, _ in rows],
                    [batch.num_rows for _, batch in rows],
                )  # fmt: skip
                payload = pa.concat_batches([batch for _, batch in rows]) if rows else None
                if payload is not None and payload.nbytes > self._plan.settings.message_max_bytes // 2:
                    self.room.dropped += 1
                    continue
                self._pass(worker, message, () if payload is None else (payload,))

    def _want(self, stream: StreamId, after: int) -> None:
        edge = self._plan.edges[stream.edge]
        assert isinstance(edge, FromStage)
        host = self._host(PartitionKey(edge.stage, stream.producer))
        if host is not None:
            self._pass(host, WantTentative(*stream, self._hosted.worker, after), ())

    def _pass(self, worker: int, message: Tentative | WantTentative, batches: tuple[pa.RecordBatch, ...]) -> None:
        if worker == self._hosted.worker:
            self.on_message(message, batches, self._now, self._wall)
        elif self._hosted.table is not None and worker in self._hosted.table.endpoints:
            self._send(ToWorker(worker, message, batches))

    # ---- the lane

    def knows(self, message: Tentative) -> bool:
        """Tell whether tentative rows are of use here; only then is a payload worth decoding. A life of an epoch that is not
        known here yet is refused: it would void all marks of true ones. Its marks are asked for again."""
        if message.edge not in self._lanes or message.life // LIVES_MAX > self._hosted.epoch:
            return False
        consumer = self._plan.edges[message.edge].consumer
        return any(key.stage == consumer for key in self._shadows)

    def on_message(
        self, message: Tentative | WantTentative, batches: Sequence[pa.RecordBatch], now: float, wall: float
    ) -> None:
        """Take a message of another shadow. ProtocolError: the plan has no such stream."""
        edge = self._plan.edges[message.edge] if message.edge in self._lanes else None
        if not isinstance(edge, FromStage) or not 0 <= message.producer < edge.producers:
            raise ProtocolError(f"stream {message.edge}.{message.producer} has no tentative rows")
        if isinstance(message, WantTentative):
            self._on_want(message, edge)
        elif self.knows(message):
            self._on_tentative(message, batches, now, wall)
        else:  # the shadow has gone, or its table is newer than ours; the payload was not decoded
            self._counters.stale += 1

    def _on_want(self, message: WantTentative, edge: FromStage) -> None:
        hosted, table = self._shadows.get(PartitionKey(edge.stage, message.producer)), self._hosted.table
        if hosted is None or table is None or message.worker not in table.endpoints:
            self._counters.stale += 1
            return
        for output in hosted.shadow.kept(message.after):
            self._send_mark(hosted, output, message.worker)

    def _on_tentative(self, message: Tentative, batches: Sequence[pa.RecordBatch], now: float, wall: float) -> None:
        stream, edge = StreamId(message.edge, message.producer), self._plan.edges[message.edge]
        rows = rows_by_partition(message, batches)
        taken = False
        for partition in list(self._hosted.of_stage.get(edge.consumer, ())):
            hosted = self._shadows.get(PartitionKey(edge.consumer, partition))
            if hosted is None:
                continue
            entry = TentativeEntry(
                stream, edge.input, message.life, message.revision, message.after, message.through, message.sequence,
                message.created, rows.get(partition),
            )  # fmt: skip
            with self._guarded(hosted):
                if hosted.shadow.take(entry, wall):
                    taken, hosted.looked_at, hosted.news = True, -inf, True
                    self.due_at = min(self.due_at, now)
        self._counters.stale += not taken

    # ---- reports

    def reports(self, shown: Mapping[PartitionKey, ShownRows]) -> Iterator[TentativeReport]:
        """Yield the state of each shadow that has given something. ``shown``: rows that sinks were shown."""
        for key, hosted in self._shadows.items():
            shadow = hosted.shadow
            if shadow.since:
                changed = shown[key].changed if key in shown else 0
                yield TentativeReport(
                    *key, shadow.state, round(shadow.since, 3), shadow.windows, shadow.rows_in_failure, changed
                )

    def ended(self) -> Iterator[EndedShadow]:
        """Yield the shadows that have ended because of an error, of replicas that are still here."""
        for key, known in self._given_up.items():
            if known.reason and self._hosted.of_stage.get(key.stage, {}).get(key.partition) is known.replica:
                yield EndedShadow(*key, round(known.at, 3), known.reason)

    def close(self) -> None:
        for hosted in self._shadows.values():
            self._end(hosted)


class _Guard:
    """A guard around the work of a shadow: an error ends the shadow."""

    def __init__(self, hosting: ShadowHosting, hosted: HostedShadow) -> None:
        self._hosting, self._hosted = hosting, hosted

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._hosting.give_up(self._hosted, error)
        return True
