"""Costs that grow with the size of a cluster: bytes and CPU time of an epoch, an ack, a heartbeat and a repair.

Simulated clusters (``virtual``) of 10, 100 and 1,000 workers have as many partitions for each worker. Then real workers on this
machine share one fixed load, with 2, 4 and 8 of them (``scale_real``). A cost is flat if it does not grow with the cluster.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from benchmarks.timeline import DPI, Report
from benchmarks.virtual import SCHEMA, RealWorker, SocketCost, Spent, VirtualCluster
from controller.replicas.table_changes import drop, retain
from flux.wire.codec import decode_answer
from flux.wire.frames import encode
from flux.wire.messages import Ack, AppliedThrough
from partitioning.clustering import cluster_by_key

#: Workers of the simulated clusters, and of the real ones.
SIZES, REAL_SIZES = [10, 100, 1000], [2, 4, 8]
#: Partitions of each of the two stages for one worker, so that a worker has 16 replicas in a cluster of any size.
PER_WORKER = 4
#: Epochs, acks and heartbeats that are measured.
EPOCHS, ACKS, HEARTBEATS = 10, 1000, 50
LOSSES = (1, 10)
#: A cost is flat if it grows by less than this factor from the smallest cluster to the largest. Two runs may differ as much.
FLAT = 1.5
#: Reasons why a cost grows with the workers, for costs that do.
REASONS = {
    "epoch, worker": "each of its streams looks for news, and for silence, at every worker that reads it",
    "epoch, controller": "the table goes to every worker, and every worker confirms it",
    "ack": "the least of all acks is looked for among the workers that read the stream",
    "heartbeat, worker": "it looks through the logs and streams of all producers that it reads",
    "heartbeat, controller": "the worker is looked for among all others by its connection",
    "repair, controller": "every table of a repair goes to every worker and is confirmed by it",
    "repair, worker": "at each table of the repair, each of its streams looks at every worker that reads it",
}


@dataclass(frozen=True)
class Cost:
    """A cost in one cluster: seconds of CPU and bytes, of one epoch, ack, heartbeat or repair."""

    name: str
    workers: int
    cpu_s: float
    bytes: float


def run(sizes: Sequence[int], real_sizes: Sequence[int], console: Console, **real: Any) -> Report:
    """Run the benchmark. ``real_sizes`` are numbers of real workers; empty: none are started."""
    sockets = SocketCost.calibrated()
    figures: dict[str, Any] = {
        "benchmark": "scale",
        "workers": list(sizes),
        "socket_us_per_message": round(sockets.message_s * 1e6, 2),
        "socket_ns_per_byte": round(sockets.byte_s * 1e9, 3),
    }
    costs: list[Cost] = []
    for workers in sizes:
        console.print(f"{workers} simulated workers, {PER_WORKER * workers} partitions in each of two stages")
        found, more = measure(workers, sockets)
        costs += found
        figures |= more
    for cost in costs:
        name = cost.name.replace(", ", "_").replace(" ", "_")
        figures[f"{name}_{cost.workers}_us"] = round(cost.cpu_s * 1e6, 1)
        figures[f"{name}_{cost.workers}_bytes"] = round(cost.bytes)
    figures["not_flat"] = sentences(costs)
    if real_sizes:
        from benchmarks import scale_real

        figures |= scale_real.run(real_sizes, console, **real)
    return Report(figures, picture=lambda path: draw(costs, path))


def measure(workers: int, sockets: SocketCost) -> tuple[list[Cost], dict[str, Any]]:
    """Measure all costs in one size of cluster. Return them, and further figures of the cluster."""
    cluster = VirtualCluster(workers, PER_WORKER * workers)
    costs = [*_epochs(cluster, sockets), _ack(cluster, sockets), *_heartbeats(cluster, sockets)]
    more: dict[str, Any] = {}
    for losses in LOSSES:
        if 2 * losses < workers:
            del cluster
            gc.collect()
            cluster = VirtualCluster(workers, PER_WORKER * workers)
            found, said = _repair(cluster, losses, sockets)
            costs += found
            more |= said
    return costs, more


def _fresh(cluster: VirtualCluster) -> tuple[Spent, list[RealWorker]]:
    """Reset the counts of a cluster. Costs count from here on."""
    cluster.driver = Spent()
    cluster.to_worker.clear()
    for real in cluster.real.values():
        real.spent = Spent()
    return cluster.driver, list(cluster.real.values())


def _of_workers(
    name: str, cluster: VirtualCluster, reals: Sequence[RealWorker], sockets: SocketCost, times: int
) -> Cost:
    """Compute the cost of one real worker, for one of ``times`` times."""
    count = times * len(reals)
    cpu_s = sum(sockets.of(real.spent) for real in reals)
    return Cost(name, cluster.workers, cpu_s / count, sum(real.spent.bytes for real in reals) / count)


def _epochs(cluster: VirtualCluster, sockets: SocketCost) -> list[Cost]:
    """Measure epochs: a replica of one partition is added and dropped, on a worker that every real worker has to reach."""
    board = cluster.core.board
    driver, reals = _fresh(cluster)
    holders = {replica.worker for replica in cluster.table.stages[1][0]}
    target = next(worker for worker in range(cluster.workers) if worker not in holders)
    for number in range(EPOCHS):
        change = retain if number % 2 == 0 else drop
        with driver.timed():
            board.publish(change(cluster.table, 1, 0, target))
            effects = board.take()
        cluster.tell(effects)
        cluster.settle()
    return [
        _of_workers("epoch, worker", cluster, reals, sockets, EPOCHS),
        Cost("epoch, controller", cluster.workers, sockets.of(driver) / EPOCHS, driver.bytes / EPOCHS),
    ]


def _ack(cluster: VirtualCluster, sockets: SocketCost) -> Cost:
    """Measure acks of one neighbour after the other, each for one more batch; one partition there has still to apply it."""
    real = next(iter(cluster.real.values()))
    producer, table = real.producer(), cluster.table
    readers = sorted(producer.readers)
    rng = np.random.default_rng(1)
    spent, sequence = Spent(), -1
    for number in range(ACKS):
        worker = readers[number % len(readers)]
        if number % len(readers) == 0:
            sequence += 1
            batch = pa.record_batch({"k": rng.integers(0, 1 << 40, 64)}, schema=SCHEMA)
            producer.append(cluster_by_key(batch, [0], len(table.stages[1]), producer.by_rank), 0.0)
            for _ in producer.poll(1.0):
                pass
        behind = [AppliedThrough(p, sequence - 1) for p in cluster.hosts(1, worker)[:1]]
        frame = encode(Ack(*producer.stream, 1, 0, sequence, behind, 1 << 40))
        with spent.timed():
            spent.receives(len(frame))
            answer = decode_answer(frame)
            assert isinstance(answer, Ack)
            producer.on_answer(worker, answer, 1.0)
    return Cost("ack", cluster.workers, sockets.of(spent) / ACKS, spent.bytes / ACKS)


def _heartbeats(cluster: VirtualCluster, sockets: SocketCost) -> list[Cost]:
    """Measure heartbeats with loads, which come every second. The heartbeats in between are smaller."""
    driver, reals = _fresh(cluster)
    for _ in range(HEARTBEATS):
        for real in reals:
            cluster.now += 1.0
            cluster.report(real.worker, real.heartbeat())
            cluster.settle()
    count = HEARTBEATS * len(reals)
    return [
        _of_workers("heartbeat, worker", cluster, reals, sockets, HEARTBEATS),
        Cost("heartbeat, controller", cluster.workers, sockets.of(driver) / count, driver.bytes / count),
    ]


def _repair(cluster: VirtualCluster, losses: int, sockets: SocketCost) -> tuple[list[Cost], dict[str, Any]]:
    """Measure repairs: lose as many workers at once as have no partition in common, then others, until ``losses`` are lost and
    all of their replicas have been made again. Costs are those of one lost worker."""
    driver, reals = _fresh(cluster)
    epoch, began, lost = cluster.table.epoch, cluster.now, 0
    while lost < losses:
        wave = unrelated(cluster, losses - lost)
        cluster.lose(wave)
        cluster.repair()
        lost += len(wave)
    prefix = f"repair_of_{losses}_in_{cluster.workers}"
    said = {
        f"{prefix}_epochs": cluster.table.epoch - epoch,
        f"{prefix}_replicas": cluster.core.repairs.done,
        f"{prefix}_take_over_out_ms": round(max(sockets.of(spent) for spent in cluster.out) * 1e3, 1),
        f"{prefix}_controller_ms": round(sockets.of(driver) * 1e3, 1),
        f"{prefix}_kB_per_worker": round(max(cluster.to_worker.values()) / 1e3, 1),
        f"{prefix}_simulated_s": round(cluster.now - began, 2),
    }
    name = f"repair of {losses}"
    return [
        _of_workers(f"{name}, worker", cluster, reals, sockets, losses),
        Cost(f"{name}, controller", cluster.workers, sockets.of(driver) / losses, driver.bytes / losses),
    ], said


def unrelated(cluster: VirtualCluster, most: int) -> list[int]:
    """Choose at most ``most`` workers, none of them real, of which no two have a partition in common: two replicas survive
    their loss."""
    partners: dict[int, set[int]] = {worker: set() for worker in cluster.core.members.workers}
    for rows in cluster.table.stages:
        for replicas in rows:
            here = {replica.worker for replica in replicas}
            for worker in here:
                partners[worker] |= here
    chosen: list[int] = []
    beside: set[int] = set(range(cluster.workers - cluster.real_workers, cluster.workers))
    for worker in sorted(partners, reverse=True):
        if worker not in beside and len(chosen) < most:
            chosen.append(worker)
            beside |= partners[worker]
    return chosen


# ---- sentences


def by_name(costs: Iterable[Cost]) -> dict[str, list[Cost]]:
    found: dict[str, list[Cost]] = {}
    for cost in costs:
        found.setdefault(cost.name, []).append(cost)
    return found


def sentences(costs: Iterable[Cost]) -> list[str]:
    """Write a sentence for each cost that is not flat."""
    said = []
    for name, curve in by_name(costs).items():
        first, last = curve[0], curve[-1]
        grown = [
            f"{last_is / first_is:.1f} times the {what}"
            for what, first_is, last_is in (("CPU", first.cpu_s, last.cpu_s), ("bytes", first.bytes, last.bytes))
            if first_is > 0 and last_is / first_is >= FLAT
        ]
        if grown:
            kind = name.replace("repair of 1,", "repair,").replace("repair of 10,", "repair,")
            said.append(
                f"{name}: {' and '.join(grown)} with {last.workers} workers as with {first.workers}, because {REASONS[kind]}"
            )
    return said


def draw(costs: Sequence[Cost], path: Path) -> None:
    """Draw one curve for each cost: CPU on the left, bytes on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"flux bench scale: two stages of two replicas, {PER_WORKER} partitions of each for every worker")
    for name, curve in by_name(costs).items():
        workers = [cost.workers for cost in curve]
        left.plot(workers, [cost.cpu_s * 1e6 for cost in curve], marker="o", label=name)
        right.plot(workers, [cost.bytes for cost in curve], marker="o", label=name)
    left.set_ylabel("CPU (µs)")
    right.set_ylabel("bytes")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("workers")
        axes.grid(visible=True, alpha=0.3)
    right.legend(fontsize="small")
    figure.savefig(path, dpi=DPI)
