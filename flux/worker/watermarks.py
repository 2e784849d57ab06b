"""The watermarks that the primaries of a worker order next, from statements about the streams that they read (design:
watermark-statements).

Each input's watermark is the least over its streams, each bounded by statements that this very partition may go by. It is
handed to a replica, to be ordered, at once if a window may end by it, otherwise after an interval. All partitions of a stage are
looked at together, and not for each statement: statements by which nothing can end are told apart by the streams alone.

A stage that forfeits goes past streams that do not move, window by window, while its state is beyond its limit (``StateLimit``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from flux.dataflow.availability import FORFEIT
from flux.dataflow.plan import EdgePlan, FromMicroBatches, Plan, StagePlan
from flux.exchange.bounds import WatermarkPace
from flux.exchange.inbound import Inbound, RowSlice, WordSlice
from flux.replica.replica import Replica
from flux.windows.statements import StreamBound, bound_of, least
from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.statistics import StageTime
from flux.worker.hosted_replicas import HostedReplicas
from partitioning.ids import PartitionKey, StreamId

#: Seconds between two looks at the streams of a stage; and between two looks at the watermarks of its partitions, for each stream
#: of each partition, so that a look takes a small part of the time.
LOOK_S, LOOK_STREAM_S = 0.001, 20e-6
#: Seconds between two looks at the state of the replicas here, and so between two windows that are closed without a stream.
STATE_LOOK_S = 0.02


class StateLimit:
    """The limit of the state of a worker's replicas while an input is missing (``spark.flux.availability.maxState``)."""

    def __init__(self, plan: Plan, hosted: HostedReplicas) -> None:
        self._stages = [stage.id for stage in plan.stages if stage.availability is not None]
        limits = [stage.availability.max_state for stage in plan.stages if stage.availability is not None]
        self._bytes_max = next((limit for limit in limits if limit is not None), None)
        self._hosted = hosted
        self._look_at = -inf
        self._over = False
        self._may_forfeit = any(stage.availability and stage.availability.overflow == FORFEIT for stage in plan.stages)

    @property
    def stops(self) -> bool:
        """Whether other inputs are to stand still: the state is beyond its limit, and no stage forfeits."""
        return not self._may_forfeit and self.over(inf)

    def over(self, now: float) -> bool:
        """Tell whether the state is beyond its limit. ``now``: infinite for a look at once."""
        if self._bytes_max is not None and now >= self._look_at:
            replicas = [each for stage in self._stages for each in self._hosted.of_stage.get(stage, {}).values()]
            self._over = sum([replica.state_bytes for replica in replicas]) > self._bytes_max
            self._look_at = now + STATE_LOOK_S if now < inf else self._look_at
        return self._over


class WatermarkScheduler:
    """The schedule by which the replicas of one worker get new watermarks. ``due_at``: the time at which ``look`` must be called
    again at the latest."""

    def __init__(
        self,
        plan: Plan,
        hosted: HostedReplicas,
        streams: dict[StreamId, Inbound],
        wake: Callable[[PartitionKey], None],
    ) -> None:
        """Begin without statements. ``streams``: those that the worker reads, a live mapping; ``wake`` is called for a replica
        that has a watermark to order."""
        self._plan = plan
        self._hosted = hosted
        self._streams = streams
        self._wake = wake
        self._timed: dict[int, StagePlan] = {}
        self._pace: dict[int, WatermarkPace] = {}
        #: Watermarks of edges from micro-batches, which hold for all their streams.
        self._edges_at: dict[int, int] = {}
        #: Time of the next look at the streams, by stage with news: something may end by them.
        self._news: dict[int, float] = {}
        #: Time of the next look at all partitions, by stage: a watermark has risen by which nothing ends.
        self._risen: dict[int, float] = {}
        #: Times of the last looks, by stage: at the streams, and at all partitions.
        self._looked: dict[int, float] = {}
        self._looked_at_all: dict[int, float] = {}
        #: By replica of a stage that forfeits, while its state is beyond the limit: the bound of each stream, and since when it
        #: has not moved.
        self._stands: dict[PartitionKey, dict[StreamId, tuple[int, float]]] = {}
        self.due_at = inf
        self.go_by(plan)

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next."""
        self._plan = plan
        self._timed = {stage.id: stage for stage in plan.stages if stage.timed_inputs}
        self._pace = {stage.id: pace_of(plan, stage.edges_in) for stage in self._timed.values()}
        self.limit = StateLimit(plan, self._hosted)
        for noted in (self._news, self._risen, self._looked, self._looked_at_all):
            for stage in [each for each in noted if each not in self._timed]:
                del noted[stage]
        self._edges_at = {edge: at for edge, at in self._edges_at.items() if edge in plan.edges}
        self._stands = {key: stands for key, stands in self._stands.items() if key.stage in self._timed}

    def note(self, stage: int, now: float) -> None:
        """Note that the watermarks of a stage's replicas may have risen."""
        if stage in self._timed and stage not in self._news:
            self._news[stage] = at = max(now, self._looked.get(stage, -inf) + LOOK_S)
            self.due_at = min(self.due_at, at)

    def note_edge(self, edge: int, watermark: int, now: float) -> None:
        """Note that all rows of an edge from micro-batches that are applied nowhere yet have at least this time."""
        self._edges_at[edge] = max(watermark, self._edges_at.get(edge, NEVER))
        self.note(self._plan.edges[edge].consumer, now)

    def note_all(self, now: float) -> None:
        for stage in self._timed:
            self.note(stage, now)

    def _interval_s(self, stage: StagePlan) -> float:
        streams = sum(self._plan.edges[edge].producers for edge in stage.edges_in)
        look_s = LOOK_STREAM_S * streams * max(len(self._hosted.partitions.get(stage.id, ())), 1)
        return min(max(look_s, LOOK_S), max(self._pace[stage.id].interval_s, LOOK_S))

    def look(self, now: float) -> None:
        """Hand watermarks that have risen to the primaries whose time has come.

        News do not wait for the time of a look that was due before: a window may end by them."""
        for stage in [stage for stage, at in self._news.items() if at <= now]:
            del self._news[stage]
            self._looked[stage] = now
            all_at = self._looked_at_all.get(stage, -inf)
            if self._may_fire(stage):
                all_at += self._interval_s(self._timed[stage])
            else:
                all_at += self._pace[stage].interval_s
            self._risen[stage] = min(max(now, all_at), self._risen.get(stage, inf))
        for stage in [stage for stage, at in self._risen.items() if at <= now]:
            del self._risen[stage]
            self._looked_at_all[stage] = now
            later = min((self._offer(replica, now) for replica in self._primaries(stage)), default=inf)
            if later < inf:
                self._risen[stage] = later
        self.due_at = min([*self._news.values(), *self._risen.values()], default=inf)

    def _may_fire(self, stage: int) -> bool:
        """Tell whether all streams of a stage have passed the time at which a window of any partition here may end, or a timer
        fires. Partitions may still be behind these statements."""
        quantum, fires_at, first = self._pace[stage].quantum, END_OF_TIME, None
        for replica in self._primaries(stage):
            assert replica.clock is not None
            first = first or replica
            fires_at = min(fires_at, int(replica.context.event_timers.next))
            if quantum > 0:
                fires_at = min(fires_at, (replica.clock.watermark // quantum + 1) * quantum)
        if first is None:
            return False
        assert first.clock is not None
        edges = [edge for number in first.clock.timed for edge in self._edges(first, number)]
        return all(self._has_passed(first, edge, fires_at) for edge in edges)

    def _has_passed(self, replica: Replica, edge: EdgePlan, at: int) -> bool:
        """Tell whether the worker has heard of no stream of an edge that holds a replica back before this time."""
        expected = replica.waits.expected.get(edge.id)
        if expected is None:
            return isinstance(edge, FromMicroBatches) and self._edges_at.get(edge.id, NEVER) >= at
        ended = replica.waits.ended[edge.id]
        for producer in expected:
            inbound = self._streams.get(StreamId(edge.id, producer))
            holds = inbound is None or (inbound.said.watermark < at and not inbound.said.idle)
            if holds and producer not in ended:
                return False
        return True

    def _primaries(self, stage: int) -> Iterator[Replica]:
        for replica in self._hosted.of_stage.get(stage, {}).values():  # no stage is there before the first table
            if replica.primary and not replica.finished:
                yield replica

    def _offer(self, replica: Replica, now: float) -> float:
        """Hand a replica its watermarks if they have risen and it is time. Return the time of the next look; infinite: with the
        next news."""
        clock = replica.clock
        assert clock is not None
        watermarks = list(clock.ordered)
        for number in clock.timed:
            watermarks[number] = max(watermarks[number], self._least(replica, number))
        if watermarks == clock.ordered:
            return self._forfeit(replica, now)
        before, risen = clock.watermark, min(watermarks)
        pace, at = self._pace[replica.stage.id], clock.offered_at
        fires = risen >= replica.context.event_timers.next
        if not (fires or pace.passes(before, risen)) and now < at + pace.interval_s:
            return at + pace.interval_s
        if watermarks != clock.offered:
            clock.offer(watermarks, now)
            self._wake(replica.key)
        return inf

    def _forfeit(self, replica: Replica, now: float) -> float:
        """Close the oldest window of a replica without the streams that do not move, if the state here is beyond its limit
        (design: forfeit). Return the time of the next look; infinite: with the next news."""
        availability, clock, quantum = replica.stage.availability, replica.clock, self._pace[replica.stage.id].quantum
        if availability is None or availability.overflow != FORFEIT or not self.limit.over(now):
            self._stands.pop(replica.key, None)
            return inf
        assert clock is not None
        standing, moving = self._standing(replica, now, availability.bound_us / 1e6)
        target = min([bound for bound in moving if bound < END_OF_TIME], default=NEVER)
        target = target // quantum * quantum if quantum > 0 and target > NEVER else target
        if standing and target > clock.watermark:
            oldest = (clock.watermark // quantum + 1) * quantum if quantum > 0 and clock.watermark > NEVER else target
            through = min(oldest, target)
            clock.offer([max(each, through) for each in clock.ordered], now, forfeits=True)
            self._wake(replica.key)
        return now + STATE_LOOK_S

    def _standing(self, replica: Replica, now: float, patience_s: float) -> tuple[list[StreamId], list[int]]:
        """Return the streams that hold a replica back and have not moved for ``patience_s``, and the bounds of the others. If no
        stream moves, the state does not grow, and there are none. A stream with rows that are here and not ordered moves."""
        assert replica.clock is not None
        known, found = self._stands.setdefault(replica.key, {}), {}
        standing: list[StreamId] = []
        moving: list[int] = []
        moves_now = False
        for number in replica.clock.timed:
            for edge in self._edges(replica, number):
                ended, expected = replica.waits.ended[edge.id], replica.waits.expected.get(edge.id)
                if expected is None:
                    return [], []
                for producer in expected:
                    stream = StreamId(edge.id, producer)
                    bound = self._bound(replica, stream)
                    if producer in ended or bound.idle:
                        continue
                    before, since = known.get(stream, (bound.watermark, now))
                    moves = bound.watermark != before or replica.waits.first_unordered(stream) is not None
                    found[stream] = bound.watermark, now if moves else since
                    stands = now - found[stream][1] >= patience_s
                    moves_now |= not stands
                    if stands and bound.watermark <= replica.clock.watermark:
                        standing.append(stream)
                    else:
                        moving.append(bound.watermark)
        self._stands[replica.key] = found
        return (standing, moving) if moves_now else ([], [])

    def _least(self, replica: Replica, number: int) -> int:
        """Return the watermark of an input: the least over its streams."""
        bounds: list[StreamBound] = []
        for edge in self._edges(replica, number):
            expected = replica.waits.expected.get(edge.id)
            if isinstance(edge, FromMicroBatches) and expected is None:
                bounds.append(StreamBound(self._edges_at.get(edge.id, NEVER)))
                continue
            if expected is None:
                return NEVER
            ended = replica.waits.ended[edge.id]
            for producer in expected:
                if producer in ended:
                    continue
                bound = self._bound(replica, StreamId(edge.id, producer))
                if bound.watermark == NEVER and not bound.idle:
                    return NEVER
                bounds.append(bound)
        return least(bounds)

    def holders(self) -> Iterator[Inbound]:
        """Yield the streams that alone keep a window of a primary here open: others have passed its end (design: owed-rows)."""
        for stage in self._timed:
            quantum, first = self._pace[stage].quantum, next(self._primaries(stage), None)
            if quantum <= 0 or first is None or first.clock is None:
                continue
            open_: dict[int, list[Inbound]] = {}
            for edge in (edge for number in first.clock.timed for edge in self._edges(first, number)):
                for producer in first.waits.expected.get(edge.id, ()):
                    inbound = self._streams.get(StreamId(edge.id, producer))
                    if inbound is not None and producer not in first.waits.ended[edge.id] and not inbound.said.idle:
                        open_.setdefault(inbound.said.watermark // quantum, []).append(inbound)
            if len(open_) > 1:
                yield from open_[min(open_)]

    # ---- reports

    def times(self, stage: int) -> list[StageTime]:
        """Return the event times of the primaries of a stage here, also of those that have finished, whose counts are the last
        ones. The stream that holds the watermark back is named for the primary that is farthest behind."""
        if stage not in self._timed:
            return []
        mine = [replica for replica in self._hosted.of_stage.get(stage, {}).values() if replica.leads]
        last = min(mine, key=_watermark, default=None)
        return [self._time(replica, replica is last) for replica in mine]

    def _time(self, replica: Replica, named: bool) -> StageTime:
        holder = self._holder(replica) if named and not replica.finished else None
        return StageTime(replica.partition, _watermark(replica), *replica.left_out(), *(holder or StreamId(-1, -1)))

    def _holder(self, replica: Replica) -> StreamId | None:
        """Return the stream with the least bound; None: none is waited for."""
        assert replica.clock is not None
        found: list[tuple[int, StreamId]] = []
        for number in replica.clock.timed:
            for edge in self._edges(replica, number):
                ended = replica.waits.ended[edge.id]
                for producer in replica.waits.expected.get(edge.id, ()):
                    stream = StreamId(edge.id, producer)
                    bound = self._bound(replica, stream)
                    if producer not in ended and not bound.idle:
                        found.append((bound.watermark, stream))
        return min(found)[1] if found else None

    # ---- look-ups

    def _edges(self, replica: Replica, number: int) -> Iterator[EdgePlan]:
        for each in replica.stage.edges_in:
            edge = self._plan.edges[each]
            if edge.input == number:
                yield edge

    def _bound(self, replica: Replica, stream: StreamId) -> StreamBound:
        inbound = self._streams.get(stream)
        if inbound is None:
            return StreamBound()
        pending = replica.waits.first_unordered(stream)
        assert pending is None or isinstance(pending, RowSlice | WordSlice)
        before = None if pending is None else pending.watermark
        return bound_of(inbound.said, inbound.received[replica.partition], before, ended=False)


def _watermark(replica: Replica) -> int:
    assert replica.clock is not None
    return replica.clock.watermark


def pace_of(plan: Plan, edges: tuple[int, ...]) -> WatermarkPace:
    """Return the pace of the watermarks that come over these edges."""
    quantum = max((plan.edges[edge].quantum for edge in edges), default=0)
    return WatermarkPace(quantum, plan.settings.watermark_interval)
