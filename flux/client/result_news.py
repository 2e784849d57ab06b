"""News of a result, as a client that follows it gets them: stable rows, and tentative ones with their end (design:
output-tentative).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from flux.client.event_stream import ServerEvent
from flux.errors import UsageError

_END = datetime.max.replace(tzinfo=UTC)


class ResultRows(NamedTuple):
    """Rows of the result of a query."""

    rows: list[dict[str, Any]]
    #: The place behind these rows, with which the next call goes on.
    cursor: str
    #: Rows before these that were removed after ``retain``: "partition", the "first" of their positions, and the "next" one
    #: behind.
    missed: list[dict[str, int]] = []
    #: With ``rows(..., tentative=True)``: all rows that may still change.
    tentative: list[TentativeResults] = []


class TentativeResults(NamedTuple):
    """Rows that may still change: those of event time before ``through``, beyond earlier ones."""

    rows: list[dict[str, Any]]
    partition: int
    #: None: the end of time.
    through: datetime | None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> TentativeResults:
        """Return the rows of an answer or an event."""
        return cls(content["rows"], content["partition"], _time(content["through"]))


class UndoneResults(NamedTuple):
    """End of all tentative rows of a partition with ``start < through <= end``; None: without that bound. May come twice."""

    partition: int
    start: datetime | None
    end: datetime | None

    def reaches(self, shown: TentativeResults) -> bool:
        """Return whether rows are void."""
        if shown.partition != self.partition:
            return False
        through = shown.through or _END
        return (self.start is None or self.start < through) and (self.end is None or through <= self.end)


class CorrectedResults(NamedTuple):
    """End of a failure: all rows of a partition before ``through`` are stable."""

    partition: int
    through: datetime | None


#: News of a result, in order.
FollowedNews = ResultRows | TentativeResults | UndoneResults | CorrectedResults


def tentative_of(event: ServerEvent) -> FollowedNews | None:
    """Return the news of an event about tentative rows; None: it is about something else."""
    if event.kind not in ("tentative", "undo", "corrected"):
        return None
    content = json.loads(event.data)
    if event.kind == "tentative":
        return TentativeResults.of(content)
    if event.kind == "undo":
        return UndoneResults(content["partition"], _time(content["start"]), _time(content["end"]))
    return CorrectedResults(content["partition"], _time(content["through"]))


class ResultView:
    """Table with one row for each key, made of all news of a result, stable and tentative ones::

        view = ResultView(["window", "site"])
        for news in client.follow("per_site", tentative=True):
            view.take(news)
            show(view.rows())

    key       names of the columns that tell rows apart
    max_rows  stable rows that are kept; beyond it the oldest are forgotten. The gateway bounds the tentative ones

    The row of a key is its newest tentative one that stands, or else its newest stable one."""

    def __init__(self, key: str | Sequence[str], *, max_rows: int = 100_000) -> None:
        self._key = [key] if isinstance(key, str) else list(key) if isinstance(key, Iterable) else []
        if not self._key or not all(isinstance(name, str) for name in self._key) or max_rows < 1:
            raise UsageError(
                f"ResultView: expected names of key columns and max_rows above zero, got {key!r:.100}, {max_rows}"
            )
        self._max_rows = max_rows
        self._stable: dict[str, dict[str, Any]] = {}
        self._shown: list[TentativeResults] = []

    def take(self, news: FollowedNews) -> None:
        """Follow news. UsageError: a row lacks a key column."""
        if isinstance(news, ResultRows):
            for row in news.rows:
                key = self._key_of(row)
                self._stable.pop(key, None)
                self._stable[key] = row
            while len(self._stable) > self._max_rows:
                del self._stable[next(iter(self._stable))]
        elif isinstance(news, TentativeResults):
            for row in news.rows:
                self._key_of(row)
            self._shown.append(news)
        elif isinstance(news, UndoneResults):
            self._shown = [each for each in self._shown if not news.reaches(each)]

    def rows(self) -> list[dict[str, Any]]:
        """Return the row of each key, with a member "tentative" that tells whether it may still change."""
        found = {key: {**row, "tentative": False} for key, row in self._stable.items()}
        for shown in sorted(self._shown, key=lambda each: each.through or _END):
            found |= {self._key_of(row): {**row, "tentative": True} for row in shown.rows}
        return list(found.values())

    def _key_of(self, row: Mapping[str, Any]) -> str:
        try:
            return json.dumps([row[name] for name in self._key])
        except KeyError as error:
            raise UsageError(f"ResultView: no column {error} in {', '.join(row)}") from error


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
