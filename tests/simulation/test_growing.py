"""Stages and edges that come and go among all faults: no row of a new stage is missing, and nothing of an old one is left
(design: plan-version, edge-begins, edge-closes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from controller.course.source_births import SourceBirths, stream_of
from controller.decide.plan_changes import PlanChanges
from flux.wire.control import EdgeStored
from tests.simulation import broken_growing as broken
from tests.simulation.growing_laws import ALIKE, EXACT, GONE, INCLUDED, STORED
from tests.simulation.growing_readers import SOURCES
from tests.simulation.growing_sources import ALONE
from tests.simulation.mixes import GROWING_LIVES, GROWING_SOURCE_LIVES
from tests.simulation.run import GROWS_FROM, SOURCES_COME_FROM, WIDE_GROWS_FROM, Result, run
from tests.simulation.runs import LONG

#: Seeds; for ``make test``, seeds in which much happens in little time.
SEEDS = range(GROWS_FROM, GROWS_FROM + 100) if LONG else [GROWS_FROM + each for each in (0, 2, 4)]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return list(map(run, SEEDS))


def test_every_law_is_kept(results: list[Result]) -> None:
    assert [str(result) for result in results if not result.ok] == []


def test_stages_come_and_go(results: list[Result]) -> None:
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    assert counts["changes of the plan done"] > 4 * len(SEEDS)
    assert counts["removals asked for"] > len(SEEDS)
    assert counts["edges that began behind rows"] > 4 * len(SEEDS)
    assert counts["rows at new stages"] > 200 * len(SEEDS)
    assert counts["take-overs"] > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_loss_of_everything_leaves_each_change_done_or_undone() -> None:
    results = [run(seed, GROWING_LIVES) for seed in (*range(GROWS_FROM, GROWS_FROM + 9), 1, 2, 4)]
    assert [str(result) for result in results if not result.ok] == []
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    assert counts["lives that went on"] > 12
    assert counts["versions kept"] > 120
    assert counts["edges that began behind rows"] > 120
    assert counts["versions lost with everything"] > 0
    assert counts["versions kept and not heard of"] > 0


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_stages_come_and_go_in_queries_of_all_kinds() -> None:
    results = list(map(run, range(WIDE_GROWS_FROM, WIDE_GROWS_FROM + 200)))
    assert [str(result) for result in results if not result.ok] == []
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    assert counts["changes of the plan done"] > 800
    assert counts["sinks asked for"] > 200
    assert counts["rows outside"] > 20_000
    assert counts["lives that went on"] > 40
    assert counts["links cut between two workers"] > 200


@pytest.mark.long
def test_versions_that_no_directory_has_break_the_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes follow versions of the plan that the next life of the query does not know."""
    init = PlanChanges.__init__

    def broken(self: PlanChanges, *given: Any) -> None:
        init(self, *given)
        self.births.keeps = False

    monkeypatch.setattr(PlanChanges, "__init__", broken)
    assert [run(seed, GROWING_LIVES).ok for seed in (1, 2, 5)] == [False] * 3


#: Seeds with sources that come and go, and stages that fail alone; for ``make test``, cheap ones.
COMING = range(SOURCES_COME_FROM, SOURCES_COME_FROM + 100) if LONG else [SOURCES_COME_FROM + 109]


@pytest.mark.timeout(7200)
def test_sources_come_and_go_and_stages_fail_alone() -> None:
    results = list(map(run, COMING))
    assert [str(result) for result in results if not result.ok] == []
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    if LONG:
        assert counts["stages that failed"] > 30
        assert counts["micro-batches"] > 100
        assert counts["sources that went"] > 30
        assert counts["results at new stages"] > 1000
        for kind in (*SOURCES, "frame", "stream"):
            assert counts[f"sources asked for: {kind}"] > 3, kind


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("variant", "laws"),
    [
        (broken.keeps_the_credit_of_removed_edges, {GONE}),
        (broken.tells_no_source_without_readers, {"a table is what the controller made"}),
        (broken.asks_readers_as_if_nothing_failed, {"no unhandled exception"}),
        (broken.takes_all_later_stages_along, {ALONE}),
    ],
)
def test_a_rule_of_plans_that_grow_is_missed_in_queries_of_all_kinds(
    variant: Callable[[pytest.MonkeyPatch], None], laws: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant(monkeypatch)
    results = (run(SOURCES_COME_FROM + seed) for seed in (0, 16, 23))
    assert next(result.law for result in results if not result.ok) in laws


#: Seeds of lives in which streams of running sources are born and kept, one for each kind of source.
SOURCE_LIVES = (1, 2, 4)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_streams_of_running_sources_begin_with_the_same_row_in_all_lives() -> None:
    results = [run(seed, GROWING_SOURCE_LIVES) for seed in (*range(GROWS_FROM, GROWS_FROM + 10), *SOURCE_LIVES)]
    assert [str(result) for result in results if not result.ok] == []
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    assert counts["lives that went on"] > 12
    assert counts["orders about births"] > 30
    assert counts["births that were not kept at once"] > 3
    assert counts["edges of the source that began behind rows"] > 10


def tells_before_the_location_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell a birth when it is reported, and keep it later."""
    report = SourceBirths.report

    def broken(self: SourceBirths, birth: EdgeStored, now: float) -> tuple[EdgeStored, ...]:
        report(self, birth, now)
        return () if self.of(stream_of(birth)) is not None else (birth,)

    monkeypatch.setattr(SourceBirths, "report", broken)
    monkeypatch.setattr(SourceBirths, "of", lambda self, stream: {**self._reported, **self._stored}.get(stream))


def begins_without_the_births_of_the_location(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceBirths, "begin", lambda self, births: None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "seeds"),
    [(tells_before_the_location_has_it, (10,)), (begins_without_the_births_of_the_location, SOURCE_LIVES)],
)
def test_births_that_the_location_lacks_break_the_next_life(
    variant: Callable[[pytest.MonkeyPatch], None], seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant(monkeypatch)
    laws = {run(seed, GROWING_SOURCE_LIVES).law for seed in seeds} - {None}
    assert laws
    assert laws <= {ALIKE, EXACT, INCLUDED, STORED}
