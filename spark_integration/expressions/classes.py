"""The table of Spark's classes of expressions, each with the expression that computes it.

A class that is not in the table is refused by its name. An argument that has to be a constant is refused where it is
none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.types as is_

from flux.expressions.java_regex import translated
from flux.expressions.kernels import casts, formats, times
from flux.expressions.kernels.patterns import check_group, like_form, replacement_parts
from flux.expressions.tree import COMMON, And, Case, Coalesce, Column, Expression, FunctionCall, Literal, Or, With
from flux.expressions.types import CALENDAR, DATE, STRING, TIMESTAMP, TIMESTAMP_NTZ
from spark_integration.expressions.nodes import Node, literal

BOOLEAN, INT, BIGINT, DOUBLE = pa.bool_(), pa.int32(), pa.int64(), pa.float64()


class Translator:
    """A translation of trees. ``attributes``: the expression of each attribute by Spark's id of it."""

    def __init__(self, attributes: Mapping[int, Expression]) -> None:
        self._attributes = attributes
        self._common: dict[int, Expression] = {}
        self._count = 0

    def translate(self, node: Node) -> Expression:
        """Return the expression of a node. UsageError names what cannot be computed."""
        if node.name == "AttributeReference":
            return self._attributes[node.expression_id()]
        if node.name == "CommonExpressionRef":
            return self._common[node.common_id()]
        if node.name == "With":
            return self._with(node)
        if "replacement" in node.fields or node.name in ("Alias", "CommonExpressionDef"):
            return self.translate(node.children[0])
        build = CLASSES.get(node.name)
        if build is None:
            raise node.refused(f"there is no {node.name} there")
        return build(node, self)

    def _with(self, node: Node) -> Expression:
        """Translate an expression of which several parts refer to another one. Numbers of our own give them stable names."""
        body, *defined = node.children
        named: list[tuple[str, Expression]] = []
        for each in defined:
            value = self.translate(each.children[0])
            if not isinstance(value, Column | Literal):
                named.append((f"{COMMON}{self._count}", value))
                self._count += 1
                value = Column(named[-1][0], value.type)
            self._common[each.common_id()] = value
        found = self.translate(body)
        for name, value in reversed(named):
            found = With(name, value, found)
        return found

    def all(self, node: Node) -> list[Expression]:
        return [self.translate(each) for each in node.children]


Build = Callable[[Node, Translator], Expression]
Type = Any  # pa.DataType, or a function of the node and its arguments that returns one


def first(node: Node, arguments: list[Expression]) -> pa.DataType:
    """Return the type of the first argument."""
    return arguments[0].type


def asked(node: Node, arguments: list[Expression]) -> pa.DataType:
    """Return the type that Spark gives the node."""
    return node.kind()


def decimal_or_first(node: Node, arguments: list[Expression]) -> pa.DataType:
    """Return the type of an operator: Spark computes that of decimals."""
    return node.kind() if is_.is_decimal(arguments[0].type) else arguments[0].type


def made(function: str, arguments: list[Expression], type_: pa.DataType, **options: Any) -> Expression:
    return FunctionCall(function, tuple(arguments), type_, tuple(sorted(options.items())))


def function(name: str, type_: Type, **options: Any) -> Build:
    """Build a call of a function whose options are the same for each node of the class."""

    def build(node: Node, translator: Translator) -> Expression:
        arguments = translator.all(node)
        return made(name, arguments, type_(node, arguments) if callable(type_) else type_, **options)

    return build


def by_mode(name: str, type_: Type) -> Build:
    """Build a call of a function that goes by the mode of evaluation."""

    def build(node: Node, translator: Translator) -> Expression:
        arguments = translator.all(node)
        kind = type_(node, arguments) if callable(type_) else type_
        if is_.is_floating(kind) and name in ("add", "subtract", "multiply", "negate", "abs"):
            return made(name, arguments, kind, mode="ansi")  # the mode changes nothing
        return made(name, arguments, kind, mode=node.mode())

    return build


def negated(node: Node, translator: Translator) -> Expression:
    (value,) = translator.all(node)
    if value.type != CALENDAR:
        return by_mode("negate", first)(node, translator)
    if not isinstance(value, Literal):
        raise node.refused("an interval of months has to be a constant")
    return Literal(None if value.value is None else tuple(-each for each in value.value), CALENDAR)


def zone_of(node: Node, expression: Expression) -> str | None:
    """Return the time zone by which times of an expression are read; None: they are local."""
    return None if expression.type == TIMESTAMP_NTZ else node.zone()


def constant(node: Node, translator: Translator, at: int, what: str, default: Any = None) -> Any:
    """Return the value of an argument that has to be a constant."""
    if at >= len(node.children):
        return default
    found = folded(translator.translate(node.children[at]))
    if not isinstance(found, Literal):
        raise node.refused(f"{what} has to be a constant")
    return found.value


def folded(expression: Expression) -> Expression:
    """Return the constant that an expression without columns and errors is, else the expression."""
    simple = is_.is_primitive(expression.type) and not is_.is_temporal(expression.type)
    if isinstance(expression, Literal) or not (simple or expression.type == STRING or is_.is_decimal(expression.type)):
        return expression
    if expression.raises or expression.columns():
        return expression
    one = pa.record_batch({"": pa.nulls(1)})
    return Literal(expression.evaluate(one)[0].as_py(), expression.type)


def cast(node: Node, translator: Translator) -> Expression:
    (value,) = translator.all(node)
    to = node.kind()
    if value.type == to:
        return value
    if isinstance(value, Literal) and value.value is None:
        return Literal(None, to)
    if not casts.can_cast(value.type, to):
        raise node.refused("there is no such cast")
    # The mode matters where a value may not fit, and for the text of decimals.
    matters = casts.can_fail(value.type, to, "ansi") or is_.is_decimal(value.type)
    options: dict[str, Any] = {"mode": node.mode() if matters else "ansi"}
    if TIMESTAMP in (value.type, to):
        options["zone"] = node.zone()
    if STRING in (value.type, to) and TIMESTAMP not in (value.type, to):
        options["zone"] = None
    return (
        folded(made("cast", [value], to, **options))
        if isinstance(value, Literal)
        else made("cast", [value], to, **options)
    )


def compared(name: str) -> Build:
    """Build a comparison; of values that Spark compares by parts, there is none."""

    def build(node: Node, translator: Translator) -> Expression:
        arguments = translator.all(node)
        if any(is_.is_nested(each.type) or each.type == CALENDAR for each in arguments):
            raise node.refused("arrays, structs and intervals of months are not compared")
        return made(name, arguments, BOOLEAN)

    return build


def extreme(name: str) -> Build:
    def build(node: Node, translator: Translator) -> Expression:
        arguments = translator.all(node)
        if is_.is_nested(arguments[0].type):
            raise node.refused("arrays and structs are not compared")
        return made(name, arguments, arguments[0].type)

    return build


def conditional(node: Node, translator: Translator) -> Expression:
    """Build IF and CASE WHEN."""
    parts = translator.all(node)
    pairs = tuple(zip(parts[:-1:2] if len(parts) % 2 else parts[::2], parts[1::2], strict=True))
    otherwise = parts[-1] if len(parts) % 2 else Literal(None, parts[1].type)
    return Case(pairs, otherwise, parts[1].type)


def null_if(node: Node, translator: Translator) -> Expression:
    condition, value = translator.all(node)
    return Case(((condition, Literal(None, value.type)),), value, value.type)


def nan_to(node: Node, translator: Translator) -> Expression:
    left, right = translator.all(node)
    return Case(((made("is_nan", [left], BOOLEAN), right),), left, left.type)


def coalesced(node: Node, translator: Translator) -> Expression:
    arguments = translator.all(node)
    return Coalesce(tuple(arguments), arguments[0].type)


def member(node: Node, translator: Translator) -> Expression:
    """Build IN of a list."""
    arguments = [folded(each) for each in translator.all(node)]
    if is_.is_nested(arguments[0].type):
        raise node.refused("arrays and structs are not compared")
    if any(each.raises for each in arguments[1:]):
        # Spark stops at the first that is equal.
        found: Expression = made("equal", arguments[:2], BOOLEAN)
        for each in arguments[2:]:
            found = Or(found, made("equal", [arguments[0], each], BOOLEAN))
        return found
    return made("in", arguments, BOOLEAN)


def rounded(even: bool) -> Build:
    def build(node: Node, translator: Translator) -> Expression:
        scale = constant(node, translator, 1, "the number of digits", 0)
        value = translator.translate(node.children[0])
        kind = decimal_or_first(node, [value])
        if scale is None:
            return Literal(None, kind)
        return made("round", [value], kind, scale=scale, mode=node.mode(), **({"even": True} if even else {}))

    return build


def rounded_to(rounding: str) -> Build:
    def build(node: Node, translator: Translator) -> Expression:
        value = translator.translate(node.children[0])
        scale = constant(node, translator, 1, "the number of digits")
        return made("round_scaled", [value], node.kind(), scale=scale, rounding=rounding)

    return build


def like(node: Node, translator: Translator) -> Expression:
    value = translator.translate(node.children[0])
    pattern = constant(node, translator, 1, "the pattern of LIKE")
    if pattern is None:
        return Literal(None, BOOLEAN)
    escape = str(node.java.escapeChar())
    if node.name == "ILike":
        value, pattern = made("lower", [value], STRING), pattern.lower()
    like_form(pattern, escape)
    return made("like", [value], BOOLEAN, pattern=pattern, **({} if escape == "\\" else {"escape": escape}))


def with_pattern(name: str, type_: pa.DataType, *more: tuple[str, Any]) -> Build:
    """Build a function of a regular expression; ``more`` are further constants with their defaults."""

    def build(node: Node, translator: Translator) -> Expression:
        value = translator.translate(node.children[0])
        pattern = constant(node, translator, 1, "the regular expression")
        options = {key: constant(node, translator, 2 + at, key, default) for at, (key, default) in enumerate(more)}
        if pattern is None or None in options.values():
            return Literal(None, type_)
        translated(pattern)
        if "group" in options:
            check_group(pattern, options["group"])
        if "replacement" in options:
            replacement_parts(pattern, options["replacement"])
            if options.pop("position") != 1:
                raise node.refused("a replacement begins at the first character")
        return made(name, [value], type_, pattern=pattern, **options)

    return build


def with_constants(name: str, type_: Type, *options: tuple[str, str, Any], arguments: int = 1) -> Build:
    """Build a function whose further arguments are constants: each with its option, its name in messages and its
    default."""

    def build(node: Node, translator: Translator) -> Expression:
        values = [translator.translate(each) for each in node.children[:arguments]]
        kind = type_(node, values) if callable(type_) else type_
        found = {
            option: constant(node, translator, arguments + at, what, default)
            for at, (option, what, default) in enumerate(options)
        }
        if None in found.values():
            return Literal(None, kind)
        return made(name, values, kind, **found)

    return build


def trimmed(side: str) -> Build:
    def build(node: Node, translator: Translator) -> Expression:
        value = translator.translate(node.children[0])
        characters = constant(node, translator, 1, "the text of characters to remove", " ")
        return (
            Literal(None, STRING)
            if characters is None
            else made("trim", [value], STRING, side=side, characters=characters)
        )

    return build


def concatenated(node: Node, translator: Translator) -> Expression:
    arguments = translator.all(node)
    if not arguments:
        return Literal("", STRING)
    if is_.is_nested(arguments[0].type):
        raise node.refused("arrays are not concatenated")
    return made("concat", arguments, arguments[0].type)


def joined(node: Node, translator: Translator) -> Expression:
    arguments = translator.all(node)
    if any(is_.is_nested(each.type) for each in arguments):
        raise node.refused("arrays are not concatenated")
    return made("concat_ws", arguments, STRING)


def located(node: Node, translator: Translator) -> Expression:
    """Build LOCATE, whose text comes second."""
    text, start = (
        constant(node, translator, at, what, 1) for at, what in ((0, "the text to find"), (2, "the position"))
    )
    value = translator.translate(node.children[1])
    if text is None or start is None:
        return Literal(None if text is None else 0, INT)
    return made("position", [value], INT, text=text, start=start)


def with_end(name: str) -> Build:
    def build(node: Node, translator: Translator) -> Expression:
        arguments = translator.all(node)
        if name == "contains":
            return with_constants(name, BOOLEAN, ("text", "the text to find", None))(node, translator)
        return made(name, arguments, BOOLEAN)

    return build


def date_part(part: str) -> Build:
    return function("date_part", INT, part=part)


def time_part(part: str, type_: Type = INT) -> Build:
    def build(node: Node, translator: Translator) -> Expression:
        arguments = translator.all(node)
        kind = type_(node, arguments) if callable(type_) else type_
        return made("time_part", arguments, kind, part=part, zone=zone_of(node, arguments[0]))

    return build


def truncated_time(node: Node, translator: Translator) -> Expression:
    unit = constant(node, translator, 0, "the unit")
    value = translator.translate(node.children[1])
    if unit is None:
        return Literal(None, value.type)
    return made("truncate_time", [value], value.type, unit=unit, zone=zone_of(node, value))


def moved(sign: int = 1) -> Build:
    """Build the sum of a time and an interval."""

    def build(node: Node, translator: Translator) -> Expression:
        value, interval = translator.all(node)
        if interval.type == CALENDAR and not isinstance(interval, Literal):
            raise node.refused("an interval of months has to be a constant")
        if isinstance(interval, Literal) and interval.value is None:
            return Literal(None, value.type)
        return made(
            "add_to_time",
            [value, interval],
            value.type,
            zone=zone_of(node, value),
            **({} if sign == 1 else {"sign": sign}),
        )

    return build


def months_added(node: Node, translator: Translator) -> Expression:
    value, months = translator.all(node)
    if months.type == CALENDAR:
        if not isinstance(months, Literal):
            raise node.refused("an interval of months has to be a constant")
        months = Literal(None if months.value is None else months.value[0], INT)
    return made("add_months", [value, months], DATE)


def unit_added(node: Node, translator: Translator) -> Expression:
    count, value = translator.all(node)
    unit = str(node.fields["unit"]).upper()
    if unit not in times.UNITS and unit not in times.MONTH_UNITS:
        raise node.refused(f"the unit {unit} is not known")
    return made("add_unit", [value, count], node.kind(), unit=unit, zone=zone_of(node, value))


def unit_difference(node: Node, translator: Translator) -> Expression:
    start, end = translator.all(node)
    unit = str(node.fields["unit"]).upper()
    if unit not in times.UNITS and unit not in times.MONTH_UNITS:
        raise node.refused(f"the unit {unit} is not known")
    return made("difference_in", [start, end], BIGINT, unit=unit, zone=zone_of(node, start))


def times_subtracted(node: Node, translator: Translator) -> Expression:
    left, right = translator.all(node)
    if node.fields.get("legacyInterval"):
        raise node.refused("differences of times are day-time intervals (spark.sql.legacy.interval.enabled is on)")
    if left.type == DATE:
        return made("subtract_dates", [left, right], node.kind())
    return made("subtract_times", [left, right], node.kind(), zone=zone_of(node, left))


def formatted(node: Node, translator: Translator) -> Expression:
    value = translator.translate(node.children[0])
    pattern = constant(node, translator, 1, "the pattern")
    if pattern is None:
        return Literal(None, STRING)
    formats.pieces(pattern)
    name = "format_seconds" if node.name == "FromUnixTime" else "format_time"
    return made(name, [value], STRING, pattern=pattern, zone=zone_of(node, value))


def parsed(node: Node, translator: Translator) -> Expression:
    """Build TO_TIMESTAMP, TO_DATE and UNIX_TIMESTAMP."""
    value = translator.translate(node.children[0])
    seconds = node.name in ("ToUnixTimestamp", "UnixTimestamp")
    goal = BIGINT if seconds else DATE if node.name == "ParseToDate" else node.kind()
    mode = "ansi" if node.mode() == "ansi" else "try"
    if value.type != STRING:
        if seconds:
            zone = node.zone()
            name = "date_to_seconds" if value.type == DATE else "to_epoch"
            options = {"zone": zone} if value.type == DATE else {"per_second": 1, "towards_zero": True}
            return made(name, [value], BIGINT, **options)
        zone = node.zone() if TIMESTAMP in (value.type, goal) else None
        return value if value.type == goal else made("cast", [value], goal, mode=mode, zone=zone)
    if len(node.children) == 1:
        return made("cast", [value], goal, mode=mode, zone=node.zone() if goal == TIMESTAMP else None)
    pattern = constant(node, translator, 1, "the pattern")
    if pattern is None:
        return Literal(None, goal)
    formats.pieces(pattern, reading=True)
    read = BIGINT if seconds else TIMESTAMP if goal == DATE else goal
    zone = None if goal == TIMESTAMP_NTZ else node.zone()
    found = made("parse_time", [value], read, pattern=pattern, zone=zone, mode=mode)
    return made("cast", [found], DATE, mode="ansi", zone=zone) if goal == DATE else found


def from_epoch(per_second: int) -> Build:
    return function("from_epoch", TIMESTAMP, per_second=per_second)


def to_epoch(per_second: int) -> Build:
    return function("to_epoch", BIGINT, per_second=per_second)


def field(node: Node, translator: Translator) -> Expression:
    (value,) = translator.all(node)
    at = int(node.fields["ordinal"])
    return made("field", [value], value.type.field(at).type, ordinal=at)


def struct(node: Node, translator: Translator) -> Expression:
    """Build a struct of names, which are constants, and values."""
    values = [translator.translate(each) for each in node.children[1::2]]
    return made("struct", values, node.kind())


def element(first_number: int) -> Build:
    def build(node: Node, translator: Translator) -> Expression:
        value, index = translator.all(node)
        if not is_.is_list(value.type):
            raise node.refused("elements are taken of arrays, not of maps")
        mode = "try" if node.name == "Get" else node.mode()
        return made(
            "element", [value, index], value.type.value_type, mode=mode, **({"first": 1} if first_number else {})
        )

    return build


def map_value(node: Node, translator: Translator) -> Expression:
    raise node.refused("values of maps are not looked up")


def size(node: Node, translator: Translator) -> Expression:
    (value,) = translator.all(node)
    if not is_.is_list(value.type):
        raise node.refused("it is the size of a map")
    return made("size", [value], INT, null_is_minus_one=bool(node.fields.get("legacySizeOfNull")))


def not_repeatable(node: Node, translator: Translator) -> Expression:
    raise node.refused(
        f"{node.name} gives other values when rows are read again after a failure, and a step has to give the same. "
        "A stage has the time of its step in context.now"
    )


def logarithm(base: str) -> Build:
    return function("log", DOUBLE, base=base)


CLASSES: dict[str, Build] = {
    "Literal": lambda node, translator: literal(node),
    "And": lambda node, translator: And(*translator.all(node)),
    "Or": lambda node, translator: Or(*translator.all(node)),
    "Not": function("not", BOOLEAN),
    "EqualTo": compared("equal"),
    "EqualNullSafe": compared("equal_null_safe"),
    "LessThan": compared("less"),
    "LessThanOrEqual": compared("less_or_equal"),
    "GreaterThan": compared("greater"),
    "GreaterThanOrEqual": compared("greater_or_equal"),
    "IsNull": function("is_null", BOOLEAN),
    "IsNotNull": function("is_not_null", BOOLEAN),
    "IsNaN": function("is_nan", BOOLEAN),
    "In": member,
    "If": conditional,
    "CaseWhen": conditional,
    "Coalesce": coalesced,
    "NullIfResult": null_if,
    "NaNvl": nan_to,
    "Greatest": extreme("greatest"),
    "Least": extreme("least"),
    "Cast": cast,
    "Add": by_mode("add", decimal_or_first),
    "Subtract": by_mode("subtract", decimal_or_first),
    "Multiply": by_mode("multiply", decimal_or_first),
    "Divide": by_mode("divide", decimal_or_first),
    "IntegralDivide": by_mode("div", BIGINT),
    "Remainder": by_mode("remainder", decimal_or_first),
    "Pmod": by_mode("pmod", decimal_or_first),
    "UnaryMinus": negated,
    "UnaryPositive": lambda node, translator: translator.translate(node.children[0]),
    "Abs": by_mode("abs", first),
    "BitwiseAnd": function("bit_and", first),
    "BitwiseOr": function("bit_or", first),
    "BitwiseXor": function("bit_xor", first),
    "BitwiseNot": function("bit_not", first),
    "Round": rounded(even=False),
    "BRound": rounded(even=True),
    "Floor": by_mode("floor", asked),
    "Ceil": by_mode("ceil", asked),
    "RoundFloor": rounded_to("down"),
    "RoundCeil": rounded_to("up"),
    "Pow": function("power", DOUBLE),
    "Sqrt": function("sqrt", DOUBLE),
    "Exp": function("exp", DOUBLE),
    "Log": logarithm("e"),
    "Log2": logarithm("2"),
    "Log10": logarithm("10"),
    "Signum": function("sign", DOUBLE),
    "Like": like,
    "ILike": like,
    "RLike": with_pattern("rlike", BOOLEAN),
    "RegExpExtract": with_pattern("regexp_extract", STRING, ("group", 1)),
    "RegExpReplace": with_pattern("regexp_replace", STRING, ("replacement", None), ("position", 1)),
    "StringSplit": with_pattern("split", pa.list_(pa.field("element", STRING, False)), ("limit", -1)),
    "Upper": function("upper", STRING),
    "Lower": function("lower", STRING),
    "StringTrim": trimmed("both"),
    "StringTrimLeft": trimmed("left"),
    "StringTrimRight": trimmed("right"),
    "Length": function("length", INT),
    "OctetLength": function("octet_length", INT),
    "Substring": function("substring", first),
    "Left": function("left", first),
    "Right": function("right", STRING),
    "Concat": concatenated,
    "ConcatWs": joined,
    "StringReplace": with_constants(
        "replace", STRING, ("search", "the text to replace", None), ("replacement", "the replacement", "")
    ),
    "StringInstr": with_constants("position", INT, ("text", "the text to find", None)),
    "StringLocate": located,
    "StartsWith": with_end("starts_with"),
    "EndsWith": with_end("ends_with"),
    "Contains": with_end("contains"),
    "StringReverse": function("reverse", STRING),
    "Reverse": function("reverse", STRING),
    "StringRepeat": function("repeat", STRING),
    "StringLPad": lambda node, translator: padded(node, translator, "left"),
    "StringRPad": lambda node, translator: padded(node, translator, "right"),
    "SplitPart": with_constants(
        "split_part", STRING, ("delimiter", "the delimiter", None), ("part", "the number of the part", None)
    ),
    "SubstringIndex": with_constants(
        "substring_index", STRING, ("delimiter", "the delimiter", None), ("count", "the number", None)
    ),
    "Ascii": function("ascii", INT),
    "Year": date_part("year"),
    "YearOfWeek": date_part("yearofweek"),
    "Quarter": date_part("quarter"),
    "Month": date_part("month"),
    "WeekOfYear": date_part("week"),
    "WeekDay": date_part("weekday"),
    "DayOfMonth": date_part("day"),
    "DayOfWeek": date_part("dayofweek"),
    "DayOfYear": date_part("dayofyear"),
    "Hour": time_part("hour"),
    "Minute": time_part("minute"),
    "Second": time_part("second"),
    "SecondWithFraction": time_part("fraction", asked),
    "TruncTimestamp": truncated_time,
    "TruncDate": with_constants("truncate_date", DATE, ("unit", "the unit", None)),
    "TimestampAddInterval": moved(),
    "TimestampAddYMInterval": moved(),
    "TimeAdd": moved(),
    "DateAddYMInterval": months_added,
    "AddMonths": months_added,
    "DateAddInterval": by_mode("add_interval_to_date", DATE),
    "DateAdd": function("add_days", DATE),
    "DateSub": function("add_days", DATE, sign=-1),
    "DateDiff": function("subtract_dates", INT),
    "LastDay": function("last_day", DATE),
    "MakeDate": by_mode("make_date", DATE),
    "TimestampAdd": unit_added,
    "TimestampDiff": unit_difference,
    "SubtractTimestamps": times_subtracted,
    "SubtractDates": times_subtracted,
    "MultiplyDTInterval": function("multiply_interval", asked),
    "DateFormatClass": formatted,
    "FromUnixTime": formatted,
    "ParseToTimestamp": parsed,
    "ParseToDate": parsed,
    "ToUnixTimestamp": parsed,
    "UnixTimestamp": parsed,
    "UnixSeconds": to_epoch(1),
    "UnixMillis": to_epoch(1_000),
    "UnixMicros": to_epoch(1_000_000),
    "SecondsToTimestamp": from_epoch(1),
    "MillisToTimestamp": from_epoch(1_000),
    "MicrosToTimestamp": from_epoch(1_000_000),
    "ExtractANSIIntervalDays": function("interval_part", INT, unit="day"),
    "ExtractANSIIntervalHours": function("interval_part", pa.int8(), unit="hour"),
    "ExtractANSIIntervalMinutes": function("interval_part", pa.int8(), unit="minute"),
    "UnixDate": function("day_number", INT),
    "DateFromUnixDate": function("from_day_number", DATE),
    "GetStructField": field,
    "CreateNamedStruct": struct,
    "GetArrayItem": element(0),
    "Get": element(0),
    "ElementAt": element(1),
    "GetMapValue": map_value,
    "CreateArray": lambda node, translator: made("array", translator.all(node), node.kind()),
    "Size": size,
    **dict.fromkeys(
        ("CurrentTimestamp", "Now", "CurrentDate", "LocalTimestamp", "Rand", "Randn", "Uuid"), not_repeatable
    ),
    **dict.fromkeys(
        ("MonotonicallyIncreasingID", "SparkPartitionID", "InputFileName", "CurrentTimestampLike"), not_repeatable
    ),
}


def padded(node: Node, translator: Translator, side: str) -> Expression:
    build = with_constants("pad", STRING, ("width", "the length", None), ("padding", "the text to pad with", " "))
    found = build(node, translator)
    return (
        made("pad", list(found.arguments), STRING, side=side, **dict(found.options))
        if isinstance(found, FunctionCall)
        else found
    )
