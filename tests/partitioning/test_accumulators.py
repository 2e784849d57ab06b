"""Measures as Spark SQL defines them."""

from __future__ import annotations

import datetime
import decimal
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from partitioning.accumulators import accumulator
from partitioning.errors import ColumnTypeError, SumOverflowError

NAN = float("nan")
ANSWERS_CONTEXT = decimal.Context(prec=80)


def measure(kind: str, column: pa.Array, slots: list[int] | None = None) -> pa.Array:
    made = accumulator(kind, "c", column.type)
    at = np.array([0] * len(column) if slots is None else slots, np.int32)
    made.update(at, column, int(at.max(initial=0)) + 1)
    result = made.result()
    result.validate(full=True)
    assert result.type == made.result_type
    return result


def one(kind: str, values: list, type_: pa.DataType) -> object:
    (answer,) = measure(kind, pa.array(values, type_)).to_pylist()
    return answer


INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


@pytest.mark.parametrize("type_", INTEGERS, ids=str)
def test_integers(type_: pa.DataType) -> None:
    values = [3, None, 5, 1]
    assert one("count", values, type_) == 3
    assert one("sum", values, type_) == 9
    assert one("mean", values, type_) == 3.0
    assert one("min", values, type_) == 1
    assert one("max", values, type_) == 5
    assert measure("sum", pa.array(values, type_)).type == pa.int64()
    assert measure("mean", pa.array(values, type_)).type == pa.float64()
    assert measure("min", pa.array(values, type_)).type == type_


@pytest.mark.parametrize("kind", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("type_", [pa.int32(), pa.float32(), pa.float64(), pa.decimal128(9, 2)], ids=str)
def test_nothing_but_nulls_is_null_and_counts_zero(kind: str, type_: pa.DataType) -> None:
    assert one(kind, [None, None], type_) is None
    assert one("count", [None, None], type_) == 0


def test_extremes_of_64_bits() -> None:
    low, high = -(1 << 63), (1 << 63) - 1
    assert one("min", [0, low, high], pa.int64()) == low
    assert one("max", [low, high], pa.int64()) == high
    assert one("max", [low], pa.int64()) == low
    assert one("min", [high], pa.int64()) == high
    assert one("max", [0, (1 << 64) - 1, 5], pa.uint64()) == (1 << 64) - 1
    assert one("min", [1 << 63, 5], pa.uint64()) == 5


@pytest.mark.parametrize("type_", [pa.float32(), pa.float64()], ids=str)
def test_nan_is_greater_than_any_number(type_: pa.DataType) -> None:
    inf = float("inf")
    assert one("min", [NAN, 1.0, inf], type_) == 1.0
    assert one("min", [NAN, inf], type_) == inf
    assert np.isnan(one("min", [NAN, None, NAN], type_))
    assert np.isnan(one("max", [1.0, NAN, inf], type_))
    assert one("max", [-inf, -5.5, None], type_) == -5.5
    assert one("min", [-1.5, -2.5, -0.0], type_) == -2.5
    assert one("max", [-0.0, 0.0], type_) == 0.0
    assert np.isnan(one("sum", [1.0, NAN], type_))
    assert measure("max", pa.array([1.5], type_)).type == type_


def test_floats_are_summed_as_doubles() -> None:
    assert one("sum", [16777216.0, 1.0, 1.0], pa.float32()) == 16777218.0
    assert one("mean", [1, 2], pa.int8()) == 1.5
    assert one("mean", [(1 << 63) - 1] * 2, pa.int64()) == 2.0**63  # as double: no overflow


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([(1 << 63) - 1, 1], pa.int64()),
        ([-(1 << 63), -1], pa.int64()),
        ([(1 << 63) - 1, 1, -1], pa.int64()),  # as Spark: at the first sum that does not fit
        ([1 << 63], pa.uint64()),
    ],
)
def test_an_integer_sum_that_does_not_fit_names_its_column(values: list[int], type_: pa.DataType) -> None:
    made = accumulator("sum", "price", type_)
    with pytest.raises(SumOverflowError, match="column 'price' does not fit int64") as caught:
        made.update(np.zeros(len(values), np.int32), pa.array(values, type_), 1)
    assert caught.value.column == "price"


def test_integer_sums_up_to_the_limit_fit() -> None:
    assert one("sum", [(1 << 63) - 1, 0, -1, 1], pa.int64()) == (1 << 63) - 1
    assert one("sum", [-(1 << 63), 0, 5, -5], pa.int64()) == -(1 << 63)


def test_decimal_sums_have_ten_more_digits() -> None:
    values = [Decimal("999.99"), None, Decimal("-0.01"), Decimal("0.02")]
    result = measure("sum", pa.array(values, pa.decimal128(5, 2)))
    assert result.type == pa.decimal128(15, 2)
    assert result.to_pylist() == [Decimal("1000.00")]
    assert measure("sum", pa.array([Decimal(1)], pa.decimal128(38, 0))).type == pa.decimal128(38, 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_decimal_sums_carry_across_64_bits_and_end_at_38_digits(sign: int) -> None:
    most = 10**38 - 1
    type_ = pa.decimal128(38, 0)
    values = [Decimal(sign * v) for v in ((1 << 64) - 1, 1, (1 << 64) - 1, 1 << 100)]
    with decimal.localcontext(ANSWERS_CONTEXT):
        assert one("sum", values, type_) == sum(values)
        assert one("sum", [Decimal(sign * (most - 5)), Decimal(sign * 5)], type_) == Decimal(sign * most)
    for more in (1, most):
        with pytest.raises(SumOverflowError, match="decimal128"):
            one("sum", [Decimal(sign * most), Decimal(sign * more)], type_)
        with pytest.raises(SumOverflowError):
            one("mean", [Decimal(sign * most), Decimal(sign * more)], type_)


@pytest.mark.parametrize(
    ("values", "precision", "scale", "answer"),
    [
        (["0.01", "0.02"], 5, 2, "0.015000"),
        (["1", "1", "0"], 5, 0, "0.6667"),
        (["-1", "-1", "0"], 5, 0, "-0.6667"),
        (["0.1"] + ["0"] * 31, 5, 1, "0.00313"),  # 0.003125: half goes up
        (["-0.1"] + ["0"] * 31, 5, 1, "-0.00313"),  # and away from zero
        (["12345678901234567890123456789012"] * 3, 32, 0, "12345678901234567890123456789012.0000"),
        (["0.1234567890123456789012345678901234567"] * 2, 38, 37, "0.12345678901234567890123456789012345670"),
    ],
)
def test_decimal_means_have_four_more_digits_and_round_half_up(
    values: list[str], precision: int, scale: int, answer: str
) -> None:
    result = measure("mean", pa.array([Decimal(v) for v in values], pa.decimal128(precision, scale)))
    assert result.type == pa.decimal128(min(38, precision + 4), min(38, scale + 4))
    assert result.to_pylist() == [Decimal(answer)]


def test_a_decimal_sum_may_pass_its_digits_and_come_back() -> None:
    fractions = [Decimal("0.6"), Decimal("0.6"), Decimal("-0.6")]
    assert one("sum", fractions, pa.decimal128(38, 38)) == Decimal("0.6")
    with pytest.raises(SumOverflowError, match=r"the sum of column 'c' does not fit decimal128\(38, 38\)"):
        one("sum", fractions[:2], pa.decimal128(38, 38))
    assert one("mean", fractions[:2], pa.decimal128(38, 38)) == Decimal("0.6")


@pytest.mark.parametrize("seed", range(20))
def test_decimal_sums_and_means_of_any_size_are_those_of_python(seed: int) -> None:
    """Try sums of up to some 10**41, of both signs, also through a state in between."""
    rng = np.random.default_rng(seed)
    most = 10**38 - 1
    values = [
        int(rng.choice([-1, 1])) * (most - int(rng.integers(0, 1 << 62))) for _ in range(int(rng.integers(1, 2000)))
    ]
    numbers = pa.array([Decimal(value) for value in values], pa.decimal128(38, 0))
    total, count = sum(values), len(values)
    half = count // 2
    made, other = accumulator("sum", "c", numbers.type), accumulator("sum", "c", numbers.type)
    made.update(np.zeros(half, np.int32), numbers[:half], 1)
    other.load(made.state())
    other.update(np.zeros(count - half, np.int32), numbers[half:], 1)
    rest = [-sign * most for sign in [1 if total > 0 else -1] for _ in range(abs(total) // most)]
    other.update(np.zeros(len(rest), np.int32), pa.array([Decimal(value) for value in rest], numbers.type), 1)
    assert other.result().to_pylist() == [Decimal(total + sum(rest))]
    with decimal.localcontext(ANSWERS_CONTEXT):
        answer = (Decimal(total) / count).quantize(Decimal("0.0001"), decimal.ROUND_HALF_UP)
    if abs(answer) < 10**34:
        assert one("mean", [Decimal(value) for value in values], numbers.type) == answer
    else:
        with pytest.raises(SumOverflowError, match="the mean of column 'c'"):
            one("mean", [Decimal(value) for value in values], numbers.type)
    fine = pa.array([Decimal(value).scaleb(-38, ANSWERS_CONTEXT) for value in values], pa.decimal128(38, 38))
    with decimal.localcontext(ANSWERS_CONTEXT):
        answer = (Decimal(total).scaleb(-38) / count).quantize(Decimal(1).scaleb(-38), decimal.ROUND_HALF_UP)
    assert measure("mean", fine).to_pylist() == [answer]


def test_a_decimal_mean_that_needs_more_than_38_digits_is_an_error() -> None:
    with pytest.raises(SumOverflowError, match=r"the mean of column 'c' does not fit.* with room for the mean"):
        one("mean", [Decimal(10**35)], pa.decimal128(38, 0))


def test_decimal_extremes_compare_all_128_bits() -> None:
    values = [Decimal(v) for v in (5, -5, 1 << 64, -(1 << 64), (1 << 64) + 1, 0)]
    assert one("max", [*values, None], pa.decimal128(38, 0)) == (1 << 64) + 1
    assert one("min", [None, *values], pa.decimal128(38, 0)) == -(1 << 64)


DAY = datetime.date(2013, 1, 1)
MOMENT = datetime.datetime(1960, 1, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.bool_(), [False, True]),
        (pa.date32(), [DAY, DAY + datetime.timedelta(1)]),
        (pa.date64(), [DAY, DAY + datetime.timedelta(1)]),
        (pa.timestamp("us", "UTC"), [MOMENT, MOMENT + datetime.timedelta(days=9999)]),
        (pa.duration("us"), [datetime.timedelta(-1), datetime.timedelta(1)]),
    ],
    ids=str,
)
def test_whatever_has_an_order_has_a_least_and_a_greatest(type_: pa.DataType, values: list) -> None:
    column = pa.array([values[1], None, values[0]], type_)
    assert measure("min", column).to_pylist() == [values[0]]
    assert measure("max", column).to_pylist() == [values[1]]
    assert measure("max", column).type == type_


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None, "b"]),
        pa.array([[1], None, []]),
        pa.array([{"a": 1}, None, {"a": None}]),
        pa.array([1, None, 2]),
        pa.array(["a", None, "a"]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_values_of_any_type_can_be_counted(column: pa.Array) -> None:
    assert measure("count", column, [0, 0, 1]).to_pylist() == [1, 1]
    assert measure("count", column.slice(1), [0, 0]).to_pylist() == [1]
    assert accumulator("count", None, None).result_type == pa.int64()


def test_values_of_a_column_without_a_type_are_all_null() -> None:
    assert measure("count", pa.nulls(3)).to_pylist() == [0]


@pytest.mark.parametrize(
    ("kind", "type_"),
    [
        ("sum", pa.string()),
        ("mean", pa.bool_()),
        ("sum", pa.date32()),
        ("mean", pa.timestamp("us")),
        ("min", pa.map_(pa.string(), pa.int64())),
        ("max", pa.list_(pa.int64())),
        ("sum", pa.duration("us")),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(kind: str, type_: pa.DataType) -> None:
    with pytest.raises(ColumnTypeError, match=rf"{kind}\('name'\) is not defined for type") as caught:
        accumulator(kind, "name", type_)
    assert caught.value.column == "name"


@pytest.mark.parametrize("kind", ["count", "sum", "mean", "min", "max"])
@pytest.mark.parametrize("type_", [pa.int16(), pa.float64(), pa.decimal128(9, 2)], ids=str)
def test_state_can_be_taken_out_and_put_back(kind: str, type_: pa.DataType) -> None:
    column = pa.array([1, None, -3, 4, 5], pa.int64()).cast(pa.decimal128(19, 0)).cast(type_)
    slots = np.array([0, 1, 200, 0, 200], np.int32)
    straight, first, second = (accumulator(kind, "c", type_) for _ in range(3))
    straight.update(slots, column, 201)
    first.update(slots[:3], column[:3], 201)
    second.load(first.state())
    second.update(slots[3:], column[3:], 201)
    assert second.result().equals(straight.result())
    assert second.result(np.array([200, 0])).equals(straight.result(np.array([200, 0])))
    second.update(np.array([300], np.int32), column[:1], 301)
    assert len(second.result()) == 301
    assert second.nbytes > 0


def test_a_column_of_another_type_or_length_is_refused() -> None:
    made = accumulator("sum", "price", pa.int64())
    with pytest.raises(TypeError, match="expected 1 rows of int64 for column 'price', not 1 rows of int8"):
        made.update(np.zeros(1, np.int32), pa.array([1], pa.int8()), 1)
    with pytest.raises(TypeError, match="not 2 rows"):
        made.update(np.zeros(1, np.int32), pa.array([1, 2]), 1)


WORDS = ["", "a", "a\0", "ab", "b", "Z", "é", "\ue000", "\U00010000", "12345678", "123456789", "12345678\0"]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str)
def test_strings_compare_as_bytes_and_nulls_do_not_count(type_: pa.DataType) -> None:
    values = [word.encode() for word in WORDS] + [b"\x80", b"\xff"] * (type_ in (pa.binary(), pa.large_binary()))
    for a in values:
        for b in values:
            given = pa.array([None, a, None, b], pa.binary()).cast(type_)
            assert measure("min", given).cast(pa.binary()).to_pylist() == [min(a, b)]
            assert measure("max", given).cast(pa.binary()).to_pylist() == [max(a, b)]
    for kind in ("min", "max"):
        assert one(kind, [None, None], type_) is None
        assert measure(kind, pa.array([""], type_)).type == type_
        assert one(kind, [], type_) is None


@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("cut", [1, 7, 100, 5_000])
def test_least_strings_of_many_slots_whatever_the_batches_and_across_snapshots(kind: str, cut: int) -> None:
    rng = np.random.default_rng(cut)
    rows, slots_max = 5_000, 60
    lengths = rng.choice([0, 1, 3, 8, 9, 40, 700], rows)
    values = [None if rng.random() < 0.1 else bytes(rng.integers(0, 4, n, np.uint8)) for n in lengths]
    slots = rng.integers(0, slots_max, rows).astype(np.int32)
    expected: list[bytes | None] = [None] * (slots_max + 1)
    pick = min if kind == "min" else max
    for slot, value in zip(slots.tolist(), values, strict=True):
        if value is not None:
            kept = expected[slot]
            expected[slot] = value if kept is None else pick(kept, value)
    made = accumulator(kind, "c", pa.binary())
    column = pa.array([b"before", *values], pa.binary()).slice(1)  # a view
    for start in range(0, rows, cut):
        made.update(slots[start : start + cut], column.slice(start, cut), slots_max + 1)
        if start // cut % 50 == 1:
            restored = accumulator(kind, "c", pa.binary())
            restored.load([(name, pa.chunked_array([part[:7], part[7:]])) for name, part in made.state()])
            made = restored
    result = made.result()
    result.validate(full=True)
    assert result.to_pylist() == expected
    assert made.result(np.array([5, 0], np.int32)).to_pylist() == [expected[5], expected[0]]
    assert made.nbytes < 4 * (sum(len(value or b"") for value in expected) + 2_000) + 32 * 128


def test_the_arena_is_packed_when_values_are_replaced_by_longer_ones() -> None:
    made = accumulator("max", "c", pa.string())
    for n in range(1, 2_000):
        made.update(np.zeros(1, np.int32), pa.array(["x" * n]), 1)
    assert made.result().to_pylist() == ["x" * 1_999]
    assert made.nbytes < 20_000
