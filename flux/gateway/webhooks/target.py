"""The address of a receiver of webhooks: public unless it is allowed, and resolved once an attempt (design: webhook-targets).

A name that resolves to a public address when it is checked, and to a private one when it is connected to, would lead into
the network of the gateway. So the delivery connects to the address that was checked.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from flux.errors import FluxError, UsageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_URL_MAX = 2000
_PORTS = {"http": 80, "https": 443}
#: Networks whose addresses have an IPv4 address in their last bits, which is the one that counts.
_WITH_IPV4 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))


class TargetRefused(FluxError):
    """Refusal of a receiver whose addresses are private."""


class WebhookTarget(NamedTuple):
    """A receiver."""

    scheme: str
    host: str
    port: int
    #: Path and query.
    path: str

    @property
    def authority(self) -> str:
        """Return host and port, as the receiver expects them in the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def url_of(self, address: Address) -> str:
        """Return the URL with an address in place of the name."""
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def target_of(url: str) -> WebhookTarget:
    """Return the receiver that a URL names. UsageError: it names none."""
    try:
        if len(url) > _URL_MAX or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError(f"it must have at most {_URL_MAX} characters of ASCII, without spaces")
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        if parts.scheme not in _PORTS or not host:
            raise ValueError("it must begin with http:// or https:// and a host")
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise ValueError("it must have no user, password and fragment")
        if port == 0:
            raise ValueError("port 0 cannot be connected to")
    except ValueError as error:
        raise UsageError(f"url: {url!r:.120}: {error}") from error
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    return WebhookTarget(parts.scheme, host, port or _PORTS[parts.scheme], path)


def networks_of(texts: Iterable[str]) -> list[Network]:
    """Return networks that webhooks may reach besides public ones. UsageError: a text is none."""
    found: list[Network] = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise UsageError(f"--webhooks-to: expected a network, as in 10.1.0.0/16 or 127.0.0.1: {error}") from error
    return found


def check_target(url: str, allowed: Sequence[Network]) -> None:
    """Refuse a URL for its form alone. UsageError: it names no receiver. TargetRefused: its host is an address that is private
    and not allowed. A name is resolved, and its addresses are checked, at each delivery."""
    target = target_of(url)
    try:  # without a request: short and hexadecimal forms of an address, such as 127.1, count as they would at the delivery
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return
    chosen_address(target.host, [str(address[0]) for *_, address in found], allowed)


def chosen_address(host: str, resolved: Sequence[str], allowed: Sequence[Network]) -> Address:
    """Return the address to connect to, of those that a name has. TargetRefused: all are private, and none is allowed."""
    for text in resolved:
        address = _unwrapped(ipaddress.ip_address(text.partition("%")[0]))
        if is_public(address) or any(address in network for network in allowed):
            return ipaddress.ip_address(text.partition("%")[0])
    raise TargetRefused(
        f"{host} has no public address, and webhooks to others are refused. flux gateway --webhooks-to NETWORK allows one"
    )


def is_public(address: Address) -> bool:
    """Return whether anyone in the Internet may have this address."""
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _unwrapped(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inside = address.ipv4_mapped or address.sixtofour
    if inside is None and address.teredo is not None:
        inside = address.teredo[1]
    if inside is None and any(address in network for network in _WITH_IPV4) and not address.is_loopback:
        inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address if inside is None else inside
