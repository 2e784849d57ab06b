"""The exception for a broken law."""

from __future__ import annotations

#: (stage, partition)
Key = tuple[int, int]


class Violation(Exception):
    """The report of a broken law."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law
        self.detail = detail
