"""The order of values in tests of ranks, in plain Python: that of Spark's ORDER BY."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def compared(a: Any, b: Any, descending: bool = False, nulls_last: bool = False) -> int:
    """Compare two values: negative if ``a`` comes first, 0 if they are equal."""
    if a is None or b is None:
        found = (a is not None) - (b is not None)
        return -found if nulls_last else found
    found = _values(a, b)
    return -found if descending else found


def _values(a: Any, b: Any) -> int:
    if isinstance(a, dict):
        return _sequences(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple):
        return _sequences(a, b)
    if isinstance(a, float) and (math.isnan(a) or math.isnan(b)):
        return math.isnan(a) - math.isnan(b)
    if isinstance(a, str):
        a, b = a.encode(), b.encode()
    return (a > b) - (a < b)


def _sequences(a: Sequence[Any], b: Sequence[Any]) -> int:
    for x, y in zip(a, b, strict=False):
        if found := compared(x, y):
            return found
    return (len(a) > len(b)) - (len(a) < len(b))
