"""The row, column and reason for which a body does not fit. Only bad bodies come here, and each row is read a few times at most:
the search looks at one half, then at one half of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from flux.arguments import nearest
from flux.gateway.problems import Problem

ReadLines = Callable[[bytes, pa.Schema], pa.Table]


def first_bad(count: int, fits: Callable[[int, int], bool]) -> int:
    """Return the number of the first of ``count`` things that does not fit; there is one. ``fits`` tells of a range."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if fits(low, middle):
            low = middle
        else:
            high = middle
    return low


def check_names(names: Sequence[str], schema: pa.Schema) -> None:
    """Raise a Problem that names a column which the stream does not have, or which comes twice."""
    for name in names:
        if name not in schema.names:
            raise Problem("unfit_row", _unknown(name, schema), column=name[:100])
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise Problem("malformed", f"column {twice!r} comes twice", column=twice)


def _unknown(name: str, schema: pa.Schema) -> str:
    hint = nearest(
        name[:100], schema.names
    )  # a name may be as long as a body, and the search takes time and memory for each character
    return f"the stream has no column {name[:100]!r}{hint or '; it has ' + ', '.join(schema.names)[:1000]}"


def of_cast(column: pa.Array, field: pa.Field, said: str) -> Problem:
    """Return the problem of a column that cannot be cast."""

    def fits(low: int, high: int) -> bool:
        try:
            pc.cast(column.slice(low, high - low), field.type, safe=True)
        except (pa.ArrowException, UnicodeDecodeError):
            return False
        return True

    if not len(column) or fits(0, 0) is False:
        return Problem(
            "unfit_row", f"column {field.name!r}: expected {field.type}, got {column.type}: {said}", column=field.name
        )
    row = first_bad(len(column), fits)
    value = repr(column[row].as_py())[:100]
    return Problem(
        "unfit_row", f"row {row + 1}, column {field.name!r}: expected {field.type}, got {value}", row + 1, field.name
    )


def of_lines(lines: bytes, schema: pa.Schema, read: ReadLines, said: str) -> Problem:
    """Return the problem of lines of JSON that cannot be read."""
    rows = [line for line in lines.split(b"\n") if line.strip()]

    def fits(low: int, high: int) -> bool:
        try:
            read(b"\n".join(rows[low:high]), schema)
        except (pa.ArrowException, UnicodeDecodeError):
            return False
        return True

    row = first_bad(len(rows), fits)
    if fits(row, row + 1):
        return Problem("malformed", f"the body cannot be read: {said}")
    try:
        given = msgspec.json.decode(rows[row])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        return Problem("malformed", f"row {row + 1} is no JSON: {error}", row + 1)
    if not isinstance(given, dict):
        return Problem("malformed", f"row {row + 1}: expected an object, got {_shown(given)}", row + 1)
    for name, value in given.items():
        if name not in schema.names:
            return Problem("unfit_row", f"row {row + 1}: {_unknown(name, schema)}", row + 1, name[:100])
        try:
            read(msgspec.json.encode({name: value}), pa.schema([schema.field(name)]))
        except (pa.ArrowException, UnicodeDecodeError, msgspec.MsgspecError):
            type_ = schema.field(name).type
            return Problem(
                "unfit_row", f"row {row + 1}, column {name!r}: expected {type_}, got {repr(value)[:100]}", row + 1, name
            )
    return Problem("malformed", f"row {row + 1} cannot be read: {said}", row + 1)


def _shown(given: object) -> str:
    return msgspec.json.encode(given).decode()[:100]
