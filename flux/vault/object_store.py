"""A journal in objects that are written once (design: object-stores).

    claims/00000002-TOKEN                        the newest writer's claim: earlier writers find it at their next flush, and end
    claims/begun                                 a journal was there, so that a lost one is not taken for a new place
    journal/00000002-00000005-00000017-000812    a part of a segment: generation, segment, number of the part, and its bytes
    state/0-3-17-42-2                            a checkpoint

Nothing is appended and no object is made exclusively, because not all stores can do so. A flush is an object of its own: the
parts of a segment, one after the other, are the content of the one file that ``Directory`` has. Two programs that claim the
same generation see each other, because each looks when its own claim is there; both may step back, and try again. Two things
are required of the store: an object is whole when it can be seen, and a listing shows all that was written before it.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from pyarrow import fs

from flux.errors import QueryFailed, SnapshotError, UsageError
from flux.vault.directory_store import LocationGone, TakenOver
from flux.vault.names import ABOUT, NameHold

_CLAIM, _PART = re.compile(r"(\d{8})-[0-9a-f]+"), re.compile(r"(\d{8})-(\d{8})-(\d{8})-(\d+)")
CLAIMS, _JOURNAL, _STATE = FOLDERS = "claims", "journal", "state"
_BEGUN = f"{CLAIMS}/begun"
#: The most parts of a segment. A journal with more begins a new segment, so that it can be read, and removed, in few requests.
PARTS_MAX = 500
#: The number of requests made at the same time, if there are several to make.
AT_ONCE = 8
#: Seconds between two looks at the claims while nothing is written. Each is a request, which costs money.
LOOK_S = 10.0
#: The number of claims before the start is given up: each time two programs have claimed the same generation.
CLAIMS_MAX = 20


class ObjectStore(Protocol):
    """A store of objects, as ``flux.vault.object_store.Objects`` is."""

    def patient(self) -> None: ...

    def make(self, folder: str) -> None: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes | memoryview) -> None: ...

    def remove(self, name: str) -> None: ...

    def sizes(self, folder: str) -> dict[str, int]: ...


class Bucket:
    """A journal in a store of objects. ``generation`` is that of this writer; 0: it only reads. ``where`` is the name of the
    place for people. ``pool`` makes requests whose end is not awaited, or several at the same time."""

    look_s = LOOK_S

    def __init__(
        self, objects: ObjectStore, where: str, writes: bool = True, pool: Executor | None = None, keeps: bool = False
    ) -> None:
        self.where = where
        self._keeps = keeps
        self.generation = 0
        self._objects = objects
        self._pool = pool or ThreadPoolExecutor(AT_ONCE, "flux-objects")
        self._removing: dict[str, Future[None]] = {}
        self._segment = self._parts = 0
        self._pending = bytearray()
        self._mine = ""  # the claim of this writer
        if writes:
            for folder in FOLDERS:
                objects.make(folder)
            self.generation = self._claim()
            objects.patient()

    # ---- claims

    def _claims(self) -> dict[str, int]:
        """Return the generations of all claims, by name."""
        found = {name: _CLAIM.fullmatch(name) for name in self._objects.sizes(CLAIMS)}
        return {name: int(match[1]) for name, match in found.items() if match is not None}

    def _claim(self) -> int:
        for _ in range(CLAIMS_MAX):
            taken = list(self._claims().values())
            # Also where the claim of a generation is lost: its parts are not written over, or mixed with new ones.
            taken += [generation for generation, _ in _by_segment(self._objects.sizes(_JOURNAL))]
            generation = max(taken, default=0) + 1
            mine = f"{generation:08}-{uuid.uuid4().hex}"
            self._objects.write(f"{CLAIMS}/{mine}", b"")
            if [name for name, number in self._claims().items() if number >= generation] == [mine]:
                self._mine = mine
                return generation
            self._objects.remove(f"{CLAIMS}/{mine}")
            time.sleep(random.uniform(0.0, 0.2))
        raise QueryFailed(f"{self.where} is in use: other programs start queries on it again and again")

    def check(self) -> None:
        """Raise QueryFailed if another program has claimed the place, or if the claim of this writer is not there any more."""
        claims = self._claims()
        if any(number > self.generation for number in claims.values()):
            raise TakenOver(self.where, self._keeps)
        if self._mine not in claims:
            raise LocationGone(self.where)

    def starts(self) -> int:
        """Return how often the place has been opened for writing."""
        return len(set(self._claims().values()))

    # ---- as flux.vault.journal.Store: the journal

    def newest(self) -> memoryview | None:
        while True:
            sizes = self._objects.sizes(_JOURNAL)
            parts = _newest(sizes)
            if parts is None:
                if self.had_segments():
                    raise SnapshotError(
                        f"{self.where} had a journal, and it is not there any more: output that was shown outside cannot be "
                        "repeated without it. Restore it from a copy, or begin anew at another prefix"
                    )
                return None
            with suppress(FileNotFoundError):  # the writer has begun another segment meanwhile
                read = self._pool.map(lambda name: self._objects.read(f"{_JOURNAL}/{name}"), self._whole(parts))
                return memoryview(b"".join(read))

    def had_segments(self) -> bool:
        """Return whether any writer has begun a segment here, removed or not."""
        return "begun" in self._objects.sizes(CLAIMS)

    def _whole(self, parts: dict[int, tuple[str, int, int]]) -> list[str]:
        """Return the names of the parts of one segment, in order, given the actual and the expected bytes of each. The last part
        may be torn: no process was told that it is kept."""
        names = []
        for number in range(max(parts) + 1):
            name, has, should = parts.get(number, ("", 0, 1))
            if has != should:
                if any(later > number for later in parts):
                    what = f"{_JOURNAL}/{name} is damaged" if name else f"part {number} of its journal is not there"
                    raise SnapshotError(
                        f"{self.where}: {what}. Restore it from a copy, or begin anew at another prefix"
                    )
                break
            names.append(name)
        return names

    def begin(self, data: bytes) -> None:
        earlier = [] if self._keeps else list(self._objects.sizes(_JOURNAL))
        self._segment, self._parts = self._segment + 1, 0
        self._write_part(data)
        self.check()  # if another process has claimed the place, it reads the earlier segments: they must stay
        if self._segment == 1:
            self.note_begun()
        begun = f"{self.generation:08}-{self._segment:08}"
        self._remove([f"{_JOURNAL}/{name}" for name in earlier if _PART.fullmatch(name) and name < begun])

    def note_begun(self) -> None:
        """Write down that a journal has begun: if the journal is not there later, the place is damaged and not new."""
        self._objects.write(_BEGUN, b"")

    def append(self, data: bytes) -> None:
        self._pending += data

    def sync(self) -> None:
        if self._pending:
            self._write_part(self._pending)
            self._pending = bytearray()

    def flush(self) -> None:
        self.sync()
        self.check()

    def _write_part(self, data: bytes | bytearray) -> None:
        name = f"{self.generation:08}-{self._segment:08}-{self._parts:08}-{len(data):06}"
        self._objects.write(f"{_JOURNAL}/{name}", memoryview(data))
        self._parts += 1

    @property
    def crowded(self) -> bool:
        return self._parts >= PARTS_MAX

    # ---- as flux.eventlog.log_store.LogStore

    def segments(self) -> list[tuple[int, int]]:
        found = _by_segment(self._objects.sizes(_JOURNAL))
        return sorted(key for key, parts in found.items() if 0 in parts and parts[0][1] == parts[0][2])

    def read(self, segment: tuple[int, int], start: int = 0, end: int | None = None) -> bytes:
        """Return bytes of a segment: the parts that have them, joined and cut."""
        parts = _by_segment(self._objects.sizes(_JOURNAL)).get(segment)
        if parts is None:
            raise FileNotFoundError(f"{self.where}: segment {segment} of its log is not there")
        wanted: list[str] = []
        at = first = 0
        for name in self._whole(parts):
            size = int(name.rpartition("-")[2])
            if at + size > start and (end is None or at < end):
                first = first if wanted else at
                wanted.append(name)
            at += size
        data = b"".join(self._pool.map(lambda name: self._objects.read(f"{_JOURNAL}/{name}"), wanted))
        return data[max(start - first, 0) : None if end is None else max(end - first, 0)]

    def secure(self, segment: tuple[int, int]) -> None:
        """Do nothing: an object that can be seen is durable."""

    def publish(self, segment: tuple[int, int], size: int) -> None:
        """Do nothing: a reader sees whole parts, and looks at the claims behind that."""

    def published(self, segment: tuple[int, int]) -> int:
        """Return the bytes of a segment that its writer has shown before any other claimed the place; 0: another one has."""
        parts = _by_segment(self._objects.sizes(_JOURNAL)).get(segment, {})
        size = sum(int(name.rpartition("-")[2]) for name in self._whole(parts)) if parts else 0
        return 0 if any(number > segment[0] for number in self._claims().values()) else size

    def drop(self, segments: Collection[tuple[int, int]]) -> None:
        found = _by_segment(self._objects.sizes(_JOURNAL))
        self._remove([f"{_JOURNAL}/{part[0]}" for key in segments for part in found.get(key, {}).values()])

    # ---- checkpoints

    def put(self, name: str, data: memoryview) -> memoryview:
        if (leaving := self._removing.get(f"{_STATE}/{name}")) is not None:
            leaving.exception()  # wait for the removal: it must not come after the new write
        self._objects.write(f"{_STATE}/{name}", data)
        return _outside_of_memory(data)

    def get(self, name: str) -> memoryview | None:
        try:
            return _outside_of_memory(memoryview(self._objects.read(f"{_STATE}/{name}")))
        except FileNotFoundError:
            if self.generation:
                self.check()  # a program that has claimed the place meanwhile has removed it
            return None

    def remove(self, names: Collection[str]) -> None:
        self._remove([f"{_STATE}/{name}" for name in names])

    def names(self) -> list[str]:
        return list(self._objects.sizes(_STATE))

    def _remove(self, names: list[str]) -> None:
        """Remove objects in the background. An object whose removal fails is removed after the next start."""
        for name in names:
            self._removing[name] = leaving = self._pool.submit(self._objects.remove, name)
            leaving.add_done_callback(partial(self._removed, name))

    def _removed(self, name: str, leaving: Future[None]) -> None:
        if self._removing.get(name) is leaving:
            del self._removing[name]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _newest(sizes: dict[str, int]) -> dict[int, tuple[str, int, int]] | None:
    """Return the parts of the newest segment that has begun: by number the name, the actual bytes and the expected bytes."""
    segments = _by_segment(sizes)
    for key in sorted(segments, reverse=True):
        parts = segments[key]
        if 0 in parts and parts[0][1] == parts[0][2]:
            return parts
    return None


def _by_segment(sizes: dict[str, int]) -> dict[tuple[int, int], dict[int, tuple[str, int, int]]]:
    """Return the parts of each segment: by number the name, the actual bytes and the expected bytes."""
    segments: dict[tuple[int, int], dict[int, tuple[str, int, int]]] = {}
    for name, nbytes in sizes.items():
        if (found := _PART.fullmatch(name)) is not None:
            generation, segment, part, should = map(int, found.groups())
            segments.setdefault((generation, segment), {})[part] = name, nbytes, should
    return segments


def _outside_of_memory(data: memoryview) -> memoryview:
    """Return the same bytes, in a file without a name: checkpoints are many, and are read only when a worker is lost."""
    if not data.nbytes:
        return memoryview(b"")
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


#: Requests cost money and time: the orders of steps of this many seconds are gathered.
FLUSH_S = 0.5
#: A lock that is older, by the clock of the store, was left by a program that has died.
LOCK_S = 60.0
#: Seconds that a program waits for another one's lock.
LOCK_MAX_S = 10.0
#: Seconds during which a failed request is repeated: failures of the network and the store are often short.
AGAIN_S = 15.0
_LOCKS = "locks"

#: Hadoop's names of the scheme, in capitals too, as schemes may be.
_AS_SPARK = re.compile("^s3[an]?://", re.IGNORECASE)
#: A password after a user, or after a container of Azure, up to the last @: it may have a / in it, which nothing can parse.
_PASSWORD = re.compile(r"(://[^:@/\s]*):\S*@")

T = TypeVar("T")


@dataclass(frozen=True)
class Remote:
    """A place of a query at a prefix of an object store, or in a directory of another remote file system (design: object-stores).

    ``uri`` is a URI for ``pyarrow.fs.FileSystem.from_uri``: ``s3://``, ``gs://``, ``abfs://``, ``hdfs://``."""

    uri: str = field(repr=False)  # there may be a password in it
    flush_s = FLUSH_S

    @classmethod
    def checked(cls, uri: str, argument: str) -> Remote:
        """Return the place of a URI, given as ``argument``. UsageError: its kind is unknown, or the store does not answer, or
        refuses."""
        made = cls(_AS_SPARK.sub("s3://", uri))
        try:
            made.used()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UsageError(
                f"{argument}={str(made)!r}: it cannot be read: {_without_password(str(error))}. A path is expected, "
                "or a URI that pyarrow.fs opens, with credentials where its file systems look for them, such as "
                "'s3://bucket/query?region=eu-central-1'"
            ) from None  # the error may quote the whole URI
        return made

    def __str__(self) -> str:
        return _without_password(self.uri).partition("?")[0]

    def __reduce__(self) -> tuple[type[Remote], tuple[str]]:
        return Remote, (self.uri,)  # without the cached file system

    @cached_property
    def _opened(self) -> tuple[fs.FileSystem, str]:
        opened, path = self._frugal() or fs.FileSystem.from_uri(self.uri)
        return opened, path.rstrip("/")

    def _frugal(self) -> tuple[fs.FileSystem, str] | None:
        """Open S3 so that a small object takes one request, not three. None: not S3, an older pyarrow, or a mistake in the
        URI."""
        if not self.uri.startswith("s3:") or "allow_delayed_open" in self.uri:
            return None
        try:
            found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(
                f"{self.uri}{'&' if '?' in self.uri else '?'}allow_delayed_open=true"
            )
            return found
        except (ValueError, pa.ArrowException):
            return None

    @property
    def objects(self) -> Objects:
        return Objects(*self._opened)

    def read(self, name: str) -> bytes:
        return self.objects.read(name)

    def write(self, name: str, data: bytes, new: bool = False) -> None:
        if new and name in self.objects.sizes(""):
            raise FileExistsError(name)
        self.objects.write(name, data)

    def used(self) -> bool:
        return any(name != _LOCKS and not name.startswith(".") for name in self.objects.entries())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        objects, mine = self.objects, uuid.uuid4().hex
        objects.make(_LOCKS)
        end = time.monotonic() + LOCK_MAX_S
        while True:
            objects.write(f"{_LOCKS}/{mine}", b"")
            held = objects.ages(_LOCKS)
            if all(name == mine or held.get(mine, at) - at > LOCK_S for name, at in held.items()):
                break
            objects.remove(f"{_LOCKS}/{mine}")
            if time.monotonic() > end:
                raise UsageError(
                    f"checkpointLocation={str(self)!r} is in use: another program is starting a query on it, or has died within "
                    f"the last {LOCK_S:g} s while it did. Try again"
                )
            time.sleep(random.uniform(0.05, 0.5))
        try:
            yield
        finally:
            objects.remove(f"{_LOCKS}/{mine}")

    def names(self) -> list[str]:
        return list(self.objects.sizes(""))

    def remove(self, name: str) -> None:
        self.objects.remove(name)

    def clear(self) -> None:
        self.objects.clear()

    def below(self, name: str, new: bool = False) -> Remote:
        path, mark, query = self.uri.partition("?")
        return Remote(f"{path.rstrip('/')}/{name}{mark}{query}")

    def store(self, writes: bool = True, keeps: bool = False) -> Bucket:
        return Bucket(self.objects, str(self), writes, keeps=keeps)

    def uri_of(self, name: str) -> None:
        """Return nothing: Spark's file systems differ from pyarrow's, and have other credentials."""
        return

    def hold(self) -> NameHold:
        """Hold nothing: a prefix has no identity beside its name, so it cannot be renamed under a query."""
        return NameHold(None)

    def is_held(self) -> bool:
        return False

    def put_back(self, about: bytes) -> Bucket:
        with self.locked():
            remains_in(self.objects, str(self))
            # In this order: if this process is killed before the journal is there again, the location is not taken as new.
            store = self.store()
            store.note_begun()
            self.write(ABOUT, about)
            return store

    def note_moved(self, what: str) -> bool:
        return False


def remains_in(objects: Any, where: str) -> None:
    """Remove objects that a writer has still written after all others were removed. QueryFailed: something else is there."""
    folders = [name for name in objects.entries() if name != _LOCKS and not name.startswith(".")]
    found = {folder: list(objects.sizes(folder)) for folder in folders}
    if not found.keys() <= {*FOLDERS} or found.get(CLAIMS):
        raise QueryFailed(f"other objects are at {where} by now")
    for folder, names in found.items():
        for name in names:
            objects.remove(f"{folder}/{name}")


def _without_password(text: str) -> str:
    return _PASSWORD.sub(r"\1@", text)


class Objects:
    """Objects below a prefix, by name: whole when they can be seen, and seen by all programs at once."""

    def __init__(self, opened: fs.FileSystem, prefix: str) -> None:
        self._fs = opened
        self._prefix = prefix
        self._again_s = 0.0

    def patient(self) -> None:
        """Repeat failed requests for a while from now on. Before this call none is repeated: a user who starts a query is
        told."""
        self._again_s = AGAIN_S

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if name else self._prefix

    def _again(self, call: Callable[[], T]) -> T:
        """Make a request, perhaps several times. Each request may be made twice without harm."""
        end, wait = time.monotonic() + self._again_s, 0.1
        while True:
            try:
                return call()
            except (FileNotFoundError, PermissionError):
                raise
            except OSError:
                if time.monotonic() + wait > end:
                    raise
                time.sleep(wait)
                wait = min(2 * wait, 2.0)

    def make(self, folder: str) -> None:
        """Make a folder, which files need on a file system that has folders."""
        self._again(lambda: self._fs.create_dir(self._path(folder), recursive=True))

    def read(self, name: str) -> bytes:
        def call() -> bytes:
            with self._fs.open_input_stream(self._path(name)) as file:
                data: bytes = file.read()
                return data

        return self._again(call)

    def write(self, name: str, data: bytes | memoryview) -> None:
        def call() -> None:
            # Not in a with statement: a file that is closed after an error would be there, and not whole.
            file = self._fs.open_output_stream(self._path(name))
            file.write(data)
            file.close()

        self._again(call)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._again(lambda: self._fs.delete_file(self._path(name)))

    def clear(self) -> None:
        """Remove all objects below the prefix."""
        with contextlib.suppress(FileNotFoundError):
            self._again(lambda: self._fs.delete_dir_contents(self._path(""), missing_dir_ok=True))

    def _infos(self, folder: str) -> list[fs.FileInfo]:
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        return self._again(lambda: self._fs.get_file_info(selector))

    def entries(self) -> list[str]:
        """Return the names of files and folders right below the prefix."""
        return [info.base_name for info in self._infos("")]

    def sizes(self, folder: str) -> dict[str, int]:
        return {info.base_name: info.size for info in self._infos(folder) if info.is_file}

    def ages(self, folder: str) -> dict[str, float]:
        """Return the time at which each object was written, by the clock of the store, in seconds."""
        return {info.base_name: info.mtime.timestamp() for info in self._infos(folder) if info.is_file}
