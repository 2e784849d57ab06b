"""Mutual proof of the query's secret, without sending it and without I/O (design: mutual-proof, sealed-messages).

    connecting end (Caller)                                  accepting end (Gate)
    ticket: nonce, mac                      ->               shown while the connection opens, before anything else
    greeting: nonce a                       ->
                                            <-               challenge: nonce b, mac over a and b
    proof: mac over a and b                 ->
                                            <-               accepted
    messages                                <->

Laws. The connecting end says nothing before the other end has proved the secret: a process that binds the port of a dead one
hears nothing of use. The accepting end hears nothing before its challenge is answered. Every code made with the secret is bound
to the endpoint that was dialled, so that it cannot be passed on to another port. A ticket is good once, and a proof is good for
its two nonces alone, so that neither can be replayed.

On a *sealed* connection every message carries its number and a code (HMAC-SHA256) under a key of this connection and this
direction alone: no process on the way can change, add, repeat or reorder messages.

Left to others: the wire (transport), and whether a message makes sense (codec and beyond).

``Strangers`` limits connections that have proved nothing yet.
"""

from __future__ import annotations

import hmac
import random
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flux.errors import ProtocolError

#: Strangers at one port at once. All processes of a large query come at the same time. When one more comes, a random one gives
#: way: if the oldest gave way, an attacker that opens connections fast enough would keep every other process out.
STRANGERS_MAX = 1024
#: Each stranger costs two file descriptors. So strangers have at most a quarter of the descriptors of the process.
DESCRIPTORS_PER_STRANGER = 8
#: Greeting and proof, together with ZeroMQ's own handshake and heartbeats, are less than 2 KB.
STRANGER_BYTES_MAX = 64 << 10
#: A stranger is cut after this time. The accepting process may be in a long step of the user's code and not answer meanwhile; an
#: honest stranger then connects again.
STRANGER_S = 30.0


class Strangers:
    """The strangers at one port, by file descriptor: connections that have proved nothing yet, with limits on their number, time
    and bytes (design: strangers).

    ZeroMQ keeps a message until its last part has come, without a limit, before this project sees any of it. So the bytes of
    strangers are limited where they arrive, by the operating system's count: a handshake needs a few hundred.

    No I/O: the authenticator (``flux.shell.authentication``) reports events and cuts the connections that are named.
    ``descriptors`` is the number that the process may have; ``draw(n)`` gives a random number below n."""

    def __init__(self, descriptors: int = 1024, draw: Callable[[int], int] = random.randrange) -> None:
        self.cut = 0
        self.at_most = min(STRANGERS_MAX, max(descriptors // DESCRIPTORS_PER_STRANGER, 1))
        self._draw = draw
        self._since: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def __contains__(self, connection: int) -> bool:
        return connection in self._since

    def came(self, connection: int, now: float) -> list[int]:
        """Add a connection, and return the connections that have to be cut for it."""
        self._since.pop(connection, None)
        full = len(self._since) == self.at_most
        gone = self._gone([list(self._since)[self._draw(self.at_most)]] if full else [])
        self._since[connection] = now
        return gone

    def left(self, connection: int) -> None:
        """Remove a connection that has closed or has proved the secret."""
        self._since.pop(connection, None)

    def too_much(self, received: Callable[[int], int], now: float) -> list[int]:
        """Return the strangers that are here for too long or have sent too much. They remain strangers until ``cut_off``, because
        a proof may arrive before that."""
        return [
            connection
            for connection, since in self._since.items()
            if now - since > STRANGER_S or received(connection) > STRANGER_BYTES_MAX
        ]

    def cut_off(self, connections: list[int]) -> list[int]:
        return self._gone([connection for connection in connections if connection in self._since])

    def _gone(self, connections: list[int]) -> list[int]:
        for connection in connections:
            del self._since[connection]
        self.cut += len(connections)
        return connections


VERSION = 2
NONCE_BYTES = 32
MAC_BYTES = 32
#: First bytes of the messages of a handshake, and of sealed messages.
GREETING, CHALLENGE, PROOF, SEALED = (b"FLX" + kind + bytes([VERSION]) for kind in (b"g", b"c", b"p", b"s"))
ACCEPTED = b"FLXa" + bytes([VERSION])
#: Answer to a peer that talks as if it had been accepted. Its connection is not known, or no longer: it has to begin again on
#: another connection.
UNKNOWN = b"FLXn" + bytes([VERSION])
#: Connections that have greeted and not answered their challenge, at most; the oldest one gives way.
GREETED_MAX = 1024
_NUMBER = struct.Struct("!Q")
_LENGTH = struct.Struct("!Q")
_SEAL_BYTES = len(SEALED) + _NUMBER.size + MAC_BYTES

Draw = Callable[[int], bytes]


def mac(secret: bytes, what: bytes, *parts: bytes | memoryview) -> bytes:
    """Return the code for ``parts`` in the role ``what``. Two different lists of parts have different codes."""
    code = hmac.new(secret, what, "sha256")
    for part in parts:
        code.update(_LENGTH.pack(memoryview(part).nbytes))
        code.update(part)
    return code.digest()


def same(one: bytes | memoryview, other: bytes | memoryview) -> bool:
    """Compare two codes. It takes the same time whether they differ in one byte or in all."""
    return hmac.compare_digest(one, other)


# ---- tickets


def ticket(secret: bytes, endpoint: str, nonce: bytes) -> bytes:
    return nonce + mac(secret, b"ticket", endpoint.encode(), nonce)


class Tickets:
    """Tickets at the accepting end. Each one is good once."""

    def __init__(self, secret: bytes, endpoint: str) -> None:
        self._secret = secret
        self._endpoint = endpoint
        self._used: set[bytes] = set()

    def take(self, shown: bytes) -> bool:
        nonce = shown[:NONCE_BYTES]
        if len(nonce) < NONCE_BYTES or not same(shown, ticket(self._secret, self._endpoint, nonce)):
            return False
        if nonce in self._used:
            return False
        self._used.add(nonce)  # grows with every true connection, and with no other
        return True


# ---- after the handshake


class Session:
    """A connection whose two ends have proved the secret to each other. It numbers and seals the messages."""

    def __init__(self, secret: bytes, endpoint: str, asked: bytes, answered: bytes, accepting: bool) -> None:
        about = endpoint.encode(), asked, answered
        up, down = mac(secret, b"to who accepts", *about), mac(secret, b"to who connects", *about)
        self._mine, self._theirs = (down, up) if accepting else (up, down)
        self._sent = 0
        self._heard = 0

    def seal(self, message: bytes | memoryview) -> bytes:
        self._sent += 1
        number = _NUMBER.pack(self._sent)
        return b"".join((SEALED, number, mac(self._mine, number, message), message))

    def open(self, frames: Sequence[Any]) -> memoryview:
        """Return a message without its seal.

        Numbers may be missing, because an answer to a peer that does not listen is lost. ProtocolError: the seal is broken, or
        the message is not newer than the last one."""
        if len(frames) != 1:
            raise ProtocolError(f"a sealed message has one frame, {len(frames)} came")
        view = memoryview(frames[0])
        if len(view) < _SEAL_BYTES or view[: len(SEALED)] != SEALED:
            raise ProtocolError("a message without a seal")
        number, shown = view[len(SEALED) : len(SEALED) + _NUMBER.size], view[_SEAL_BYTES - MAC_BYTES : _SEAL_BYTES]
        if not same(shown, mac(self._theirs, bytes(number), view[_SEAL_BYTES:])):
            raise ProtocolError("the seal of a message is broken")
        (count,) = _NUMBER.unpack(number)
        if count <= self._heard:
            raise ProtocolError(f"message {count} of a connection comes again")
        self._heard = count
        return view[_SEAL_BYTES:]


# ---- the handshake


class Caller:
    """The connecting end of one connection."""

    def __init__(self, secret: bytes, endpoint: str, draw: Draw = secrets.token_bytes) -> None:
        self.session: Session | None = None
        self.ticket = ticket(secret, endpoint, draw(NONCE_BYTES))
        self._secret = secret
        self._endpoint = endpoint
        self._nonce = draw(NONCE_BYTES)
        self._coming: Session | None = None

    def greeting(self) -> bytes:
        return GREETING + self._nonce

    def hear(self, frames: Sequence[Any]) -> bytes | None:
        """Return the answer to a message of the accepting end, or None when it has accepted: ``session`` is set then.

        ProtocolError: the other end does not know the secret, or its message does not belong here."""
        said = _only(frames)
        if self._coming is not None and said == ACCEPTED:
            self.session = self._coming
            return None
        if self._coming is not None or not said.startswith(CHALLENGE):
            raise ProtocolError(
                "a peer that has not proved the secret of this query sent something other than a challenge"
            )
        nonce, shown = said[len(CHALLENGE) :][:NONCE_BYTES], said[len(CHALLENGE) + NONCE_BYTES :]
        about = self._endpoint.encode(), self._nonce, nonce
        if len(nonce) < NONCE_BYTES or not same(shown, mac(self._secret, b"challenge", *about)):
            raise ProtocolError(f"the process that answers at {self._endpoint} does not know the secret of this query")
        self._coming = Session(self._secret, self._endpoint, self._nonce, nonce, accepting=False)
        return PROOF + mac(self._secret, b"proof", *about)


class Gate:
    """The accepting end of all connections to one endpoint."""

    def __init__(self, secret: bytes, endpoint: str, draw: Draw = secrets.token_bytes) -> None:
        self.sessions: dict[Hashable, Session] = {}
        self._secret = secret
        self._endpoint = endpoint
        self._draw = draw
        self._greeted: OrderedDict[Hashable, tuple[bytes, bytes]] = OrderedDict()

    def hear(self, connection: Hashable, frames: Sequence[Any]) -> bytes:
        """Return the answer to a message of a connection without a session. With the answer ``ACCEPTED`` it has one.

        ProtocolError: the connection is refused and gets no answer."""
        said = _only(frames)
        if said.startswith(GREETING) and len(said) == len(GREETING) + NONCE_BYTES and connection not in self._greeted:
            return self._challenge(connection, said[len(GREETING) :])
        if said.startswith(PROOF) and connection in self._greeted:
            return self._accept(connection, said[len(PROOF) :])
        raise ProtocolError("a message of a peer that has not proved the secret of this query")

    def _challenge(self, connection: Hashable, asked: bytes) -> bytes:
        nonce = self._draw(NONCE_BYTES)
        self._greeted[connection] = asked, nonce
        if len(self._greeted) > GREETED_MAX:
            self._greeted.popitem(last=False)
        return CHALLENGE + nonce + mac(self._secret, b"challenge", self._endpoint.encode(), asked, nonce)

    def _accept(self, connection: Hashable, shown: bytes) -> bytes:
        asked, nonce = self._greeted.pop(connection)
        if not same(shown, mac(self._secret, b"proof", self._endpoint.encode(), asked, nonce)):
            raise ProtocolError("a wrong proof of the secret of this query")
        self.sessions[connection] = Session(self._secret, self._endpoint, asked, nonce, accepting=True)
        return ACCEPTED

    def forget(self, connection: Hashable) -> None:
        """Forget a connection that has closed."""
        self.sessions.pop(connection, None)
        self._greeted.pop(connection, None)


def _only(frames: Sequence[Any]) -> bytes:
    """Return the only frame of a message of the handshake, which is short."""
    if len(frames) != 1 or len(frames[0]) > len(CHALLENGE) + NONCE_BYTES + MAC_BYTES:
        raise ProtocolError("not a message of a handshake, which has one short frame")
    return bytes(frames[0])
