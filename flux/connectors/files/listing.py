"""Listings of a folder: the files to be read, each with its identity.

Law: each file of a local file system is listed once, by device and inode, and its own name comes before a name that leads to it
through a link. A folder is entered once, so a loop of links ends where it began.
"""

from __future__ import annotations

import errno
import fnmatch
import heapq
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pyarrow import fs

from flux.connectors.files.errors import FileError, FileGone

#: Endings of files that are still being written.
TEMPORARY = (".tmp", "._COPYING_")


class FoundFile(NamedTuple):
    """A file as it was when it was found."""

    #: Its path below the folder.
    name: str
    size: int
    mtime_ns: int
    #: 0 if the file system has none.
    inode: int


@dataclass(frozen=True)
class Rules:
    """Rules for the names of files to be read."""

    #: Pattern of names; None: all names.
    glob: str | None = None
    #: Whether files in folders below are read, too.
    recursive: bool = False

    def skips(self, name: str) -> bool:
        """Return whether files and folders of this name are hidden."""
        return name[:1] in (".", "_")

    def takes(self, name: str) -> bool:
        return not name.endswith(TEMPORARY) and (self.glob is None or fnmatch.fnmatchcase(name, self.glob))

    def check_folder(self, path: str) -> None:
        if not self.recursive and "=" in path.rpartition("/")[2]:
            raise FileError(
                f"{path} is a folder of a partitioned table, whose columns are in the names of folders; they are "
                "not read. recursiveFileLookup=True reads the files of all folders without these columns"
            )


def listed(files: fs.FileSystem, root: str, rules: Rules) -> dict[str, FoundFile]:
    """Return the files below ``root``, by name. FileGone if there is no such folder, FileError if it cannot be read; both with
    ``no_answer``."""
    try:
        if isinstance(files, fs.LocalFileSystem):
            return {found.name: found for found in _local(root, rules)}
        return {found.name: found for found in _remote(files, root, rules)}
    except FileNotFoundError as error:
        raise _unanswered(FileGone(f"the folder {root} is not there: {error}")) from error
    except OSError as error:
        raise _unanswered(FileError(f"the folder {root} cannot be read: {error}")) from error


def _unanswered(error: FileError) -> FileError:
    error.no_answer = True
    return error


def _remote(files: fs.FileSystem, root: str, rules: Rules) -> Iterator[FoundFile]:
    for info in files.get_file_info(fs.FileSelector(root, recursive=rules.recursive)):
        name = info.path[len(root) + 1 :]
        parts = name.split("/")
        if any(map(rules.skips, parts)):
            continue
        if info.type is fs.FileType.Directory:
            rules.check_folder(info.path)
        elif info.type is fs.FileType.File and rules.takes(parts[-1]):
            yield FoundFile(name, info.size, info.mtime_ns or 0, 0)


def _local(root: str, rules: Rules) -> Iterator[FoundFile]:
    """Yield files under their own names first, then files behind links. A link that is moved, as ``latest`` is every day, must
    not give another name to a known file."""
    walk = _Walk(root, rules)
    yield from walk.below("")
    while walk.links:
        yield from walk.behind(heapq.heappop(walk.links))


class _Walk:
    """Walk through a local folder. Links are put aside (``links``), and a file or folder that was seen before is passed over,
    so a link that leads back ends nowhere."""

    def __init__(self, root: str, rules: Rules) -> None:
        self._root, self._rules = root, rules
        #: Links that have not been followed, the first by name on top.
        self.links: list[str] = []
        self._seen = {_inode(os.stat(root or "/"))}

    def below(self, folder: str) -> Iterator[FoundFile]:
        """Yield the files below a folder; ``folder`` is "" or has a slash at its end."""
        waiting = [folder]
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(f"{self._root}/{folder}") as entries:
                    there = sorted(entries, key=lambda entry: entry.name)
            except FileNotFoundError:
                if not folder:
                    raise
                continue  # gone since
            for entry in there:
                name = entry.name
                if self._rules.skips(name):
                    continue
                if entry.is_symlink():
                    heapq.heappush(self.links, folder + name)
                    continue
                is_folder = entry.is_dir()
                if not is_folder and not self._rules.takes(name):
                    continue
                try:
                    about = entry.stat()
                except FileNotFoundError:
                    continue  # gone since
                if is_folder:
                    if self._enters(folder + name, about):
                        waiting.append(f"{folder}{name}/")
                elif found := self._found(folder + name, about):
                    yield found

    def behind(self, link: str) -> Iterator[FoundFile]:
        """Yield the file behind a link, or the files below the folder behind it."""
        try:
            about = os.stat(f"{self._root}/{link}")
        except (FileNotFoundError, NotADirectoryError):  # a link to nowhere
            return
        except OSError as error:
            if error.errno == errno.ELOOP:
                return
            raise
        if stat.S_ISDIR(about.st_mode):
            if self._enters(link, about):
                yield from self.below(link + "/")
        elif self._rules.takes(link.rpartition("/")[2]) and (found := self._found(link, about)):
            yield found

    def _enters(self, name: str, about: os.stat_result) -> bool:
        """Return whether a folder is to be read, and has not been entered."""
        self._rules.check_folder(f"{self._root}/{name}")
        inode = _inode(about)
        if not self._rules.recursive or inode in self._seen:
            return False
        self._seen.add(inode)
        return True

    def _found(self, name: str, about: os.stat_result) -> FoundFile | None:
        inode = _inode(about)
        if inode in self._seen or not stat.S_ISREG(about.st_mode):
            return None
        self._seen.add(inode)
        if not name.isascii():
            _check_name(f"{self._root}/{name}")
        return FoundFile(name, about.st_size, about.st_mtime_ns, about.st_ino)


def _inode(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise FileError(
            f"the name of {os.fsencode(path)!r} is no UTF-8, so it cannot be opened. Rename it, or leave it out with "
            "pathGlobFilter"
        ) from error
