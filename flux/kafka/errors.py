"""What goes wrong with Kafka, by whose fault it is. Messages name topic, partition and offset, and what to do.

A wrong call (an unknown topic, an unknown option) is a UsageError as everywhere.
"""

from __future__ import annotations

from typing import Any

from flux.errors import FluxError, ProtocolError


class KafkaError(FluxError):
    """Base of what Kafka, or the way to it, does to a query."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class BrokerUnreachable(KafkaError):
    """No broker answered within the time given; the message says which were tried, and what came of it."""


class NotPermitted(KafkaError):
    """The broker refuses who we are (a wrong password), or what we want (no permission for a topic)."""


class DataLost(KafkaError):
    """Records that were still to be read are gone from the broker, its log ends before a position that was read or written, or
    the topic was deleted and made anew."""


class CorruptRecords(KafkaError, ProtocolError):
    """What a broker sent cannot be record batches: cut off, of another format, with a wrong checksum, or with lengths that do
    not fit. Nothing of it was used."""


class BrokerBroken(KafkaError, ProtocolError):
    """A broker answered something that is no answer to the request."""


class BadRecord(KafkaError):
    """A record does not fit the format that was asked for."""

    #: The record; the program that started the query knows it from the message alone.
    topic, partition, offset = "", -1, -1

    def __init__(self, message: str, topic: str, partition: int, offset: int) -> None:
        super().__init__(message)
        self.topic, self.partition, self.offset = topic, partition, offset


class UnfitValue(KafkaError):
    """A value cannot be written in the format that was asked for; the message names its row and column. Nothing of its batch
    was written."""


def _rebuilt(cls: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    # These cross process boundaries; the default would call __init__ with the finished message.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
