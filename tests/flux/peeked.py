"""A line of steps whose operator is peeked at, and a copy of the operator that gets the tentative rows themselves.

A step is rows of an input, ``(input, batch)``, or watermarks, a list with the rise of each input."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st

from flux.operators.attributes import open_operator
from flux.operators.batches import given_batches
from flux.operators.operator import Context, Operator, move_watermarks
from flux.operators.tentative import PEEK, TentativeRows, tentative_kind, tentative_output
from flux.replica.snapshot import checksum_of_snapshot, decode_snapshot, encode_snapshot
from flux.windows.window import END_OF_TIME, NEVER


def examples(few: int) -> settings:
    """Return settings of Hypothesis for few examples, and for twenty times as many in ``make test-long``."""
    return settings(max_examples=few * (20 if os.environ.get("FLUX_TEST_LONG") else 1), deadline=None)


def table_of(batches: Iterable[pa.RecordBatch]) -> list[Any]:
    """Return the rows of batches, as values that are equal only if rows are equal to the last bit."""
    found = [batch for batch in batches if batch.num_rows]
    if not found:
        return []
    rows = pa.Table.from_batches(found).to_pylist()
    return [[repr(value) for value in row.values()] for row in rows]


def same(one: Sequence[pa.RecordBatch], other: Sequence[pa.RecordBatch]) -> bool:
    """Return whether batches certainly have equal rows; quicker than ``table_of``, and False where NaN is among them."""
    tables = [pa.Table.from_batches(batches) for batches in (one, other) if batches]
    return not tables or (len(tables) == 2 and bool(tables[0].equals(tables[1])))


class PeekedLine:
    """The steps of one partition. Each ``peek`` is compared with a copy of the operator."""

    def __init__(
        self, make: Callable[[], Operator], key: tuple[str, ...], schemas: Sequence[pa.Schema], mode: str,
        kind: str | None = PEEK,
    ) -> None:  # fmt: skip
        """Open the operator. ``kind`` is the way to tentative results that it has to have; None: any."""
        self.make = make
        inputs = len(schemas)
        self.context = Context("stage", key=key, schemas=tuple(schemas), output_mode=mode, watermarks=[NEVER] * inputs)
        self.operator = self._opened(self.context)
        assert kind is None or tentative_kind(self.operator) == kind
        self.given: list[pa.RecordBatch] = []

    def _opened(self, context: Context) -> Operator:
        operator = self.make()
        open_operator(operator, context)
        return operator

    def rows(self, number: int, batch: pa.RecordBatch, now: float = 0.0) -> None:
        self.context.input, self.context.now, self.context.step = number, now, self.context.step + 1
        self.given += given_batches(self.operator.process(batch))

    def watermarks(self, marks: Sequence[int]) -> None:
        self.context.step += 1
        self.given += move_watermarks(self.operator, self.context, marks)

    def checksum(self) -> int:
        return checksum_of_snapshot(self.operator.snapshot(), "here", self.operator.snapshot_classes)

    def copy(self) -> Operator:
        """Return a copy of the operator, as a fork makes it."""
        copied = self._opened(self.context.aside())
        state = encode_snapshot(self.operator.snapshot(), "here", classes=copied.snapshot_classes)
        copied.restore(decode_snapshot(state, classes=copied.snapshot_classes))
        return copied

    def peek(self, watermark: int, overlay: Sequence[TentativeRows], after: int = NEVER) -> list[pa.RecordBatch]:
        """Peek, and compare the result with that of the copy, and the state with that before."""
        before, context = self.checksum(), replace(self.context)
        timers = dict(self.context.timers.pending), dict(self.context.event_timers.pending)
        given = self.operator.peek(watermark, overlay, after)
        assert self.checksum() == before
        assert self.context == context
        assert timers == (self.context.timers.pending, self.context.event_timers.pending)
        wanted = list(tentative_output(self.copy(), watermark, overlay, after))
        assert same(given, wanted) or table_of(given) == table_of(wanted)
        assert [batch.schema for batch in given[:1]] == [batch.schema for batch in wanted[:1]]
        return given


Step = tuple[int, pa.RecordBatch] | list[int]
Piece = tuple[int, int, pa.RecordBatch]
#: Seeds of the choices of watermarks.
SEEDS = st.integers(0, 1 << 16)


def scenario(seed: int, inputs: int, batch: Callable[[int, Random], pa.RecordBatch]) -> tuple[list[Step], list[Piece]]:
    """Draw steps and an overlay. Numbers are drawn evenly, as Hypothesis does not: rows have to meet."""
    random = Random(seed)
    steps: list[Step] = []
    for _ in range(random.randint(4, 9)):
        number = random.randrange(inputs)
        mark = random.random() < 0.4
        steps.append([random.randint(0, 6) for _ in range(inputs)] if mark else (number, batch(number, random)))
    numbers = [random.randrange(inputs) for _ in range(random.randint(1, 3))]
    return steps, [(random.randint(0, 8), number, batch(number, random)) for number in numbers]


def followed(make: Callable[[], PeekedLine], batch: Callable[[int, Random], pa.RecordBatch], seed: int) -> None:
    """Take steps, and peek in front of each and at the end. Each piece of ``overlay`` is a rise of the tentative watermark, the
    input and the rows. The output of the steps is that of a line without a peek."""
    line, alone, random = make(), make(), Random(seed)
    steps, overlay = scenario(seed, len(line.context.schemas), batch)
    for number, step in enumerate([*steps, None]):
        peeked(line, overlay, random)
        for each in (line, alone):
            if isinstance(step, list):
                marks = zip(each.context.watermarks, step, strict=True)
                each.watermarks([max(mark, 0) + rise for mark, rise in marks])
            elif step is not None:
                each.rows(*step, now=number * 2e-6)
    for each in (line, alone):
        each.watermarks([END_OF_TIME for _ in each.context.watermarks])
    assert table_of(line.given) == table_of(alone.given)


def peeked(line: PeekedLine, overlay: Sequence[Piece], random: Random) -> None:
    marks, rows = [max(line.context.watermark, 0)], []
    for rise, number, batch in overlay:
        marks.append(marks[-1] + rise)
        rows.append(TentativeRows(number, batch, marks[-1]))
    for given in {0, random.randint(0, len(rows))}:
        watermark = random.choice([marks[given], marks[given] + random.randint(0, 30), END_OF_TIME])
        after = random.choice([NEVER, *marks[: given + 1], marks[given] + 4])
        line.peek(watermark, rows[:given], min(after, watermark))
