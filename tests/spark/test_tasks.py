"""Workers wait for the executors that copies need, without Spark (design: worker)."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from spark_integration.tasks import worker_tasks as tasks


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with copies, whether they may be together, and how many executors have joined at each look; how often it looked."""

    def wait(
        copies: list[int], joined: list[int], together: bool = False, most: int | None = None, on_demand: bool = False
    ) -> int:
        looks = iter(joined)
        seen = []

        def there(spark: Any, for_s: float) -> int:
            assert for_s == tasks.READY_S
            seen.append(next(looks, joined[-1]))
            return seen[-1]

        monkeypatch.setattr(tasks, "executors_there", there)
        monkeypatch.setattr(tasks, "executors_at_most", lambda spark: most)
        monkeypatch.setattr(tasks, "grows_on_demand", lambda spark: on_demand)
        monkeypatch.setattr(tasks, "LOOK_S", 0.001)
        stages = [SimpleNamespace(replicas=each) for each in copies]
        plan: Any = SimpleNamespace(stages=stages, settings=SimpleNamespace(same_executor=together))
        tasks.await_executors(None, plan, threading.Event())  # type: ignore[arg-type]
        return len(seen)

    return wait


def test_it_waits_for_as_many_executors_as_there_are_copies(waited: Any) -> None:
    assert waited([1, 3, 2], [0, 1, 2, 2, 3, 4]) == 5


@pytest.mark.parametrize(
    "given",
    [
        {"copies": [1]},
        {"copies": [2], "together": True},
        {"copies": [2], "most": 1},
        {"copies": [2], "on_demand": True},
    ],
)
def test_it_does_not_wait_where_nothing_is_gained(waited: Any, given: dict[str, Any]) -> None:
    assert waited(joined=[0], **given) == 0


def test_it_goes_on_with_a_warning_after_a_while(
    waited: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "EXECUTORS_S", 0.05)
    with caplog.at_level("WARNING", "flux"):
        assert waited([2], [1]) > 1
    assert "1 executor joined within 0.05 s, and replicas are to be on 2" in caplog.text


def test_it_ends_with_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(tasks, "executors_there", lambda spark, for_s: over.set() or 0)
    monkeypatch.setattr(tasks, "executors_at_most", lambda spark: None)
    monkeypatch.setattr(tasks, "grows_on_demand", lambda spark: False)
    plan: Any = SimpleNamespace(stages=[SimpleNamespace(replicas=2)], settings=SimpleNamespace(same_executor=False))
    began = time.monotonic()
    tasks.await_executors(None, plan, over)  # type: ignore[arg-type]
    assert time.monotonic() - began < tasks.EXECUTORS_S / 2
