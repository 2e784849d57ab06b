"""Deduplication against a model in plain Python, with any cuts, watermarks, copies and changes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.errors import SchemaError, UsageError
from flux.ranks import first_rows
from flux.ranks.dedup import Dedup, DedupSpec
from flux.ranks.first_rows import FirstRows
from flux.windows.window import NEVER
from tests.flux.stepped import Stepped, events

SCHEMA = pa.schema([("id", pa.float64()), ("kind", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("n", pa.int64())])
#: Id, kind, time in microseconds, number.
Row = tuple[float | None, str | None, int | None, int]


def batch(rows: list[Row]) -> pa.RecordBatch:
    ids, kinds, times, numbers = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    stamps = pa.array(times, pa.int64()).cast(SCHEMA.field("ts").type)
    return pa.RecordBatch.from_arrays(
        [pa.array(ids, pa.float64()), pa.array(kinds, pa.string()), stamps, pa.array(numbers, pa.int64())],
        schema=SCHEMA,
    )


def of_key(row: Row) -> tuple:
    number = row[0]
    return ("NaN" if number is not None and math.isnan(number) else number, row[1])  # 0.0 == -0.0 for a dict, too


class Model:
    """The documented rule, row by row."""

    def __init__(self, ttl: int) -> None:
        self.ttl = ttl
        self.given: dict[tuple, int] = {}

    def take(self, rows: list[Row], watermark: int) -> list[int]:
        first = []
        for row in rows:
            time = row[2]
            if time is None or time < watermark:
                continue
            before = self.given.get(of_key(row))
            if before is None or time > before + self.ttl:
                self.given[of_key(row)] = time
                first.append(row[3])
        return first


@st.composite
def steps(draw: Any) -> list[Any]:
    """Draw lists of rows, and watermarks; some rows are below the watermark."""
    made: list[Any] = []
    time, watermark, number = draw(st.integers(-40, 40)), NEVER, 0
    for _ in range(draw(st.integers(1, 14))):
        time += draw(st.integers(0, 8))
        if draw(st.integers(0, 2)) == 0:
            watermark = max(watermark, time - draw(st.integers(0, 8)))
            made.append(watermark)
            continue
        rows: list[Row] = []
        for _ in range(draw(st.integers(0, 7))):
            at = None if draw(st.integers(0, 15)) == 0 else time - draw(st.integers(0, 10))
            id_ = draw(st.sampled_from([0.0, -0.0, 1.5, math.nan, -math.nan, None]))
            rows.append((id_, draw(st.sampled_from(["a", "", None])), at, number))
            number += 1
        made.append(rows)
    return made


def by_id_and_kind(ttl: int) -> Stepped:
    return Stepped(partial(Dedup, DedupSpec(ttl, "ts")), [SCHEMA], ("id", "kind"))


#: When keys move, when and into how many pieces they are divided, and how many a call looks at.
DIVISIONS = {"KEYS_MIN": [1, 2, 1024], "WHOLE_MAX": [0, 3, 1 << 18], "PIECES": [2, 64], "MOVED_MAX": [1, 1 << 17]}


@settings(max_examples=60, deadline=None)
@given(drawn=steps(), ttl=st.integers(0, 12), data=st.data())
def test_the_rows_are_those_of_the_model_whatever_happens_to_the_operator(drawn: list, ttl: int, data: Any) -> None:
    happening = data.draw(events(len(drawn)))
    with pytest.MonkeyPatch.context() as patch:
        for name, drawn_from in DIVISIONS.items():
            patch.setattr(first_rows, name, data.draw(st.sampled_from(drawn_from)))
        stepped, model, watermark = by_id_and_kind(ttl), Model(ttl), NEVER
        for step, event in zip(drawn, happening, strict=True):
            stepped.happen(event)
            if isinstance(step, int):
                watermark = step
                assert stepped.move(step) == []
                continue
            cut = data.draw(st.integers(0, len(step)))
            found = [row[3] for part in (step[:cut], step[cut:]) for row in stepped.give(batch(part))]
            assert found == model.take(step, watermark)
        rows = [row for step in drawn if not isinstance(step, int) for row in step]
        behind, without = stepped.operator._flux_left_out()
        assert without == sum(row[2] is None for row in rows)
        assert behind <= len(rows)


def test_without_event_time_the_time_of_the_step_counts() -> None:
    stepped = Stepped(partial(Dedup, DedupSpec(10_000_000, None)), [SCHEMA], ("id",))
    found = []
    for now in (0.0, 4.0, 10.0, 10.5, 20.0, 20.6):
        stepped.context.now = now
        found.append(len(stepped.give(batch([(1.0, "a", None, 0), (1.0, "b", None, 1)]))))
    assert found == [1, 0, 0, 1, 0, 1]


def test_keys_that_never_come_back_are_forgotten() -> None:
    first, sizes = FirstRows([pa.field("id", pa.int64())], ttl=1_000), []
    for step in range(300):
        ids = np.arange(step * 500, step * 500 + 500)
        assert len(first.take([pa.array(ids)], np.full(500, step * 100))) == 500
        first.forget(step * 100 - 50)
        sizes.append(len(first))
    alive = 500 * (1_000 + 50) // 100
    assert max(sizes) <= 2.2 * alive
    first.forget(1 << 40)
    assert len(first) == 0
    assert first.nbytes < 100_000


def test_many_keys_move_in_several_steps_and_tell_their_changes_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WHOLE_MAX": 1_000, "PIECES": 8, "MOVED_MAX": 100, "KEYS_MIN": 64}.items():
        monkeypatch.setattr(first_rows, name, value)
    first, keys = FirstRows([pa.field("id", pa.int64())], ttl=10), np.arange(8_000)
    for part in np.split(keys, 8):
        assert len(first.take([pa.array(part)], np.where(part % 100, 0, 1_000))) == 1_000
    assert first.changes() is None
    sizes = []
    first.forget(500)
    while first.behind:
        sizes.append(len(first))
        first.forget(500)
    assert len(sizes) >= 3, "a step moves some of the pieces"
    assert max(np.abs(np.diff([8_000, *sizes]))) < 3_000
    assert len(first) == 80
    told = first.changes()
    assert told is not None
    assert sorted(told["whole"]) == list(range(8))
    first.take([pa.array([100, 101, 7])], np.array([1_000, 1_000, 1_000]))
    told = first.changes()
    assert told is not None
    assert not told["whole"]
    assert 1 <= len(told["changed"]) <= 2, "101 and 7 are new, 100 is a duplicate"


# ---- plans


def source(watermark: bool = True, delay: str = "10 seconds") -> Any:
    made: Any = flux.source(lambda partition, start: iter(()), SCHEMA, 1, "rows")
    return made.withWatermark("ts", delay) if watermark else made


def planned(*flows: Any) -> Any:
    from tests.flux.test_grouping import compiled

    return compiled(*flows)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


@flux.stage(window=flux.window("ts", "1 minute"), key="kind")
class Counted(flux.Aggregate):
    n = flux.count()


def test_duplicates_go_by_the_delay_of_the_watermark_and_windows_may_stand_behind() -> None:
    plan = planned(Counted(source().dropDuplicatesWithinWatermark(["id"])))
    dedup, counted = plan.stages
    assert dedup.name == "rows.dedup"
    assert dedup.key == ("id",)
    assert dedup.timed_inputs == (0,)
    assert dedup.make()._spec == DedupSpec(10_000_000, "ts")
    assert counted.timed_inputs == (0,)
    assert plan.edges[1].states


def test_all_columns_are_the_key_by_default() -> None:
    (dedup,) = planned(source().dropDuplicatesWithinWatermark()).stages
    assert dedup.key == tuple(SCHEMA.names)


def test_a_time_of_its_own_may_be_longer_than_the_delay() -> None:
    (dedup,) = planned(flux.dedup(source(), key=("id", "kind"), ttl="1 hour")).stages
    assert dedup.make()._spec == DedupSpec(3_600_000_000, "ts")
    (dedup,) = planned(flux.dedup(source(watermark=False), key="id", ttl="5 seconds")).stages
    assert dedup.make()._spec == DedupSpec(5_000_000, None)


def test_mistakes_are_refused_with_the_line_to_write() -> None:
    with pytest.raises(UsageError, match=r"source rows has none.*withWatermark\('ts', '10 seconds'\)"):
        planned(source(watermark=False).dropDuplicatesWithinWatermark(["id"]))
    with pytest.raises(UsageError, match="shorter than the '10 seconds' by which rows of source rows may be late"):
        planned(flux.dedup(source(), key="id", ttl="9 seconds"))
    with pytest.raises(SchemaError, match="key 'ident' is not a column"):
        planned(source().dropDuplicatesWithinWatermark(["ident"]))
    with pytest.raises(UsageError, match=r"expected a list of names.*\['event_id'\]"):
        source().dropDuplicatesWithinWatermark("id")
    with pytest.raises(UsageError, match="above zero"):
        flux.dedup(source(), key="id", ttl="0 seconds")
    with pytest.raises(UsageError, match="key must name the columns"):
        flux.dedup(source(), key=None, ttl="1 hour")


def test_changes_of_groups_are_no_rows_to_leave_out() -> None:
    @flux.stage(key="kind", output_mode="update")
    class Running(flux.Aggregate):
        n = flux.count()

    with pytest.raises(UsageError, match="stage Running gives a row for each change"):
        planned(flux.dedup(Running(source()), key="kind", ttl="1 hour"))
