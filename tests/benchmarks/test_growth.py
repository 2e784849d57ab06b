"""``flux bench scale`` on small simulated clusters: its counts match the events, and each growing cost is named."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import scale
from benchmarks.scale import Cost, sentences
from benchmarks.timeline import write
from benchmarks.virtual import SocketCost, Spent, VirtualCluster
from flux.wire.control import NewTable, TableSeen
from flux.wire.frames import encode

SOCKETS = SocketCost(1e-5, 1e-9)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("out")
    report = scale.run([8, 24], [], Console(quiet=True))
    write(report, folder)
    assert (folder / "scale.png").stat().st_size > 10_000
    return report.figures


def test_every_cost_has_a_figure_for_every_size(figures: dict[str, object]) -> None:
    for name in ("epoch_worker", "epoch_controller", "ack", "heartbeat_worker", "heartbeat_controller",
                 "repair_of_1_worker", "repair_of_1_controller"):  # fmt: skip
        for workers in (8, 24):
            for unit in ("us", "bytes"):
                assert float(str(figures[f"{name}_{workers}_{unit}"])) > 0, (name, workers, unit)
    assert figures["repair_of_10_in_24_replicas"] >= 10 * 4 * scale.PER_WORKER  # type: ignore[operator]


def test_an_epoch_goes_to_every_worker_and_is_confirmed_by_each(figures: dict[str, object]) -> None:
    assert figures["epoch_controller_24_bytes"] == pytest.approx(
        3 * float(str(figures["epoch_controller_8_bytes"])), rel=0.1
    )
    assert any(said.startswith("epoch, controller") for said in figures["not_flat"])  # type: ignore[attr-defined]


def test_a_simulated_cluster_is_whole_again_after_losses() -> None:
    cluster = VirtualCluster(12, 60)
    lost = scale.unrelated(cluster, 1)
    cluster.lose(lost)
    cluster.repair()
    for worker in cluster.real:
        cluster.core.members.workers[worker].leaving = False  # this was only said so that they get nothing new
    cluster.core.validate()
    held = [replica.worker for rows in cluster.table.stages for replicas in rows for replica in replicas]
    assert all(len(replicas) == 2 for rows in cluster.table.stages for replicas in rows)
    assert not set(held) & set(lost)
    assert cluster.core.repairs.done == 2 * 60 * 2 // 12
    for worker, real in cluster.real.items():
        assert real.core.epoch == cluster.table.epoch, f"worker {worker} follows"
        real.core.validate()


def test_every_message_with_the_controller_is_counted_once() -> None:
    cluster = VirtualCluster(6, 12, real_workers=1)
    driver, _ = scale._fresh(cluster)
    board = cluster.core.board
    with driver.timed():
        board.show_member(cluster.core.members.workers[2])
        effects = board.take()
    cluster.tell(effects)
    cluster.settle()
    table = len(encode(NewTable(table=cluster.table, complete={})))
    seen = len(encode(TableSeen(node=2, epoch=cluster.table.epoch)))
    assert (driver.messages, driver.sent, driver.received) == (2, table, seen)
    assert cluster.to_worker == {2: table + seen}


def test_the_model_of_sockets_has_a_price_for_messages_and_for_bytes() -> None:
    assert SOCKETS.of(Spent(1.0, 100, 3000, 7000)) == pytest.approx(1.0 + 1e-3 + 1e-5)
    calibrated = SocketCost.calibrated()
    assert 0 < calibrated.message_s < 0.01
    assert 0 <= calibrated.byte_s < 1e-6


def test_a_cost_is_named_where_it_grows_and_only_there() -> None:
    flat = [Cost("ack", 10, 10e-6, 30), Cost("ack", 1000, 12e-6, 30)]
    assert sentences(flat) == []
    grows = [Cost("repair of 10, worker", 10, 1.0, 100), Cost("repair of 10, worker", 1000, 1.1, 250)]
    (said,) = sentences([*flat, *grows])
    assert said.startswith(
        "repair of 10, worker: 2.5 times the bytes with 1000 workers as with 10, because at each table"
    )


def test_lost_workers_have_no_partition_in_common() -> None:
    cluster = VirtualCluster(60, 60)
    chosen = scale.unrelated(cluster, 5)
    assert len(chosen) == 5
    for rows in cluster.table.stages:
        for replicas in rows:
            assert len({replica.worker for replica in replicas} & set(chosen)) <= 1
    assert not set(chosen) & cluster.real.keys()
