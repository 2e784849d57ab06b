"""Values that all operators of one class share: attributes of the class, and defaults of the arguments of ``__init__``.

A worker has one such value for all partitions, and it does not travel. An operator that changes one counts the rows of other
partitions, and loses its own with a move. The change is refused where the state is checked (design: attribute-state).
"""

from __future__ import annotations

import io
import pickle
import types
import zlib
from collections.abc import Iterator
from enum import Enum
from typing import Any

from flux.errors import SnapshotError

#: Attributes of the class that are no values of the user's.
_KNOWN = frozenset(("schema", "snapshot_classes", "state_version", "transient", "context", "restores_in_background"))
#: Types of values that cannot change, and whose pickle says nothing.
_FIXED = bool | int | float | complex | str | bytes | type | Enum | types.ModuleType | None
#: Bytes of a pickle, and of one array, that are compared. More would hold up the partition at each copy of its state.
_PICKLE_BYTES = 64 << 10
_ARRAY_BYTES = 16 << 20


class SharedValues:
    """The shared values of the class of an operator when the operator was opened."""

    __slots__ = ("_arguments", "_of_class")

    def __init__(self, operator: Any) -> None:
        kind = type(operator)
        self._of_class = {place: (value, _print(value)) for place, value in _class_values(kind)}
        defaults = {id(value) for value in _defaults(kind)}
        self._arguments = [
            (name, value, _print(value))
            for name, value in vars(operator).items()
            if id(value) in defaults and not isinstance(value, _FIXED)
        ]

    def check(self, operator: Any) -> None:
        """Raise SnapshotError if a shared value has changed since."""
        kind = type(operator)
        without = transient_names(kind)
        for (base, name), value in _class_values(kind):
            before, printed = self._of_class.get((base, name), (_NONE, None))
            if value is before and _print(value) == printed:
                continue
            what = f"{base.__name__}.{name} is one {type(value).__name__} of the class, which"
            if value is before:
                raise SnapshotError(_text(what, f"Make one for each in open(): self.{name} = ...", name))
            raise SnapshotError(
                _text(what, f"Set it in the operator: self.{name} = ..., with self instead of the class", name)
            )
        for name, value, printed in self._arguments:
            if name not in without and _print(value) != printed:
                one = f"one {type(value).__name__} of the class, which"
                what = f"attribute {name!r} of {kind.__name__} is the default of an argument of __init__, {one}"
                raise SnapshotError(
                    _text(what, f"Let the default be None, and make one for each: self.{name} = ...", name)
                )


def transient_names(kind: type) -> frozenset[str]:
    """Return the names that a class and its bases list in ``transient``."""
    return frozenset(name for base in kind.__mro__ for name in vars(base).get("transient", ()))


def _text(what: str, advice: str, name: str) -> str:
    return (
        f"{what} changes while the query runs: all partitions of a worker share it, and it does not travel with any of them. "
        f"{advice}. If it is no state, such as a cache, name it in the class: transient = ({name!r},)"
    )


def _class_values(kind: type) -> Iterator[tuple[tuple[type, str], Any]]:
    """Give the attributes of a class and its bases, without methods and other descriptors and without those of Flux."""
    without = _KNOWN | transient_names(kind)
    for base in kind.__mro__:
        if base is object or base.__module__.partition(".")[0] == "flux":
            continue
        for name, value in list(vars(base).items()):
            ours = name in without or name.startswith(("__", "_flux_", "_abc_"))
            if not (ours or hasattr(type(value), "__get__") or type(value).__module__.partition(".")[0] == "flux"):
                yield (base, name), value


def _defaults(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        make = vars(base).get("__init__")
        if isinstance(make, types.FunctionType):
            yield from make.__defaults__ or ()
            yield from (make.__kwdefaults__ or {}).values()


def _print(value: Any) -> Any:
    """Return a number that changes with a value. None: nothing is known but which object it is."""
    if isinstance(value, _FIXED):
        return None
    if type(value).__module__ == "itertools":
        return repr(value)
    out = _Checksum()
    try:
        _Printer(out).dump(value)
    except _Enough:
        pass
    except Exception:  # it cannot be pickled
        return None
    return out.sum, len(value) if hasattr(type(value), "__len__") else 0


class _Enough(Exception):
    """The end of the bytes that are compared."""


class _Checksum(io.RawIOBase):
    """A stream that keeps the checksum of its bytes."""

    def __init__(self) -> None:
        self.sum = self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.sum = zlib.crc32(data, self.sum)
        self._size += size
        if self._size > _PICKLE_BYTES:
            raise _Enough
        return size

    def array(self, buffer: pickle.PickleBuffer) -> None:
        """Add the memory of an array, which goes beside the pickle."""
        self.sum = zlib.crc32(buffer.raw()[:_ARRAY_BYTES], self.sum)


class _Printer(pickle.Pickler):
    """Pickler of values, with an identity for each class, function and module: their own values belong to other code."""

    def __init__(self, out: _Checksum) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL, buffer_callback=out.array)

    def persistent_id(self, thing: Any) -> Any:
        return id(thing) if isinstance(thing, type | types.FunctionType | types.ModuleType) else None


_NONE = object()
