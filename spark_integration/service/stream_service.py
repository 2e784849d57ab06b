"""A service: streams, queries and outputs over HTTP, on one plan that grows (design: service)."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Sequence
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
from flux.registry.definitions import RegisteredQuery
from flux.registry.query_catalogue import QUERIES_MAX, QueryCatalogue, ServiceReplaced
from flux.registry.service_hold import ServiceHold
from flux.vault.location import place_of
from spark_integration.query.declarations import session_of
from spark_integration.service.attached_gateways import AttachedGateway, started_gateway
from spark_integration.service.registrar import Registrar
from spark_integration.service.registry_port import RegistryPort
from spark_integration.service.service_plan import ServicePlan
from spark_integration.settings import live_slots

log = logging.getLogger("flux")

#: Seconds between two looks at gateways and at stages that have failed; in an object store, where each look is a request.
LOOK_S, LOOK_REMOTE_S = 0.5, 5.0
#: Seconds for the workers to join, beyond the time-out of the query, and for steps that an earlier service has left.
START_S = 600.0
#: Gateways on ports that follow each other.
GATEWAYS_MAX = 64


class StreamService:
    """A running service. ``stop`` ends it, and leaves nothing behind but its location."""

    def __init__(
        self,
        spark: SparkSession,
        location: str | None,
        http: str,
        gateways: int,
        allow: Sequence[str],
        gateway_options: Sequence[str],
        queries_max: int,
        give_up: Sequence[str],
        state_max: int,
        options: dict[str, Any],
    ) -> None:
        """Start a service. Nothing of it runs if this raises. ``give_up``: streams whose queries are FAILED from now on, because
        their logs cannot be read; ``state_max``: see ``Registrar``."""
        self.spark = spark
        self.stop_asked = threading.Event()
        self._stopped = threading.Lock()
        self.error: FluxError | None = None
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
            self.plan = ServicePlan(spark, location, streams, allow, self._sink_of)
            self._registrar = Registrar(catalogue, streams, self.plan, self._forget_output, state_max)
            self._give_up(catalogue, give_up)
            self._begin(catalogue, allow, options)
            stack.callback(self._end_plan)
            port = RegistryPort(self._registrar.answer, self._alone)
            stack.callback(port.close)
            found = addresses(http, gateways)
            self.urls = [
                f"{'https' if '--certificate' in gateway_options else 'http'}://{address}" for address in found
            ]
            port.open(hold.publish(port.url, self.urls).secret)
            self._gateways = []
            for address in found:
                made = AttachedGateway(address, partial(started_gateway, location, address, gateway_options))
                self._gateways.append(made)
                stack.callback(made.wait)
                stack.callback(made.end)
            for each in self._gateways:
                each.wait_until_it_listens()
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
        failed = self.plan.start(running, **options)
        try:
            self.plan.query.wait_until_running(START_S)
            self._registrar.note_failed(failed)
            self._alone.submit(self._registrar.converge).result(START_S)
            self.plan.forget_unread(StreamCatalogue(self._place).all())
        except BaseException:
            self._end_plan()
            raise

    def _sink_of(self, query: RegisteredQuery) -> OutputLogSink:
        return OutputLogSink(self._place, query.name, query.definition.retain, query.definition.mode)

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
        while not self.stop_asked.wait(look_s):
            try:
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
    """Return the addresses of gateways, on ports that follow each other. UsageError: it is none, or a port is taken."""
    if not 1 <= gateways <= GATEWAYS_MAX:
        raise UsageError(f"gateways: expected 1 to {GATEWAYS_MAX}, got {gateways}")
    first = http_options(http)
    if first.port + gateways - 1 > 65535:
        raise UsageError(f"http: {gateways} ports from {first.port} on are wanted, and 65535 is the last one")
    found = []
    for port in range(first.port, first.port + gateways):
        check_port(first.host, port)
        found.append(f"[{first.host}]:{port}" if ":" in first.host else f"{first.host}:{port}")
    return found


def serve(
    location: str | Path | None, http: str, gateways: int, spark: SparkSession | None, allow: Sequence[str],
    gateway_options: Sequence[str] = (), queries_max: int = QUERIES_MAX,
    give_up: Sequence[str] = (), state_bytes: int = 0, **options: Any,
) -> StreamService:  # fmt: skip
    """Start a service (``flux.serve``)."""
    addresses(http, gateways)
    session = session_of([]) if spark is None else spark
    given = None if location is None else str(location)
    made = {"partitions": 1, "on_failure": "stage", **options}
    return StreamService(
        session, given, http, gateways, allow, gateway_options, queries_max, give_up, state_bytes, made
    )
