"""The laws of webhooks hold in a model of their owners and receivers, and each rule that is left out breaks one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator

import msgspec
import pytest

from flux.eventlog.log_store import SegmentId
from flux.eventlog.records import DamagedLog
from flux.gateway.webhooks.deliveries import DeliveryCourse, WebhookDelivery
from flux.gateway.webhooks.delivery_log import DeliveryLog
from tests.laws.event_log_model import LawBroken, VirtualStore
from tests.laws.webhook_model import WebhookRun

SEEDS = 40


def test_a_receiver_that_drops_numbers_gets_each_result_once_and_in_order() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = WebhookRun(seed)
        run.go()
        happened += run.happened
    expected = {
        "take-over", "kill", "power lost", "fenced", "attempt failed", "sent again by the next owner",
        "dropped by the receiver", "results",
    }  # fmt: skip
    assert {event for event, times in happened.items() if times >= 10} >= expected, happened


class LooksAtNoGeneration(VirtualStore):
    def check(self) -> None: ...


class TakesTheFirstRecord(DeliveryLog):
    """A log whose next owner does not find the newest delivery."""

    def open(self) -> Generator[None, None, None]:
        yield from super().open()
        self.newest = None


class KeepsNoRecord(DeliveryLog):
    """A log that loses the record of the newest delivery with its segment."""

    def note(self, delivery: WebhookDelivery, now_us: int) -> Generator[None, None, None]:
        yield from super().note(delivery, now_us)
        yield from self._log._begin()
        yield from self._log.tidy(now_us, None)


class TakesPlannedForConfirmed(DeliveryCourse):
    def __post_init__(self) -> None:
        if self.newest is not None:
            self.newest = msgspec.structs.replace(self.newest, confirmed=True)
        super().__post_init__()


class SendsMoreTheNextTime(DeliveryCourse):
    """A course in which an unconfirmed delivery gets another end when it is sent again."""

    def failed(self, reason: str, now: float, after_s: float | None = None) -> bool:
        assert self.newest is not None
        if self.newest.next[0] - self.newest.first[0] > 1:
            self.newest = WebhookDelivery(
                self.newest.number, self.newest.first, (self.newest.next[0] - 1,), "the output"
            )
        return super().failed(reason, now, after_s)


class FlushesNothing(VirtualStore):
    def sync(self) -> None: ...

    def secure(self, segment: SegmentId) -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: WebhookRun(seed, LooksAtNoGeneration),
        lambda seed: WebhookRun(seed, FlushesNothing),
        lambda seed: WebhookRun(seed, log=TakesTheFirstRecord),
        lambda seed: WebhookRun(seed, log=KeepsNoRecord),
        lambda seed: WebhookRun(seed, course=TakesPlannedForConfirmed),
        lambda seed: WebhookRun(seed, course=SendsMoreTheNextTime),
        lambda seed: WebhookRun(seed, plans_first=False),
    ],
    ids=[
        "no look at the generation", "no flush", "newest delivery not read", "newest delivery removed",
        "planned taken for confirmed", "another content the next time", "sent before it is on disk",
    ],
)  # fmt: skip
def test_a_rule_that_is_left_out_breaks_a_law(make: Callable[[int], WebhookRun]) -> None:
    for seed in range(10 * SEEDS):
        try:
            make(seed).go()
        except (LawBroken, DamagedLog):
            return
    pytest.fail(f"none of {10 * SEEDS} runs shows it")
