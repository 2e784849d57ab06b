"""The one service of a location: its claim, and the address under which gateways reach it (design: one-service).

In a directory the claim is a lock, which the system releases with the process, so a second service is refused. In an object store
the newest service has the location, and an earlier one ends at its next change.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from flux.errors import UsageError
from flux.vault.location import Place

_DOCUMENT = "service.json"
_FOLDER = "service"


class ServiceAddress(msgspec.Struct, frozen=True):
    """The way to a service, which only readers of the location know."""

    #: A URL of loopback. Gateways on other hosts pass registrations on to ``gateways``.
    url: str
    #: It proves that a request comes from a gateway of the location, which has checked the token of its client.
    secret: str
    process: int
    #: The host whose loopback that is (``this_host``).
    host: str = ""
    #: The gateways of the service that other hosts reach.
    gateways: list[str] = []


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
            #: Whether the service before was killed: its gateways end with it, and may need a moment.
            self.after_a_kill = address_of(place) is not None
            with suppress(OSError):  # so that no gateway calls a port that another program may have by now
                place.remove(_DOCUMENT)

    def publish(self, url: str, gateways: Sequence[str] = ()) -> ServiceAddress:
        """Tell gateways where the service is. ``gateways``: the addresses of its own ones."""
        reached = [each for each in gateways if not _is_loopback(each)]
        made = ServiceAddress(url, secrets.token_urlsafe(32), os.getpid(), this_host(), reached)
        self._place.write(_DOCUMENT, msgspec.json.encode(made))
        return made

    def close(self) -> None:
        """Give the location up."""
        with suppress(OSError):
            self._place.remove(_DOCUMENT)
        self._hold.close()


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback or ip_address(host).is_unspecified
    except ValueError:
        return host == "localhost"


@cache
def this_host() -> str:
    """Return a name of the host whose loopback this process has. Containers of one machine are hosts of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def address_of(place: Place) -> ServiceAddress | None:
    """Return the way to the service of a location, which may have been killed since; None: there is none."""
    try:
        return msgspec.json.decode(place.read(_DOCUMENT), type=ServiceAddress)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
