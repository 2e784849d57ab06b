"""The order in which a turn of a worker's loop applies, reads, sends and receives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from flux.shell import worker_loop as worker
from flux.shell.worker_loop import WORK_S, WorkerLoop
from flux.worker.pacing import WINDOW_S, GatherRest, Pacing

QUICK_S, SLOW_S = 0.0, 1.1 * WORK_S


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock by one that only steps move: all other work takes no time."""
    Turning.now = 0.0
    clocks = dict.fromkeys(("monotonic", "perf_counter", "time", "sleep"), lambda *_: Turning.now)
    monkeypatch.setattr(worker, "time", SimpleNamespace(**clocks))


class Core:
    """A core with no more parts than a worker's loop asks for."""

    rows_in = steps = 0
    aged_s = 0.0
    reading = SimpleNamespace(due=lambda _: 0.0)

    def __init__(self, loop: Turning) -> None:
        self.loop = loop
        self.note = [0] * 8
        self.work, self.read = loop.applies, loop.reads
        self.set_pace = loop.paces.append

    @property
    def has_work(self) -> bool:
        return bool(self.loop.left)

    def due(self) -> float:
        return 0.0


class Turning(WorkerLoop):
    """A loop that notes its acts."""

    now = 0.0

    def __init__(self, steps: list[float], receives: int = 0) -> None:
        """Prepare turns. ``steps`` are the seconds that each step takes; ``receives`` messages come in every turn."""
        self.did: list[str] = []
        self.left = steps
        self.paces: list[Pacing] = []
        nothing = SimpleNamespace(check=lambda: None, acquire=lambda: None, release=lambda: None)
        self._sinks: Any = SimpleNamespace(failures=list)
        self._watch: Any = SimpleNamespace(quiet=nothing)
        self._gathering, self._pace = GatherRest(), Pacing()
        self._turns, self._rested_s, self._beat_at = 0, 0.0, 0.0
        self.sockets: Any = SimpleNamespace(wait=lambda _: [None] * receives)

    def turn(self) -> list[str]:
        self.core = core = cast(Any, Core(self))
        self._turn(core)
        return self.did

    def applies(self, now: float) -> bool:
        if not self.left:
            return False
        Turning.now += self.left.pop(0)
        self.did.append("apply")
        return True

    def reads(self, idle: bool, now: float) -> bool:
        self.did.append("read" if idle else "read if due")
        return False

    def _flush(self, core: Any, now: float) -> None:
        self.did.append("send")

    def _heartbeat(self, core: Any, now: float) -> None: ...

    def _receive(self, core: Any, ready: Any) -> None:
        self.did.append("receive")


def test_sources_are_read_in_a_turn_that_has_applied_all_there_was() -> None:
    """Read sources in such a turn: they were read every 50 ms only, wherever each turn found something to apply."""
    assert Turning([QUICK_S] * 3).turn() == ["apply", "apply", "apply", "read", "send"]
    assert Turning([SLOW_S]).turn() == ["apply", "read", "send"]


def test_the_worker_is_told_its_pace_when_that_is_judged_anew() -> None:
    loop = Turning([SLOW_S])
    loop.turn()
    assert loop.paces == []
    loop.left = [WINDOW_S]
    loop.turn()
    assert loop.paces == [loop._pace]


def test_what_waits_is_applied_before_sources_are_read() -> None:
    assert Turning([SLOW_S, QUICK_S]).turn() == ["apply", "read if due", "send"]


def test_what_has_been_received_is_answered_before_anything_is_applied() -> None:
    turning = Turning([], receives=2)
    turning.turn()
    turning.left = [QUICK_S]
    answered = ["receive", "receive", "send"]
    assert turning.turn() == ["read", "send", *answered, "apply", "read", "send", *answered]
