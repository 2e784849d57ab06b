"""The service for people around the controller of a query: port for requests, connection file, metrics (design: people).

Requests have a port of their own, on the loopback address of the driver's machine only. So a flood of requests cannot crowd out
the workers' reports, and a request is not understood on the workers' port.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.decide.controller import Tell
from controller.operate import connection_file
from controller.operate.request_handler import About, Core, Reach, RequestHandler
from controller.operate.requests import REQUEST_BYTES_MAX, AnyAnswer, AnyRequest
from controller.replicas.addition_tracker import Event
from controller.report import metrics as metrics_http
from controller.report.metrics import Metrics
from flux.errors import UsageError
from flux.shell.transport import Keys, Port, Sockets

log = logging.getLogger("flux")

HOST = "127.0.0.1"
SECRET_BYTES = 32
#: Requests or answers that may wait on one connection. A command sends one request at a time.
WAITING_MAX = 64


class Service:
    """The service of one query, made, used and closed by the controller's thread. ``report`` is the newest progress report,
    None before the first."""

    def __init__(self, core: Core, about: About, report: Callable[[], dict[str, Any] | None]) -> None:
        self.metrics = Metrics(core.plan, about.id, about.name)
        self.port: Port | None = None
        self._core = core
        self._about = about
        self._report = report
        self._handler: RequestHandler | None = None
        #: See ``RequestHandler``.
        self.add_flow: Callable[[str], None] | None = None
        self.restart_stage: Callable[[str], None] | None = None
        self._file: Path | None = None

    # ---- opening and closing

    def open(self, sockets: Sockets, keys: Keys | None, endpoint: str = "") -> None:
        """Open the parts that the settings ask for. ``endpoint`` is that of the controller, for readers of output. UsageError:
        metrics cannot be served at the configured address."""
        settings = self._core.plan.settings
        if settings.metrics_port >= 0:
            address = metrics_http.serve(settings.metrics_host, settings.metrics_port, self.metrics)
            self._about = replace(self._about, metrics=address)
            log.info("metrics of query %s are served at %s", self._about.id, address)
        secret = secrets.token_bytes(SECRET_BYTES)
        self._handler = RequestHandler(self._core, self._about, self._report, self.metrics, self.observe)
        if settings.operate:
            if endpoint:
                pair = (keys.public, keys.private) if keys else (b"", b"")
                self._handler.reach = Reach(endpoint, secret, *pair)
            self.port = sockets.port(HOST, REQUEST_BYTES_MAX, WAITING_MAX, sealed=True, secret=secret)
            self._publish(secret, keys)

    def _publish(self, secret: bytes, keys: Keys | None) -> None:
        """Write the connection file. If that is impossible, the query runs all the same, and the log tells why the command line
        does not find it."""
        assert self.port is not None
        about = self._about
        connection = connection_file.of_this_process(
            id=about.id, name=about.name, application=about.application, started=about.started,
            endpoint=self.port.endpoint, secret=secret, public_key=keys.public.decode() if keys else "",
            metrics=about.metrics,
        )  # fmt: skip
        try:
            self._file = connection_file.write(connection)
        except (OSError, UsageError) as error:
            log.warning("query %s cannot be operated with the flux command: %s", about.id, error)
            return
        atexit.register(self._remove_file)  # for a driver that ends without stopping its queries

    def _remove_file(self) -> None:
        if self._file is not None and os.getpid() == self._about.pid:  # a forked process must not remove it
            try:
                connection_file.remove(self._file)
            except OSError as error:
                log.warning("%s cannot be removed: %s", self._file, error)
            self._file = None

    def close(self) -> None:
        """Close metrics and remove the file. The port is closed with its sockets."""
        atexit.unregister(self._remove_file)
        self._remove_file()
        metrics_http.withdraw(self.metrics)

    # ---- running

    def ask(self, request: AnyRequest, now: float) -> tuple[AnyAnswer, list[Tell]]:
        """Answer a request of the query's own process, which needs no port and no secret."""
        assert self._handler is not None, "asked before it was opened"
        self._handler.add_flow, self._handler.restart_stage = self.add_flow, self.restart_stage
        return self._handler.answer(request, now)

    def answer(self, now: float) -> list[Tell]:
        """Answer the requests that have arrived. Return the commands that they lead to."""
        effects: list[Tell] = []
        if self.port is not None and self._handler is not None:
            self._handler.add_flow, self._handler.restart_stage = self.add_flow, self.restart_stage
            for connection, frames in self.port.receive():
                answer, orders = self._handler.handle(frames, now)
                self.port.send(connection, [answer])
                effects.extend(orders)
        return effects

    def _refused(self) -> int:
        return (self._handler.refused if self._handler else 0) + (self.port.refused if self.port else 0)

    def note(self, events: Sequence[Event]) -> None:
        for event in events:
            self.metrics.note(event)

    def on_report(self) -> None:
        """Take the newest progress report. Metrics without a server are made only when a person asks: with many stages they take
        the controller's thread for longer than the report itself."""
        report = self._report()
        if self._about.metrics:
            self.observe()
        elif report is not None:
            self.metrics.count(report)

    def observe(self) -> None:
        """Renew the metrics that other threads and people see."""
        core = self._core
        try:
            table = core.load_table()
            busy = {} if table is None else table.of_workers()
            moves = len(core.moves_pending())
            self.metrics.follow(core.plan)
            self.metrics.observe(core.phase, self._report(), core.levels(), busy, moves, self._refused())
        except Exception:
            # This changes nothing in the query, so a defect here must not end a query that runs well.
            log.exception("metrics of query %s cannot be renewed", self._about.id)
