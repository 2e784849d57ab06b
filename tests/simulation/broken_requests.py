"""Variants in which requests of people do not come to an end, or come back from it."""

from __future__ import annotations

import pytest

from controller.decide.request_book import AT_THE_END, Asked, RequestBook, State

Patch = pytest.MonkeyPatch


def a_scale_waits_though_a_worker_was_drained(patch: Patch) -> None:
    """Let a scale wait for workers that never come, because a drain since then wants fewer."""
    wanted_now = RequestBook.wanted_now

    def broken(self: RequestBook, workers: int, why: str) -> None:
        if "drains" not in why:
            wanted_now(self, workers, why)

    patch.setattr(RequestBook, "wanted_now", broken)


def requests_outlive_the_query(patch: Patch) -> None:
    give_up = RequestBook._give_up

    def broken(self: RequestBook, asked: Asked, why: str) -> None:
        if why != AT_THE_END:
            give_up(self, asked, why)

    patch.setattr(RequestBook, "_give_up", broken)


def outcomes_are_looked_at_again(patch: Patch) -> None:
    """Let a change of scale that is done wait again as soon as a worker is lost."""
    look = RequestBook.look

    def broken(self: RequestBook) -> None:
        look(self)
        for asked in self._asked.values():
            if asked.standing.state == State.DONE:
                asked.standing = asked.look()

    patch.setattr(RequestBook, "look", broken)
