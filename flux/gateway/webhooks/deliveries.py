"""Deliveries of one webhook as they are planned, sent and confirmed, without I/O (design: webhook-deliveries).

Law: the deliveries of a webhook have growing numbers, and a number has one content for ever. A receiver that drops numbers that
it has had gets each result once and in order, or is told of those that retention has removed, whatever gateway is
lost, paused or awake again.

A delivery is planned durably before it is sent for the first time: by its number and the places before and behind its rows.
It is sent until it is confirmed, and only then the next one is planned. So a gateway that takes over sends the newest planned
one again as it was, unless its confirmation is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

#: Seconds until a delivery is sent again: at first, and at most. They double.
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0
#: The most seconds of ``Retry-After`` that count.
RETRY_AFTER_MAX_S = 3600.0


class WebhookDelivery(msgspec.Struct, frozen=True, array_like=True):
    """A planned delivery."""

    #: From 1.
    number: int
    #: By partition, the position of its first row, and that behind its last.
    first: tuple[int, ...]
    next: tuple[int, ...]
    #: The id of the output that has the rows.
    output: str = ""
    #: The receiver has taken it.
    confirmed: bool = False


class WebhookStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a webhook, as its gateway sees it."""

    #: The number of the newest confirmed delivery; 0: there is none.
    confirmed: int = 0
    #: Seconds since the epoch at which it began to fail, the number of attempts since then, and the newest reason.
    failing_since: float | None = None
    attempts: int = 0
    error: str = ""
    #: The gateway that makes the deliveries, and when it has written this, in seconds since the epoch.
    gateway: str = ""
    at: float = 0.0


@dataclass
class DeliveryCourse:
    """The deliveries of a webhook in one gateway. Times are seconds since the epoch."""

    #: The id of the output that its query has now, and the place in it where the webhook begins.
    output: str
    start: tuple[int, ...]
    #: Seconds without success after which it is paused.
    retry_s: float
    #: The newest planned delivery that is on disk; None: there is none.
    newest: WebhookDelivery | None = None
    #: When the newest one may be sent.
    due: float = 0.0
    status: WebhookStatus = field(default_factory=WebhookStatus)
    _pause_s: float = PAUSE_S

    def __post_init__(self) -> None:
        if self.newest is not None and self.newest.output != self.output:
            # A service without a checkpoint has begun anew, and so has its output. The rows of the newest delivery are gone: its
            # number is not used for others, and all results of the new output follow.
            self.newest = WebhookDelivery(self.newest.number, self.start, self.start, self.output, confirmed=True)
        done = 0 if self.newest is None else self.newest.number - (not self.newest.confirmed)
        self.status = msgspec.structs.replace(self.status, confirmed=done)

    @property
    def pending(self) -> WebhookDelivery | None:
        """Return the delivery that is not confirmed; None: the next one may be planned."""
        return None if self.newest is None or self.newest.confirmed else self.newest

    @property
    def place(self) -> tuple[int, ...]:
        """Return the place behind all deliveries."""
        return self.start if self.newest is None else self.newest.next

    def plan(self, first: tuple[int, ...], behind: tuple[int, ...]) -> WebhookDelivery:
        """Return the next delivery. It is ``planned`` when it is on disk."""
        assert self.pending is None, "one delivery at a time"
        return WebhookDelivery(1 if self.newest is None else self.newest.number + 1, first, behind, self.output)

    def planned(self, delivery: WebhookDelivery) -> None:
        self.newest, self.due = delivery, 0.0

    def taken(self) -> None:
        """Note that the receiver has taken the pending delivery."""
        assert self.newest is not None
        self.newest = msgspec.structs.replace(self.newest, confirmed=True)
        self._pause_s = PAUSE_S
        self.status = WebhookStatus(self.newest.number)

    def failed(self, reason: str, now: float, after_s: float | None = None) -> bool:
        """Note an attempt that has failed; return whether the webhook is paused now. ``after_s``: the seconds that the receiver
        asks for."""
        status = self.status
        since = now if status.failing_since is None else status.failing_since
        self.status = msgspec.structs.replace(
            status, failing_since=since, attempts=status.attempts + 1, error=reason[:1000]
        )
        pause = self._pause_s if after_s is None else min(max(after_s, self._pause_s), RETRY_AFTER_MAX_S)
        self.due, self._pause_s = now + pause, min(2 * self._pause_s, PAUSE_MAX_S)
        return now - since >= self.retry_s
