"""Tokens, their rights and their rates. A location keeps hashes of tokens and never the tokens themselves (design:
gateway-tokens, gateway-quotas)."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from flux.errors import QueryFailed, UsageError
from flux.gateway.problems import Problem
from flux.vault.location import Place

Kind = Literal["events", "bytes"]
#: A token and a kind of its units.
_Rate = tuple[str, Kind]
_DOCUMENT = "tokens.json"
#: The folder with a document for each gateway that has pushes under a rate.
_RATES = "rates"
_KINDS: tuple[Kind, ...] = ("events", "bytes")
#: The least part of a rate that a gateway has.
SHARE_MIN = 0.05
#: Seconds between two exchanges of rates, and until a gateway that writes no other document is taken for gone.
EXCHANGE_S, GONE_S = 1.0, 5.0
#: Units a second below which a rate is not wanted any more.
_FORGOTTEN = 0.01
Right = Literal["push", "read", "query", "admin"]
RIGHTS: tuple[Right, ...] = ("push", "read", "query", "admin")


class TokenGrant(msgspec.Struct, frozen=True):
    """The rights of one token."""

    #: The part of the token that names it. The rest is secret.
    id: str
    #: SHA-256 of the whole token. It has 256 random bits, so no salt and no slow function is needed.
    hash: str
    rights: list[Right]
    #: The streams on which the token has its rights; "*": all.
    streams: list[str]
    #: The events, and the bytes of bodies, that the token may push in a second at all gateways together; 0: no limit.
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
        """Make a token and return its text, which is not kept and cannot be shown again. The arguments are fields of
        ``TokenGrant``."""
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
    for grant in grants:  # no early end: the time of the answer must not tell which token was like this one
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


def share_of(own: float, others: Iterable[float]) -> float:
    """Return the part of a rate that one gateway gives, by the units a second that clients want there and at others. The parts of
    gateways that go by the same numbers add up to 1. Each has some, so that a client which comes to it is noticed."""
    wanted = [own, *others]
    least = SHARE_MIN * sum(wanted) or 1.0
    return max(own, least) / sum(max(each, least) for each in wanted)


class Allowance:
    """Units that are left of a rate, for one token at one gateway. It fills up with time, to the units of ``SAVED_S`` seconds; a
    request that is larger than that is taken when it is full, and is paid off afterwards."""

    #: Seconds of a rate that may be saved up while nothing is pushed.
    SAVED_S = 2.0

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._left, self._at = self.SAVED_S * per_s, now

    def change(self, per_s: float, now: float) -> None:
        """Go on with another rate. Units that are left stay, as far as they may be saved up."""
        self.wait_s(0, now)
        self._per_s = per_s
        self._left = min(self._left, self.SAVED_S * per_s)

    def wait_s(self, units: int, now: float) -> float:
        """Return the seconds until this many units may be taken; 0: now."""
        full = self.SAVED_S * self._per_s
        self._left, self._at = min(self._left + (now - self._at) * self._per_s, full), now
        return max((min(units, full) - self._left) / self._per_s, 0.0)

    def take(self, units: int) -> None:
        """Take units for which ``wait_s`` was 0."""
        self._left -= units


class _WantedRates(msgspec.Struct, frozen=True):
    """The document of one gateway: the units a second that clients want there, also those that were refused."""

    #: Grows with each writing, so that a gateway that is gone can be told from one whose clients want the same.
    count: int
    events: dict[str, float] = {}
    bytes: dict[str, float] = {}

    def of(self, rate: _Rate) -> float:
        token, kind = rate
        return (self.events if kind == "events" else self.bytes).get(token, 0.0)


_rates = msgspec.json.Decoder(_WantedRates)


class Quotas:
    """The rates of all tokens at one gateway, which are divided among the gateways of a location by use (design: gateway-quotas).
    May be used by several threads."""

    def __init__(self, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._place, self._name = place, uuid.uuid4().hex
        self._guard, self._exchanging = threading.Lock(), threading.Lock()
        self._left: dict[_Rate, tuple[float, Allowance]] = {}
        #: Units that were asked for since the last exchange, and a second, of late.
        self._asked: dict[_Rate, int] = {}
        self._wanted: dict[_Rate, float] = {}
        #: By gateway, its newest document and the time at which that came.
        self._others: dict[str, tuple[_WantedRates, float]] = {}
        self._exchanged, self._count = self.clock(), 0

    def take(self, grant: TokenGrant, kind: Kind, units: int) -> None:
        """Take units of a token's rate. Problem: there are too few now; nothing is taken."""
        per_s, rate, now = grant.events_per_s if kind == "events" else grant.bytes_per_s, (grant.id, kind), self.clock()
        if not per_s:
            return
        with self._guard:
            self._asked[rate] = self._asked.get(rate, 0) + units
            here = per_s * self._share(rate)
            left = self._allowance(rate, here, now)
            wait_s = left.wait_s(units, now)
            if not wait_s:
                left.take(units)
                return
        raise Problem(
            "over_quota", f"token {grant.id} may push {per_s:,} {kind} a second, {here:,.0f} of them here, and {units:,} are too "
            "many now", headers={"Retry-After": str(math.ceil(wait_s))},
        )  # fmt: skip

    def _allowance(self, rate: _Rate, per_s: float, now: float) -> Allowance:
        known, left = self._left.get(rate) or (per_s, Allowance(per_s, now))
        if known != per_s:
            left.change(per_s, now)
        self._left[rate] = per_s, left
        return left

    def _share(self, rate: _Rate) -> float:
        return share_of(self._wanted.get(rate, 0.0), [each.of(rate) for each, _ in self._others.values()])

    # ---- the other gateways

    def exchange(self, grants: Iterable[TokenGrant]) -> None:
        """Tell the other gateways the rates that are wanted here, and learn theirs, if it is time and a token has a rate. The
        parts stay as they are where the location cannot be used."""
        if not any(grant.events_per_s or grant.bytes_per_s for grant in grants):
            return
        if not self._exchanging.acquire(blocking=False):
            return
        try:
            now = self.clock()
            if now - self._exchanged >= EXCHANGE_S:
                self._note_wanted(now - self._exchanged)
                self._exchanged = now
                with contextlib.suppress(OSError, QueryFailed):
                    folder = self._place.below(_RATES, new=True)
                    self._tell(folder)
                    self._learn(folder, now)
        finally:
            self._exchanging.release()

    def _note_wanted(self, seconds: float) -> None:
        """Bring the rates that clients want up to date: half of each is that of the time since the last exchange."""
        with self._guard:
            asked, self._asked = self._asked, {}
            for rate in {*asked, *self._wanted}:
                self._wanted[rate] = (self._wanted.get(rate, 0.0) + asked.get(rate, 0) / seconds) / 2
                if self._wanted[rate] < _FORGOTTEN:
                    del self._wanted[rate]

    def _tell(self, folder: Place) -> None:
        if self._wanted:
            self._count += 1
            of = {kind: {token: each for (token, by), each in self._wanted.items() if by == kind} for kind in _KINDS}
            folder.write(self._name, msgspec.json.encode(_WantedRates(self._count, of["events"], of["bytes"])))
        elif self._count:
            self._count = 0
            folder.remove(self._name)

    def _learn(self, folder: Place, now: float) -> None:
        found: dict[str, tuple[_WantedRates, float]] = {}
        for name in folder.names():
            if name == self._name:
                continue
            try:
                said = _rates.decode(folder.read(name))
            except (FileNotFoundError, msgspec.MsgspecError):  # removed meanwhile, or of another release
                continue
            before, at = self._others.get(name, (None, now))
            at = now if before is None or before.count != said.count else at
            if now - at < GONE_S:
                found[name] = said, at
            else:
                folder.remove(name)
        with self._guard:
            self._others = found

    def close(self) -> None:
        """Leave the rates to the other gateways."""
        if self._count:
            with contextlib.suppress(OSError):
                self._place.below(_RATES).remove(self._name)
