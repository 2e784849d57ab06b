"""Refusals of a gateway, in one form: a code for programs, a sentence, and the remedy (design: gateway-answers)."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        ProblemKind(401, "no_token", "Send a token, Authorization: Bearer TOKEN; flux token makes one."),
        ProblemKind(401, "unknown_token", "Use another token; this one was never made, or was revoked."),
        ProblemKind(403, "no_right", "Use a token with this right on this stream."),
        ProblemKind(404, "no_such_path", "GET /v1/openapi.json lists all paths."),
        ProblemKind(404, "no_such_stream", "GET /v1/streams lists the streams; POST /v1/streams registers one."),
        ProblemKind(405, "wrong_method", "GET /v1/openapi.json lists the methods of each path."),
        ProblemKind(408, "slow_body", "Send the body faster, or in smaller requests. Nothing of it is kept."),
        ProblemKind(409, "stream_exists", "Use another name, or remove the stream first."),
        ProblemKind(409, "has_readers", "Stop the queries that read it, or remove it with ?cascade=true."),
        ProblemKind(409, "name_reused", "Use another key or number for other rows. Nothing of this request is kept."),
        ProblemKind(413, "too_large", "Send several smaller requests. Nothing of this one is kept."),
        ProblemKind(415, "unknown_content", "Send one of the content types and encodings that the message names."),
        ProblemKind(
            421, "other_gateway", "Send the request to the gateway in 'gateway'; flux.client does it by itself."
        ),
        ProblemKind(422, "unfit_row", "Correct the row. Nothing of the request is kept."),
        ProblemKind(422, "unfit_definition", "Correct the part of the definition that the message names."),
        ProblemKind(429, "busy", "Send the request again after Retry-After seconds. Nothing of it is kept."),
        ProblemKind(500, "internal", "Report the message to the operator of the gateway; the same key is safe."),
        ProblemKind(503, "log_full", "Let the queries that read the stream go on; the same key is safe."),
        ProblemKind(503, "not_stored", "Send the request again, here or at another gateway; the same key is safe."),
        ProblemKind(507, "no_room", "Remove streams, or start a gateway on another location."),
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
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> ProblemKind:
        return KINDS[self.code]

    def __str__(self) -> str:
        return self.message


def busy(message: str, after_s: int = 1) -> Problem:
    return Problem("busy", message, headers={"Retry-After": str(after_s)})
