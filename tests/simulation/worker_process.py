"""The worker of the simulation: the shell of a ``WorkerCore``, in place of ``flux.shell.worker_loop`` in a Spark task."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from flux.arguments import CONVERGE
from flux.dataflow.plan import Plan, WorkerSourcePlan
from flux.dataflow.source_reader import IteratorReader, PartitionReader
from flux.errors import DataLost, Fenced, NonDeterministicInputError, QueryFailed
from flux.exchange.producer import ToWorker
from flux.exchange.source_streams import ReaderPosition
from flux.state.jobs import attempt
from flux.state.sender import Aside
from flux.wire.codec import decode_batches, decode_tentative
from flux.wire.control import (
    CopyState,
    EdgeComplete,
    EdgeStored,
    Failure,
    Goodbye,
    HeartbeatSeen,
    NewTable,
    PartitionFinished,
    PlanChanged,
)
from flux.wire.messages import Chunk, Data, Hello, Install, Pulled, Relayed, Tentative
from flux.wire.parts import PartLimits
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection, UnneededLinks, needed_workers
from flux.worker.report import behind, of_readers, unapplied
from flux.worker.source_scheduler import open_reader
from partitioning.ids import ACTIVE, PartitionKey
from partitioning.table import Table
from tests.simulation.busy import Busy
from tests.simulation.faults import Faults
from tests.simulation.flows import TINY_LOG
from tests.simulation.network import Identity
from tests.simulation.process import HELD_BACK_S, TURN_S, Process
from tests.simulation.standby_watch import watch_standbys

#: Times for which small slices wait for others before they are ordered, one of these for each worker.
GATHER_S = (0.0, 0.0, 0.004)

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Longest virtual time for which a worker stands still while it copies the state of a partition.
COPY_S = 0.004
#: Largest error of a worker's clock in flows with timers.
SKEW_S = 0.1
#: An answer is slow if it takes longer than this on average. Then this number of parts of a state are under way at once.
SLOW_S, PARTS_AT_ONCE = 0.01, 4
#: Links that nothing needs close much sooner than in a real worker, so that runs see it happen.
LINK_GRACE_S = 0.1
#: Time between two looks at the rows that all consumers have applied: some looks within a short life.
DONE_EVERY_S = 0.05


def draw_limits(rng: random.Random, faults: Faults, plan: Plan) -> PartLimits:
    """Draw the sizes of parts: states in small parts and in one, made at once and in the background. If an answer takes long,
    some parts go at a time: one by one, tiny parts of a large state take longer than an attempt may. Parts are not tiny if each
    row waits for a checkpoint, or if a checkpoint has a batch for each row of the output.
    States are tiny, so changes may be larger than the state: else whole checkpoints would do."""
    part_bytes, parts, inline_bytes = rng.choice([50, 1000, 1 << 20]), rng.choice([1, 4]), rng.choice([0, 1 << 20])
    changes_max, changes_share = rng.choice([1, 4, 64, 64]), rng.choice([0.5, 100.0, 100.0, 100.0])
    answer_s = 2 * (faults.delay_s + TURN_S * faults.slowness)
    checkpoints = bool(faults.protects_per_s) or any(s.recovery != ACTIVE for s in plan.stages)
    shatters = any(stage.name.startswith("shatter") for stage in plan.stages)
    if checkpoints and (plan.settings.log_max_bytes <= TINY_LOG or shatters):
        part_bytes = max(part_bytes, 1000)
    return PartLimits(
        part_bytes, PARTS_AT_ONCE if answer_s > SLOW_S else parts, inline_bytes, changes_max, changes_share
    )


class WorkerProcess(Process):
    def __init__(self, sim: Simulation, slot: int, attempt: int, executor: str) -> None:
        super().__init__(sim, "worker", slot, attempt)
        self.executor = executor
        self.core: WorkerCore | None = None  # type: ignore[assignment]
        self._opened: set[tuple[int, int]] = set()
        self._held_back: set[tuple[int, int]] = set()  # sources that wait with their end
        self._watched: set[int] = set()
        self.load = None if sim.demand is None else Busy(sim.demand)
        self._copying: set[tuple[int, int]] = set()  # partitions whose state was copied from here
        self._copied_aside: Counter[tuple[int, int]] = Counter()
        self._skew = (
            random.Random(f"clock {sim.seed} {attempt}").uniform(-SKEW_S, SKEW_S) if sim.dataflow.timed else 0.0
        )
        sim.listening[str(attempt)] = self
        self._failure: Failure | None = None
        self._unneeded = UnneededLinks(LINK_GRACE_S)
        self._unheard: list[Any] = []  # messages that wait in the socket until the loop begins
        sim.hearts.start(self)

    @property
    def clock(self) -> float:
        return self.world.now + self._skew

    def welcomed(self, incarnation: int, workers: int) -> None:
        if self.core is None:
            self.core = self.made(workers)
            self.core.subscriptions.credit.floor = self.sim.dataflow.credit_floor
            self.core.reading.open_reader = self._open
            self.core.reading.idle_s, self.core.reading.idle_max_s = self.sim.idle_source_s, self.sim.idle_source_max_s
            self.core.reading.done_every_s = DONE_EVERY_S
            self.core.reading.idle_done_s = math.inf  # these looks are often enough for idle sources, too
            self.core.leaving.outside = self.sim.outside.of(self)
            self.sim.by_node[self.node] = self
            self.sim.welcomed(self)
            self.sim.ledger.watch_worker(self.core)
            watch_standbys(self.core, self.sim.counts)
            self.inbox.extend(self._unheard)

    def made(self, workers: int) -> WorkerCore:
        core = WorkerCore(self.sim.first_plan, self.node, workers=workers, limits=self.sim.copies)
        if self.sim.gathers:  # in a real worker, the shell finds this time
            core.turns.gather_s = GATHER_S[(self.sim.seed + self.node) % len(GATHER_S)]
        return core

    def report_again(self) -> None:
        assert self.core is not None
        self.core.report_again()

    def stats(self, now: float) -> dict[str, Any]:
        if self.core is None:
            return {}
        self.sim.standing.reports(self.core)
        for worker in self._unneeded.look(self.links, needed_workers(self.core), now):
            self.sim.counts["links that nothing needed"] += 1
            self.links.pop(worker).closed = True
        load = {} if self.load is None else {"load": self.load.report(self.core, now)}
        converges = any(stage.on_loss == CONVERGE for stage in self.sim.plan.stages)
        told = converges or self.sim.plan.settings.watermark_drift
        times = {"times": self.core.reading.times()} if told else {}
        self.sim.alignment.look(self.core)
        counts = {} if self.sim.growing is None else of_readers(self.core)
        return {"behind": behind(self.core), "unapplied": unapplied(self.core), **load, **times, **counts}

    def on_heartbeat_seen(self, order: HeartbeatSeen) -> None:
        if self.core is not None:
            self.core.reading.align(order.others_at)
            self.core.reading.stand(order.stands_at)

    def on_rejected(self) -> None:
        self.sim.replaced(self)

    def on_stop(self) -> None:
        """Go for good: the worker has been emptied, or is not needed any more. After the query the order has no effect."""
        if self.sim.controller.phase in ("starting", "running"):
            self.sim.counts["workers told to go while the query runs"] += 1
            self.report(Goodbye(node=self.node))
            self.die()
            self.sim.rivals.ended_well(self)

    def on_new_table(self, table: Table) -> None:
        core = self.core
        assert core is not None
        try:
            core.on_table(table, self.clock)
        except Fenced:
            self.sim.fenced(self)
            return
        self._watch(core)
        self.sim.ledger.watch_roles(core)
        self.sim.moves.roles(core)
        for key in self._opened - core.sources.keys():  # read by another worker from now on
            self.sim.counts["sources given to another worker"] += 1
            self._opened.discard(key)
            self._held_back.discard(key)
        self._opened |= core.sources.keys()

    def on_whole_table(self, order: NewTable, newer: bool) -> None:
        assert self.core is not None
        for edge, producers in order.complete.items():
            self.core.on_edge_complete(edge, producers)

    def _watch(self, core: WorkerCore) -> None:
        for replica in core.replicas.values():
            if id(replica) not in self._watched:
                self._watched.add(id(replica))
                self.sim.ledger.watch_replica(core, replica)
                if self.sim.growing is not None:
                    self.sim.growing.watch(replica)
        for producer in core.producers.values():
            if id(producer) not in self._watched:
                self._watched.add(id(producer))
                self.sim.ledger.watch_producer(producer, self._current, self.careless)

    def _watch_outlets(self, core: WorkerCore) -> None:
        """Watch the outlets of all replicas. Some outlets have just begun in a separate step."""
        for replica in core.replicas.values():
            self.sim.ledger.watch_outlets(replica)
        self._watch(core)

    def _current(self) -> bool:
        table = self.sim.controller.table
        return table is not None and self.node in table.endpoints

    def on_edge_complete(self, order: EdgeComplete) -> None:
        assert self.core is not None
        self.core.on_edge_complete(order.edge, order.producers)

    def on_edge_stored(self, order: EdgeStored) -> None:
        assert self.core is not None
        self.core.on_edge_stored(order, self.clock)
        self._watch(self.core)

    def on_plan_changed(self, order: PlanChanged) -> None:
        assert self.core is not None
        self.core.on_plan_changed(order, self.clock)
        self._watch(self.core)
        self.sim.ledger.watch_roles(self.core)

    def on_copy_state(self, order: CopyState) -> None:
        assert self.core is not None
        self.core.on_copy_state(order)

    def on_last_checkpoints(self, epoch: int) -> None:
        assert self.core is not None
        self.core.on_last_checkpoints(self.clock, epoch)

    def hear_data(self, identity: Identity, content: Any) -> None:
        self.inbox.append((self._on_data_plane, (identity, *content)))
        self.wake()

    def _on_data_plane(self, identity: Identity, message: Any, batches: Any) -> None:
        core = self.core
        if core is None:
            self._unheard.append((self._on_data_plane, (identity, message, batches)))
            return
        if isinstance(message, bytes):
            message = self.decoded(message)
            if message is None:
                return
            if (data := core.rows_of(identity, message)) is not None:
                batches = decode_batches(data, batches, core.plan.travels(core.plan.edges[data.edge]))
            elif isinstance(message, Data | Relayed):
                batches = []
            elif isinstance(message, Tentative):
                known = core.shadows.knows(message)
                batches = decode_tentative(message, batches, core.plan.edges[message.edge].schema) if known else []
        if isinstance(message, Install):
            self.sim.counts["copies of state in several parts"] += message.offset > 0
            self.sim.stalls.copied()
            self.sim.copied(message)
            self._installing(core, core.on_install, identity, message, batches)
            return
        if isinstance(message, Hello) and message.epoch > core.epoch:
            self.sim.counts["greetings of a newer epoch"] += 1
        core.on_data_plane(identity, message, batches, self.clock)

    def _installing(self, core: WorkerCore, event: Callable[..., None], *given: Any) -> None:
        """Handle an event by which a replica may come to life."""
        known = set(core.replicas.values())
        event(*given, self.clock)
        self.sim.counts["copies of state installed"] += set(core.replicas.values()) != known
        self._watch(core)

    def on_answer(self, worker: int, message: Any) -> None:
        assert self.core is not None
        self.core.on_answer(worker, message, self.clock)

    def turn(self) -> None:
        """Take a turn of the core. Input that is not deterministic is reported again and again, as the shell does with every
        error, until the controller hears of it."""
        try:
            if self._failure is None:
                self._turn_of_core()
        except (NonDeterministicInputError, QueryFailed, DataLost) as error:
            self._failure = Failure(node=self.node, kind=type(error).__name__, message=str(error))
            other = "output than was shown" if isinstance(error, QueryFailed) else "batches than were ordered"
            lost = isinstance(error, DataLost)
            self.sim.counts["workers that lack records of a log" if lost else f"workers that got other {other}"] += 1
        if self._failure is not None:
            self.report(self._failure)
            self.wake(HELD_BACK_S)

    def _turn_of_core(self) -> None:
        core, now = self.core, self.clock
        assert core is not None
        self.sim.hearts.turned(self)
        steps = self.world.throw(4)
        worked = 0
        while worked < steps:
            before = core.steps
            if not core.work(now):
                break
            worked += 1
            if self.sim.growing is not None and self.sim.growing.look(core):
                self._watch_outlets(core)
            self.sim.counts["steps applied in one call with others"] += (
                core.steps - before if core.steps > before + 1 else 0
            )
        if worked < steps:
            self.sim.ledger.check_idle(core, now)
        if worked:
            self.sim.strikes.first_step()
            if self.dead or self._in_a_long_step():
                return
        busy = bool(worked)
        batches = self._read(core, idle=not busy)
        busy = busy or batches > 0
        if self.dead:
            return
        for producer in core.producers.values():
            if producer.dirty and producer.log:
                self.sim.ledger.publish(producer)
        if self.sim.growing is not None:
            self.sim.growing.check_stored(core)
        sent = False
        for effect in core.poll(now):
            sent = True
            if isinstance(effect, ToWorker):
                self.send(effect)
                if isinstance(effect.message, Install) and effect.message.offset == 0:
                    self._stall(effect.message)
            elif isinstance(effect, Aside):
                self._aside(effect)
            elif isinstance(effect, ToConnection):
                content: Any = self.encoded(effect.message) if self.sim.faults.encoded else effect.message
                if isinstance(effect.message, Chunk | Pulled):
                    content = (effect.message, effect.payload)
                assert isinstance(effect.connection, tuple)
                self.sim.network.of(effect.connection).reply(effect.connection, content)
            else:
                if isinstance(effect.message, PartitionFinished):
                    self.sim.ledger.check_finished(core, effect.message)
                self.report(effect.message)
        self.beat(now)
        if busy or sent:
            self.sim.ledger.check_worker(core)
            self.note_credit()
        if busy:
            self.wake(TURN_S * self.slowness * max(batches, 1))
        else:
            held_back = bool(self._held_back) and not any(
                core.wants(*key) for key in core.sources.keys() - self._held_back
            )
            again = now + HELD_BACK_S if held_back else core.reading.due(now)
            rest = min(core.due(), self._beat_at, again) - now
            self.wake(max(rest, TURN_S * self.slowness))

    def _in_a_long_step(self) -> bool:
        """Tell whether a long step begins. Its output goes out at its end, and messages that come meanwhile are read then."""
        faults = self.sim.faults
        long = self.sim.hearts.long_step(self)
        if long is not None:
            self.pause(long, busy=True)
            self.wake()
            return True
        if self.sim.network.calm or not self.world.chance(faults.slow_step_probability):
            return False
        seconds = self.world.random.random() * faults.slow_step_s
        if seconds > self.sim.plan.settings.heartbeat_timeout / 2 and not self.sim.strikes.spares(self):
            return False
        self.sim.counts["long steps"] += 1
        self.pause(seconds, busy=True)
        self.wake()
        return True

    def _stall(self, install: Install) -> None:
        """Stand still for the time that the copy of a state took, unless it was made in the background."""
        if (install.stage, install.partition) in self._copied_aside:
            self._copied_aside -= Counter([(install.stage, install.partition)])
            return
        seconds = self.world.random.random() * COPY_S
        if not self._for_a_standby(install):
            self._note_stall((install.stage, install.partition), seconds)
        self.pause(seconds, busy=True)

    def _for_a_standby(self, install: Install) -> bool:
        """Tell whether a copy is a checkpoint: repairs do not wait for checkpoints, nor checkpoints for repairs."""
        assert self.core is not None
        replica = self.core.replicas.get(PartitionKey(install.stage, install.partition))
        peers = {} if replica is None else replica.order.peers
        return any(peer.live and peer.incarnation == install.incarnation for peer in peers.values())

    def _aside(self, effect: Aside) -> None:
        """Do a job as another thread does. Its input must not change meanwhile, so the job reads it at the end."""
        seconds = self.world.random.random() * COPY_S
        if effect.what in ("copy", "checkpoint"):
            self._copied_aside[effect.key] += 1
        if effect.what == "copy":
            self._note_stall(effect.key, seconds)
        self.sim.counts[f"states in the background: {effect.what}"] += 1
        self.world.after(seconds, self._aside_done, effect)

    def _aside_done(self, effect: Aside) -> None:
        if not self.dead:
            assert self.core is not None
            done = (self._installing, (self.core, self.core.on_done, effect.token, attempt(effect.job)))
            self.inbox.append(done)
            self.wake()

    def _note_stall(self, key: tuple[int, int], seconds: float) -> None:
        """Note that a partition stands still. A deposed primary that does not know it yet holds up no replica: another one leads
        the partition."""
        if self.sim.leader_of(*key) == self.node:
            self._copying.add(key)
            self.sim.ledger.tables.stall(*key, self.world.now, seconds)

    def die(self) -> None:
        super().die()
        self.sim.ledger.tables.resume_all(self._copying)

    def _open(self, about: WorkerSourcePlan, partition: int, position: ReaderPosition) -> PartitionReader:
        assert self.core is not None
        self.sim.counts["sources read again from the middle"] += position not in (0, None)
        streams = self.core.sources[about.id, partition]
        self.sim.counts["sources read by another worker"] += streams.producers[0].incarnation > 0
        reader = IteratorReader(self._patiently((about.id, partition), open_reader(about, partition, position)))
        return self.sim.opened(about, partition, reader)

    def _patiently(self, key: tuple[int, int], reader: PartitionReader) -> Iterator[pa.RecordBatch | None]:
        """Yield the batches of a reader, then None as long as the source may not end."""
        take = reader.next
        while True:  # one batch at a time, as the scheduler takes them
            assert self.core is not None
            self.sim.alignment.asked(self.core, key)
            try:
                batch = take()
            except StopIteration:
                break
            yield batch
        while not self.sim.may_end(*key):
            self._held_back.add(key)
            yield None
        self._held_back.discard(key)

    def _read(self, core: WorkerCore, idle: bool) -> int:
        """Read sources as the shell does, and return the number of batches. Each takes as long as a turn without one."""
        if not core.sources:
            core.read(idle, self.clock)  # the core counts turns
            return 0
        self.sim.counts["turns with a full log"] += sum(not streams.has_room for streams in core.sources.values())
        ended = sum(streams.ended for streams in core.sources.values())
        batches = 0
        while core.read(idle, self.clock + batches * TURN_S * self.slowness):
            batches += 1
            if sum(streams.ended for streams in core.sources.values()) > ended:
                ended += 1
                self.sim.strikes.last_batch()
                if self.dead:
                    break
        return batches
