"""Operators of the simulation that tell the changes of their state, each time or most of the time.

A draw decides for each stage whether it tells changes. They are found by comparing the state with that of the last question:
grown lists tell the appended values, dictionaries tell their new items, and other parts tell their value.
"""

from __future__ import annotations

import random
from typing import Any

import flux

#: Share of the stages that tell their changes.
TELLING_SHARE = 0.9
#: Share of the questions to which such a stage does not know its changes.
UNKNOWN_SHARE = 0.03


class Telling:
    """A base beside an operator with a ``state`` of lists, dictionaries and plain values."""

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
    """Return the bases of the class of a stage, perhaps with ``Telling``. Aggregates tell changes without it."""
    tells = rng is not None and rng.random() < TELLING_SHARE and not issubclass(kind, flux.Aggregate)
    return (Telling, kind) if tells else (kind,)
