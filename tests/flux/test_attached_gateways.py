"""Gateways of a service: started again when they end, less and less often while they end soon."""

from __future__ import annotations

import io
import socket
import threading
from typing import Any

import pytest

from benchmarks.ports import free_port
from flux.errors import QueryFailed, UsageError
from spark_integration.service.attached_gateways import AGAIN_MAX_S, AGAIN_S, STEADY_S, AttachedGateway
from spark_integration.service.stream_service import addresses, check_free


class HeldProcess:
    pid = 7

    def __init__(self) -> None:
        self.code: int | None = None
        self.stdin = io.BytesIO()

    def poll(self) -> int | None:
        return self.code


class HeldGateway:
    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[HeldProcess] = []
        self.gateway = AttachedGateway("127.0.0.1:1", self._start, lambda: self.now)

    def _start(self) -> Any:
        self.started.append(HeldProcess())
        return self.started[-1]

    def seconds_until_started(self) -> float:
        """Let the gateway end, and return the seconds until it is started again."""
        self.started[-1].code = -9
        before, began = len(self.started), self.now
        while len(self.started) == before:
            self.gateway.look()
            self.now += 0.1
            assert self.now < began + 60
        return self.now - began


def test_a_gateway_that_ends_again_and_again_is_started_less_often() -> None:
    held = HeldGateway()
    held.gateway.look()
    assert len(held.started) == 1
    took = [held.seconds_until_started() for _ in range(8)]
    assert took[0] < AGAIN_S + 0.25
    assert took == sorted(took)
    assert AGAIN_MAX_S <= took[-1] < AGAIN_MAX_S + 0.25
    assert all(each.stdin.closed for each in held.started[:-1])
    held.now += STEADY_S + 1
    assert held.seconds_until_started() < AGAIN_S + 0.25


def test_a_gateway_that_ends_at_its_start_is_an_error() -> None:
    held = HeldGateway()  # nothing listens on its port
    held.started[0].code = 1
    with pytest.raises(QueryFailed, match="has ended with code 1 at its start"):
        held.gateway.wait_until_it_listens()


@pytest.mark.parametrize(
    ("http", "gateways", "said"),
    [
        ("127.0.0.1", 1, "expected HOST:PORT"),
        ("127.0.0.1:8080", 0, "gateways: expected 1 to 64, got 0"),
        ("127.0.0.1:65535", 2, "65535 is the last one"),
    ],
)
def test_an_address_that_gateways_cannot_have_is_refused(http: str, gateways: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        addresses(http, gateways)


def test_a_port_that_is_taken_is_refused_unless_it_becomes_free() -> None:
    """Wait a while for the port: gateways of a killed service end with it, and the next service may come before they
    have."""
    with pytest.raises(UsageError, match="cannot be used"):
        check_free("192.0.2.77:8080", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="cannot be used"):
            check_free(address, 0.1)
        freed = threading.Timer(0.1, taken.close)
        freed.start()
        check_free(address, 30.0)
        freed.join()
