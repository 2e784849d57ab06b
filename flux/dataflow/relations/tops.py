"""The best rows of each key, and the last one: ``flux.top`` and ``flux.last`` (design: best-rows)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

import flux
from flux.arguments import checked, key_columns
from flux.dataflow.flow import node
from flux.dataflow.relations.ranking import (
    RankFlow,
    Ranking,
    RankInput,
    ResolvedRanking,
    ToOrder,
    check_ttl,
    needed_key,
    positive,
    ranked,
)
from flux.dataflow.row_operators import CHANGES, ONCE
from flux.errors import UsageError
from flux.operators.schema import positions
from flux.windows.durations import words
from flux.windows.window import SessionWindow, Window

#: The most rows of a key. All of them are given with each change of the first one.
TOP_MAX = 100_000


@dataclass(frozen=True)
class TopRows(Ranking):
    """A call of ``flux.top`` or ``flux.last``."""

    called: str
    key: tuple[str, ...]
    #: Text or Columns.
    by: Any
    limit: int = 1
    ties: bool = False
    #: Rows are ranked within windows: those that they come with, if it is no ``Window``.
    within: Window | bool = False
    #: Microseconds; None: keys stay for ever.
    ttl: int | None = None

    @property
    def gives(self) -> str:  # type: ignore[override]
        return ONCE if self.within else CHANGES

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.called.removeprefix("flux.")

    def resolved(self, inputs: Sequence[RankInput], to_order: ToOrder | None) -> ResolvedRanking:
        from flux.ranks.top import Last, RankSpec, Top, TopOfWindow  # it loads kernels, which importing flux does not

        (given,) = inputs
        if to_order is None:
            raise UsageError(f"{self.called}: by=... is resolved by Spark, and there is no session")
        order = to_order(given.schema, self.by)
        window, time = None, None
        if isinstance(self.within, Window):
            window = self._own_window(given, self.within)
        elif self.within:
            _check_windows(self.called, given)
        if self.ttl is not None and given.origin_times:
            time = given.time(self.called)
            check_ttl(self.called, self.ttl, given)
        last, by = self.name == "last", order.by
        if last:
            by = tuple(replace(each, descending=not each.descending, nulls_last=not each.nulls_last) for each in by)
        spec = RankSpec(self.limit, by, tuple(given.schema.names), self.ties, window, self.ttl, time, last)
        kind = Last if last else TopOfWindow if self.within else Top
        return ResolvedRanking(partial(kind, spec), self.key, (order.before,))

    def _own_window(self, given: RankInput, window: Window) -> Window:
        """Return the window with the column as the rows have it. UsageError: it is not the event time."""
        found = positions(given.schema, str(window.column))
        if len(found) != 1 or not pa.types.is_timestamp(given.schema.field(found[0]).type):
            there = ", ".join(given.schema.names)
            raise UsageError(
                f"{self.called}: windows are of a column of times, got {window.column!r}; there are {there}"
            )
        name = given.schema.names[found[0]]
        if given.origin_times and name not in given.times:
            raise UsageError(
                f"{self.called}: windows close by the watermark, which is that of {given.time(self.called)!r} and not of {name!r}"
            )
        return replace(window, column=name)

    def __repr__(self) -> str:
        said = [] if self.name == "last" else [str(self.limit)]
        said += [f"key={list(self.key)}"] * bool(self.key) + [f"by={self.by!r}"]
        said += ["ties=True"] * self.ties
        if self.within:
            said.append(f"window={self.within}" if isinstance(self.within, Window) else "within='window'")
        said += [] if self.ttl is None else [f"ttl={words(self.ttl)!r}"]
        return f"{self.name}({', '.join(said)})"


def _check_windows(called: str, given: RankInput) -> None:
    """Raise UsageError unless rows come with windows."""
    names = given.schema.names
    if "window_start" in names and "window_end" in names:
        return
    type_ = given.schema.field("window").type if names.count("window") == 1 else pa.null()
    if pa.types.is_struct(type_) and {"start", "end"} <= {field.name for field in type_}:
        return
    raise UsageError(
        f"{called}: within='window' ranks rows that come with their windows, in a column window or in window_start and "
        f"window_end, as those of groupBy(F.window('ts', '10 minutes'), ...).agg(...); there are {', '.join(names)}. Rows with "
        "a time of their own get windows by window=flux.window('ts', '10 minutes')"
    )


@checked("flux.top")
def top(
    flow: Any,
    n: int,
    *,
    by: Any,
    key: Any = None,
    within: str | None = None,
    window: Any = None,
    ties: bool = False,
) -> RankFlow:
    """Give the first ``n`` rows of each key in an order, with their ``rank``, counted from 1.

    Rows that are equal in the order are ranked by all other columns, ascending: a rank never depends on the order in which rows
    arrive.

    within="window"  ranks the rows of each window that an earlier stage gives, in append mode. They are given once, when the
                     watermark has passed the window, and have its event time
    window           ``flux.window("ts", "10 minutes")`` ranks rows with a time of their own in the same way, and adds the columns
                     ``window_start`` and ``window_end``
    (neither)        ranks all rows until now (update mode): after each step come the rows whose rank was another row's before, so
                     a reader that keeps the last row of each key and rank has the first ``n``. A row that has fallen out is not
                     given again: another one has its rank
    by               as in Spark's ORDER BY: text, such as "price DESC NULLS LAST, ts", or Columns
    key              column or columns; None: all rows are ranked together, in one partition
    ties             within a window: rows that are equal in the order share a rank, and all of them with a rank through ``n`` are
                     given (RANK). Without it each row has a rank of its own (ROW_NUMBER)"""
    called = "flux.top"
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= TOP_MAX:
        raise UsageError(f"{called}: n must be a whole number from 1 to {TOP_MAX:,}, got {n!r:.100}")
    _check_by(called, by)
    if within is not None and not (isinstance(within, str) and within == "window"):  # a Column has no truth
        raise UsageError(f"{called}: within must be 'window', or left out; got {within!r:.100}")
    if not isinstance(ties, bool):
        raise UsageError(f"{called}: ties must be True or False, got {ties!r:.100}")
    if ties and within is None and window is None:
        raise UsageError(
            f"{called}: ties=True needs a window (within='window' or window=...): rows that share a rank may fall out together, "
            "and a reader of changes would not see it. Without ties each row has a rank of its own"
        )
    made: Window | bool = within is not None if window is None else _declared_window(called, window, within)
    return ranked(TopRows(called, key_columns(key), by, n, ties, made), node(flow))


def _declared_window(called: str, window: Any, within: str | None) -> Window:
    if within is not None:
        raise UsageError(
            f"{called}: within='window' takes the windows of rows, and window=... makes windows of a time; give one of them"
        )
    if not isinstance(window, Window | SessionWindow):
        found = flux._window_key(window)
        if found is None or not (found.time is None or isinstance(found.time, str)):
            raise UsageError(f"{called}: window must be as in flux.window('ts', '10 minutes'), got {window!r:.100}")
        window = replace(found.window, column=found.time)
    if not isinstance(window, Window) or window.by_clock:
        raise UsageError(
            f"{called}: window must be flux.window(...) of a column of times: sessions differ by key, and no watermark ends "
            f"windows of the clock; got {window}"
        )
    return window


def _check_by(called: str, by: Any) -> None:
    nothing = isinstance(by, str | list | tuple) and not (by.strip() if isinstance(by, str) else by)
    if by is None or nothing:
        raise UsageError(f"{called}: by says the order of rows, as in by='price DESC, ts'; got {by!r}")


@checked("flux.last")
def last(flow: Any, *, key: Any, by: Any, ttl: str | None = None) -> RankFlow:
    """Give the last row of each key in an order, whenever it is another one than before the step (update mode).

    Rows that are equal in the order are ordered by all other columns, so the last row does not depend on the order of arrival.

    key  column or columns
    by   as in Spark's ORDER BY: text, such as "ts", or Columns
    ttl  a row more than this later than the newest one of its key begins the key anew: it is the last row, whatever ``by`` says.
         By event time, and rows without one are left out and counted; or by the clock, where there is none. The last row is the
         same in every run if each key comes in one source partition. None: keys stay for ever, and all runs end with the same
         rows"""
    called = "flux.last"
    names = needed_key(key, f"{called}: key must name the columns of which the last row is wanted", "key='user'")
    _check_by(called, by)
    kept = None if ttl is None else positive(ttl, f"{called}, ttl")
    return ranked(TopRows(called, names, by, ttl=kept), node(flow))
