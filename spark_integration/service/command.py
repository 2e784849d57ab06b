"""The program of ``flux serve``: a session of Spark, a service, and its end with a signal."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from controller.text import count
from spark_integration.service.class_archive import java_options, made_beside
from spark_integration.service.shipped import loaded
from spark_integration.service.start_times import StartTimes

if TYPE_CHECKING:
    from spark_integration.service.stream_service import StreamService

log = logging.getLogger("flux")

#: Options for JVMs that no row passes: optimising their code takes seconds of a processor at each start, and saves none.
IDLE_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
#: Settings of the session that the command makes, unless the user gives others.
_SETTINGS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.python.daemon.module": "spark_integration.daemon",  # workers start fast
    "spark.task.maxFailures": "1000",  # a worker that is lost comes back as the next attempt of its task
    "spark.executor.extraJavaOptions": IDLE_JVM,
}
#: The setting with the options of the driver's JVM.
_OPTIONS = "spark.driver.extraJavaOptions"
#: Exit code of a program that a signal has ended before it began its work.
_TERMINATED = 143


def run(
    master: str, conf: Mapping[str, str], location: str | None, http: str, gateways: int, allow: Sequence[str],
    gateway_options: Sequence[str], queries_max: int, give_up: Sequence[str], options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Run a service until SIGTERM or SIGINT, in the main thread. ``gateway_options``: further arguments of ``flux gateway``.
    FluxError: it has not begun, or has ended by itself."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    # Each text that does not fit would leave a hundred lines of the JVM in the log, and its client gets the reason.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    times = StartTimes()
    with ThreadPoolExecutor(1, "flux-session") as alone:
        made = alone.submit(_session, master, conf)  # the JVM begins while this process loads the rest
        alone.submit(lambda: _load_workers(made.result()))  # and processes for tasks while the plan is made
        try:
            from spark_integration.service.stream_service import serve

            times.end("programs loaded")
            service = serve(
                location,
                http,
                gateways,
                made.result,
                allow,
                gateway_options,
                queries_max,
                give_up,
                times=times,
                **options,
            )
            with service:
                for each in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(each, lambda *_: service.stop_asked.set())
                _tell(service)
                with made_beside(IDLE_JVM) if _OPTIONS not in conf else nullcontext():
                    service.wait()
        finally:
            made.result().stop()


def _tell(service: StreamService) -> None:
    """Print the facts with which a user begins."""
    said = [
        service.start_times.told(),
        f"it holds {count(service.plan.query.tasks, 'task slot')} of Spark and leaves {service.slots_left}",
        f"serving {service.location} at {', '.join(service.urls)}",
    ]
    if not service.is_lasting:
        said.insert(0, "without --location, events, queries and results end with this service")
    if service.token is not None:
        said.insert(0, f"the first token, for everything; it is not shown again: {service.token}")
    for each in said:
        print(f"flux: {each}", file=sys.stderr, flush=True)


def _load_workers(session: SparkSession) -> list[int]:
    """Have each executor start the process that forks the workers, which loads for a second. Return the ids of these processes.

    Spark has one for each environment, so the tasks have that of the workers."""
    from spark_integration.tasks.worker_tasks import collect_in_tasks

    try:
        return collect_in_tasks(session, loaded, session.sparkContext.defaultParallelism)
    except Exception as error:  # the tasks of the service have the same error
        log.info("processes of workers are not loaded beforehand: %s", error)
        return []


def _session(master: str, conf: Mapping[str, str]) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName("flux serve")
    archived = {_OPTIONS: f"{IDLE_JVM} {java_options()}".strip()}
    for key, value in {**_SETTINGS, **archived, **conf}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
