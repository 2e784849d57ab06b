"""The progress of a producer towards one worker (design: handshake, consumers-at)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flux.stream.consumers import ConsumersAt

#: Ack in a place without a replica: never the minimum.
NOBODY = np.iinfo(np.int64).max
#: Values of ``settled_at`` below all versions: it is not known whether the worker owes an ack; it owes one.
UNKNOWN, OWES = -1, -2


@dataclass(slots=True)
class Cursor:
    """Progress towards one worker."""

    #: The replicas on the worker.
    at: ConsumersAt
    #: By replica: the element through which it has acked.
    acked: np.ndarray
    #: The epoch of the table that brought the last change of these replicas.
    epoch: int
    #: The worker has answered a greeting.
    answered: bool = False
    #: That of the last Resume; None: no data may be sent before the next one.
    nonce: int | None = None
    #: The number of the next message under the nonce.
    number: int = 0
    #: The next element of the log that is not sent yet.
    next: int = 0
    #: The first batch that no message under the nonce has covered yet.
    first: int = 0
    #: By replica: the first batch that it wants, by the last Resume.
    wanted_from: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    #: Elements below this may be wanted by some of the replicas only.
    catching_up_to: int = 0
    #: The worker waits to hear that no row below this number comes any more; 0: it has heard it, or does not ask.
    front: int = 0
    #: Payload sent under the nonce.
    sent_bytes: int = 0
    #: Payload that may be sent under the nonce.
    granted: int = 0
    #: Time of the next greeting.
    hello_due: float = 0.0
    #: Time at which the worker was last known to receive messages, or had nothing to ack.
    heard: float = 0.0
    #: Factor of the resend timeout until the next greeting.
    patience: float = 1.0
    #: Version of the stream at which the worker owed no ack; or UNKNOWN or OWES.
    settled_at: int = UNKNOWN
