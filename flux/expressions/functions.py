"""The table of functions. A name of this table is part of the text form of expressions, which checkpoint locations
keep: it never gets another meaning.

Each function says whether it may raise, given its types and options, so that branches of conditions are computed only
for the rows that Spark would compute them for; and whether it is strict: null if any argument is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.types as is_

from flux.expressions.kernels import arithmetic, casts, formats, logic, nested_values, patterns, strings, times
from flux.expressions.kernels.values import ANSI, Value

Raises = Callable[[pa.DataType, Sequence[pa.DataType], Mapping[str, Any]], bool]


def _never(to: pa.DataType, given: Sequence[pa.DataType], options: Mapping[str, Any]) -> bool:
    return False


def _always(to: pa.DataType, given: Sequence[pa.DataType], options: Mapping[str, Any]) -> bool:
    return True


def _in_ansi_mode(to: pa.DataType, given: Sequence[pa.DataType], options: Mapping[str, Any]) -> bool:
    return options.get("mode") == ANSI


def _by_overflow(to: pa.DataType, given: Sequence[pa.DataType], options: Mapping[str, Any]) -> bool:
    return options.get("mode") == ANSI and not is_.is_floating(to)


def _by_cast(to: pa.DataType, given: Sequence[pa.DataType], options: Mapping[str, Any]) -> bool:
    return casts.can_fail(given[0], to, options["mode"])


@dataclass(frozen=True)
class Function:
    """A kernel with its properties."""

    kernel: Callable[..., Value]
    raises: Raises = _never
    strict: bool = True


FUNCTIONS: dict[str, Function] = {
    "add": Function(arithmetic.add, _by_overflow),
    "subtract": Function(arithmetic.subtract, _by_overflow),
    "multiply": Function(arithmetic.multiply, _by_overflow),
    "divide": Function(arithmetic.divide, _in_ansi_mode),
    "div": Function(arithmetic.integral_divide, _in_ansi_mode),
    "remainder": Function(arithmetic.remainder, _in_ansi_mode),
    "pmod": Function(arithmetic.pmod, _in_ansi_mode),
    "negate": Function(arithmetic.negate, _by_overflow),
    "abs": Function(arithmetic.absolute, _by_overflow),
    "bit_and": Function(arithmetic.bit_and),
    "bit_or": Function(arithmetic.bit_or),
    "bit_xor": Function(arithmetic.bit_xor),
    "bit_not": Function(arithmetic.bit_not),
    "sqrt": Function(arithmetic.square_root),
    "power": Function(arithmetic.power),
    "exp": Function(arithmetic.exponential),
    "log": Function(arithmetic.logarithm),
    "sign": Function(arithmetic.sign),
    "floor": Function(arithmetic.floor, _in_ansi_mode),
    "ceil": Function(arithmetic.ceiling, _in_ansi_mode),
    "round": Function(arithmetic.round_half, _in_ansi_mode),
    "round_scaled": Function(arithmetic.round_scaled, _always),
    "cast": Function(casts.cast, _by_cast),
    "equal": Function(logic.equal),
    "equal_null_safe": Function(logic.equal_null_safe, strict=False),
    "less": Function(logic.less),
    "less_or_equal": Function(logic.less_or_equal),
    "greater": Function(logic.greater),
    "greater_or_equal": Function(logic.greater_or_equal),
    "not": Function(logic.invert),
    "is_null": Function(logic.is_null, strict=False),
    "is_not_null": Function(logic.is_not_null, strict=False),
    "is_nan": Function(logic.is_nan, strict=False),
    "in": Function(logic.within, strict=False),
    "greatest": Function(logic.greatest, strict=False),
    "least": Function(logic.least, strict=False),
    "like": Function(patterns.like),
    "rlike": Function(patterns.matches),
    "regexp_extract": Function(patterns.extract),
    "regexp_replace": Function(patterns.substitute),
    "split": Function(patterns.split),
    "upper": Function(strings.upper),
    "lower": Function(strings.lower),
    "trim": Function(strings.trim),
    "length": Function(strings.length),
    "octet_length": Function(strings.byte_length),
    "substring": Function(strings.substring),
    "left": Function(strings.left),
    "right": Function(strings.right),
    "concat": Function(strings.concat),
    "concat_ws": Function(strings.concat_with, strict=False),
    "replace": Function(strings.replace),
    "position": Function(strings.position),
    "starts_with": Function(strings.starts_with),
    "ends_with": Function(strings.ends_with),
    "contains": Function(strings.contains),
    "reverse": Function(strings.reverse),
    "repeat": Function(strings.repeat),
    "pad": Function(strings.pad),
    "split_part": Function(strings.split_part),
    "ascii": Function(strings.ascii_code),
    "substring_index": Function(strings.parts_up_to),
    "date_part": Function(times.date_part),
    "time_part": Function(times.time_part),
    "truncate_date": Function(times.truncate_date),
    "truncate_time": Function(times.truncate_time),
    "add_to_time": Function(times.add_to_time, _always),
    "add_unit": Function(times.add_unit, _always),
    "difference_in": Function(times.difference_in),
    "subtract_times": Function(times.subtract_times),
    "subtract_dates": Function(times.subtract_dates),
    "add_days": Function(times.add_days),
    "add_months": Function(times.add_months_to_date, _always),
    "add_interval_to_date": Function(times.add_interval_to_date, _in_ansi_mode),
    "last_day": Function(times.last_day),
    "from_epoch": Function(times.from_epoch, _always),
    "to_epoch": Function(times.to_epoch),
    "interval_part": Function(times.interval_part),
    "day_number": Function(times.day_number),
    "from_day_number": Function(times.from_day_number),
    "date_to_seconds": Function(times.date_to_seconds),
    "make_date": Function(times.make_date, _in_ansi_mode),
    "multiply_interval": Function(times.multiply_interval, _always),
    "format_time": Function(formats.format_time),
    "format_seconds": Function(formats.format_seconds),
    "parse_time": Function(formats.parse_time, _in_ansi_mode),
    "field": Function(nested_values.field),
    "struct": Function(nested_values.struct, strict=False),
    "array": Function(nested_values.array, strict=False),
    "element": Function(nested_values.element, _in_ansi_mode),
    "size": Function(nested_values.size, strict=False),
}
