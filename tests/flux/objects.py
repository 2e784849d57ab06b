"""A store of objects in memory, for tests: what is there, and who does something between two requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from flux.vault.object_store import Bucket


@dataclass
class Objects:
    """As ``flux.vault.object_store.Objects``. ``before``: called with each request before it is made."""

    held: dict[str, bytes] = field(default_factory=dict)
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
        """Another process's view of the same store, which nobody watches."""
        return Objects(self.held)


class AtOnce(Executor):
    """Each request aside is made where it is asked for, so that requests have an order."""

    def submit(self, call: Any, /, *given: Any, **more: Any) -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(call(*given, **more))
        return made


def bucket(objects: Objects, writes: bool = True) -> Bucket:
    return Bucket(objects, "the store", writes, AtOnce())
