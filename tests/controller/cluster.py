"""A controller without a shell, and workers that are no more than what they report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

import flux
from controller.dag import compile_plan
from controller.load import Move
from controller.state import Controller, Tell
from controller.sweep import Addition
from flux.api import Source
from flux.control import NewTable, Register, ReplicaCaughtUp, TableSeen
from flux.settings import Settings
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


class Cluster:
    """A controller with a chain of ``stages``, the last called Sums, of so many ``partitions`` and ``replicas`` each, and
    workers that confirm every table unless told otherwise. ``readers``: partitions of a source that workers read."""

    def __init__(
        self, slots: int = 3, replicas: int = 2, partitions: int = 1, stages: int = 1, readers: int = 0, collect: int = 0,
        executors: Any = None, hosts: Any = None, domains: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        """``executors``: of each slot; one each if not given. ``hosts``, ``domains``: of each slot; one for all."""
        flow: Any = Source("rows", dataframe=SCHEMA)
        if readers:
            flow = Source("rows", schema=SCHEMA, partitions=readers, read=lambda partition: iter(()))
        for number in range(stages - 1):
            flow = flux.stage(partitions=partitions, replicas=replicas, name=f"s{number}", schema=SCHEMA)(_same)(flow)
        last: Any = _same if collect else Sink
        flow = flux.stage(partitions=partitions, replicas=replicas, name="Sums")(last)(flow)
        settings = replace(Settings.of(), **{"heartbeat_timeout": 1e9, "heartbeat_last_timeout": 1e9, **options})
        self.core = Controller(compile_plan([flow], settings, lambda s: s, "q", SECRET, collect), slots, now=0.0)
        self.now = 1.0
        self.executors = executors or {}
        self.hosts, self.domains = hosts or {}, domains or {}
        self.orders: list[tuple[Any, Any]] = []
        self.mute: set[str] = set()  # connections that do not confirm tables
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
        check(self.core)
        for effect in effects:
            self.orders.append((effect.connection, effect.order))
            member = self.core.members.by_connection(effect.connection)
            if isinstance(effect.order, NewTable) and member is not None and effect.connection not in self.mute:
                seen = TableSeen(node=member.node, epoch=effect.order.table.epoch)
                self.take(self.core.on_report(effect.connection, seen, self.now))

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

    # ---- what can be seen

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

    def holders(self, partition: int = 0, stage: int = 0) -> list[int]:
        return [replica.worker for replica in self.replicas(partition, stage)]

    def kinds(self) -> list[str]:
        """Of what has happened since the last time."""
        return [event.kind for event in self.core.repairs.news()]

    def events(self, kind: str) -> list[Any]:
        return [event for event in self.core.repairs.history if event.kind == kind]

    def move(self, source: int, target: int, partition: int = 0, stage: int = 0) -> None:
        self.take(self.core.move([Move(stage, partition, source, target)], "asked for", self.now))

    # ---- what primaries report

    def caught_up(self, safe: bool, partition: int = 0, stage: int = 0, **more: Any) -> None:
        """The primary says so of the newest replica."""
        primary, *_, newest = self.replicas(partition, stage)
        about = {"worker": newest.worker, "incarnation": newest.incarnation, **more}
        self.report(
            primary.worker, ReplicaCaughtUp(node=primary.worker, stage=stage, partition=partition, safe=safe, **about)
        )

    def complete(self, partition: int = 0, stage: int = 0, **more: Any) -> None:
        """The copy arrives, and the new replica is safe."""
        self.caught_up(False, partition, stage, **more)
        self.caught_up(True, partition, stage, **more)

    def settle(self) -> list[tuple[int, int]]:
        """Everything that is under way comes to its end; which partitions, in which order."""
        order = []
        while self.core.repairs.under_way:
            stage, partition = next(iter(self.core.repairs.under_way))
            order.append((stage, partition))
            self.complete(partition, stage)
        return order


def check(core: Controller) -> None:
    """What is true after every decision."""
    if core.table is None or core.phase == "ended":
        return
    repairs, moving, table = core.repairs, core.moving, core.table
    assert len(repairs.under_way) <= core.plan.settings.repairs_at_once
    assert len({stage for stage, _ in repairs.under_way}) <= 1, "stage by stage"
    moves = {key for key, addition in repairs.under_way.items() if addition.source is not None}
    assert core.phase == "finished" or moves == set(moving.under_way), "a move under way is an addition under way"
    asked_for = [(*job.key, job.move.source) for job in moving.jobs()]
    assert len(set(asked_for)) == len(asked_for), "asked for twice"
    assert not {addition.worker for addition in repairs.under_way.values()} & set(core.drains), (
        "who leaves gets nothing"
    )
    assert set(core.drains) == {node for node, member in core.members.workers.items() if member.leaving}
    for stage, partitions in enumerate(table.stages):
        for partition, replicas in enumerate(partitions):
            _check_partition(core, (stage, partition), replicas, repairs.under_way.get((stage, partition)))
    assert {owner for owners in table.sources for owner in owners} <= set(table.endpoints)


def _check_partition(
    core: Controller, key: tuple[int, int], replicas: tuple[ReplicaAt, ...], addition: Addition | None
) -> None:
    workers = [replica.worker for replica in replicas]
    assert len(set(workers)) == len(workers), "one copy on a worker"
    assert core.table is not None
    assert set(workers) <= set(core.table.endpoints)
    unsafe = [replica for replica in replicas if not core.repairs.is_safe(*key, replica)]
    expected = [] if addition is None else [(addition.worker, addition.incarnation)]
    assert [(replica.worker, replica.incarnation) for replica in unsafe] == expected, "unsafe is what is being added"
    if core.phase == "running":
        assert replicas, "a partition that nobody has"
        assert replicas[0] not in unsafe, "a primary is safe"
        moving = addition is not None and addition.source is not None
        assert len(replicas) <= core.plan.stages[key[0]].replicas + moving, "no more copies than asked for"
    if core.phase == "running" and not core.plan.settings.same_executor:
        members = core.members.workers
        # Of the source and the target of a move one goes, so these two may share.
        going = addition.source if addition is not None and len(replicas) > core.plan.stages[key[0]].replicas else None
        executors = [members[worker].about.executor for worker in workers if worker != going]
        assert len(set(executors)) == len(executors), "copies on different executors"
