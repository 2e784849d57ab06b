"""Errors of Kafka, by their causes. Messages name topic, partition and offset, and a remedy. ``DataLost`` is shared with other
sources that lose rows.

A wrong call (an unknown topic, an unknown option) is a UsageError as everywhere.
"""

from __future__ import annotations

from typing import Any

from flux.errors import DataLost as DataLost
from flux.errors import FluxError, ProtocolError


class KafkaError(FluxError):
    """Base of the errors that Kafka, or the way to it, causes in a query."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class BrokerUnreachable(KafkaError):
    """Silence of all brokers for the time given. The message names the brokers that were tried, and the last failure."""


class NotPermitted(KafkaError):
    """Refusal by a broker: of the login (a wrong password), or of the request (no permission for a topic)."""


class CorruptRecords(KafkaError, ProtocolError):
    """Bytes from a broker that cannot be record batches: cut off, of another format, with a wrong checksum, or with lengths
    that do not fit. Nothing of them was used."""


class BrokerBroken(KafkaError, ProtocolError):
    """Answer of a broker that does not belong to the request, or breaks the protocol."""


class BadRecord(KafkaError):
    """Record that does not fit the format that was asked for."""

    #: Place of the record. The program that started the query knows it from the message alone.
    topic, partition, offset = "", -1, -1

    def __init__(self, message: str, topic: str, partition: int, offset: int) -> None:
        super().__init__(message)
        self.topic, self.partition, self.offset = topic, partition, offset


class UnfitValue(KafkaError):
    """Value that cannot be written in the format that was asked for. The message names its row and column. Nothing of its
    batch was written."""


def _rebuilt(cls: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    # Errors cross process boundaries; the default would call __init__ with the finished message.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
