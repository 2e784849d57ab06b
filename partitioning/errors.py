"""Errors about columns and keyed state: a key or measure of an unfit type, a sum that is too large, a state of other groups.

An error about a column names it and says what would work instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa


class KeyTypeError(TypeError):
    """A key column has a type that cannot be hashed and compared exactly."""

    def __init__(self, column: str, type_: pa.DataType, supported: Iterable[str]) -> None:
        self.column, self.type = column, type_
        super().__init__(
            f"column {column!r} of type {type_} cannot be a key; supported are {', '.join(supported)}. "
            "Cast the column, or derive a key from it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class ColumnTypeError(TypeError):
    """A column has no such measure because of its type, as a string has no sum."""

    def __init__(self, measure: str, column: str, type_: pa.DataType, supported: Iterable[str]) -> None:
        self.measure, self.column, self.type = measure, column, type_
        super().__init__(
            f"{measure}({column!r}) is not defined for type {type_}; supported are {', '.join(supported)}. "
            "Cast the column first"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class SumOverflowError(ArithmeticError):
    """A sum or mean left the range of its result type. No wrapped value is given, as in Spark's ANSI mode."""

    def __init__(self, column: str, type_: pa.DataType, measure: str = "sum") -> None:
        self.column, self.type = column, type_
        super().__init__(
            f"the {measure} of column {column!r} does not fit {type_}. Cast the column to double, or to a decimal "
            f"with room for the {measure}, before aggregating it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class StateMismatchError(ValueError):
    """A snapshot, changes or a state to be merged that belongs to a state of other keys, measures or groups."""


class FailedPartition(Exception):
    """Rows of one partition cannot be applied; ``at`` is the index of the partition among those of the call."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(at, error)
        self.at, self.error = at, error


def _rebuilt(cls: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    # These errors cross process boundaries. Unpickling would by default call __init__ with the finished message.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
