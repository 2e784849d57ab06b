"""The way of a reader outside the query to the output that is kept for it (design: readers-secret).

Workers let in processes with the secret of the query, so a reader needs it. It is given only to a reader that has proved the
secret of the connection file, and masked with that: a listener on the way learns nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from controller.operate.requests import OutputPlace
from flux.dataflow.plan import Plan
from flux.dataflow.readers import offered
from flux.errors import UsageError

NONCE_BYTES = 32


@dataclass(frozen=True)
class Reach:
    """The address at which the controller listens for readers, the secret of the connection file, and the keys of the query; no
    keys: it is not encrypted."""

    endpoint: str
    shared: bytes = field(repr=False)
    public_key: bytes = b""
    private_key: bytes = field(default=b"", repr=False)


def output_place(plan: Plan, name: str | None, reach: Reach | None, stage: str | None) -> OutputPlace:
    """Describe the output of a stage and the way to it. UsageError: there is none."""
    found = offered(plan, stage)
    if reach is None or found.output_schema is None:
        raise UsageError("the output of this query cannot be read from outside")
    nonce = secrets.token_bytes(NONCE_BYTES)
    return OutputPlace(
        id=plan.query,
        name=name,
        stage=found.id,
        stage_name=found.name,
        partitions=found.partitions,
        schema=found.output_schema.serialize().to_pybytes(),
        endpoint=reach.endpoint,
        nonce=nonce,
        masked=masked(plan.secret, reach.shared, nonce),
        public_key=reach.public_key,
        private_key=reach.private_key,
        silence_max_s=plan.settings.controller_timeout,
    )


def masked(secret: bytes, shared: bytes, nonce: bytes) -> bytes:
    """Mask the secret for one answer, so that only a holder of ``shared`` can read it. Masking it again gives the secret back."""
    mask = hashlib.shake_256(b"output" + len(shared).to_bytes(4, "big") + shared + nonce).digest(len(secret))
    return bytes(one ^ other for one, other in zip(secret, mask, strict=True))
