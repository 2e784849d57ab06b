"""Listeners of one broker that a benchmark compares: the open one, and one with TLS and a password.

--secure HOST:PORT --cafile FILE [--user NAME --password WORD]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Door:
    """One listener. ``options`` are those of ``flux.kafka``; ``config`` those of librdkafka."""

    name: str
    address: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address")
    parser.add_argument(
        "--secure", metavar="HOST:PORT", help="also by this listener of the same broker, with TLS and SASL PLAIN"
    )
    parser.add_argument("--cafile", help="the certificate for the secure listener")
    parser.add_argument("--user", default="admin")
    parser.add_argument("--password", default="not-a-secret")


def doors_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[Door]:
    plain = Door("plain", given.address)
    if given.secure is None:
        return [plain]
    if given.cafile is None:
        parser.error("--secure needs --cafile")
    options = {
        "security_protocol": "SASL_SSL", "ssl_cafile": given.cafile, "sasl_mechanism": "PLAIN",
        "sasl_plain_username": given.user, "sasl_plain_password": given.password,
    }  # fmt: skip
    config = {
        "security.protocol": "SASL_SSL", "ssl.ca.location": given.cafile, "sasl.mechanism": "PLAIN",
        "sasl.username": given.user, "sasl.password": given.password,
    }  # fmt: skip
    return [plain, Door("TLS", given.secure, options, config)]
