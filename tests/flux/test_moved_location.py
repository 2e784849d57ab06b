"""A checkpoint directory that is renamed, removed or replaced while a query writes to it (design: moved-location)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kept import LARGE, all_held, checkpoint, opened, orders, standby, take
from objects import AtOnce, Objects

from flux.errors import QueryFailed, SnapshotError, UsageError
from flux.shell import vault_process as shell
from flux.vault.directory_store import Directory, LocationGone, check_location
from flux.vault.journal import Journal
from flux.vault.location import Folder
from flux.vault.names import ABOUT, NameHold, note_moved
from flux.vault.object_store import Bucket, remains_in

SAID = b'{"query": "q"}'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = check_location(tmp_path / "kept")
    (made / ABOUT).write_bytes(SAID)
    return made


def writing(place: Path) -> tuple[Directory, Journal]:
    """Write a journal with orders, a checkpoint in a file of its own, and changes to this checkpoint."""
    store = Directory(place)
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 6, committed=5))
    take(journal, checkpoint(2, 1, 0, size=LARGE))
    take(journal, checkpoint(3, 1, 1, size=LARGE, base=0))
    journal.flush()
    return store, journal


def renamed(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))


def replaced(place: Path) -> None:
    renamed(place)
    shutil.copytree(place.with_name("elsewhere"), place)


def parent_renamed(place: Path) -> None:
    place.parent.rename(place.parent.with_name(place.parent.name + "-elsewhere"))


def removed(place: Path) -> None:
    shutil.rmtree(place)


def emptied(place: Path) -> None:
    for each in place.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def without_journal(place: Path) -> None:
    for each in place.glob("journal-*"):
        each.unlink()


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("strike", [renamed, replaced, parent_renamed, removed, emptied, without_journal])
def test_a_writer_whose_directory_has_gone_tells_nobody_that_anything_is_kept(
    place: Path, strike: Callable[[Path], None], flush: bool
) -> None:
    store, journal = writing(place)
    inode = place.stat().st_ino
    journal.check()
    strike(place)
    if flush:
        standby(journal).on_orders(orders(1, 6, 1, committed=6))
    with pytest.raises(LocationGone) as caught:
        (journal.flush if flush else journal.check)()
    if strike in (renamed, replaced, parent_renamed):
        assert caught.value.now is not None
        assert Path(caught.value.now).stat().st_ino == inode
    else:
        assert caught.value.now is None
    store.close()


def test_a_checkpoint_that_finds_no_directory_says_so(place: Path) -> None:
    store, journal = writing(place)
    renamed(place)
    with pytest.raises(LocationGone, match=r"was moved to .*elsewhere"):
        take(journal, checkpoint(5, 1, 2, size=LARGE))
    store.close()


def test_a_program_that_goes_on_in_the_same_directory_is_named_as_before(place: Path) -> None:
    store, journal = writing(place)
    opened(other := Directory(place))
    with pytest.raises(QueryFailed, match="another query has been started") as caught:
        journal.check()
    assert not isinstance(caught.value, LocationGone)
    store.close()
    other.close()


def ended(place: Path, journal: Journal) -> str:
    with pytest.raises(LocationGone) as caught:
        journal.check()
    return shell.after_loss(caught.value, journal, Folder(place), SAID)


@pytest.mark.parametrize("strike", [removed, emptied, without_journal])
def test_what_was_shown_is_written_again_where_the_directory_was_removed(
    place: Path, strike: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "PUT_BACK_S", 0.01)
    store, journal = writing(place)
    before = all_held(journal)
    strike(place)
    assert "was removed while the query was running. All that the query has shown was written there again" in ended(
        place, journal
    )
    store.close()
    assert check_location(place) == place
    assert (place / ABOUT).read_bytes() == SAID
    again = Journal(Directory(place))
    assert all_held(again) == before
    assert again.highest == journal.highest


def test_a_location_that_could_not_be_written_again_to_its_end_is_not_taken_for_a_new_one(place: Path) -> None:
    _, journal = writing(place)
    removed(place)
    store = Folder(place).put_back(SAID)
    store.close()  # its process is killed here
    assert check_location(place) == place
    with pytest.raises(SnapshotError, match="had a journal, and it is not there any more"):
        Journal(Directory(place))
    again = Folder(place).put_back(SAID)
    journal.move_to(again)
    assert all_held(Journal(Directory(place, writes=False))) == all_held(journal)


@pytest.mark.parametrize("other", [{"unrelated": b"x"}, {ABOUT: b'{"query": "another"}'}])
def test_nothing_is_written_over_what_others_have_put_there(place: Path, other: dict[str, bytes]) -> None:
    _, journal = writing(place)
    removed(place)
    place.mkdir(mode=0o700)
    for name, data in other.items():
        (place / name).write_bytes(data)
    assert "could not be written again" in ended(place, journal)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == other
    if ABOUT not in other:
        with pytest.raises(UsageError, match="was removed while a query wrote to it"):
            check_location(place)


def test_a_directory_that_was_renamed_is_found_by_whoever_starts_at_its_old_name(place: Path) -> None:
    store, journal = writing(place)
    renamed(place)
    said = ended(place, journal)
    elsewhere = place.with_name("elsewhere")
    assert f"was moved to {elsewhere} while the query was running" in said
    with pytest.raises(UsageError, match=f"was moved to {elsewhere} while a query wrote to it") as caught:
        check_location(place)
    assert not place.exists()  # else the directory would be moved into it
    store.close()
    assert check_location(elsewhere) == elsewhere
    elsewhere.rename(place)
    check_location(place)
    NameHold(place).close()  # a query goes on there
    removed(place)
    check_location(place)  # and begins anew where that has ended
    assert str(place.with_name(".kept.flux")) in str(caught.value)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("strike", [renamed, replaced, removed, emptied])
def test_a_second_program_at_the_name_is_refused_while_the_first_may_still_write(
    place: Path, strike: Callable[[Path], None], there: bool
) -> None:
    hold = NameHold(place)
    check_location(place)  # a query that takes over the same directory may
    strike(place)
    if there and not place.exists():
        place.mkdir(mode=0o700)
    with pytest.raises(UsageError, match="that query has not ended yet"):
        check_location(place)
    hold.close()
    check_location(place)
    assert not place.with_name(".kept.flux").exists()


def test_two_programs_hold_one_directory_and_the_file_goes_with_the_last(place: Path) -> None:
    first, second = NameHold(place), NameHold(place)
    first.close()
    assert place.with_name(".kept.flux").exists()
    renamed(place)
    with pytest.raises(UsageError, match="has not ended yet"):
        check_location(place)
    second.close()
    second.close()
    assert not place.with_name(".kept.flux").exists()


def test_a_program_that_is_killed_holds_nothing(place: Path) -> None:
    code = f"from pathlib import Path; from flux.vault.names import NameHold; held = NameHold(Path({str(place)!r}))"
    run = [sys.executable, "-c", f"{code}; print(1, flush=True); input()"]
    other = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"1\n"
    renamed(place)
    with pytest.raises(UsageError, match="has not ended yet"):
        check_location(place)
    other.kill()
    other.communicate()
    check_location(place)


def test_where_no_file_can_be_made_beside_it_a_location_works_all_the_same(place: Path, monkeypatch: Any) -> None:
    real = os.open

    def refusing(path: Any, *given: Any, **more: Any) -> int:
        if str(path).endswith(".kept.flux"):
            raise PermissionError(path)
        return real(path, *given, **more)

    monkeypatch.setattr(os, "open", refusing)
    NameHold(place).close()
    assert check_location(place) == place
    NameHold(Path("/")).close()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_that_somebody_has_put_beside_a_location_is_not_followed(
    place: Path, link: Callable[[Path, Path], None]
) -> None:
    precious = place.with_name("precious")
    precious.write_text('{"directory": "was moved"}')
    link(precious, place.with_name(".kept.flux"))
    hold = NameHold(place)
    assert not note_moved(place, "was moved away")
    assert check_location(place) == place
    hold.close()
    assert precious.read_text() == '{"directory": "was moved"}'


def test_objects_that_were_removed_are_noticed_and_written_again() -> None:
    store = Objects()
    bucket = Bucket(store, "s3://bucket/kept", pool=AtOnce())
    journal = opened(bucket)
    standby(journal).on_orders(orders(1, 0, 6, committed=5))
    take(journal, checkpoint(2, 1, 0, size=LARGE))
    journal.flush()
    before = all_held(journal)
    store.held.clear()
    standby(journal).on_orders(orders(1, 6, 1, committed=5))
    with pytest.raises(LocationGone, match="s3://bucket/kept was removed"):
        journal.flush()
    with pytest.raises(LocationGone):
        journal.check()
    assert len(store.held) == 1, "the flush that found it gone"
    remains_in(store, "s3://bucket/kept")
    journal.move_to(Bucket(Objects(store.held), "s3://bucket/kept", pool=AtOnce()))
    with pytest.raises(QueryFailed, match="other objects are at s3://bucket/kept by now"):
        remains_in(store, "s3://bucket/kept")
    found = all_held(Journal(Bucket(Objects(store.held), "s3://bucket/kept", pool=AtOnce())))
    assert found == all_held(journal) != before
