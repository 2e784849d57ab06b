"""The rows that a streaming query has given, kept beside the state of the query that it feeds (design: micro-batches)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from flux.dataflow.plan import EventTime
from flux.errors import QueryFailed
from flux.vault.location import Place
from flux.windows.window import NEVER
from spark_integration.tasks.entry_points import Reached

log = logging.getLogger("flux")


class StreamEnds:
    """Row counts of a streaming query's partitions, kept beside the state of a query with a checkpoint location. They are
    written before Spark commits a batch, so they may be one batch ahead of Spark; the counts before that batch are kept,
    too. Behind Spark, after a loss of power, fewer missing rows are noticed, and none are reported wrongly.

    Spark never gives the rows of a committed batch again. If the query has to go on from an older checkpoint than Spark,
    because a newer one is damaged, these rows are missing, and the tasks of the next batch have to notice."""

    def __init__(self, place: Place | None, name: str) -> None:
        self._place = place
        self._name = f"stream-{quoted(name)}.json"
        self._batch = -1
        self._before: dict[int, Reached] = {}  # by partition: its place before that batch
        self._through: dict[int, Reached] = {}
        self._begun = (-1, 0)  # the newest batch that was begun, and its number of partitions
        #: The greatest time of the rows before that batch, and through it; and the number of late rows.
        self._newest_before = self._newest = NEVER
        self._late_before = self._late = 0
        if place is not None:
            try:
                self._batch, before, through, begun, *newest = json.loads(place.read(self._name))
                self._before, self._through = (
                    {int(at): _reached(said) for at, said in ends.items()} for ends in (before, through)
                )
                self._begun = int(begun[0]), int(begun[1])
                if newest:  # earlier releases knew no times
                    self._newest_before, self._newest, *late = map(int, newest[0])
                    self._late_before, self._late = late or (0, 0)
            except FileNotFoundError:
                pass
            except (OSError, ValueError, AttributeError, TypeError) as error:
                log.warning(
                    "%s in %s cannot be read, so rows that are missing would not be noticed: %s",
                    self._name,
                    place,
                    error,
                )

    @property
    def batch(self) -> int:
        """The newest batch that all consumers have applied; -1: there is none."""
        return self._batch

    @property
    def begun(self) -> int:
        """The newest batch that was begun; -1: there is none."""
        return self._begun[0]

    def before(self, batch: int) -> dict[int, Reached]:
        """Return the place of each partition behind the batches before this one, as far as is known."""
        return self._through if batch > self._batch else self._before if batch == self._batch else {}

    def newest_before(self, batch: int) -> int:
        """Return the greatest time of the rows in the batches before this one (design: batch-watermarks)."""
        return self._newest if batch > self._batch else self._newest_before if batch == self._batch else NEVER

    @property
    def newest(self) -> int:
        """The greatest time of the rows that all consumers have applied."""
        return self._newest

    @property
    def late(self) -> int:
        """The number of late rows in the batches that all consumers have applied."""
        return self._late

    def begins(self, batch: int, partitions: int) -> bool:
        """Note that a batch is about to be sent in this number of partitions. Returns whether a part of it may have been sent
        before. QueryFailed: that was in another number of partitions, and rows would come twice by another stream."""
        again = batch == self._begun[0]
        if again and partitions != self._begun[1]:
            raise QueryFailed(
                f"batch {batch} comes again in {partitions} partitions, and was begun in {self._begun[1]}: its rows would count "
                "twice. Start again with as many cores as before, or put repartition(n) before flux.stream"
            )
        if not again:
            self._begun = batch, partitions
            self._write()
        return again

    def note(self, batch: int, rows: Iterable[Any]) -> None:
        """Note that all consumers have applied this batch; each of ``rows`` has ``partition``, ``end``, ``sent``, ``newest`` and
        ``late``."""
        before, newest, rows = self.before(batch), self.newest_before(batch), list(rows)
        self._late_before = self._late if batch > self._batch else self._late_before if batch == self._batch else 0
        self._late = self._late_before + sum(row.late for row in rows)
        self._batch, self._before, self._newest_before = batch, before, newest
        self._through = before | {row.partition: Reached(row.end, tuple(row.sent)) for row in rows if row.end}
        self._newest = max([newest, *(row.newest for row in rows)])
        self._write()

    @property
    def _times(self) -> list[int]:
        return [self._newest_before, self._newest, self._late_before, self._late]

    def _write(self) -> None:
        if self._place is not None:
            ends = [
                {at: [each.end, *each.sent] for at, each in known.items()} for known in (self._before, self._through)
            ]
            said = json.dumps([self._batch, *ends, self._begun, self._times])
            self._place.write(self._name, said.encode())


def watermark_of(event_time: EventTime | None, newest: int) -> int:
    """Return Spark's watermark behind batches with this greatest time (design: batch-watermarks)."""
    return NEVER if event_time is None or newest < NEVER + event_time.delay else newest - event_time.delay


def _reached(said: Any) -> Reached:
    """Return a place as the file has it; releases that sent all rows kept their number alone."""
    end, *sent = said if isinstance(said, list) else [said]
    return Reached(int(end), tuple(map(int, sent)))


def quoted(name: str) -> str:
    """Quote a name for a part of a file's name."""
    return quote(name, safe=" ")
