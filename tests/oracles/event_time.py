"""Answers about event time by plain SQL in DuckDB, over all rows at once: an oracle that shares no line with the product
(design: late-rows, windows).

Late rows follow from the numbers of rows alone: a row is late if its time is below the greatest time of the rows before it in its
source partition, less the delay. All other rows count, whatever watermark their windows were closed by. So the oracle knows
neither batches nor watermarks.

Times are microseconds since the epoch. Rows without a time are not late, and belong to no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa

#: The columns that the oracle adds to those of the rows.
AT, LATE = "time_us", "is_late"

_JUDGED = """
create or replace temp table judged as
select *, coalesce({at} < max({at}) over before - {delay}::hugeint, false) as {late}
from given
window before as (partition by "{partition}" order by "{number}" rows between unbounded preceding and 1 preceding)
"""
# A window begins at the last start before the time, or some slides earlier. The remainder has the sign of the time in SQL.
_WINDOWS = """
with begun as (
    select *, {at} - ((({at} - {first}) % {slide}) + {slide}) % {slide} - back * {slide} as window_start
    from judged, range({overlaps}) as slides(back)
    where not {late} and {at} is not null
)
select {keys} window_start, window_start + {size} as window_end, {aggregates}
from begun where {at} < window_start + {size} group by all
"""
# A session begins with each row that is further away from the row before it than the gap.
_SESSIONS = """
with rows_of_key as (
    select *, coalesce({at} - lag({at}) over in_order > {gap}, true) as begins
    from judged where not {late} and {at} is not null
    window in_order as ({partition_by} order by {at}, "{partition}", "{number}")
),
numbered as (
    select *, sum(begins::int) over ({partition_by} order by {at}, "{partition}", "{number}" rows unbounded preceding) as session
    from rows_of_key
)
select {keys} min({at}) as window_start, max({at}) + {gap} as window_end, {aggregates}
from numbered group by {keys} session
"""


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """One for all oracles: to make one takes longer than most questions."""
    return duckdb.connect(config={"threads": 1})


class EventTimeOracle:
    """The rows of a source with event time, and the answers to questions about them. Answers are sorted tuples."""

    def __init__(
        self, rows: pa.Table, time: str, delay_us: int, partition: str = "partition", number: str = "number"
    ) -> None:
        """``rows``: each row with its source partition and its number there, in whatever order. ``time``: the column with the
        times, a timestamp."""
        self._names = {"at": AT, "late": LATE, "partition": partition, "number": number}
        self._columns = rows.column_names
        self._sql = _database().cursor()  # with temporary tables of its own
        moment = rows.column(time).cast(pa.timestamp("us", rows.schema.field(time).type.tz), safe=False)
        self._sql.register("given", rows.append_column(AT, moment.cast(pa.int64())))
        self._sql.execute(_JUDGED.format(**self._names, delay=delay_us))

    def late(self, *columns: str) -> list[tuple[Any, ...]]:
        """Return these columns of the late rows; none named: all."""
        return self._asked(f"select {_listed(columns or self._columns)} from judged where {LATE}")

    def on_time(self, *columns: str) -> list[tuple[Any, ...]]:
        """Return these columns of the other rows; none named: all."""
        return self._asked(f"select {_listed(columns or self._columns)} from judged where not {LATE}")

    def windows(
        self, keys: Sequence[str], aggregates: str, size_us: int, slide_us: int = 0, start_us: int = 0
    ) -> list[tuple[Any, ...]]:
        """Return the groups of tumbling windows, or hopping ones with ``slide_us``: keys, start, end, aggregates (SQL)."""
        slide = slide_us or size_us
        return self._asked(
            _WINDOWS.format(
                **self._names, keys=_before(keys), aggregates=aggregates, size=size_us, slide=slide, first=start_us,
                overlaps=-(-size_us // slide),
            )
        )  # fmt: skip

    def sessions(self, keys: Sequence[str], aggregates: str, gap_us: int) -> list[tuple[Any, ...]]:
        """Return the sessions of each key: keys, time of the first row, time of the last plus the gap, aggregates (SQL)."""
        by = f"partition by {_listed(keys)}" if keys else ""
        return self._asked(
            _SESSIONS.format(**self._names, keys=_before(keys), aggregates=aggregates, gap=gap_us, partition_by=by)
        )

    def _asked(self, query: str) -> list[tuple[Any, ...]]:
        return sorted(self._sql.execute(query).fetchall(), key=repr)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


def _before(keys: Sequence[str]) -> str:
    return "".join(f'"{key}", ' for key in keys)
