"""The story of a run: each message with sender and receiver, each step, commit, loss and decision, one line each.

A run without a story pays nothing: ``Story`` puts itself around the seams of one simulation, as the checkers do, and only on
request. ``Story`` draws no random numbers, so that the told run is the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flux.dataflow.plan import FromSource, FromStage
from flux.errors import FluxError
from flux.exchange.inbound import RowSlice
from flux.exchange.log import End
from flux.exchange.producer import Producer
from flux.replica.kinds import kind_of
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.wire.codec import decode_command, decode_data, decode_report
from flux.wire.control import NewTable, TableChanged
from flux.wire.messages import StepKind
from flux.worker.core import WorkerCore
from partitioning.ids import DISK, StreamId
from partitioning.table import ReplicaAt, Table, changed_by
from tests.simulation.evidence import batches_of
from tests.simulation.ingress_process import IngressProcess
from tests.simulation.network import Identity, Link
from tests.simulation.process import Process
from tests.simulation.step_watch import watch_steps
from tests.simulation.violation import Key
from tests.simulation.wording import QUIET, Wording, key_tag, number_of, numbers
from tests.simulation.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: The subject of an event: partitions (``"0/1"``: stage 0, partition 1) and streams (``"0.1"``). None: it is in every story.
About = Iterable[str] | None


@dataclass(frozen=True)
class Event:
    """One line of a story."""

    #: Seconds since the start of the run.
    at: float
    text: str
    #: Empty for an event that only the whole story needs.
    about: frozenset[str] | None

    def __str__(self) -> str:
        return f"{self.at * 1000:9.1f}  {self.text}"


@dataclass
class _Seen:
    """The parts of a replica that were told last."""

    role: str
    #: Number of committed steps.
    committed: int


class Story:
    """The story of a simulation that has not begun. ``said`` puts the product's own text, such as the reason of an event, into
    the words of the story."""

    def __init__(self, sim: Simulation, said: Callable[[str], str] = str) -> None:
        self.sim = sim
        self.events: list[Event] = []
        self.words = Wording(sim.plan, said)
        self.began = sim.world.now
        self._table: Table | None = None
        self._replicas: dict[tuple[int, Key], _Seen] = {}
        self._awaited: set[tuple[int, Key]] = set()
        self._logs: dict[
            int, tuple[int, int, bool]
        ] = {}  # producer -> base and end of its log, and whether the log is full
        self._starved: set[tuple[int, int]] = set()  # producer, and worker that gives no credit to it
        self._noted = 0
        self._kept: list[Any] = []  # so that ids stay unique
        for link in sim.network.links:
            self._watch_link(link)
            self._watch_owner(link)
        self._around(sim.network, "link", self._link)
        self._around(sim.ledger, "watch_replica", self._watch_replica)
        self._around(sim.server, "perform", self._performing)
        for owner, method, note in [
            (sim, "crash", self._crash),
            (sim, "fenced", lambda process: self._fault(process, "was given up meanwhile, finds out, and ends")),
            (
                sim.server,
                "closed",
                lambda node: self.note(f"controller              sees the connection of worker {node} close"),
            ),
            (sim.server, "pause", lambda: self.note("controller              stands still for a while")),
            (sim.spark, "failed", lambda attempt: self._fault(attempt, "fails")),
        ]:
            self._before(owner, method, note)

    # ---- events

    def note(self, text: str, about: About = None) -> None:
        kept = None if about is None else frozenset(about)
        self.events.append(Event(self.sim.world.now - self.began, text, kept))

    def told(self, about: set[str] | None = None) -> list[Event]:
        """Return the events about these partitions and streams with those of every story; None: return all."""
        if about is None:
            return self.events
        return [event for event in self.events if event.about is None or event.about & about]

    def concerned(self, detail: str) -> set[str]:
        """Return the partitions and streams named in the detail of a broken law, with the output streams of the partitions."""
        plan, words, keys = self.sim.plan, self.words, set[Key]()
        ids = {name: stage for stage, name in words.stages.items()}
        keys.update((int(s), int(p)) for s, p in re.findall(r"\((\d+), (\d+)\)", detail) if int(s) in words.stages)
        for name, partition in re.findall(r"(\w+)(?:/|, partition )(\d+)", detail):
            if name in ids:
                keys.add((ids[name], int(partition)))
        for name in re.findall(r"output of (\w+)", detail):
            for stage in plan.stages:
                if stage.name in (name, f"{name}.toDF"):
                    keys.update((stage.id, partition) for partition in range(stage.partitions))
        streams = {StreamId(int(edge), int(producer)) for edge, producer in re.findall(r"stream (\d+)\.(\d+)", detail)}
        made = [edge for edge in words.edges.values() if isinstance(edge, FromStage)]
        keys |= {(edge.stage, stream.producer) for edge in made for stream in streams if edge.id == stream.edge}
        streams |= {StreamId(edge.id, partition) for edge in made for stage, partition in keys if edge.stage == stage}
        return {key_tag(key) for key in keys} | {str(stream) for stream in streams}

    # ---- seams

    @staticmethod
    def _before(owner: Any, method: str, note: Callable[..., None]) -> None:
        inner = getattr(owner, method)

        def told(*given: Any, **named: Any) -> Any:
            note(*given, **named)
            return inner(*given, **named)

        setattr(owner, method, told)

    @staticmethod
    def _around(owner: Any, method: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, method)
        setattr(owner, method, lambda *given, **named: around(inner, *given, **named))

    # ---- links

    def _link(self, inner: Callable[..., Link], *given: Any, **named: Any) -> Link:
        link = inner(*given, **named)
        self._watch_link(link)
        self._watch_owner(link)
        return link

    def _watch_owner(self, link: Link) -> None:
        """Watch the turns of the process that owns a link, from its first link on, which leads to the controller."""
        process = getattr(link._to_client, "__self__", None)
        if isinstance(process, Process):
            for method in ("turn", "send", "report"):
                self._before(process, method, lambda *_: self._look(process))
            self._before(process, "pause", lambda seconds, busy=False: self._pause(process, seconds, busy))

    def _watch_link(self, link: Link) -> None:
        send, reply, break_ = link.send, link.reply, link.break_

        def told_send(content: Any) -> None:
            send(content)
            self._sent(link, content, up=True, lost=link._up[-1].lost)

        def told_reply(identity: Identity, content: Any, delay_s: float = 0.0) -> None:
            before = len(link._down)
            reply(identity, content, delay_s)
            lost = len(link._down) == before or link._down[-1].lost
            self._sent(link, content, up=False, lost=lost, late_s=delay_s)

        def told_break() -> None:
            lost = len(link._up) + len(link._down)
            break_()
            lost -= sum(not flying.lost for flying in link._up)
            client, server = self._ends(link)
            self.note(f"the connection of {client} to {server} breaks, {lost} messages on it are lost")

        link.send, link.reply, link.break_ = told_send, told_reply, told_break  # type: ignore[method-assign]
        for way, direction in [("cut_up", 1), ("cut_down", -1)]:

            def cut(seconds: float, direction: int = direction) -> None:
                one, other = self._ends(link)[::direction]
                self.note(f"nothing gets from {one} to {other} for {seconds * 1000:.0f} ms")

            self._before(link, way, cut)

    def _ends(self, link: Link) -> tuple[str, str]:
        """Return the names of the client and the server."""
        process = getattr(link._to_client, "__self__", None)
        if isinstance(process, Process):
            return self.name(process), "controller"
        server = getattr(link._to_server, "__self__", None)
        owner = next((each for each in self._processes() if link in each.links.values()), None)
        return (
            "egress task" if owner is None else self.name(owner),
            self.name(server) if isinstance(server, Process) else "controller",
        )

    def _processes(self) -> Iterator[Process]:
        yield from self.sim.workers
        yield from self.sim.by_node.values()
        yield from self.sim.spark.attempts

    def _sent(self, link: Link, content: Any, up: bool, lost: bool, late_s: float = 0.0) -> None:
        message, payload = content if isinstance(content, tuple) else (content, None)
        if isinstance(message, bytes):
            decode = decode_data if link.data else decode_report if up else decode_command
            try:
                message = decode(message)
            except FluxError:
                message = None  # garbage, on purpose
        if isinstance(message, QUIET):
            return
        one, other = self._ends(link)[:: 1 if up else -1]
        after = " (lost)" if lost else f" (comes {late_s * 1000:.0f} ms late)" if late_s else ""
        for text, about in self.words.of(message, payload):
            self.note(f"{f'{one} -> {other}':<23} {text}{after}", about)

    # ---- processes

    @staticmethod
    def name(process: Process) -> str:
        if isinstance(process, IngressProcess):
            return f"task {process.index} ({process.attempt})"
        return f"worker {process.node}" if process.node >= 0 else f"slot {process.index}"

    def _crash(self, victim: WorkerProcess, seen: bool = True, back: bool = True) -> None:
        how = "" if seen else "; nobody sees its connections close"
        self._fault(victim, "dies" + how + ("" if back else "; Spark does not start its task again"))

    def _pause(self, process: Process, seconds: float, busy: bool) -> None:
        what = "is busy" if busy else "stands still"
        if not busy or seconds > 0.01:
            self._fault(process, f"{what} for {seconds * 1000:.0f} ms")

    def _fault(self, process: Process, text: str) -> None:
        self.note(f"{self.name(process):<24}{text}")

    def _look(self, process: Process) -> None:
        """Note the changes since the last look; called before each turn and each message."""
        if isinstance(process.core, WorkerCore):
            self._look_at_replicas(process.core)
        for producer in process.producers():
            self._look_at_log(process, producer)

    def _look_at_replicas(self, core: WorkerCore) -> None:
        name = f"worker {core.worker}"
        for key, replica in core.replicas.items():
            at = (core.worker, key)
            role = "primary" if replica.primary else "secondary"
            seen = self._replicas.get(at)
            if seen is None or seen.role != role:
                self._replicas[at] = _Seen(role, replica.order.committed)
                where = f"{self.words.key(key)} (epoch {core.epoch}"
                steps = f", {replica.applied} steps applied, {replica.order.end} ordered)" if core.epoch else ")"
                self.note(f"{name:<24}is {role} of {where}{steps}", [key_tag(key)])
            self._look_at_commit(core.worker, key, replica)
        for at in [at for at in self._replicas if at[0] == core.worker and at[1] not in core.replicas]:
            del self._replicas[at]
            self.note(
                f"{name:<24}has no replica of {self.words.key(at[1])} any more (epoch {core.epoch})", [key_tag(at[1])]
            )
        awaited = {(core.worker, (stage, partition)) for stage, partition in core.awaited}
        for at in sorted(awaited - self._awaited):
            self.note(
                f"{name:<24}waits for the state of {self.words.key(at[1])} (epoch {core.epoch})", [key_tag(at[1])]
            )
        self._awaited = {at for at in self._awaited if at[0] != core.worker} | awaited

    def _look_at_commit(self, worker: int, key: Key, replica: Replica) -> None:
        seen = self._replicas.get((worker, key))
        committed = replica.order.committed
        if seen is not None and committed > seen.committed and replica.stage.replicas > 1:
            steps = numbers("step", range(seen.committed, committed))
            self.note(f"{f'worker {worker}':<24}knows {steps} of {self.words.key(key)} to be committed", [key_tag(key)])
            seen.committed = committed

    def _look_at_log(self, process: Process, producer: Producer) -> None:
        log, stream = producer.log, producer.stream
        if id(producer) not in self._logs:
            self._kept.append(producer)
        base, end, full = self._logs.get(id(producer), (log.base, log.base, False))
        now_full = log.bytes >= log.bytes_max
        self._logs[id(producer)] = log.base, log.end, now_full
        name = f"{self.name(process):<24}"
        consumer = self.words.edges[stream.edge].consumer
        if not self.words.edges[stream.edge].from_stage:
            for sequence in range(max(end, log.base), log.end):
                entry = log[sequence]
                touched = sorted(entry.touches.tolist())
                what = "the end" if isinstance(entry.element, End) else f"rows for {numbers('partition', touched)}"
                text = f"{name}reads batch {sequence} of stream {stream}: {what}"
                self.note(text, [str(stream), *(key_tag((consumer, p)) for p in touched)])
        if log.base > base and end > base:
            gone = numbers("batch", range(base, log.base))
            them = "it" if log.base == base + 1 else "them"
            self.note(f"{name}forgets {gone} of stream {stream}: every replica has applied {them}", [str(stream)])
        if now_full != full:
            text = f"full, {log.bytes:,} of {log.bytes_max:,} bytes" if now_full else "open again"
            self.note(f"{name}the log of stream {stream} is {text}", [str(stream)])
        for worker, cursor in producer._cursors.items():
            waits = cursor.nonce is not None and cursor.next < log.end and cursor.sent_bytes >= cursor.granted
            at = (id(producer), worker)
            if waits and at not in self._starved:
                self.note(f"{name}has no credit left at worker {worker} for stream {stream}", [str(stream)])
            (self._starved.add if waits else self._starved.discard)(at)

    # ---- steps

    def _watch_replica(self, inner: Callable[..., None], core: WorkerCore, replica: Replica) -> None:
        inner(core, replica)
        began: list[dict[StreamId, int]] = []  # the places at which the output of a step that has just begun will begin

        def begins(now: float) -> None:
            self._look_at_replicas(core)
            began[:] = [_ends(replica)]

        def ends(step: ReplicaStep, applied: bool | None) -> None:
            self._stepped(core, replica, step, began.pop() if began else _ends(replica))

        watch_steps(replica, begins, ends)

    def _stepped(self, core: WorkerCore, replica: Replica, step: ReplicaStep, starts: dict[StreamId, int]) -> None:
        key, number = (*step.key,), step.number
        text = f"applies step {number} of {self.words.key(key)}: {self._what(step)}"
        if replica.applied == number:
            text = f"is in step {number} of {self.words.key(key)} and waits for room in its logs"
        for stream, end in _ends(replica).items():
            start = starts.get(stream, end)
            text += "" if stream in starts else f"; begins stream {stream}"
            if end > start:
                held = ", held back until it is committed" if core.producers[stream].release_from <= start else ""
                text += f"; gives {numbers('batch', range(start, end))} of stream {stream}{held}"
        self.note(f"{f'worker {core.worker}':<24}{text}", [key_tag(key)])
        self._look_at_commit(core.worker, key, replica)

    def _what(self, step: ReplicaStep) -> str:
        if step.entry.kind is StepKind.TICK:
            return "the timers that are due"
        if step.entry.kind is StepKind.WATERMARK:
            return f"watermarks {', '.join(map(str, step.entry.watermarks))}"
        if step.entry.kind is StepKind.FINISH:
            return "the end of its input"
        if step.entry.kind is StepKind.CHANGE:
            return "edges that come with the plan"
        if any(slice_.ends_stream for slice_ in step.slices):
            return f"the end of stream {step.slices[0].stream}"
        rows = sum(slice_.batch.num_rows for slice_ in step.slices if isinstance(slice_, RowSlice))
        batches = " and ".join(f"{numbers('batch', batches_of(slice_))} of {slice_.stream}" for slice_ in step.slices)
        return f"{number_of('row', rows)}, {batches}"

    # ---- the controller

    def _performing(self, inner: Callable[..., None], effects: list[Any]) -> None:
        self.words.know(self.sim.controller.board.plan)
        for effect in effects:
            if isinstance(effect.command, NewTable):
                self._look_at_table(effect.command.table)
            elif isinstance(effect.command, TableChanged):
                change = effect.command.change
                if self._table is not None and change.base == self._table.epoch:
                    self._look_at_table(changed_by(self._table, change))
        history = self.sim.controller.repairs.history
        for event in list(history)[self._noted :]:
            stage = next((stage.id for stage in self.sim.plan.stages if stage.name == event.stage), None)
            about = None if stage is None else [key_tag((stage, event.partition))]
            self.note(f"{'controller':<24}{replace(event, why=self.words.said(event.why))}", about)
        self._noted = len(history)
        inner(effects)

    def _look_at_table(self, table: Table) -> None:
        before = self._table
        if before is not None and before.epoch >= table.epoch:
            return
        self._table = table
        self.note(f"{'controller':<24}makes the table of epoch {table.epoch}")
        for stage, partitions in enumerate(table.stages):
            for partition, listed in enumerate(partitions):
                if before is None or before.row(stage, partition) != listed:
                    key = stage, partition
                    self.note(f"{'':<24}{self.words.key(key)}: {_listed(listed)}", [key_tag(key)])
        for source, readers in enumerate(table.sources):
            for partition, worker in enumerate(readers):
                if before is None or source >= len(before.sources) or before.sources[source][partition] != worker:
                    edges = (each for each in self.words.edges.values() if isinstance(each, FromSource))
                    streams = [f"{edge.id}.{partition}" for edge in edges if edge.source == source]
                    name = self.words.sources[source]
                    self.note(f"{'':<24}{name}/{partition} is read by worker {worker}", streams)


def _ends(replica: Replica) -> dict[StreamId, int]:
    """Return the numbers of the next batches of a replica's streams."""
    return {outlet.producer.stream: outlet.producer.next_sequence for outlet in replica.outlets}


def _listed(replicas: tuple[ReplicaAt, ...]) -> str:
    if not replicas:
        return "no replica left"
    first, *others = replicas
    text = f"primary on worker {first.worker}"
    for other in others:
        role = "kept in the directory by" if other.kind == DISK else f"{kind_of(other).role} on"
        text += f", {role} worker {other.worker}" + ("" if other.live else " (its state is to come)")
    return text
