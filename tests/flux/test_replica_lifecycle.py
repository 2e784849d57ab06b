"""One owner of the replicas of a worker: the part that makes them, installs them and gives them up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from one_worker import SINK, planned, table, worker

from partitioning.ids import PartitionKey

FLUX = Path(__file__).parents[2] / "flux"
#: Replicas that a worker hosts, by partition: see ``HostedReplicas``.
HOSTED = {"replicas", "awaited", "followers", "placed"}
CHANGES = {"pop", "popitem", "clear", "update", "setdefault"}


def changes(module: ast.Module) -> Iterator[str]:
    """Yield each line in which replicas that a worker hosts are added or removed."""
    for node in ast.walk(module):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            changed = node.func.value
        if isinstance(changed, ast.Attribute) and changed.attr in HOSTED:
            yield ast.unparse(node)


def test_only_the_lifecycle_adds_and_removes_replicas() -> None:
    rooms = ("worker", "state", "replica", "vault", "exchange", "shell")
    paths = [path for room in rooms for path in (FLUX / room).glob("*.py")]
    found = {path.stem: len(list(changes(ast.parse(path.read_text())))) for path in paths}
    owners = {name for name, number in found.items() if number}
    assert owners == {"replica_lifecycle", "hosted_replicas"}
    assert found["hosted_replicas"] == 1, "``add`` is called by the lifecycle"
    assert found["replica_lifecycle"] > 8


def test_a_worker_forgets_a_partition_of_which_it_has_no_replica_any_more() -> None:
    plan, key = planned(SINK), PartitionKey(0, 0)
    core = worker(plan)

    def about() -> set[str]:
        return {name for name, held in vars(core.hosted).items() if isinstance(held, dict) and key in held}

    assert about() >= {"placed", "replicas"}
    core.on_table(table(plan, epoch=1, others={key: 1}), 0.0)
    assert about() == set()
