"""Broken variants of streams that are read over several feeds (design: feeds, hedged)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from flux.exchange.feed import Feed
from flux.exchange.inbound import Inbound
from flux.reach.hedging import FurtherFeeds
from flux.wire.messages import Hello, ReadsElsewhere
from flux.worker.subscriptions import Subscriptions

Patch = pytest.MonkeyPatch


def feeds_share_a_number(patch: Patch) -> None:
    """Number all messages of a stream together, over all its feeds."""
    take = Inbound.take

    def broken(self: Inbound, message: Any, *given: Any) -> Any:
        feeds = [self.feed, *self.others.values()]
        before = [feed.number for feed in feeds]
        taken = take(self, message, *given)
        came = sum(feed.number for feed in feeds) - sum(before)
        for feed, number in zip(feeds, before, strict=True):
            feed.number = number + came
        return taken

    patch.setattr(Inbound, "take", broken)


def repetitions_are_held(patch: Patch) -> None:
    """Count a message as waiting that had come over another feed before: no step ever applies it."""
    take = Inbound.take

    def broken(self: Inbound, message: Any, *given: Any) -> Any:
        repeats = self.repeats(message) and self._under(message.nonce) is not None
        taken = take(self, message, *given)
        self.held_bytes += message.nbytes * repeats
        return taken

    patch.setattr(Inbound, "take", broken)


def keeps_the_feed_of_a_dropped_replica(patch: Patch) -> None:
    """Close a further feed when its connection breaks, and not by the table that drops its replica."""
    choose = Subscriptions._choose_replicas_to_read

    def broken(self: Subscriptions, changed: Any) -> None:
        kept = {stream: dict(inbound.others) for stream, inbound in self.streams.items() if inbound.others}
        choose(self, changed)
        for stream, others in kept.items():
            inbound = self.streams[stream]
            inbound.others |= {worker: f for worker, f in others.items() if worker != inbound.feed.worker}

    patch.setattr(Subscriptions, "_choose_replicas_to_read", broken)


def tells_a_further_feed_that_it_is_not_read(patch: Patch) -> None:
    """Answer a producer of a further feed, when it greets again, as if only the replica of the first feed were read."""
    welcome = Subscriptions._welcome_replica

    def broken(self: Subscriptions, connection: Hashable, hello: Hello, inbound: Inbound) -> None:
        if hello.worker in inbound.others and inbound.others[hello.worker].connection == connection:
            ack = self._ack(inbound)
            self.answer(connection, ReadsElsewhere(*inbound.stream, self._hosted.epoch, ack.through, ack.behind))
        else:
            welcome(self, connection, hello, inbound)

    patch.setattr(Subscriptions, "_welcome_replica", broken)


def races_never_end(patch: Patch) -> None:
    """Leave the second feed of a hedged stream open."""

    def broken(self: FurtherFeeds, inbound: Inbound, winner: Feed, now: float) -> None:
        self._streams[inbound.stream].since = now

    patch.setattr(FurtherFeeds, "_decide", broken)


def repetitions_cost_nothing(patch: Patch) -> None:
    """Open second feeds at any cost of the earlier ones."""

    def broken(self: FurtherFeeds, worker: int, nbytes: float) -> None:
        self.budget = 1.0

    patch.setattr(FurtherFeeds, "_save", broken)
