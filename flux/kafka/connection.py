"""One connection to one broker: a request, its answer, one at a time.

Law: every wait ends at a time that the caller gives. After an error the connection is closed and of no more use. What a
broker answers has at most ``ANSWER_BYTES_MAX`` bytes.

It blocks: it belongs to a thread that may wait. ``abort`` ends a wait from another thread.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import numpy as np

from flux.kafka.errors import BrokerBroken, NotPermitted
from flux.kafka.library import error_of, from_bytes, library, to_bytes
from flux.kafka.security import Security

CLIENT = "flux"
#: Brokers are often told to take records of 100 MB. An answer has one of them, or less.
ANSWER_BYTES_MAX = 256 << 20
#: The newest versions of what the newest Kafka takes, whose topics still go by name, and whose transactions of a writer have one
#: epoch (later ones: another for each).
_NEWEST = {
    "AddOffsetsToTxn": 3, "AddPartitionsToTxn": 3, "EndTxn": 3, "Fetch": 12, "InitProducerId": 4, "ListOffsets": 7,
    "OffsetCommit": 8, "OffsetFetch": 7, "Produce": 9, "TxnOffsetCommit": 3,
}  # fmt: skip
#: Of the time a login lasts: then a new connection is made.
_LOGIN_PART = 0.85


class Connection:
    """``address``: host and port. OSError and ssl.SSLError if it cannot be reached within ``timeout`` seconds, NotPermitted
    if it does not let us in."""

    def __init__(self, address: tuple[str, int], security: Security, timeout: float) -> None:
        self.address = address
        self._security = security
        self._number = 0
        self._versions: Any = None
        self._login_ends = float("inf")
        end = time.monotonic() + timeout
        self._socket: socket.socket = socket.create_connection(address, timeout)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if security.tls:
                self._socket.settimeout(_left(end))
                self._socket = security.context().wrap_socket(self._socket, server_hostname=address[0].rstrip("."))
            self._ask_versions(_left(end))
            if security.login:
                self._log_in(end)
        except BaseException:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        """Whether it is open, and its login lasts."""
        return self._socket.fileno() >= 0 and time.monotonic() < self._login_ends

    def ask(self, message: Any, timeout: float) -> Any:
        """The answer to a request. OSError, TimeoutError if it does not come, BrokerBroken if it makes no sense."""
        return self._ask(message, self._version(message), timeout)

    def send(self, message: Any, timeout: float) -> None:
        """A request whose answer ``receive`` gets. Nothing else may be asked in between."""
        self._send(message, self._version(message), timeout)

    def receive(self, message: Any, timeout: float) -> Any:
        """The answer to what was sent last. Errors as of ``ask``."""
        return self._receive_answer(message, time.monotonic() + timeout)

    def knows(self, message: Any, version: int = 0) -> bool:
        """Whether the broker takes such requests, of this version or a later one."""
        known = self._versions.api_versions.get(message.API_KEY)
        return known is not None and known[1] >= version

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """From another thread: what waits for an answer gets an error."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def _version(self, message: Any) -> int:
        name = message.name.removesuffix("Request")
        try:
            return int(self._versions.api_version(message, max_version=_NEWEST.get(name, 1 << 15)))
        except library().errors.IncompatibleBrokerVersion as error:
            raise BrokerBroken(f"{self} is too old or too new for this: {error}") from error

    def _ask(self, message: Any, version: int, timeout: float) -> Any:
        end = time.monotonic() + timeout
        self._send(message, version, timeout)
        return self._receive_answer(message, end)

    def _send(self, message: Any, version: int, timeout: float) -> None:
        self._number = (self._number + 1) & 0x7FFFFFFF
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(to_bytes(message, version, self._number, CLIENT))
        except BaseException:
            self.close()
            raise

    def _receive_answer(self, message: Any, end: float) -> Any:
        try:
            self._socket.settimeout(_left(end))
            (size,) = struct.unpack(">i", self._receive(4, end))
            if not 4 <= size <= ANSWER_BYTES_MAX:
                raise BrokerBroken(
                    f"{self} sent an answer of {size} bytes; expected 4 to {ANSWER_BYTES_MAX}. Is this the port of a Kafka "
                    "broker, and is security_protocol what it wants?"
                )
            number, answer = from_bytes(message, self._receive(size, end))
            if number != self._number:
                raise BrokerBroken(f"{self} answered request {number} when asked {self._number}")
        except BaseException:
            self.close()
            raise
        return answer

    def _receive(self, size: int, end: float) -> memoryview:
        """Exactly so many bytes, in memory of their own that is not cleared first."""
        view = np.empty(size, np.uint8).data
        at = 0
        while at < size:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise ConnectionResetError(f"{self} closed the connection")
            at += got
            if at < size:
                self._socket.settimeout(_left(end))
        return view

    def _ask_versions(self, timeout: float) -> None:
        """Brokers answer a version that they do not know in version 0, with an error."""
        kind = library().ApiVersions
        end = time.monotonic() + timeout
        for version in (3, 0):
            message = kind(client_software_name=CLIENT, client_software_version="1", version=version)
            answer = self._ask(message, version, _left(end))
            if error_of(answer.error_code).__name__ != "UnsupportedVersionError":
                break
        if answer.error_code:
            raise BrokerBroken(f"{self} does not say which requests it knows: {error_of(answer.error_code).__name__}")
        keys = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
        self._versions = library().BrokerVersionData(api_versions=keys)

    def _log_in(self, end: float) -> None:
        mechanism = self._security.mechanism
        answer = self._ask(library().SaslHandshake(mechanism=mechanism), 1, _left(end))
        if answer.error_code:
            raise NotPermitted(
                f"{self} takes no login by {mechanism}; it takes {', '.join(answer.mechanisms) or 'none'}"
            )
        try:
            login = library().mechanism(mechanism)(host=self.address[0], **_complete(self._security.options))
            while not login.is_done():
                version = self._versions.api_version(library().SaslAuthenticate, max_version=1)
                answer = self._ask(library().SaslAuthenticate(login.auth_bytes()), version, _left(end))
                if answer.error_code:
                    raise NotPermitted(f"{self} refuses the login {self._security.who()}: {answer.error_message}")
                login.receive(answer.auth_bytes)
        except (OSError, NotPermitted, BrokerBroken):
            raise
        except Exception as error:  # of the mechanism: no token, no ticket, a broker that cannot prove itself
            raise NotPermitted(f"the login {self._security.who()} at {self} fails: {error}") from error
        if not login.is_authenticated():
            raise NotPermitted(f"{self} refuses the login {self._security.who()}")
        lasts = getattr(answer, "session_lifetime_ms", 0) or 0
        if lasts > 0:
            self._login_ends = time.monotonic() + _LOGIN_PART * lasts / 1000

    def __str__(self) -> str:
        return f"broker {self.address[0]}:{self.address[1]}"


def _complete(options: dict[str, Any]) -> dict[str, Any]:
    """Their mechanisms look up options without asking whether they are given."""
    return {
        "sasl_kerberos_name": None,
        "sasl_kerberos_service_name": "kafka",
        "sasl_kerberos_domain_name": None,
        "sasl_oauth_token_provider": None,
        **options,
    }


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
