"""Connection files: private, whole or not there, and recognised when their process is gone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from controller.operate import connection_file
from controller.operate.connection_file import (
    FOLDER_VARIABLE,
    FoundConnection,
    QueryConnection,
    find_all,
    of_this_process,
    write,
)
from flux.errors import UsageError

SECRET = bytes(range(32))


def connection(id: str = "a1", **changes: Any) -> QueryConnection:
    made = of_this_process(
        id=id,
        name="clicks",
        application="flights (local-1)",
        started=1000.0,
        endpoint="tcp://127.0.0.1:5",
        secret=SECRET,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder that does not exist yet, in one that does not either."""
    return tmp_path / "state" / "flux"


def only(place: Path) -> FoundConnection:
    (found,) = find_all(place)
    return found


def test_what_is_written_is_found_again(place: Path) -> None:
    path = write(connection(), place)
    assert only(place) == FoundConnection(path, connection())
    connection_file.remove(path)
    assert find_all(place) == []
    connection_file.remove(path)  # a second time is no harm


def test_files_are_found_the_oldest_query_first(place: Path) -> None:
    for id, started in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        write(connection(id, started=started), place)
    assert [found.connection.id for found in find_all(place) if found.connection] == ["a", "b", "c"]


def test_the_folder_is_the_users_state_folder_or_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "here"))
    assert connection_file.folder() == tmp_path / "here"
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert connection_file.folder() == tmp_path / "state" / "flux"
    assert find_all() == []


def test_only_the_owner_can_read_the_file_and_enter_the_folder(place: Path) -> None:
    before = os.umask(0)
    try:
        path = write(connection(), place)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert [other.name for other in place.iterdir()] == [path.name], "nothing half-written is left"


def test_a_file_that_is_there_already_is_not_written_over(place: Path) -> None:
    path = write(connection(), place)
    with pytest.raises(FileExistsError):
        write(connection(name="another"), place)
    assert only(place) == FoundConnection(path, connection())
    assert [other.name for other in place.iterdir()] == [path.name]


def test_a_file_that_was_left_behind_is_replaced(place: Path) -> None:
    write(connection(process_started=psutil.Process().create_time() - 60), place)
    path = write(connection(), place)
    assert only(place) == FoundConnection(path, connection())
    assert [other.name for other in place.iterdir()] == [path.name]


def test_the_secret_is_not_shown_where_a_connection_is_printed() -> None:
    assert repr(SECRET) not in repr(connection())
    assert SECRET.hex() not in repr(connection())


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(place: Path, mode: int) -> None:
    write(connection(), place)
    place.chmod(mode)
    with pytest.raises(UsageError, match="can be written by others; run: chmod 700"):
        find_all(place)
    with pytest.raises(UsageError, match="can be written by others"):
        write(connection("b"), place)


def test_a_folder_of_somebody_else_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(connection(), place)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(UsageError, match=f"belongs to user {me}"):
        find_all(place)
    with pytest.raises(UsageError, match=f"belongs to user {me}"):
        write(connection("b"), place)


def test_what_only_leads_to_a_folder_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.parent.mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is not a folder"):
        write(connection(), place)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_can_read_is_not_used(place: Path, mode: int) -> None:
    write(connection(), place).chmod(mode)
    assert only(place).connection is None
    assert "only its owner" in only(place).problem
    assert not only(place).gone, "and is left for its owner to look at"


def test_a_link_in_the_folder_is_not_followed(place: Path, tmp_path: Path) -> None:
    path = write(connection(), place)
    path.rename(tmp_path / "real.json")
    path.symlink_to(tmp_path / "real.json")
    assert only(place).connection is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 1}', b"\xff" * 100, bytes(connection_file.FILE_BYTES_MAX + 1)]
)
def test_what_is_not_a_connection_file_is_shown_as_such_and_hides_no_other(place: Path, content: bytes) -> None:
    write(connection(), place)
    bad = place / "bad.json"
    bad.touch(mode=0o600)
    bad.write_bytes(content)
    found = find_all(place)
    assert [f.path.name for f in found if f.connection is None and f.problem and not f.gone] == ["bad.json"]
    assert [f.path.name for f in found if f.connection is not None] == ["a1.json"]


def test_a_file_of_another_release_is_left_alone(place: Path) -> None:
    write(connection(version=99), place)
    assert "another release" in only(place).problem
    assert not only(place).gone


def test_a_query_whose_process_is_gone_is_recognised(place: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()
    write(connection(pid=child.pid, process_started=started), place)
    assert only(place).problem == ""
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert only(place).problem == f"its process {child.pid} has ended", "it is still listed, and yet it has"
    child.communicate()
    assert only(place).problem == f"its process {child.pid} is gone"
    assert only(place).gone


def test_another_process_with_the_same_id_is_not_taken_for_the_query(place: Path) -> None:
    write(connection(process_started=psutil.Process().create_time() - 60), place)
    assert only(place).problem == f"process {os.getpid()} is another one now"
    assert only(place).gone


def test_a_query_on_another_host_is_shown_and_its_file_left_alone(place: Path) -> None:
    """Hosts may share the folder; a process id means nothing on another host."""
    write(connection(host="elsewhere", pid=1 << 22), place)
    assert only(place).problem == "runs on elsewhere: use the command line there"
    assert not only(place).gone
