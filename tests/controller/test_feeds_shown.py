"""Feeds are shown with the workers that brought rows first, and their price (design: feeds)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from cluster import Cluster

from controller.report.feeds import OVER_S, FeedRaces, feeds, told_feeds
from flux.wire.statistics import FeedRows

AT = datetime(2026, 11, 27, 12, 1, 7).timestamp()


def shown(*rows: FeedRows) -> list[dict[str, Any]]:
    made = Cluster()
    made.core.members.workers[2].stats = {"feeds": list(rows)} if rows else {}
    return feeds(made.core.members)


def test_a_worker_without_feeds_is_not_shown() -> None:
    assert shown() == []


def test_the_feeds_of_a_worker_are_told_in_one_line() -> None:
    entries = shown(FeedRows(0, 8120, 200_000, 5, 0), FeedRows(1, 310, 0, 14, 9))
    assert entries[1] == {"worker": 2, "from": 1, "firsts": 310, "repeatedBytes": 0, "secondFeeds": 14, "won": 9}
    assert list(told_feeds(entries)) == [
        "worker 2 reads over several feeds: first came 8,120 from worker 0, 310 from worker 1; 19 second feeds, 9 won; "
        "0.2 MiB came twice"
    ]


def test_races_that_second_feeds_win_are_one_entry_of_the_history_until_there_are_none_for_a_while() -> None:
    races = FeedRaces()
    for seconds, won in enumerate([0, 2, 5, 5]):
        races.note(shown(FeedRows(1, 10, 0, 9, won)), AT + seconds)
    assert list(races.over(AT + 2 + OVER_S)) == []
    assert list(races.over(AT + 2.5 + OVER_S)) == [
        (
            "second feeds brought rows to worker 2 first 5 times from 12:01:08 to 12:01:09: links from the replicas that it "
            "read before stood still",
            1.0,
        )
    ]
    races.note(shown(FeedRows(1, 10, 0, 9, 5)), AT + 20)
    assert list(races.over(AT + 40)) == []
    races.note(shown(FeedRows(1, 10, 0, 9, 6)), AT + 41)
    (text, _) = next(races.over(AT + 50))
    assert "first 1 time from" in text
