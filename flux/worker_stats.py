"""What a worker reports of itself with its heartbeats."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from flux.replica import BEHIND_MAX

if TYPE_CHECKING:
    from flux.stage_worker import StageWorker

#: Secondaries that are no more steps behind than this keep up, and are not worth a word.
BEHIND_TOLD = BEHIND_MAX // 8


def stats(core: StageWorker) -> dict[str, Any]:
    """Counts since the start, and what is waiting now."""
    return {
        "rows_in": sum(replica.rows_in for replica in core.replicas.values()),
        "source_rows": sum(source.rows for source in core.sources.values()),
        "sources": [
            (*key, streams.start, streams.batches, streams.rows)
            for key, streams in core.sources.items()
            if streams.start is not None
        ],
        "pauses": [(*key, streams.pauses, streams.ended) for key, streams in core.sources.items()],
        "drained": core.drained.look(producer.log for producer in core.producers.values()),
        "behind": [
            (*key, worker, peer.incarnation, replica.order.end - peer.applied)
            for key, replica in core.replicas.items()
            for worker, peer in replica.order.peers.items()
            if peer.live and peer.greeted and replica.order.end - peer.applied > BEHIND_TOLD
        ],
        "log_bytes": core.log_meter.bytes,
        "peak_log_bytes": core.log_meter.peak,
        "held_bytes": core.held_bytes,
        "queued": sum(replica.queued for replica in core.replicas.values()),
        "first_row_at": core.first_row_at,
        "finished_at": core.finished_at,
        "counters": asdict(core.counters),
        "stages": _of_stages(core),
    }


def load(core: StageWorker, now: float) -> dict[str, Any]:
    """What the balance of load goes by, and not every heartbeat carries: counts of each replica since it came to life, and
    what waits for it now."""
    return {
        "at": now,
        "replicas": [
            (
                *key, replica.incarnation, round(replica.busy_s, 6), replica.rows_in, replica.slices,
                replica.queued, replica.state_bytes,
            )
            for key, replica in core.replicas.items()
        ],
    }  # fmt: skip


def _of_stages(core: StageWorker) -> list[dict[str, Any]]:
    found = []
    for stage in core.plan.stages:
        mine = {partition: replica for (of, partition), replica in core.replicas.items() if of == stage.id}
        found.append(
            {
                "primaries": [
                    (partition, replica.rows_in, replica.rows_out, int(replica.finished))
                    for partition, replica in mine.items()
                    if replica.primary
                ],
                "queued": sum(replica.queued for replica in mine.values()),
                "busy_s": round(sum(replica.busy_s for replica in mine.values()), 6),
                "latency_ms": _percentiles_ms(core.latencies[stage.id]),
            }
        )
    return found


def _percentiles_ms(seconds: deque[float]) -> list[float] | None:
    """Median and 99th percentile of the last steps, None before the first."""
    if not seconds:
        return None
    return [round(float(value) * 1e3, 3) for value in np.percentile(np.fromiter(seconds, float), [50, 99])]
