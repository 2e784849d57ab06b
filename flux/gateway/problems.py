"""Refusals of a gateway, in one form: a code for programs, a sentence, and the remedy (design: gateway-answers)."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from dataclasses import dataclass, field

import msgspec

from flux.errors import QueryFailed
from flux.vault.directory_store import LocationGone, TakenOver

logger = logging.getLogger("flux.gateway")


@dataclass(frozen=True)
class ProblemKind:
    """A reason of refusal."""

    status: int
    #: For programs; it never changes.
    code: str
    #: The remedy, a sentence.
    remedy: str


#: All reasons, by code.
KINDS = {
    kind.code: kind
    for kind in (
        ProblemKind(400, "malformed", "Correct the request; the message says where it cannot be read."),
        ProblemKind(
            400, "unfit_query", "Correct the part of the query that the message names; docs/sql.md lists the parts."
        ),
        ProblemKind(
            400, "no_tentative", "Leave out 'tentative', or register the query anew with 'availability', as in \"3s\"."
        ),
        ProblemKind(401, "no_token", "Send a token, Authorization: Bearer TOKEN; flux token makes one."),
        ProblemKind(401, "unknown_token", "Use another token; this one was never made, or was revoked."),
        ProblemKind(403, "no_right", "Use a token with this right on this stream."),
        ProblemKind(404, "no_such_path", "GET /v1/openapi.json lists all paths."),
        ProblemKind(404, "no_such_stream", "GET /v1/streams lists the streams; POST /v1/streams registers one."),
        ProblemKind(404, "no_such_query", "GET /v1/queries lists the queries; POST /v1/queries registers one."),
        ProblemKind(404, "no_such_input", "GET /v1/streams and GET /v1/queries list the names that a query may read."),
        ProblemKind(404, "no_such_reader", "GET /v1/streams/NAME lists the readers of a stream."),
        ProblemKind(404, "no_such_output", "GET /v1/outputs lists the outputs; POST /v1/outputs registers one."),
        ProblemKind(405, "wrong_method", "GET /v1/openapi.json lists the methods of each path."),
        ProblemKind(408, "slow_head", "Send the head of a request at once; proxies and clients do."),
        ProblemKind(408, "slow_body", "Send the body faster, or in smaller requests. Nothing of it is kept."),
        ProblemKind(409, "stream_exists", "Use another name, or remove the stream first."),
        ProblemKind(409, "query_exists", "Use another name, or remove the query first."),
        ProblemKind(409, "has_readers", "Remove or stop the queries that read it, or remove it with ?cascade=true."),
        ProblemKind(409, "input_failed", "Restart the query that it reads first, POST /v1/queries/NAME/restart."),
        ProblemKind(409, "output_exists", "Use another name, or remove the output first."),
        ProblemKind(409, "name_reused", "Use another key or number for other rows. Nothing of this request is kept."),
        ProblemKind(410, "cursor_gone", "Begin with after=oldest, or after=newest for results that come from now on."),
        ProblemKind(413, "too_large", "Send several smaller requests. Nothing of this one is kept."),
        ProblemKind(415, "unknown_content", "Send one of the content types and encodings that the message names."),
        ProblemKind(
            421, "other_gateway", "Send the request to the gateway in 'gateway'; flux.client does it by itself."
        ),
        ProblemKind(422, "unfit_row", "Correct the row. Nothing of the request is kept."),
        ProblemKind(422, "unfit_definition", "Correct the part of the definition that the message names."),
        ProblemKind(429, "busy", "Send the request again after Retry-After seconds. Nothing of it is kept."),
        ProblemKind(
            429, "over_quota", "Send it again after Retry-After seconds, or ask for a token with a higher rate."
        ),
        ProblemKind(500, "internal", "Report the message to the operator of the gateway; the same key is safe."),
        ProblemKind(503, "log_full", "Let the queries that read the stream go on; the same key is safe."),
        ProblemKind(503, "not_readable", "Send the request again, with the same cursor; flux verify names damage."),
        ProblemKind(503, "not_stored", "Send the request again, here or at another gateway; the same key is safe."),
        ProblemKind(503, "no_service", "Start flux serve on the location of the gateway, and send the request again."),
        ProblemKind(
            503, "not_changed", "Send the request again: GET /v1/queries/NAME tells whether it was carried out."
        ),
        ProblemKind(507, "no_room", "Remove streams or queries, or start a gateway on another location."),
    )
}


@dataclass
class Problem(Exception):
    """A refusal. ``message`` names the expected thing and the one that came."""

    code: str
    message: str
    #: The row that does not fit, from 1, and its column.
    row: int | None = None
    column: str | None = None
    #: The address of the gateway that owns the log.
    gateway: str | None = None
    #: The id of a failure, under which the log of the gateway has its reason.
    failure: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> ProblemKind:
        return KINDS[self.code]

    def __str__(self) -> str:
        return self.message


_FULL, _READ_ONLY = "the disk of the location is full", "the location cannot be written"
_GONE = "the location, or a part of it, is gone"
#: By the error of the system, the words for clients. Its own have paths.
_DISK = {
    errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EROFS: _READ_ONLY, errno.EACCES: _READ_ONLY, errno.EPERM: _READ_ONLY,
    errno.ENOENT: _GONE, errno.ENOTDIR: _GONE,
}  # fmt: skip
#: Seconds for which a failure that comes again is not logged again, and the most failures that are known.
_QUIET_S, _FAILURES_MAX = 10.0, 1000
_salt = os.urandom(16)
_logged: dict[str, float] = {}


def described(error: BaseException) -> str:
    """Return a failure in words for clients, which name no path."""
    if isinstance(error, OSError):
        return _DISK.get(error.errno or 0, "the location cannot be used")
    if isinstance(error, TakenOver):
        return "another gateway has taken over the log"
    if isinstance(error, LocationGone):
        return _GONE
    if isinstance(error, QueryFailed):
        return "something at the location cannot be read, or belongs to another program by now"
    return "the gateway has failed"


def failure_of(error: BaseException, where: str) -> str:
    """Log an error, at most every ten seconds, and return the id under which the log has it."""
    text = f"{where}: {type(error).__name__}: {error}"
    id_ = hashlib.blake2s(text.encode(), key=_salt, digest_size=4).hexdigest()
    now = time.monotonic()
    if now - _logged.get(id_, -_QUIET_S) >= _QUIET_S:
        if len(_logged) >= _FAILURES_MAX:
            _logged.clear()
        _logged[id_] = now
        expected = isinstance(error, OSError | QueryFailed)
        logger.log(
            logging.WARNING if expected else logging.ERROR, "failure %s: %s", id_, text,
            exc_info=None if expected else error,
        )  # fmt: skip
    return id_


def unstored(error: BaseException, where: str, message: str = "") -> Problem:
    """Return the problem of a failure of the location: the client gets words without paths, and an id."""
    return Problem(
        "not_stored", message or described(error), failure=failure_of(error, where), headers={"Retry-After": "1"}
    )


def unread(what: str, kind: type[msgspec.Struct], error: Exception) -> str:
    """Return the message about a body that is no definition. It lists the parts that there are, if one is unknown."""
    said = f"expected the definition of {what} as JSON: {error}"
    if "unknown field" in said and "`$" not in said:
        said += f"; there are {', '.join(each.encode_name for each in msgspec.structs.fields(kind))}"
    return said


def busy(message: str, after_s: int = 1) -> Problem:
    return Problem("busy", message, headers={"Retry-After": str(after_s)})
