"""The contents of a batch in a few words, for the detail of a broken law."""

from __future__ import annotations

from flux.exchange.log import LogEntry, Rows

#: Rows that are shown; the others are counted.
SHOWN = 3


def contents(entry: LogEntry | None) -> str:
    if entry is None:
        return "nothing"
    if not isinstance(entry.element, Rows):
        return "the end of the stream"
    data = entry.element.data
    rows = [
        f"{tuple(row.values())} for partition {partition}"
        for partition in range(data.partitions)
        for row in data.rows_of(partition).to_pylist()
    ]
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f"the rows {', '.join(rows[:SHOWN])}{more}" if rows else "no rows"
