"""Planned and confirmed deliveries of a webhook, on disk (design: webhook-deliveries).

They are records of an event log: one owner at a time, and a look for a later one after each flush. So a gateway that was
paused finds out before it sends a delivery that another one has not planned.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from flux.eventlog.log_owner import LogLimits, LogOwner
from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import LogStore, open_log
from flux.eventlog.records import EventRecord, PushName
from flux.gateway.webhooks.deliveries import WebhookDelivery
from flux.vault.location import Place

#: Little is kept: the newest record alone counts.
LIMITS = LogLimits(segment_bytes=64 << 10, retain_us=0, retain_bytes=0)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WebhookDelivery)


class DeliveryLog:
    """The deliveries of one webhook. After an error it is of no use: open the place again."""

    def __init__(self, store: LogStore, where: str) -> None:
        self._store, self._where = store, where
        self._log = LogOwner(store, where, LIMITS)
        #: The newest record; None: there is none.
        self.newest: WebhookDelivery | None = None

    def open(self) -> Generator[None, None, None]:
        """Read the newest record that earlier owners have left."""
        yield from self._log.open()
        if self._log.next:
            self.newest = newest_delivery(self._store, self._where, self._log.next - 1)
        yield

    def note(self, delivery: WebhookDelivery, now_us: int) -> Generator[None, None, None]:
        """Write a planned or confirmed delivery. TakenOver: another gateway has the webhook; nothing may be sent then."""
        self._log.offer(memoryview(_encoder.encode(delivery)), 1, PushName(), now_us)
        yield from self._log.commit(self._log.take())
        self.newest = delivery
        yield from self._log.tidy(now_us, self._log.next - 1)

    def check(self) -> None:
        """Raise TakenOver if another gateway has the webhook."""
        self._store.check()


def newest_delivery(store: LogStore, where: str, position: int) -> WebhookDelivery | None:
    """Return the newest record from a position on; None: there is none."""
    reader = LogReader(store, where, position)
    found: list[EventRecord] = []
    while records := reader.read():
        found = records
    return _decoder.decode(found[-1].batch) if found else None


def written_delivery(place: Place, where: str) -> WebhookDelivery | None:
    """Return the newest delivery that the gateway of a webhook has written down; None: there is none, or the webhook is being
    removed."""
    store = open_log(place)
    try:
        newest = LogReader(store, where).newest()
        return newest_delivery(store, where, max(newest - 1, 0))
    except FileNotFoundError:
        return None
    finally:
        store.close()
