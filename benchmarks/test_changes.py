"""Cost of a checkpoint of changes for its partition, against a whole one: bytes, and the time for which the partition stands
still. ``pytest benchmarks/test_changes.py``.

A keyed count of 64 MiB (4 Mi keys), of which a share changes between two checkpoints, at keys drawn at random. The stall is
measured by the primary, from the step boundary to the moment at which it may go on; bytes are made by a thread of their own, as
in a worker.
"""

from __future__ import annotations

from select import select
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from flux.dataflow.plan import StagePlan
from flux.exchange.producer import ToWorker
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.shell.threads import BackgroundJobs, Bell
from flux.state.sender import Aside, StateSender
from flux.wire.messages import Install, Installed, OrderEntry
from partitioning.ids import STANDBY, PartitionKey
from partitioning.table import ReplicaAt

KEY = PartitionKey(0, 0)
STANDBY_AT, LIFE = 1, 7
STATE_BYTES = 64 << 20
#: Size of a key and its count.
SLOT_BYTES = 16
KEYS = STATE_BYTES // SLOT_BYTES
BATCH_ROWS = 1 << 16
SCHEMA = pa.schema([("k", pa.int64())])


class Count(flux.Aggregate):
    n = flux.count()


class Host:
    def __init__(self, replica: Replica) -> None:
        self.replicas = {KEY: replica}

    def inbounds_of(self, replica: Replica) -> list[Any]:
        return []

    def goes_on(self, key: PartitionKey) -> None:
        pass


class Primary:
    """The primary of one partition with a standby, which has every checkpoint that is sent."""

    def __init__(self) -> None:
        stage = StagePlan(0, "count", 1, 2, ("k",), Count, (SCHEMA,), None, (0,), (), recovery=STANDBY)
        self.replica = Replica(stage, 0, 0, [], Settings.of())
        self.replica.lead(0, [ReplicaAt(STANDBY_AT, LIFE, True, STANDBY)])
        self.transfers = StateSender(Host(self.replica), b"secret", 60.0, perf_counter)  # type: ignore[arg-type]
        self.bell = Bell()
        self.background = BackgroundJobs(self.bell)
        self.rng = np.random.default_rng(1)
        self.bytes = 0
        keys = self.rng.permutation(KEYS).astype(np.int64)
        for start in range(0, KEYS, BATCH_ROWS):
            self.process(keys[start : start + BATCH_ROWS])

    def process(self, keys: np.ndarray) -> None:
        self.replica.operator.process(pa.record_batch([pa.array(keys)], schema=SCHEMA))
        self.replica.order.append(OrderEntry(0.0, 0.0, []))
        self.replica.applied += 1

    def change(self, share: float) -> None:
        keys = self.rng.choice(KEYS, int(KEYS * share), replace=False)
        for start in range(0, len(keys), BATCH_ROWS):
            self.process(keys[start : start + BATCH_ROWS])

    def checkpoint(self) -> float:
        """Take a checkpoint. Return the seconds for which the partition has stood still."""
        self.transfers.checkpoint(KEY, STANDBY_AT)
        while self.transfers.under_way(KEY, STANDBY_AT):
            effects = list(self.transfers.poll(0.0))
            for effect in effects:
                if isinstance(effect, Aside):
                    self.background.give(effect.token, effect.job)
                elif isinstance(effect, ToWorker):
                    self.answer(effect)
            if not any(isinstance(effect, ToWorker) for effect in effects):
                select([self.bell.raw], [], [], 0.1)
            for token, result in self.background.done():
                self.transfers.on_done(token, result, 0.0)
        return self.replica.order.peers[STANDBY_AT].stall_ms / 1e3

    def answer(self, part: ToWorker) -> None:
        message = part.message
        assert isinstance(message, Install)
        self.bytes, received = message.total, message.offset + len(part.payload or b"")
        done = received == message.total
        self.transfers.on_installed(STANDBY_AT, Installed(*KEY, LIFE, message.copy, received, done), 0.0)

    def close(self) -> None:
        self.background.close()
        self.bell.close()


@pytest.mark.parametrize(
    "share", [pytest.param(1.0, marks=pytest.mark.long), 0.1, 0.01], ids=lambda share: f"{share:.1%} changed"
)
def test_checkpoint_of_64_mib(benchmark: Any, share: float) -> None:
    primary = Primary()
    primary.checkpoint()
    whole, stalls, sizes = primary.bytes, [], []

    def change() -> None:
        primary.change(share)

    def checkpoint() -> None:
        stalls.append(primary.checkpoint())
        sizes.append(primary.bytes)

    benchmark.pedantic(checkpoint, setup=change, rounds=2 if share > 0.5 else 20)
    primary.close()
    changes = [size for size in sizes if size < whole]
    part = max(changes, default=whole) / whole
    benchmark.extra_info.update(
        whole_mib=whole / 2**20,
        part_of_whole=part,
        stall_ms_p50=1e3 * float(np.median(stalls)),
        stall_ms_max=1e3 * max(stalls),
    )
    print(
        f"\n{share:.1%} of {KEYS:,} keys: {part:.2%} of {whole / 2**20:.0f} MiB; stall {1e3 * min(stalls):.2f} ms at least, "
        f"{1e3 * float(np.median(stalls)):.2f} ms median, {1e3 * max(stalls):.2f} ms at most, {len(stalls)} times"
    )
    if share == 0.01:
        assert part <= 0.03
