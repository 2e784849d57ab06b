"""The actions of a gateway on its location: streams, and the logs that it owns (design: gateway).

All methods may be called from any thread. They know no HTTP; errors are problems.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

import flux
from flux.errors import FluxError, QueryFailed, UsageError
from flux.eventlog.log_owner import LogBusy, LogFull, NameReused, PushTicket
from flux.eventlog.records import PushName, packed_rows
from flux.eventlog.streams import (
    NoSuchStream,
    ReaderPositions,
    StreamCatalogue,
    StreamDefinition,
    StreamExists,
    StreamIsRead,
    StreamsFull,
)
from flux.gateway.answers import (
    HealthAnswer,
    PushAnswer,
    QueriesAnswer,
    StreamAnswer,
    StreamsAnswer,
    query_answer,
)
from flux.gateway.bodies import BodyLimits, check_times, rows_in, unpacked
from flux.gateway.log_writer import LogWriter, NotStored, OwnedElsewhere
from flux.gateway.problems import Problem, busy, unread, unstored
from flux.gateway.routes import (
    Action,
    Describe,
    ForgetReader,
    Health,
    ListQueries,
    ListStreams,
    OutputAction,
    PushEvents,
    RegisterQuery,
    RegisterStream,
    RemoveQuery,
    RemoveStream,
    RestartQuery,
    ShowQuery,
    ShowStream,
)
from flux.gateway.tokens import Quotas, TokenGrant, TokenRegister, check_right, grant_of
from flux.gateway.webhooks.actions import WebhookActions
from flux.registry.query_catalogue import QueryCatalogue, dependants, served_queries
from flux.registry.service_calls import BODY_MAX, CallAction, ServiceCall
from flux.registry.service_hold import ServiceAddress, address_of, this_host
from flux.vault.location import Place

#: Seconds for which definitions and tokens that were read are believed. A token that was revoked works as long.
BELIEVED_S = 1.0
#: Readers that a message names.
_NAMED = 10
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_registration = msgspec.json.Decoder(StreamDefinition)


class HttpAnswer(NamedTuple):
    """An answer without its form."""

    status: int
    content: msgspec.Struct | dict[str, Any] | None


class PendingPush(NamedTuple):
    """A push that is answered when its ticket is there."""

    stream: str
    log: int
    ticket: Future[PushTicket]


class PendingCall(NamedTuple):
    """A request that the service of the location carries out."""

    service: ServiceAddress
    call: ServiceCall


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn failures of the location into problems, whose words name no path (design: gateway-failures)."""
    try:
        yield
    except NoSuchStream as error:
        raise Problem("no_such_stream", "the stream was removed meanwhile") from error
    except (QueryFailed, OSError) as error:
        raise unstored(error, "the location") from error


class Gateway:
    """One gateway. ``address`` is the one under which clients and other gateways reach it."""

    def __init__(
        self,
        place: Place,
        address: str,
        limits: BodyLimits | None = None,
        document: Callable[[], dict[str, Any]] | None = None,
        host: str | None = None,
        webhooks: WebhookActions | None = None,
    ) -> None:
        """``host``: the host whose loopback it has; None: this one. ``webhooks``: the actions on webhooks; None: those
        with public receivers alone."""
        self.limits = limits or BodyLimits()
        self.place = place
        self.address = address
        self._host = host or this_host()
        self._webhooks = webhooks or WebhookActions(place)
        self._document = document or dict
        self._catalogue = StreamCatalogue(place)
        self._queries = QueryCatalogue(place)
        self._tokens, self.quotas = TokenRegister(place), Quotas(place)
        self._guard = threading.Lock()
        self._writers: dict[tuple[str, int], LogWriter] = {}
        self._opening: dict[tuple[str, int], threading.Lock] = {}
        self._known: dict[str, StreamDefinition] = {}
        self._grants: list[TokenGrant] = []
        self._read_at = -BELIEVED_S

    # ---- documents that others change

    def _refresh(self, now: bool = False) -> None:
        if now or time.monotonic() - self._read_at >= BELIEVED_S:
            read_at = time.monotonic()
            known, grants = self._catalogue.all(), self._tokens.all()
            self.quotas.exchange(grants)
            self._known, self._grants, self._read_at = known, grants, read_at

    def _stream(self, name: str) -> StreamDefinition:
        found = self._known.get(name)
        if found is None:
            self._refresh(now=True)  # it may have been registered at another gateway just now
            found = self._known.get(name)
        if found is None:
            raise Problem("no_such_stream", f"no stream {name[:100]!r} is registered")
        return found

    # ---- actions

    def allow(self, action: Action, authorization: str | None) -> TokenGrant | None:
        """Return the grant by which an action is allowed; None: it needs no token. Problem: it is not allowed."""
        if not action.right:
            return None
        try:
            with _failures():
                self._refresh()
        except Problem as problem:  # a stranger is not told where the location is
            said = "the location's streams and tokens cannot be read; flux token --location tells the reason"
            raise Problem(problem.code, said, failure=problem.failure, headers=problem.headers) from problem
        grant = grant_of(authorization, self._grants)
        check_right(grant, action.right, action.stream)
        return grant

    def answer(self, action: Action, body: bytes, grant: TokenGrant | None) -> HttpAnswer | PendingPush | PendingCall:
        """Carry out an action that is allowed. Problem: it was refused."""
        with _failures():
            return self._answer(action, body, grant)

    def _answer(self, action: Action, body: bytes, grant: TokenGrant | None) -> HttpAnswer | PendingPush | PendingCall:
        match action:
            case Health():
                return HttpAnswer(200, HealthAnswer("ok", flux.__version__))
            case Describe():
                return HttpAnswer(200, self._document())
            case ListStreams():
                self._refresh(now=True)
                seen = [each for each in self._known.values() if grant is None or grant.allows("read", each.name)]
                return HttpAnswer(200, StreamsAnswer([self._described(each) for each in seen]))
            case ShowStream(name):
                self._refresh(now=True)  # it may have been removed at another gateway just now
                return HttpAnswer(200, self._described(self._stream(name)))
            case RegisterStream():
                return self._register(body, grant)
            case RemoveStream(name, cascade):
                return self._remove(name, cascade, grant)
            case ForgetReader(name, reader):
                return self._forget(name, reader)
            case ListQueries():
                return self._list_queries(grant)
            case ShowQuery(name):
                queries = self._queries.all()
                if name not in queries:
                    raise Problem("no_such_query", f"no query {name[:100]!r} is registered")
                return HttpAnswer(200, query_answer(queries[name], queries))
            case RegisterQuery():
                return self._for_service("register_query", "", False, body, grant)
            case RemoveQuery(name, cascade):
                self._webhooks.query_goes([name, *dependants(self._queries.all(), name)], cascade, grant)
                return self._for_service("remove_query", name, cascade, b"", grant)
            case RestartQuery(name):
                return self._for_service("restart_query", name, False, b"", grant)
            case PushEvents():
                return self._push(action, body, grant)
            case OutputAction():
                return HttpAnswer(*self._webhooks.answer(action, body, grant))
            case _:
                raise AssertionError(f"{action} is no action of a gateway")

    def _described(self, of: StreamDefinition) -> StreamAnswer:
        readers = ReaderPositions(self._catalogue.readers_place(of)).names()
        return StreamAnswer(of.name, of.id, of.schema, of.time, of.delay, of.idle, of.retain, of.partitions, readers)

    def _register(self, body: bytes, grant: TokenGrant | None) -> HttpAnswer:
        try:
            wanted = _registration.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise Problem("unfit_definition", unread("a stream", StreamDefinition, error)) from error
        if grant is not None:
            check_right(grant, "admin", wanted.name)
        try:
            made, new = self._catalogue.register(wanted, self._queries.all)
        except StreamExists as error:
            raise Problem("stream_exists", str(error)) from error
        except StreamsFull as error:
            raise Problem("no_room", "the location has all the streams that it may have") from error
        except (UsageError, ValueError, OverflowError) as error:  # a number may be more than Arrow or Python takes
            raise Problem("unfit_definition", str(error)[:1000]) from error
        self._refresh(now=True)
        return HttpAnswer(201 if new else 200, self._described(made))

    def _remove(self, name: str, cascade: bool, grant: TokenGrant | None) -> HttpAnswer | PendingCall:
        of = self._stream(name)
        registered = dependants(self._queries.all(), name)
        readers = registered or ReaderPositions(self._catalogue.readers_place(of)).names()
        if readers and not cascade:
            raise Problem("has_readers", f"stream {name!r} is read by {', '.join(readers[:_NAMED])}")
        if registered:
            self._webhooks.query_goes(registered, cascade, grant)
            return self._for_service("remove_stream", name, cascade, b"", grant)
        try:
            self._catalogue.remove(name, lambda: dependants(self._queries.all(), name))
        except StreamIsRead as error:  # by a query that was registered just now
            raise Problem("has_readers", str(error)) from error
        self._refresh(now=True)
        for log in range(of.partitions):
            with self._guard:
                writer = self._writers.pop((of.id, log), None)
            if writer is not None:
                writer.close()
        return HttpAnswer(204, None)

    def _forget(self, name: str, reader: str) -> HttpAnswer:
        positions = ReaderPositions(self._catalogue.readers_place(self._stream(name)))
        if reader not in positions.names():
            raise Problem("no_such_reader", f"stream {name!r} has no reader {reader[:100]!r}")
        if for_ := served_queries(reader, name, self._queries.all()):
            raise Problem("has_readers", f"the service reads stream {name!r} for {', '.join(for_[:_NAMED])}")
        positions.forget(reader)
        return HttpAnswer(204, None)

    # ---- queries

    def _list_queries(self, grant: TokenGrant | None) -> HttpAnswer:
        queries = self._queries.all()
        seen = [each for each in queries.values() if grant is None or grant.allows("read", each.name)]
        return HttpAnswer(200, QueriesAnswer([query_answer(each, queries) for each in seen]))

    def _for_service(
        self, action: CallAction, name: str, cascade: bool, body: bytes, grant: TokenGrant | None
    ) -> PendingCall:
        """Make a call of the service, with the rights of the token. Problem: there is no service, or the body is no text."""
        if len(body) > BODY_MAX:
            raise Problem("too_large", f"the definition has {len(body):,} bytes, more than {BODY_MAX:,}")
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            raise Problem("unfit_query", f"expected the definition of a query as JSON in UTF-8: {error}") from error
        service = address_of(self.place)
        if service is None:
            raise Problem("no_service", "no service runs on the location of this gateway", headers={"Retry-After": "1"})
        if service.host not in ("", self._host):
            raise self._elsewhere(service)
        token, rights, streams = ("", ["admin"], ["*"]) if grant is None else (grant.id, grant.rights, grant.streams)
        return PendingCall(service, ServiceCall(action, name, cascade, text, token, list(rights), streams))

    @staticmethod
    def _elsewhere(service: ServiceAddress) -> Problem:
        """Return the refusal of a call whose service runs on another host. A gateway there, if one is named, gets it instead."""
        if service.gateways:
            return Problem("other_gateway", "the service runs on another host", gateway=service.gateways[0])
        return Problem(
            "no_service", "the service runs on another host, and its gateways listen on loopback alone: send the request there, "
            "or start flux serve with --http HOST:PORT of an address that other hosts reach",
            headers={"Retry-After": "10"},
        )  # fmt: skip

    # ---- pushes

    def _push(self, action: PushEvents, body: bytes, grant: TokenGrant | None) -> PendingPush:
        name = action.name if grant is None else action.name.of_token(grant.id)
        of = self._stream(action.stream)
        if grant is not None:
            self.quotas.take(grant, "bytes", len(body))
        plain = unpacked(body, action.encoding, self.limits)
        batch = rows_in(plain, action.kind, None if of.schema == "infer" else of.columns(), self.limits)
        if of.schema == "infer":
            of, batch = self._inferred(of, plain, action.kind, batch)
        if of.time is not None:
            check_times(batch, of.time, time.time())
        if grant is not None:
            self.quotas.take(grant, "events", batch.num_rows)
        log = self._log_of(of, name)
        try:
            ticket = self._writer(of, log).offer(packed_rows(batch), batch.num_rows, name)
        except LogBusy as error:
            raise busy(str(error)) from error
        except NameReused as error:
            raise Problem("name_reused", str(error)) from error
        except LogFull as error:
            raise Problem("log_full", str(error), headers={"Retry-After": "10"}) from error
        except NotStored as error:
            raise unstored(error.__cause__ or error, f"a push to {of.name!r}", str(error)) from error
        except OwnedElsewhere as error:
            raise Problem("other_gateway", str(error), gateway=error.gateway) from error
        return PendingPush(of.name, log, ticket)

    def _inferred(
        self, of: StreamDefinition, body: bytes, kind: str, batch: pa.RecordBatch
    ) -> tuple[StreamDefinition, pa.RecordBatch]:
        """Give a stream the columns of its first events. Another gateway may have given it others meanwhile."""
        try:
            of = self._catalogue.infer(of, batch.schema)
        except UsageError as error:
            raise Problem("unfit_row", str(error)) from error
        self._refresh(now=True)
        return of, rows_in(body, kind, of.columns(), self.limits)

    def _log_of(self, of: StreamDefinition, name: PushName) -> int:
        """Return the log of a push. One without a name goes to a log that this gateway owns, if it owns one."""
        if name.client or name.key:
            return of.log_of(f"client {name.client}" if name.client else f"key {name.key}")
        with self._guard:
            owned = [log for log in range(of.partitions) if (of.id, log) in self._writers]
        return owned[0] if owned else os.getpid() % of.partitions

    def _writer(self, of: StreamDefinition, log: int) -> LogWriter:
        """Return the writer of a log, which is taken over if no living gateway owns it."""
        key = (of.id, log)
        with self._guard:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # a take-over reads a segment: only pushes to this log wait for it
            with self._guard:
                found = self._writers.get(key)
            if found is not None and found.error is None:
                return found
            positions = ReaderPositions(self._catalogue.readers_place(of))
            place, where = self._catalogue.log_place(of, log), f"log {log} of stream {of.name!r}"
            made = LogWriter(place, where, of.limits(), self.address, lambda: positions.needed_from(log))
            with self._guard:
                self._writers[key] = made
            return made

    def pushed(self, pending: PendingPush) -> HttpAnswer:
        """Return the answer to a push whose ticket is there. Problem: it failed."""
        try:
            ticket = pending.ticket.result(timeout=0)
        except FluxError as error:
            raise unstored(error.__cause__ or error, f"a push to {pending.stream!r}", str(error)) from error
        stored = ticket.stored
        at = _EPOCH + timedelta(microseconds=stored.arrival)
        return HttpAnswer(200, PushAnswer(pending.stream, pending.log, stored.first, stored.rows, at, ticket.repeated))

    def close(self) -> None:
        """Flush all that waits, and give all logs up."""
        self.quotas.close()
        with self._guard:
            writers, self._writers = list(self._writers.values()), {}
        for writer in writers:
            writer.close()
