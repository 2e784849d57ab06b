"""A service: streams, queries and outputs over HTTP, on one plan that grows (design: service)."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from flux.errors import FluxError, QueryFailed, QueryTimeout, UsageError
from flux.eventlog.streams import StreamCatalogue
from flux.gateway.serve import check_port, http_options
from flux.gateway.tokens import TokenRegister
from flux.outputs.catalogue import NoSuchOutput, OutputCatalogue
from flux.outputs.sink import OutputLogSink
from flux.outputs.tentative_sink import TentativeOutputSink
from flux.registry.definitions import RegisteredQuery
from flux.registry.query_catalogue import QUERIES_MAX, QueryCatalogue, ServiceReplaced
from flux.registry.service_hold import ServiceHold
from flux.vault.location import place_of
from spark_integration.service.attached_gateways import AttachedGateway, started_gateway
from spark_integration.service.registrar import Registrar
from spark_integration.service.registry_port import RegistryPort
from spark_integration.service.service_plan import ServicePlan
from spark_integration.service.start_times import StartTimes
from spark_integration.settings import live_slots

log = logging.getLogger("flux")

#: Seconds between two looks at gateways and at stages that have failed; in an object store, where each look is a request.
LOOK_S, LOOK_REMOTE_S = 0.5, 5.0
#: Seconds after the start at which Spark's analyser is warmed up, if there were queries: their first results go first.
WARM_UP_S = 5.0
#: Seconds for the workers to join, beyond the time-out of the query, and for steps that an earlier service has left.
START_S = 600.0
#: Seconds for gateways of a service that was killed to leave their ports, and between two looks.
PORTS_S, _LOOK_PORT_S = 10.0, 0.05
#: Gateways on ports that follow each other.
GATEWAYS_MAX = 64


class StreamService:
    """A running service. ``stop`` ends it, and leaves nothing behind but its location."""

    def __init__(
        self,
        session: Callable[[], SparkSession],
        location: str | None,
        http: str,
        gateways: int,
        allow: Sequence[str],
        gateway_options: Sequence[str],
        queries_max: int,
        give_up: Sequence[str],
        state_max: int,
        times: StartTimes,
        options: dict[str, Any],
    ) -> None:
        """Start a service. Nothing of it runs if this raises. ``session`` may wait for one that is being made: gateways begin
        meanwhile, and need none. ``give_up``: streams whose queries are FAILED from now on, because
        their logs cannot be read; ``state_max``: see ``Registrar``; ``times`` takes down the parts of the start."""
        self.start_times = times
        self.stop_asked = threading.Event()
        self._stopped = threading.Lock()
        self.error: FluxError | None = None
        #: Whether Spark's analyser was warmed up for the first registration, or is being.
        self._is_warm = False
        with ExitStack() as stack:
            self.is_lasting = location is not None
            if location is None:
                folder = tempfile.mkdtemp(prefix="flux-serve-")
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                location = folder
            self.location = location
            place = self._place = place_of(location, "location")
            hold = ServiceHold(place)
            stack.callback(hold.close)
            #: The first token, for everything, if this service has made it; None: the location has tokens.
            self.token = _first_token(place)
            self._alone = ThreadPoolExecutor(1, "flux-service")
            stack.callback(self._alone.shutdown, cancel_futures=True)
            catalogue = QueryCatalogue(place, queries_max=queries_max)
            catalogue.claim()
            streams = StreamCatalogue(place)
            for catalogue_read in (streams.all, OutputCatalogue(place).all):
                catalogue_read()  # a document that is lost is an error now, and not with the first request
            found = addresses(http, gateways)
            self.urls = [
                f"{'https' if '--certificate' in gateway_options else 'http'}://{address}" for address in found
            ]
            for address in found:
                check_free(address, PORTS_S if hold.after_a_kill else 0.0)
            self._gateways = []
            for address in found:
                made = AttachedGateway(address, partial(started_gateway, location, address, gateway_options))
                self._gateways.append(made)
                stack.callback(made.wait)
                stack.callback(made.end)
            times.end("location")
            self.spark = session()
            times.end("session")
            self.plan = ServicePlan(self.spark, location, streams, allow, self._sink_of)
            self._registrar = Registrar(catalogue, streams, self.plan, self._forget_output, state_max)
            self._give_up(catalogue, give_up)
            self._begin(catalogue, allow, options)
            stack.callback(self._end_plan)
            port = RegistryPort(self._registrar.answer, self._alone)
            stack.callback(port.close)
            port.open(hold.publish(port.url, self.urls).secret)
            for each in self._gateways:
                each.wait_until_it_listens()
            times.end("gateways")
            self._close = stack.pop_all()
        self._thread = threading.Thread(target=self._look_after, name="flux-service-look", daemon=True)
        self._thread.start()

    def _give_up(self, catalogue: QueryCatalogue, streams: Sequence[str]) -> None:
        """Give up the queries that read these streams, and their state. NoSuchStream: there is none of this name."""
        for name in streams:
            StreamCatalogue(self._place).get(name)
        for name in streams:
            failed = catalogue.fail_readers(name, f"stream {name} was given up when the service was started")
            log.warning("stream %s is given up, and with it %s", name, ", ".join(failed) or "no query")

    def _begin(self, catalogue: QueryCatalogue, allow: Sequence[str], options: dict[str, Any]) -> None:
        """Start the plan where it was, and go on with the steps that an earlier service has left. UsageError: a query has an
        operator that is not allowed any more."""
        running = [each for each in catalogue.all().values() if each.phase in ("RUNNING", "REGISTERING")]
        for each in running:
            operator = each.definition.operator
            if operator and operator not in allow:  # it would be given up, with its state
                raise UsageError(
                    f"query {each.name} is registered with operator {operator}, which is not allowed any more: start the service "
                    f"with --allow {operator}"
                )
        failed = self.plan.start(running, self.start_times.end, **options)
        if not running:  # else the processors have state to restore
            self._alone.submit(self.plan.warm_up)
            self._is_warm = True
        try:
            self.plan.query.wait_until_running(START_S)
            self.start_times.end("workers and state")
            self._registrar.note_failed(failed)
            self._alone.submit(self._registrar.converge).result(START_S)
            self.plan.forget_unread(StreamCatalogue(self._place).all())
            self.start_times.end("steps left")
        except BaseException:
            self._end_plan()
            raise

    def _sink_of(self, query: RegisteredQuery) -> OutputLogSink:
        made = query.definition
        kind = TentativeOutputSink if made.availability else OutputLogSink
        return kind(self._place, query.name, made.retain, made.mode)

    def _forget_output(self, name: str) -> None:
        with suppress(NoSuchOutput):
            OutputCatalogue(self._place).remove(name)

    def _end_plan(self) -> None:
        try:
            self.plan.query.stop()
        except QueryTimeout as error:
            log.warning("the service ends though its query does not: %s", error)

    # ---- while it runs

    @property
    def slots_left(self) -> int:
        """The task slots of the session that the service leaves to others."""
        return max(live_slots(self.spark) - self.plan.query.tasks, 0)

    def _look_after(self) -> None:
        """Look after gateways and failed stages until the service is stopped, or its plan has ended."""
        look_s = LOOK_REMOTE_S if self._place.flush_s else LOOK_S
        warm_up_at = time.monotonic() + WARM_UP_S
        while not self.stop_asked.wait(look_s):
            try:
                if not self._is_warm and time.monotonic() >= warm_up_at:
                    self._is_warm = True
                    self._alone.submit(self.plan.warm_up)
                for each in self._gateways:
                    each.look()
                if not self.plan.query.isActive:
                    raise self.plan.query.exception() or QueryFailed("the query of the service has ended")
                self._alone.submit(self._registrar.converge).result(START_S)
                self._alone.submit(self._registrar.bound_state).result(START_S)
            except ServiceReplaced as error:
                self._end_with(error)
            except FluxError as error:
                if self.stop_asked.is_set():
                    return
                if not self.plan.query.isActive:
                    self._end_with(error)
                else:
                    log.warning("the service tries again: %s", error)
            except Exception:
                if self.stop_asked.is_set():  # the thread of its changes has ended
                    return
                log.exception("the service cannot look after its plan")

    def _end_with(self, error: FluxError) -> None:
        self.error = error
        log.error("the service ends: %s", error)
        self.stop_asked.set()

    def wait(self) -> None:
        """Wait until ``stop_asked`` is set, and stop. Raises the error that has ended the service."""
        self.stop_asked.wait()
        self.stop()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """End gateways, port and plan, in this order: answered events are on disk, and registrations stay. A change of the plan
        that is under way fails with the plan, and is carried on by the next service."""
        self.stop_asked.set()
        with self._stopped:
            for each in self._gateways:
                each.end()
            self._close.close()
            self._thread.join()

    def __enter__(self) -> StreamService:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _first_token(place: Any) -> str | None:
    tokens = TokenRegister(place)
    return None if tokens.all() else tokens.make(["admin"], ["*"])


def addresses(http: str, gateways: int) -> list[str]:
    """Return the addresses of gateways, on ports that follow each other. UsageError: it is none."""
    if not 1 <= gateways <= GATEWAYS_MAX:
        raise UsageError(f"gateways: expected 1 to {GATEWAYS_MAX}, got {gateways}")
    first = http_options(http)
    if first.port + gateways - 1 > 65535:
        raise UsageError(f"http: {gateways} ports from {first.port} on are wanted, and 65535 is the last one")
    found = []
    for port in range(first.port, first.port + gateways):
        found.append(f"[{first.host}]:{port}" if ":" in first.host else f"{first.host}:{port}")
    return found


def check_free(address: str, wait_s: float) -> None:
    """Check that a port is free, or becomes free within some seconds. UsageError: it is taken."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + wait_s
    while True:
        try:
            check_port(host.strip("[]"), int(port))
            return
        except UsageError:
            if time.monotonic() >= end:
                raise
            time.sleep(_LOOK_PORT_S)


def serve(
    location: str | Path | None, http: str, gateways: int, session: Callable[[], SparkSession], allow: Sequence[str],
    gateway_options: Sequence[str] = (), queries_max: int = QUERIES_MAX,
    give_up: Sequence[str] = (), state_bytes: int = 0, times: StartTimes | None = None, **options: Any,
) -> StreamService:  # fmt: skip
    """Start a service (``flux.serve``). ``times`` has the earlier parts of the start."""
    addresses(http, gateways)
    given = None if location is None else str(location)
    made = {"partitions": 1, "on_failure": "stage", **options}
    return StreamService(
        session,
        given,
        http,
        gateways,
        allow,
        gateway_options,
        queries_max,
        give_up,
        state_bytes,
        times or StartTimes(),
        made,
    )
