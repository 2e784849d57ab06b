"""Which seeds are run: the same always, and others for every commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation import many


def test_seeds_follow_from_the_commit_and_stay_apart_from_the_fixed_ones() -> None:
    one, other = many.rotated("6c479c2d"), many.rotated("4f4e6fa0")
    assert one == many.rotated("6c479c2d")
    assert not set(one) & set(other)
    assert not set(many.rotated("000000")) & set(many.FIXED)
    assert len(many.SEEDS) == len(set(many.SEEDS)) == 2000


def test_without_git_they_follow_from_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in many.PACKAGES:
        (tmp_path / package).mkdir(parents=True)
    monkeypatch.setattr(many, "ROOT", tmp_path)
    assert many.commit() == many.FALLBACK
    (tmp_path / "flux" / "x.py").write_text("x = 1\n")
    first = many.commit()
    (tmp_path / "flux" / "x.py").write_text("x = 2\n")
    assert len({many.FALLBACK, first, many.commit()}) == 3
