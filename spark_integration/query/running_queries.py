"""Active queries of this process, which have not ended: the task slots that they hold, and their end with the program."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from flux.errors import QueryTimeout, UsageError
from spark_integration.settings import Need, OtherQueries

if TYPE_CHECKING:
    from spark_integration.query.query import Query

log = logging.getLogger("flux")

#: Time that a program at its end waits for each running query, before its tasks are cancelled and again after that.
EXIT_S = 10.0


class SlotClaim(NamedTuple):
    """Task slots that a query will hold which is being started."""

    #: Name of the query, or its id.
    name: str
    need: Need


_active: dict[str, Query] = {}
_claims: dict[str, SlotClaim] = {}  # by id of the query
_claiming = threading.Lock()
_starting: set[str] = set()  # names of queries that are being started and are not active yet
_lock = threading.Lock()


def enter(query: Query) -> None:
    """Register a query, before anything of it runs."""
    with _lock:
        _active[query.id] = query


def leave(query_id: str) -> None:
    """Remove a query, when nothing of it is left."""
    with _lock:
        _active.pop(query_id, None)


def is_active(query_id: str) -> bool:
    with _lock:
        return query_id in _active


def active_queries() -> list[Query]:
    """Return the active queries, the oldest first."""
    with _lock:
        return list(_active.values())


def at_this_moment() -> list[Query]:
    """Return the active queries without the lock, for a handler of signals: the thread that it interrupts may hold the lock."""
    return list(_active.values())


def is_taken(name: str) -> bool:
    """Tell whether a query of this name has not come to its end. A query that has may still keep its output for ``toDF``."""
    return any(query.name == name and query.phase in ("starting", "running") for query in active_queries())


@contextmanager
def starting(name: str | None) -> Iterator[None]:
    """Reserve a name while its query is started: no other query of this name can be started, in any thread. UsageError: there
    is one already."""
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


def others(than: str | None = None) -> OtherQueries:
    """Return the task slots that queries hold and need which run or are being started, but for the query of this id."""
    claims = dict(_claims)  # first: a claim that is gone by then belongs to an active query
    queries = [query for query in active_queries() if query.id != than]
    known = {than, *(query.id for query in queries)}
    coming = [claim for query, claim in claims.items() if query not in known]
    held = {query.name or query.id: query.tasks for query in queries}
    held |= {claim.name: claim.need.workers for claim in coming}
    fed = [query.name or query.id for query in queries if query.is_fed_by_spark]
    fed += [claim.name for claim in coming if claim.need.spark_tasks]
    return OtherQueries(held, next(iter(fed), None))


@contextmanager
def claimed(query: str, name: str | None, count: Callable[[OtherQueries], Need]) -> Iterator[Need]:
    """Claim the task slots of a query while it is being started: other queries that are started meanwhile leave them to it.
    ``count`` returns the number of slots, given those of the others, and raises errors to the caller."""
    with _claiming:
        need = count(others())
        _claims[query] = SlotClaim(name or query, need)
    try:
        yield need
    finally:
        with _claiming:
            del _claims[query]


def _stop_all(of_process: int = os.getpid()) -> None:
    """Stop all queries at the end of the program: Spark's JVM ends with it, and workers that end with the JVM look like
    crashes."""
    for query in active_queries() if os.getpid() == of_process else []:
        log.warning("the program ends while query %s is running: it is stopped", query.name or query.id)
        try:
            query.stop(EXIT_S)
        except QueryTimeout:
            query._cancel(EXIT_S)
        except Exception as error:
            log.warning("query %s: %s", query.id, error)


atexit.register(_stop_all)
