"""The shell around the controller, like ``controller.server``: it hears reports, looks at its clock, and sends decisions.

After each decision the laws about decisions are checked. Now and then the shell stands still, and events meanwhile wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from controller.decide.controller import Tell
from flux.errors import ProtocolError
from flux.wire.codec import decode_report
from flux.wire.control import CopyState, EdgeComplete, Heartbeat, NewTable, TableChanged
from flux.wire.frames import encode
from partitioning.table import Table
from tests.simulation.network import Identity
from tests.simulation.violation import Violation
from tests.simulation.witness import WITNESS
from tests.simulation.world import TICK_S

#: Delay of a late change of the table, which comes behind others.
LATE_TABLE_S = 0.1

if TYPE_CHECKING:
    from tests.simulation.run import Simulation


class Server:
    """The shell of the controller, with the laws about its decisions."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.world, self.network, self.faults = sim.world, sim.network, sim.faults
        self.counts, self.controller = sim.counts, sim.controller
        #: Epoch of the last take-over.
        self.taken_over = -1
        #: Slots opened in place of workers that were given up.
        self.in_place: set[int] = set()
        self._tables: dict[int, Table] = {}  # epoch -> the table of the controller
        self._spoils = random.Random(f"which tables {sim.seed}")
        self._take_overs = 0
        self._aborted: set[tuple[int, int]] = set()
        self._under_way: dict[tuple[int, int], Any] = {}
        self._checked: tuple[Any, ...] | None = None  # the parts that were found right last
        self._wakes = 0.0
        self._unread: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def start(self) -> None:
        self.world.after(TICK_S, self._tick)

    # ---- events

    def hears(self, identity: Identity, frame: bytes) -> None:
        if self.sleeps(self.hears, identity, frame):
            return
        try:
            report = decode_report(frame)
        except ProtocolError:
            self.counts["reports that were none"] += 1
            return
        if isinstance(report, Heartbeat) and self.controller.members.by_connection(identity) is not None:
            self.sim.rivals.heard(report.node)  # reports on an unknown connection are refused
            self.sim.alignment.reported(report.stats)
        self.sim.hearts.reported(identity, report)
        self.perform(self.controller.on_report(identity, report, self.world.now))

    def sleeps(self, event: Callable[..., None], *given: Any) -> bool:
        """Tell whether the shell stands still. The event then waits until the shell goes on."""
        sleeps = self.world.now < self._wakes
        if sleeps:
            self._unread.append((event, given))
        return sleeps

    def pause(self) -> None:
        seconds = self.world.random.random() * self.faults.controller_pause_s
        if self.world.now >= self._wakes:
            self.counts["pauses of the controller"] += 1
            self._wakes = self.world.now + seconds
            self.network.disturbed(self._wakes)
            self.world.after(seconds, self._goes_on)

    def _goes_on(self) -> None:
        """Go on after a pause. The shell looks at its clock before it reads the waiting events, or only after that."""
        unread, self._unread = self._unread, []
        if self.world.chance(0.5):
            self.sim.alignment.ticked()
            self.perform(self.controller.on_tick(self.world.now))
        for event, given in unread:
            event(*given)

    def _tick(self) -> None:
        if self.world.now >= self._wakes:
            self.sim.alignment.ticked()
            self.perform(self.controller.on_tick(self.world.now))
            self.sim.ledger.tables.check_turns(self.world.now)
            self.in_place.update(self.sim.operators.start_missing())
        if self.controller.phase != "ended":
            self.world.after(TICK_S, self._tick)

    def closed(self, node: int) -> None:
        if self.sleeps(self.closed, node):
            return
        self.perform(self.controller.on_closed(node, self.world.now))

    def check_table(self, table: Table) -> None:
        """Check that the table of a process is one that the controller made. If several were made at once, only the last was
        seen here."""
        made = self._tables.get(table.epoch)
        if made is not None and made != table:
            raise Violation("a table is what the controller made", f"epoch {table.epoch}: {table}, made was {made}")

    def perform(self, effects: list[Tell]) -> None:
        self.sim.follow()
        if self.controller.table is not None:
            self._tables[self.controller.table.epoch] = self.controller.board.shown
        self._note_repairs()
        self.sim.moves.look()
        seen = self._checked_parts()
        if seen != self._checked:
            self.sim.ledger.tables.check()
            self.controller.validate()
            self._checked = seen
        else:
            self.controller.people.book.validate()  # requests change with their moves, and are not in the parts compared
        for effect in effects:
            assert isinstance(effect.connection, tuple)
            self.sim.alignment.tells(effect.command)
            late = 0.0
            if isinstance(effect.command, NewTable | TableChanged | EdgeComplete | CopyState) and not self.network.calm:
                if self.world.chance(self.faults.late_order_probability):
                    self.counts["orders that came late"] += 1
                    late = self.world.random.random() * self.faults.late_order_s
                    self.network.disturbed(self.world.now + late)
                if isinstance(effect.command, CopyState) and self.sim.strikes.twice():
                    self.network.of(effect.connection).reply(effect.connection, encode(effect.command), late)
            if isinstance(effect.command, TableChanged) and self._is_spoilt(effect):
                continue
            self.network.of(effect.connection).reply(effect.connection, encode(effect.command), late)
        if self.controller.table is not None and not self.sim.spark.jobs:
            self.sim.spark.start()
        total = sum(stage.partitions for stage in self.controller.plan.terminal)
        if self.controller.phase == "running" and len(self.controller.unfinished) < total:
            self.sim.strikes.once(self.faults.crash_at_the_end, "crashes when the first partition had finished")

    def _checked_parts(self) -> tuple[Any, ...]:
        """Return all parts at which ``Controller.validate`` and the laws about tables look, requests aside: equal parts give
        equal results. Most reports, heartbeats and pulses, change none of these parts. Tables and registrations of members
        are replaced, never changed."""
        controller, members = self.controller, self.controller.members
        repairs, moving, departures = controller.repairs, controller.moving, controller.departures
        return (
            controller.phase,
            controller.plans.current,
            controller.table,
            tuple(members.workers.values()),
            tuple(members.leaving),
            [member.epoch for member in members.processes],
            [(key, a.worker, a.incarnation, a.phase, a.from_worker) for key, a in repairs.under_way.items()],
            frozenset(repairs.safety.unsafe),
            tuple(moving.under_way),
            [(id(job), job.phase, job.move) for job in moving.jobs()] if moving else None,
            tuple(departures.drains),
            frozenset(departures.slots.closed),
            frozenset(departures.dismissed),
            tuple(departures._sent_home),
        )

    def _is_spoilt(self, effect: Tell) -> bool:
        """Tell whether a change of the table does not go out like others: it is lost, comes twice, or behind later ones."""
        probability = self.faults.spoilt_table_probability
        if not probability or self.network.calm or self._spoils.random() >= probability:
            return False
        self.counts["changes of the table that were spoilt"] += 1
        self.network.disturbed()
        frame, how = encode(effect.command), self._spoils.choice(["lost", "twice", "late"])
        assert isinstance(effect.connection, tuple)
        link = self.network.of(effect.connection)
        if how == "twice":
            link.reply(effect.connection, frame)
            link.reply(effect.connection, frame)
        elif how == "late":
            self.network.disturbed(self.world.now + LATE_TABLE_S)
            self.world.after(LATE_TABLE_S, link.reply, effect.connection, frame)
        return True

    def _note_repairs(self) -> None:
        repairs = self.controller.repairs
        now = {key: (a.worker, a.incarnation) for key, a in repairs.under_way.items()}
        if repairs.take_overs > self._take_overs:
            assert self.controller.table is not None
            self._take_overs, self.taken_over = repairs.take_overs, self.controller.table.epoch
            self.counts["repairs that overlapped a take-over"] += bool(self._under_way)
        gone = {key for key, which in self._under_way.items() if key not in now}
        table = self.controller.table
        for key in gone:
            listed = [] if table is None else [(r.worker, r.incarnation) for r in table.row(*key)]
            if self._under_way[key] not in listed:
                self._aborted.add(key)
                self.counts["additions that came to nothing"] += 1
        for key in now.keys() - self._under_way.keys():
            self.counts["additions begun"] += 1
            if repairs.under_way[key].kind == WITNESS:
                self.counts["witnesses added" if repairs.under_way[key].from_worker is None else "witnesses moved"] += 1
            self.counts["additions begun again"] += key in self._aborted
        self._under_way = now

    def new_epoch(self) -> None:
        table = self.controller.table
        if table is not None and self.controller.phase == "running":
            self.counts["epochs"] += 1
            self.controller.board.table = msgspec.structs.replace(table, epoch=table.epoch + 1)
            self.controller.board.tell_all(self.controller.board.whole_table())
            self.perform(self.controller.board.take())
