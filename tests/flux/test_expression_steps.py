"""Chains of conditions and columns: composition, the columns they need, and the rows they give."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from flux.expressions.kernels.values import ExpressionError
from flux.expressions.sql import sql
from flux.expressions.steps import RowStep, RowSteps, Select, Where
from flux.expressions.tree import And, Case, Coalesce, Column, Expression, FunctionCall, Literal, Or, With
from flux.expressions.types import DATE, TIMESTAMP

LONG, BOOLEAN = pa.int64(), pa.bool_()
SCHEMA = pa.schema({"a": LONG, "b": LONG, "c": LONG, "s": pa.string()})
BATCH = pa.record_batch({"a": [1, 2, 3, None], "b": [10, 0, 30, 40], "c": [5, 5, 5, 5], "s": ["w", "x", "y", "z"]})
A, B = Column("a", LONG), Column("b", LONG)


def plus(left: Expression, right: Expression) -> Expression:
    return FunctionCall("add", (left, right), LONG, (("mode", "ansi"),))


def above(left: Expression, limit: int) -> Expression:
    return FunctionCall("greater", (left, Literal(limit, LONG)), BOOLEAN)


def per_b(left: Expression) -> Expression:
    return FunctionCall("div", (left, B), LONG, (("mode", "ansi"),))


def select(**outputs: Expression) -> Select:
    return Select(tuple(outputs.items()))


def chain(*steps: RowStep) -> RowSteps:
    return RowSteps.of(SCHEMA, steps)


def test_rows_pass_for_which_the_condition_is_true_with_their_index() -> None:
    passed, kept = chain(Where(above(A, 1))).run(BATCH)
    assert passed.to_pydict() == {"a": [2, 3], "b": [0, 30], "c": [5, 5], "s": ["x", "y"]}
    assert kept is not None
    assert kept.to_pylist() == [1, 2]


def test_a_condition_that_all_fulfil_copies_nothing() -> None:
    passed, kept = chain(Where(above(B, -1))).run(BATCH)
    assert kept is None
    assert passed is BATCH


def test_indexes_are_those_of_the_rows_that_came_behind_several_conditions() -> None:
    steps = chain(Where(above(B, 5)), select(t=plus(A, B)), Where(above(Column("t", LONG), 30)))
    passed, kept = steps.run(BATCH)
    assert passed.to_pydict() == {"t": [33]}
    assert kept is not None
    assert kept.to_pylist() == [2]


def test_columns_of_columns_become_one_step_where_nothing_is_computed_twice() -> None:
    once = chain(select(t=plus(A, B), a=A), select(u=plus(Column("t", LONG), Column("a", LONG))))
    assert once.chain == (select(u=plus(plus(A, B), A)),)
    twice = chain(select(t=plus(A, B)), select(u=plus(Column("t", LONG), Column("t", LONG))))
    assert len(twice.chain) == 2
    assert twice.apply(BATCH).to_pydict() == {"u": [22, 4, 66, None]}


def test_conditions_go_in_front_of_columns_that_cost_and_may_raise() -> None:
    steps = chain(select(q=per_b(A), b=B), Where(above(Column("b", LONG), 0)))
    assert [type(each) for each in steps.chain] == [Where, Select]
    assert steps.apply(BATCH).to_pydict() == {"q": [0, 0, None], "b": [10, 30, 40]}
    # A condition on a column that is computed stays behind it.
    behind = chain(select(q=per_b(A)), Where(above(Column("q", LONG), 0)))
    assert [type(each) for each in behind.chain] == [Select, Where]
    with pytest.raises(ExpressionError, match="DIVIDE_BY_ZERO"):
        behind.apply(BATCH)


def test_columns_that_no_later_step_looks_at_are_left_out() -> None:
    steps = chain(select(t=plus(A, B), q=per_b(A), a=A), select(u=plus(Column("t", LONG), Column("t", LONG))))
    assert steps.chain[0] == select(t=plus(A, B))
    assert steps.apply(BATCH).to_pydict() == {"u": [22, 4, 66, None]}
    constant = chain(select(t=plus(A, B)), Where(above(Column("t", LONG), 20)), select(one=Literal(1, LONG)))
    assert constant.apply(BATCH).to_pydict() == {"one": [1]}
    counted = RowSteps.of(SCHEMA, [select(t=plus(A, B), u=A), select(one=Literal(1, LONG))])
    assert counted.apply(BATCH).to_pydict() == {"one": [1, 1, 1, 1]}


def test_a_renamed_column_is_followed_through_the_steps() -> None:
    swapped = chain(select(a=B, b=A), Where(above(Column("a", LONG), 20)), select(x=Column("b", LONG)))
    assert swapped.chain == (Where(above(B, 20)), select(x=A))
    assert swapped.apply(BATCH).to_pydict() == {"x": [3, None]}


def test_a_name_that_is_there_twice_joins_nothing() -> None:
    doubled = Select((("t", A), ("t", B)))
    assert len(chain(doubled, select(u=Column("t", LONG))).chain) == 2


def test_only_the_columns_that_are_needed_are_read() -> None:
    steps = chain(Where(above(B, 5)), select(t=plus(A, B), s=Column("s", pa.string())))
    assert steps.needs() == ["a", "b", "s"]
    assert steps.needs(["s"]) == ["b", "s"]
    assert steps.apply(BATCH.select(["a", "b", "s"])).num_columns == 2
    assert chain(Where(above(B, 5))).needs() == ["a", "b", "c", "s"]
    assert chain(Where(above(B, 5))).needs(["s"]) == ["b", "s"]


def test_constants_alone_still_need_the_number_of_rows() -> None:
    steps = chain(Where(above(B, 5)), select(one=Literal(1, LONG)))
    assert steps.needs() == ["b"]
    assert steps.apply(BATCH).to_pydict() == {"one": [1, 1, 1]}
    assert chain(select(one=Literal(1, LONG))).needs() == ["a"]


def test_chains_are_composed() -> None:
    first = chain(Where(above(B, 5)), select(t=plus(A, B)))
    second = RowSteps.of(first.output, [select(u=Column("t", LONG))])
    both = first.then(second)
    assert both.chain == (Where(above(B, 5)), select(u=plus(A, B)))
    assert both.apply(BATCH) == second.apply(first.apply(BATCH))


def test_the_output_has_the_types_that_are_declared() -> None:
    berlin = pa.schema({"t": pa.timestamp("us", "Europe/Berlin")})
    time = Literal(0, pa.timestamp("us", "UTC"))
    assert RowSteps.of(SCHEMA, [select(t=time)], berlin).apply(BATCH).schema == berlin


def test_no_rows_stay_no_rows() -> None:
    steps = chain(Where(above(B, 5)), select(q=per_b(A)))
    assert steps.apply(BATCH.slice(0, 0)).num_rows == 0
    assert steps.apply(BATCH.slice(1, 1)).num_rows == 0


def test_steps_have_a_text_form_and_travel() -> None:
    steps = chain(Where(above(B, 5)), select(t=A))
    assert str(steps) == "where greater(`b`, 5:BIGINT):BOOLEAN; select `a` as `t`"
    assert pickle.loads(pickle.dumps(steps)) == steps


def call(name: str, *given: Expression, type_: pa.DataType = BOOLEAN, **options: object) -> FunctionCall:
    return FunctionCall(name, given, type_, tuple(options.items()))


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (above(A, 3), "a > 3"),
        (And(Or(above(A, 3), above(B, 4)), call("not", call("is_null", A))), "(a > 3 OR b > 4) AND NOT a IS NULL"),
        (plus(call("multiply", plus(A, B), B, type_=LONG, mode="ansi"), A), "(a + b) * b + a"),
        (plus(A, plus(A, B)), "a + (a + b)"),
        (call("equal", Column("my col", pa.string()), Literal("it's", pa.string())), r"`my col` = 'it\'s'"),
        (call("cast", A, type_=pa.int32(), mode="ansi", zone="UTC"), "CAST(a AS INT)"),
        (call("in", A, Literal(1, LONG), Literal(None, LONG)), "a IN (1, NULL)"),
        (call("field", Column("w", pa.struct({"start": LONG})), type_=LONG, ordinal=0), "w.start"),
        (call("date_part", A, type_=LONG, part="year", zone="UTC"), "date_part(a, part => 'year')"),
        (call("less", Column("d", DATE), Literal(15706, DATE)), "d < DATE '2013-01-01'"),
        (
            call("add", Column("t", TIMESTAMP), Literal(60_000_000, pa.duration("us")), type_=TIMESTAMP),
            "t + INTERVAL 1 MINUTE",
        ),
        (
            Case(((above(A, 1), Literal(True, BOOLEAN)),), Literal(None, BOOLEAN), BOOLEAN),
            "CASE WHEN a > 1 THEN true ELSE NULL END",
        ),
        (With("\0x", plus(A, B), plus(Column("\0x", LONG), Column("\0x", LONG))), "a + b + (a + b)"),
        (Coalesce((A, B), LONG), "coalesce(a, b)"),
    ],
)
def test_people_read_expressions_as_they_would_write_them(expression: Expression, text: str) -> None:
    assert sql(expression) == text


def test_people_read_steps_as_sql() -> None:
    steps = chain(Where(above(B, 5)), select(t=plus(A, B), s=Column("s", pa.string())))
    assert steps.sql == "where b > 5; select a + b AS t, s"
