"""Comparison, membership, the greatest and the least.

NaN is equal to NaN and greater than any other number; 0.0 and -0.0 are equal; text and binary go by their bytes.
"""

from __future__ import annotations

import functools
import operator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.expressions.kernels.values import Value

BOOLEAN = pa.bool_()


def _comparable(value: Value) -> Value:
    return pc.cast(value, pa.int8()) if is_.is_boolean(value.type) else value


def _nan(value: Value) -> Value:
    return pc.is_nan(value)


def equal(to: pa.DataType, left: Value, right: Value) -> Value:
    if is_.is_null(left.type):
        return pa.nulls(_rows(left, right), BOOLEAN)
    same = pc.equal(left, right)
    return pc.or_(same, pc.and_(_nan(left), _nan(right))) if is_.is_floating(left.type) else same


def less(to: pa.DataType, left: Value, right: Value) -> Value:
    if is_.is_null(left.type):
        return pa.nulls(_rows(left, right), BOOLEAN)
    smaller = pc.less(_comparable(left), _comparable(right))
    if is_.is_floating(left.type):
        return pc.or_(smaller, pc.and_(pc.invert(_nan(left)), _nan(right)))
    return smaller


def _rows(*values: Value) -> int:
    return next(len(each) for each in values if isinstance(each, pa.Array))


def greater(to: pa.DataType, left: Value, right: Value) -> Value:
    return less(to, right, left)


def less_or_equal(to: pa.DataType, left: Value, right: Value) -> Value:
    return pc.invert(less(to, right, left))


def greater_or_equal(to: pa.DataType, left: Value, right: Value) -> Value:
    return pc.invert(less(to, left, right))


def equal_null_safe(to: pa.DataType, left: Value, right: Value) -> Value:
    """Return whether both are equal, or both null: never null itself."""
    both = pc.and_(pc.is_null(left), pc.is_null(right))
    return both if is_.is_null(left.type) else pc.if_else(both, True, pc.fill_null(equal(to, left, right), False))


def invert(to: pa.DataType, value: Value) -> Value:
    return pc.invert(value)


def is_null(to: pa.DataType, value: Value) -> Value:
    return pc.is_null(value)


def is_not_null(to: pa.DataType, value: Value) -> Value:
    return pc.is_valid(value)


def is_nan(to: pa.DataType, value: Value) -> Value:
    return pc.fill_null(_nan(value), False)


def within(to: pa.DataType, value: Value, *candidates: Value) -> Value:
    """Return whether a value is one of the candidates; null if it is none of them and one is null."""
    scalars = [each for each in candidates if isinstance(each, pa.Scalar)]
    if len(scalars) < len(candidates) or is_.is_floating(value.type) or is_.is_nested(value.type):
        found = [equal(to, value, each) for each in candidates]
        return functools.reduce(pc.or_kleene, found)
    if is_.is_null(value.type):
        return pa.nulls(_rows(value), BOOLEAN)
    there = [each for each in scalars if each.is_valid]
    inside = pc.is_in(value, pa.array([each.as_py() for each in there], value.type))
    missing = pa.scalar(None, BOOLEAN)
    if len(there) < len(scalars):
        inside = pc.if_else(inside, True, missing)
    return pc.if_else(pc.is_valid(value), inside, missing)


def greatest(to: pa.DataType, *values: Value) -> Value:
    """Return the greatest of the values that are not null."""
    return functools.reduce(functools.partial(_extreme, operator.lt), values)


def least(to: pa.DataType, *values: Value) -> Value:
    return functools.reduce(functools.partial(_extreme, operator.gt), values)


def _extreme(how: object, left: Value, right: Value) -> Value:
    behind = less(BOOLEAN, left, right) if how is operator.lt else less(BOOLEAN, right, left)
    chosen = pc.if_else(pc.fill_null(behind, False), right, left)
    return pc.if_else(pc.is_null(left), right, chosen)
