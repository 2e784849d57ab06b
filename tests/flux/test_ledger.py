"""A decision of readers is made once, with any number of writers, and is found again."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from flux.connectors import ledger as ledgers
from flux.connectors.ledger import Ledger, LedgerBroken


def test_entries_come_back_in_order_to_whoever_reads(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path / "l"), Ledger(tmp_path / "l")
    assert other.news() == []
    assert one.add({"a": [1, "ü"]})
    assert one.add(2)
    assert other.news() == [{"a": [1, "ü"]}, 2]
    assert other.news() == []
    assert one.known == other.known == 2


def test_the_second_to_decide_is_told_to_read(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    assert one.add("first")
    assert not other.add("second")
    assert other.news() == ["first"]
    assert other.add("second")
    assert one.news() == ["second"]


def _decide(folder: str, who: int, times: int) -> None:
    ledger, mine = Ledger(folder), 0
    while mine < times:
        if ledger.add([who, mine]):
            mine += 1
        else:
            ledger.news()


def test_processes_that_decide_at_the_same_time_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide in several processes while entries are put together."""
    monkeypatch.setattr(ledgers, "TOGETHER", 8)
    monkeypatch.setattr(ledgers, "_APART", 16)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_decide, args=(str(tmp_path), who, 60)) for who in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    entries = Ledger(tmp_path).news()
    assert len(entries) == 180
    for who in range(3):
        assert [number for whose, number in entries if whose == who] == list(range(60)), "each once, in order"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
    assert len(os.listdir(tmp_path)) < 60


def test_a_process_that_has_slept_for_long_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "TOGETHER", 4)
    monkeypatch.setattr(ledgers, "_APART", 4)
    sleeper, awake = Ledger(tmp_path), Ledger(tmp_path)
    sleeper.add(0)
    awake.news()
    for number in range(1, 20):
        assert awake.add(number)
    assert not (tmp_path / "000000000001.json").exists()
    assert not sleeper.add("late")
    assert Ledger(tmp_path).news() == list(range(20))
    assert sleeper.news() == list(range(1, 20))


def test_a_missing_entry_is_told(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(3):
        ledger.add(number)
    (tmp_path / "000000000001.json").unlink()
    with pytest.raises(LedgerBroken, match="entry 1 is missing"):
        Ledger(tmp_path).news()


def test_an_entry_of_other_bytes_is_told_by_name(tmp_path: Path) -> None:
    Ledger(tmp_path).add(0)
    (tmp_path / "000000000000.json").write_bytes(b"\xff{")
    with pytest.raises(LedgerBroken, match=r"000000000000\.json cannot be read"):
        Ledger(tmp_path).news()


def test_other_files_beside_the_entries_do_not_matter(tmp_path: Path) -> None:
    Ledger(tmp_path).add(0)
    (tmp_path / "readme.txt").write_text("?")
    (tmp_path / ".half").write_text("{")
    assert Ledger(tmp_path).news() == [0]


def test_a_folder_that_cannot_be_written_is_told_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerBroken, match="ledger="):
        Ledger(tmp_path / "file" / "below").add(0)


def test_what_was_forgotten_is_not_brought_back_by_a_reader_that_is_ending(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    ledger.add(0)
    ledger.forget()
    with pytest.raises(LedgerBroken):
        ledger.add(1)
    assert not (tmp_path / "l").exists()
