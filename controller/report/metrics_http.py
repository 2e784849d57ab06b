"""Prometheus metrics over HTTP: one server for all queries of this process with the same address.

It is off by default, and listens on this machine only, unless the settings say otherwise: the metrics show names of
stages and hosts, and there is no password.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from controller.report.metrics import Metrics, merged
from flux.errors import UsageError


class Address(NamedTuple):
    """An address of the settings. Port 0 stands for any free port."""

    host: str
    port: int


_served: dict[Address, MetricsServer] = {}
_lock = threading.Lock()


class MetricsServer(Collector):
    """Server of GET /metrics for the queries that are running."""

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
        """Remove a query, and tell whether any query is left."""
        self._queries = tuple(other for other in self._queries if other is not query)
        return bool(self._queries)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(host: str, port: int, query: Metrics) -> str:
    """Serve the query's metrics, and return their address. Port 0 is any free port, the same for all queries of this
    process. UsageError: this process cannot listen there."""
    with _lock:
        asked_for = Address(host, port)
        server = _served.get(asked_for)
        if server is None:
            try:
                server = _served[asked_for] = MetricsServer(host, port)
            except OSError as error:
                raise UsageError(
                    f"metrics cannot be served at {host}:{port} ({error.strerror or error}): choose another "
                    "spark.flux.metrics.port (0: any free one, -1: off), or another spark.flux.metrics.host"
                ) from error
        server.add(query)
        return server.address


def withdraw(query: Metrics) -> None:
    """Stop serving a query that has ended. A server ends with its last query."""
    closing: list[Any] = []
    with _lock:
        for where, server in list(_served.items()):
            if not server.remove(query):
                closing.append(_served.pop(where))
        for server in closing:
            server.close()
