"""Operators of the simulation that tell what has changed in their state, each time or most of the time.

Which of them do so is drawn for each stage. What they tell is found by comparing the state with what it was when they were last
asked: lists that have grown tell what was appended, dictionaries their new items, anything else its value.
"""

from __future__ import annotations

import random
from typing import Any

import flux

#: So many of the stages tell what has changed.
TELLING_SHARE = 0.9
#: So often one of these does not know.
UNKNOWN_SHARE = 0.03


class Telling:
    """Beside an operator with a ``state`` of lists, dictionaries and plain values."""

    state: dict[str, Any]
    stage_name: str
    _earlier: dict[str, Any] | None = None
    _rng: random.Random | None = None

    def changes(self) -> Any:
        if self._rng is None:
            self._rng = random.Random(self.stage_name)
        earlier, self._earlier = self._earlier, {name: _copied(value) for name, value in self.state.items()}
        if earlier is None or self._rng.random() < UNKNOWN_SHARE:
            return None
        return [_change(name, earlier[name], value) for name, value in self.state.items() if earlier[name] != value]

    def apply_changes(self, changes: Any) -> None:
        for name, how, value in changes:
            if how == "appended":
                self.state[name] += value
            elif how == "items":
                self.state[name] |= value
            else:
                self.state[name] = value


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value


def _change(name: str, earlier: Any, value: Any) -> tuple[str, str, Any]:
    if isinstance(value, list) and value[: len(earlier)] == earlier:
        return name, "appended", value[len(earlier) :]
    if isinstance(value, dict) and earlier.keys() <= value.keys():
        return name, "items", {key: item for key, item in value.items() if key not in earlier or earlier[key] != item}
    return name, "value", value


def perhaps_telling(kind: type, rng: random.Random | None) -> tuple[type, ...]:
    """The bases of the class of a stage. Aggregates tell by themselves."""
    tells = rng is not None and rng.random() < TELLING_SHARE and not issubclass(kind, flux.Aggregate)
    return (Telling, kind) if tells else (kind,)
