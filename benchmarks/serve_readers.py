"""Readers of one result beside another one that never reads: their times with it and without it, in one run.

The run has four parts: without the idle reader, twice with it, and without it again, so that a service which gets faster or
slower meanwhile does the same to both. The idle reader has a small buffer in the system, so that its gateway soon has to wait for
it. In all parts the same other readers follow the result, and the times are those of one of them.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.serve import ROWS, SCHEMA, STREAM, WARM_UP_S, Load, lines
from benchmarks.serve_process import ServiceProcess
from benchmarks.serve_queries import Arrivals, FilterReader, OtherReaders, arrived, following, register, shares
from benchmarks.timeline import Report
from flux.client import GatewayClient

#: Whether the idle reader is there, by part of the run.
PARTS = (False, True, True, False)
#: Bytes that the system takes for the idle reader.
RECEIVES = 4096


def run(rate: float, seconds: float, clients: int, queries: int, readers: int, master: str, console: Console) -> Report:
    """Push JSON lines at a rate of requests a second, for ``seconds`` in each part. ``readers``: the idle one is among them."""
    with tempfile.TemporaryDirectory(prefix="flux-bench-serve-") as name, ExitStack() as stack:
        service = ServiceProcess(Path(name), 1, master, 1)
        stack.callback(service.close)
        pushers = [GatewayClient(service.urls, service.token) for _ in range(clients)]
        for each in pushers:
            stack.callback(each.close)
        pushers[0].register_stream(STREAM, SCHEMA)
        register(pushers[0], queries)
        pushers[0].push_events(STREAM, lines(-1))
        reader = FilterReader(GatewayClient(service.urls, service.token))
        others = OtherReaders(readers - 2, service.urls[0], service.token, one_idle=False)
        stack.callback(others.end)
        count = int(rate * (seconds + WARM_UP_S))
        parts: list[tuple[bool, Arrivals]] = []
        for number, is_there in enumerate(PARTS):
            with ExitStack() as part:
                if is_there:
                    part.enter_context(following(service.urls[0], service.token, RECEIVES))
                load = Load(partial(_body, number * count), rate, seconds, pushers)
                load.join()
                parts.append((is_there, arrived(load, reader, number * count)))
    figures: dict[str, Any] = {"benchmark": "serve", "rate": rate, "body": "rows", "rows_a_request": ROWS["rows"]}
    figures |= {"clients": clients, "queries": queries, "readers": readers, "idle_reader": True}
    figures |= compared(parts)
    console.print(f"  {figures}", highlight=False)
    if reader.error:
        return Report(figures, failed=f"the reader has ended: {reader.error}")
    return Report(figures, failed="rows were lost or doubled" if figures["lost"] or figures["doubled"] else None)


def compared(parts: list[tuple[bool, Arrivals]]) -> dict[str, Any]:
    """Return the times with the idle reader and without it, and the ratio of their 99th percentiles."""
    found: dict[str, Any] = {}
    for is_there, what in ((True, "reader"), (False, "reader_without")):
        found |= shares(what, np.concatenate([each.took_ms for there, each in parts if there is is_there]).tolist())
    found["ratio"] = round(found["reader_p99_ms"] / max(found["reader_without_p99_ms"], 0.001), 2)
    return found | {"lost": sum(each.lost for _, each in parts), "doubled": sum(each.doubled for _, each in parts)}


def _body(first: int, number: int) -> bytes:
    return lines(first + number)
