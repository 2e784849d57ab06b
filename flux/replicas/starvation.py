"""Ordered steps whose rows do not come: the search for these rows, and its time (design: starved-step).

The replica of the producer that is read from may be slow, or wait itself, in the end for acks that only this step can give; and
so may the primaries here that hold the credit. If one of them has no room in its logs, a circle is likely, and patience gains
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from flux.replicas.replica import Replica
from partitioning.ids import StreamId

#: In resend timeouts: the time for which rows of an ordered step may stay away before they are searched elsewhere.
PATIENCE = 2
#: In resend timeouts: the longest such time. It grows, because each change of source costs a handshake.
PATIENCE_MAX = 8


@dataclass
class Starved:
    """The wait of ordered steps for rows of a stream.

    ``received`` is the progress of their partitions; ``since`` the time of that, or of the last change of source;
    ``patience_s`` the time until the next change; ``urgent``: rows are let in although the credit is used up; ``elsewhere``: it
    is time to read them from another replica of their producer."""

    received: int
    since: float
    patience_s: float
    urgent: bool = False
    elsewhere: bool = False


class Starvation:
    def __init__(self, resend_s: float) -> None:
        self._patience_s, self._patience_max_s = PATIENCE * resend_s, PATIENCE_MAX * resend_s
        self._streams: dict[StreamId, Starved] = {}

    def look(
        self, replicas: Collection[Replica], received: Callable[[StreamId, int], int], now: float
    ) -> dict[StreamId, Starved]:
        """Find the streams of which rows are missing. ``received`` gives the sequence that a partition needs next of a stream."""
        missing: dict[StreamId, int] = {}
        for replica in replicas:
            for stream in replica.missing():
                missing[stream] = missing.get(stream, 0) + received(stream, replica.partition)
        known, self._streams = self._streams, {}
        without_room = _waiting_for_room(replicas) if missing else set()
        for stream, got in missing.items():
            wait = self._streams[stream] = known.get(stream) or Starved(got, now, 0.0)
            wait.elsewhere = False
            if wait.received != got or not wait.patience_s:
                wait.received, wait.since, wait.patience_s = got, now, self._patience_s
            elif now - wait.since >= wait.patience_s:
                wait.since, wait.patience_s = now, min(2 * wait.patience_s, self._patience_max_s)
                wait.urgent = wait.elsewhere = True
            elif stream in without_room:
                wait.urgent = True
        return self._streams


def _waiting_for_room(replicas: Collection[Replica]) -> set[StreamId]:
    """Find the streams with rows here that wait for a primary whose logs are full, or that is held back by replicas which have
    much of its order to apply: these may wait for rows, too, on a worker whose credit their own primaries hold."""
    full = [
        replica
        for replica in replicas
        if replica.primary and (not replica.has_room or replica.held_back or replica.compares)
    ]
    return {stream for replica in full for stream in replica.waiting()}
