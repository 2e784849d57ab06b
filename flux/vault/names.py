"""The name of a checkpoint directory: a file beside it tells which query uses it, and where a directory of that name has gone
(design: moved-location).

A directory can be renamed while a query writes to it, and another one may get its name. A program that starts there sees an
empty directory, so the facts that it needs are kept beside the directory, in ``.NAME.flux``. A query holds a shared lock on one
byte of this file from its start until its tasks have ended. The offset of the byte is the inode of its directory, so a lock
elsewhere in the file is that of a query in another directory of the same name. The kernel drops the lock of a program that
dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import struct
from pathlib import Path

from flux.errors import UsageError

#: The file that describes the query, in a directory of a query.
ABOUT = "flux.json"
#: ``struct flock``: type, whence, start, length (0: to the end of all offsets), process.
_FLOCK = "hhqqi0q"
#: Offsets are signed, so an inode is cut to this many bits.
_OFFSETS = (1 << 62) - 1
#: The longest note that is read.
_NOTE_BYTES = 1 << 16


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.flux")


def _open(file: Path, create: bool = False) -> int:
    """Open the file beside a name. OSError: there is none, or this user did not make it: the directory above may be open to
    other users, one of whom could have put a link there."""
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_nlink > 1:
        os.close(descriptor)
        raise PermissionError(f"{file} belongs to others, or is no file of its own")
    return descriptor


def _lock(descriptor: int, kind: int, start: int, length: int) -> bool:
    """Lock a range without waiting. False: another program has a lock there."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_held(descriptor: int, start: int, length: int) -> bool:
    """Return whether a query holds a byte of a range."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino & _OFFSETS
    except OSError:
        return None


def check_name(path: Path) -> None:
    """Raise UsageError if a query still writes to another directory that had this name, or if the directory of this name has
    been moved away from a running query. If the file beside it cannot be read, nothing is known and nothing refused."""
    try:
        descriptor = _open(_beside(path))
    except (OSError, ValueError):  # a path without a name, no regular file of this user, or no right to it
        return
    try:
        inode, new = _inode(path), not (path / ABOUT).exists()
        with contextlib.suppress(OSError):  # a file system without locks
            if inode is None or new:
                held = _is_held(descriptor, 0, 0)
            else:
                held = (inode > 0 and _is_held(descriptor, 0, inode)) or _is_held(descriptor, inode + 1, 0)
            if held:
                raise UsageError(
                    f"checkpointLocation={str(path)!r}: the directory of this name was renamed or removed while a query "
                    "wrote to it, and that query has not ended yet. Wait for its end, and see what its error says"
                )
        note = _note(descriptor)
        if new and note is not None:
            raise UsageError(
                f"checkpointLocation={str(path)!r}: the directory of this name {note} while a query wrote to it. A query that "
                "begins here anew writes again what that one has written. Give that directory its name back, or give it as "
                f"checkpointLocation where it is; to begin anew all the same, remove the file {_beside(path)}"
            )
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether a query uses a directory of this name."""
    try:
        descriptor = _open(_beside(path))
    except (OSError, ValueError):
        return False
    try:
        return _is_held(descriptor, 0, 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _note(descriptor: int) -> str | None:
    data = os.pread(descriptor, _NOTE_BYTES, 0)
    try:
        found = json.loads(data)["directory"]
    except (ValueError, LookupError, TypeError):
        return None
    return str(found)


def note_moved(path: Path, what: str) -> bool:
    """Write the fate of a directory beside its name, for the next program that starts there. False: no file can be written
    there."""
    data = json.dumps({"directory": what}).encode()
    try:
        descriptor = _open(_beside(path), create=True)
    except (OSError, ValueError):
        return False
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        os.fsync(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


class NameHold:
    """Mark of a query that uses the directory of a name. If no file can be made beside the directory, there is no mark."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else _beside_or_none(path)
        self._descriptor: int | None = None
        if path is not None and self._file is not None:
            with contextlib.suppress(OSError):
                self._descriptor = self._held(self._file, path.stat().st_ino & _OFFSETS)

    @staticmethod
    def _held(file: Path, inode: int) -> int:
        while True:
            descriptor = _open(file, create=True)
            try:
                held = _lock(descriptor, fcntl.F_RDLCK, inode, 1)
                there = held and file.exists() and os.path.samestat(os.fstat(descriptor), file.stat())
                if there:
                    os.ftruncate(descriptor, 0)  # the directory is there again
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the query before this one has just removed it

    def close(self) -> None:
        """End the mark with the query: remove the file unless another query uses it or it has a note."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            with contextlib.suppress(OSError):
                if (
                    _lock(descriptor, fcntl.F_WRLCK, 0, 0)
                    and os.fstat(descriptor).st_size == 0
                    and self._file is not None
                ):
                    self._file.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _beside_or_none(path: Path) -> Path | None:
    try:
        return _beside(path)
    except ValueError:  # the root has no name
        return None
