"""Record of the rows given out by streams of numbered rows, one by one: when they are read again, batches are cut elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flux.dataflow.plan import FromSource, Plan, Timed
from flux.exchange.log import End, LogEntry, Rows
from flux.exchange.producer import Producer
from partitioning.ids import StreamId
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.checkers import Ledger


#: Stands in place of a row's content.
THE_END = "the end"


def is_end(given: Any) -> bool:
    """Tell whether an element of a stream, with numbered rows or without, is its end."""
    return given[1] is THE_END if isinstance(given, tuple) else isinstance(given.element, End)


def numbered(ledger: Ledger, stream: StreamId) -> bool:
    return stream.edge in ledger.numbered


def publish(ledger: Ledger, producer: Producer, seen: int) -> None:
    """Note new rows of a producer, and check rows given out again: the row of a number is the same in every life and goes to the
    same partitions, and the end comes behind the same row."""
    stream = producer.stream
    given, again = ledger._given_rows[stream], 0
    birth = producer.earlier.birth
    end = next(reversed(given), -1 if birth is None else birth.number - 1) + 1
    for entry in producer.log.entries():
        if entry.sequence < seen:
            continue
        ledger._largest[stream] = max(ledger._largest[stream], entry.nbytes)
        filtered = _is_filtered(ledger.plan, stream)
        gaps = producer.earlier.own_numbers or filtered
        for number, partitions, row in _rows(entry, gaps, filtered):
            assert gaps or number <= end, f"stream {stream}: row {end} was never given, and row {number} is"
            if number >= end:
                given[number], end = (partitions, row), number + 1
                for partition in partitions:
                    ledger._touching[stream, partition].append(number)
                if ledger.event_time is not None:
                    ledger.event_time.given_row(stream, partitions, number, row)
            else:
                again += 1
                if given.get(number) != (partitions, row):
                    detail = f"stream {stream}, row {number}: at first {given.get(number)}, and now {(partitions, row)}"
                    raise Violation("equal sequences are equal batches", detail)
    ledger.counts["rows made again"] += again


def _is_filtered(plan: Plan, stream: StreamId) -> bool:
    """Tell whether a stream leaves out rows that were read: the late ones, or those on time."""
    if stream.edge not in plan.edges:
        return False  # the edge was removed, and no plan that grows here has rows with event time
    edge = plan.edges[stream.edge]
    return isinstance(edge, FromSource) and edge.timed is not Timed.ALL


def _rows(entry: LogEntry, gaps: bool, filtered: bool) -> list[tuple[int, tuple[int, ...], object]]:
    """Return number, partitions and content of each row of an entry, in order. The end has ``THE_END`` for its content. With
    ``gaps`` some numbers may be missing, and with ``filtered`` also the first and the last ones."""
    if not isinstance(entry.element, Rows):
        return [(entry.sequence, tuple(sorted(entry.touches.tolist())), THE_END)]
    data = entry.element.data
    last = data.batch.num_columns - 1
    numbers = data.batch.column(last).to_numpy()
    contents = data.batch.select(range(last)).to_pylist()
    whose = np.repeat(data.by_rank, np.diff(data.offsets)).tolist()
    found = sorted(zip(numbers.tolist(), whose, contents, strict=True), key=lambda row: row[0])
    mine = [number for number, _, _ in found]
    if filtered:
        assert all(entry.begin <= number <= entry.sequence for number in mine), "an entry says where its rows are"
        return [(number, (partition,), content) for number, partition, content in found]
    assert (mine[0], mine[-1]) == (entry.begin, entry.sequence), "an entry says its first and its last row"
    assert gaps or mine == list(range(entry.begin, entry.sequence + 1)), "numbers without gaps"
    return [(number, (partition,), content) for number, partition, content in found]


def last_of(entry: LogEntry, partition: int) -> int:
    """Return the number of the last row for a partition."""
    if not isinstance(entry.element, Rows):
        return entry.sequence
    rows = entry.element.data.rows_of(partition)
    return int(rows.column(rows.num_columns - 1)[-1].as_py())


def makes_again(origins: Mapping[int, tuple[bool, int]], watched: Iterable[Any], producer: Producer) -> bool:
    """Tell whether the next element of a producer may have been there before, in its stream or in another one of the same reader.

    The reader learns the number of a row when it has read the row. So the first batch behind a gap goes beyond the bound, too:
    rows 21 to 24 were gone from a log, all below 25 had been there, and row 25 was read to look for row 21. ``origins`` holds
    the origin of every edge that the plan ever had: a worker feeds the stream of a removed edge until it hears of the removal."""
    stream = producer.stream
    fronts = [
        each.earlier.front
        for each in watched
        if isinstance(each, Producer)
        and (each.stream.producer, each.incarnation) == (stream.producer, producer.incarnation)
        and origins[each.stream.edge] == origins[stream.edge]
    ]
    return producer.next_sequence < max(fronts)
