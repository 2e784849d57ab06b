"""The one service of a location: its claim, and the address under which gateways reach it (design: one-service).

In a directory the claim is a lock, which the system releases with the process, so a second service is refused. In an object store
the newest service has the location, and an earlier one ends at its next change.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

import msgspec

from flux.errors import UsageError
from flux.vault.location import Place

_DOCUMENT = "service.json"
_FOLDER = "service"


class ServiceAddress(msgspec.Struct, frozen=True):
    """The way to a service, which only readers of the location know."""

    #: A URL of loopback: gateways on other hosts cannot register queries.
    url: str
    #: It proves that a request comes from a gateway of the location, which has checked the token of its client.
    secret: str
    process: int


class ServiceHold:
    """The claim of a service on its location, until it is closed."""

    def __init__(self, place: Place) -> None:
        """Claim a location. UsageError: a service runs there."""
        self._place = place
        with place.locked():
            folder = place.below(_FOLDER, new=True)
            if folder.is_held():
                known = address_of(place)
                which = "" if known is None else f", process {known.process}"
                raise UsageError(
                    f"a service runs on {place} already{which}: stop it first, or give this one a location of its own"
                )
            self._hold = folder.hold()

    def publish(self, url: str) -> ServiceAddress:
        """Tell gateways where the service is."""
        made = ServiceAddress(url, secrets.token_urlsafe(32), os.getpid())
        self._place.write(_DOCUMENT, msgspec.json.encode(made))
        return made

    def close(self) -> None:
        """Give the location up."""
        with suppress(OSError):
            self._place.remove(_DOCUMENT)
        self._hold.close()


def address_of(place: Place) -> ServiceAddress | None:
    """Return the way to the service of a location, which may have been killed since; None: there is none."""
    try:
        return msgspec.json.decode(place.read(_DOCUMENT), type=ServiceAddress)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
