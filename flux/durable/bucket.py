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

import mmap
import random
import re
import tempfile
import time
import uuid
from collections.abc import Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

from flux.durable.directory import LocationGone
from flux.errors import QueryFailed, SnapshotError

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


class Objects(Protocol):
    """A store of objects, as ``flux.durable.remote.Objects`` is."""

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

    def __init__(self, objects: Objects, where: str, writes: bool = True, pool: Executor | None = None) -> None:
        self.where = where
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
            generation = max(self._claims().values(), default=0) + 1
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
            raise QueryFailed(
                f"another query has been started on the checkpoint location {self.where}, and goes on where this one was: "
                "this one ends"
            )
        if self._mine not in claims:
            raise LocationGone(self.where)

    def starts(self) -> int:
        """Return how often the place has been opened for writing."""
        return len(set(self._claims().values()))

    # ---- as flux.durable.journal.Store: the journal

    def newest(self) -> memoryview | None:
        while True:
            sizes = self._objects.sizes(_JOURNAL)
            parts = _newest(sizes)
            if parts is None:
                if "begun" in self._objects.sizes(CLAIMS):
                    raise SnapshotError(
                        f"{self.where} had a journal, and it is not there any more: what was shown outside cannot be repeated "
                        "without it. Restore it from a copy, or begin anew at another prefix"
                    )
                return None
            with suppress(FileNotFoundError):  # the writer has begun another segment meanwhile
                read = self._pool.map(lambda name: self._objects.read(f"{_JOURNAL}/{name}"), self._whole(parts))
                return memoryview(b"".join(read))

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
        earlier = list(self._objects.sizes(_JOURNAL))
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

    def flush(self) -> None:
        if self._pending:
            self._write_part(self._pending)
            self._pending = bytearray()
        self.check()

    def _write_part(self, data: bytes | bytearray) -> None:
        name = f"{self.generation:08}-{self._segment:08}-{self._parts:08}-{len(data):06}"
        self._objects.write(f"{_JOURNAL}/{name}", memoryview(data))
        self._parts += 1

    @property
    def crowded(self) -> bool:
        return self._parts >= PARTS_MAX

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
    segments: dict[tuple[int, int], dict[int, tuple[str, int, int]]] = {}
    for name, nbytes in sizes.items():
        if (found := _PART.fullmatch(name)) is not None:
            generation, segment, part, should = map(int, found.groups())
            segments.setdefault((generation, segment), {})[part] = name, nbytes, should
    for key in sorted(segments, reverse=True):
        parts = segments[key]
        if 0 in parts and parts[0][1] == parts[0][2]:
            return parts
    return None


def _outside_of_memory(data: memoryview) -> memoryview:
    """Return the same bytes, in a file without a name: checkpoints are many, and are read only when a worker is lost."""
    if not data.nbytes:
        return memoryview(b"")
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
