"""The benchmark of restarts: runs of its programs, and the rows that it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import restart
from flux.errors import QueryTimeout

#: Notes three positions in each life, and lives on.
PROGRAM = """
import json, sys, time
from pathlib import Path

shown = Path(sys.argv[1]) / "shown" / "0"
lines = shown.read_text().splitlines() if shown.exists() else []
print(json.dumps({"start_at": time.time(), "spark_s": 0.5, "full_at": FULL_AT}), flush=True)
begin = len(lines)
with shown.open("a") as file:
    for number in range(begin, begin + 3):
        file.write(f"{time.time()} {number}\\n")
    file.flush()
    time.sleep(60)
"""


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: int) -> restart.Killed:
    (tmp_path / "noted.py").write_text(PROGRAM.replace("FULL_AT", str(full_at)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(restart, "FLOWS_S", 0.0)
    return restart.Killed("noted")


def test_the_first_new_output_counts_from_the_start_of_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = program(tmp_path, monkeypatch, full_at=2)
    killed.live(1)
    assert killed.restarts == [], "nothing was killed before"
    killed.live(1)
    [took] = killed.restarts
    assert 0 <= took < restart.LIMIT_S
    figures = killed.figures()
    assert figures["restart_s"] == figures["restart_s_max"] == round(took, 2)
    assert figures["spark_startup_s"] == 0.5


@pytest.mark.parametrize(("goes_on", "lost", "duplicated"), [(1, 1, 0), (-1, 0, 1)])
def test_what_is_left_out_or_shown_twice_is_counted_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, goes_on: int, lost: int, duplicated: int
) -> None:
    killed = restart.Killed("noted")
    monkeypatch.setattr(killed, "_lines", lambda: [[(1.0, n) for n in (0, 1, 2, *range(3 + goes_on, 6 + goes_on))]])
    killed.restarts.append(1.0)
    killed._sparks.append(1.0)
    figures = killed.figures()
    assert (figures["lost"], figures["duplicated"]) == (lost, duplicated)
    assert restart.why_failed(figures) == f"{lost} batches lost, {duplicated} duplicated, 0 are allowed"
    assert restart.why_failed({"lost": 0, "duplicated": 0}) is None


def test_a_program_whose_state_never_comes_is_an_error_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = program(tmp_path, monkeypatch, full_at=100)
    monkeypatch.setattr(restart, "LIMIT_S", 3.0)
    with pytest.raises(QueryTimeout, match="noted: no output within 3 s"):
        killed.live(1)
