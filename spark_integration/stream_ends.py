"""Row counts of a streaming query's partitions, kept beside the state of a query with a checkpoint location (design:
micro-batches).

Spark never gives the rows of a committed batch again. If the query has to go on from an older checkpoint than Spark,
because a newer one is damaged, these rows are missing, and the tasks of the next batch have to notice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from flux.durable.place import Place
from flux.errors import QueryFailed

log = logging.getLogger("flux")


class Ends:
    """Row counts by partition. They are written before Spark commits a batch, so they may be one batch ahead of Spark; the
    counts before that batch are kept, too. Behind Spark, after a loss of power, fewer missing rows are noticed, and none
    are reported wrongly."""

    def __init__(self, place: Place | None, name: str) -> None:
        self._place = place
        self._name = f"stream-{quoted(name)}.json"
        self._batch = -1
        self._before: dict[int, int] = {}  # by partition: rows before that batch
        self._through: dict[int, int] = {}
        self._begun = (-1, 0)  # the newest batch that was begun, and its number of partitions
        if place is not None:
            try:
                self._batch, *found, begun = json.loads(place.read(self._name))
                self._before, self._through = ({int(at): int(end) for at, end in ends.items()} for ends in found)
                self._begun = int(begun[0]), int(begun[1])
            except FileNotFoundError:
                pass
            except (OSError, ValueError, AttributeError, TypeError) as error:
                log.warning(
                    "%s in %s cannot be read, so rows that are missing would not be noticed: %s",
                    self._name,
                    place,
                    error,
                )

    def before(self, batch: int) -> dict[int, int]:
        """Return the rows that each partition has had in the batches before this one, as far as is known."""
        return self._through if batch > self._batch else self._before if batch == self._batch else {}

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
        """Note that all consumers have applied this batch; each of ``rows`` has ``partition`` and ``end``."""
        before = self.before(batch)
        self._batch, self._before = batch, before
        self._through = before | {row.partition: row.end for row in rows if row.end}
        self._write()

    def _write(self) -> None:
        if self._place is not None:
            said = json.dumps([self._batch, self._before, self._through, self._begun])
            self._place.write(self._name, said.encode())


def quoted(name: str) -> str:
    """Quote a name for a part of a file's name."""
    return quote(name, safe=" ")
