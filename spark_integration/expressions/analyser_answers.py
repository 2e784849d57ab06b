"""Answers of Spark's analyser about flows that are being written, remembered for the flows that are made of these.

Each method of a flow compiles the whole flow, because the schema before its last declaration depends on all before it. With the
answers about the earlier declarations at hand, Spark analyses the last one alone, so writing a flow takes time in proportion
to its length. A query that starts is compiled without them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from flux.dataflow.grouping import Grouping, ResolvedGrouping
from flux.dataflow.relations.join_flow import FlowFrame, Frame, Joining, JoinInput, ResolvedJoin
from flux.dataflow.relations.ranking import ResolvedOrder
from flux.dataflow.row_flow import Applied
from flux.dataflow.row_operators import RowOperator
from flux.expressions.steps import RowSteps
from spark_integration.expressions.aggregates import groups_of
from spark_integration.expressions.analysed_operators import empty, steps_of, with_aliases
from spark_integration.expressions.joins import join_of
from spark_integration.expressions.orders import order_of
from spark_integration.schema import to_arrow
from spark_integration.settings import session_text

Answer = TypeVar("Answer")
#: The most answers that are kept. All are forgotten when there would be more.
MOST = 1000


class Answers:
    """Answers by question. A question is about values and about objects; an object is told from others by its identity, because
    Columns cannot be compared. The answers about an object are forgotten with it, so that nothing is kept alive."""

    def __init__(self, most: int = MOST) -> None:
        self._known: dict[Hashable, tuple[tuple[weakref.ref[Any], ...], Any]] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget all answers."""
        self._known.clear()

    def answer(self, question: tuple[Any, ...], ask: Callable[[], Answer]) -> Answer:
        """Return the known answer, or else ask for it. An error is no answer."""
        objects: list[Any] = []
        key = _key(question, objects)
        known = self._known.get(key)
        if known is not None and all(found() is not None for found in known[0]):
            answer: Answer = known[1]
            return answer
        answer = ask()
        try:
            gone = partial(_forget, weakref.ref(self), key)
            references = tuple(weakref.ref(each, gone) for each in objects)
        except TypeError:  # an object that knows no weak references
            return answer
        if len(self._known) >= self._most:
            self.clear()
        self._known[key] = references, answer
        return answer


def _forget(answers: weakref.ref[Answers], key: Hashable, _gone: Any) -> None:
    if (kept := answers()) is not None:
        kept._known.pop(key, None)


def _key(part: Any, objects: list[Any]) -> Hashable:
    """Return a part of a question as part of a key, and add its objects to the list."""
    if part is None or isinstance(part, str | int | pa.Schema):
        return type(part), part
    if isinstance(part, tuple | list):
        return tuple(_key(each, objects) for each in part)
    if isinstance(part, RowOperator) and all(isinstance(each, str) for each in part.arguments):
        return part.name, part.arguments
    objects.append(part)
    return id(part)


#: The answers about flows that are being written.
KNOWN = Answers()


class AnswerRecord:
    """The questions of a compilation and their answers. Some answers are given beforehand: they were taken down when equal flows
    were compiled in an earlier life of the program."""

    def __init__(self) -> None:
        self._given = Answers(sys.maxsize)
        #: Each question without its session, and the answer.
        self.asked: list[tuple[tuple[Any, ...], Any]] = []

    def give(self, question: tuple[Any, ...], answer: Any) -> None:
        """Give an answer beforehand."""
        self._given.answer(question, lambda: answer)

    def answer(self, question: tuple[Any, ...], ask: Callable[[], Answer]) -> Answer:
        """Return the answer that was given beforehand, or else ask for it."""
        answer = self._given.answer(question, ask)
        if question[0] != "frame":  # a DataFrame is of this life alone
            self.asked.append((question, answer))
        return answer


#: The record of a thread, while it compiles with one.
_recording = threading.local()


@contextmanager
def recorded(record: AnswerRecord) -> Iterator[None]:
    """Compile with a record in this thread. Queries that start, and additions, then take answers of it."""
    before, _recording.now = getattr(_recording, "now", None), record
    try:
        yield
    finally:
        _recording.now = before


def objects_of(question: tuple[Any, ...]) -> list[Any]:
    """Return the objects that a question is about."""
    objects: list[Any] = []
    _key(question, objects)
    return objects


class Analyses:
    """The functions by which the compiler asks Spark. Answers hold for one session with one set of settings: time zone, ANSI mode
    and case sensitivity may change between two calls."""

    def __init__(self, spark: SparkSession, answers: Answers | None) -> None:
        """``answers``: None, if Spark is asked each time, as for a query that starts."""
        self._spark, self._answers = spark, answers
        self._record: AnswerRecord | None = getattr(_recording, "now", None) if answers is None else None
        self._session: tuple[str, ...] = ()
        if answers is not None:
            self._session = str(spark._jsparkSession.sessionUUID()), sys.intern(session_text(spark))

    def to_arrow(self, declared: Any) -> pa.Schema:
        if isinstance(declared, pa.Schema):
            return declared
        return self._answer(("schema", declared), lambda: to_arrow(self._spark, declared))

    def steps(self, schema: pa.Schema, operators: Callable[[DataFrame], DataFrame]) -> RowSteps:
        if not isinstance(operators, Applied):
            return steps_of(self._spark, schema, operators)
        listed = operators.operators
        return self._answer(
            ("steps", schema, listed), lambda: steps_of(self._spark, schema, lambda _: self._frame(schema, listed))
        )

    def _frame(self, schema: pa.Schema, operators: tuple[RowOperator, ...]) -> DataFrame:
        """Return an empty DataFrame with operators behind it. A remembered one gets the last operator alone."""
        if not operators:
            return self._answer(("frame", schema), lambda: empty(self._spark, schema))
        return self._answer(("frame", schema, operators), lambda: operators[-1].of(self._frame(schema, operators[:-1])))

    def groups(self, schema: pa.Schema, grouping: Grouping, frame: Frame | None) -> ResolvedGrouping:
        def ask() -> ResolvedGrouping:
            rows = None if frame is None else with_aliases(self._spark, frame)
            return groups_of(self._spark, schema, grouping, rows)

        flow = frame.flow if isinstance(frame, FlowFrame) else frame
        return self._answer(("groups", schema, grouping, flow), ask)

    def order(self, schema: pa.Schema, by: Any, frame: Frame | None = None) -> ResolvedOrder:
        def ask() -> ResolvedOrder:
            return order_of(self._spark, schema, by, None if frame is None else with_aliases(self._spark, frame))

        return self._answer(("order", schema, by, frame.flow if isinstance(frame, FlowFrame) else frame), ask)

    def join(
        self, left: JoinInput, right: JoinInput, joining: Joining, behind: Callable[[DataFrame], DataFrame]
    ) -> ResolvedJoin:
        def ask() -> ResolvedJoin:
            return join_of(self._spark, left, right, joining, behind)

        if not isinstance(behind, Applied):
            return ask()
        sides = tuple(part for side in (left, right) for part in _parts(side))
        return self._answer(("join", sides, joining, behind.operators), ask)

    def _answer(self, question: tuple[Any, ...], ask: Callable[[], Answer]) -> Answer:
        if self._answers is not None:
            return self._answers.answer((*self._session, *question), ask)
        return ask() if self._record is None else self._record.answer(question, ask)


def _parts(side: JoinInput) -> Iterator[Any]:
    """Yield the parts of a question that one side of a join is. Its frame and its steps follow from the flow."""
    yield from (side.name, side.schema, side.times, side.delay, side.ends, side.flow)
    yield None if side.steps is None else side.steps.schema
