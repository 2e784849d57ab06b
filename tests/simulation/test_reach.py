"""Links between two workers that are cut for seconds hold up no rows that another worker can give (design: reachability)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation.mixes import (
    CUT_ALONE,
    CUT_ALONE_OF_ONE,
    CUT_ALONE_OF_READERS,
    CUT_LINKS,
    CUT_LINKS_OF_READERS,
    EVENT_TIME_FAULTLESS,
    FAULTLESS,
    UNREACHED,
    UNREACHED_BY_READERS,
    Mix,
)
from tests.simulation.run import REACH_FROM, Result, run
from tests.simulation.runs import LONG
from tests.simulation.story_hashes import tell

#: Seeds of cut links and nothing else, by their mix; for ``make test``, seeds in which much happens in little time.
ALONE = {
    CUT_LINKS: range(60) if LONG else (1, 3, 7, 10),
    CUT_LINKS_OF_READERS: range(60) if LONG else (0, 1, 3, 11, 13),
    CUT_ALONE: range(60) if LONG else (3,),
    CUT_ALONE_OF_READERS: range(60) if LONG else (1, 13),
    CUT_ALONE_OF_ONE: range(60) if LONG else (8,),
}
#: Seeds with all other faults beside cut links.
AMONG = range(REACH_FROM, REACH_FROM + (100 if LONG else 8))


@pytest.fixture(scope="module")
def results() -> list[Result]:
    alone = [run(seed, mix) for mix, seeds in ALONE.items() for seed in seeds]
    return [*alone, *map(run, AMONG)]


def test_every_law_is_kept(results: list[Result]) -> None:
    assert [str(result) for result in results if not result.ok] == []


def test_rows_are_owed_and_read_elsewhere(results: list[Result]) -> None:
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    assert counts["links cut between two workers"] > 60
    assert counts["links cut in both directions"] > 0
    assert counts["looks at streams that a reachable replica has rows of"] > 100
    assert counts["subscriptions that switched their source"] > 3
    assert counts["slices lent to a primary"] > 5
    assert counts["looks at answers that could be relayed"] > 100
    assert counts["looks at rows in a log that an only replica lacks"] > 20


def test_primaries_out_of_reach_leave_the_lead_for_rows_and_for_acks() -> None:
    directed = [(UNREACHED, 1), (UNREACHED, 29), (UNREACHED_BY_READERS, 3)]
    more = [(mix, seed) for mix in (UNREACHED, UNREACHED_BY_READERS) for seed in range(60 if LONG else 0)]
    results = [run(seed, mix) for mix, seed in (*directed, *more)]
    assert [str(result) for result in results if not result.ok] == []
    assert all(result.counts["primaries out of reach that left the lead"] for result in results[: len(directed)])


@pytest.mark.parametrize(("mix", "seed"), [(FAULTLESS, 3), (FAULTLESS, 17), (EVENT_TIME_FAULTLESS, 5)])
def test_without_a_fault_every_message_is_as_if_links_never_failed(mix: Mix, seed: int) -> None:
    assert list(tell(seed, replace(mix, reach=True)).lines()) == list(tell(seed, mix).lines())
