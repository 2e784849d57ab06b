"""Compiling takes seconds: it must not happen while rows wait."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from partitioning import kernels

CODE = """
import numpy as np, pyarrow as pa
from partitioning import kernels
from partitioning.warm_up import warm_up
from flux import aggregate as agg
from flux.operator import Context
from partitioning.cluster import cluster_by_key

def compiled():
    return {name: len(k.signatures) for name, k in vars(kernels).items() if hasattr(k, "signatures")}

warm_up()
before = compiled()
public = {name: n for name, n in before.items() if not name.startswith("_")}
assert set(public.values()) == {1}, public

class All(agg.Aggregate):
    n, c, s, a, b, m = agg.count(), agg.count("v"), agg.sum("v"), agg.min("v"), agg.max("v"), agg.mean("v")
    least, greatest = agg.min("t"), agg.max("t")

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
        if key:
            cluster_by_key(batch, range(len(key)), 7, np.arange(7)[::-1])
assert compiled() == before
"""


def test_nothing_is_compiled_after_the_warm_up() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name, k in vars(kernels).items() if hasattr(k, "signatures")])
def test_kernels_release_the_interpreter_and_are_kept_on_disk(name: str) -> None:
    kernel: Any = getattr(kernels, name)
    assert kernel.targetoptions["nogil"]
    assert type(kernel._cache).__name__ == "FunctionCache"
