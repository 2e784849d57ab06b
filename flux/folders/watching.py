"""Which files of a folder there are, in the order in which they are read (design: files-that-come).

The files of a source are numbered as they are found. Those that are found by one look come in the order of modification time
and name, and are one entry of the ledger. A file found later comes later, whatever its time says.

A file is found once, when it is complete: a parquet file when it has its footer, a file of text when it has stayed as it is
for a while. From then on it must not change.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import NamedTuple

from pyarrow import fs

from flux.dataflow.ledger import Ledger, LedgerBroken
from flux.folders.errors import FileChanged, FileError, FileGone
from flux.folders.formats import Format

log = logging.getLogger("flux.files")

#: Endings of files that somebody still writes.
TEMPORARY = (".tmp", "._COPYING_")
#: What Spark's streaming sink says of its files, in the folder that it writes to.
_SPARK_LOG = "_spark_metadata"
#: Looks take at most this share of the time.
_SHARE = 0.1
#: After so long somebody should look after a file that never becomes complete.
_TELL_S = 60.0


class Found(NamedTuple):
    """A file as it was when it was found. ``name``: below the folder; ``inode``: 0 where there is none."""

    name: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Folder:
    """What is read. Is shipped to the workers. ``settle_s``: how long a file must stay as it is to be complete."""

    path: str  # absolute, or a URI
    format: Format
    glob: str | None = None
    recursive: bool = False
    poll_s: float = 0.2
    settle_s: float = 0.0
    ignore_changes: bool = False


class Watch:
    """One for each process and source; all its readers ask it. Safe for threads, one of which looks at the folder at a time."""

    def __init__(self, folder: Folder, ledger: str | os.PathLike[str]) -> None:
        self.folder = folder
        self.fs, root = fs.FileSystem.from_uri(folder.path)
        self.root = root.rstrip("/")
        self._local = isinstance(self.fs, fs.LocalFileSystem)
        self._ledger = Ledger(ledger)
        self._lock = threading.Lock()
        self._files: list[Found] = []
        self._by_name: dict[str, Found] = {}
        self._by_inode: dict[int, Found] = {}
        self._renamed: dict[str, Found] = {}  # by the name that it has now: read already, or to be read
        self._pending: dict[str, tuple[int, int, float]] = {}  # not complete: size, time, and since when they are that
        self._told: dict[str, float] = {}
        self._spark_names: dict[str, set[str]] = {}  # by file of Spark's log
        self._look_at = 0.0

    @property
    def count(self) -> int:
        """Files that are known."""
        return len(self._files)

    def file(self, number: int) -> Found | None:
        """None: there is none yet."""
        with self._lock:
            if time.monotonic() >= self._look_at:
                self._look()
            return self._files[number] if number < len(self._files) else None

    def known(self, number: int) -> Found:
        """One that an earlier life has read."""
        with self._lock:
            if number >= len(self._files):
                self._learn()
            if number >= len(self._files):
                raise LedgerBroken(
                    f"the ledger {self._ledger.folder} has {len(self._files)} files, but number {number} was already read: "
                    "it was removed, or cut off. Put it back, or start with another checkpointLocation"
                )
            return self._files[number]

    def where(self, found: Found) -> str:
        """The path at which the file is now; FileGone, or FileChanged if it is another one."""
        path = self._path(found.name)
        info = self.fs.get_file_info(path)
        if info.type is fs.FileType.File:
            self._check(found, info)
            return path
        with self._lock:
            self._look()
            for name, known in self._renamed.items():
                if known == found:
                    return self._path(name)
        raise FileGone(
            f"{path} was found, and is gone before all its rows were read. Put it back; remove files only when every row of "
            "them has left the query"
        )

    def check_again(self, found: Found, path: str) -> None:
        """After it was read to the end: that nobody wrote to it meanwhile."""
        info = self.fs.get_file_info(path)
        if info.type is fs.FileType.File:
            self._check(found, info)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _check(self, found: Found, info: fs.FileInfo) -> None:
        """What copies a file sets its time at the very end, back to that of the original: an earlier time is no change."""
        size, mtime_ns = info.size, info.mtime_ns or 0
        if self.folder.ignore_changes or (found.size == size and mtime_ns <= found.mtime_ns):
            return
        raise FileChanged(
            f"{self._path(found.name)} was changed after it had been found: it had {found.size} bytes, last written "
            f"{_when(found.mtime_ns)}, and has {size}, last written {_when(mtime_ns)}. A file is read once: write new rows to "
            "a new file, under a name with a dot in front, and rename it. onChanged='ignore' leaves out what has changed, as "
            "Spark does"
        )

    # ---- one look at the folder, with the lock held

    def _look(self) -> None:
        began = time.monotonic()
        self._learn()
        new = self._new(began)
        while new:
            new.sort(key=lambda found: (found.mtime_ns, found.name))
            if self._ledger.add({"files": [list(found) for found in new]}):
                self._take(new)
                break
            self._learn()  # another process was first, most likely with the same files
            new = [found for found in new if found.name not in self._by_name]
        took = time.monotonic() - began
        self._look_at = began + max(self.folder.poll_s, took / _SHARE)

    def _learn(self) -> None:
        for entry in self._ledger.news():
            try:
                found = [
                    Found(str(name), int(size), int(when), int(inode)) for name, size, when, inode in entry["files"]
                ]
            except (TypeError, ValueError, KeyError) as error:
                raise LedgerBroken(
                    f"the ledger {self._ledger.folder} has an entry that names no files: {entry!r:.100}"
                ) from error
            self._take(found)

    def _take(self, found: list[Found]) -> None:
        self._files += found
        for each in found:
            self._by_name[each.name] = each
            self._pending.pop(each.name, None)
            if each.inode:
                self._by_inode[each.inode] = each

    def _new(self, now: float) -> list[Found]:
        there = {info.path[len(self.root) + 1 :]: info for info in self.infos()}
        for gone in [name for name in self._pending if name not in there]:
            del self._pending[gone]
        names = self._written_by_spark(there)
        new = []
        for name, info in there.items():
            known = self._by_name.get(name) or self._renamed.get(name)
            if known is not None:
                self._check(known, info)
            elif names is None or name.rpartition("/")[2] in names:
                found = Found(name, info.size, info.mtime_ns or 0, self._inode(name))
                if self._is_renamed(found, there):
                    continue
                if self._is_complete(found, now):
                    new.append(found)
        return new

    def infos(self) -> list[fs.FileInfo]:
        """Files that are meant to be read."""
        selector = fs.FileSelector(self.root, recursive=self.folder.recursive)
        try:
            infos = self.fs.get_file_info(selector)
        except FileNotFoundError as error:
            raise FileGone(f"the folder {self.folder.path} is not there: {error}") from error
        except OSError as error:
            raise FileError(f"the folder {self.folder.path} cannot be read: {error}") from error
        files = []
        for info in infos:
            parts = info.path[len(self.root) + 1 :].split("/")
            if any(part[:1] in (".", "_") for part in parts):
                continue
            if info.type is fs.FileType.Directory:
                if not self.folder.recursive and "=" in parts[-1]:
                    raise FileError(
                        f"{info.path} is a folder of a partitioned table, whose columns are in the names of folders; they are "
                        "not read. recursiveFileLookup=True reads the files of all folders without these columns"
                    )
            elif info.type is fs.FileType.File and self._is_meant(parts[-1]):
                files.append(info)
        return files

    def _is_meant(self, name: str) -> bool:
        glob = self.folder.glob
        return not name.endswith(TEMPORARY) and (glob is None or fnmatch.fnmatchcase(name, glob))

    def _inode(self, name: str) -> int:
        if not self._local:
            return 0
        try:
            return os.stat(self._path(name)).st_ino
        except OSError:  # gone since; then it is not complete either
            return 0

    def _is_renamed(self, found: Found, there: dict[str, fs.FileInfo]) -> bool:
        """Whether it is a file that was found under a name that is not there any more. Same place on disk, size and time to
        the nanosecond: a new file can have the place of an old one, but was written at another time."""
        known = self._by_inode.get(found.inode) if found.inode else None
        if known is None or known.name in there or (known.size, known.mtime_ns) != (found.size, found.mtime_ns):
            return False
        self._renamed[found.name] = known
        log.warning("%s was found as %s and has been renamed; its rows are not read again", found.name, known.name)
        return True

    def _is_complete(self, found: Found, now: float) -> bool:
        size, mtime_ns, since = self._pending.get(found.name, (-1, -1, now))
        if (size, mtime_ns) != (found.size, found.mtime_ns):
            self._pending[found.name] = (found.size, found.mtime_ns, now)
            since = now
        elif self.folder.settle_s == 0 and now < since + _TELL_S:
            return False  # as it was when it was not complete
        if now - since < self.folder.settle_s:
            return False
        path = self._path(found.name)
        if found.size and self.folder.format.is_complete(self.fs, path):
            info = self.fs.get_file_info(path)
            if (info.size, info.mtime_ns or 0) == (found.size, found.mtime_ns):
                return True
            self._pending[found.name] = (-1, -1, now)  # it became complete, or grew, while it was looked at
            return False
        if now - self._told.setdefault(found.name, now) >= _TELL_S:
            self._told[found.name] = now
            log.warning("%s is still not complete; it is read when it is", path)
        return False

    def _written_by_spark(self, there: dict[str, fs.FileInfo]) -> set[str] | None:
        """The files that Spark's streaming sink has committed, where it writes to this folder: others may be half written, or of
        a task that failed. None: it does not."""
        at = f"{self.root}/{_SPARK_LOG}"
        if self.fs.get_file_info(at).type is not fs.FileType.Directory:
            return None
        for info in self.fs.get_file_info(fs.FileSelector(at)):
            name = info.base_name
            if name not in self._spark_names and name.removesuffix(".compact").isdigit():
                with self.fs.open_input_stream(info.path, compression=None) as stream:
                    lines = stream.read().decode().splitlines()[1:]
                said = [json.loads(line) for line in lines]
                paths = [each["path"] for each in said if each.get("action", "add") == "add"]
                self._spark_names[name] = {urllib.parse.unquote(path.rpartition("/")[2]) for path in paths}
        return set().union(*self._spark_names.values())


def _when(mtime_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(mtime_ns / 1e9)) + f".{mtime_ns % 10**9:09}"
