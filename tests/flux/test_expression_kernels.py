"""Answers of kernels where Spark's answer is written down, without Spark; tests/spark/test_expressions.py compares the two."""

from __future__ import annotations

import datetime
import pickle
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.errors import SchemaError, UsageError
from flux.expressions import java_regex
from flux.expressions.functions import FUNCTIONS
from flux.expressions.kernels import calendar, patterns, strict_math, strings
from flux.expressions.kernels.text_casts import shown_as_java
from flux.expressions.kernels.values import ExpressionError
from flux.expressions.tree import And, Case, Coalesce, Column, Expression, FunctionCall, Literal, Or, With
from flux.expressions.types import TIMESTAMP

INT, LONG, DOUBLE, TEXT, BOOLEAN = pa.int32(), pa.int64(), pa.float64(), pa.string(), pa.bool_()


def compute(function: str, to: pa.DataType, *columns: Any, **options: Any) -> list[Any]:
    """Return the answers of a function to columns: arrays, or constants as literals."""
    names = [f"c{at}" for at in range(len(columns))]
    given = {name: each for name, each in zip(names, columns, strict=True) if isinstance(each, pa.Array)}
    arguments = [
        Column(name, each.type) if isinstance(each, pa.Array) else each
        for name, each in zip(names, columns, strict=True)
    ]
    call = FunctionCall(function, tuple(arguments), to, tuple(options.items()))
    result = call.evaluate(pa.record_batch(given))
    assert result.type == to
    return result.to_pylist()


def ints(*values: int | None) -> pa.Array:
    return pa.array(values, INT)


def doubles(*values: float | None) -> pa.Array:
    return pa.array(values, DOUBLE)


def texts(*values: str | None) -> pa.Array:
    return pa.array(values, TEXT)


def decimals(*values: str | None, digits: int = 10, scale: int = 2) -> pa.Array:
    return pa.array([None if each is None else Decimal(each) for each in values], pa.decimal128(digits, scale))


def test_sums_that_overflow_raise_are_null_or_wrap() -> None:
    most = 2**31 - 1
    assert compute("add", INT, ints(1, most, None), ints(2, 1, 1), mode="try") == [3, None, None]
    assert compute("add", INT, ints(most), ints(1), mode="legacy") == [-(2**31)]
    with pytest.raises(
        ExpressionError, match=r"\[ARITHMETIC_OVERFLOW\] 2147483647 \+ 1 is out of the range of INT.*try_"
    ):
        compute("add", INT, ints(0, most), ints(0, 1), mode="ansi")
    least = pa.array([-(2**63)], LONG)
    assert compute("multiply", LONG, least, pa.array([-1], LONG), mode="try") == [None]
    assert compute("negate", LONG, least, mode="legacy") == [-(2**63)]


def test_quotients_are_cut_and_remainders_have_the_sign_of_the_dividend() -> None:
    x, y = ints(-7, 7, -7, 7), ints(2, -2, -2, 0)
    wide = [pa.array(each.to_pylist(), LONG) for each in (x, y)]
    assert compute("div", LONG, *wide, mode="try") == [-3, -3, 3, None]
    assert compute("remainder", INT, x, y, mode="try") == [-1, 1, -1, None]
    assert compute("pmod", INT, x, y, mode="try") == [1, 1, -1, None]
    assert compute("remainder", INT, ints(-(2**31)), ints(-1), mode="ansi") == [0]
    with pytest.raises(ExpressionError, match="REMAINDER_BY_ZERO"):
        compute("remainder", INT, x, y, mode="ansi")


def test_nan_is_equal_to_itself_and_the_greatest() -> None:
    nan = float("nan")
    x, y = doubles(nan, nan, 0.0, 1.0, None), doubles(nan, 1.0, -0.0, nan, nan)
    assert compute("equal", BOOLEAN, x, y) == [True, False, True, False, None]
    assert compute("less", BOOLEAN, x, y) == [False, False, False, True, None]
    assert compute("greater_or_equal", BOOLEAN, x, y) == [True, True, True, False, None]
    assert compute("equal_null_safe", BOOLEAN, x, y) == [True, False, True, False, False]
    assert np.isnan(compute("greatest", DOUBLE, doubles(1.0), doubles(nan))[0])
    assert compute("least", DOUBLE, doubles(None, None), doubles(nan, None))[1] is None


def test_membership_is_unknown_if_a_candidate_is() -> None:
    some, none = Literal(2, INT), Literal(None, INT)
    assert compute("in", BOOLEAN, ints(2, 3, None), some) == [True, False, None]
    assert compute("in", BOOLEAN, ints(2, 3, None), some, none) == [True, None, None]


def test_logic_has_three_values() -> None:
    values = [True, False, None]
    batch = pa.record_batch({"x": [x for x in values for _ in values], "y": values * 3})
    x, y = Column("x", BOOLEAN), Column("y", BOOLEAN)
    assert And(x, y).evaluate(batch).to_pylist() == [True, False, None, False, False, False, None, False, None]
    assert Or(x, y).evaluate(batch).to_pylist() == [True, True, True, True, False, None, True, None, None]


def test_decimals_are_exact_and_rounded_half_up() -> None:
    assert compute("round", pa.decimal128(10, 1), decimals("2.25", "-2.25", "2.24"), scale=1, mode="ansi") == [
        Decimal("2.3"),
        Decimal("-2.3"),
        Decimal("2.2"),
    ]
    third = compute("divide", pa.decimal128(23, 13), decimals("2.00"), decimals("3.00"), mode="ansi")
    assert third == [Decimal("0.6666666666667")]
    largest = decimals("9" * 38, "1", digits=38, scale=0)
    assert compute("multiply", pa.decimal128(38, 0), largest, largest, mode="try") == [None, Decimal(1)]
    assert compute("multiply", pa.decimal128(38, 0), largest, decimals("1", "2", digits=38, scale=0), mode="ansi") == [
        Decimal("9" * 38),
        Decimal(2),
    ]
    with pytest.raises(ExpressionError, match=r"NUMERIC_VALUE_OUT_OF_RANGE.*DECIMAL\(4,2\)"):
        compute("cast", pa.decimal128(4, 2), decimals("123.45"), mode="ansi")


def test_doubles_are_rounded_by_the_digits_that_are_shown() -> None:
    shown = compute(
        "round", DOUBLE, doubles(2.675, 1.005, -0.5, 2.5, 1e300, float("inf"), -0.001), scale=2, mode="ansi"
    )
    assert shown == [2.68, 1.01, -0.5, 2.5, 1e300, float("inf"), 0.0]
    assert compute("round", DOUBLE, doubles(2.5, 3.5), scale=0, mode="ansi", even=True) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.0, "1.0"),
        (0.001, "0.001"),
        (0.0001, "1.0E-4"),
        (9999999.0, "9999999.0"),
        (1e7, "1.0E7"),
        (-0.0, "-0.0"),
        (5e-324, "4.9E-324"),
        (123456789.125, "1.23456789125E8"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (np.float32(0.1), "0.1"),
    ],
)
def test_doubles_are_shown_as_java_shows_them(number: Any, text: str) -> None:
    assert shown_as_java(number) == text


def test_powers_are_those_of_strict_math() -> None:
    """Compare values that are not the nearest double, where the C library differs, and the limits, which are Java's,
    too."""
    inf, nan = float("inf"), float("nan")
    assert (
        compute("power", DOUBLE, doubles(61.21, 1.0, -1.0, -8.0, -0.0), doubles(0.5, inf, inf, 1 / 3, -3.0))[0]
        == 7.82368199762746
    )
    found = compute(
        "power", DOUBLE, doubles(788.9009314290233, -2.0, -2.0, 0.0, inf, nan), doubles(2.675, 3.0, 0.5, 0.0, -1.0, 0.0)
    )
    assert found[:2] + found[3:] == [56173968.20223133, -8.0, 1.0, 0.0, 1.0]
    assert np.isnan(found[2])
    assert compute("power", DOUBLE, doubles(810.5527757139339, 1.1), doubles(-1.5, 7.3)) == [
        4.3333927657591354e-05,
        2.0052411193823754,
    ]
    assert compute("exp", DOUBLE, doubles(72.6)) == [3.38672073083683e31]
    assert compute("log", DOUBLE, doubles(442.12570788004746), base="10") == [2.645545768164968]
    assert compute("log", DOUBLE, doubles(74.29), base="2") == [6.215096120976214]
    assert compute("exp", DOUBLE, doubles(0.28, -inf, 1000.0, None)) == [1.323129812337437, 0.0, inf, None]
    assert compute("log", DOUBLE, doubles(305.90574508035934, 0.0, -1.0), base="e") == [5.723277031890467, None, None]


def test_powers_have_all_bits_of_java() -> None:
    """Compare hashes of 2,000 results each with those of a program in Java: 31 times the hash before, and the bits of
    the result."""
    at = np.arange(2000)
    x, y = at * 7919 % 1000 / 97.0 + 0.01, at * 10473 % 2000 / 111.0 - 9.0
    weights = np.array([pow(31, 1999 - each, 1 << 64) for each in range(2000)], np.uint64)

    def hashed(results: Any) -> int:
        return int((results.view(np.uint64) * weights).sum().view(np.int64))

    found = [
        hashed(each) for each in (strict_math.power(x, y), strict_math.exp(y), strict_math.log(x), strict_math.log10(x))
    ]
    assert found == [-6711613412702093669, -9152136221057289145, -1758522261036597412, -6073206250426079828]


def test_text_is_counted_in_characters() -> None:
    value = texts("日本語", "e\u0301x", "", None)
    one, two, last = (Literal(each, INT) for each in (1, 2, -2))
    assert compute("length", INT, value) == [3, 3, 0, None]
    assert compute("substring", TEXT, value, two, one) == ["本", "\u0301", "", None]
    assert compute("substring", TEXT, value, Literal(0, INT), two) == ["日本", "e\u0301", "", None]
    assert compute("substring", TEXT, value, last, one) == ["本", "\u0301", "", None]
    assert compute("substring", TEXT, texts("hello"), Literal(-7, INT), Literal(3, INT)) == ["h"]
    assert compute("substring", TEXT, value, ints(3, -9, 1, 1), ints(9, 7, 1, 1)) == ["語", "e", "", None]
    assert compute("substring", TEXT, value, ints(0, 0, 0, 0), ints(2, 1, 1, 1)) == ["日本", "e", "", None]
    assert compute("position", INT, value, text="x") == [0, 3, 0, None]
    assert compute("position", INT, value, text="") == [1, 1, 1, None]


def test_characters_of_a_slice_are_its_own() -> None:
    found = strings.Characters(texts("äb", "cdé", "f").slice(1))
    assert found.counts.tolist() == [3, 1]
    assert found.byte_at(np.array([2, 0])).tolist() == [5, 7]


def test_null_texts_are_left_out_of_a_join_also_where_all_are_null() -> None:
    assert compute("concat_ws", TEXT, Literal("-", TEXT), texts("a", None, None), texts("b", "c", None)) == [
        "a-b",
        "c",
        "",
    ]


def test_like_takes_an_escape_for_what_it_is() -> None:
    assert patterns.like_form("a%", "\\") == ("starts", "a")
    assert patterns.like_form("a/%", "/") == ("equal", "a%")
    assert compute("like", BOOLEAN, texts("a\nb", "ab", "axb"), pattern="a_b") == [True, False, True]
    with pytest.raises(UsageError, match="ESC_AT_THE_END"):
        patterns.like_form("a\\", "\\")
    with pytest.raises(UsageError, match="ESC_IN_THE_MIDDLE"):
        patterns.like_form("a\\b", "\\")


def test_line_ends_are_those_of_java() -> None:
    values = texts("ab", "ab\n", "ab\r\n", "ab\u2028", "ab\n\n", None)
    assert compute("rlike", BOOLEAN, values, pattern="b$") == [True, True, True, True, False, None]
    assert compute("rlike", BOOLEAN, values, pattern="b.") == [False, False, False, False, False, None]


def test_re2_computes_what_it_computes_as_java_does() -> None:
    assert java_regex.translated("a(b|c)+[0-9]").re2 == "a(b|c)+[0-9]"
    assert java_regex.translated("a.c").literal is None
    assert java_regex.translated("a\\.c").literal == "a.c"
    for python_only in ("(a)\\1", "a(?=b)", "a++", "(?>a)b"):
        assert java_regex.translated(python_only).re2 is None
    for refused in ("[a-z&&[^b]]", "\\R", "(?m)^a", "a{,3}", "*a", "\\p{IsGreek}"):
        with pytest.raises(UsageError, match="cannot be computed where rows are read"):
            java_regex.translated(refused)


def test_empty_matches_are_replaced_behind_others_as_in_java() -> None:
    assert compute("regexp_replace", TEXT, texts("baac", None), pattern="a*", replacement="X") == ["XbXXcX", None]


def test_a_replacement_names_groups() -> None:
    assert compute("regexp_replace", TEXT, texts("ab"), pattern="(a)(b)", replacement="$2\\$$1") == ["b$a"]
    with pytest.raises(UsageError, match="names group 3, and"):
        patterns.replacement_parts("(a)(b)", "$3")


def test_whole_numbers_are_read_with_their_sign_and_blanks() -> None:
    given = texts(" 12 ", "+1", "-0", "1.5", "9999999999", "", "x", None)
    assert compute("cast", INT, given, mode="try", zone=None) == [12, 1, 0, None, None, None, None, None]
    assert compute("cast", INT, given, mode="legacy", zone=None) == [12, 1, 0, 1, None, None, None, None]
    with pytest.raises(ExpressionError, match=r"\[CAST_INVALID_INPUT\] '1.5' is no INT"):
        compute("cast", INT, given, mode="ansi", zone=None)


def moments(*written: str, zone: str = "UTC") -> pa.Array:
    return pa.array(compute("cast", TIMESTAMP, texts(*written), mode="ansi", zone=zone), TIMESTAMP)


def test_gaps_and_overlaps_are_resolved_as_by_java() -> None:
    berlin = "Europe/Berlin"
    found = moments("2020-03-29 02:30:00", "2020-10-25 02:30:00", "2020-10-25 02:30:00+01:00", zone=berlin)
    assert [each.strftime("%H:%M") for each in found.to_pylist()] == ["01:30", "00:30", "01:30"]
    # A time in an overlap keeps its offset when it is cut.
    cut = compute("truncate_time", TIMESTAMP, found, unit="hour", zone=berlin)
    assert [each.strftime("%H:%M") for each in cut] == ["01:00", "00:00", "01:00"]


def test_zones_repeat_beyond_their_table_and_have_local_mean_time_before_it() -> None:
    hours = calendar.offsets_at(
        np.array([-4_000_000_000, 16_749_800_000, 32_503_680_000], np.int64) * 10**6, "Europe/Berlin"
    )
    assert (hours // 10**6).tolist() == [3208, 7200, 3600]
    # A zone without changes since 1972 stays as it is.
    assert calendar.offsets_at(np.array([10**16]), "Africa/Monrovia").tolist() == [0]
    assert calendar.is_zone("PST")
    assert not calendar.is_zone("Nowhere/Atall")


def test_an_interval_of_days_goes_by_the_clock_on_the_wall() -> None:
    before = moments("2020-03-28 12:00:00", zone="Europe/Berlin")
    day = Literal(86_400_000_000, pa.duration("us"))
    (after,) = compute("add_to_time", TIMESTAMP, before, day, zone="Europe/Berlin")
    assert after == datetime.datetime(2020, 3, 29, 10, tzinfo=datetime.UTC)


def test_months_end_where_they_end() -> None:
    days = pa.array([datetime.date(2024, 1, 31), datetime.date(1899, 12, 31)])
    assert compute("add_months", pa.date32(), days, Literal(1, INT)) == [
        datetime.date(2024, 2, 29),
        datetime.date(1900, 1, 31),
    ]
    assert compute("date_part", INT, days, part="week") == [5, 52]
    assert compute("date_part", INT, days, part="dayofweek") == [4, 1]


def test_calendar_days_are_those_of_python() -> None:
    days = np.arange(-700_000, 2_900_000, 997)
    year, month, day = calendar.civil(days)
    epoch = datetime.date(1970, 1, 1).toordinal()
    expected = [datetime.date.fromordinal(int(each) + epoch) for each in days if 0 < each + epoch < 3_652_059]
    assert list(zip(year.tolist(), month.tolist(), day.tolist(), strict=True))[: len(expected)] == [
        (each.year, each.month, each.day) for each in expected
    ]


QUOTIENT = FunctionCall("divide", (Column("x", DOUBLE), Column("y", DOUBLE)), DOUBLE, (("mode", "ansi"),))
NOT_ZERO = FunctionCall("not", (FunctionCall("equal", (Column("y", DOUBLE), Literal(0.0, DOUBLE)), BOOLEAN),), BOOLEAN)
LARGE = FunctionCall("greater", (QUOTIENT, Literal(1.0, DOUBLE)), BOOLEAN)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (Case(((NOT_ZERO, QUOTIENT),), Literal(-1.0, DOUBLE), DOUBLE), [2.0, -1.0, -1.0, None]),
        (And(NOT_ZERO, LARGE), [True, False, None, None]),
        (Or(FunctionCall("not", (NOT_ZERO,), BOOLEAN), LARGE), [True, True, None, None]),
        (
            Coalesce(
                (FunctionCall("divide", QUOTIENT.arguments, DOUBLE, (("mode", "try"),)), Literal(9.0, DOUBLE)), DOUBLE
            ),
            [2.0, 9.0, 9.0, 9.0],
        ),
    ],
)
def test_a_part_that_raises_is_computed_where_spark_computes_it(expression: Expression, expected: list[Any]) -> None:
    batch = pa.record_batch({"x": doubles(4, 1, 1, None), "y": doubles(2, 0, None, 3)})
    assert expression.evaluate(batch).to_pylist() == expected
    with pytest.raises(ExpressionError, match=r"\[DIVIDE_BY_ZERO\] 1.0 is divided by zero"):
        QUOTIENT.evaluate(batch)


def test_a_common_value_is_computed_once_and_is_seen_in_branches() -> None:
    batch = pa.record_batch({"x": doubles(4, 1, 9), "y": doubles(2, 1, 0)})
    common = Column("\0" + "0", DOUBLE)
    per = FunctionCall("divide", (Literal(8.0, DOUBLE), common), DOUBLE, (("mode", "ansi"),))
    small = FunctionCall("less", (common, Literal(2.0, DOUBLE)), BOOLEAN)
    inner = With(common.name, Column("x", DOUBLE), FunctionCall("add", (common, common), DOUBLE, (("mode", "ansi"),)))
    chosen = Case(((small, per),), inner, DOUBLE)
    expression = With(common.name, FunctionCall("divide", (*QUOTIENT.arguments,), DOUBLE, (("mode", "try"),)), chosen)
    assert expression.evaluate(batch).to_pylist() == [8.0, 8.0, 18.0]
    assert expression.columns() == ["x", "y"]
    assert pickle.loads(pickle.dumps(expression)) == expression


def test_an_argument_behind_a_null_is_not_computed() -> None:
    batch = pa.record_batch({"n": ints(None, 1), "x": doubles(1, 1), "y": doubles(0, 1)})
    added = FunctionCall(
        "add",
        (FunctionCall("cast", (Column("n", INT),), DOUBLE, (("mode", "ansi"),)), QUOTIENT),
        DOUBLE,
        (("mode", "ansi"),),
    )
    assert added.evaluate(batch).to_pylist() == [None, 2.0]


def test_expressions_are_small_values_with_a_text_form() -> None:
    expression = FunctionCall("add", (Column("a`b", INT), Literal(1, INT)), INT, (("mode", "ansi"),))
    assert str(expression) == 'add(`a``b`, 1:INT, mode="ansi"):INT'
    assert pickle.loads(pickle.dumps(expression)) == expression
    assert hash(expression) == hash(pickle.loads(pickle.dumps(expression)))
    assert len(pickle.dumps(expression)) < 400
    assert str(Literal(Decimal("1.50"), pa.decimal128(3, 2))) == "1.50:DECIMAL(3,2)"
    assert str(Literal('a"b', TEXT)) == '"a\\"b":STRING'


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ExpressionError("DIVIDE_BY_ZERO", "1 is divided by zero")))
    assert (type(error), str(error)) == (ExpressionError, "[DIVIDE_BY_ZERO] 1 is divided by zero")


def test_a_column_that_is_not_there_or_twice_is_named() -> None:
    batch = pa.RecordBatch.from_arrays([ints(1), ints(2)], ["a", "a"])
    with pytest.raises(SchemaError, match="'a' is there several times"):
        Column("a", INT).evaluate(batch)
    with pytest.raises(SchemaError, match="'b' is not there; there are a, a"):
        Column("b", INT).evaluate(batch)


def test_columns_come_as_spark_has_them() -> None:
    batch = pa.record_batch(
        {
            "large": pa.array(["x"], pa.large_string()),
            "coded": pa.array(["y"]).dictionary_encode(),
            "fine": pa.array([-1], pa.timestamp("ns", "Europe/Berlin")),
        }
    )
    assert Column("large", TEXT).evaluate(batch).type == TEXT
    assert Column("coded", TEXT).evaluate(batch).to_pylist() == ["y"]
    assert Column("fine", TIMESTAMP).evaluate(batch).cast(LONG).to_pylist() == [-1]


def test_no_rows_give_no_rows_and_no_errors() -> None:
    batch = pa.record_batch({"x": doubles(), "y": doubles()})
    assert QUOTIENT.evaluate(batch) == pa.array([], DOUBLE)


def test_every_function_is_of_columns_and_needs_neither_spark_nor_numba() -> None:
    assert len(FUNCTIONS) > 70
    program = "import sys, flux.expressions.steps; print([n for n in ('pyspark', 'py4j', 'numba') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
