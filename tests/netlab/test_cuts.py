"""``python -m tests.netlab.cuts``: its count, which must see each kind of error, and a run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netlab.cuts import RATE, SOURCES, Arrival, arrivals, counted
from tests.netlab.namespaces import why_not

ALL = [Arrival(source, number, 0.1) for source in range(SOURCES) for number in range(3)]


@pytest.mark.parametrize(
    ("found", "errors"),
    [
        (ALL, (0, 0)),
        (ALL[1:], (1, 0)),
        ([*ALL, ALL[0]], (0, 1)),
        ([*ALL, Arrival(0, 3, 0.1)], (0, 1)),
        ([*ALL[2:], ALL[2], ALL[2]], (2, 2)),
    ],
    ids=["all", "lost", "doubled", "beyond the end", "both"],
)
def test_lost_and_doubled_rows_are_counted(found: list[Arrival], errors: tuple[int, int]) -> None:
    assert counted(found, 3) == errors


def test_a_batch_that_comes_again_at_its_position_counts_once_and_a_torn_line_not_at_all(tmp_path: Path) -> None:
    line = json.dumps([0, 7, 2.0, [1, 1], [RATE, 2 * RATE]])
    (tmp_path / "out-a.jsonl").write_text(f"{line}\n{line[:20]}")
    (tmp_path / "out-b.jsonl").write_text(f"{line}\n")
    assert arrivals(tmp_path) == [Arrival(1, RATE, 1.0), Arrival(1, 2 * RATE, 0.0)]


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made here")
@pytest.mark.long
@pytest.mark.starts_spark
def test_no_row_waits_for_a_link_that_is_cut_in_one_direction_and_each_comes_once() -> None:
    """Rows of a reader come over a third worker to a primary whose secondary is on the worker of the reader (design:
    relayed-answers). A row that waits for its link waits for ten seconds; half a second is the expected time."""
    seconds = 12.0
    command = [sys.executable, "-m", "tests.netlab.cuts", "--seconds", f"{seconds:g}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["doubled"], len(found["cuts"])) == (0, 0, 6)
    assert max(cut["longest_ms"] for cut in found["cuts"]) < 2e3, done.stdout
