"""``Journal.highest``: a query that goes on begins above every number that is kept (design: vault)."""

from __future__ import annotations

import pytest
from kept import LARGE, Memory, checkpoint, opened, orders, segments_of, standby, take

from flux.vault.journal import Journal


def test_nothing_is_highest_where_nothing_is_kept() -> None:
    assert Journal(Memory()).highest == -1
    store = Memory()
    opened(store)
    assert Journal(store).highest == -1


@pytest.mark.parametrize("size", [0, LARGE])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    "what", ["epoch", "term of orders", "term of a checkpoint", "incarnation of a stream", "fence"]
)
def test_no_number_that_is_kept_is_above_highest(what: str, compact: bool, size: int) -> None:
    store = Memory()
    journal = opened(store)
    journal.see(2)
    standby(journal).on_orders(orders(1, 0, 2, committed=2))
    match what:
        case "epoch":
            journal.see(40)
        case "term of orders":
            standby(journal).on_orders(orders(40, 2, 0))
        case "term of a checkpoint":
            take(journal, checkpoint(1, 40, 0, size=size))
        case "incarnation of a stream":
            take(journal, checkpoint(1, 1, 0, incarnation=40, size=size))
        case "fence":
            standby(journal).fence(40)
    with segments_of(1 if compact else 1 << 20):
        journal.flush()
    assert (journal.highest, Journal(store).highest) == (40, 40)
    assert opened(store).highest == 40


def test_a_number_stays_known_when_what_had_it_is_gone() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 3, committed=3))
    take(journal, checkpoint(1, 1, 0, incarnation=40, size=LARGE))
    take(journal, checkpoint(2, 1, 1, incarnation=3))
    journal.see(5)
    journal.flush()
    with segments_of(1):
        take(journal, checkpoint(3, 1, 2, incarnation=3))
        journal.flush()
    assert Journal(store).highest == 40
