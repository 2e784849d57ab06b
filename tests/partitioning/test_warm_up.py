"""Compiling takes seconds: it must not happen while rows wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partitioning import kernels
from spark_integration.query import start as first_start

CODE = """
import numpy as np, pyarrow as pa
from partitioning import kernels
from partitioning.warm_up import is_warm, warm_up
from flux.operators import aggregate as agg
from flux.operators.operator import Context
from partitioning.clustering import cluster_by_key

def compiled():
    return {name: len(k.signatures) for name, k in vars(kernels).items() if hasattr(k, "signatures")}

warm_up()
assert is_warm()
before = compiled()
public = {name: n for name, n in before.items() if not name.startswith("_")}
assert set(public.values()) == {1}, public

class All(agg.Aggregate):
    n, c, s, a, b, m = agg.count(), agg.count("v"), agg.sum("v"), agg.min("v"), agg.max("v"), agg.mean("v")
    least, greatest = agg.min("t"), agg.max("t")

class Some(agg.Aggregate):
    n, c, s, a, b, m = agg.count(), agg.count("v"), agg.sum("v"), agg.min("v"), agg.max("v"), agg.mean("v")

for key in (("i",), ("t",), ("i", "t", "v"), ()):
    for values in (pa.int8(), pa.float32(), pa.decimal128(5, 1), pa.uint64()):
        v = pa.array([1, None, 3], pa.int64()).cast(pa.decimal128(20, 1)).cast(values)
        i = pa.array([1, 2, None], pa.int16())
        batch = pa.record_batch({"i": i, "t": ["x", None, ""], "v": v}).slice(1)
        operator = All()
        operator.open(Context("all", key=key, schemas=(batch.schema,), output_mode="update"))
        operator.process(batch)
        operator.restore(operator.snapshot())
        operator.process(batch)
        several = [Some(), Some()]
        for each in several:
            each.open(Context("some", key=key, schemas=(batch.schema,), output_mode="update"))
        if several[0].processes_many:
            Some.process_many(several, batch, [1, 1])
        if key:
            cluster_by_key(batch, range(len(key)), 7, np.arange(7)[::-1])
assert compiled() == before
"""


def test_nothing_is_compiled_after_the_warm_up() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_new_installation_knows_that_it_has_nothing_compiled(tmp_path: Path) -> None:
    """Ask a new installation whether it is warm: the question compiles nothing."""
    code = "from partitioning.warm_up import is_warm; print(is_warm())"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "False\n"
    assert not list(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize(
    ("warm", "told", "calls"), [(True, 0, []), (False, 1, ["kernels", "pulse"])], ids=["in the cache", "not yet"]
)
def test_a_local_driver_compiles_what_is_not_in_the_cache_and_says_so(
    warm: bool, told: int, calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []
    monkeypatch.setattr(first_start, "is_warm", lambda: warm)
    monkeypatch.setattr(first_start, "warm_up", lambda: made.append("kernels"))
    monkeypatch.setattr(first_start.liveness_thread, "warm_up", lambda: made.append("pulse"))
    first_start.compile_once()
    assert made == calls
    assert [record.getMessage()[:44] for record in caplog.records] == [
        "first start after an installation: compiling"
    ] * told


@pytest.mark.parametrize("name", [name for name, k in vars(kernels).items() if hasattr(k, "signatures")])
def test_kernels_release_the_interpreter_and_are_kept_on_disk(name: str) -> None:
    kernel: Any = getattr(kernels, name)
    assert kernel.targetoptions["nogil"]
    assert type(kernel._cache).__name__ == "FunctionCache"
