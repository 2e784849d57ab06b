"""The choice of seeds: some run always, and others change with every change of the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation import many


def test_seeds_follow_from_a_hash_and_stay_apart_from_the_fixed_ones() -> None:
    one, other = many.rotated("6c479c2d"), many.rotated("4f4e6fa0")
    assert one == many.rotated("6c479c2d")
    assert not set(one) & set(other)
    assert not set(many.rotated("000000")) & set(many.FIXED)
    fixed = many.FIXED if many.LONG else many.EVENTFUL
    assert set(fixed) <= set(many.FIXED)
    assert len(many.SEEDS) == len(set(many.SEEDS)) == len(fixed) + many.ROTATED_COUNT


def test_they_follow_from_the_source_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in many.PACKAGES:
        (tmp_path / package).mkdir(parents=True)
    monkeypatch.setattr(many, "ROOT", tmp_path)
    (tmp_path / "flux" / "x.py").write_text("x = 1\n")
    first = many.source()
    (tmp_path / "README.md").write_text("text\n")
    assert many.source() == first
    (tmp_path / "flux" / "x.py").write_text("x = 2\n")
    assert many.source() != first
