"""Rates of tokens, which the gateways of a location divide by use."""

from __future__ import annotations

from pathlib import Path

import pytest

from flux.errors import QueryFailed
from flux.gateway.problems import Problem
from flux.gateway.tokens import Quotas, TokenGrant, share_of
from flux.vault.location import Folder

GRANT = TokenGrant("token", "", ["push"], ["*"], events_per_s=100)
FREE = TokenGrant("free", "", ["push"], ["*"])


class Clock:
    """The time of all gateways of a test."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class PushedGateway:
    """The rates of a gateway to which a client pushes."""

    def __init__(self, place: Folder, clock: Clock) -> None:
        self.quotas = Quotas(place, clock)
        #: Number of events that were accepted.
        self.taken = 0

    def push(self, events: int) -> None:
        self.quotas.exchange([FREE, GRANT])
        try:
            self.quotas.take(GRANT, "events", events)
        except Problem:
            return
        self.taken += events


@pytest.fixture(autouse=True)
def _no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


def test_parts_of_a_rate_add_up() -> None:
    for wanted in ([5.0], [0.0, 0.0], [100.0, 0.0, 0.0], [30.0, 70.0], [1.0, 1e9]):
        parts = [share_of(each, [*wanted[:at], *wanted[at + 1 :]]) for at, each in enumerate(wanted)]
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) > 0.04
    assert share_of(70.0, [30.0]) == pytest.approx(0.7)


def test_gateways_together_give_a_token_its_rate(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    clock = Clock()
    first, second, third = (PushedGateway(Folder(tmp_path), clock) for _ in range(3))

    def run(seconds: int, *pushed: PushedGateway) -> list[int]:
        before = [each.taken for each in pushed]
        for _ in range(seconds * 20):
            clock.now += 0.05
            for each in pushed:
                each.push(10)  # twice the whole rate, at each of them
        return [each.taken - was for each, was in zip(pushed, before, strict=True)]

    assert 2000 <= sum(run(20, first)) <= 2210  # its rate, and two seconds that it had saved up
    run(10, first, second)
    together = run(40, first, second)
    assert 3800 <= sum(together) <= 4200
    assert min(together) > 1700  # by use, and so alike
    run(8, second)
    assert 1900 <= sum(run(20, second)) <= 2100  # the part of a gateway without pushes goes to the others
    run(10, first, second, third)
    assert 3800 <= sum(run(40, first, second, third)) <= 4200


def test_a_gateway_that_is_gone_leaves_its_part(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    clock = Clock()
    first, second = (PushedGateway(Folder(tmp_path), clock) for _ in range(2))
    for _ in range(100):
        clock.now += 0.1
        first.push(10)
        second.push(10)
    assert len(Folder(tmp_path).below("rates").names()) == 2
    first.quotas.close()
    assert len(Folder(tmp_path).below("rates").names()) == 1
    for _ in range(100):  # a gateway that was killed has its document until others have seen no other one for a while
        clock.now += 0.1
        first.push(10)
    assert len(Folder(tmp_path).below("rates").names()) == 1


def test_tokens_without_rates_cost_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    clock = Clock()
    quotas = Quotas(Folder(tmp_path), clock)
    clock.now += 10
    quotas.exchange([FREE])
    quotas.take(FREE, "events", 10**9)
    assert not (tmp_path / "rates").exists()


def test_a_location_that_cannot_be_used_leaves_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    clock = Clock()
    quotas = Quotas(Folder(tmp_path), clock)

    def below(*_: object, **__: object) -> Folder:
        raise QueryFailed("it is gone")

    monkeypatch.setattr(Folder, "below", below)
    clock.now += 10
    quotas.exchange([GRANT])
    quotas.take(GRANT, "events", 200)
    with pytest.raises(Problem, match="100 of them here, and 10 are too many now"):
        quotas.take(GRANT, "events", 10)
