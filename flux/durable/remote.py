"""A prefix of an object store, or a directory of another remote file system, as a place of a query (design: object-stores)."""

from __future__ import annotations

import contextlib
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

from flux.durable.bucket import CLAIMS, FOLDERS, Bucket
from flux.durable.names import ABOUT, NameHold
from flux.errors import QueryFailed, UsageError

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
    """A place in an object store, or on a remote file system. ``uri`` is a URI for ``pyarrow.fs.FileSystem.from_uri``: ``s3://``,
    ``gs://``, ``abfs://``, ``hdfs://``."""

    uri: str = field(repr=False)  # there may be a password in it
    flush_s = FLUSH_S

    @classmethod
    def checked(cls, uri: str) -> Remote:
        """Return the place of a URI. UsageError: the kind of URI is unknown, or the store does not answer, or refuses."""
        made = cls(_AS_SPARK.sub("s3://", uri))
        try:
            made.used()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UsageError(
                f"checkpointLocation={str(made)!r}: it cannot be read: {_without_password(str(error))}. A path is expected, "
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

    def store(self, writes: bool = True) -> Bucket:
        return Bucket(self.objects, str(self), writes)

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
