"""Places of data that outlives a query's processes: a directory, or a prefix of an object store (design: vault,
object-stores).

``forget`` makes sinks of such a place begin anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flux.errors import QueryFailed, UsageError
from flux.state.state_copy import decode_state
from flux.vault.directory_store import Directory, check_location, is_of_a_query, make, write_whole
from flux.vault.journal import Journal, Store
from flux.vault.names import ABOUT, NameHold, is_held, note_moved
from partitioning.ids import PartitionKey

#: Locations that are URIs. Everything else is a path.
_URI = re.compile(r"(?!(?i:file):)[A-Za-z][A-Za-z0-9+.-]+://")


class OpenStore(Store, Protocol):
    def starts(self) -> int:
        """Return how often the place has been opened for writing."""

    def close(self) -> None: ...


class Place(Protocol):
    """A place of a few small documents with names, and of the journal. It can be pickled; its text is its name for people.
    OSError: it cannot be read or written."""

    @property
    def flush_s(self) -> float:
        """Return the seconds that data waits for more before a flush, unless the user has set them."""

    def read(self, name: str) -> bytes:
        """Return a document. FileNotFoundError: it is not there."""

    def write(self, name: str, data: bytes, new: bool = False) -> None:
        """Write a document so that it is durable and whole, or not there. ``new``: raise FileExistsError if it is there already;
        such a call must be ``locked``."""

    def used(self) -> bool:
        """Return whether the place has any content."""

    def locked(self) -> AbstractContextManager[Any]:
        """Lock the place against other programs, for a moment."""

    def names(self) -> list[str]:
        """Return the names of the documents."""

    def remove(self, name: str) -> None:
        """Remove a document, if it is there."""

    def clear(self) -> None:
        """Remove everything at the place."""

    def below(self, name: str, new: bool = False) -> Place:
        """Return a place of its own at a name below this one. ``new``: it is made if it is not there."""

    def store(self, writes: bool = True, keeps: bool = False) -> OpenStore:
        """Open the store of the journal. ``writes``: all earlier writers are fenced. ``keeps``: segments stay until the
        writer removes them."""

    def uri_of(self, name: str) -> str | None:
        """Return a URI beside the place that Spark may write to; None: there is none."""

    def hold(self) -> NameHold:
        """Mark the place as used, until the mark is closed. Other programs may still take over the place, but not its name
        alone."""

    def is_held(self) -> bool:
        """Return whether a query is known to use the place."""

    def put_back(self, about: bytes) -> OpenStore:
        """Open a new store at a place that was removed while a query wrote to it. ``about``: the document that describes the
        query. QueryFailed: something else is there by now."""

    def note_moved(self, what: str) -> bool:
        """Write down the fate of the place, so that a query that starts there is refused. False: there is no way to do so."""


@dataclass(frozen=True)
class Folder:
    """A directory of a local or mounted file system."""

    path: Path
    flush_s = 0.0

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes, new: bool = False) -> None:
        write_whole(self.path / name, data, new)

    def used(self) -> bool:
        return any(not name.startswith(".") for name in os.listdir(self.path))

    @contextlib.contextmanager
    def locked(self) -> Any:
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def names(self) -> list[str]:
        return [each.name for each in os.scandir(self.path) if each.is_file() and not each.name.startswith(".")]

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def below(self, name: str, new: bool = False) -> Folder:
        found = Folder(self.path / name)
        if new:
            make(found.path)
        return found

    def store(self, writes: bool = True, keeps: bool = False) -> Directory:
        return Directory(self.path, writes, keeps)

    def uri_of(self, name: str) -> str:
        # Not as_uri(): Hadoop takes the characters of a path as they are.
        return f"file://{self.path}/{name}"

    def hold(self) -> NameHold:
        return NameHold(self.path)

    def is_held(self) -> bool:
        return is_held(self.path)

    def put_back(self, about: bytes) -> Directory:
        make(self.path)
        with self.locked():
            if (self.path / ABOUT).exists():
                if self.read(ABOUT) != about:
                    raise QueryFailed(f"{self.path} is the checkpoint location of another query by now")
            elif not all(is_of_a_query(name) for name in os.listdir(self.path)):
                raise QueryFailed(f"other files are in {self.path} by now")
            # In this order: if this process is killed before the journal is there again, the location is not taken as new.
            store = Directory(self.path)
            store.note_begun()
            if not (self.path / ABOUT).exists():
                self.write(ABOUT, about, new=True)
            return store

    def note_moved(self, what: str) -> bool:
        return note_moved(self.path, what)


def place_of(location: Any, argument: str = "checkpointLocation") -> Place:
    """Return the place that a user has given as ``argument``. UsageError: it cannot be used, and why."""
    return _remote(location, argument) or Folder(check_location(location, argument))


def there(location: str) -> Place:
    """Return the place of a location that exists and is only read."""
    return _remote(location, "location") or Folder(Path(location).expanduser())


def _remote(location: Any, argument: str) -> Place | None:
    if not isinstance(location, str) or not _URI.match(location):
        return None
    from flux.vault.object_store import Remote  # loads file systems, which a local place does not need

    return Remote.checked(location, argument)


def read_journal(place: Place) -> tuple[Journal, int]:
    """Read a journal, and the number of times it was opened for writing. SnapshotError: it is damaged, or
    another release has written it."""
    store = place.store(writes=False)
    try:
        return Journal(store, f"the journal in {place}"), store.starts()
    finally:
        store.close()


def forget(place: Place, about: dict[str, Any], stages: Iterable[str]) -> dict[str, Any]:
    """Return the description of a location with new names for the output of these stages: their sinks begin anew, behind the
    output that the location knows to be outside (design: forgotten-output). UsageError: a query uses it."""
    if place.is_held():
        raise UsageError(f"a query is using {place}: stop it first")
    journal, _ = read_journal(place)
    forgotten, sinks = dict(about.get("forgotten", {})), dict(about.get("kept", {}).get("sinks", {}))
    for name in stages:
        stage = about["plan"]["stages"][name]
        keys = [PartitionKey(stage["number"], partition) for partition in range(stage["partitions"])]
        forgotten[name] = {"query": str(uuid.uuid4()), "first": [_left(journal, key) for key in keys]}
        # The things that a sink has settled, such as the ids of Kafka's producers, belong to the output that is forgotten.
        sinks.pop(name, None)
    return {**about, "kept": {**about.get("kept", {}), "sinks": sinks}, "forgotten": forgotten}


def _left(journal: Journal, key: PartitionKey) -> int:
    """Return the position below which the location knows all output of a partition to be outside."""
    kept = journal.standbys.get(key)
    if kept is None:
        return 0
    pieces = kept.checkpoint.pieces
    exit_: Any = decode_state(pieces[-1]).replica["exit"] if pieces else None
    return max(kept.left, 0 if exit_ is None else exit_[1])
