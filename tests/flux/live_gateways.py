"""Gateways of this process on real sockets, with TLS if wanted."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
import time
from pathlib import Path

import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flux.gateway.app import application
from flux.gateway.connections import HEAD_S, bounds
from flux.gateway.gateway import Gateway
from flux.gateway.openapi import document
from flux.vault.location import Folder

#: Longest wait for a gateway to listen or to end: loading and closing take a second of a processor, of which a machine under load
#: has a fiftieth to give.
WAIT_S = 120.0


class LiveGateway:
    """A gateway in a thread. ``tls`` are files with a certificate, which is trusted, too, and its key. ``most`` and
    ``head_s`` are the bounds of its connections."""

    def __init__(
        self, folder: Path, tls: tuple[Path, Path] | None = None, most: int | None = None, head_s: float = HEAD_S
    ) -> None:
        folder.chmod(0o700)
        self._socket = bound()  # a port that is only chosen may be another program's a moment later
        self._held: list[socket.socket] = []
        self.port = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        verify = ssl.create_default_context(cafile=str(tls[0])) if tls else True
        files = {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])} if tls else {}
        options = {**bounds(most, head_s), **files}
        app = application(Gateway(Folder(folder), self.url, document=document), verify)
        self._server = uvicorn.Server(
            uvicorn.Config(app, "127.0.0.1", self.port, log_level="error", timeout_graceful_shutdown=5, **options)
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="gateway", daemon=True)
        self._thread.start()
        end = time.monotonic() + WAIT_S
        while not self._server.started:
            assert self._thread.is_alive(), "the gateway has ended at its start"
            assert time.monotonic() < end, f"the gateway does not listen after {WAIT_S:g} s"
            time.sleep(0.01)

    def close(self, hurried: bool = False) -> None:
        """End the gateway. ``hurried`` cuts off requests that are under way, and holds the port, where clients of the
        test would else find another program."""
        self._server.should_exit, self._server.force_exit = True, hurried
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"the gateway has not ended after {WAIT_S:g} s"
        if hurried and not self._held:
            self._held.append(bound(self.port))
        elif not hurried:
            for each in self._held:
                each.close()


def bound(port: int = 0) -> socket.socket:
    """Return a socket that has a port of loopback and does not listen; 0: any free one."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and its key, and return their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
    return files
