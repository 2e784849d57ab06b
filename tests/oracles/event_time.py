"""Answers about event time by plain SQL in DuckDB, over all rows at once: an oracle that shares no line with the product
(design: late-rows, windows).

Late rows follow from the numbers of rows alone: a row is late if its time is below the greatest time of the rows before it in its
source partition, less the delay. All other rows count, under any watermark that closed their windows. So the oracle knows neither
batches nor watermarks. Joins, duplicates and ranks follow from these rows, too (design: joins, duplicates, ranks).

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
#: The column with the time of the other row in a join.
OTHER_AT = "other_us"

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
# The first row of each key, and then each next row that is further behind the one chosen before than the time to live.
_ONCE = """
with recursive timely as (
    select * from judged where not {late} and {at} is not null
),
chosen as (
    select {keys} min("{number}") as place, arg_min({at}, "{number}") as since from timely group by all
    union all
    select {keys} min("{number}"), arg_min({at}, "{number}") from chosen join timely using ({names})
    where "{number}" > place and {at} > since + {ttl} group by all
)
select {columns} from timely join chosen using ({names}) where "{number}" = place
"""
_JOINED = """
create or replace temp table joined as
select mine.*, others.* exclude ("{key}", {at}, {late}), others.{at} as {other_at}
from judged mine left join others on mine."{key}" = others."{key}" and mine.{at} between others.{at} and others.{at} + {within}
where not mine.{late}
"""
# Ranks of rows in tumbling windows of their own time.
_BEST = """
with begun as (
    select *, {at} - (({at} % {size}) + {size}) % {size} as window_start from joined where {at} is not null
)
select {columns}, window_start, window_start + {size} as window_end,
    row_number() over (partition by {keys} window_start order by {by}) as rank
from begun where window_start + {size} <= {final} qualify rank <= {limit}
"""
# The newest row in a join, and of several the last one by the columns of ``by``.
_AS_OF = """
select {columns} from joined where coalesce({at} < {final}, true)
qualify row_number() over (partition by "{partition}", "{number}" order by {other_at} desc, {by}) = 1
"""


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """Open the one database of all oracles: to open one takes longer than most questions."""
    return duckdb.connect(config={"threads": 1})


class EventTimeOracle:
    """The rows of a source with event time, and the answers to questions about them. Answers are sorted tuples."""

    def __init__(
        self, rows: pa.Table, time: str, delay_us: int, partition: str = "partition", number: str = "number"
    ) -> None:
        """Judge all rows. ``rows``: each row with its source partition and its number there, in any order. ``time``: the column
        with the times, a timestamp."""
        self._names = {"at": AT, "late": LATE, "partition": partition, "number": number}
        self._columns = rows.column_names
        self._sql = _database().cursor()  # has its own temporary tables
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

    def once(self, keys: Sequence[str], ttl_us: int, *columns: str) -> list[tuple[Any, ...]]:
        """Return these columns of the rows that are no duplicates by their keys. The partition is one of the keys: rows are in
        the order of their numbers."""
        assert self._names["partition"] in keys
        names = {"keys": _before(keys), "names": _listed(keys), "columns": _listed(columns)}
        return self._asked(_ONCE.format(**self._names, **names, ttl=ttl_us))

    def join(self, other: EventTimeOracle, key: str, within_us: int) -> None:
        """Join each row that is not late with the rows of another source that have its key and are at most ``within_us`` older.
        Rows without a partner stay alone. Other columns have different names on both sides."""
        self._sql.register("others", other._sql.sql(f"select * from judged where not {LATE}").to_arrow_table())
        self._sql.execute(_JOINED.format(**self._names, key=key, within=within_us, other_at=OTHER_AT))

    def joined(self, final_us: int, *columns: str) -> list[tuple[Any, ...]]:
        """Return these columns of the joined rows: pairs, and rows alone that are older than ``final_us``, the watermark of the
        other source."""
        alone = f"{OTHER_AT} is null and {AT} >= {final_us}"
        return self._asked(f"select {_listed(columns)} from joined where not coalesce({alone}, false)")

    def as_of(self, final_us: int, by: str, *columns: str) -> list[tuple[Any, ...]]:
        """Return these columns of each row that is older than ``final_us``, with the newest row that it was joined with;
        ``by``: the order of rows of one time (SQL)."""
        names = {"columns": _listed(columns), "other_at": OTHER_AT}
        return self._asked(_AS_OF.format(**self._names, **names, final=final_us, by=by))

    def best(
        self, keys: Sequence[str], size_us: int, by: str, limit: int, final_us: int, *columns: str
    ) -> list[tuple[Any, ...]]:
        """Return these columns of the first joined rows of each key in each tumbling window, by an order (SQL), in windows that
        end at ``final_us`` or before; with the start and the end of the window, and their ranks."""
        names = {"keys": _before(keys), "columns": _listed(columns)}
        return self._asked(_BEST.format(**self._names, **names, size=size_us, by=by, limit=limit, final=final_us))

    def _asked(self, query: str) -> list[tuple[Any, ...]]:
        return sorted(self._sql.execute(query).fetchall(), key=repr)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


def _before(keys: Sequence[str]) -> str:
    return "".join(f'"{key}", ' for key in keys)
