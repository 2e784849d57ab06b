"""Pickles of plain data: values and arrays, and no code (design: signed-copies).

A pickle names the functions that make its objects, and reading one calls them. Pickles that are read here come from a process
that has proved the query's secret, in a copy that bears its code. This module is the second line: reading can do nothing but make
values. Only the objects of an operator of the user's own may be of any class, because ordinary ones are.

Reading sets attributes of the objects that it makes, and must not set any of the objects that it names: a class or function of a
library stays in this process when the query is over.

A class that an operator lists travels as its index in that list. The other end takes its own class, so that a class of a notebook
or of ``__main__``, which cannot be imported there, needs no code in the pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from datetime import tzinfo
from enum import Enum
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

import cloudpickle

from flux.errors import SnapshotError

_NUMPY = ("_frombuffer", "_reconstruct", "scalar")
_ARROW = (
    "_reconstruct_record_batch", "_reconstruct_table", "_restore_array", "binary", "binary_view", "chunked_array",
    "decimal32", "decimal64", "decimal128", "decimal256", "dictionary", "duration", "field", "fixed_size_list", "large_list",
    "list_", "list_view", "map_", "py_buffer", "run_end_encoded", "scalar", "schema", "string_view", "struct", "time32",
    "time64", "timestamp", "type_for_alias",
)  # fmt: skip
_PATHS = ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
#: Names that a pickle may use. They make values, and do nothing else. Releases of numpy and of Python name some modules
#: differently.
PLAIN: dict[str, tuple[str, ...]] = {
    "builtins": ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range",
                 "set", "slice", "str", "tuple"),
    "array": ("array", "_array_reconstructor"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "ipaddress": ("IPv4Address", "IPv4Interface", "IPv4Network", "IPv6Address", "IPv6Interface", "IPv6Network"),
    "pandas._libs.missing": ("NA",),
    "pandas._libs.tslibs.nattype": ("__nat_unpickle",),
    "pandas._libs.tslibs.timedeltas": ("_timedelta_unpickle",),
    "pandas._libs.tslibs.timestamps": ("_unpickle_timestamp",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "pytz": ("_UTC", "_p"),
    "types": ("SimpleNamespace",),
    "uuid": ("UUID",),
    "zoneinfo": ("ZoneInfo",),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": _NUMPY,
    "numpy._core.numeric": _NUMPY,
    "numpy.core.multiarray": _NUMPY,
    "numpy.core.numeric": _NUMPY,
    "numpy.ma": ("MaskedArray",),
    "numpy.ma.core": ("MaskedArray", "_mareconstruct"),
    "numpy.random._pickle": ("__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"),
    "numpy.random._pcg64": ("PCG64", "PCG64DXSM"),
    "numpy.random._mt19937": ("MT19937",),
    "numpy.random._philox": ("Philox",),
    "numpy.random._sfc64": ("SFC64",),
    "numpy.random.bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
    "pyarrow.lib": _ARROW,
}  # fmt: skip


#: Names of this module, by which a pickle names ``listed`` and ``anchor``: the present one, and each one before that a checkpoint
#: location may hold.
_HERE = (__name__, "flux.wire.unpickle")


#: Attributes of a class that can be set, beside those that ``vars`` shows.
_OF_CLASSES = ("__bases__", "__name__", "__qualname__")
#: ``Py_TPFLAGS_IMMUTABLETYPE``: the attributes of such a class cannot be set.
_IMMUTABLE = 1 << 8


class Plain(pickle.Unpickler):
    """Unpickler of plain data and of listed ``classes``.

    SnapshotError: the pickle sets attributes of an object that it did not make. These have their earlier values then."""

    def __init__(
        self, data: bytes | memoryview, classes: Sequence[type] = (), buffers: Any = None, anchors: Sequence[Any] = ()
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._anchors = tuple(anchors)
        self._listed = tuple(classes)
        self._classes = {name: kind for kind in classes for name in names_of(kind)}
        self._shared: list[tuple[Any, dict[str, Any]]] = []  # objects that other code uses, too, with their attributes

    def load(self) -> Any:
        changed: list[str] = []
        try:
            value = super().load()
        finally:
            for thing, before in self._shared:
                changed += [f"{thing!r}.{name}" for name in _put_back(thing, before)]
        if changed:
            raise SnapshotError(
                f"a copy of state sets {', '.join(changed)}, which other code of this process uses, too"
            )
        return value

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if name in PLAIN.get(module, ()):
            return self._guarded(super().find_class(module, name))
        if module in _HERE and name == listed.__name__:
            return self._at
        if module in _HERE and name == anchor.__name__:
            return self._anchors.__getitem__
        raise _refusal(f"{module}.{name}")

    def _guarded(self, named: Any) -> Any:
        """Return the named class, or a wrapper of the named function that notes each object made by the function."""
        if isinstance(named, type):
            self._keep(named)
            return named
        return named if not callable(named) else lambda *arguments: self._keep(named(*arguments))

    def _keep(self, thing: Any) -> Any:
        """Note the attributes of a mutable class, or of an object that exists once, such as a time zone of pytz."""
        shared = not thing.__flags__ & _IMMUTABLE if isinstance(thing, type) else isinstance(thing, tzinfo)
        if shared and all(thing is not known for known, _ in self._shared):
            self._shared.append((thing, _attributes(thing)))
        return thing

    def _at(self, place: int) -> type:
        if 0 <= place < len(self._listed):
            return self._listed[place]
        raise SnapshotError(f"a copy of state names class {place} of snapshot_classes, which lists {len(self._listed)}")


def names_of(kind: type) -> list[tuple[str, str]]:
    """Return module and name of a class: the present ones, and those before that checkpoint locations may hold. A class of Flux
    that was moved or renamed lists the latter as ``__former_names__``, the earliest last."""
    return [(kind.__module__, kind.__qualname__), *vars(kind).get("__former_names__", ())]


def _attributes(thing: Any) -> dict[str, Any]:
    more = {name: getattr(thing, name) for name in _OF_CLASSES} if isinstance(thing, type) else {}
    return {**getattr(thing, "__dict__", {}), **more}


def _put_back(thing: Any, before: dict[str, Any]) -> list[str]:
    """Reset the attributes of an object, and return the names of those that had changed."""
    now, absent = _attributes(thing), object()
    changed = [name for name in {**before, **now} if now.get(name, absent) is not before.get(name, absent)]
    for name in changed:
        if name in before:
            setattr(thing, name, before[name])
        else:
            delattr(thing, name)
    return changed


def listed(place: int) -> NoReturn:
    """Stand in a pickle for the class at an index of ``snapshot_classes``. ``Plain`` replaces it by the class."""
    raise SnapshotError("a copy of state was written with snapshot_classes, and this operator has none")


def anchor(place: int) -> NoReturn:
    """Stand in a pickle for the object at an index of ``anchors``. The reader of the pickle puts its own there."""
    raise SnapshotError("a copy of state refers to its operator, and is read without one")


class Anchored(pickle.Unpickler):
    """Unpickler of objects of any class, with ``anchors`` in their places."""

    def __init__(self, data: bytes | memoryview, buffers: Any, anchors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._anchors = tuple(anchors)

    def find_class(self, module: str, name: str) -> Any:
        if module in _HERE and name == anchor.__name__:
            return self._anchors.__getitem__
        return super().find_class(module, name)


def _refusal(name: str) -> SnapshotError:
    return SnapshotError(
        f"a copy of state holds a {name}, which is neither plain data nor one of the operator's snapshot_classes. List its "
        "class in snapshot_classes, make plain data of it in snapshot(), or set snapshot_classes = None: anything may travel"
    )


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of data for ``loads`` with the same ``classes``. Functions and classes travel as code only if any class may
    travel."""

    def __init__(
        self,
        file: io.BytesIO,
        classes: Sequence[type] | None,
        keep: Callable[[pickle.PickleBuffer], Any] | None,
        anchors: Sequence[Any] = (),
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=keep)
        self._listed = None if classes is None else tuple(classes)
        self._places = {id(kind): place for place, kind in enumerate(self._listed or ())}
        self._anchors = {id(thing): place for place, thing in enumerate(anchors)}
        self._cells: set[int] = set()  # variables of closures

    def reducer_override(self, obj: Any) -> Any:
        place = self._places.get(id(obj))
        if place is not None:
            return listed, (place,)
        place = self._anchors.get(id(obj))
        if place is not None:
            return anchor, (place,)
        if type(obj) is ZoneInfo and obj.key is not None:
            return ZoneInfo, (obj.key,)  # its own pickling looks up an attribute by name
        if self._listed is not None and isinstance(obj, Enum) and type(obj).__reduce_ex__ is Enum.__reduce_ex__:
            return type(obj), (obj.value,)  # as later releases do; Python 3.11.2 looks up an attribute by name
        if obj is SimpleNamespace:
            return obj.__qualname__  # cloudpickle looks it up in the same way as functions and code
        if isinstance(obj, CellType) and id(obj) in self._cells:
            return CellType, ()  # each function that has the cell fills it
        reduced = super().reducer_override(obj)
        if self._listed is not None and reduced is not NotImplemented and isinstance(obj, type | FunctionType):
            raise _refusal(f"{obj.__module__}.{obj.__qualname__}")
        if isinstance(obj, FunctionType) and obj.__closure__ and isinstance(reduced, tuple):
            return self._with_shared_cells(obj, reduced)
        return reduced

    def _with_shared_cells(self, function: FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Have functions that share a variable (``nonlocal``) share it after reading. cloudpickle gives each function its own.

        The function is made with its cells, still empty, and its state holds copies of them with their contents, because a
        content may refer to the function."""
        make, (code, variables, name, defaults, _), (attributes, slots), *rest = reduced
        cells = function.__closure__ or ()
        self._cells.update(map(id, cells))
        slots = {**slots, "__closure__": tuple(_copied(cell) for cell in cells)}
        return make, (code, variables, name, defaults, cells), (attributes, slots), *rest


def _copied(cell: CellType) -> CellType:
    try:
        return CellType(cell.cell_contents)
    except ValueError:  # it is empty
        return CellType()


def dumps(
    value: Any,
    classes: Sequence[type] | None,
    keep: Callable[[pickle.PickleBuffer], Any] | None,
    anchors: Sequence[Any] = (),
) -> bytes:
    """Pickle a value for ``loads`` with the same ``classes``. ``keep`` is called with the memory of each large array, which
    travels beside the pickle; without ``keep`` it is part of the pickle. ``anchors``: objects that do not travel, because the
    reader has others in their places.

    SnapshotError: the value holds code, or objects of a class that would have to travel as code."""
    with io.BytesIO() as file:
        Pickler(file, classes, keep, anchors).dump(value)
        return file.getvalue()


def loads(
    data: bytes | memoryview, classes: Sequence[type] | None, buffers: Any = None, anchors: Sequence[Any] = ()
) -> Any:
    """Read a pickle that may name plain data and ``classes``. With None it may name anything, and run any code. ``anchors``: as
    for ``dumps``."""
    if classes is not None:
        return Plain(data, classes, buffers, anchors).load()
    return Anchored(data, buffers, anchors).load() if anchors else pickle.loads(data, buffers=buffers)
