"""The queries of Nexmark that a text for ``flux.sql`` can say, over the same flows as their pages.

The others need ranks (q5, q7, q9, q18, q19), a join that keeps rows for ever (q3, q20), an operator of one's own (q6) or a table
of the program's (q13).
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark

_RANKS = {"rank1": "price < 10000", "rank2": "price >= 10000 AND price < 1000000", "rank3": "price >= 1000000"}


def _counts(count: str, name: str) -> str:
    ranks = (f"{count} FILTER (WHERE {condition}) AS {rank}_{name}" for rank, condition in _RANKS.items())
    return ", ".join((f"{count} AS total_{name}", *ranks))


_BIDS = _counts("count(*)", "bids")
_BIDDERS, _AUCTIONS = (_counts(f"count(DISTINCT {column})", f"{column}s") for column in ("bidder", "auction"))

TEXTS = {
    "q0": "SELECT auction, bidder, price, dateTime, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, dateTime, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE auction % 123 = 0",
    "q4": """
        SELECT category, count(*) AS auctions, avg(final) AS final FROM (
            SELECT id, category, max(price) AS final FROM auction a JOIN bid b
            ON a.id = b.auction AND b.dateTime BETWEEN a.dateTime AND a.expires GROUP BY id, category
        ) GROUP BY category""",
    "q8": """
        SELECT p.id, p.name, window.start AS starttime
        FROM (SELECT window, id, name FROM person GROUP BY window(dateTime, '10 seconds'), id, name) p
        JOIN (SELECT window, seller AS id FROM auction GROUP BY window(dateTime, '10 seconds'), seller) a
        USING (window, id)""",
    "q10": """
        SELECT auction, bidder, price, dateTime, extra, date_format(dateTime, 'yyyy-MM-dd') AS dt,
            date_format(dateTime, 'HH:mm') AS hm FROM bid""",
    "q11": """
        SELECT bidder, count(*) AS bid_count, session_window.start AS starttime, session_window.end AS endtime
        FROM bid GROUP BY bidder, session_window(dateTime, '10 seconds')""",
    "q12": """
        SELECT bidder, count(*) AS bid_count, window.start AS starttime, window.end AS endtime
        FROM bid GROUP BY bidder, window(current_timestamp(), '10 seconds')""",
    "q14": """
        SELECT auction, bidder, 0.908 * price AS price,
            CASE WHEN hour(dateTime) BETWEEN 8 AND 18 THEN 'dayTime'
                 WHEN hour(dateTime) <= 6 OR hour(dateTime) >= 20 THEN 'nightTime' ELSE 'otherTime' END AS bidTimeType,
            dateTime, extra, length(extra) - length(replace(extra, 'c', '')) AS c_counts
        FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000""",
    "q15": f"SELECT date_format(dateTime, 'yyyy-MM-dd') AS day, {_BIDS}, {_BIDDERS}, {_AUCTIONS} FROM bid GROUP BY day",
    "q16": f"""
        SELECT channel, date_format(dateTime, 'yyyy-MM-dd') AS day, max(date_format(dateTime, 'HH:mm')) AS minute,
            {_BIDS}, {_BIDDERS}, {_AUCTIONS} FROM bid GROUP BY channel, day""",
    "q17": f"""
        SELECT auction, date_format(dateTime, 'yyyy-MM-dd') AS day, {_BIDS}, min(price) AS min_price,
            max(price) AS max_price, avg(price) AS avg_price, sum(price) AS sum_price FROM bid GROUP BY auction, 2""",
    "q21": r"""
        SELECT * FROM (
            SELECT auction, bidder, price, channel,
                CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
                     ELSE nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '') END AS channel_id FROM bid
        ) WHERE channel_id IS NOT NULL""",
    "q22": """
        SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2,
            split_part(url, '/', 6) AS dir3 FROM bid""",
}


def query(name: str, nexmark: Nexmark) -> flux.Flow:
    """Return the flow of a query."""
    return flux.sql(TEXTS[name], person=nexmark.person(), auction=nexmark.auction(), bid=nexmark.bid())
