"""What leaves the dataflow: the committed output of last stages, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from flux.host.stage_worker import StageWorker
from flux.replicas.outlet import Exit
from tests.simulation import flows, stage_kinds
from tests.simulation.faults import Faults
from tests.simulation.run import Simulation
from tests.simulation.worker_process import WorkerProcess

Patch = pytest.MonkeyPatch
Left = dict[tuple[int, int], dict[int, Any]]


class Giving(stage_kinds.Sink):
    """Keeps its rows, and gives them as well."""

    schema = stage_kinds.ROW

    def open(self, context: Any) -> None:
        super().open(context)
        self.state["given"] = []

    def process(self, batch: pa.RecordBatch) -> Any:
        for _ in super().process(batch) or ():
            pass
        self.state["given"].append(batch.column("id").to_pylist())
        yield batch.select(stage_kinds.ROW.names)


class Noted:
    """A sink that knows what it was given: by partition and position."""

    def __init__(self) -> None:
        self.left: Left = defaultdict(dict)
        self.again: list[tuple[int, int, int]] = []
        self.begun: list[tuple[int, int, int]] = []
        self.gaps: list[tuple[int, int, int, int]] = []

    def has(self, stage: int, partition: int) -> int:
        return max(self.left[stage, partition], default=-1) + 1

    def begins(self, stage: int, partition: int, position: int) -> None:
        self.begun.append((stage, partition, position))
        if position > self.has(stage, partition):
            self.gaps.append((stage, partition, self.has(stage, partition), position))

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        if position in self.left[stage, partition]:
            self.again.append((stage, partition, position))
        self.left[stage, partition].setdefault(position, []).append(batch.column("id").to_pylist())


@pytest.fixture
def noted(monkeypatch: Patch) -> Noted:
    noted, welcomed = Noted(), WorkerProcess.welcomed

    def with_a_sink(self: WorkerProcess, *given: Any) -> None:
        welcomed(self, *given)
        assert self.core is not None
        self.core.leaving.sink = noted

    monkeypatch.setattr(WorkerProcess, "welcomed", with_a_sink)
    monkeypatch.setattr(flows, "Sink", Giving)
    return noted


def simulated(copies: int, crash_at: float | None = None) -> Simulation:
    sim = Simulation(0, Faults(), copies, 3, lambda ledger: flows.chain(ledger, (), copies))
    if crash_at is not None:
        sim.world.after(crash_at, lambda: sim.crash(sim.workers[1]))
    sim.run()
    assert sim.controller.error is None
    return sim


def given(sim: Simulation) -> dict[tuple[int, int], list[list[int]]]:
    """What the primaries at the end have given, by partition: a replica that was added last may still be behind."""
    cores: Iterator[StageWorker] = (
        worker.core for worker in sim.workers if worker.core is not None and not worker.dead
    )
    return {
        key: replica.operator.state["given"]
        for core in cores
        for key, replica in core.replicas.items()
        if replica.primary
    }  # type: ignore[attr-defined]


def contradictions(sim: Simulation, left: Left) -> list[tuple[int, int, int]]:
    """What has left and is not what the survivors gave at that position: it was not committed."""
    final = given(sim)
    return [
        (*key, position)
        for key, batches in left.items()
        for position, versions in batches.items()
        if any(position >= len(final[key]) or version != final[key][position] for version in versions)
    ]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_without_faults_all_output_leaves_once_and_in_order(noted: Noted, copies: int) -> None:
    sim = simulated(copies)
    assert noted.again == []
    assert {key: [batches[p] for p in sorted(batches)] for key, batches in noted.left.items()} == {
        key: [[batch] for batch in batches] for key, batches in given(sim).items()
    }
    assert [list(batches) == sorted(batches) for batches in noted.left.values()] == [True] * len(noted.left)


MOMENTS = [0.006 + moment * 0.005 for moment in range(12)]


def test_nothing_leaves_before_it_is_committed_whoever_takes_over(noted: Noted) -> None:
    for moment in MOMENTS:
        noted.left.clear()
        sim = simulated(2, moment)
        assert contradictions(sim, noted.left) == []
        assert {key: [batches[p][0] for p in sorted(batches)] for key, batches in noted.left.items()} == given(sim)
    assert noted.gaps == []
    assert any(position for _, _, position in noted.begun), "a replica that took over went on in the middle"


def test_output_that_leaves_before_it_is_committed_is_seen(noted: Noted, monkeypatch: Patch) -> None:
    committed = Exit.committed
    monkeypatch.setattr(Exit, "committed", lambda self, below: committed(self, below + 1000))
    found = []
    for moment in MOMENTS:
        noted.left.clear()
        found += contradictions(simulated(2, moment), noted.left)
    assert found
