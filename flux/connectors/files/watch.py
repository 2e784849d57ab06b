"""Watches of folders: their files, in the order in which they are read (design: files-that-come).

The files of a source are numbered as they are found. Files of one look come in the order of modification time and name, and are
one entry of the ledger. A file found later comes later, whatever its time says.

A file is found once, when it is complete: a parquet file when it has its footer, a file of text when it has stayed as it is
for a while. From then on it must not change. A file that does not become complete is bad after a while.

Law: all lives of a query read the same rows. So omissions are written down, too, before a row behind them goes out: bad files
that were put aside, and the row with which the reading of a file ended early. Only the last reader that has entered for a
partition may write such an end. A reader that was given up, whose mount has gone, would otherwise end a file whose rows the
reader after it has given already.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyarrow import fs

from flux.connectors.files.completion import Completion
from flux.connectors.files.errors import BadFile, FileChanged, FileError, FileGone, gone, no_answer
from flux.connectors.files.formats import FileFormat
from flux.connectors.files.listing import FoundFile, Rules, listed
from flux.connectors.ledger import Ledger, LedgerBroken

log = logging.getLogger("flux.files")

#: The list, kept by Spark's streaming sink in the folder that it writes to, of the files written.
_SPARK_LOG = "_spark_metadata"
#: The largest share of the time that is spent on looks.
_SHARE = 0.1
#: Reasons for which the rest of a file is left out.
MISSING, CORRUPT = "missing", "corrupt"


class EarlyEnd(NamedTuple):
    """An early end of the reading of a file, for good."""

    #: The first row that is not read.
    row: int
    #: MISSING or CORRUPT.
    kind: str
    #: The error, for people.
    why: str


@dataclass(frozen=True)
class WatchedFolder:
    """A folder, and the way in which it is read. It travels to the workers."""

    path: str  # absolute, or a URI
    format: FileFormat
    rules: Rules = field(default_factory=Rules)
    poll_s: float = 0.2
    settle_s: float = 0.0  # seconds that a file must stay unchanged to be complete
    bad_after_s: float = 600.0  # seconds that a file may stay unchanged without being complete
    ignore_changes: bool = False
    ignore_missing: bool = False
    ignore_corrupt: bool = False
    #: Results go on without the folder: while it cannot be read, it is asked again, for as long as it takes.
    may_be_silent: bool = False


class Watch:
    """The watch over one source's folder in one process, shared by all readers. Safe for threads; one of them looks at a time."""

    def __init__(self, folder: WatchedFolder, ledger: str | os.PathLike[str]) -> None:
        self.folder = folder
        self.fs, root = fs.FileSystem.from_uri(folder.path)
        self.root = root.rstrip("/")
        self._ledger = Ledger(ledger)
        self._lock = threading.Lock()
        self._files: list[FoundFile] = []
        self._by_name: dict[str, FoundFile] = {}
        self._by_inode: dict[int, FoundFile] = {}
        self._renamed: dict[str, FoundFile] = {}  # by the new name: files that are read already, or to be read
        self._completion = Completion(folder.settle_s, folder.bad_after_s)
        self._aside: dict[str, tuple[int, int, str]] = {}  # bad files by name: size, time, and the defect
        self._ended: dict[int, EarlyEnd] = {}  # by number of the file
        self._readers: dict[int, str] = {}  # by partition: the reader that entered last
        self._spark_names: dict[str, set[str]] = {}  # by file of Spark's log
        self._looks, self._look_at = 0, 0.0

    @property
    def count(self) -> int:
        """Return the number of files that are known, or are there and not complete."""
        return len(self._files) + len(self._completion)

    def ended(self, number: int) -> EarlyEnd | None:
        """Return the early end of a file; None: it is read to its end."""
        with self._lock:
            return self._ended.get(number)

    def enter(self, partition: int) -> str:
        """Make a new reader the only one that may end files of a partition early, and return its name. The reader knows all
        earlier ends from then on."""
        reader = uuid.uuid4().hex
        with self._lock:
            self._decide(lambda: {"reader": [partition, reader]} if self._readers.get(partition) != reader else None)
        return reader

    def end(self, number: int, ended: EarlyEnd, partition: int, reader: str) -> None:
        """Decide that the rest of a file is left out. LedgerBroken if another life has decided otherwise, or reads the partition
        now. An entry of the ledger has one place, so no reader enters between the check and the entry."""

        def entry() -> Any:
            if number in self._ended:
                return None
            if self._readers.get(partition) != reader:
                raise LedgerBroken(
                    f"{self._path(self._files[number].name)} cannot be left out from row {ended.row} on, {ended.why}: a newer "
                    f"reader reads partition {partition}, and may have given these rows"
                )
            return {"ended": [number, *ended]}

        with self._lock:
            self._learn()
            self._decide(entry)
            if self._ended[number].row != ended.row:
                raise LedgerBroken(
                    f"{self._path(self._files[number].name)}: {self._ended[number].row} rows of it count, but this reader can "
                    f"give {ended.row}: {ended.why}"
                )
        log.warning("the rest of %s is left out from row %s on: %s", self._path(self._files[number].name), *ended[::2])

    def unread(self) -> dict[str, dict[str, str]]:
        """Return files of which rows are not read, with the reason: "incomplete" files that are there, and files that are left
        out, "missing" and "corrupt". Decides nothing."""
        with self._lock:
            self._learn()
            self._new(time.monotonic())
            left: dict[str, dict[str, str]] = {MISSING: {}, CORRUPT: {}}
            for number, ended in self._ended.items():
                left[ended.kind][self._files[number].name] = f"from row {ended.row} on: {ended.why}"
            left[CORRUPT] |= {name: why for name, (*_, why) in self._aside.items()}
            return {"incomplete": self._completion.lacking()} | left

    def file(self, number: int) -> tuple[FoundFile | None, int]:
        """Return a file by its number, or None if there is none yet; and the number of looks at the folder until now."""
        with self._lock:
            if time.monotonic() >= self._look_at:
                self._look()
            return self._files[number] if number < len(self._files) else None, self._looks

    def unanswered(self, error: BaseException, file: FoundFile | None = None) -> FileError | None:
        """Return the error about the folder, if it is the reason of an error about a file or the ledger: the folder cannot be
        read, and its files neither, or could not a moment ago. None: it can. ``file``: the one that is read, if any."""
        if isinstance(error, FileError) and error.no_answer:
            return error
        try:
            there = self.listed()
        except FileError as found:
            return found if found.no_answer else None
        if isinstance(error, FileGone) and file is not None and file.name in there:
            return no_answer(f"{self._path(file.name)} was not there a moment ago, and is there again")
        return None

    def known(self, number: int) -> FoundFile:
        """Return a file that an earlier life has read."""
        with self._lock:
            if number >= len(self._files):
                self._learn()
            if number >= len(self._files):
                raise LedgerBroken(
                    f"the ledger {self._ledger.folder} has {len(self._files)} files, but number {number} was already read: "
                    "it was removed, or cut off. Put it back, or start with another checkpointLocation"
                )
            return self._files[number]

    def where(self, found: FoundFile) -> str:
        """Return the present path of a file. Raises FileGone, or FileChanged if another file is there."""
        path = self._path(found.name)
        info = self.fs.get_file_info(path)
        if info.type is fs.FileType.File:
            self._check(found, info.size, info.mtime_ns or 0)
            return path
        with self._lock:
            self._look()
            for name, known in self._renamed.items():
                if known == found:
                    return self._path(name)
        raise gone(path)

    def check_again(self, found: FoundFile, path: str) -> None:
        """Raise FileChanged if the file, which was read to its end, was written to meanwhile."""
        info = self.fs.get_file_info(path)
        if info.type is fs.FileType.File:
            self._check(found, info.size, info.mtime_ns or 0)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _check(self, found: FoundFile, size: int, mtime_ns: int) -> None:
        """Raise FileChanged if the file is another one. A program that copies a file sets its time at the very end, back to that
        of the original: an earlier time is no change."""
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
        if new:
            self._decide(lambda: self._entry([found for found in new if found.name not in self._by_name]))
        if bad := self._completion.bad(began):
            self._put_aside(bad)
        took = time.monotonic() - began
        self._looks += 1
        self._look_at = began + max(self.folder.poll_s, took / _SHARE)

    def _entry(self, new: list[FoundFile]) -> Any:
        new.sort(key=lambda found: (found.mtime_ns, found.name))
        return {"files": [list(found) for found in new]} if new else None

    def _decide(self, entry: Callable[[], Any]) -> None:
        """Write an entry, unless another process was first with one that makes it needless, most likely the same. ``entry``
        makes the entry from the state at that moment; None: nothing is left to write."""
        while (made := entry()) is not None:
            if self._ledger.add(made):
                self._take(made)
                return
            self._learn()

    def _put_aside(self, bad: dict[FoundFile, str]) -> None:
        if not self.folder.ignore_corrupt:
            found, why = next(iter(bad.items()))
            raise BadFile(
                f"{self._path(found.name)}: {why}, and it has not changed for {self.folder.bad_after_s:g} s "
                "(spark.flux.files.badAfter). Remove or mend it, or start the query again with ignoreCorruptFiles=True, which "
                "leaves it out"
            )

        def entry() -> Any:
            new = [[*found[:3], why] for found, why in bad.items() if not self._is_aside(found)]
            return {"aside": new} if new else None

        self._decide(entry)
        for found, why in bad.items():
            log.warning("%s is left out: %s", self._path(found.name), why)

    def _learn(self) -> None:
        for entry in self._ledger.news():
            self._take(entry)

    def _take(self, entry: Any) -> None:
        try:
            for name, size, when, inode in entry.get("files", ()):
                self._take_file(FoundFile(str(name), int(size), int(when), int(inode)))
            for name, size, when, why in entry.get("aside", ()):
                self._aside[str(name)] = int(size), int(when), str(why)
                self._completion.forget(str(name))
            if "ended" in entry:
                number, row, kind, why = entry["ended"]
                self._ended[int(number)] = EarlyEnd(int(row), {MISSING: MISSING, CORRUPT: CORRUPT}[kind], str(why))
            if "reader" in entry:
                partition, reader = entry["reader"]
                self._readers[int(partition)] = str(reader)
            if not entry.keys() & {"files", "aside", "ended", "reader"}:
                raise ValueError(entry)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise LedgerBroken(
                f"the ledger {self._ledger.folder} has an entry that names no files: {entry!r:.100}"
            ) from error

    def _take_file(self, found: FoundFile) -> None:
        self._files.append(found)
        self._by_name[found.name] = found
        self._completion.forget(found.name)
        self._aside.pop(found.name, None)  # the file was mended
        if found.inode:
            self._by_inode[found.inode] = found

    def _new(self, now: float) -> list[FoundFile]:
        """Return files that are complete and not known."""
        there = self.listed()
        self._completion.keep(there)
        names = self._written_by_spark()
        new = []
        for name, found in there.items():
            known = self._by_name.get(name) or self._renamed.get(name)
            if known is not None:
                self._check(known, found.size, found.mtime_ns)
            elif not found.size:
                self._completion.forget(name)  # the file has no rows, or none yet
            elif names is not None and name.rpartition("/")[2] not in names:
                continue
            elif not self._is_aside(found) and not self._is_renamed(found) and self._is_complete(found, now):
                new.append(found)
        return new

    def listed(self) -> dict[str, FoundFile]:
        """Return the files to be read, by name."""
        return listed(self.fs, self.root, self.folder.rules)

    def _is_aside(self, found: FoundFile) -> bool:
        """Return whether the file was put aside as it is now. A mended file may be read."""
        return self._aside.get(found.name, ())[:2] == (found.size, found.mtime_ns)

    def _is_renamed(self, found: FoundFile) -> bool:
        """Return whether the file is known by another name: it was renamed, or has two names. The place on disk, the size and the
        time to the nanosecond are compared: a new file can have the place of an old one, but was written at another time."""
        known = self._by_inode.get(found.inode) if found.inode else None
        if known is None or (known.size, known.mtime_ns) != (found.size, found.mtime_ns):
            return False
        self._renamed[found.name] = known
        log.warning("%s was found as %s; its rows are not read again", found.name, known.name)
        return True

    def _is_complete(self, found: FoundFile, now: float) -> bool:
        if not self._completion.is_due(found, now):
            return False
        path = self._path(found.name)
        lacks = self.folder.format.lacks(self.fs, path)
        if not lacks:
            info = self.fs.get_file_info(path)
            if (info.size, info.mtime_ns or 0) == (found.size, found.mtime_ns):
                return True
            self._completion.forget(found.name)  # the file became complete, or grew, while it was looked at
            return False
        if self._completion.note(found.name, lacks, now):
            log.warning("%s is still not complete: %s. It is read when it is", path, lacks)
        return False

    def _written_by_spark(self) -> set[str] | None:
        """Return the files that Spark's streaming sink has committed, if it writes to this folder: other files may be half
        written, or of a task that failed. None: it does not write here."""
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
