"""Answers about flows that are being written: each is asked for once, and forgotten with the objects that it is about."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from flux.dataflow.row_operators import RowOperator
from spark_integration.expressions.analyser_answers import Answers

SCHEMA = pa.schema({"k": pa.int64()})


class Declared:
    """An object that cannot be compared, as a Column."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("Cannot convert column into bool")

    __hash__ = None  # type: ignore[assignment]


def asked(answers: Answers, *questions: Any) -> list[int]:
    """Return the numbers of the questions that are asked."""
    numbers: list[int] = []
    for number, question in enumerate(questions):
        answers.answer(question, lambda number=number: numbers.append(number))  # type: ignore[misc]
    return numbers


def test_each_question_is_asked_once_and_objects_are_told_apart_by_identity() -> None:
    one, other, answers = Declared(), Declared(), Answers()
    same = RowOperator("where", ("k > 1",)), RowOperator("where", ("k > 1",))
    columns = RowOperator("where", (one,)), RowOperator("where", (one,))
    questions = [
        ("a", one), ("a", one), ("a", other), ("b", one), ("a", SCHEMA, (one, other)), ("a", SCHEMA, [one, other]),
        ("a", SCHEMA, (other, one)), ("a", 1), ("a", "1"), ("a", True), (same[0],), (same[1],), (columns[0],),
        (columns[1],), ("a", pa.schema({"k": pa.int32()}), (one, other)),
    ]  # fmt: skip
    assert asked(answers, *questions) == [0, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14]
    assert asked(answers, *questions) == []


def test_answers_about_an_object_are_forgotten_with_it() -> None:
    one, other, answers = Declared(), Declared(), Answers()
    asked(answers, ("a", one), ("a", other), ("a", (one, other)))
    assert len(answers) == 3
    del one
    assert len(answers) == 1
    assert asked(answers, ("a", other)) == []


def test_an_error_is_no_answer_and_an_object_without_weak_references_is_asked_about_each_time() -> None:
    answers = Answers()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            answers.answer(("a",), lambda: 1 / 0)
    assert asked(answers, ("a",), (1.5,), (1.5,)) == [0, 1, 2]


def test_the_number_of_answers_is_bounded() -> None:
    answers = Answers(3)
    for number in range(10):
        asked(answers, ("a", number))
        assert len(answers) <= 3
    assert asked(answers, ("a", 9)) == []
