"""Event time among faults: watermarks hold, each window comes once, and the answer equals that of a batch."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import flux
from partitioning.ids import StreamId
from tests.simulation import event_time_laws as laws
from tests.simulation import timed_kinds as kinds
from tests.simulation import timed_relations as relations
from tests.simulation.mixes import (
    AHEAD,
    AHEAD_UNEVEN,
    EVENT_TIME,
    EVENT_TIME_LIVES,
    EVENT_TIME_LIVES_OF_ONE,
    EVENT_TIME_REPAIRS,
    EVENT_TIME_STANDBYS,
    EVENT_TIME_UNEVEN,
    LOOKUPS,
    LOOKUPS_UNEVEN,
    WIDE,
    WIDE_LIVES,
    WIDE_STANDBYS,
)
from tests.simulation.run import run
from tests.simulation.runs import Runs, runs_of
from tests.simulation.timed_rows import SECOND, Newest, judged, windows_of
from tests.simulation.violation import Violation

MIXES = (
    EVENT_TIME,
    AHEAD,
    EVENT_TIME_UNEVEN,
    EVENT_TIME_REPAIRS,
    EVENT_TIME_STANDBYS,
    EVENT_TIME_LIVES,
    EVENT_TIME_LIVES_OF_ONE,
    AHEAD_UNEVEN,
    WIDE,
    WIDE_STANDBYS,
    LOOKUPS,
    LOOKUPS_UNEVEN,
)
SEEDS = range(32)
#: Cheap runs, in which each mix comes once at least and each event twice.
FEW = (
    (0, EVENT_TIME_LIVES_OF_ONE), (3, EVENT_TIME_LIVES_OF_ONE), (6, EVENT_TIME), (7, EVENT_TIME), (3, AHEAD), (4, AHEAD),
    (0, AHEAD_UNEVEN), (6, AHEAD_UNEVEN), (3, LOOKUPS), (6, LOOKUPS), (6, LOOKUPS_UNEVEN), (3, WIDE), (5, WIDE),
    (1, WIDE_STANDBYS), (3, WIDE_STANDBYS), (2, EVENT_TIME_LIVES), (7, EVENT_TIME_LIVES), (2, EVENT_TIME_REPAIRS),
    (1, EVENT_TIME_STANDBYS), (3, EVENT_TIME_STANDBYS), (0, EVENT_TIME_UNEVEN),
)  # fmt: skip


@pytest.fixture(scope="module")
def results() -> Runs:
    return runs_of(MIXES, SEEDS, FEW)


@pytest.mark.timeout(3600)
def test_event_time_keeps_every_law(results: Runs) -> None:
    broken = results.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "watermarks ordered",
        "watermarks that secondaries took",
        "watermarks that had to come",
        "runs whose sources stood still",
        "results of windows at sinks",
        "late rows at sinks",
        "late rows counted",
        "timers of event time: due",
        "timers of event time: beat",
        "rows made again",
        "readers that waited for others",
        "take-overs",
        "repairs",
        "moves done",
        "losses of everything",
        "lives that went on",
        "rows that met a version",
    ],
)
def test_it_happens_to_rows_with_times(results: Runs, event: str) -> None:
    assert results.happens(event, 4)


#: Seeds of lives with relations that broke a law once, and the reason.
BROKE_ONCE = {
    43: "the law did not know that a reader has to read a row to learn that rows before it are gone",
}


@pytest.mark.parametrize("seed", BROKE_ONCE)
def test_lives_that_broke_a_law_once_break_none_now(seed: int) -> None:
    result = run(seed, WIDE_LIVES)
    assert result.ok, f"{BROKE_ONCE[seed]}: {result}"


# ---- the laws themselves


def books(idle: bool = False) -> laws.EventTimeLaws:
    """Return the books of a query with one stage, whose one input may be idle."""
    source = SimpleNamespace(event_time=SimpleNamespace(idle=1 if idle else None))
    edge = laws.FromSource(0, 0, 0, (), laws.pa.schema([("ts", laws.pa.timestamp("us"))]), 1, 1, 0, states=True)
    stage = SimpleNamespace(id=0, name="stage", edges_in=(0,), timed_inputs=(0,), schemas=(edge.schema,))
    made = laws.EventTimeLaws(None)  # type: ignore[arg-type]
    plan: Any = SimpleNamespace(edges=[edge], stages=[stage], sources=[source])
    made.begin(SimpleNamespace(plan=plan, counts=Counter()))  # type: ignore[arg-type]
    return made


def test_a_row_behind_an_ordered_watermark_is_seen_whenever_it_is_given_out() -> None:
    stream = StreamId(0, 0)
    after, before = books(), books()
    after._claim(stream, 0, 4, 10)
    after._note(stream, 0, 4, 9)  # in front of the watermark
    after._note(stream, 0, 5, 10)
    with pytest.raises(Violation, match="ordered watermark 10 behind 4"):
        after._note(stream, 0, 6, 9)
    before._note(stream, 0, 6, 9)
    with pytest.raises(Violation, match=r"\(a\)"):
        before._claim(stream, 0, 4, 10)
    books(idle=True)._claim(stream, 0, 4, 10)


def test_a_watermark_that_falls_and_one_that_differs_are_seen() -> None:
    made = books()
    replica = SimpleNamespace(stage=SimpleNamespace(id=0), partition=0, where="stage, partition 0", orders_itself=False)
    made.committed(replica, 3, (7,))  # type: ignore[arg-type]
    made.committed(replica, 4, (7,))  # type: ignore[arg-type]
    with pytest.raises(Violation, match=r"\(c\)"):
        made.committed(replica, 4, (8,))  # type: ignore[arg-type]
    with pytest.raises(Violation, match=r"\(b\)"):
        made.committed(replica, 5, (6,))  # type: ignore[arg-type]
    with pytest.raises(Violation, match=r"\(b\)"):
        made.committed(replica, 2, (8,))  # type: ignore[arg-type]


def test_a_rank_that_goes_to_a_worse_row_is_seen() -> None:
    about = {"place": staticmethod(lambda row: row[0]), "order": staticmethod(lambda row: row[1]), "stage_name": "sink"}
    sink: Any = type("Places", (kinds.PlaceSink,), about)()
    sink.context, sink.state = SimpleNamespace(partition=0), {"newest": {}}
    sink.keep([("a", 5), ("b", 7), ("a", 4)])
    for row in (("a", 4), ("b", 8)):
        with pytest.raises(Violation, match=r"\(m\)"):
            sink.keep([row])


def test_the_models_of_joins_and_as_of_joins_give_each_row_with_its_partners() -> None:
    left: Any = [(1, 0, "l", 10), (2, 0, "l", 20), (3, 1, "l", None)]
    right: Any = [(7, 0, "r", 8), (8, 0, "r", 10), (9, 2, "r", 10)]
    given = {
        "inner": [(*left[0], 7), (*left[0], 8)],
        "right_outer": [(*right[0], 1), (*right[1], 1), (*right[2], None)],
        "full_outer": [
            (*left[0], 7, 0, 8), (*left[0], 8, 0, 10), *((*row, None, None, None) for row in left[1:]),
            (None, None, None, None, 9, 2, 10),
        ],
        "left_anti": left[1:],
    }  # fmt: skip
    for how, expected in given.items():
        assert relations.joined(how, 0, 5, left, right) == expected, how
    assert relations.newest_before(None, False, left, right) == [(*left[0], 8, "r", 10), (*left[1], 8, "r", 10)]
    assert relations.newest_before(5, True, left, right) == [
        (*left[0], 8, "r", 10), *((*row, None, None, None) for row in left[1:])
    ]  # fmt: skip


def test_the_model_judges_row_by_row_and_counts_windows_and_sessions() -> None:
    rows = [
        (at, 0, "", None if time is None else time * SECOND) for at, time in enumerate((10, 5, None, 20, 14, 15, 40))
    ]
    on_time, late = judged(rows, 5 * SECOND, Newest())
    assert [row[0] for row in late] == [4]
    given = [((0,), row[3], 1, row[0]) for row in on_time if row[3] is not None]
    ten = windows_of(given, flux.window("ts", "10 seconds"))
    assert {(start // SECOND, end // SECOND): found for (_, start, end), found in ten.items()} == {
        (0, 10): [1, 1],
        (10, 20): [2, 5],
        (20, 30): [1, 3],
        (40, 50): [1, 6],
    }
    hopping = windows_of(given, flux.window("ts", "10 seconds", "4 seconds"))
    assert sum(count for count, _ in hopping.values()) == sum(
        sum(start <= time < start + 10 for start in range(-12, 60, 4)) for time in (10, 5, 20, 15, 40)
    )
    sessions = windows_of(given, flux.session_window("ts", "5 seconds"))
    assert {(start // SECOND, end // SECOND): found for (_, start, end), found in sessions.items()} == {
        (5, 25): [4, 9],
        (40, 45): [1, 6],
    }
