"""The queries of this process that have not ended: which task slots they hold, and their end with the program."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flux.errors import QueryTimeout, UsageError
from spark_integration.settings import Others

if TYPE_CHECKING:
    from spark_integration.query import Query

log = logging.getLogger("flux")

#: How long a program that ends waits for each query that still runs, before its tasks are cancelled and after that.
EXIT_S = 10.0

_active: dict[str, Query] = {}
_starting: set[str] = set()  # names of those that are not among them yet
_lock = threading.Lock()


def enter(query: Query) -> None:
    """Before anything of it runs."""
    with _lock:
        _active[query.id] = query


def leave(query_id: str) -> None:
    """When nothing of it is left."""
    with _lock:
        _active.pop(query_id, None)


def is_active(query_id: str) -> bool:
    with _lock:
        return query_id in _active


def active_queries() -> list[Query]:
    """The oldest first."""
    with _lock:
        return list(_active.values())


def is_taken(name: str) -> bool:
    """Whether a query has this name that has not come to its end. One that has may still keep its output for ``toDF``."""
    return any(query.name == name and query.phase in ("starting", "running") for query in active_queries())


@contextmanager
def starting(name: str | None) -> Iterator[None]:
    """While a query of this name is started: no other can be, in any thread. UsageError: there is one already."""
    if name is None:
        yield
        return
    with _lock:
        begun = name in _starting
        _starting.add(name)
    if begun:
        raise UsageError(f"a query named {name!r} is being started: give another queryName")
    try:
        if is_taken(name):
            raise UsageError(
                f"a query named {name!r} is running: stop it first (flux.queries() has its handle), or give another queryName"
            )
        yield
    finally:
        with _lock:
            _starting.discard(name)


def others(than: str | None = None) -> Others:
    """What the running queries hold and need of task slots, but for the query of this id."""
    queries = [query for query in active_queries() if query.id != than]
    feeding = next((query.name or query.id for query in queries if query.is_fed_by_spark), None)
    return Others({query.name or query.id: query.tasks for query in queries}, feeding)


def _stop_all(of_process: int = os.getpid()) -> None:
    """At the end of the program: Spark's JVM goes with it, and workers that it takes along look like crashes."""
    for query in active_queries() if os.getpid() == of_process else []:
        log.warning("the program ends while query %s is running: it is stopped", query.name or query.id)
        try:
            query.stop(EXIT_S)
        except QueryTimeout:
            query._cancel(EXIT_S)
        except Exception as error:
            log.warning("query %s: %s", query.id, error)


atexit.register(_stop_all)
