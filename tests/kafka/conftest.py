"""One broker for all tests of the session, and topics with names of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.kafka.broker import Broker, create_topic, missing

_numbers = itertools.count()


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    if why := missing():
        pytest.skip(f"no Kafka broker: {why}")
    with Broker(quick=True) as running:
        yield running


@pytest.fixture
def topic(broker: Broker) -> str:
    """Create a topic with one partition; return its name."""
    name = f"topic-{next(_numbers)}"
    create_topic(broker.address, name)
    return name


@pytest.fixture
def new_topic(broker: Broker) -> Callable[..., str]:
    """Return a function that creates a topic: ``new_topic(partitions, **settings)``. ``name``: the beginning of its name."""

    def make(partitions: int = 1, name: str = "topic", **settings: object) -> str:
        made = f"{name}-{next(_numbers)}"
        create_topic(broker.address, made, partitions, **settings)
        return made

    return make
