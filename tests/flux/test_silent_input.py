"""Rows that are read arrive while the input is silent, in a query of threads with real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
from attacked import ROWS, SCHEMA, Count, batches, until_applied
from harness import LIMIT_S, Rows, ThreadQuery, dataframe


def test_rows_that_are_read_arrive_while_the_input_is_silent() -> None:
    gate = threading.Event()

    def one_then_silence() -> Iterator[pa.RecordBatch]:
        yield batches(1)[0]
        assert gate.wait(2 * LIMIT_S)

    with ThreadQuery(Rows().stage(Count(dataframe(SCHEMA)))) as query:
        query.started().feed([one_then_silence()])
        try:
            until_applied(query, ROWS)
        finally:
            gate.set()
        query.wait()
