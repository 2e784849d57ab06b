"""Ctrl-C in a program with running queries: it stops the call that it interrupts, and no query.

Two habits of other packages would end all queries with each Ctrl-C, in a notebook or in a program that catches it:

- pyspark's handler of SIGINT cancels all jobs of its context before it raises ``KeyboardInterrupt``, also those of queries.
  Here it cancels the other jobs alone. Its context is in the cell of its closure, and that is replaced: ``signal.signal``
  would only work in the main thread.
- py4j, when a call of the JVM is interrupted, has the JVM close the connection of this call. The JVM finds the connection
  by its port or by that of the JVM, which is the same for all connections. So the calls of all threads break, also those
  that wait for the workers' tasks, and some would be sent once more. Here the connection of the interrupted call is closed
  alone.

There is no public way to do either. With releases that do this otherwise, everything stays as it is. The call that is
interrupted stops a query of its own: see ``FetchedOutput.get``.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from py4j.clientserver import ClientServerConnection
from py4j.protocol import Py4JError
from pyspark import SparkContext

from spark_integration.query import running_queries

log = logging.getLogger("flux")

#: Handler in ``SparkContext``, and the variable in which it finds its context.
HANDLER, CONTEXT = "SparkContext._do_init.<locals>.signal_handler", "self"
#: Time for which Ctrl-C waits until the other jobs are cancelled, before it takes effect all the same.
CANCEL_S = 5.0

FAILURES = (Py4JError, AttributeError, TypeError, OSError)
#: Method of py4j that is replaced, None in a release without it.
_shut_down: Any = getattr(ClientServerConnection, "shutdown_socket", None)


class SparingContext:
    """The context of a session, with a ``cancelAllJobs`` that spares the jobs of queries. Called by the handler of SIGINT
    alone."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context

    def cancelAllJobs(self) -> None:  # noqa: N802
        if running_queries.at_this_moment():
            cancel_others(self._context)
        else:
            self._context.cancelAllJobs()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def cancel_others(context: SparkContext) -> None:
    """Cancel the jobs that belong to no query. Called in the main thread between any two of its instructions, so it takes no
    lock that this thread may hold. This thread may be waiting for an answer of the JVM, and cannot ask on the same
    connection: another thread asks."""
    asks = threading.Thread(target=_cancel_others, args=(context,), name="flux-interrupt", daemon=True)
    asks.start()
    asks.join(CANCEL_S)


def _cancel_others(context: SparkContext) -> None:
    try:
        queries = running_queries.at_this_moment()
        prefixes = tuple(f"flux-{query.id}" for query in queries)
        streams = {group for query in queries for group in query.job_groups_of_streams()}
        store = context._jsc.sc().statusStore()
        for job in context.statusTracker().getActiveJobsIds():
            about = store.job(job)
            group = about.jobGroup().get() if about.jobGroup().isDefined() else ""
            names = [group, *about.jobTags().mkString("\n").split("\n")]
            if group not in streams and not any(name.startswith(prefixes) for name in names):
                context._jsc.sc().cancelJob(job)
    except FAILURES as error:
        log.debug("jobs are not cancelled: %s", error)


def spare_queries(context: SparkContext) -> None:
    """Let Ctrl-C spare queries from now on. Called with each start: the session may be a new one, and another handler may have
    been set."""
    handler: Any = signal.getsignal(signal.SIGINT)
    if getattr(handler, "__qualname__", "") == HANDLER:
        for name, cell in zip(handler.__code__.co_freevars, handler.__closure__ or (), strict=True):
            if name == CONTEXT and cell.cell_contents is context:
                cell.cell_contents = SparingContext(context)
    if _shut_down is not None:
        ClientServerConnection.shutdown_socket = _shut_down_alone


def _shut_down_alone(connection: Any, remote_port: int, local_port: int) -> None:
    """Shut down one connection, in place of the method in py4j. It is called for all idle connections, too, which py4j has
    taken from its store before. ``remote_port`` is the port, on this side, of the connection whose call was interrupted."""
    context = SparkContext._active_spark_context
    if not running_queries.at_this_moment() or context is None:
        _shut_down(connection, remote_port, local_port)
        return
    try:
        if connection.socket.getsockname()[1] != remote_port:
            connection.java_client.deque.appendleft(connection)
            return
        connection.close()
        connection.is_connected = False
    except FAILURES as error:
        log.debug("a connection to the JVM is not closed: %s", error)
    cancel_others(context)  # the JVM continues its work; in a notebook, no handler has cancelled it
