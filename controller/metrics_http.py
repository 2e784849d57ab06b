"""Prometheus metrics over HTTP: one server for all queries of this process that ask for the same address.

It is off by default, and listens to this machine only unless told otherwise: the numbers carry names of stages and
hosts, and there is no password.
"""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from controller.metrics import Metrics, merged
from flux.errors import UsageError

_served: dict[tuple[str, int], MetricsServer] = {}
_lock = threading.Lock()


class MetricsServer(Collector):
    """Answers GET /metrics; the queries that it shows come and go."""

    def __init__(self, host: str, port: int) -> None:
        self._queries: tuple[Metrics, ...] = ()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)
        self._thread.name = "flux-metrics"
        bracketed = f"[{host}]" if ":" in host else host
        self.address = f"http://{bracketed}:{self._server.server_port}/metrics"

    def collect(self) -> list[Metric]:
        return merged(query.collect() for query in self._queries)

    def add(self, query: Metrics) -> None:
        self._queries = (*self._queries, query)

    def remove(self, query: Metrics) -> bool:
        """Whether any query is left."""
        self._queries = tuple(other for other in self._queries if other is not query)
        return bool(self._queries)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(host: str, port: int, query: Metrics) -> str:
    """The address at which the query's metrics are from now on. Port 0: any free one, the same for all queries of this
    process. UsageError if nobody can listen there."""
    with _lock:
        server = _served.get((host, port))
        if server is None:
            try:
                server = _served[host, port] = MetricsServer(host, port)
            except OSError as error:
                raise UsageError(
                    f"metrics cannot be served at {host}:{port} ({error.strerror or error}): choose another "
                    "spark.flux.metrics.port (0: any free one, -1: off), or another spark.flux.metrics.host"
                ) from error
        server.add(query)
        return server.address


def withdraw(query: Metrics) -> None:
    """The query has ended; with the last one its server ends."""
    closing: list[Any] = []
    with _lock:
        for where, server in list(_served.items()):
            if not server.remove(query):
                closing.append(_served.pop(where))
        for server in closing:
            server.close()
