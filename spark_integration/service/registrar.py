"""Registrations and removals, carried out one after the other (design: registry-steps).

The registry is written first, and then steps are made until plan and outputs are as it says. All methods are called in one
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from flux.errors import FluxError, QueryFailed, QueryTimeout, SchemaError, UsageError
from flux.eventlog.streams import NoSuchStream, StreamCatalogue
from flux.gateway.answers import QueryAnswer, query_answer
from flux.gateway.problems import Problem, unread
from flux.gateway.tokens import TokenGrant, check_right
from flux.registry.convergence import (
    AddToPlan,
    Forget,
    NoteFailed,
    NoteRunning,
    PlanParts,
    Step,
    TakeFromPlan,
    next_step,
)
from flux.registry.definitions import (
    HasDependants,
    InputFailed,
    NoSuchInput,
    NoSuchQuery,
    QueriesFull,
    QueryDefinition,
    QueryExists,
    RegisteredQuery,
    checked_query,
)
from flux.registry.query_catalogue import QueryCatalogue, dependants
from flux.registry.service_calls import ServiceCall
from spark_integration.growing.imported_files import ModuleHasChanged

log = logging.getLogger("flux")

_definition = msgspec.json.Decoder(QueryDefinition)


class ServedPlan(Protocol):
    """The running plan, as registrations change it. FluxError: nothing has changed."""

    def read_by(self, definition: QueryDefinition) -> list[str]:
        """Return the names that a definition reads."""

    def schema_of(self, definition: QueryDefinition) -> str:
        """Return the columns of its result, in DDL."""

    def parts(self) -> PlanParts:
        """Return the registered names in the plan."""

    def add(self, query: RegisteredQuery) -> None:
        """Add a query."""

    def take(self, name: str) -> None:
        """Remove a query or stream that no other part reads."""

    def forget_unread(self, names: Iterable[str]) -> None:
        """Forget the service as a reader of the streams among these names that the plan does not read."""

    def state_bytes(self) -> Mapping[str, int]:
        """Return the bytes of state of each query that has some."""


class ServiceIsOutdated(FluxError):
    """Refusal of an addition because files of the service have changed since it was started."""


class ServiceAnswer(NamedTuple):
    """An answer to a call."""

    status: int
    content: QueryAnswer | None


#: By refusal, the code of the answer. The first class that fits counts.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (QueryExists, "query_exists"),
    (NoSuchQuery, "no_such_query"),
    (NoSuchInput, "no_such_input"),
    (NoSuchStream, "no_such_stream"),
    (HasDependants, "has_readers"),
    (InputFailed, "input_failed"),
    (QueriesFull, "no_room"),
    (ServiceIsOutdated, "not_changed"),
    (QueryTimeout, "not_changed"),
    (QueryFailed, "not_changed"),
    (UsageError, "unfit_query"),
    (SchemaError, "unfit_query"),
)
#: Characters of an error that a client gets.
_SAID_MAX = 2000


class Registrar:
    """The registry of one service, its plan, and the outputs. ``forget_output`` removes the output of a query by its name, if it
    is there."""

    def __init__(
        self,
        catalogue: QueryCatalogue,
        streams: StreamCatalogue,
        plan: ServedPlan,
        forget_output: Callable[[str], None],
        state_max: int = 0,
    ) -> None:
        """Take the parts of a service. ``state_max``: bytes of state of all queries; beyond them no other query is registered,
        and at twice this number the query with the largest state fails. 0: there is no bound."""
        self._catalogue, self._streams, self._plan = catalogue, streams, plan
        self._forget_output, self._state_max = forget_output, state_max

    def answer(self, call: ServiceCall) -> ServiceAnswer:
        """Carry out a call. Problem: it is refused, and nothing has changed, or (``not_changed``) the service goes on with it
        later."""
        grant = TokenGrant(call.token, "", call.rights, call.streams)  # type: ignore[arg-type]
        try:
            if call.action == "register_query":
                return self._register(call.body, grant)
            if call.action == "restart_query":
                return self._restart(call.name, grant)
            for name in dependants(self._catalogue.all(), call.name) if call.cascade else ():
                check_right(grant, "query", name)
            if call.action == "remove_query":
                self._catalogue.begin_removal(call.name, call.cascade)
                self.converge()
                return ServiceAnswer(204, None)
            self._streams.get(call.name)
            self._catalogue.begin_removal_of_readers(call.name, call.cascade)
            self.converge()
            self._streams.remove(call.name)
            return ServiceAnswer(204, None)
        except FluxError as error:
            raise self._problem(error) from error

    def _problem(self, error: FluxError) -> Problem:
        """Return the answer to a refusal, whose words do not tell clients the path of the location."""
        code = next((code for kind, code in _CODES if isinstance(error, kind)), "internal")
        said = str(error).replace(str(self._streams.place), "the location")[:_SAID_MAX]
        return Problem(code, said, headers={"Retry-After": "1"} if code == "not_changed" else {})

    def _register(self, body: str, grant: TokenGrant) -> ServiceAnswer:
        try:
            wanted = checked_query(_definition.decode(body))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Problem("unfit_query", unread("a query", QueryDefinition, error)) from error
        check_right(grant, "query", wanted.name)
        there = self._catalogue.all().get(wanted.name)
        if there is not None and there.definition == wanted and there.phase in ("RUNNING", "FAILED"):
            return self._shown(wanted.name, 200)
        self._catalogue.check_name(
            wanted
        )  # here, because the error of the plan would name a stage, which the client does not know
        self._check_room()
        reads = self._plan.read_by(wanted)
        for name in reads:
            check_right(grant, "read", name)
        schema = self._plan.schema_of(wanted)
        made, new = self._catalogue.begin(wanted, reads, schema)
        try:
            self.converge()
        except FluxError as error:
            self._take_back(made)
            raise self._problem(error) from error
        return self._shown(made.name, 201 if new else 200)

    def _state(self) -> dict[str, int]:
        """Return the bytes of state of the queries that run."""
        queries = self._catalogue.all()
        held = self._plan.state_bytes()
        return {name: size for name, size in held.items() if name in queries and queries[name].phase == "RUNNING"}

    def _check_room(self) -> None:
        """Check that the state of all queries leaves room for another one. Problem: it does not."""
        if self._state_max and sum(state := self._state().values()) > self._state_max:
            raise Problem(
                "no_room", f"the queries have {sum(state):,} bytes of state, and more than {self._state_max:,} leave no room for "
                f"another one: remove some, or start the service with a higher --state-bytes",
            )  # fmt: skip

    def bound_state(self) -> None:
        """End the query with the most state, and those that read it, if there is twice as much as there may be."""
        if not self._state_max or sum((state := self._state()).values()) <= 2 * self._state_max:
            return
        largest = max(state, key=lambda name: state[name])
        said = (
            f"the queries of the service have {sum(state.values()):,} bytes of state, more than twice {self._state_max:,}, and "
            f"this one has the most, {state[largest]:,}: let it keep less, as by windows, or start the service with a higher "
            "--state-bytes"
        )
        log.warning("query %s is ended: %s", largest, said)
        self._catalogue.fail_readers(largest, f"{largest} has failed: {said}")
        self._catalogue.note(self._catalogue.get(largest), "FAILED", said)
        self.converge()

    def _restart(self, name: str, grant: TokenGrant) -> ServiceAnswer:
        """Bring a query that has failed into the plan again, with empty state and its output as it is."""
        there = self._catalogue.get(name)
        for read in there.reads:
            check_right(grant, "read", read)
        self.converge()  # first write down the failure, or it would be taken for one of the query's next life
        if self._catalogue.get(name).phase == "FAILED":
            self._plan.take(name)  # its stages that are left, and the note of its failure
        made = self._catalogue.begin_again(name)
        try:
            self.converge()
        except FluxError as error:
            self._catalogue.note(made, "FAILED", str(error))
            raise self._problem(error) from error
        return self._shown(name, 200)

    def _take_back(self, query: RegisteredQuery) -> None:
        """Remove a query that was not answered. If that fails too, the next start of the service goes on with it."""
        with suppress(NoSuchQuery):
            self._catalogue.begin_removal(query.name, cascade=True)
        try:
            self.converge()
        except FluxError as error:
            log.warning("query %s is taken back later: %s", query.name, error)

    def _shown(self, name: str, status: int) -> ServiceAnswer:
        queries = self._catalogue.all()
        if name not in queries:
            raise NoSuchQuery(f"no query {name[:100]!r} is registered: it has been removed meanwhile")
        return ServiceAnswer(status, query_answer(queries[name], queries))

    def converge(self) -> None:
        """Make steps until plan and outputs are as the registry says."""
        failed: list[str] = []
        while (step := self._next()) is not None:
            self._make(step)
            if isinstance(step, NoteFailed):
                failed += step.query.reads
        if failed:  # an addition that has failed may have noted the service as a reader of its streams
            self._plan.forget_unread(failed)

    def _next(self) -> Step | None:
        return next_step(self._catalogue.all(), self._plan.parts())

    def _make(self, step: Step) -> None:
        match step:
            case AddToPlan(query):
                self._add(query)
            case NoteRunning(query):
                self._catalogue.note(query, "RUNNING")
            case NoteFailed(query, error):
                log.warning("query %s has failed: %s", query.name, error)
                self._catalogue.note(query, "FAILED", error)
            case TakeFromPlan(name):
                self._plan.take(name)
            case Forget(query):
                self._forget_output(query.name)
                self._catalogue.drop(query)

    def _add(self, query: RegisteredQuery) -> None:
        """Add a query to the plan. ServiceIsOutdated: no fault of its client, who learns no path."""
        try:
            self._plan.add(query)
        except ModuleHasChanged as error:
            log.error("no query can be added until the service is started again: %s", error)
            raise ServiceIsOutdated(
                f"query {query.name}: the file of module {error.module} has changed since the service was started. Its operator "
                "starts it again"
            ) from error

    def note_failed(self, failed: Mapping[str, str]) -> None:
        """Write down queries that could not be made again when the service was started."""
        for name, error in failed.items():
            self._catalogue.note(self._catalogue.get(name), "FAILED", error)
