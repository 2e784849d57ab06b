"""The content of a delivery, and its signature (design: webhook-deliveries)."""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

import msgspec

from flux.gateway.webhooks.catalogue import WebhookDefinition
from flux.gateway.webhooks.deliveries import WebhookDelivery
from flux.outputs.cursor import OutputCursor
from flux.outputs.reader import MissedRows, OutputPiece
from flux.outputs.row_text import json_rows

#: Headers of a delivery: its number, the seconds since the epoch, and the signature over both the time and the body.
NUMBER_HEADER, TIME_HEADER, SIGNATURE_HEADER = "Flux-Delivery", "Flux-Timestamp", "Flux-Signature"


class DeliveryContent(msgspec.Struct, frozen=True):
    """The body of a delivery."""

    output: str
    query: str
    #: Grows by one with each delivery. A number that came before has the same rows as then: drop it.
    delivery: int
    rows: msgspec.Raw
    #: The place behind the rows: a reader may go on there.
    cursor: str
    #: Rows before these that were removed after ``retain``.
    missed: list[MissedRows]


class DeliveryMessage(NamedTuple):
    """A delivery, ready to be sent; its signature is made anew for each attempt, because it has the time."""

    number: int
    body: bytes


def message_of(
    of: WebhookDefinition, delivery: WebhookDelivery, pieces: list[OutputPiece], missed: list[MissedRows]
) -> DeliveryMessage:
    """Return the message of a delivery with these rows, and those before them that are gone."""
    rows = b",".join(json_rows(piece.rows)[1:-1] for piece in pieces)
    content = DeliveryContent(
        of.name, of.query, delivery.number, msgspec.Raw(b"[" + rows + b"]"), str(OutputCursor(delivery.output, delivery.next)),
        missed,
    )  # fmt: skip
    return DeliveryMessage(delivery.number, msgspec.json.encode(content))


def headers_of(message: DeliveryMessage, secret: str, now: int) -> dict[str, str]:
    """Return the headers of one attempt."""
    return {
        "Content-Type": "application/json",
        NUMBER_HEADER: str(message.number),
        TIME_HEADER: str(now),
        SIGNATURE_HEADER: f"v1={signature(secret, now, message.body)}",
    }


def signature(secret: str, now: int, body: bytes) -> str:
    """Return the HMAC SHA-256 of time and body, in hexadecimal: of the text "TIME." followed by the body."""
    return hmac.new(secret.encode(), f"{now}.".encode() + body, hashlib.sha256).hexdigest()
