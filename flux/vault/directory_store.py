"""A directory on a local or mounted file system, as the place of a journal (design: journal).

    flux.json                     the description of the query: see ``about``
    generation-00000002           made by the writer since then: earlier writers find it after their next flush, and end;
                                  not empty any more once a journal has begun, so that a lost one is not taken for a new location
    journal-00000002-00000005     a segment of the journal: generation and number
    state/0-3-17-42-2             a checkpoint: stage, partition, term, number and generation

A program that opens the directory first makes the file of the next generation, durably, and then reads the journal. A writer
first flushes, and then looks for that file. So everything that the writer has answered is in the journal that the next program
reads. At the same time the writer checks that the path still leads to the directory and the journal that it has open, because
another program finds the directory that is at the path (design: moved-location).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import struct
import uuid
import zlib
from collections.abc import Collection
from pathlib import Path

from flux.errors import QueryFailed, SnapshotError, UsageError
from flux.vault.names import check_name

_GENERATION, _SEGMENT = re.compile(r"generation-(\d{8})"), re.compile(r"journal-(\d{8})-(\d{8})")
_HALF_WRITTEN = re.compile(r"\..*\.(\d{8})")
_STATE = "state"
#: Seconds between two looks at the path while nothing is written: a few calls of the system each.
LOOK_S = 1.0


def is_of_a_query(name: str) -> bool:
    """Tell whether a file of this name may be left of a location from which ``flux.json`` was removed."""
    return name.startswith(".") or name == _STATE or bool(_GENERATION.fullmatch(name) or _SEGMENT.fullmatch(name))


class LocationGone(QueryFailed):
    """End of a query whose location was moved or removed. ``now`` is its new path; None: its files were removed."""

    def __init__(self, where: str, now: str | None = None) -> None:
        super().__init__(f"the checkpoint location {where} was {'removed' if now is None else f'moved to {now}'}")
        self.now = now


def check_location(location: str | os.PathLike[str], argument: str = "checkpointLocation") -> Path:
    """Return a directory that this user owns alone, made if it is not there. ``argument``: the name under which a user gives it.
    UsageError tells why the location cannot be used."""
    text = _local(location, argument)
    try:
        path = Path(text).expanduser().absolute()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{argument}={text!r}: it is no path: {error}") from error
    check_name(path)
    try:
        make(path)
        found = path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{argument}={text!r}: it cannot be made or read: {error}") from error
    if found.st_uid != os.getuid():
        raise UsageError(
            f"{argument}={text!r} belongs to another user (id {found.st_uid}): state in it is unpickled, so it must be "
            "yours alone"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{argument}={text!r} may be read or written by others (mode {stat.S_IMODE(found.st_mode):04o}): state in it "
            f"is unpickled, so it must be yours alone: chmod 700 {path}"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{argument}={text!r} cannot be written")
    return path


def _local(location: str | os.PathLike[str], argument: str) -> str:
    """Return the path of a location. UsageError: it is not on a file system that can be mounted."""
    text = os.fspath(location) if isinstance(location, str | os.PathLike) else location
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{argument}={location!r}: a path is expected, for example '/data/query-checkpoint'")
    if text.startswith("file:///") or re.match("file:/[^/]", text):
        return text.removeprefix("file:").replace("///", "/", 1)
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
        raise UsageError(
            f"{argument}={text!r}: a path is expected, such as '/data/query' or 'file:///data/query', or a URI such as "
            f"'s3://bucket/query', and {scheme[0]!r} begins neither"
        )
    return text


def make(path: Path) -> None:
    """Make a directory and the directories above it, durably."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in missing:
        _sync(made.parent)


def write_whole(path: Path, data: bytes | memoryview, new: bool = False, mark: str = "") -> None:
    """Write a file so that it is durable and whole, or not there. ``new``: raise FileExistsError if it is there already. ``mark``
    is the writer's mark in the name that the file has until it is whole."""
    made = path.with_name(f".{path.name}.{mark or uuid.uuid4().hex}")
    try:
        with open(made, "wb", opener=_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(made, path)
            made.unlink()
        else:
            made.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink()
        raise
    _sync(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TakenOver(QueryFailed):
    """End of a writer whose place another program has opened since then. ``of_log``: the place is that of an event log."""

    def __init__(self, where: str, of_log: bool = False) -> None:
        if of_log:
            super().__init__(f"another gateway has taken over the log at {where}")
            return
        super().__init__(
            f"another query has been started on the checkpoint location {where}, and goes on where this one was: this one ends"
        )


#: Names of the bytes of a segment that its writer has flushed and owned: generation and number of the segment, bytes, CRC-32.
_PUBLISHED = struct.Struct("<QQQI")


class Directory:
    """A journal in a directory. ``generation`` is that of this writer; 0: it only reads.

    A journal has one segment that counts, and ``begin`` removes those before it. An event log keeps them (``keeps``), lists them
    and removes them itself; its readers see what its writer has published."""

    look_s = LOOK_S

    def __init__(self, path: Path, writes: bool = True, keeps: bool = False) -> None:
        self.path = path
        self._keeps = keeps
        self._marks: dict[int, int] = {}
        self._states = path / _STATE
        self.generation = 0
        self._number = 0
        self._file: int | None = None
        #: The newest segment of this writer.
        self._segment: Path | None = None
        #: The open directory itself, whatever its name is now.
        self._itself: int | None = None
        if writes:
            self._itself = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            self.generation = self._claim()
            self._sweep()

    def _claim(self) -> int:
        self._states.mkdir(mode=0o700, exist_ok=True)
        while True:
            taken = [int(found[1]) for name in self._generations() if (found := _GENERATION.fullmatch(name))]
            # Also where the file of a generation is lost: its segments are not written over.
            taken += [generation for generation, _ in self.segments()]
            generation = max(taken, default=0) + 1
            try:
                os.close(os.open(self._of_generation(generation), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                continue
            _sync(self.path)
            return generation

    def _sweep(self) -> None:
        """Remove files that earlier writers have left half written."""
        for folder in (self.path, self._states):
            for name in os.listdir(folder):
                found = _HALF_WRITTEN.fullmatch(name)
                if found is not None and int(found[1]) < self.generation:
                    (folder / name).unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        try:
            write_whole(path, data, mark=f"{self.generation:08}")
        except FileNotFoundError:
            self.check()  # a program that has opened the location meanwhile has removed the directory
            raise

    def starts(self) -> int:
        """Return how often the directory has been opened for writing."""
        return len(self._generations())

    def _generations(self) -> list[str]:
        return [name for name in os.listdir(self.path) if _GENERATION.fullmatch(name)]

    def _of_generation(self, generation: int) -> Path:
        return self.path / f"generation-{generation:08}"

    def _segments(self) -> list[str]:
        return sorted(name for name in os.listdir(self.path) if _SEGMENT.fullmatch(name))

    # ---- as flux.vault.journal.Store

    def newest(self) -> memoryview | None:
        while segments := self._segments() or self._segments():  # a listing may miss a file that is renamed meanwhile
            with contextlib.suppress(FileNotFoundError):  # the writer has begun another segment
                return memoryview((self.path / segments[-1]).read_bytes())
        if self.had_segments():
            raise SnapshotError(
                f"{self.path} had a journal, and it is not there any more: output that was shown outside cannot be repeated "
                "without it. Restore the directory from a copy, or begin anew in an empty one"
            )
        return None

    def had_segments(self) -> bool:
        """Return whether any writer has begun a segment here, removed or not."""
        return any((self.path / name).stat().st_size for name in self._generations())

    def begin(self, data: bytes) -> None:
        self._number += 1
        segment = self.path / f"journal-{self.generation:08}-{self._number:08}"
        self._write(segment, data)
        self.check()  # if another process has opened the location, it reads the earlier segments: they must stay
        self._close_segment()
        try:
            self._file, self._segment = os.open(segment, os.O_WRONLY | os.O_APPEND), segment
        except FileNotFoundError:
            self.check()  # a program that has opened the location meanwhile has removed the segment
            raise
        if self._number == 1:
            self.note_begun()
        if not self._keeps:
            for name in self._segments():
                if name < segment.name:
                    (self.path / name).unlink(missing_ok=True)

    def note_begun(self) -> None:
        """Write down that a journal has begun: if the journal is not there later, the location is damaged and not new."""
        with open(self._of_generation(self.generation), "wb", opener=_private) as file:
            file.write(b"its journal has begun\n")
            file.flush()
            os.fsync(file.fileno())

    def append(self, data: bytes) -> None:
        assert self._file is not None
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def sync(self) -> None:
        assert self._file is not None
        os.fdatasync(self._file)

    def flush(self) -> None:
        self.sync()
        self.check()

    @property
    def crowded(self) -> bool:
        return False  # a segment is one file

    def check(self) -> None:
        """Raise QueryFailed unless a program that starts at the path finds the journal of this writer, and fences this writer."""
        assert self._itself is not None
        if not _is(os.fstat(self._itself), self.path):
            raise LocationGone(str(self.path), self._now_at())
        self._check_alone()
        if not (
            self._of_generation(self.generation).exists()
            and (self._file is None or self._segment is None or _is(os.fstat(self._file), self._segment))
        ):
            self._check_alone()  # a program that has opened the location meanwhile has removed the journal
            raise LocationGone(str(self.path))

    def _now_at(self) -> str | None:
        """Return the path by which the directory can be found now. None: its files are not in it any more."""
        lasting = self._of_generation(self.generation) if self._segment is None else self._segment
        try:
            os.stat(lasting.name, dir_fd=self._itself)
            return os.readlink(f"/proc/self/fd/{self._itself}")
        except FileNotFoundError:
            return None

    def _check_alone(self) -> None:
        if self._of_generation(self.generation + 1).exists():
            raise TakenOver(str(self.path), self._keeps)

    def put(self, name: str, data: memoryview) -> memoryview:
        self._write(self._states / name, data)
        found = self.get(name)
        if found is None:
            self.check()  # a program that has opened the location meanwhile has removed it
            raise QueryFailed(
                f"{self._states / name} is gone: another program removes files from the checkpoint location"
            )
        return found

    def get(self, name: str) -> memoryview | None:
        try:
            with (self._states / name).open("rb") as file:
                empty = os.fstat(file.fileno()).st_size == 0
                return memoryview(b"") if empty else memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            if self.generation:
                self.check()  # a program that has opened the location meanwhile has removed it
            return None

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            (self._states / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [name for name in os.listdir(self._states) if not name.startswith(".")] if self._states.exists() else []

    # ---- as flux.eventlog.log_store.LogStore

    def segments(self) -> list[tuple[int, int]]:
        found = (_SEGMENT.fullmatch(name) for name in self._segments())
        return [(int(match[1]), int(match[2])) for match in found if match is not None]

    def _of_segment(self, segment: tuple[int, int]) -> Path:
        return self.path / f"journal-{segment[0]:08}-{segment[1]:08}"

    def read(self, segment: tuple[int, int], start: int = 0, end: int | None = None) -> bytes:
        with self._of_segment(segment).open("rb") as file:
            file.seek(start)
            return file.read() if end is None else file.read(max(end - start, 0))

    def secure(self, segment: tuple[int, int]) -> None:
        """Make the whole segment of an earlier writer durable: rows that were read in it may be in memory of the system only."""
        file = os.open(self._of_segment(segment), os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def publish(self, segment: tuple[int, int], size: int) -> None:
        """Tell readers that the first ``size`` bytes of a segment are durable. Each generation has a file of its own, because a
        writer that was taken over may come last. It is not flushed: after a crash of the machine it says too little."""
        data = _PUBLISHED.pack(*segment, size, 0)
        data = _PUBLISHED.pack(*segment, size, zlib.crc32(data))
        os.pwrite(self._mark(self.generation, os.O_RDWR | os.O_CREAT), data, 0)

    def published(self, segment: tuple[int, int]) -> int:
        """Return the bytes of a segment that its writer has published; 0: none, or not known any more."""
        try:
            data = os.pread(self._mark(segment[0], os.O_RDONLY), _PUBLISHED.size, 0)
        except FileNotFoundError:
            return 0
        if len(data) != _PUBLISHED.size:
            return 0
        *of, size, crc = _PUBLISHED.unpack(data)
        whole = zlib.crc32(_PUBLISHED.pack(*of, size, 0)) == crc
        return int(size) if whole and tuple(of) == segment else 0

    def _mark(self, generation: int, flags: int) -> int:
        if generation not in self._marks:
            self._marks[generation] = _private(str(self.path / f"published-{generation:08}"), flags)
        return self._marks[generation]

    def drop(self, segments: Collection[tuple[int, int]]) -> None:
        for segment in segments:
            self._of_segment(segment).unlink(missing_ok=True)

    def close(self) -> None:
        self._close_segment()
        while self._marks:
            os.close(self._marks.popitem()[1])
        if self._itself is not None:
            os.close(self._itself)
            self._itself = None

    def _close_segment(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _is(opened: os.stat_result, path: Path) -> bool:
    """Return whether a path leads to an open file or directory."""
    try:
        return os.path.samestat(opened, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
