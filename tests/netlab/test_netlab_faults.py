"""``python -m tests.netlab.faults``: its schedule, and its comparison, which must see each kind of error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.netlab import feeder
from tests.netlab.fault_schedule import DRAWN, LOSSES, Kind, Lasting, link_of, schedule
from tests.netlab.faults import Run, total
from tests.netlab.feeder import STABLE, TENTATIVE, Group, Judgement, Noted, Values, answer, complete, following, judged
from tests.netlab.namespaces import why_not

WANTED = {Group(1, 0): Values(3, 30), Group(2, 0): Values(2, 5)}
END = 1_000_000
FIRST, SECOND = Noted(STABLE, 0, 0, ((1, 0, 3, 30),)), Noted(STABLE, 0, 1, ((2, 0, 2, 5),))


def test_a_seed_gives_the_same_faults_of_all_kinds_and_within_their_bounds() -> None:
    faults = schedule(7, 3, 300)
    assert faults == schedule(7, 3, 300)
    assert faults != schedule(7, 4, 300)
    assert {fault.kind for fault in faults} == set(Kind)
    assert all(DRAWN[fault.kind][0] <= fault.seconds <= DRAWN[fault.kind][1] for fault in faults)
    assert {fault.kind for fault in schedule(7, 3, 300, LOSSES)} == LOSSES


def test_links_between_all_hosts_are_drawn_in_both_directions() -> None:
    assert {link_of(chance, ["w1", "w2", "w3"]) for chance in range(6)} == {
        ("w1", "w2"), ("w2", "w1"), ("w1", "w3"), ("w3", "w1"), ("w2", "w3"), ("w3", "w2"),
    }  # fmt: skip


def test_a_thing_with_two_faults_goes_on_when_the_last_is_over() -> None:
    lasting, said = Lasting(), list[str]()
    for until in (5.0, 3.0):
        lasting.begin(("w1", "w2"), until, lambda: said.append("cut"), lambda: said.append("healed"))
    lasting.end(3.0)
    assert (said, lasting.of(("w1", "w2")), bool(lasting)) == (["cut"], 1, True)
    lasting.end(5.0)
    assert (said, bool(lasting)) == (["cut", "healed"], False)


def test_all_faults_of_a_thing_end_at_once() -> None:
    lasting, said = Lasting(), list[str]()
    for thing, until in ((1, 5.0), (2, 4.0), (1, 3.0)):
        lasting.begin(thing, until, partial(said.append, f"stops {thing}"), partial(said.append, f"goes on {thing}"))
    lasting.over(1)
    lasting.over(3)
    assert (said, lasting.of(1), lasting.of(2)) == (["stops 1", "stops 2", "goes on 1"], 0, 1)
    lasting.end(4.0)
    assert (said[3:], bool(lasting)) == (["goes on 2"], False)


def test_the_same_results_are_exact_also_when_a_batch_has_come_again() -> None:
    ahead = Noted(STABLE, 0, 2, ((1, END, 1, 1),))  # behind the last whole window
    found = judged([FIRST, SECOND, FIRST, Noted(TENTATIVE, 0, -1, ((1, 0, 1, 1),)), ahead], WANTED, END)
    assert found == Judgement(rows=5, groups=2, tentative=1)
    assert found.exact
    assert complete([FIRST, SECOND], WANTED)
    assert not complete([FIRST, Noted(TENTATIVE, 0, -1, SECOND.rows)], WANTED)


@pytest.mark.parametrize(
    ("notes", "found"),
    [
        ([FIRST], Judgement(5, 2, lost=2)),
        ([FIRST, SECOND, Noted(STABLE, 0, 2, FIRST.rows)], Judgement(5, 2, doubled=3, wrong=1)),
        ([FIRST, SECOND, Noted(STABLE, 1, 0, FIRST.rows)], Judgement(5, 2, doubled=3, wrong=1)),
        ([FIRST, Noted(STABLE, 0, 1, ((2, 0, 2, 6),))], Judgement(5, 2, wrong=1)),
        ([FIRST, SECOND, Noted(STABLE, 0, 1, ((2, 0, 2, 6),))], Judgement(5, 2, wrong=1)),
        ([FIRST, SECOND, Noted(STABLE, 0, 2, ((3, 0, 1, 1),))], Judgement(5, 2, doubled=1, wrong=1)),
    ],
    ids=[
        "lost",
        "twice",
        "twice by two partitions",
        "another sum",
        "another content of a position",
        "a group of nothing",
    ],
)
def test_each_error_is_seen(notes: list[Noted], found: Judgement) -> None:
    assert judged(notes, WANTED, END) == found
    assert not found.exact


def test_a_total_is_exact_only_if_all_runs_have_come_to_their_end_with_rows() -> None:
    good = Run(0, Counter({Kind.KILL: 2}), Judgement(5, 2, tentative=1))
    assert total(7, [good, good]) == {
        "seed": 7, "runs": 2, "faults": 4, "by_kind": {"executor killed": 4}, "rows": 10, "groups": 4, "lost": 0, "doubled": 0,
        "wrong": 0, "tentative": 2, "not_finished": {}, "exact": True,
    }  # fmt: skip
    assert not total(7, [good, Run(1, judgement=Judgement(5, 2, lost=1))])["exact"]
    assert not total(7, [Run(1, judgement=Judgement(5, 2), failed="the query has ended")])["exact"]
    assert not total(7, [Run(1)])["exact"]


def test_rows_of_a_file_are_read_whole_and_from_any_position(tmp_path: Path) -> None:
    lines = [f'{{"key": {key}, "value": 1, "at": "2026-11-28T12:00:00.{key}00000+00:00"}}\n' for key in range(3)]
    path = feeder.made(tmp_path, 0)
    path.write_text("".join(lines[:2]) + lines[2][:20])
    reader = following(path, None)
    first = next(reader)
    assert first is not None
    assert first.batch.column("key").to_pylist() == [0, 1]
    assert next(reader) is None
    path.write_text("".join(lines))
    (tmp_path / "end").touch()
    assert [item.batch.column("key").to_pylist() for item in reader if item is not None] == [[2]]
    again = [item for item in following(path, first.position) if item is not None]
    assert [item.batch.column("key").to_pylist() for item in again] == [[2]]


def test_the_answer_counts_rows_of_whole_windows(tmp_path: Path) -> None:
    for partition, fraction in enumerate([0, 100_000, 249_999, 250_000, 500_000]):
        row = {"key": 1, "value": 10 + partition, "at": f"1970-01-01T00:00:00.{fraction:06}+00:00"}
        feeder.made(tmp_path, partition % 2).open("a").write(json.dumps(row) + "\n")
    assert answer(tmp_path, 500_000) == {Group(1, 0): Values(3, 33), Group(1, 250_000): Values(1, 13)}


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made here")
@pytest.mark.long
@pytest.mark.starts_spark
def test_results_are_exact_after_ten_real_faults() -> None:
    command = [sys.executable, "-m", "tests.netlab.faults", "--times", "10", "--per-run", "10", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["faults"], found["exact"]) == (10, True)
