"""``flux checkpoints DIR``: whole checkpoints and changes in a real directory, listed and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept import KEY, LARGE, checkpoint, orders, standby, take

from controller.operate.cli.show import _survey
from flux.errors import SnapshotError
from flux.vault.directory_store import Directory
from flux.vault.journal import Journal


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Write a partition with a whole checkpoint of two steps, changes up to step three, and further changes that
    wait."""
    (tmp_path / "flux.json").write_text(json.dumps({"query": "q", "workers": 2, "plan": {"stages": {"visits": 1}}}))
    directory = Directory(tmp_path)
    journal = Journal(directory)
    journal.begin()
    standby(journal).on_orders(orders(1, 0, 5, committed=3))
    take(journal, checkpoint(2, 1, 1, size=LARGE))
    take(journal, checkpoint(3, 1, 2, size=100, base=1))
    take(journal, checkpoint(5, 1, 3, size=LARGE + 1, base=2))
    journal.flush()
    directory.close()
    return tmp_path


def test_changes_are_part_of_the_checkpoint(place: Path) -> None:
    found = _survey(place)
    (partition,) = found["partitions"]
    assert (partition["stage"], partition["partition"]) == ("visits", KEY.partition)
    assert (partition["steps"], partition["steps_after"], partition["changes"]) == (3, 2, 1)
    assert 100 < partition["changes_bytes"] < 1000
    assert partition["bytes"] > LARGE + partition["changes_bytes"]
    assert found["left_out"] == []


def test_changes_that_wait_and_are_damaged_leave_the_checkpoint_before_them(place: Path) -> None:
    (file,) = (place / "state").glob("0-3-1-3-*")
    file.write_bytes(file.read_bytes()[:-1])
    found = _survey(place)
    assert found["partitions"][0]["steps"] == 3
    assert file.name in found["left_out"][0]


def test_a_damaged_checkpoint_that_rows_were_acked_by_is_an_error_that_names_it(place: Path) -> None:
    (file,) = (place / "state").glob("0-3-1-1-*")
    file.write_bytes(b"")
    with pytest.raises(SnapshotError, match=file.name):
        _survey(place)
