"""A gateway on a port, until a signal."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flux.errors import UsageError
from flux.gateway.tokens import TokenRegister
from flux.vault.location import place_of

#: Seconds that open requests may take after a signal: uvicorn waits for ever unless it is told.
STOP_S = 5
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class HttpOptions(NamedTuple):
    """The port of a gateway."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    #: Certificates of other gateways that are trusted; None: those of the system.
    trust: Path | None = None
    #: The address for clients and other gateways; None: that of the port.
    address: str | None = None


def http_options(
    text: str,
    certificate: Path | None = None,
    key: Path | None = None,
    address: str | None = None,
    trust: Path | None = None,
) -> HttpOptions:
    """Return the options of a port, from "HOST:PORT". UsageError: it is none, or a part of TLS is missing."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise UsageError(f"--http: expected HOST:PORT, as in 127.0.0.1:8080, got {text!r:.100}")
    if (certificate is None) != (key is None):
        raise UsageError("--certificate and --key belong together, and one of them is missing")
    for what, file in (("--certificate", certificate), ("--key", key), ("--trust", trust)):
        if file is not None and not file.is_file():
            raise UsageError(f"{what}: there is no file {file}")
    return HttpOptions(host.strip("[]"), int(port), certificate, key, trust, address)


def check_port(host: str, port: int) -> None:
    """Raise UsageError if a port cannot be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"http: port {port} of {host} cannot be used: {error.strerror}") from error


def run(location: str, http: HttpOptions, attached: bool = False, webhooks_to: Sequence[str] = ()) -> None:
    """Run a gateway until SIGTERM or SIGINT, or if ``attached`` until standard input ends. ``webhooks_to``: private networks that
    webhooks may reach. UsageError: the port is taken, the location or a package is missing, or a text is no network."""
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise UsageError("a gateway needs more packages: pip install 'flux-exchange[serve]'") from error
    from flux.eventlog.streams import StreamCatalogue
    from flux.gateway.app import application
    from flux.gateway.connections import bounds
    from flux.gateway.gateway import Gateway
    from flux.gateway.openapi import document
    from flux.gateway.webhooks.actions import WebhookActions
    from flux.gateway.webhooks.catalogue import WebhookCatalogue
    from flux.gateway.webhooks.pusher import ReceiverNet
    from flux.gateway.webhooks.target import networks_of
    from flux.outputs.catalogue import OutputCatalogue
    from flux.registry.query_catalogue import QueryCatalogue

    check_port(http.host, http.port)
    receivers = ReceiverNet(networks_of(webhooks_to))
    place = place_of(location, "location")
    catalogues = StreamCatalogue(place), OutputCatalogue(place), QueryCatalogue(place), WebhookCatalogue(place)
    for each in catalogues:
        each.all()  # a document that is lost is an error now, and not with the first request
    tokens = TokenRegister(place)
    if not tokens.all():
        token = tokens.make(["admin"], ["*"])
        print(f"flux: the first token, for everything; it is not shown again: {token}", file=sys.stderr, flush=True)
    if http.certificate is None and http.host not in _LOOPBACK:
        print("flux: without --certificate and --key, tokens and events can be read on the way", file=sys.stderr)
    scheme = "http" if http.certificate is None else "https"
    address = http.address or f"{scheme}://{http.host}:{http.port}"
    tls: dict[str, Any] = {}
    if http.certificate is not None:
        tls = {"ssl_certfile": str(http.certificate), "ssl_keyfile": str(http.key)}
    verify: Any = True if http.trust is None else ssl.create_default_context(cafile=str(http.trust))
    gateway = Gateway(place, address, document=document, webhooks=WebhookActions(place, receivers.allowed))
    config = uvicorn.Config(
        application(gateway, verify, receivers), http.host, http.port, log_level="warning",
        timeout_graceful_shutdown=STOP_S, server_header=False, **bounds(), **tls,
    )  # fmt: skip
    if attached:
        threading.Thread(target=_end_with_input, name="flux-parent", daemon=True).start()
    else:
        print(f"flux: gateway of {place} at {address}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run()


def _end_with_input() -> None:
    """End this process as a signal does, when the pipe from its service has ended."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
