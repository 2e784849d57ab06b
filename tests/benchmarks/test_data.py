"""The files of the throughput benchmark, and how they are read."""

from __future__ import annotations

import pyarrow as pa
import pytest

from benchmarks.data import SHAPES, Shape, _rows
from flux.operators.batches import split
from flux.settings import Settings


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_batch_that_is_read_is_never_cut_because_a_reader_that_counts_batches_would_be_refused(shape: Shape) -> None:
    settings = Settings.of()
    (batch,) = _rows(shape, 0, shape.read_rows, seed=0).combine_chunks().to_batches()
    assert isinstance(batch, pa.RecordBatch)
    assert len(list(split(batch, settings.batch_max_rows, settings.batch_max_bytes))) == 1
