"""Spark sessions for tests, one alive at a time, and the check that a query leaves nothing behind."""

from __future__ import annotations

import atexit
import collections
import gc
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import java_archive

TESTS = Path(__file__).resolve().parent
#: Helper modules that tests share are found by name, and in the executors too; the project comes first, because the
#: folder tests/flux must not be taken for the package.
SHARED = [str(TESTS.parent), str(TESTS / "flux"), str(TESTS / "spark")]
for path in reversed(SHARED):
    if path in sys.path:
        sys.path.remove(path)
    sys.path.insert(0, path)

#: Everything that Spark and the processes of a test leave behind, also when they are killed; gone at the end.
SCRATCH = tempfile.mkdtemp(prefix="flux-tests-")
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
os.environ["TMPDIR"] = SCRATCH
#: Connection files of tests are not among those of the user.
os.environ["FLUX_RUNTIME_DIR"] = os.path.join(SCRATCH, "queries")
os.mkdir(os.environ["FLUX_RUNTIME_DIR"], 0o700)
os.environ["JDK_JAVA_OPTIONS"] = f"{java_archive.options()} -Djava.io.tmpdir={SCRATCH}"

#: How long the last tasks, threads and sockets of a query that has ended may take to go.
GONE_S = 60.0
#: Modules of the processes that fork Python workers: Spark's, and that of Flux.
DAEMONS = ("pyspark.daemon", "spark_integration.daemon")
#: Kinds of file descriptors that a ZeroMQ context opens, and neither Spark nor pyarrow does.
ZMQ_FDS = ("anon_inode:[eventfd]", "anon_inode:[eventpoll]")
#: New objects after which Python looks for garbage among them. With its own 700, and all modules among the objects, looking takes
#: a seventh of the time of unit tests.
COLLECT_AFTER = 20_000
#: The share of the random examples of each property (Hypothesis) that are drawn. ``make test`` draws some, in each run others.
EXAMPLES_SHARE = float(os.environ.get("FLUX_TEST_EXAMPLES", 1.0))
#: So few that a share of them would say little.
EXAMPLES_MIN = 6
gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


def pytest_collection_finish() -> None:
    """Leave all modules and tests out of the search for garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests without a JVM first, then those of ``spark``, of ``slots`` and of ``cluster``, and at the very end those after
    which executors are missing for a while: each kind of session starts once. A second process runs those of the first two kinds:
    both processes take about as long."""

    def kind(item: pytest.Item) -> int:
        fixtures = getattr(item, "fixturenames", ())
        if "cluster" in fixtures:
            return 4 if item.get_closest_marker("costs_an_executor") else 3
        return 2 if "slots" in fixtures else int(item.get_closest_marker("spark") is not None)

    for item in items:
        if kind(item) < 2:
            item.add_marker("second")
    for function in {getattr(item, "function", None) for item in items}:
        draw_a_share(function)

    items.sort(key=kind)


def draw_a_share(function: Any) -> None:
    """Lower the number of examples of a property, unless it is small, or each run draws the same ones."""
    own = getattr(function, "_hypothesis_internal_use_settings", None)
    if own is None or own.derandomize or EXAMPLES_SHARE == 1.0:
        return
    from hypothesis import settings

    fewer = max(int(own.max_examples * EXAMPLES_SHARE), min(own.max_examples, EXAMPLES_MIN))
    function._hypothesis_internal_use_settings = settings(own, max_examples=fewer)


def _session(master: str, more: dict[str, str] | None = None) -> Any:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in SHARED]
    os.environ["PYTHONPATH"] = os.pathsep.join([*SHARED, *inherited])
    builder = SparkSession.builder.master(master).appName("flux-tests")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.adaptive.enabled": "false",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        # Each worker that is forked by Spark's own daemon takes two seconds of a core for its imports. Programs have that one.
        "spark.python.daemon.module": DAEMONS[1],
        # Dying executors at the end of a run write many lines that are of no use.
        "spark.driver.extraJavaOptions": "-Dlog4j2.level=ERROR",
        # No worker is given up because the machine is slow; tests of silence set limits of their own.
        "spark.flux.heartbeat.timeout": "5s",
        "spark.flux.workers.timeout": "180s",
        **(more or {}),
    }.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Driver and four task slots in one JVM; a failed task fails its job at once."""
    pytest.importorskip("pyspark")
    session = _session("local[4]")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def patient_tasks() -> Iterator[Any]:
    pytest.importorskip("pyspark")
    session = _session("local[6,1000]")
    yield session
    session.stop()


@pytest.fixture
def slots(patient_tasks: Any) -> Any:
    """Driver and six task slots in one JVM. Tasks may fail often, so a Python worker may be killed and Spark starts another one.
    Three executors of ``cluster`` cost 20 seconds of a core more: for tests in which executors stay alive."""
    running = patient_tasks.sparkContext._jsc.sc().statusTracker().getExecutorInfos
    eventually("Spark tasks of an earlier test", lambda: sum(each.numRunningTasks() for each in running()), 0, 120)
    return patient_tasks


@pytest.fixture(scope="session")
def executors() -> Iterator[Any]:
    pytest.importorskip("pyspark")
    more = {"spark.task.maxFailures": "1000", "spark.decommission.enabled": "true"}
    session = _session("local-cluster[3,2,1024]", more)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def cluster(executors: Any) -> Any:
    """Three executor JVMs of two slots each, all of them there: three workers have one each, and a query has room to
    grow. Tasks may fail often, executors may be decommissioned. Ends the session of ``spark``."""
    scala = executors.sparkContext._jsc.sc()
    # Tasks of a job that comes earlier, and those that a test before has left, would share an executor.
    eventually("executors, and the driver", lambda: scala.getExecutorMemoryStatus().size(), 4, 120)
    running = scala.statusTracker().getExecutorInfos
    eventually("Spark tasks of an earlier test", lambda: sum(each.numRunningTasks() for each in running()), 0, 120)
    return executors


@pytest.fixture
def callbacks() -> None:
    """Open the port that pyspark keeps for all ``foreachBatch`` of a session before ``nothing_left_behind`` looks at ports."""
    from pyspark import SparkContext
    from pyspark.java_gateway import ensure_callback_server_started

    context: Any = SparkContext._active_spark_context
    ensure_callback_server_started(context._gateway)
    port = context._gateway.get_callback_server().get_listening_port()
    # A thread of its own begins to listen there.
    eventually("the port for callbacks", lambda: port in {listens for _, listens in _listening()}, True)


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """After the test: no thread, socket, file, Spark job or worker loop of a query that was not there before."""
    before = _zmq_fds(os.getpid()), _listening()
    yield
    eventually("flux threads in the driver", _flux_threads, [])
    eventually("ZeroMQ sockets in the driver", lambda: _zmq_fds(os.getpid()), before[0])
    eventually("listening ports of the driver", lambda: _holders(_listening() - before[1]), {})
    eventually("connection files", lambda: os.listdir(os.environ["FLUX_RUNTIME_DIR"]), [])
    eventually("running Spark jobs", _spark_jobs, [])
    # A look at all processes takes a while.
    eventually(
        "Python workers still in a query (ZeroMQ) or with temporary files", _busy_python_workers, {}, every_s=0.1
    )

    from spark_integration.query.running_queries import active_queries

    assert active_queries() == []


def eventually(
    what: str, look: Callable[[], Any], expected: Any, limit_s: float = GONE_S, every_s: float = 0.02
) -> None:
    """Look again and again until the result is as expected; fail with the last result when the time is over."""
    end = time.monotonic() + limit_s
    while (found := look()) != expected:
        assert time.monotonic() < end, f"{what}: {found!r} after {limit_s:g} s, expected {expected!r}"
        time.sleep(every_s)


def _flux_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flux")]


def _targets(pid: int) -> list[str]:
    """Read the targets of a process's open file descriptors."""
    found = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                pass
    except OSError:
        pass
    return found


def _zmq_fds(pid: int) -> dict[str, int]:
    return dict(collections.Counter(target for target in _targets(pid) if target in ZMQ_FDS))


def _listening() -> set[tuple[str, int]]:
    return {tuple(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def _holders(addresses: set[tuple[str, int]]) -> dict[tuple[str, int], list[str]]:
    """Find the objects of this process that hold the sockets of these addresses, as far as Python knows."""
    found: dict[tuple[str, int], list[str]] = {address: [] for address in addresses}
    for each in gc.get_objects() if addresses else ():
        if isinstance(each, socket.socket) and each.fileno() >= 0 and each.getsockname()[:2] in addresses:
            holders = [type(holder).__name__ for holder in gc.get_referrers(each)]
            found[each.getsockname()[:2]] += [repr(each), *holders]
    return found


def _spark_jobs() -> list[int]:
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return [] if context is None else list(context.statusTracker().getActiveJobsIds())


def python_workers() -> list[psutil.Process]:
    """Find the processes that Spark forked to run Python code on this machine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if _is_of_daemon(process) and _is_of_daemon(process.parent()):
                found.append(process)
        except (psutil.Error, AttributeError):
            pass
    return found


def _is_of_daemon(process: psutil.Process) -> bool:
    return any(module in process.cmdline() for module in DAEMONS)


def _busy_python_workers() -> dict[int, list[str]]:
    busy = {}
    for process in python_workers():
        scratch = f"{tempfile.gettempdir()}/"
        odd = [
            target for target in _targets(process.pid) if target.startswith(scratch) and target.endswith("(deleted)")
        ]
        odd += ["ZeroMQ context"] * contexts_of_queries(process.pid, _thread_names(process.pid))
        if odd:
            busy[process.pid] = odd
    return busy


def contexts_of_queries(pid: int, threads: dict[int, str]) -> int:
    """Count the ZeroMQ contexts that queries have left among the threads of a process.

    pyzmq keeps one context and one Python thread of its own in a process that has sent a large frame. Threads of Python have
    the name of the main thread, whose number is that of the process. This number need not be the lowest: behind the maximum of
    numbers (32,768 on some machines) the kernel begins anew."""
    names = list(threads.values())
    of_pyzmq = names.count(threads[pid]) - 1 if pid in threads else 0
    return max(names.count("ZMQbg/Reaper") - min(of_pyzmq, 1), 0)


def _thread_names(pid: int) -> dict[int, str]:
    """Return the names of the threads of a process as the kernel knows them."""
    found = {}
    try:
        for task in map(int, os.listdir(f"/proc/{pid}/task")):
            found[task] = Path(f"/proc/{pid}/task/{task}/comm").read_text().strip()
    except OSError:
        pass
    return found
