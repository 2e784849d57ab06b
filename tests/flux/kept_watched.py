"""A watch on ``flux.vault.directory_store``: each of its calls to the file system is told before it is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flux.vault import directory_store as module

WATCHED, SYNCED = ("open", "write", "listdir", "close"), ("fsync", "fdatasync")


class Watch:
    """A stand-in for ``os`` that reports each call that changes the file system or looks at it, before the call is
    made. Syncs are reported and left out: these tests lose no power, and a sync takes long."""

    def __init__(self, hook: Callable[[str, str], None]) -> None:
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in (*WATCHED, *SYNCED):
            return real

        def called(*given: Any) -> Any:
            at = os.readlink(f"/proc/self/fd/{given[0]}") if isinstance(given[0], int) else os.fspath(given[0])
            self._hook(name, Path(at).name)
            return None if name in SYNCED else real(*given)

        return called


def watch(monkeypatch: pytest.MonkeyPatch, hook: Callable[[str, str], None]) -> None:
    monkeypatch.setattr(module, "os", Watch(hook))
    for name in ("rename", "unlink", "exists"):
        monkeypatch.setattr(Path, name, _said(getattr(Path, name), name, hook))


def _said(real: Any, name: str, hook: Callable[[str, str], None]) -> Any:
    def called(path: Path, *given: Any, **more: Any) -> Any:
        hook(name, path.name)
        return real(path, *given, **more)

    return called


class At:
    """A hook that calls ``does`` before the ``number``th call, once."""

    def __init__(self, number: int, does: Callable[[], None]) -> None:
        self.calls, self.done = 0, False
        self._number, self._does = number, does

    def __call__(self, call: str, name: str) -> None:
        self.calls += 1
        if self.calls == self._number and not self.done:
            self.done = True
            self._does()
