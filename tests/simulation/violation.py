"""How a broken law is told."""

from __future__ import annotations

#: (stage, partition)
Key = tuple[int, int]


class Violation(Exception):
    """A law was broken."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law
        self.detail = detail
