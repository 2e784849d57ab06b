"""The document that has all registered queries of a location, ``queries.json`` (design: registry).

The service alone changes it, as a whole and under the lock of the location, together with a look at that of the streams: names
are unique over streams and queries, and a stream that a query reads stays. Gateways read it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from flux.errors import QueryFailed
from flux.eventlog.documents import check_not_lost
from flux.eventlog.streams import SERVICE_READER, StreamCatalogue, query_of
from flux.registry.definitions import (
    PLAN,
    HasDependants,
    InputFailed,
    NoSuchInput,
    NoSuchQuery,
    Phase,
    QueriesFull,
    QueryDefinition,
    QueryExists,
    RegisteredQuery,
)
from flux.vault.location import Place

_DOCUMENT = "queries.json"
#: Queries of a location: the document is read and written as a whole, and each query has stages at every worker.
QUERIES_MAX = 1000
#: Names in a message.
_NAMED = 10


class ServiceReplaced(QueryFailed):
    """End of a service whose location another one has taken over."""


class _QueriesDocument(msgspec.Struct):
    """The content of the document."""

    format: int
    #: The number of services that have had the location: an earlier one finds a higher number, and ends.
    life: int = 0
    #: The number of the next query.
    next: int = 0
    queries: dict[str, RegisteredQuery] = {}


_decoder = msgspec.json.Decoder(_QueriesDocument)


class QueryCatalogue:
    """The registered queries of a location. ``life``: the number of the service that changes them; None: they are only read."""

    def __init__(self, place: Place, life: int | None = None, queries_max: int = QUERIES_MAX) -> None:
        self._place, self._life, self._max = place, life, queries_max

    def all(self) -> dict[str, RegisteredQuery]:
        """Return the registered queries by name, in order of registration."""
        return self._read().queries

    def get(self, name: str) -> RegisteredQuery:
        found = self.all().get(name)
        if found is None:
            raise NoSuchQuery(f"no query {name[:100]!r} is registered")
        return found

    def claim(self) -> int:
        """Take the document over from earlier services, and return the number of this one."""
        with self._place.locked():
            document = self._read()
            document.life += 1
            self._write(document)
        self._life = document.life
        return document.life

    def check_name(self, definition: QueryDefinition) -> None:
        """Check that a query may have its name. QueryExists: it is that of another query, or of a stream."""
        _check_name(definition, self.all(), StreamCatalogue(self._place).all())

    # ---- changes

    def begin(self, definition: QueryDefinition, reads: Sequence[str], schema: str) -> tuple[RegisteredQuery, bool]:
        """Write down a query that is on its way into the plan; return it, and whether it is new. QueryExists: the name is
        another's; NoSuchInput: an input is not there, or does not run; QueriesFull: there are as many as there may be."""
        streams = StreamCatalogue(self._place)
        with self._place.locked():
            document = self._own()
            known = document.queries
            named = streams.all()
            _check_name(definition, known, named)
            if (there := known.get(definition.name)) is not None:
                return there, False
            for name in reads:
                if name not in named and (name not in known or known[name].phase not in ("RUNNING", "REGISTERING")):
                    raise NoSuchInput(f"there is no stream and no running query {name!r:.100}")
            if len(known) >= self._max:
                raise QueriesFull(f"the service has {len(known):,} queries, as many as it may have. Remove some")
            made = RegisteredQuery(
                definition=definition, id=uuid.uuid4().hex, number=document.next, phase="REGISTERING", reads=list(reads),
                schema=schema, registered_at=time.time_ns() // 1000,
            )  # fmt: skip
            document.next += 1
            known[made.name] = made
            self._write(document)
        return made, True

    def note(self, query: RegisteredQuery, phase: Phase, error: str = "") -> None:
        """Write down the phase of a query, unless it has been removed or is being removed."""

        def changed(document: _QueriesDocument) -> None:
            there = document.queries.get(query.name)
            if there is not None and there.id == query.id and there.phase != "REMOVING":
                document.queries[query.name] = msgspec.structs.replace(there, phase=phase, error=error[:10_000])

        self._change(changed)

    def begin_again(self, name: str) -> RegisteredQuery:
        """Write down that a query which has failed is on its way into the plan again, and return it; one that runs stays as it
        is. NoSuchQuery: it is not registered, or is being removed; InputFailed: a query that it reads does not run."""
        found: list[RegisteredQuery] = []

        def changed(document: _QueriesDocument) -> None:
            there = document.queries.get(name)
            if there is None or there.phase == "REMOVING":
                raise NoSuchQuery(f"no query {name[:100]!r} is registered, or it is being removed")
            if there.phase == "FAILED":
                for read in there.reads:
                    input_ = document.queries.get(read)
                    if input_ is not None and input_.phase != "RUNNING":
                        raise InputFailed(f"query {name!r} reads query {read!r}, which is {input_.phase}")
                there = msgspec.structs.replace(there, phase="REGISTERING", error="")
            document.queries[name] = there
            found.append(there)

        self._change(changed)
        return found[0]

    def begin_removal(self, name: str, cascade: bool = False) -> list[str]:
        """Write down that a query is on its way out, with all that read its result if ``cascade``; return their names.
        NoSuchQuery, HasDependants: nothing is removed."""
        gone: list[str] = []

        def changed(document: _QueriesDocument) -> None:
            if name not in document.queries:
                raise NoSuchQuery(f"no query {name[:100]!r} is registered")
            gone.extend([name, *dependants(document.queries, name)])
            _remove(document, gone, cascade, f"query {name!r}")

        self._change(changed)
        return gone

    def begin_removal_of_readers(self, stream: str, cascade: bool) -> list[str]:
        """Write down that all queries that read a stream are on their way out; return their names. HasDependants: there are some,
        and not ``cascade``."""
        gone: list[str] = []

        def changed(document: _QueriesDocument) -> None:
            gone.extend(dependants(document.queries, stream))
            if gone and not cascade:
                raise HasDependants(f"stream {stream!r} is read by {_some(gone)}")
            _remove(document, gone, True, f"stream {stream!r}")

        self._change(changed)
        return gone

    def fail_readers(self, stream: str, error: str) -> list[str]:
        """Write down the same failure of all queries that read a stream, near or far, and run; return their names."""
        failed: list[str] = []

        def changed(document: _QueriesDocument) -> None:
            for name in dependants(document.queries, stream):
                if document.queries[name].phase in ("REGISTERING", "RUNNING"):
                    document.queries[name] = msgspec.structs.replace(
                        document.queries[name], phase="FAILED", error=error
                    )
                    failed.append(name)

        self._change(changed)
        return failed

    def drop(self, query: RegisteredQuery) -> None:
        """Forget a query, of which nothing else is left."""

        def changed(document: _QueriesDocument) -> None:
            there = document.queries.get(query.name)
            if there is not None and there.id == query.id:
                del document.queries[query.name]

        self._change(changed)

    def _change(self, change: Callable[[_QueriesDocument], None]) -> None:
        with self._place.locked():
            document = self._own()
            change(document)
            self._write(document)

    # ---- the document

    def _own(self) -> _QueriesDocument:
        """Read the document for a change. ServiceReplaced: another service has taken it over."""
        document = self._read()
        if document.life != self._life:
            raise ServiceReplaced(
                f"another service has begun on {self._place}, number {document.life}, and this one is number {self._life}"
            )
        return document

    def _read(self) -> _QueriesDocument:
        try:
            return _decoder.decode(self._place.read(_DOCUMENT))
        except FileNotFoundError:
            check_not_lost(self._place, _DOCUMENT, PLAN)  # a start without it would give up all state
            return _QueriesDocument(1)
        except msgspec.MsgspecError as error:
            raise QueryFailed(
                f"{self._place}/{_DOCUMENT} cannot be read: {error}. Restore it from a copy, or start the release that wrote it"
            ) from error

    def _write(self, document: _QueriesDocument) -> None:
        self._place.write(_DOCUMENT, msgspec.json.format(msgspec.json.encode(document)))


def dependants(queries: Mapping[str, RegisteredQuery], name: str) -> list[str]:
    """Return the names of all queries that read a stream or a query, near or far, in order of registration."""
    gone = {name}
    for each in sorted(queries.values(), key=lambda each: each.number):
        if not gone.isdisjoint(each.reads):
            gone.add(each.name)
    return [each for each in queries if each in gone and each != name]


def _check_name(definition: QueryDefinition, queries: Mapping[str, RegisteredQuery], streams: Collection[str]) -> None:
    there = queries.get(definition.name)
    if there is not None and there.phase == "REMOVING":
        raise QueryExists(f"query {definition.name!r} is being removed")
    if there is not None and there.definition != definition:
        raise QueryExists(f"query {definition.name!r} is registered with another definition")
    if definition.name in streams:
        raise QueryExists(f"{definition.name!r} is the name of a stream")


def served_queries(reader: str, stream: str, queries: Mapping[str, RegisteredQuery]) -> list[str]:
    """Return the queries for which a reader of a stream reads it; none, unless the reader is the service. The reader cannot be
    forgotten while there are some: events that they still need would be removed."""
    own = query_of(reader)
    if reader != SERVICE_READER and not own:
        return []
    reading = [each for each in queries.values() if stream in each.reads and each.phase in ("REGISTERING", "RUNNING")]
    return [each.name for each in reading if own in ("", each.name)]


def _remove(document: _QueriesDocument, names: Sequence[str], cascade: bool, what: str) -> None:
    others = names[1:]
    if others and not cascade:
        raise HasDependants(f"{what} is read by {_some(others)}")
    for name in names:
        document.queries[name] = msgspec.structs.replace(document.queries[name], phase="REMOVING")


def _some(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} others"
