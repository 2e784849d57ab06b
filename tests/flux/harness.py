"""A query without Spark: controller, workers and ingress as threads of one process, joined by real sockets."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from controller.server import Server
from flux.dataflow.flow import Flow
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import FluxError
from flux.settings import Settings
from flux.shell import liveness_thread
from flux.shell.ingress_loop import Ingress
from flux.shell.transport import Keys, Sockets
from flux.shell.worker_loop import WorkerLoop
from partitioning.warm_up import warm_up

SECRET = b"the secret of this query"
#: Limit of each wait, long enough for a machine under load. No result depends on it.
LIMIT_S = 100.0


@functools.cache
def warm_up_once() -> None:
    """Compile the kernels, or load them, before any time is measured: after an installation all workers would compile them at
    once, which takes minutes on a loaded machine, and workers that do not join in time end a query."""
    warm_up()
    liveness_thread.warm_up()


class Rows(list):
    """Rows that sink operators of a flow have seen, as dictionaries."""

    def __init__(self, key: str | None = None, partitions: int = 2) -> None:
        super().__init__()
        seen = self

        class Sink(flux.Operator):
            def process(self, batch: pa.RecordBatch) -> None:
                seen.extend(batch.to_pylist())

        #: The sink to put at the end of a flow.
        self.stage = flux.stage(key=key, partitions=partitions)(Sink)

    def sorted(self) -> list[dict[str, Any]]:
        return sorted(self, key=repr)


class Peer:
    """A process that talks to a port of a query, after the handshake that ``secret`` and ``keys`` allow. To be used in
    a with statement, like a socket."""

    def __init__(
        self,
        endpoint: str,
        secret: bytes = SECRET,
        keys: Keys | None = None,
        sealed: bool = False,
        limit_s: float = LIMIT_S,
        kind: type[Sockets] = Sockets,
    ) -> None:
        self.limit_s = limit_s
        self._sockets = kind(keys, secret)
        self.link = self._sockets.link(endpoint, sealed)
        self._heard: list[list[bytes]] = []

    def send(self, *frames: bytes) -> None:
        self.met()
        self.link.send(list(frames))

    def met(self) -> bool:
        """Tell whether both ends prove the secret to each other within the limit."""
        return self.until(lambda: self.link.ready)

    def turned_away(self) -> str:
        """Wait until a port refuses the link, and return the reason that the link gives."""
        self.until(lambda: self.link.problem)
        return self.link.problem

    def recv(self) -> list[bytes] | None:
        """Return the next message; None if none comes within the limit."""
        self.until(lambda: self._heard)
        return self._heard.pop(0) if self._heard else None

    def until(self, there: Callable[[], object]) -> bool:
        end = time.monotonic() + self.limit_s
        while not there() and time.monotonic() < end:
            for ready in self._sockets.wait(min(0.05, max(end - time.monotonic(), 0))):
                self._heard += [[bytes(frame) for frame in frames] for frames in ready.receive()]
        return bool(there())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.close()


class ThreadQuery:
    """A query whose controller, workers and readers are threads of this process. ``feed`` every source, then ``wait``.
    To be used in a with statement: everything ends with it."""

    def __init__(
        self,
        *flows: Flow,
        workers: int = 2,
        encrypted: bool = False,
        collect: int = 0,
        to_steps: Any = None,
        **options: Any,
    ) -> None:
        # A slow machine is no reason to give up a worker: only tests of losses lose workers.
        patient = {"heartbeat_timeout": LIMIT_S, "workers_timeout": LIMIT_S}
        warm_up_once()
        settings = Settings.of(None, **(patient | options))
        self.plan = compile_plan(list(flows), settings, lambda schema: schema, "q", SECRET, collect, to_steps=to_steps)
        self.keys = Keys.make() if encrypted else None
        self.server = Server(self.plan, workers, "127.0.0.1", self.keys, "q", None)
        self.rendezvous = self.server.start()
        self.raised: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        for slot in range(workers):
            self._run(
                f"worker {slot}", lambda slot=slot: WorkerLoop(self.plan, self.rendezvous).run(slot, slot, "here")
            )

    def feed(self, inputs: Sequence[Iterable[pa.RecordBatch]], source: int = 0, attempt: int = 7) -> None:
        """Start an ingress thread for each item. An item has the batches of one partition of a source."""
        left = threading.Barrier(len(inputs), action=lambda: self._complete(source, len(inputs)))

        def run(partition: int, batches: Iterable[pa.RecordBatch]) -> None:
            Ingress(self.plan, self.rendezvous, source, partition).run(batches, attempt)
            left.wait(LIMIT_S)

        for partition, batches in enumerate(inputs):
            self._run(f"ingress {partition}", lambda p=partition, b=batches: run(p, b))

    def _complete(self, source: int, partitions: int) -> None:
        for edge in self.plan.edges_of_source(source):
            self.server.edge_complete(edge.id, list(range(partitions)))

    def _run(self, name: str, body: Any) -> None:
        def run() -> None:
            try:
                body()
            except Exception as error:
                self.raised.append(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def started(self) -> ThreadQuery:
        """Wait until the table of partitions is published; the query may have failed since."""
        assert self.server.started.wait(LIMIT_S)
        assert self.server.core.table is not None, self.server.error
        return self

    def wait(self, limit_s: float = LIMIT_S) -> None:
        """Wait until the query has ended, and raise its error."""
        assert self.server.ended.wait(limit_s), f"still {self.server.phase} after {limit_s:g} s; raised {self.raised}"
        if self.server.error is not None:
            raise self.server.error

    def error(self, limit_s: float = LIMIT_S) -> FluxError:
        assert self.server.ended.wait(limit_s), f"still {self.server.phase} after {limit_s:g} s"
        assert self.server.error is not None, "the query ended well"
        return self.server.error

    def ports(self) -> list[str]:
        """Return the endpoints of the workers' data ports."""
        assert self.server.core.table is not None
        return list(self.server.core.table.endpoints.values())

    def counters(self) -> dict[str, int]:
        """Add up the counters of all workers, from their newest heartbeats."""
        total: dict[str, int] = {}
        for member in list(self.server.core.members.workers.values()):
            for name, count in member.stats.get("counters", {}).items():
                total[name] = total.get(name, 0) + count
        return total

    def until_counted(self, name: str, at_least: int, limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while self.counters().get(name, 0) < at_least:
            assert time.monotonic() < end, f"{name} is not {at_least}: {self.counters()}; raised {self.raised}"
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the query. All threads have ended when this returns, and no worker answers any more."""
        self.server.stop()
        assert self.server.ended.wait(LIMIT_S)
        for thread in self._threads:
            thread.join(LIMIT_S)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        assert not alive, f"threads that did not end: {alive}"

    def __enter__(self) -> ThreadQuery:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            closed = self.server.close(LIMIT_S)
        assert closed


def dataframe(schema: pa.Schema, name: str = "input") -> Source:
    """Make a stand-in for a DataFrame, whose rows come from ``ThreadQuery.feed``."""
    return DataFrameSource(name, schema)
