"""State of operators that define neither ``snapshot`` nor ``restore``: the values of their attributes (design: attribute-state).

Law: a fresh operator that has been opened and has got the attributes of another operator gives the same output for the same
rows as that other operator.

Some attributes do not travel: the context, attributes that the class names in ``transient``, and attributes that still have the
number, text or function that ``__init__`` gave them. The last kind holds the arguments of an operator: a query that is started
again with other arguments works with the new ones. A function that holds anything else, as a closure over a dictionary does, is
state.

Attributes may refer to their operator and its context, as ``self.handlers = {"a": self.on_a}`` does. A pickle names both by
place, and the reader puts its own operator and context there. A copy of the operator would have a second state, and changes of
that state would be lost.

``SharedValues`` are those that all operators of one class share.
"""

from __future__ import annotations

import datetime
import decimal
import io
import os
import pickle
import traceback
import types
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Any

import cloudpickle
import numpy as np

from flux.errors import SnapshotError, UsageError
from flux.operators.user_code import described, user_traceback
from flux.tracebacks import OURS
from flux.wire.safe_pickle import dumps, loads

#: Attributes of the class that are no values of the user's.
_KNOWN = frozenset(("schema", "snapshot_classes", "state_version", "transient", "context", "restores_in_background"))
#: Types of values that cannot change, and whose pickle says nothing.
_FIXED = bool | int | float | complex | str | bytes | type | Enum | types.ModuleType | None
#: Bytes of a pickle, and of one array, that are compared. More would hold up the partition at each copy of its state.
_PICKLE_BYTES = 64 << 10
_ARRAY_BYTES = 16 << 20


class SharedValues:
    """The shared values of the class of an operator when the operator was opened: attributes of the class, and defaults of the
    arguments of ``__init__``.

    A worker has one such value for all partitions, and it does not travel. An operator that changes one counts the rows of other
    partitions, and loses its own with a move. The change is refused where the state is checked (design: attribute-state)."""

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


#: Attributes of an operator that Flux sets.
_OURS = frozenset(("context", "_flux_stage", "_flux_opened"))
#: Types of values that nothing changes in place, apart from functions, which may hold other values.
_CONSTANT = (
    types.NoneType, bool, int, float, complex, str, bytes, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal,
    uuid.UUID, Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip
#: Types of values that are often meant as the first state of each operator, but made once, in the class, for all operators.
_CONTAINERS = (dict, list, set, deque, bytearray)
#: First bytes of attributes that are kept as bytes within another snapshot.
_MAGIC = b"flux attributes\n"
#: Largest number of handlers that an attribute is expected to hold.
_FEW = 100
_ABSENT = object()
_PICKLER = os.path.dirname(cloudpickle.__file__) + os.sep


@dataclass(frozen=True, slots=True)
class Opened:
    """The attributes of an operator when its ``open`` had returned."""

    context: Any
    names: frozenset[str]
    #: Attributes that ``__init__`` had set, each with the objects it holds. They do not travel while all are the same objects.
    constants: dict[str, list[Any]]
    #: Values that all operators of the class share, from before ``open``.
    shared: SharedValues


def open_operator(operator: Any, context: Any) -> None:
    """Call ``open``. The context is set before the call, so that an ``open`` without ``super().open(context)`` does no harm."""
    made: dict[str, list[Any]] = {}
    for name, value in attributes(operator).items():
        held = [value] if name == "schema" else _held(value, operator)
        if held is not None:
            made[name] = held
    shared = SharedValues(operator)
    object.__setattr__(operator, "context", context)
    operator.open(context)
    for name in operator._made_in_open:
        if name not in vars(operator):
            raise UsageError(
                f"{type(operator).__name__}.open(self, context) must call super().open(context), which makes what process needs"
            )
    now = attributes(operator)
    constants = {name: held for name, held in made.items() if now.get(name, _ABSENT) is held[0]}
    object.__setattr__(operator, "_flux_opened", Opened(context, frozenset(now), constants, shared))


def attributes(operator: Any) -> dict[str, Any]:
    """Return the values of all attributes of an object, including attributes in slots, without the attributes that Flux sets."""
    found = {name: member.__get__(operator) for name, member in _slots(type(operator)) if _is_set(member, operator)}
    return {name: value for name, value in (found | vars(operator)).items() if name not in _OURS}


def _held(value: Any, operator: Any) -> list[Any] | None:
    """Return a constant and everything that it holds; None: the value is no constant.

    A function holds its attributes, its defaults and the variables of its closure, and a method of a C type its object. Any of
    them may be a container that the function fills, so a function is a constant only if all of them are."""
    held, seen, pending = [], {id(operator)}, [value]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.FunctionType):
            pending += [*vars(thing).values(), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
            pending += [_content(cell) for cell in thing.__closure__ or ()]
        elif isinstance(thing, types.BuiltinFunctionType):
            pending.append(thing.__self__)
        elif thing is not _ABSENT and not isinstance(thing, _CONSTANT):
            return None
        held.append(thing)
    return held


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return _ABSENT


def _is_constant(value: Any, before: list[Any], operator: Any) -> bool:
    """Return whether a constant from the time of ``open`` is, and holds, the same objects as then."""
    if value is not before[0]:
        return False
    now = _held(value, operator) if isinstance(value, types.FunctionType) else before
    return (
        now is not None
        and len(now) == len(before)
        and all(one is other for one, other in zip(now, before, strict=True))
    )


def _with_cells(names: set[str], now: dict[str, Any]) -> set[str]:
    """Return the names of those other attributes whose functions have a variable in common with a function that travels. They
    have to travel, too: the new operator's own function would have another variable of that name."""
    cells = {
        name: {id(cell) for one in _functions(value) for cell in one.__closure__ or ()} for name, value in now.items()
    }
    found: set[str] = set()
    while True:
        moving = {cell for name in names | found for cell in cells.get(name, ())}
        more = {name for name in now.keys() - names - found if cells[name] & moving}
        if not more:
            return found
        found |= more


def _functions(value: Any) -> list[types.FunctionType]:
    """Return the functions that an attribute is, or holds in a small container."""
    held = [value]
    if isinstance(value, dict | list | tuple) and len(value) <= _FEW:
        held = list(value.values()) if isinstance(value, dict) else list(value)
    return [one for one in held if isinstance(one, types.FunctionType)]


def attribute_count(operator: Any) -> int:
    """Return the number of attributes outside slots: a cheap way to notice new attributes."""
    return len(vars(operator))


def _slots(kind: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """Give the slots of a class and its bases. Two classes may declare the same name; the first of them hides the other."""
    seen: set[str] = set()
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and name not in seen:
                seen.add(name)
                yield name, member


def _is_set(member: types.MemberDescriptorType, operator: Any) -> bool:
    try:
        member.__get__(operator)
    except AttributeError:
        return False
    return True


class AttributeState:
    """The state of an operator as it is now: a reference to the values, not a copy. ``gone`` names attributes that ``open`` makes
    and that have been deleted since."""

    __slots__ = ("gone", "operator", "values")

    def __init__(self, operator: Any, values: dict[str, Any], gone: tuple[str, ...]) -> None:
        self.operator, self.values, self.gone = operator, values, gone

    def pickled(self, keep: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
        """Pickle the state for ``PickledAttributes``. ``keep``: see ``dumps``; None: large arrays are part of the pickle. Raises
        SnapshotError with the name of the attribute that cannot be pickled."""
        try:
            return self._dumps((self.values, self.gone), keep)
        except BaseException as error:
            raise self._error(error, self._dumps) from error

    def check(self) -> None:
        """Raise SnapshotError if an attribute can be pickled, but its pickle cannot be read."""
        classes, places = self.operator.snapshot_classes, places_of(self.operator)

        def comes_back(value: Any, _: Any) -> Any:
            return loads(self._dumps(value, None), classes, anchors=places)

        try:
            comes_back((self.values, self.gone), None)
        except BaseException as error:
            raise self._error(error, comes_back) from error

    def _dumps(self, value: Any, keep: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
        return dumps(value, self.operator.snapshot_classes, keep, places_of(self.operator))

    def _error(self, error: BaseException, call: Callable[[Any, Any], Any]) -> SnapshotError:
        """Make the error for the first attribute that fails alone."""
        for name, value in self.values.items():
            try:
                call(value, None)
            except BaseException as reason:
                return SnapshotError(self._text(name, value, reason), _frames(reason))
        whole = f"the attributes {', '.join(self.values)} cannot be pickled together ({described(error)})"
        return SnapshotError(whole, user_traceback(error))

    def _text(self, name: str, value: Any, reason: BaseException) -> str:
        kind = type(self.operator).__name__
        why = reason.summary if isinstance(reason, SnapshotError) else described(reason)
        return (
            f"attribute {name!r} of {kind}, a {type(value).__name__}, cannot travel as state ({why}). If open() can make "
            f"it again, name it in the class: transient = ({name!r},). Else define snapshot() and restore(), which give and "
            "take the state in another form"
        )

    def __reduce__(self) -> Any:
        """Pickle as bytes, for a state that is part of another snapshot."""
        return bytes, (_MAGIC + self.pickled(None),)

    def __repr__(self) -> str:
        return f"<attributes {', '.join(self.values)} of {type(self.operator).__name__}>"


class PickledAttributes:
    """The state of an operator as it was received. It is unpickled once there is an operator for it."""

    __slots__ = ("_arrays", "_data")

    def __init__(self, data: bytes | memoryview, arrays: Sequence[Any] = ()) -> None:
        self._data, self._arrays = data, arrays

    def read(self, operator: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the values, and the names of deleted attributes."""
        values, gone = loads(self._data, operator.snapshot_classes, self._arrays, places_of(operator))
        return values, gone

    def __repr__(self) -> str:
        return "<attributes of an operator that defines neither snapshot() nor restore()>"


def _frames(error: BaseException) -> str:
    """Return the traceback if a line of the user's code has failed; an empty text if the pickler alone has failed."""
    named = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return "" if all(name.startswith((*OURS, _PICKLER)) for name in named) else user_traceback(error)


def places_of(operator: Any) -> tuple[Any, ...]:
    """Return the objects that a pickle names by place: objects of which each operator has its own."""
    context = getattr(operator, "context", None)
    return (operator,) if context is None else (operator, context, context.timers, context.event_timers)


def state_of(operator: Any, without: frozenset[str] = frozenset()) -> AttributeState | None:
    """Return the attributes of an operator as its state; None: it has none. ``without``: names that are not part of the state."""
    _check_shared(operator)
    opened = getattr(operator, "_flux_opened", None)
    if opened is not None:
        opened.shared.check(operator)
    left_out = without | transient_names(type(operator))
    now = attributes(operator)
    constants = {} if opened is None else opened.constants
    names = {
        name
        for name, value in now.items()
        if name not in constants or not _is_constant(value, constants[name], operator)
    }
    names |= _with_cells(names - left_out, now)
    values = {name: value for name, value in now.items() if name in names - left_out}
    _check_views(operator, values)
    gone = () if opened is None else tuple(sorted(opened.names - now.keys() - left_out))
    return AttributeState(operator, values, gone) if values or gone else None


def put_state(operator: Any, state: Any) -> None:
    """Give an operator the attributes of ``state``, in any form that the result of ``state_of`` takes on its way. None: there are
    no attributes to give, and ``open`` has made everything."""
    if state is None:
        return
    if isinstance(state, bytes) and state.startswith(_MAGIC):
        state = PickledAttributes(memoryview(state)[len(_MAGIC) :])
    if isinstance(state, AttributeState):
        values, gone = state.values, state.gone
    elif isinstance(state, PickledAttributes):
        values, gone = state.read(operator)
    else:
        kind = type(operator).__name__
        raise SnapshotError(
            f"{kind} defines neither snapshot() nor restore(), so its state is what its attributes hold; it got a "
            f"{type(state).__name__}, which a snapshot() has made. Give {kind} the snapshot() and restore() that it had when "
            "this state was kept"
        )
    stays = transient_names(type(operator))
    slots = dict(_slots(type(operator)))
    for name in set(gone) - stays:
        slots[name].__delete__(operator) if name in slots else vars(operator).pop(name, None)
    for name in values.keys() - stays:
        if name in slots:
            slots[name].__set__(operator, values[name])
        else:
            vars(operator)[name] = values[name]


def check_transient(kind: type) -> None:
    """Raise UsageError if a class has a ``transient`` that is no tuple of names."""
    given = vars(kind).get("transient", ())
    if not isinstance(given, tuple | list | set | frozenset) or not all(isinstance(name, str) for name in given):
        one = given if isinstance(given, str) else "connection"
        raise UsageError(
            f"{kind.__name__}.transient must be a tuple of names of attributes, as in ({one!r},), not {given!r}"
        )


def empty_containers(kind: type) -> tuple[str, ...]:
    """Return the names of the empty dictionaries, lists and sets in the body of a class, when it has just been made."""
    return tuple(name for name, value in vars(kind).items() if isinstance(value, _CONTAINERS) and not value)


def _check_views(operator: Any, values: dict[str, Any]) -> None:
    """Raise SnapshotError if two attributes are arrays with memory in common. The reader of a pickle makes two of them."""
    arrays: dict[int, list[tuple[str, np.ndarray]]] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            arrays.setdefault(id(_memory_of(value)), []).append((name, value))
    for found in arrays.values():
        for (one, first), (other, second) in combinations(found, 2):
            if first is not second and (first.flags.writeable or second.flags.writeable) and _overlap(first, second):
                view, whole = (one, other) if second.base is None else (other, one)
                raise SnapshotError(
                    f"attribute {view!r} of {type(operator).__name__} is a view into the memory of attribute {whole!r}: after "
                    "a move or a repair they would be two arrays, and a change of one would not show in the other. Keep one of "
                    "the two, and index it where the view is used"
                )


def _memory_of(array: np.ndarray) -> Any:
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _overlap(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.shares_memory(one, other, max_work=10_000)  # type: ignore[arg-type]
    except RuntimeError:  # TooHardError
        return True


def _check_shared(operator: Any) -> None:
    """Raise SnapshotError if the operator fills a container of its class."""
    kind = type(operator)
    for base in kind.__mro__:
        for name in vars(base).get("_flux_empty", ()):
            value = vars(base).get(name)
            if isinstance(value, _CONTAINERS) and value and name not in transient_names(kind):
                raise SnapshotError(
                    f"{base.__name__}.{name} is one {type(value).__name__} of the class, which is filled while the query runs: "
                    f"all partitions of a worker share it, and it does not travel with any of them. Make one for each in "
                    f"open(): self.{name} = {type(value).__name__}()"
                )
