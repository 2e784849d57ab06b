"""Registered webhooks (design: webhooks).

webhooks.json        all definitions: one document, so that it is changed as a whole. It has their secrets, and belongs to the
                     owner of the location alone
webhooks/ID/log      planned and confirmed deliveries, and the lock of the gateway that makes them
webhooks/ID/status   the state of the webhook, as its gateway sees it
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence

import msgspec

from flux.errors import FluxError, UsageError
from flux.eventlog.documents import NamedEntries
from flux.eventlog.streams import check_name
from flux.gateway.webhooks.target import Network, check_target
from flux.vault.location import Place
from flux.windows.durations import microseconds

#: Webhooks of a location: each is a connection and a file of the gateway that owns it.
WEBHOOKS_MAX = 1000
#: Rows of a delivery at most: a receiver takes it whole.
ROWS_MAX = 10_000
_BATCH_TIME_MAX_US, _RETRY_MAX_US = 60_000_000, 30 * 86_400_000_000
#: Characters of a secret.
_SECRET_LEAST, _SECRET_MAX = 16, 200


class WebhookExists(FluxError):
    """Refusal of a registration: the name belongs to another webhook."""


class NoSuchWebhook(FluxError):
    """Refusal of a request about a webhook that is not registered."""


class WebhooksFull(FluxError):
    """Refusal of a registration because the location has all the webhooks that it may have."""


class DeliverySize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one delivery: it goes out when it has as many rows, or its first row has waited as long."""

    rows: int = 1000
    #: A duration, as in "1 second".
    time: str = "100 milliseconds"


class WebhookRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A webhook as its user registers it."""

    name: str
    #: The query whose results it gets.
    query: str
    #: The address of the receiver, http or https.
    url: str
    #: The secret of its signatures; "": the gateway makes one, and shows it in the answer.
    secret: str = ""
    batch: DeliverySize = DeliverySize()
    #: The cursor behind which it begins, "oldest" or "newest".
    after: str = "oldest"
    #: The time without success after which it is paused, as in "1 day".
    retry: str = "1 day"


class WebhookDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A registered webhook."""

    name: str
    query: str
    #: The id of the output of that query.
    output: str
    #: The place in the output where it has begun, by partition.
    start: tuple[int, ...]
    url: str
    secret: str
    batch: DeliverySize
    retry: str
    #: Given when it is registered.
    id: str
    #: The reason for which it makes no deliveries; "": it makes them.
    paused: str = ""
    #: The number of times that it was resumed.
    resumed: int = 0

    @property
    def batch_s(self) -> float:
        return microseconds(self.batch.time, "batch.time") / 1_000_000

    @property
    def retry_s(self) -> float:
        return microseconds(self.retry, "retry") / 1_000_000


def checked_webhook(
    wanted: WebhookRequest, output: str, start: tuple[int, ...], allowed: Sequence[Network]
) -> WebhookDefinition:
    """Return the definition of a webhook. ``allowed``: private networks that receivers may be in. UsageError names the part that
    does not fit; TargetRefused: the receiver is a private address."""
    check_name(wanted.name)
    check_target(wanted.url, allowed)
    if wanted.secret and not (_SECRET_LEAST <= len(wanted.secret) <= _SECRET_MAX and wanted.secret.isprintable()):
        raise UsageError(
            f"secret: expected {_SECRET_LEAST} to {_SECRET_MAX} printable characters, or none; got {len(wanted.secret)}"
        )
    if not 1 <= wanted.batch.rows <= ROWS_MAX:
        raise UsageError(f"batch.rows: expected 1 to {ROWS_MAX:,}, got {wanted.batch.rows}")
    for what, text, most in (
        ("batch.time", wanted.batch.time, _BATCH_TIME_MAX_US),
        ("retry", wanted.retry, _RETRY_MAX_US),
    ):
        if not 0 <= microseconds(text, what) <= most:
            raise UsageError(f"{what}: expected up to {most // 1_000_000:,} seconds, got {text!r:.100}")
    return WebhookDefinition(
        name=wanted.name, query=wanted.query, output=output, start=start, url=wanted.url,
        secret=wanted.secret or secrets.token_urlsafe(32), batch=wanted.batch, retry=wanted.retry, id=uuid.uuid4().hex,
    )  # fmt: skip


class WebhookCatalogue:
    """The webhooks at a location. Other programs may change them, so each method reads the document."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._entries = NamedEntries(place, "webhooks", WebhookDefinition)

    def all(self) -> dict[str, WebhookDefinition]:
        """Return all webhooks by name. QueryFailed: the document is damaged, or of another release."""
        return self._entries.all()

    def get(self, name: str) -> WebhookDefinition:
        """Return one webhook. NoSuchWebhook: it is not registered."""
        return self._of(self.all(), name)

    def of_query(self, query: str) -> list[str]:
        """Return the names of the webhooks that a query has."""
        return sorted(each.name for each in self.all().values() if each.query == query)

    def register(self, made: WebhookDefinition, secret_given: bool) -> tuple[WebhookDefinition, bool]:
        """Register a webhook; return it, and whether it is new. ``secret_given``: the user has named the secret, which belongs to
        the definition then. WebhookExists: the name has another definition."""
        with self._entries.changing() as found:
            there = found.get(made.name)
            if there is not None:
                same = msgspec.structs.replace(
                    made, id=there.id, start=there.start, paused=there.paused, resumed=there.resumed,
                    secret=made.secret if secret_given else there.secret,
                )  # fmt: skip
                if same != there:
                    raise WebhookExists(
                        f"output {made.name!r} has another definition: {there.url} of query {there.query!r}, "
                        f"{there.batch.rows} rows, {there.batch.time}, retry {there.retry}"
                    )
                return there, False
            if len(found) >= WEBHOOKS_MAX:
                raise WebhooksFull(f"there are {WEBHOOKS_MAX:,} webhooks, all that there may be. Remove some")
            found[made.name] = made
            self.log_place(made, new=True)
        return made, True

    def remove(self, name: str) -> None:
        """Remove a webhook. Its gateway finds out before its next delivery. NoSuchWebhook: it is not registered."""
        with self._entries.changing() as found:
            gone = self._of(found, name)
            del found[name]
        self.log_place(gone).clear()
        self.status_place(gone).clear()

    def pause(self, of: WebhookDefinition, reason: str) -> None:
        """Make no more deliveries, for a reason that its user can read, until it is resumed."""
        with self._entries.changing() as found:
            there = found.get(of.name)
            if there is not None and (there.id, there.resumed) == (of.id, of.resumed):
                found[of.name] = msgspec.structs.replace(there, paused=reason[:1000] or "paused")

    def resume(self, name: str) -> WebhookDefinition:
        """Go on with deliveries where they were. NoSuchWebhook: it is not registered."""
        with self._entries.changing() as found:
            there = self._of(found, name)
            if there.paused:
                there = found[name] = msgspec.structs.replace(there, paused="", resumed=there.resumed + 1)
        return there

    def _of(self, found: dict[str, WebhookDefinition], name: str) -> WebhookDefinition:
        if name not in found:
            raise NoSuchWebhook(f"no output {name!r:.120} is registered")
        return found[name]

    def log_place(self, of: WebhookDefinition, new: bool = False) -> Place:
        return self.place.below(f"webhooks/{of.id}/log", new)

    def status_place(self, of: WebhookDefinition) -> Place:
        return self.place.below(f"webhooks/{of.id}")
