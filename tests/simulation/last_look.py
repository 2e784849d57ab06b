"""A last look at a run, for its story: the logs and the replicas that a broken law concerns, one line each.

A story tells events. If a run stands still, its cause is an event that did not happen: this look shows for which event each log
and each replica waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flux.exchange.producer import Producer
from flux.replica.replica import Replica
from flux.worker.core import WorkerCore
from tests.simulation.wording import Wording, key_tag, number_of, numbers

if TYPE_CHECKING:
    from tests.simulation.run import Simulation


def last_look(sim: Simulation, words: Wording, concerned: set[str]) -> Iterator[str]:
    """Yield lines about logs and replicas. ``concerned``: partitions and streams, as in ``Story.concerned``; the consumers of
    these streams are shown, too."""
    edges = {edge.id: edge for edge in sim.plan.edges}
    for node, process in sorted(sim.by_node.items()):
        if process.dead or not isinstance(process.core, WorkerCore):
            continue
        name, core = f"worker {node}", process.core
        for producer in core.producers.values():
            if str(producer.stream) in concerned:
                yield f"{name:<23} {_log(producer)}"
        for key, replica in sorted(core.replicas.items()):
            streams = {
                f"{edge}.{producer}"
                for edge in sim.plan.stages[key[0]].edges_in
                for producer in range(max(edges[edge].producers, 1))
            }
            if key_tag(key) in concerned or streams & concerned:
                yield f"{name:<23} {words.key(key)}: {_replica(replica)}"


def _log(producer: Producer) -> str:
    log = producer.log
    text = f"log of stream {producer.stream}: {numbers('batch', range(log.base, log.end))}"
    if producer.release_from < log.end:
        text += f", held back from batch {producer.release_from}"
    text += "" if log.bytes < log.bytes_max else f", full with {log.bytes:,} of {log.bytes_max:,} bytes"
    for worker, cursor in sorted(producer._cursors.items()):
        acked = int(cursor.acked.min())
        text += f"; worker {worker} has acked " + (f"through {acked}" if acked >= 0 else "nothing")
        if cursor.nonce is None:
            text += " and reads nothing from here"
        elif cursor.next < log.end and cursor.sent_bytes >= cursor.granted:
            text += " and gives no credit for more"
    return text


def _replica(replica: Replica) -> str:
    role, order = "primary" if replica.primary else "secondary", replica.order
    steps = f"{replica.applied} steps applied, {order.committed} committed, {order.end} ordered"
    end = ", at its end" if replica.finished else ""
    full = [str(outlet.producer.stream) for outlet in replica.outlets if not outlet.producer.log.has_room]
    room = f", the log of stream {', '.join(full)} is full" if full else ""
    return f"{role}, {steps}{end}; {number_of('slice', len(replica.waits))} wait{'s' * (len(replica.waits) == 1)}{room}"
