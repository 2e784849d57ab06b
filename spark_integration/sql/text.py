"""Places in the text of a query, and errors that name them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flux.errors import UsageError

#: The most characters of a part that an error shows.
SHOWN_MAX = 60
#: A place as Spark's messages name it: a line from 1 and a position from 0.
_PLACE = re.compile(r"[;(]? ?\bline (\d+),? pos (\d+)\)?")

_NEAR = re.compile(r"at or near '(.+?)'")
_STATE = re.compile(r"\s*SQLSTATE: \w+")


class QueryText:
    """The text of a query. Lines and positions count from 1."""

    def __init__(self, text: str) -> None:
        self.text = text

    def refused(self, node: Any, reason: str) -> UsageError:
        """Make an error about a node of Spark's, at its place."""
        start, stop = _span(node)
        return self.refused_at(start, reason, stop)

    def refused_at(self, start: int | None, reason: str, stop: int | None = None) -> UsageError:
        """Make an error about the characters from ``start`` to ``stop``, the last one included; None: the place is not known."""
        if start is None or not 0 <= start <= len(self.text):
            return UsageError(f"flux.sql: {reason}")
        line = self.text.count("\n", 0, start) + 1
        position = start - self.text.rfind("\n", 0, start)
        part = " ".join(self.text[start : start + SHOWN_MAX if stop is None else stop + 1].split())
        shown = part if len(part) <= SHOWN_MAX else f"{part[:SHOWN_MAX]}..."
        where = repr(shown) if shown else "the end"
        return UsageError(f"flux.sql, line {line}, position {position}, at {where}: {reason}")

    def of_spark(self, error: Any, node: Any = None) -> UsageError:
        """Make an error of one of Spark's parser or analyser, at the place that Spark names, or else at that of a node."""
        told = str(error).strip().split("\n")[0]
        start, stop = _context(error)
        named = _PLACE.search(told)
        if start is None and named is not None:
            lines = self.text.split("\n")
            before = lines[: int(named.group(1)) - 1]
            start = sum(len(line) + 1 for line in before) + int(named.group(2))
        near = _NEAR.search(told)
        if (
            start is None and near is not None and self.text.count(near.group(1)) == 1
        ):  # of extra input Spark tells the word alone
            start = self.text.index(near.group(1))
        if start is None and node is not None:
            start, stop = _span(node)
        return self.refused_at(start, _STATE.sub("", _PLACE.sub("", told)).strip().rstrip(";"), stop)

    @contextmanager
    def at(self, node: Any) -> Iterator[None]:
        """Add the place of a node to the UsageErrors of the fluent layer."""
        try:
            yield
        except UsageError as error:
            raise self.refused(node, error.summary) from error


def _span(node: Any) -> tuple[int | None, int | None]:
    """Return the first and the last character of a node of Spark's."""
    if node.getClass().getSimpleName() == "UnresolvedAlias":  # its own place is that of the whole text
        node = node.child()
    origin = node.origin()
    start, stop = (each.get() if each.isDefined() else None for each in (origin.startIndex(), origin.stopIndex()))
    return start, stop


def _context(error: Any) -> tuple[int | None, int | None]:
    """Return the part of the text that an error of Spark's is about."""
    contexts: Any = error.getQueryContext() or ()
    for each in contexts:
        if each.contextType().name == "SQL":
            return each.startIndex(), each.stopIndex()
    return None, None
