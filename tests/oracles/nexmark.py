"""Nexmark's 23 queries as plain SQL in DuckDB, over all events at once: an oracle that shares no line with the product, and
with the queries nothing but the order of their columns.

Late rows follow from the numbers of rows alone, as in ``event_time``. All others count.

Ties, which Nexmark leaves open, are decided by all columns that a query gives. q7 takes the bids before the end of a window. q6
is as in Beam: the mean of the last ten auctions of a seller that have closed, by the time of their end. The windows of q12 are
those of the clock, so only its sums by bidder are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa

#: Microseconds by which an event may be late.
DELAY_US = 4_000_000
KINDS = {
    "person": "id, name, emailAddress, creditCard, city, state, dateTime, extra",
    "auction": "id, itemName, description, initialBid, reserve, dateTime, expires, seller, category, extra",
    "bid": "auction, bidder, price, channel, url, dateTime, extra",
}
_JUDGED = """
create or replace temp table judged as
select *, coalesce(dateTime < max(dateTime) over before - to_microseconds({delay}), false) as is_late
from given
window before as (partition by "partition" order by "number" rows between unbounded preceding and 1 preceding)
"""


@dataclass(frozen=True)
class Answer:
    """The answer to one query."""

    sql: str
    #: For a query in update mode: the part of SQL that takes the last rows out of its whole output. Counts only grow, and a
    #: rank only gets better bids.
    last: str = ""
    #: The compared columns, in place of all columns of the output.
    compared: str = "*"


_PLACED = "auction a join bid b on a.id = b.auction and b.dateTime between a.dateTime and a.expires"
_WINNING = f"""
    select a.id, a.itemName, a.description, a.initialBid, a.reserve, a.dateTime, a.expires, a.seller, a.category, a.extra,
        b.auction, b.bidder, b.price, b.dateTime as bid_dateTime, b.extra as bid_extra
    from {_PLACED} qualify row_number() over (partition by a.id order by b.price desc, b.dateTime, b.bidder, b.extra) = 1
"""
_HOPS = """
    select auction, count(*) as num, time_bucket(interval 2 seconds, dateTime) - to_seconds(2 * back) as starttime
    from bid, range(5) as slides(back) group by auction, starttime
"""
_RANKS = {
    "total": "true",
    "rank1": "price < 10000",
    "rank2": "price between 10000 and 999999",
    "rank3": "price >= 1000000",
}
_COUNTS = ", ".join(f"count(*) filter ({ranked}) as {name}_bids" for name, ranked in _RANKS.items())
_DISTINCT = ", ".join(
    f"count(distinct {column}) filter ({ranked}) as {name}_{column}s"
    for column in ("bidder", "auction")
    for name, ranked in _RANKS.items()
)
_DAY, _MINUTE = "strftime(dateTime, '%Y-%m-%d') as day", "strftime(dateTime, '%H:%M')"
_EURO = "(0.908 * price::decimal(20, 0))::decimal(24, 3)"


def _newest(*keys: str, by: str = "total_bids desc") -> str:
    return f"qualify row_number() over (partition by {', '.join(keys)} order by {by}) = 1"


_LAST_BID = _newest("bidder", "auction", by="dateTime desc, price desc, channel desc, url desc, extra desc")
ANSWERS = {
    "q0": Answer("select auction, bidder, price, dateTime, extra from bid"),
    "q1": Answer(f"select auction, bidder, {_EURO} as price, dateTime, extra from bid"),
    "q2": Answer("select auction, price from bid where auction % 123 = 0"),
    "q3": Answer(
        "select p.name, p.city, p.state, a.id from auction a join person p on a.seller = p.id "
        "where a.category = 10 and p.state in ('OR', 'ID', 'CA')"
    ),
    "q4": Answer(
        "select category, count(*) as auctions, avg(final) as final from (select max(b.price) as final, a.category "
        f"from {_PLACED} group by a.id, a.category) group by category",
        _newest("category", by="auctions desc"),
    ),
    "q5": Answer(f"select auction, num, starttime from ({_HOPS}) qualify num = max(num) over (partition by starttime)"),
    "q6": Answer(
        "select seller, id, expires, avg(price) over (partition by seller order by expires, id rows 9 preceding) as price "
        f"from ({_WINNING})"
    ),
    "q7": Answer(
        "select auction, price, bidder, dateTime, extra from bid "
        "qualify price = max(price) over (partition by time_bucket(interval 10 seconds, dateTime))"
    ),
    "q8": Answer(
        "select distinct p.id, p.name, time_bucket(interval 10 seconds, p.dateTime) as starttime from person p join auction a "
        "on p.id = a.seller and time_bucket(interval 10 seconds, p.dateTime) = time_bucket(interval 10 seconds, a.dateTime)"
    ),
    "q9": Answer(_WINNING, _newest("id", by="price desc, bid_dateTime, bidder, bid_extra")),
    "q10": Answer(
        f"select auction, bidder, price, dateTime, extra, strftime(dateTime, '%Y-%m-%d') as dt, {_MINUTE} as hm from bid"
    ),
    "q11": Answer(
        """with begun as (
            select bidder, dateTime, coalesce(dateTime - lag(dateTime) over (partition by bidder order by dateTime)
                > interval 10 seconds, true) as begins from bid),
        numbered as (
            select *, sum(begins::int) over (partition by bidder order by dateTime rows unbounded preceding) as session
            from begun)
        select bidder, count(*) as bid_count, min(dateTime) as starttime, max(dateTime) + interval 10 seconds as endtime
        from numbered group by bidder, session"""
    ),
    "q12": Answer(
        "select bidder, count(*)::bigint as bid_count from bid group by bidder",
        "group by bidder",
        "bidder, sum(bid_count)::bigint as bid_count",
    ),
    "q13": Answer(
        "select auction, bidder, price, dateTime, 'value-' || (auction % 10000) as value from bid"
    ),
    "q14": Answer(
        f"""select auction, bidder, {_EURO} as price,
            case when hour(dateTime) between 8 and 18 then 'dayTime' when hour(dateTime) <= 6 or hour(dateTime) >= 20
            then 'nightTime' else 'otherTime' end as bidTimeType, dateTime, extra,
            (length(extra) - length(replace(extra, 'c', '')))::int as c_counts
        from bid where {_EURO} > 1000000 and {_EURO} < 50000000"""
    ),
    "q15": Answer(f"select {_DAY}, {_COUNTS}, {_DISTINCT} from bid group by day", _newest("day")),
    "q16": Answer(
        f"select channel, {_DAY}, max({_MINUTE}) as minute, {_COUNTS}, {_DISTINCT} from bid group by channel, day",
        _newest("channel", "day"),
    ),
    "q17": Answer(
        f"select auction, {_DAY}, {_COUNTS}, min(price), max(price), avg(price), sum(price)::bigint "
        "from bid group by auction, day",
        _newest("auction", "day"),
    ),
    "q18": Answer(
        "select auction, bidder, price, channel, url, dateTime, extra from bid "
        + _LAST_BID,
        _LAST_BID,
    ),
    "q19": Answer(
        "select *, row_number() over (partition by auction order by price desc, dateTime, bidder, channel, url, extra) "
        "as rank_number from bid qualify rank_number <= 10",
        _newest("auction", "rank_number", by="price desc, dateTime, bidder, channel, url, extra"),
    ),
    "q20": Answer(
        """select b.auction, bidder, price, channel, url, b.dateTime as bid_dateTime, b.extra as bid_extra, itemName, description,
            initialBid, reserve, a.dateTime, expires, seller, category, a.extra
        from bid b join auction a on b.auction = a.id where a.category = 10"""
    ),
    "q21": Answer(
        """select auction, bidder, price, channel, case lower(channel) when 'apple' then '0' when 'google' then '1'
            when 'facebook' then '2' when 'baidu' then '3'
            else nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '') end as channel_id
        from bid where channel_id is not null"""
    ),
    "q22": Answer(
        "select auction, bidder, price, channel, split_part(url, '/', 4) as dir1, split_part(url, '/', 5) as dir2, "
        "split_part(url, '/', 6) as dir3 from bid"
    ),
}  # fmt: skip


class NexmarkOracle:
    """The events of a run, and the answers to the queries about them."""

    def __init__(self, partitions: Iterable[Iterable[pa.RecordBatch]], threads: int = 2) -> None:
        """Load the events. ``partitions``: the rows of each partition of the source, in the order in which they are read."""
        self._sql = duckdb.connect(config={"threads": threads})
        self._sql.execute("set timezone = 'UTC'")
        tables = []
        for partition, batches in enumerate(partitions):
            rows = pa.Table.from_batches(list(batches))
            place = pa.array(np.full(rows.num_rows, partition)), pa.array(np.arange(rows.num_rows))
            tables.append(rows.append_column("partition", place[0]).append_column("number", place[1]))
        self._sql.register("given", pa.concat_tables(tables))
        self._sql.execute(_JUDGED.format(delay=DELAY_US))
        self._sql.unregister("given")
        for number, (kind, columns) in enumerate(KINDS.items()):
            self._sql.execute(
                f"create view {kind} as select {columns} from judged where kind = {number} and not is_late"
            )

    def late(self) -> int:
        """Count the late rows of all kinds."""
        return self._number("select count(*) from judged where is_late")

    def on_time(self, kind: str) -> pa.Table:
        """Return the rows of a kind that are not late."""
        return self._sql.sql(f"select * from {kind}").to_arrow_table()

    def answer(self, query: str) -> pa.Table:
        """Return the rows of the answer to a query."""
        return self._sql.sql(ANSWERS[query].sql).to_arrow_table()

    def differences(self, query: str, found: pa.Table) -> list[str]:
        """Compare the output of a query row by row with its answer. Return a few rows that are there and should not be, and a
        few that are missing; none if all are equal. Rows are compared by the positions of their columns."""
        answer = ANSWERS[query]
        self._sql.execute(f"create or replace temp view wanted as {answer.sql}")
        names = [each[0] for each in self._sql.execute("describe wanted").fetchall()]
        expected = names if answer.compared == "*" else found.column_names
        self._sql.register("found_rows", found.rename_columns(expected))
        taken = f"select {answer.compared} from found_rows {answer.last}"
        self._sql.execute(f"create or replace temp table found as {taken}")
        wanted, given = self._comparable("wanted"), self._comparable("found")
        told: list[str] = []
        if self._digest(wanted) == self._digest(given):
            return told
        for what, more, fewer in (("should not be there", given, wanted), ("is missing", wanted, given)):
            rows = self._sql.execute(f"select * from (({more}) except all ({fewer})) limit 3").fetchall()
            told += [f"{query}: {row} {what}" for row in rows]
        self._sql.unregister("found_rows")
        return told

    def _comparable(self, table: str) -> str:
        """Return the SQL of all columns of a table: means of DOUBLE with ten digits, because the last ones may differ."""
        described = self._sql.execute(f"describe {table}").fetchall()
        columns = [
            f"format('{{:.9e}}', \"{name}\")" if kind == "DOUBLE" else f'"{name}"' for name, kind, *_ in described
        ]
        return f"select {', '.join(columns)} from {table}"

    def _digest(self, rows: str) -> tuple[int, ...]:
        """Return the number of rows and the sum of their hashes, which are equal if the rows are, in any order."""
        return self._sql.execute(f"select count(*), sum(hash(each)) from ({rows}) as each").fetchall()[0]

    def rows(self, query: str) -> int:
        """Count the rows of the answer to a query."""
        return self._number(f"select count(*) from ({ANSWERS[query].sql})")

    def _number(self, query: str) -> int:
        (found,) = self._sql.execute(query).fetchall()[0]
        return int(found)
