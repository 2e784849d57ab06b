"""Told runs are those of the file: a change of names, places or texts alone leaves the file as it is (design: story-hashes)."""

from __future__ import annotations

import pytest

from tests.simulation.many import FIXED
from tests.simulation.mixes import ANY
from tests.simulation.story_hashes import hash_of, names, tell, written
from tests.simulation.variants import VARIANTS

RENEW = "after an intended change of the protocol: python -m tests.simulation.story_hashes --write, and say why in the commit"
#: One run of this many is made here; the command makes all.
EVERY = 40


def test_the_file_lists_every_run() -> None:
    assert list(written()) == names(), RENEW


@pytest.mark.parametrize("name", names()[::EVERY])
def test_a_sample_of_the_runs_is_told_as_before(name: str) -> None:
    assert hash_of(name) == written()[name], RENEW


def test_a_run_without_a_rule_is_told_differently() -> None:
    known = written()
    pairs = [
        (f"seed {seed}", f"variant {variant.name} {seed}")
        for variant in VARIANTS
        if variant.mix is ANY
        for seed in variant.seeds
        if seed in FIXED
    ]
    assert len(pairs) > 30
    assert [broken for seed, broken in pairs if known[seed] == known[broken]] == []


def test_a_query_of_several_lives_is_told_from_its_first_life_on() -> None:
    variant = next(variant for variant in VARIANTS if variant.mix.lives > 1)
    told = tell(variant.seeds[0], variant.mix)
    assert told.earlier
    assert [line for story in (*told.earlier, told.story) for line in map(str, story.events)] == list(told.lines())[:-1]
