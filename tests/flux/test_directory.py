"""A directory as the place of a journal: its owners, and the order in which its files become durable (design:
journal)."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept import KEY, LARGE, all_held, checkpoint, opened, orders, standby, take
from kept_watched import At, watch

from flux.errors import SnapshotError, UsageError
from flux.vault import journal as journal_module
from flux.vault.directory_store import Directory, check_location, write_whole
from flux.vault.journal import Journal
from flux.vault.location import place_of


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return check_location(tmp_path / "kept")


def segments(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("journal-*"))


# ---- its owners


def test_a_location_is_made_with_its_parents_and_is_its_owners_alone(tmp_path: Path) -> None:
    made = check_location(tmp_path / "a" / "b")
    assert made == tmp_path / "a" / "b"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert check_location(str(made)) == made, "it may be there"
    for uri in (f"file://{made}", f"file:{made}"):
        assert check_location(uri) == made, "as Spark and Hadoop write it"


@pytest.mark.parametrize("location", [None, 7, b"kept", "", "  ", ["kept"]])
def test_what_is_no_path_is_refused_with_an_example(
    location: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse an empty name, too: it would be the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="a path is expected, for example '/data/query-checkpoint'"):
        check_location(location)  # type: ignore[arg-type]


def test_a_relative_location_is_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert check_location("kept") == tmp_path / "kept"
    assert check_location("~/kept") == tmp_path / "home" / "kept"


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o740, 0o750, 0o704, 0o755, 0o777, 0o1777])
def test_a_location_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match=f"by others .mode {mode:04o}.*chmod 700 {tmp_path}"):
        check_location(tmp_path)


def test_a_location_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(UsageError, match=f"belongs to another user .id {owner}."):
        check_location(tmp_path)


def test_a_link_is_judged_by_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(UsageError, match="mode 0755"):
        check_location(tmp_path / "link")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_location_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        check_location(tmp_path)


@pytest.mark.parametrize("below", [False, True])
def test_a_file_is_no_location(tmp_path: Path, below: bool) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot be made or read"):
        check_location(tmp_path / "file" / "kept" if below else tmp_path / "file")


@pytest.mark.parametrize("uri", ["http://a/b", "zz://host/a", "S4://bucket/a"])
def test_a_uri_that_nobody_can_open_is_refused(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"Unrecognized filesystem.*A path is expected, or a URI that pyarrow.fs opens"
    ):
        place_of(uri)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("uri", ["dbfs:/mnt/a", "hdfs:/a", "file:a", "file://host/a", "file:", "FILE:///a"])
def test_a_uri_is_not_taken_for_a_relative_path(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"a path is expected, such as '/data/query'.*begins neither"):
        place_of(uri)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("location", ["~nobody-has-this-name/kept", "kept\0"])
def test_a_name_that_leads_nowhere_is_a_usage_error(location: str) -> None:
    with pytest.raises(UsageError, match="checkpointLocation="):
        check_location(location)


def test_all_that_is_written_is_for_its_owner_only(place: Path) -> None:
    old = os.umask(0)
    try:
        journal = opened(Directory(place))
        take(journal, checkpoint(1, 1, 0, size=LARGE))
        journal.flush()
    finally:
        os.umask(old)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.rglob("*")}
    assert found == {
        "generation-00000001": 0o600, "journal-00000001-00000001": 0o600, "state": 0o700, "0-3-1-0-1": 0o600,
    }  # fmt: skip


# ---- files that are whole or not there


class Full:
    """A system call that fails like a disk without room."""

    def __call__(self, *given: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def little_room() -> Iterator[None]:
    """Bound files of this process to 10,000 bytes: the kernel writes a first part and refuses the rest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("size", [20_000, 3_000_000])
@pytest.mark.usefixtures("little_room")
def test_a_file_that_finds_no_room_leaves_nothing_behind(place: Path, there: bool, size: int) -> None:
    path = place / "file"
    if there:
        write_whole(path, b"before")
    with pytest.raises(OSError, match="too large"):
        write_whole(path, bytes(size))
    assert os.listdir(place) == (["file"] if there else [])
    assert not there or path.read_bytes() == b"before"


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_file_that_cannot_be_made_durable_leaves_nothing_behind(
    place: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*((os, call, Full()) if call == "fsync" else (Path, call, Full())))
    with pytest.raises(OSError, match="No space left"):
        write_whole(place / "file", b"data")
    assert os.listdir(place) == []


def test_a_new_file_takes_the_place_of_none(place: Path) -> None:
    write_whole(place / "file", b"first", new=True)
    with pytest.raises(FileExistsError):
        write_whole(place / "file", b"second", new=True)
    assert (os.listdir(place), (place / "file").read_bytes()) == (["file"], b"first")


@pytest.mark.usefixtures("little_room")
def test_a_checkpoint_that_finds_no_room_leaves_the_journal_as_it_was(place: Path) -> None:
    journal = opened(Directory(place))
    standby(journal).on_orders(orders(1, 0, 3, committed=2))
    journal.flush()
    before = all_held(journal)
    with pytest.raises(OSError, match="too large"):
        journal.put(KEY, checkpoint(2, 1, 0, size=LARGE))
    assert os.listdir(place / "state") == []
    journal.see(3)
    journal.flush()
    assert all_held(Journal(Directory(place, writes=False))) == before


def test_a_flush_that_finds_no_room_leaves_a_torn_frame(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(Directory(place))
    standby(journal).on_orders(orders(1, 0, 3, committed=2))
    journal.flush()
    before, write = all_held(journal), os.write

    def fills(file: int, data: memoryview) -> int:
        monkeypatch.setattr(os, "write", Full())
        return write(file, data[: len(data) // 2])

    standby(journal).on_orders(orders(1, 3, 3, committed=3))
    monkeypatch.setattr(os, "write", fills)
    with pytest.raises(OSError, match="No space left"):
        journal.flush()
    assert all_held(Journal(Directory(place, writes=False))) == before


def test_what_is_written_in_small_pieces_is_all_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    journal = opened(Directory(place))
    standby(journal).on_orders(orders(1, 0, 30, committed=2))
    journal.flush()
    assert all_held(Journal(Directory(place, writes=False))) == all_held(journal)


def test_a_name_is_durable_after_its_file_and_before_anything_goes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, said = opened(Directory(place)), []
    journal.see(1)
    watch(monkeypatch, lambda call, name: said.append((call, name)))
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(journal_module, "SEGMENT_TIMES", 0)
    journal.flush()
    made, temporary = "journal-00000001-00000002", ".journal-00000001-00000002.00000001"
    alone = [("exists", "generation-00000002"), ("exists", "generation-00000001")]
    wanted = [("write", "journal-00000001-00000001"), ("fdatasync", "journal-00000001-00000001")]
    wanted += [*alone, ("fsync", temporary), ("rename", temporary), ("fsync", place.name)]
    wanted += [*alone, ("unlink", "journal-00000001-00000001")]
    assert [each for each in said if each[0] in ("write", "fdatasync", "exists", "fsync", "rename", "unlink")] == wanted
    assert segments(place) == [made]


def test_the_name_of_a_new_location_is_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync the folder above, because the whole location may else be gone after a loss of power, with all that was
    shown."""
    synced: list[str] = []
    watch(monkeypatch, lambda call, name: synced.append(name) if call == "fsync" else None)
    opened(Directory(check_location(tmp_path / "a" / "kept")))
    assert {tmp_path.name, "a", "kept"} <= set(synced)


# ---- files of checkpoints


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000])
def test_what_is_put_is_got_back(place: Path, size: int) -> None:
    directory, data = Directory(place), os.urandom(size)
    assert directory.put("a", memoryview(data)) == data
    found = directory.get("a")
    assert found is not None
    assert found == data
    assert found.readonly
    assert bytes(Directory(place, writes=False).get("a") or b"") == data
    assert directory.names() == ["a"]


def test_what_is_not_there_is_none_and_may_be_removed(place: Path) -> None:
    directory = Directory(place)
    assert directory.get("a") is None
    directory.remove(["a", "b"])


def test_bytes_that_are_held_stay_as_they_are_when_the_file_is_replaced_or_removed(place: Path) -> None:
    directory = Directory(place)
    first = directory.put("a", memoryview(b"first" * 2000))
    second = directory.put("a", memoryview(b"other" * 2000))
    directory.remove(["a"])
    assert (bytes(first), bytes(second)) == (b"first" * 2000, b"other" * 2000)
    assert directory.names() == []


def test_a_file_that_is_being_written_has_no_name_yet(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, seen = Directory(place), []
    watch(monkeypatch, lambda call, name: seen.append(directory.names()) if call == "fsync" else None)
    directory.put("a", memoryview(b"data"))
    assert seen == [[], ["a"]], "its own, and that of the directory"


def test_what_a_crash_left_half_written_goes_when_the_next_life_begins(place: Path) -> None:
    opened(Directory(place))
    left = [place / "state" / ".0-3-1-0-1.00000001", place / ".journal-00000001-00000002.00000001"]
    for path in left:
        path.write_bytes(b"half")
    opened(Directory(place))
    assert not any(path.exists() for path in left)


# ---- generations


def test_each_opening_has_a_generation_of_its_own_and_reading_has_none(place: Path) -> None:
    assert [Directory(place).generation for _ in range(3)] == [1, 2, 3]
    assert sorted(path.name for path in place.glob("generation-*")) == [f"generation-0000000{n}" for n in (1, 2, 3)]
    assert Directory(place, writes=False).generation == 0
    assert len(list(place.glob("generation-*"))) == 3


def test_reading_an_empty_location_finds_nothing_and_leaves_nothing(place: Path) -> None:
    reader = Directory(place, writes=False)
    assert (reader.newest(), reader.names(), Journal(reader).highest) == (None, [], -1)
    assert os.listdir(place) == []


def test_those_that_open_it_at_once_get_different_generations(place: Path) -> None:
    start, got = threading.Barrier(8), list[int]()

    def claim() -> None:
        start.wait()
        got.extend(Directory(place).generation for _ in range(10))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 81))


def test_a_generation_that_another_takes_meanwhile_is_left_to_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[Directory] = []
    watch(monkeypatch, At(2, lambda: others.append(Directory(place))))  # when it knows which are taken
    assert (Directory(place).generation, others[0].generation) == (2, 1)


def test_files_of_others_are_no_segments_and_no_generations(place: Path) -> None:
    journal = opened(Directory(place))
    journal.see(5)
    journal.flush()
    for name in ("journal-99999999-00000001.old", ".journal-99999999-00000001.1", "journal-9-1", "generation-0000000x"):
        (place / name).write_bytes(b"other")
    (place / "generation-99").write_bytes(b"")
    again = Directory(place)
    assert (again.generation, Journal(again).highest) == (2, 5)


def test_the_segment_of_the_newest_generation_is_read_however_many_an_earlier_one_has(place: Path) -> None:
    for generation, number in ((1, 9), (2, 1), (2, 2), (1, 10)):
        (place / f"journal-{generation:08}-{number:08}").write_bytes(b"%d.%d" % (generation, number))
    newest = Directory(place, writes=False).newest()
    assert newest is not None
    assert bytes(newest) == b"2.2"


def test_a_segment_without_a_byte_is_damaged(place: Path) -> None:
    journal = opened(Directory(place))
    standby(journal).on_orders(orders(1, 0, 3, committed=2))
    take(journal, checkpoint(2, 1, 0, size=LARGE))
    journal.flush()
    (place / segments(place)[0]).write_bytes(b"")
    with pytest.raises(SnapshotError, match="damaged"):
        opened(Directory(place))


def test_a_journal_that_has_gone_is_not_taken_for_one_that_never_was(place: Path) -> None:
    """Refuse to begin: the query would begin anew without a word, and show again rows that it has shown."""
    standby(opened(Directory(place))).on_orders(orders(1, 0, 3, committed=2))
    for name in segments(place):
        (place / name).unlink()
    for writes in (True, False):
        with pytest.raises(SnapshotError, match="had a journal, and it is not there any more"):
            Journal(Directory(place, writes=writes))


def test_a_writer_that_ends_before_its_journal_begins_leaves_a_location_as_good_as_new(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(Directory(place))
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", Full())
        with pytest.raises(OSError, match="No space left"):
            journal.begin()
    assert opened(Directory(place)).highest == -1
