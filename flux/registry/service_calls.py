"""Calls of a gateway to the service of its location (design: service-calls).

A gateway checks the token of its client and passes the request on, with the rights of the token. The answer of the service is the
answer to the client.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: The path of all calls.
PATH = "/registry"
#: Bytes of a definition.
BODY_MAX = 1 << 16
#: Seconds that a call may take. A change of the plan takes up to 30, and some calls may wait in front of it.
ANSWER_S = 120.0

CallAction = Literal["register_query", "restart_query", "remove_query", "remove_stream"]


class ServiceCall(msgspec.Struct, frozen=True):
    """A request of a client that concerns registered queries."""

    action: CallAction
    #: The query or stream; "": the body names it.
    name: str
    cascade: bool
    #: The body of the request, as it came.
    body: str
    #: The token's id, and its rights on its streams.
    token: str
    rights: list[str]
    streams: list[str]
