"""Requests about webhooks (design: webhooks). Errors are problems."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from flux.errors import UsageError
from flux.gateway.answers import DeliveryState, OutputAnswer, OutputsAnswer
from flux.gateway.problems import Problem, unread
from flux.gateway.reads.endpoint import problem_of
from flux.gateway.routes import ListOutputs, OutputAction, RegisterOutput, RemoveOutput, ResumeOutput, ShowOutput
from flux.gateway.tokens import TokenGrant, check_right
from flux.gateway.webhooks.catalogue import (
    NoSuchWebhook,
    WebhookCatalogue,
    WebhookDefinition,
    WebhookExists,
    WebhookRequest,
    WebhooksFull,
    checked_webhook,
)
from flux.gateway.webhooks.deliveries import WebhookDelivery
from flux.gateway.webhooks.delivery_log import written_delivery
from flux.gateway.webhooks.pusher import status_of
from flux.gateway.webhooks.target import Network, TargetRefused
from flux.outputs.catalogue import NoSuchOutput, OutputCatalogue
from flux.outputs.cursor import CursorGone, OutputCursor
from flux.outputs.reader import start_of
from flux.vault.location import Place

#: Names that an error lists.
_NAMED = 10
_request = msgspec.json.Decoder(WebhookRequest)


class WebhookActions:
    """The actions of a gateway on webhooks. They may be called from any thread."""

    def __init__(self, place: Place, allowed: Sequence[Network] = ()) -> None:
        """``allowed``: private networks that receivers may be in."""
        self._place = place
        self._allowed = allowed
        self._catalogue = WebhookCatalogue(place)
        self._outputs = OutputCatalogue(place)

    def answer(self, action: OutputAction, body: bytes, grant: TokenGrant | None) -> tuple[int, msgspec.Struct | None]:
        """Carry out an action; return status and content. Problem: it was refused."""
        match action:
            case RegisterOutput():
                return self._register(body, grant)
            case ListOutputs():
                seen = [
                    each for each in self._catalogue.all().values() if grant is None or grant.allows("read", each.query)
                ]
                return 200, OutputsAnswer([self._described(each) for each in seen])
            case ShowOutput():
                return 200, self._described(self._of(action.name, grant, "read"))
            case RemoveOutput():
                self._catalogue.remove(self._of(action.name, grant, "query").name)
                return 204, None
            case ResumeOutput():
                return 200, self._described(self._catalogue.resume(self._of(action.name, grant, "query").name))
            case _:
                raise AssertionError(f"{type(action).__name__} is no action on outputs")

    def query_goes(self, queries: Sequence[str], cascade: bool, grant: TokenGrant | None) -> None:
        """Remove the webhooks of queries that are to be removed. Problem: some are to stay, or the token has no right to remove
        them."""
        found = [name for query in queries for name in self._catalogue.of_query(query)]
        if found and not cascade:
            raise Problem("has_readers", f"query {queries[0]!r} has outputs: {', '.join(found[:_NAMED])}")
        if found and grant is not None:
            for query in queries:
                check_right(grant, "query", query)
        for name in found:
            with contextlib.suppress(NoSuchWebhook):
                self._catalogue.remove(name)

    def _of(self, name: str, grant: TokenGrant | None, right: str) -> WebhookDefinition:
        try:
            found = self._catalogue.get(name)
        except NoSuchWebhook as error:
            raise Problem("no_such_output", str(error)) from error
        if grant is not None:
            check_right(grant, right, found.query)
        return found

    def _register(self, body: bytes, grant: TokenGrant | None) -> tuple[int, OutputAnswer]:
        try:
            wanted = _request.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise Problem("unfit_definition", unread("an output", WebhookRequest, error)) from error
        if grant is not None:
            check_right(grant, "query", wanted.query)
        try:
            output = self._outputs.get(wanted.query)
            made = checked_webhook(wanted, output.id, start_of(self._place, output, wanted.after), self._allowed)
            found, new = self._catalogue.register(made, bool(wanted.secret))
        except (NoSuchOutput, CursorGone) as error:
            raise problem_of(error) from error
        except WebhookExists as error:
            raise Problem("output_exists", str(error)) from error
        except WebhooksFull as error:
            raise Problem("no_room", str(error)) from error
        except (UsageError, TargetRefused, ValueError, OverflowError) as error:
            raise Problem("unfit_definition", str(error)[:1000]) from error
        secret = found.secret if new and not wanted.secret else None
        return (201 if new else 200), self._described(found, secret)

    def _described(self, of: WebhookDefinition, secret: str | None = None) -> OutputAnswer:
        newest, status = self._newest(of), status_of(self._catalogue, of)
        done = newest is not None and newest.confirmed
        place, output, number = of.start, of.output, 0
        if newest is not None:
            place, output = newest.next if done else newest.first, newest.output
            number = newest.number - (not done)
        failing = status.failing_since if not of.paused else None
        state: DeliveryState = "PAUSED" if of.paused else "RUNNING" if failing is None else "FAILING"
        since = None if failing is None else datetime.fromtimestamp(failing, UTC)
        return OutputAnswer(
            of.name, of.query, of.url, of.batch, of.retry, state, number, str(OutputCursor(output, place)),
            of.paused or (status.error if failing is not None else ""), since, secret,
        )  # fmt: skip

    def _newest(self, of: WebhookDefinition) -> WebhookDelivery | None:
        """Return the newest delivery that its gateway has written down."""
        return written_delivery(self._catalogue.log_place(of), f"webhook {of.name!r}")
