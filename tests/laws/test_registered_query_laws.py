"""Events that were answered reach registered queries exactly once, in a model of gateways, their log and queries; and each rule
that is left out breaks the law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest

from flux.eventlog.log_owner import LogOwner, PushGroup
from tests.laws.event_log_model import LawBroken, VirtualStore
from tests.laws.registered_query_model import CountingQuery, QueryRun

#: Other seeds: ``for seed in range(1000, 16000): QueryRun(seed).go(800)``.
SEEDS = 40
TURNS = 800


def test_each_answered_event_reaches_each_query_that_was_registered_before_it_once() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = QueryRun(seed)
        run.go(TURNS)
        happened += run.happened
    expected = {
        "registered", "answered after a registration", "query lost", "checkpoint", "take-over", "fenced", "power lost", "repeat",
        "segment removed",
    }  # fmt: skip
    assert {event for event, times in happened.items() if times >= 20} >= expected, happened


class AnswersBeforeItIsAReader(QueryRun):
    def registration(self, query: CountingQuery) -> Generator[None, None, None]:
        start = self.opened().skip()
        query.registered = self.turns
        for _ in range(20):
            yield
        query.noted, query.kept = start, (start, [])
        query.reader = self.opened(start)


class BeginsBehindTheNewestEventAfterALoss(QueryRun):
    def lose(self, query: CountingQuery) -> None:
        if query.registered is not None:
            query.reader, query.rows = self.opened(), list(query.kept[1])
            query.reader.skip()


class NeedsNothingOfWhatItHasRead(QueryRun):
    """A run whose queries give up events that no checkpoint has."""

    def read(self, query: CountingQuery) -> None:
        super().read(query)
        if query.reader is not None:
            query.noted = query.reader.next


class KeepsItsPlaceBeforeItsState(QueryRun):
    def checkpoint(self, query: CountingQuery) -> Generator[None, None, None]:
        if query.reader is not None:
            query.kept = query.reader.next, query.kept[1]
            yield
            query.kept = query.kept[0], list(query.rows)
            query.noted = query.kept[0]


class KeepsItsStateBeforeItsPlace(QueryRun):
    def checkpoint(self, query: CountingQuery) -> Generator[None, None, None]:
        if query.reader is not None:
            query.kept = query.kept[0], list(query.rows)
            yield
            query.kept = query.reader.next, list(query.rows)
            query.noted = query.kept[0]


class LooksAtNoGeneration(VirtualStore):
    def check(self) -> None: ...


class AnswersBeforeTheFlush(LogOwner):
    def commit(self, group: PushGroup) -> Generator[None, None, None]:
        for ticket in group.tickets:
            ticket.durable = True
        yield from super().commit(group)


@pytest.mark.parametrize(
    "make",
    [
        AnswersBeforeItIsAReader,
        BeginsBehindTheNewestEventAfterALoss,
        NeedsNothingOfWhatItHasRead,
        KeepsItsPlaceBeforeItsState,
        KeepsItsStateBeforeItsPlace,
        lambda seed: QueryRun(seed, LooksAtNoGeneration),
        lambda seed: QueryRun(seed, log=AnswersBeforeTheFlush),
    ],
    ids=[
        "answered before it is a reader", "newest event after a loss", "read is not kept", "place before state",
        "state before place", "no look at the generation", "answer before the flush",
    ],
)  # fmt: skip
def test_a_rule_that_is_left_out_breaks_the_law(make: type[QueryRun]) -> None:
    for seed in range(10 * SEEDS):
        try:
            make(seed).go(TURNS)
        except LawBroken:
            return
    pytest.fail(f"none of {10 * SEEDS} runs shows it")
