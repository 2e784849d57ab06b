"""Reading pickles of plain data: values and arrays, and no code (DESIGN 8).

A pickle names the functions that make its objects, and reading one calls them. What is read here has come from a process
that has proved the query's secret, in a copy that bears its code; that it can also do nothing but make values is the
second line. Only the objects of an operator of the user's own may be of any class, because ordinary ones are.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from flux.errors import SnapshotError

_NUMPY = ("_frombuffer", "_reconstruct", "scalar")
_ARROW = (
    "_reconstruct_record_batch", "_reconstruct_table", "_restore_array", "binary", "binary_view", "chunked_array",
    "decimal32", "decimal64", "decimal128", "decimal256", "dictionary", "duration", "field", "fixed_size_list", "large_list",
    "list_", "list_view", "map_", "py_buffer", "run_end_encoded", "scalar", "schema", "string_view", "struct", "time32",
    "time64", "timestamp", "type_for_alias",
)  # fmt: skip
#: What may be named: it makes values, and does nothing else.
PLAIN: dict[str, tuple[str, ...]] = {
    "builtins": ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range",
                 "set", "slice", "str", "tuple"),
    "array": ("array", "_array_reconstructor"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "uuid": ("UUID",),
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


class Plain(pickle.Unpickler):
    """``classes`` that may be named beside what is plain."""

    def __init__(self, data: bytes | memoryview, classes: Sequence[type] = (), buffers: Any = None) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._classes = {(kind.__module__, kind.__qualname__): kind for kind in classes}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise SnapshotError(
            f"a copy of state holds a {module}.{name}, which is neither plain data nor one of the operator's snapshot_classes"
        )


def loads(data: bytes | memoryview, classes: Sequence[type] | None, buffers: Any = None) -> Any:
    """``classes``: beside plain data; None: any, and whatever they do when they are made."""
    if classes is None:
        return pickle.loads(data, buffers=buffers)
    return Plain(data, classes, buffers).load()
