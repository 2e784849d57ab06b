"""Names of the JVM are looked up once for each JVM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spark_integration.jvm import of_jvm


class View:
    """A JVM, or a part of a name in it, that writes down each question."""

    def __init__(self, asked: list[str], name: str = "") -> None:
        self._asked, self._name = asked, name

    def __getattr__(self, part: str) -> View:
        self._asked.append(part)
        return View(self._asked, f"{self._name}.{part}")


def session(asked: list[str]) -> Any:
    return SimpleNamespace(_jvm=View(asked))


def test_a_name_is_looked_up_once_in_each_jvm() -> None:
    asked: list[str] = []
    one, other = session(asked), session(asked)
    found = of_jvm(one, "java.util.ArrayList")
    assert found._name == ".java.util.ArrayList"
    assert of_jvm(one, "java.util.ArrayList") is found
    assert of_jvm(one, "java.util.HashMap") is not found
    assert asked == ["java", "util", "ArrayList", "java", "util", "HashMap"]
    assert of_jvm(other, "java.util.ArrayList") is not found, "that of another JVM is of no use"
