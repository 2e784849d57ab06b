"""Tokens and their rights. A location keeps hashes of them and never the tokens themselves (design: gateway-tokens)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
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

    def make(self, rights: list[Right], streams: list[str]) -> str:
        """Make a token and return it. It is not kept, and cannot be shown again."""
        if not rights or not set(rights) <= set(RIGHTS):
            raise UsageError(f"rights: expected some of {', '.join(RIGHTS)}; got {', '.join(rights)!r:.100}")
        if not streams:
            raise UsageError("streams: expected names of streams, or * for all")
        id_ = secrets.token_hex(6)
        token = f"flux_{id_}_{secrets.token_urlsafe(32)}"
        with self._place.locked():
            self._write([*self.all(), TokenGrant(id_, _hash(token), rights, streams)])
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
