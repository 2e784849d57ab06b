"""The description of the machine that benchmarks add to their figures."""

from __future__ import annotations

import platform

import pytest

from benchmarks import machine


def test_it_is_measured_once() -> None:
    said = machine.about()
    assert str(said["python"]).startswith(platform.python_version())
    assert all(float(said[cost]) > 0 for cost in ("interpreter_ns", "wake_up_us"))
    assert machine.about() is said


def test_of_several_measurements_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_objects", "_wake_ups"):
        taken = iter([5.0, 3.0, *[9.0] * machine.TIMES])
        monkeypatch.setattr(machine, name, lambda taken=taken: next(taken))
    machine.about.cache_clear()
    try:
        said = machine.about()
    finally:
        machine.about.cache_clear()
    assert said["interpreter_ns"] == 3.0 / machine.OBJECTS * 1e9
    assert said["wake_up_us"] == 3.0 / machine.WAKE_UPS * 1e6
