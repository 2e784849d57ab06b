"""A controller without a shell, and workers that consist of their reports only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

import flux
from controller.balance.load import Move
from controller.decide.controller import Controller, Tell
from controller.planning.compiler import compile_plan
from controller.replicas.addition_limits import LISTED_EVERY_S
from controller.replicas.additions import Phase
from flux.dataflow.plan_change import PlanChange
from flux.dataflow.source import DataFrameSource, WorkerSource
from flux.settings import Settings
from flux.wire.control import NewTable, PlanChanged, PlanSeen, Register, ReplicaCaughtUp, Stop, TableChanged, TableSeen
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table

SECRET = b"s"
SCHEMA = pa.schema([("x", pa.int64())])


class Sink(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def register(index: int, role: str = "worker", attempt: int = 0, **more: Any) -> Register:
    edges = [0] if role == "ingress" else []
    about = {"host": "h", "pid": 1, "executor": f"e{index}", "endpoint": f"at {index}", "edges": edges}
    return Register(role=role, index=index, attempt=attempt, **{**about, **more})


def epoch_of(command: NewTable | TableChanged) -> int:
    return command.table.epoch if isinstance(command, NewTable) else command.change.epoch


class Cluster:
    """A controller with a chain of ``stages``, the last called Sums, each with ``partitions`` and ``replicas`` (both numbers),
    and workers that confirm every table unless told otherwise. ``readers``: partitions of a source that workers read."""

    def __init__(
        self, slots: int = 3, replicas: int = 2, partitions: int = 1, stages: int = 1, readers: int = 0, collect: int = 0,
        executors: Any = None, hosts: Any = None, domains: Any = None, recovery: str = "active", streams: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """``streams``: the rows come in micro-batches. ``executors``: the executor of each slot, by default another for each.
        ``hosts``, ``domains``: the host and the domain of each slot, by default one for all."""
        flow: Any = DataFrameSource("rows", SCHEMA)
        if readers:
            flow = WorkerSource("rows", lambda partition: iter(()), readers, SCHEMA)
        if streams:
            flow = flux.stream(SCHEMA)
        for number in range(stages - 1):
            flow = flux.stage(partitions=partitions, replicas=replicas, name=f"s{number}", schema=SCHEMA)(_same)(flow)
        last: Any = _same if collect else Sink
        flow = flux.stage(partitions=partitions, replicas=replicas, name="Sums", recovery=recovery)(last)(flow)
        settings = replace(Settings.of(), **{"heartbeat_timeout": 1e9, "heartbeat_last_timeout": 1e9, **options})
        self.core = Controller(compile_plan([flow], settings, lambda s: s, "q", SECRET, collect), slots, now=0.0)
        self.now = 1.0
        self.executors = executors or {}
        self.hosts, self.domains = hosts or {}, domains or {}
        self.orders: list[tuple[Any, Any]] = []
        self.mute: set[str] = set()  # connections that do not confirm tables
        self.deaf: set[str] = set()  # connections that do not confirm versions of the plan
        for slot in range(slots):
            self.join(slot)

    # ---- processes

    def join(self, slot: int, attempt: int = 0) -> int:
        where = {"host": self.hosts.get(slot, "h"), "domain": self.domains.get(slot, "")}
        about = register(slot, attempt=attempt, executor=self.executors.get(slot, f"e{slot}"), **where)
        self.take(self.core.on_report(f"w{slot}.{attempt}", about, self.now))
        member = self.core.members.in_slot(slot)
        return -1 if member is None else member.node

    def take(self, effects: list[Tell]) -> None:
        self.core.validate()
        for effect in effects:
            self.orders.append((effect.connection, effect.command))
            member = self.core.members.by_connection(effect.connection)
            table = isinstance(effect.command, NewTable | TableChanged)
            if table and member is not None and effect.connection not in self.mute:
                seen = TableSeen(node=member.node, epoch=epoch_of(effect.command))
                self.take(self.core.on_report(effect.connection, seen, self.now))
            if isinstance(effect.command, PlanChanged) and member is not None and effect.connection not in self.deaf:
                known = PlanSeen(node=member.node, version=effect.command.version)
                self.take(self.core.on_report(effect.connection, known, self.now))

    def confirm(self, node: int, epoch: int) -> None:
        self.report(node, TableSeen(node=node, epoch=epoch))

    def report(self, node: int, message: Any) -> None:
        member = self.core.members.workers[node]
        self.take(self.core.on_report(member.connection, message, self.now))

    def lose(self, node: int) -> None:
        self.take(self.core.on_closed(node, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.core.on_tick(self.now))

    # ---- observed state

    def sent(self, kind: type) -> list[Any]:
        return [order for _, order in self.orders if isinstance(order, kind)]

    def told(self, connection: str) -> list[Any]:
        return [order for to, order in self.orders if to == connection]

    @property
    def table(self) -> Table:
        assert self.core.table is not None
        return self.core.table

    def replicas(self, partition: int = 0, stage: int = 0) -> tuple[ReplicaAt, ...]:
        return self.table.replicas(stage, partition)

    def stops(self, connection: str) -> list[Any]:
        return [order for order in self.told(connection) if isinstance(order, Stop)]

    def holders(self, partition: int = 0, stage: int = 0) -> list[int]:
        return [replica.worker for replica in self.replicas(partition, stage)]

    def all_holders(self) -> set[int]:
        """List the workers that have any copy."""
        return {replica.worker for stage in self.table.stages for replicas in stage for replica in replicas}

    def kinds(self) -> list[str]:
        """List the kinds of events since the last call."""
        return [event.kind for event in self.core.repairs.news()]

    def has(self, partition: int = 0, stage: int = 0) -> str:
        """List the kinds of the replicas, such as "a s"; one that is not live yet is in brackets."""
        short = [(replica.kind[0], replica.live) for replica in self.replicas(partition, stage)]
        return " ".join(kind if live else f"({kind})" for kind, live in short)

    def events(self, kind: str) -> list[Any]:
        return [event for event in self.core.repairs.history if event.kind == kind]

    # ---- requests

    def add(self, change: PlanChange) -> int:
        """Ask to add stages; return the number of the request."""
        number = self.core.next_request()
        self.core.people.add(change, b"code", self.now, number)
        self.take(self.core.board.take())
        return number

    def remove(self, name: str, cascade: bool = False) -> int:
        """Ask to remove a stage; return the number of the request."""
        number = self.core.next_request()
        self.core.people.remove(name, cascade, self.now, number)
        self.take(self.core.board.take())
        return number

    def move(self, source: int, target: int, partition: int = 0, stage: int = 0) -> None:
        self.take(self.core.move([Move(stage, partition, source, target)], "asked for", self.now))

    def move_all(self, *moves: Move) -> None:
        self.take(self.core.move(moves, "asked for", self.now))

    def drain(self, worker: int) -> None:
        self.take(self.core.drain(worker, self.now))

    def scale(self, workers: int) -> None:
        self.take(self.core.scale(workers, self.now))

    def protect(self, replicas: int | None = None, recovery: str | None = None, stage: int = 0) -> int:
        """Ask for other replicas of a stage; return the number of the request."""
        number = self.core.next_request()
        self.take(self.core.protect(stage, replicas, recovery, self.now, number))
        return number

    # ---- reports of primaries

    def caught_up(self, safe: bool, partition: int = 0, stage: int = 0, **more: Any) -> None:
        """Let the primary report that the newest replica has caught up."""
        primary, *_, newest = self.replicas(partition, stage)
        about = {"worker": newest.worker, "incarnation": newest.incarnation, **more}
        self.report(
            primary.worker, ReplicaCaughtUp(node=primary.worker, stage=stage, partition=partition, safe=safe, **about)
        )

    def complete(self, partition: int = 0, stage: int = 0, **more: Any) -> None:
        """Let the copy arrive and the new replica become safe, whether tables wait for others or not."""
        self.caught_up(False, partition, stage, **more)
        self.let_list(partition, stage)
        self.caught_up(True, partition, stage, **more)
        self.let_list(partition, stage)

    def let_list(self, partition: int = 0, stage: int = 0) -> None:
        """End the wait of the next table for other additions, if it waits."""
        addition = self.core.repairs.under_way.get(PartitionKey(stage, partition))
        if addition is not None and (addition.phase == Phase.FOLLOWS or addition.arrived):
            self.tick(LISTED_EVERY_S)

    def settle_one(self) -> tuple[int, int] | None:
        """Bring one addition that is under way to its end; return its partition, or None if there is none."""
        key = next(iter(self.core.repairs.under_way), None)
        if key is not None:
            self.complete(key.partition, key.stage)
        return key

    def settle(self) -> list[tuple[int, int]]:
        """Bring all additions that are under way to their ends; list their partitions in this order."""
        order = []
        while (key := self.settle_one()) is not None:
            order.append(key)
        return order


def moving(slots: int = 4, replicas: int = 2, source: int = 0, target: int = 3, **more: int) -> Cluster:
    """Make a cluster in which Sums/0 is moving; its copies are on workers 0, 1, ... at first."""
    c = Cluster(slots=slots, replicas=replicas, **more)
    assert c.holders() == list(range(replicas))
    c.move_all(Move(0, 0, source, target))
    assert c.holders() == [*range(replicas), target]
    return c
