"""The loop of one Spark ingress task: reads batches, waits for room, sends, ends when everything is acked (design: ingress).

``Prefetch`` reads an iterator that may block, in a thread of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import Generic, TypeVar

import pyarrow as pa

from flux.dataflow.plan import Plan
from flux.errors import FluxError, RefusedError, UsageError
from flux.operators.batches import split
from flux.shell.process import (
    ControllerLink,
    Rendezvous,
    refuse_rejected,
    register,
    short_collections,
    usual_collections,
)
from flux.shell.threads import Bell
from flux.shell.transport import Sockets
from flux.shell.worker_links import WorkerLinks
from flux.tasks.ingress import IngressTask
from flux.tasks.micro_batches import MicroBatch
from flux.windows.window import NEVER
from flux.wire.control import (
    FromController,
    Goodbye,
    GoodbyeSeen,
    Heartbeat,
    HeartbeatSeen,
    NewTable,
    PlanChanged,
    RegisterAgain,
    Stop,
    TableChanged,
    TableMissed,
    TableSeen,
)
from flux.worker.effects import failure_of
from flux.worker.table_follower import TableFollower
from partitioning.table import Table
from partitioning.warm_up import warm_up

T = TypeVar("T")
_END = object()


class Prefetch(Generic[T]):
    """A thread that reads an iterator one item ahead. ``take`` never blocks; ``bell`` rings when there is something to take.

    An iterator that may block, read in a thread of its own, one item ahead.

    So the loop that owns the sockets goes on acking, sending and greeting while the input is silent."""

    def __init__(self, items: Iterable[T], bell: Bell) -> None:
        self.ended = False
        self._items = items
        self._bell = bell
        self._ready: queue.Queue[object] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="flux-prefetch", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for item in self._items:
                self._ready.put(item)
                self._bell.ring()
        except BaseException as error:  # raised again by ``take``
            self._error = error
        self._ready.put(_END)
        self._bell.ring()

    def drain(self, timeout: float) -> None:
        """Throw away the items still to come, for at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while not self.ended and time.monotonic() < end:
            try:
                self.ended = self._ready.get(timeout=0.1) is _END
            except queue.Empty:
                pass

    def take(self) -> T | None:
        """Return the next item, or None if there is none yet or no more (``ended``). Raises the error of the iterator."""
        try:
            item = self._ready.get_nowait()
        except queue.Empty:
            return None
        if item is _END:
            self.ended = True
            self._thread.join()
            if self._error is not None:
                raise self._error
            return None
        return item  # type: ignore[return-value]


#: Longest sleep in a wait for room or for acks; messages wake the loop earlier.
WAIT_S = 0.05


class Ingress:
    """The loop of one ingress task, which sends one partition of a source. To be used once."""

    def __init__(
        self,
        plan: Plan,
        rendezvous: Rendezvous,
        source: int,
        partition: int,
        micro_batch: MicroBatch | None = None,
    ) -> None:
        """``micro_batch``: the micro-batch to which the partition belongs; None: the partition is that of a DataFrame."""
        self.plan = plan
        self.micro_batch = micro_batch
        self.rendezvous = rendezvous
        self.source = source
        self.partition = partition
        self.sockets = Sockets(rendezvous.keys, rendezvous.secret, plan.settings.message_max_bytes)
        self.control = ControllerLink(self.sockets, rendezvous, plan.settings.controller_timeout)
        self.links = WorkerLinks(self.sockets, plan.settings.message_max_bytes)
        self.end = 0  # the number behind the last row that was read, as the stream counts rows
        self.sent: list[int] = []  # by edge: the number behind the last row that has travelled
        self.newest, self.late = NEVER, 0  # the greatest time of the rows, and the number of late ones
        self._ready = False
        self._drained = False  # all rows that were read are applied
        self._dismissed = False
        self._node = -1
        self._newest = TableFollower(plan.settings.resend_timeout)
        self._turns = 0
        self._beat_at = 0.0
        self.input: Prefetch[pa.RecordBatch] | None = None

    def run(self, batches: Iterable[pa.RecordBatch], attempt: int) -> int:
        """Send everything and return the number of rows once all of them are applied."""
        try:
            warm_up()
            short_collections()
            return self._join(batches, attempt)
        finally:
            usual_collections()
            self.sockets.close()

    def _join(self, batches: Iterable[pa.RecordBatch], attempt: int) -> int:
        welcome, early = register(
            self.sockets, self.control, self.rendezvous,
            role="ingress", index=self.partition, attempt=attempt,
            edges=[edge.id for edge in self.plan.edges_of_source(self.source)],
        )  # fmt: skip
        self._node = welcome.node
        core = IngressTask(self.plan, self.source, self.partition, welcome.incarnation, self.micro_batch)
        # Here, because the table may have come already: then rows are read before any turn.
        core.wall_ahead = time.time() - time.monotonic()
        try:
            for command in early:
                self._on_command(core, command, time.monotonic())
            return self._send(core, batches)
        except UsageError:
            raise  # for the program that writes the input; the query goes on
        except FluxError as error:
            if not (isinstance(error, RefusedError) and error.code == "stale"):
                self.control.report(failure_of(-1, error))
            raise

    def _send(self, core: IngressTask, batches: Iterable[pa.RecordBatch]) -> int:
        settings = self.plan.settings
        while not self._ready or not core.find_start():
            self._turn(core, WAIT_S)
        bell = self.sockets.bell()
        self.input = Prefetch(batches, bell)
        while not self.input.ended:
            bell.clear()
            batch = self.input.take()
            if batch is None:
                self._turn(core, 0 if self.input.ended else WAIT_S)
                continue
            for part in split(core.needed(batch), settings.batch_max_rows, settings.batch_max_bytes):
                rest: pa.RecordBatch | None = part
                while rest is not None:
                    while not core.has_room:
                        self._turn(core, WAIT_S)
                    rest = core.append(rest, time.monotonic())
                    self._turn(core, 0)
        core.finish(time.monotonic())
        # Before others hear of the end, so that the controller has the last count by then.
        self._beat(core, time.monotonic())
        while not core.drained:
            self._turn(core, WAIT_S)
        self._drained, self.end, self.sent, self.newest = True, core.end, core.sent, core.newest
        self.late = core.late
        self._beat(core, time.monotonic())
        while not self._dismissed:
            self._turn(core, WAIT_S)
        return core.streams.rows

    def drained(self, timeout: float) -> bool:
        """Throw away the rest of the input, after a stop; return False if it has not ended in time."""
        if self.input is None:
            return True
        self.input.drain(timeout)
        return self.input.ended

    def _turn(self, core: IngressTask, wait_s: float) -> None:
        now = time.monotonic()
        core.wall_ahead = time.time() - now
        self._turns += 1
        self.links.send(core.poll(now))
        if now >= self._beat_at:
            self._beat(core, now)
        for ready in self.sockets.wait(wait_s):
            if ready is self.control.link:
                for command in self.control.commands():
                    self._on_command(core, command, now)
            elif ready in self.links:
                for worker, message in self.links.answers(ready):
                    core.on_answer(worker, message, now)

    def _beat(self, core: IngressTask, now: float) -> None:
        self._beat_at = now + self.plan.settings.heartbeat_interval
        self._ask_for_table(now)
        for asked in core.plans.asks(self._node, now):
            self.control.report(asked)
        self.control.report(Heartbeat(node=self._node, progress=self._turns, stats=core.stats()))
        self.control.check(now)
        if self._drained:
            self.control.report(Goodbye(node=self._node))

    def _on_command(self, core: IngressTask, command: FromController, now: float) -> None:
        if isinstance(command, GoodbyeSeen) or (isinstance(command, Stop) and self._drained):
            self._dismissed = True
            return
        refuse_rejected(command)
        if isinstance(command, RegisterAgain):
            self.control.register_again(self._node)
        elif isinstance(command, HeartbeatSeen):
            self._newest.heard_of(command.epoch)
            self._ask_for_table(now)
        elif isinstance(command, NewTable | TableChanged):
            self._on_table(core, command, now)
        elif isinstance(command, PlanChanged):
            seen = core.plans.on_changed(command, self._node)
            if seen is not None:
                self.control.report(seen)
            if core.plans.held is not None:
                self._follow(core, core.plans.held, now)

    def _on_table(self, core: IngressTask, command: NewTable | TableChanged, now: float) -> None:
        table = self._newest.take(command)
        if table is not None:
            self.links.follow(table)
        # A repeated table: the report before may be lost.
        if table is not None or (isinstance(command, NewTable) and core.plans.held is None):
            self._follow(core, table or self._newest.table, now)
        self._ask_for_table(now)

    def _follow(self, core: IngressTask, table: Table | None, now: float) -> None:
        """Follow a table, and report it, unless its plan has still to come."""
        if table is not None and core.on_table(table, now):
            self._ready = True
            self.control.report(TableSeen(node=self._node, epoch=table.epoch))

    def _ask_for_table(self, now: float) -> None:
        if self._newest.ask(now):
            self.control.report(TableMissed(node=self._node, epoch=self._newest.epoch))
