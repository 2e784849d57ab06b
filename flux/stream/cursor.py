"""How far a producer has served one worker (design: handshake, consumers-at)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flux.stream.consumers import ConsumersAt

#: Ack where there is no replica: never the minimum.
NOBODY = np.iinfo(np.int64).max
#: Whether a cursor owes anything: not known, it does, or it did not when the stream was at this version.
UNKNOWN, OWES = -1, -2


@dataclass(slots=True)
class Cursor:
    """How far one worker has been served. ``at``: its replicas; ``acked``, ``wanted_from``: of each of these; ``epoch``: of the
    table that brought the last change of what it hosts."""

    at: ConsumersAt
    acked: np.ndarray
    epoch: int
    answered: bool = False
    nonce: int | None = None
    number: int = 0
    next: int = 0
    first: int = 0
    wanted_from: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    catching_up_to: int = 0
    sent_bytes: int = 0
    granted: int = 0
    hello_due: float = 0.0
    heard: float = 0.0
    patience: float = 1.0
    settled_at: int = UNKNOWN
