"""Tokens and their rights. A location keeps hashes of them and never the tokens themselves (design: gateway-tokens)."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import threading
from typing import Literal

import msgspec

from flux.errors import QueryFailed, UsageError
from flux.gateway.problems import Problem
from flux.vault.location import Place

_DOCUMENT = "tokens.json"
Right = Literal["push", "read", "query", "admin"]
RIGHTS: tuple[Right, ...] = ("push", "read", "query", "admin")


class TokenGrant(msgspec.Struct, frozen=True):
    """The rights of one token."""

    #: The part of the token that names it. The rest is secret.
    id: str
    #: SHA-256 of the whole token. It has 256 random bits, so no salt and no slow function is needed.
    hash: str
    rights: list[Right]
    #: The streams on which it has them; "*": all.
    streams: list[str]
    #: The events and the bytes of bodies that it may push in a second, at each gateway; 0: as many as it likes.
    events_per_s: int = 0
    bytes_per_s: int = 0

    def allows(self, right: str, stream: str) -> bool:
        """Return whether the token has a right on a stream; empty: on any one."""
        if right not in self.rights and "admin" not in self.rights:
            return False
        return not stream or "*" in self.streams or stream in self.streams


class _TokensDocument(msgspec.Struct):
    format: int
    tokens: list[TokenGrant]


_decoder = msgspec.json.Decoder(_TokensDocument)


class TokenRegister:
    """The tokens of a location."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def all(self) -> list[TokenGrant]:
        try:
            return _decoder.decode(self._place.read(_DOCUMENT)).tokens
        except FileNotFoundError:
            return []
        except msgspec.MsgspecError as error:
            raise QueryFailed(f"{self._place}/{_DOCUMENT} cannot be read: {error}. Restore it from a copy") from error

    def make(self, rights: list[Right], streams: list[str], events_per_s: int = 0, bytes_per_s: int = 0) -> str:
        """Make a token and return it. It is not kept, and cannot be shown again. The others as in ``TokenGrant``."""
        if not rights or not set(rights) <= set(RIGHTS):
            raise UsageError(f"rights: expected some of {', '.join(RIGHTS)}; got {', '.join(rights)!r:.100}")
        if min(events_per_s, bytes_per_s) < 0:
            raise UsageError(f"quotas: expected 0 or more a second, got {events_per_s} events and {bytes_per_s} bytes")
        if not streams:
            raise UsageError("streams: expected names of streams, or * for all")
        id_ = secrets.token_hex(6)
        token = f"flux_{id_}_{secrets.token_urlsafe(32)}"
        with self._place.locked():
            self._write([*self.all(), TokenGrant(id_, _hash(token), rights, streams, events_per_s, bytes_per_s)])
        return token

    def revoke(self, id_: str) -> None:
        """Forget a token. Gateways that run refuse it within a second or two."""
        with self._place.locked():
            found = self.all()
            rest = [grant for grant in found if grant.id != id_]
            if len(rest) == len(found):
                raise UsageError(
                    f"there is no token {id_!r}; there are {', '.join(grant.id for grant in found) or 'none'}"
                )
            self._write(rest)

    def _write(self, grants: list[TokenGrant]) -> None:
        self._place.write(_DOCUMENT, msgspec.json.format(msgspec.json.encode(_TokensDocument(1, grants))))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def grant_of(authorization: str | None, grants: list[TokenGrant]) -> TokenGrant:
    """Return the grant of the token in a header. Problem: there is none."""
    kind, _, token = (authorization or "").partition(" ")
    if kind.lower() != "bearer" or not token.strip():
        raise Problem(
            "no_token", "the header Authorization: Bearer TOKEN is missing", headers={"WWW-Authenticate": "Bearer"}
        )
    hashed = _hash(token.strip())
    found = None
    for grant in grants:  # all of them, so that the time says nothing of the place
        if hmac.compare_digest(grant.hash, hashed):
            found = grant
    if found is None:
        raise Problem("unknown_token", "the token is not known here", headers={"WWW-Authenticate": "Bearer"})
    return found


def check_right(grant: TokenGrant, right: str, stream: str) -> None:
    """Raise a Problem unless a token has a right on a stream."""
    if not grant.allows(right, stream):
        on = f" on stream {stream!r}" if stream else ""
        raise Problem("no_right", f"token {grant.id} has no right {right!r}{on}; it has {', '.join(grant.rights)}")


class Allowance:
    """Units that are left of a rate, for one token at one gateway. It fills up with time, to the units of ``SAVED_S`` seconds; a
    request that is larger than that is taken when it is full, and is paid off afterwards."""

    #: Seconds of a rate that may be saved up while nothing is pushed.
    SAVED_S = 2.0

    def __init__(self, per_s: int, now: float) -> None:
        self._per_s = per_s
        self._left, self._at = self.SAVED_S * per_s, now

    def wait_s(self, units: int, now: float) -> float:
        """Return the seconds until this many units may be taken; 0: now."""
        full = self.SAVED_S * self._per_s
        self._left, self._at = min(self._left + (now - self._at) * self._per_s, full), now
        return max((min(units, full) - self._left) / self._per_s, 0.0)

    def take(self, units: int) -> None:
        """Take units for which ``wait_s`` was 0."""
        self._left -= units


class Quotas:
    """The rates of all tokens at one gateway. May be used by several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._left: dict[tuple[str, str, int], Allowance] = {}

    def take(self, grant: TokenGrant, kind: Literal["events", "bytes"], units: int, now: float) -> None:
        """Take units of a token's rate. Problem: there are too few now; nothing is taken."""
        per_s = grant.events_per_s if kind == "events" else grant.bytes_per_s
        if not per_s:
            return
        with self._guard:
            left = self._left.setdefault((grant.id, kind, per_s), Allowance(per_s, now))
            wait_s = left.wait_s(units, now)
            if not wait_s:
                left.take(units)
                return
        raise Problem(
            "over_quota", f"token {grant.id} may push {per_s:,} {kind} a second, and {units:,} are too many now",
            headers={"Retry-After": str(math.ceil(wait_s))},
        )  # fmt: skip
