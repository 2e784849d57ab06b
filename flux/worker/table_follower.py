"""The newest table, which mostly arrives as changes (design: table-change).

A change applies to one table and fits no other. If a change is lost, late or repeated, later ones may not fit. Then the process
asks for the whole table, and asks again for as long as only changes come.

``PlanFollower`` are the versions of the plan, which come by themselves, and without which no table that names them is gone by.
``AssignedPartitions`` are the partitions of sources that the table assigns to a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf

from flux.dataflow.plan import FromSource, Plan
from flux.dataflow.plan_change import PlanChange, PlanVersions, decode_change
from flux.exchange.producer import Producer
from flux.exchange.replay_check import Birth
from flux.operators.user_code import described
from flux.state.jobs import JobFailed, attempt
from flux.wire.control import EdgeBorn, EdgeStored, GetPlan, NewTable, PlanChanged, PlanSeen, TableChanged
from flux.worker.effects import ToController
from flux.worker.source_scheduler import SourceScheduler
from partitioning.ids import SourcePartition, StreamId
from partitioning.table import Table, changed_by


class TableFollower:
    """The newest table of one process."""

    def __init__(self, again_s: float) -> None:
        """Begin without a table. ``again_s``: seconds that an answer may take."""
        self.table: Table | None = None
        #: A change came that does not fit, and the whole table has not come since.
        self.missed = False
        self._again_s = again_s
        self._ask_at = 0.0

    @property
    def epoch(self) -> int:
        return -1 if self.table is None else self.table.epoch

    def take(self, command: NewTable | TableChanged) -> Table | None:
        """Take a table or a change. Return the table to go by from now on; None: it stays as it is."""
        if isinstance(command, NewTable):
            if command.table.epoch < self.epoch:
                return None
            self.missed = False
            newer = command.table.epoch > self.epoch
            self.table = command.table
            return self.table if newer else None
        change = command.change
        if change.epoch <= self.epoch:
            return None
        if self.table is None or change.base != self.epoch:
            self.missed = True
            return None
        try:
            self.table = changed_by(self.table, change)
        except ValueError:
            self.missed = True
            return None
        self.missed = False
        return self.table

    def heard_of(self, epoch: int) -> None:
        """Note the epoch by which the controller goes. It has sent that table before it said so."""
        self.missed |= epoch > self.epoch

    def ask(self, now: float) -> bool:
        """Tell whether it is time to ask for the whole table."""
        if not self.missed or now < self._ask_at:
            return False
        self._ask_at = now + self._again_s
        return True


class PlanFollower(PlanVersions):
    """The versions of the plan that one process knows, and the newest table if it has to wait for one (design: plan-version)."""

    def __init__(self, plan: Plan, runs_code: bool = True) -> None:
        """Begin with one version. ``runs_code``: the process makes operators."""
        super().__init__(plan)
        #: The version that the process goes by.
        self.version = plan.version
        #: The table that waits for its plan.
        self.held: Table | None = None
        self._runs_code = runs_code
        self._again_s = plan.settings.resend_timeout
        self._secret = plan.secret
        self._lacks = False
        self._ask_at = 0.0

    def load(self, message: PlanChanged) -> PlanChange:
        """Decode a change, which imports modules of the user, and try its code. It may take long, and any thread may do it."""
        change = decode_change(message.change, self._secret)
        for stage in change.stages if self._runs_code else ():
            stage.make()
        return change

    def on_changed(
        self, message: PlanChanged, node: int, loaded: PlanChange | JobFailed | None = None
    ) -> PlanSeen | None:
        """Take a change, and return the answer; None: earlier ones are missing, and are asked for. ``loaded``: the result of
        ``load``; None: it is loaded here.

        Code that cannot be loaded is an error in the answer, as any error of a user's modules: the process goes on without the
        change, which no table will name then."""
        if message.version <= self.newest.version:
            return PlanSeen(node=node, version=message.version)
        change = loaded or attempt(partial(self.load, message))
        if not isinstance(change, JobFailed):
            taken = attempt(partial(self.take, change))
            if not isinstance(taken, JobFailed):
                self._lacks = not taken
                return PlanSeen(node=node, version=message.version) if taken else None
            change = taken
        return None if self._lacks else PlanSeen(node=node, version=message.version, error=described(change.error))

    def may_follow(self, table: Table) -> bool:
        """Tell whether a table may be followed: its plan is known. If not, the table waits."""
        known = table.plan <= self.version or self.of(table.plan) is not None
        self.held = None if known else table
        return self.held is None

    def asks(self, node: int, now: float) -> Iterator[GetPlan]:
        """Yield the request for missing changes if it is time for it."""
        if (self.held is not None or self._lacks) and now >= self._ask_at:
            self._ask_at = now + self._again_s
            yield GetPlan(node=node, version=self.newest.version)

    def due(self) -> float:
        """Return the time of the next request."""
        return self._ask_at if self.held is not None or self._lacks else inf

    def go_by(self, version: int) -> None:
        super().go_by(version)
        self.version = version


class AssignedPartitions:
    """The partitions of sources that the table assigns to a worker, as they come and go, and the edges that come to them (design:
    seek, edge-of-a-source). ``producers`` of all streams of which others may hear.

    Law: the stream of an edge that is younger than its source begins with the row or batch that the controller has stored,
    whichever worker reads the source, and no other process hears of the stream before."""

    def __init__(self, plan: Plan, worker: int, reading: SourceScheduler, producers: dict[StreamId, Producer]) -> None:
        self._plan = plan
        self._worker = worker
        self._reading = reading
        self._producers = producers
        self._epoch = -1
        #: The births that are stored, of all workers' streams.
        self._births: dict[StreamId, Birth] = {}
        #: The plan has changed since the last table.
        self._changed = False
        #: Some births may not be stored yet.
        self._waits = False
        #: The streams whose births are reported, and not stored.
        self._reported: set[StreamId] = set()
        #: Seconds until births are reported again, and the time of that.
        self._again_s, self._report_at = plan.settings.resend_timeout, 0.0

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next. Removed edges take nothing more."""
        self._plan, self._changed = plan, True
        for key, streams in self._reading.sources.items():
            for edge in [edge.id for edge in streams.edges if edge.id not in plan.edges]:
                if streams.close(edge) is not None:
                    self._producers.pop(StreamId(edge, key.partition), None)
        given = plan.next_ids()[2]
        for stream in [each for each in self._births if each.edge < given and each.edge not in plan.edges]:
            del self._births[stream]

    def on_table(self, table: Table, before: Table | None) -> None:
        self._epoch = table.epoch
        if before is None or before.sources != table.sources:
            mine = {
                SourcePartition(source.id, partition)
                for source in self._plan.sources
                if source.worker_partitions
                for partition, worker in enumerate(table.sources[source.id] if source.id < len(table.sources) else ())
                if worker == self._worker
            }
            self._read_only(mine, mine)
        if self._changed:
            self._changed = False
            self._open_edges()

    def _open_edges(self) -> None:
        """Begin the streams of edges that have come to sources which are read here."""
        mine = set(self._reading.sources)
        anew = set()
        for key in sorted(mine):
            known = {edge.id for edge in self._reading.sources[key].edges}
            for edge in self._plan.edges_of_source(key.source):
                stream = StreamId(edge.id, key.partition)
                if edge.id not in known and not self._reading.open_edge(key, edge, self._births.get(stream)):
                    anew.add(key)
            self._register(self._reading.sources[key].born)
        self._waits = True
        self._read_only(mine - anew, mine)

    def on_edge_stored(self, message: EdgeStored) -> list[Producer]:
        """Take the birth of a stream, and return the producers of which others may hear from now on."""
        stream = StreamId(message.edge, message.producer)
        birth = self._births.setdefault(stream, Birth(message.number, message.mark))
        for key, streams in self._reading.sources.items():
            if key.partition == stream.producer and stream.edge in streams.unborn:
                if not streams.store(stream.edge, birth):
                    return self._anew(key)
                return self._register([streams.of_edge(stream.edge)])
        return []

    def reports(self, now: float) -> Iterator[ToController]:
        """Yield the births that are to be stored: new ones at once, and all again after a while, as a report or its answer may be
        lost."""
        if not self._waits:
            return
        unborn = self._unborn()
        self._waits = bool(unborn)
        again = now >= self._report_at
        if again:
            self._report_at = now + self._again_s
        for stream, birth in unborn.items():
            if birth is not None and (again or stream not in self._reported):
                self._reported.add(stream)
                edge, producer = stream
                yield ToController(
                    EdgeBorn(node=self._worker, edge=edge, producer=producer, number=birth.number, mark=birth.mark)
                )
        self._reported &= unborn.keys()

    def _unborn(self) -> dict[StreamId, Birth | None]:
        """Return the streams whose births are not stored, each with its birth; None: it is not known yet."""
        return {
            StreamId(edge, key.partition): birth
            for key, streams in self._reading.sources.items()
            for edge, birth in streams.unborn.items()
        }

    def due(self) -> float:
        """Return the time of the next report."""
        if not self._waits:
            return inf
        new = any(birth is not None and stream not in self._reported for stream, birth in self._unborn().items())
        return 0.0 if new else self._report_at

    def read_again(self, edge: int, partition: int) -> list[Producer]:
        """Read a partition of a source anew, because a replica has taken over from a checkpoint and is the only one that lacks
        some of its rows. Return the producers that begin."""
        origin = self._plan.edges[edge]
        assert isinstance(origin, FromSource)
        return self._anew(SourcePartition(origin.source, partition))

    def _anew(self, key: SourcePartition) -> list[Producer]:
        mine = set(self._reading.sources)
        return self._read_only(mine - {key}, mine)

    def _read_only(self, kept: set[SourcePartition], mine: set[SourcePartition]) -> list[Producer]:
        """Go on with the kept sources, and end the others. Return the producers of those that begin now, to have all of
        ``mine``."""
        for producer in self._reading.keep_only(kept):
            producer.log.clear()
            self._producers.pop(producer.stream, None)
        self._waits = True
        return self._register(list(self._reading.begin(mine, self._epoch, self._births)))

    def _register(self, begun: list[Producer]) -> list[Producer]:
        self._producers.update((producer.stream, producer) for producer in begun)
        return begun
