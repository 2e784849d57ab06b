"""One connection to one broker: a request, its answer, one at a time.

Law: every wait ends at a time that the caller gives. After an error the connection is closed and of no more use. An answer
of a broker has at most ``ANSWER_BYTES_MAX`` bytes.

A connection blocks: it belongs to a thread that may wait. ``abort`` ends a wait from another thread. Only ``begin`` and
``arrived`` do not block, for a thread that waits for several connections.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from typing import Any

import numpy as np

from flux.connectors.kafka.client.kafka_python import error_of, from_bytes, library, to_bytes
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.errors import BrokerBroken, NotPermitted

CLIENT = "flux"
#: Largest answer. Brokers are often told to take records of 100 MB, and an answer has one of them, or less.
ANSWER_BYTES_MAX = 256 << 20
#: Newest version of each request that is used here. In later versions committed offsets do not go by name of the topic, and
#: each transaction of a writer has another epoch.
_NEWEST = {
    "AddOffsetsToTxn": 3, "AddPartitionsToTxn": 3, "EndTxn": 3, "Fetch": 13, "InitProducerId": 4, "ListOffsets": 7,
    "OffsetCommit": 8, "OffsetFetch": 7, "Produce": 13, "TxnOffsetCommit": 3,
}  # fmt: skip
_ANY = 1 << 15
#: Most answers with a few rows are smaller than this.
_SMALL_BYTES = 64 << 10
#: Part of the lifetime of a login after which a new connection is made.
_LOGIN_PART = 0.85


class IncomingAnswer:
    """An answer as it comes in, with its size in front. Small answers come into the same memory and are copied from there;
    large ones get memory of their own that is not cleared first."""

    def __init__(self) -> None:
        self._small = np.empty(_SMALL_BYTES, np.uint8).data
        self._into, self._at, self._size = self._small, 0, -1

    @property
    def whole(self) -> bool:
        return self._at == self._size

    def room(self) -> memoryview:
        """Return the memory for the bytes that come next."""
        return self._into[self._at :] if self._size < 0 else self._into[self._at : self._size]

    def took(self, many: int) -> int | None:
        """Note that this number of bytes has come. Returns the size in front as soon as it is there; the caller checks it and
        passes it to ``expect``."""
        self._at += many
        if self._size >= 0 or self._at < 4:
            return None
        return int(struct.unpack_from(">i", self._small)[0])

    def expect(self, size: int) -> None:
        self._size = 4 + size
        if self._at > self._size:
            raise BrokerBroken(f"a broker sent {self._at} bytes where it had said {self._size}")
        if self._size > len(self._small):
            self._into = np.empty(self._size, np.uint8).data
            self._into[: self._at] = self._small[: self._at]

    def taken(self) -> memoryview:
        """Return the bytes of the answer behind the size, and begin with the next answer."""
        into, size = self._into, self._size
        self._into, self._at, self._size = self._small, 0, -1
        return memoryview(bytes(into[4:size])) if into is self._small else into[4:size]


class Connection:
    """Connection to the broker at ``address``, host and port. Raises OSError and ssl.SSLError if the broker cannot be reached
    within ``timeout`` seconds, NotPermitted if it refuses the login."""

    def __init__(self, address: tuple[str, int], security: Security, timeout: float) -> None:
        self.address = address
        self._security = security
        self._number = 0
        self._versions: Any = None
        self._of_kind: dict[
            tuple[Any, int | None], int
        ] = {}  # the version by kind of request, and by the limit of a request
        self._login_ends = float("inf")
        self._asked: Any = None
        self._incoming = IncomingAnswer()
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
        """The connection is open, and its login lasts."""
        return self._socket.fileno() >= 0 and time.monotonic() < self._login_ends

    def ask(self, message: Any, timeout: float) -> Any:
        """Send a request and return the answer. Raises OSError; TimeoutError if no answer comes; BrokerBroken for bytes that
        are no answer."""
        return self._ask(message, self._version(message), timeout)

    def send(self, message: Any, timeout: float) -> None:
        """Send a request whose answer ``receive`` returns. Nothing else may be asked in between."""
        self._send(message, self._version(message), timeout)

    def receive(self, message: Any, timeout: float) -> Any:
        """Return the answer to the request that was sent last. Raises the same errors as ``ask``."""
        return self._receive_answer(message, time.monotonic() + timeout)

    def begin(self, message: Any, timeout: float) -> None:
        """Send a request whose answer ``arrived`` returns, without waiting for that. Raises the same errors as ``ask``. Waits
        only if the socket does not take the whole request at once: few requests are that large."""
        self._asked = message
        data = to_bytes(message, self._version(message), self._next_number(), CLIENT)
        try:
            if self._socket.gettimeout() != 0.0:
                self._socket.settimeout(0.0)
            try:
                sent = self._socket.send(data)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                sent = 0
            if sent < len(data):
                self._socket.settimeout(timeout)
                self._socket.sendall(data[sent:])
                self._socket.settimeout(0.0)
        except BaseException:
            self.close()
            raise

    def arrived(self) -> Any:
        """Return the answer to the request that was begun last, or None if a part of it is missing. Does not wait. Raises the
        same errors as ``ask``."""
        try:
            while not self._incoming.whole:
                try:
                    got = self._socket.recv_into(self._incoming.room())
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return None
                if not got:
                    raise ConnectionResetError(f"{self} closed the connection")
                size = self._incoming.took(got)
                if size is not None:
                    self._check_size(size)
                    self._incoming.expect(size)
            return self._answer(self._asked, self._incoming.taken())
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def knows(self, message: Any, version: int = 0) -> bool:
        """Tell whether the broker takes such requests, in this version or a later one."""
        known = self._versions.api_versions.get(message.API_KEY)
        newest = _NEWEST.get(message.name.removesuffix("Request"), _ANY)
        return known is not None and min(known[1], newest) >= version

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """End a wait for an answer with an error. May be called from another thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def _version(self, message: Any) -> int:
        kind = type(message), message._max_version
        found = self._of_kind.get(kind)
        if found is not None:
            return found
        name = message.name.removesuffix("Request")
        try:
            found = int(self._versions.api_version(message, max_version=_NEWEST.get(name, _ANY)))
        except library().errors.IncompatibleBrokerVersion as error:
            raise BrokerBroken(f"{self} is too old or too new for this: {error}") from error
        self._of_kind[kind] = found
        return found

    def _ask(self, message: Any, version: int, timeout: float) -> Any:
        end = time.monotonic() + timeout
        self._send(message, version, timeout)
        return self._receive_answer(message, end)

    def _next_number(self) -> int:
        self._number = (self._number + 1) & 0x7FFFFFFF
        return self._number

    def _send(self, message: Any, version: int, timeout: float) -> None:
        number = self._next_number()
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(to_bytes(message, version, number, CLIENT))
        except BaseException:
            self.close()
            raise

    def _receive_answer(self, message: Any, end: float) -> Any:
        try:
            self._socket.settimeout(_left(end))
            (size,) = struct.unpack(">i", self._receive(4, end))
            self._check_size(size)
            return self._answer(message, self._receive(size, end))
        except BaseException:
            self.close()
            raise

    def _check_size(self, size: int) -> None:
        if not 4 <= size <= ANSWER_BYTES_MAX:
            raise BrokerBroken(
                f"{self} sent an answer of {size} bytes; expected 4 to {ANSWER_BYTES_MAX}. Is this the port of a Kafka "
                "broker, and is security_protocol what it wants?"
            )

    def _answer(self, message: Any, body: memoryview) -> Any:
        number, answer = from_bytes(message, body)
        if number != self._number:
            raise BrokerBroken(f"{self} answered request {number} when asked {self._number}")
        return answer

    def _receive(self, size: int, end: float) -> memoryview:
        """Receive exactly ``size`` bytes, in memory of their own that is not cleared first."""
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
        """Ask the broker for its versions of requests. A broker that does not know version 3 of the question answers in
        version 0, with an error."""
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
        except Exception as error:  # of the mechanism: no token, no ticket, a broker that cannot prove its identity
            raise NotPermitted(f"the login {self._security.who()} at {self} fails: {error}") from error
        if not login.is_authenticated():
            raise NotPermitted(f"{self} refuses the login {self._security.who()}")
        lasts = getattr(answer, "session_lifetime_ms", 0) or 0
        if lasts > 0:
            self._login_ends = time.monotonic() + _LOGIN_PART * lasts / 1000

    def __str__(self) -> str:
        return f"broker {self.address[0]}:{self.address[1]}"


def _complete(options: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of options: kafka-python's mechanisms look options up without asking whether they are given."""
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
