"""The owner of an output log: the results of one partition of a stage in, each exit at one place (design: output-log).

Law: each batch that has left the stage is in the log exactly once, in the order of its exits, and every later owner and every
reader finds it at the same position. A position is never used for other rows.

A log of events drops a request that comes again by the number that its client has given it. Here the client is the exit of a
stage, and the number is that of the batch among all that have left there, which is the same on every replica. So record and
exit are written in one piece, and a take-over reads both. ``open`` and ``write`` are iterators that make one call to the place
in each turn, so that a test may do anything in between; a program goes through them at once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import NamedTuple

from flux.eventlog.log_owner import LogLimits, LogOwner
from flux.eventlog.log_store import LogStore
from flux.eventlog.records import DamagedLog, PushName

#: Microseconds between two looks for segments that are needed no more.
_TIDY_US = 1_000_000


class ExitBatch(NamedTuple):
    """A batch that has left a stage."""

    #: Its number among all that have left there (``flux.Position.sequence``).
    sequence: int
    #: Its rows as a record keeps them, and their number.
    rows: memoryview
    row_count: int


class OutputLogOwner:
    """One owner of an output log. ``exit_name`` is the exit of this query and stage: another life without a checkpoint has
    another one. After an error it is of no use: open the place again."""

    def __init__(self, store: LogStore, where: str, exit_name: str, limits: LogLimits) -> None:
        self._log = LogOwner(store, where, limits)
        self._exit, self._where = exit_name, where
        self._tidied_us = 0

    def open(self) -> Generator[None, None, None]:
        """Read the log that earlier owners have left. Errors are those of ``LogOwner.open``."""
        yield from self._log.open()

    @property
    def next_exit(self) -> int:
        """Return the number of the first batch of the exit that the log does not have."""
        newest = self._log.newest_of(self._exit)
        return 0 if newest is None else newest.number + 1

    @property
    def next(self) -> int:
        """Return the position of the row that comes next."""
        return self._log.next

    @property
    def first(self) -> int:
        """Return the lowest position that is still in the log."""
        return self._log.first

    def write(self, batches: Iterable[ExitBatch], now_us: int) -> Generator[None, None, None]:
        """Bring batches into the log, in one flush; those that it has already change nothing. They are durable at the end, and
        readers see them just before.

        DamagedLog: the batch before the first one is not in the log. TakenOver: another owner has the log; OSError: the disk.
        Some of the batches may be in the log then."""
        for batch in batches:
            if batch.sequence > self.next_exit:
                raise DamagedLog(
                    f"{self._where}: expected result batch {self.next_exit:,} of its query, got {batch.sequence:,}: the log has "
                    "lost its end. Restore the log from a copy"
                )
            if batch.sequence == self.next_exit:
                name = PushName(client=self._exit, number=batch.sequence)
                self._log.offer(batch.rows, batch.row_count, name, now_us)
        yield from self._log.commit(self._log.take())
        if self._log.is_due(now_us) or now_us - self._tidied_us >= _TIDY_US:
            self._tidied_us = now_us
            # Readers have ``retain`` to come back, and hold nothing.
            yield from self._log.tidy(now_us, None)
