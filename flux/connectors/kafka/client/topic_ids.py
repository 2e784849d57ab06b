"""Ids of topics (KIP-516, brokers since Kafka 2.8), and positions that carry them.

A topic that is deleted and made anew keeps its name and begins again at offset 0. Only its id shows that earlier offsets,
sequences and positions belong to other records. Ids are text as Kafka's own tools print them.
"""

from __future__ import annotations

import base64
import uuid
from typing import Any, NamedTuple

from flux.errors import UsageError

#: Id of a topic if the broker gives none, because it is older than Kafka 2.8.
UNKNOWN = ""
_BYTES = 16
#: Row numbers of each generation of a log: more than a partition ever has offsets, and there is room for 16,384 generations.
GENERATION = 1 << 48


def text_of(given: uuid.UUID | None) -> str:
    """Return an id from the protocol as text; UNKNOWN for a missing or zero id."""
    if given is None or not given.int:
        return UNKNOWN
    return base64.urlsafe_b64encode(given.bytes).rstrip(b"=").decode()


def uuid_of(topic_id: str) -> uuid.UUID | None:
    """Return the id for the protocol. UsageError for text that is no id."""
    if topic_id == UNKNOWN:
        return None
    try:
        return uuid.UUID(bytes=base64.urlsafe_b64decode(topic_id + "=="))
    except (ValueError, TypeError):
        raise UsageError(f"{topic_id!r:.60} is no id of a topic, which is {_BYTES} bytes in base64") from None


def differ(one: str, other: str) -> bool:
    """Tell whether two ids of a name are those of two topics. An unknown id differs from none."""
    return UNKNOWN not in (one, other) and one != other


class LogPosition(NamedTuple):
    """A position in a partition. Rows are known by numbers that follow the offsets. Each log that begins again under the same
    name, because the topic was made anew or its end was cut off, is another ``generation``, and its numbers come behind
    those of the one before."""

    #: Offset of the next record.
    offset: int
    #: Id of the topic that the offset belongs to.
    topic_id: str = UNKNOWN
    generation: int = 0
    #: Offset at which this generation of the topic begins; 0 for a topic that was made anew. Smaller offsets of the same topic
    #: belong to generations before the log was cut off.
    began: int = 0

    @property
    def first_number(self) -> int:
        """Number of the row at offset 0."""
        return self.generation * GENERATION

    def at(self, number: int, position: Any, newest: LogPosition | None) -> LogPosition:
        """Return the place of the row with this number.

        ``position`` is the newest one before it. It may lie further on than the number, because no row stands between, for
        instance where a transaction ends. ``newest`` is a place that may lie further on. The topic is that of one of them
        in the same generation, or that of this place, which is the beginning of the query. A row of a topic that is known
        to be gone leads to this place."""
        generation, offset = divmod(number, GENERATION)
        before = None if position is None else LogPosition.of(position)
        if before is not None and before.generation == generation:
            return before._replace(offset=max(offset, before.offset))
        if self.generation > generation > (-1 if newest is None else newest.generation):
            return self  # the row was in a topic that was gone before this start, and no position tells of that topic
        same = newest if newest is not None and newest.generation == generation else self
        if newest is not None and newest.generation > generation and newest.topic_id != self.topic_id:
            return LogPosition(offset, UNKNOWN, generation)  # this topic may be one that was made anew since
        if self.generation == generation and not differ(self.topic_id, same.topic_id):
            offset = max(offset, self.offset)  # a query does not begin before its start
        if same.generation != generation:
            return LogPosition(offset, UNKNOWN, generation)
        return same._replace(offset=offset)

    def behind_cut(self, newest: LogPosition) -> LogPosition | None:
        """Return the place where a reader goes on that was to begin here. ``newest`` may be of a later generation of the same
        topic: the records between are gone, and others have their offsets. None: it is not known which generations the
        records have that are there."""
        if newest.generation <= self.generation or differ(self.topic_id, newest.topic_id):
            return self
        follows = (newest.topic_id, newest.generation) == (self.topic_id, self.generation + 1)
        if not newest.began or (follows and self.offset >= newest.began):
            return newest._replace(offset=newest.began)
        return None

    @classmethod
    def of(cls, position: Any) -> LogPosition:
        """Read a position as ``position`` has made it. A plain offset comes from a release that kept no ids, or from a broker
        that gives none."""
        match position:
            case bool():
                pass
            case int() if position >= 0:
                return cls(position)
            case [int() as offset, str() as topic_id, *more] if offset >= 0 and not isinstance(offset, bool):
                uuid_of(topic_id)
                match more:
                    case [] | [int()] | [int(), int()]:
                        return cls(offset, topic_id, *more)
        raise UsageError(
            f"{position!r:.100} is no position in a partition of Kafka: expected an offset, or an offset and an id"
        )

    @property
    def position(self) -> Any:
        """The place as the streams of a source keep it."""
        if self.generation:
            return [*self] if self.began else [*self[:-1]]
        return self.offset if self.topic_id == UNKNOWN else [self.offset, self.topic_id]
