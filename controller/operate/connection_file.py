"""The connection file, by which the command line finds a running query: one per query, readable by its owner only (design:
connection-file).

It is in the folder ``FLUX_RUNTIME_DIR`` or in the user's state folder (on Linux ~/.local/state/flux). A run-time folder of the
login session would not do: it disappears when the user logs out, and the query does not. A reader of the file can operate the
query, so a folder or file that other users could have written is refused.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs
import psutil

from flux.errors import UsageError

#: Version of the file's format. A file of another version is listed, but not used.
VERSION = 1
#: Suffix of the ingress file.
INGRESS = ".ingress"
FOLDER_VARIABLE = "FLUX_RUNTIME_DIR"
FILE_BYTES_MAX = 1 << 16
#: Tolerance for the start time of a process, which is computed from the clock, and the clock may be set meanwhile. No process
#: id is used again within this time.
START_TOLERANCE_S = 3.0

_ID = re.compile(r"[0-9A-Za-z-]{1,64}")


class QueryConnection(msgspec.Struct, frozen=True, kw_only=True):
    """The way to one query, as its file has it.

    ``process_started`` is the start time by the operating system, to recognise another process with the same id; ``secret`` is
    for people's requests only, and not the secret of the workers; ``public_key`` is empty without encryption; ``metrics`` is
    the address of the Prometheus metrics, if they are served."""

    version: int = VERSION
    id: str
    name: str | None
    application: str
    host: str
    pid: int
    process_started: float
    started: float
    endpoint: str
    secret: bytes
    public_key: str = ""
    metrics: str = ""

    def __repr__(self) -> str:
        return f"<connection to query {self.id} at {self.endpoint}>"


def of_this_process(
    *, id: str, name: str | None, application: str, started: float, endpoint: str, secret: bytes, public_key: str = "",
    metrics: str = "",
) -> QueryConnection:  # fmt: skip
    return QueryConnection(
        id=id, name=name, application=application, host=socket.gethostname(), pid=os.getpid(),
        process_started=psutil.Process().create_time(), started=started, endpoint=endpoint, secret=secret,
        public_key=public_key, metrics=metrics,
    )  # fmt: skip


# ---- the folder


def folder() -> Path:
    """Return the folder for connection files of this user. It need not exist."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_state_path("flux", appauthor=False)


def check_folder(path: Path) -> None:
    """Check a folder. UsageError: users other than its owner could have put something there."""
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise UsageError(f"{path} is not a folder; set {FOLDER_VARIABLE} to one of your own")
    if about.st_uid != os.geteuid():
        raise UsageError(
            f"{path} belongs to user {about.st_uid}, not to {os.geteuid()}; set {FOLDER_VARIABLE} to a folder of your own"
        )
    if about.st_mode & 0o022:
        raise UsageError(f"{path} can be written by others; run: chmod 700 {path}")


# ---- writing


def write(connection: QueryConnection, where: Path | None = None) -> Path:
    """Create the file, and the folder if necessary. The file appears whole or not at all. UsageError or OSError."""
    assert _ID.fullmatch(connection.id), connection.id
    where = folder() if where is None else where
    where.parent.mkdir(parents=True, exist_ok=True)
    where.mkdir(mode=0o700, exist_ok=True)
    check_folder(where)
    path = where / f"{connection.id}.json"
    unfinished = where / f".{connection.id}.{os.getpid()}.new"
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(connection), indent=2))
        _appear(unfinished, path)
    finally:
        unfinished.unlink()
    return path


def _appear(unfinished: Path, path: Path) -> None:
    """Let a finished file appear under its name. Unlike a rename, this fails if the file exists, unless a process that is gone
    has left it behind."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        if not read(path).gone:
            raise
        path.unlink(missing_ok=True)
        os.link(unfinished, path)


def remove(path: Path) -> None:
    """Remove a file, and the ingress file beside it, which says how to write into the same query."""
    path.unlink(missing_ok=True)
    path.with_suffix(INGRESS).unlink(missing_ok=True)


# ---- reading


@dataclass(frozen=True)
class FoundConnection:
    """A connection file in the folder. ``problem`` is the reason why its query cannot be reached, empty if none is known here;
    ``gone``: its query is certainly over, so the file can be removed."""

    path: Path
    connection: QueryConnection | None
    problem: str = ""
    gone: bool = False


def find_all(where: Path | None = None) -> list[FoundConnection]:
    """Return all files of the folder, the oldest query first. UsageError: the folder cannot be trusted."""
    where = folder() if where is None else where
    if not where.exists():
        return []
    check_folder(where)
    found = [read(path) for path in sorted(where.glob("*.json"))]
    return sorted(found, key=lambda f: f.connection.started if f.connection else 0.0)


def read(path: Path) -> FoundConnection:
    try:
        connection = _parse(path)
    except FileNotFoundError:
        return FoundConnection(path, None, "it has just been removed", gone=True)
    except (OSError, UsageError, msgspec.MsgspecError) as error:
        return FoundConnection(path, None, str(error))
    if connection.version != VERSION:
        return FoundConnection(
            path, None, f"written by another release of Flux (format {connection.version}, not {VERSION})"
        )
    if connection.host != socket.gethostname():
        return FoundConnection(path, connection, f"runs on {connection.host}: use the command line there")
    problem = _process_problem(connection)
    return FoundConnection(path, connection, problem, gone=bool(problem))


def _parse(path: Path) -> QueryConnection:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise UsageError("it is not a file of this user's")
        if about.st_mode & 0o077:
            raise UsageError(f"only its owner may have access to it, others do; run: chmod 600 {path}")
        if about.st_size > FILE_BYTES_MAX:
            raise UsageError(f"it is not a connection file: {about.st_size} bytes")
        return msgspec.json.decode(file.read(FILE_BYTES_MAX + 1), type=QueryConnection)


def _process_problem(connection: QueryConnection) -> str:
    try:
        process = psutil.Process(connection.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"its process {connection.pid} has ended"
        started = process.create_time()
    except psutil.NoSuchProcess:
        return f"its process {connection.pid} is gone"
    except psutil.AccessDenied:
        return ""  # there is a process; a request will show whether it is the query
    if abs(started - connection.process_started) > START_TOLERANCE_S:
        return f"process {connection.pid} is another one now"
    return ""
