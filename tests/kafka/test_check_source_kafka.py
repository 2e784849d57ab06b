"""A topic keeps the contract of sources: ``flux.testing.check_source`` reads it in many lives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import flux
from flux.testing import ContractBroken, check_source
from tests.kafka.broker import Broker
from tests.kafka.topics import send


def test_a_topic_keeps_the_contract_of_sources(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(2)
    for partition in range(2):
        for first in range(0, 60, 20):  # several record batches
            send(broker.address, topic, [b"%d" % n for n in range(first, first + 20)], partition)
    check_source(flux.kafka(topic, broker.address, fetch_bytes="1k"), quiet_s=0.3)
    shortened = flux.kafka(topic, broker.address, starting="latest")
    with pytest.raises(flux.UsageError, match="has given no row"):
        check_source(shortened, quiet_s=0.3)


def test_a_broken_copy_of_the_reader_of_a_topic_is_found(
    broker: Broker, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flux.connectors.kafka.client.topic_ids import LogPosition

    topic = new_topic(1)
    send(broker.address, topic, [b"%d" % n for n in range(40)])
    at = LogPosition.at
    monkeypatch.setattr(LogPosition, "at", lambda self, number, *more: at(self, number + (number > 0), *more))
    with pytest.raises(ContractBroken, match="a row before it is missing"):
        check_source(flux.kafka(topic, broker.address), quiet_s=0.3)
