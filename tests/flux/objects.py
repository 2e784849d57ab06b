"""A store of objects in memory, for tests: its content, and a call before each request for steps in between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from flux.vault.object_store import Bucket


@dataclass
class Objects:
    """A ``flux.vault.object_store.Objects`` in memory."""

    held: dict[str, bytes] = field(default_factory=dict)
    #: Called with each request before it is made.
    before: Callable[[str], None] = lambda request: None
    calls: int = 0

    def _called(self, request: str) -> None:
        self.calls += 1
        self.before(request)

    def patient(self) -> None:
        pass

    def make(self, folder: str) -> None:
        pass

    def read(self, name: str) -> bytes:
        self._called(f"read {name}")
        if name not in self.held:
            raise FileNotFoundError(name)
        return self.held[name]

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._called(f"write {name}")
        self.held[name] = bytes(data)

    def remove(self, name: str) -> None:
        self._called(f"remove {name}")
        self.held.pop(name, None)

    def sizes(self, folder: str) -> dict[str, int]:
        self._called(f"list {folder}")
        return {
            name.removeprefix(f"{folder}/"): len(data) for name, data in self.held.items() if name.startswith(folder)
        }

    def entries(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.held})

    def beside(self) -> Objects:
        """Return the same store as another process sees it, without calls before its requests."""
        return Objects(self.held)


class AtOnce(Executor):
    """An executor that makes each request where it is submitted, so that requests have an order."""

    def submit(self, call: Any, /, *given: Any, **more: Any) -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(call(*given, **more))
        return made


def bucket(objects: Objects, writes: bool = True) -> Bucket:
    return Bucket(objects, "the store", writes, AtOnce())
