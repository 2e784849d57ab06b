"""Decisions of the readers of a source, one entry after another, in a folder that all workers reach (design: ledger).

Some sources have no order of rows of their own: files appear in a folder at any moment, a stream has a new end whenever it is
asked. A reader of such a source writes down its next rows as an entry before the first of these rows goes out. A reader in a
later life finds the entry here, and gives the same rows in the same order.

Law: entry n is decided once, by the first writer, and never changes. Several processes may write at the same time, a worker
that was given up among them: a file appears whole, under a name that only one process can take (a hard link), and there is no
lock that a stopped process could keep.

Left to others: the meaning of an entry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from flux.errors import FluxError, UsageError

#: Number of entries that are put together in one file, once ``_APART`` newer entries are there. A process that is stopped for the
#: time that it takes to write the newer ones was given up before it wakes: entries that it then writes at an older place are not
#: looked at.
TOGETHER, _APART = 256, 1024
#: While entries are put together, one look at the folder may see neither the old names nor the new one.
_LOOKS = 5
_NAME = re.compile(r"(\d{12})(?:-(\d{12}))?\.json")


class LedgerBroken(FluxError):
    """A ledger whose entries cannot be read or written, or are gone in part."""


class Ledger:
    """The entries of one source of one query, in a ``folder`` of their own, which the first entry makes. For one thread at a
    time."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        #: The number of entries that this process knows.
        self.known = 0

    def news(self) -> list[Any]:
        """Return the entries that have been decided since the last call, in order."""
        for _ in range(_LOOKS):
            found, missing = self._news()
            if not missing:
                self.known += len(found)
                return found
        raise LedgerBroken(
            f"{self.folder}: entry {self.known + len(found)} is missing, and later ones are there. Put it back, or start "
            "with another checkpointLocation; the order of reading is not known any more"
        )

    def _news(self) -> tuple[list[Any], bool]:
        """Return the new entries, and whether one is missing between them and later ones."""
        single, together = self._there()
        found: list[Any] = []
        while True:
            at = self.known + len(found)
            block = next(((first, behind) for first, behind in together.items() if first <= at < behind), None)
            if block is not None:  # before a single file, which may come from a process that was stopped
                entries = self._read(_together(*block))
                if len(entries) != TOGETHER:
                    raise LedgerBroken(
                        f"{self.folder / _together(*block)} has {len(entries)} entries, expected {TOGETHER}"
                    )
                found += entries[at - block[0] :]
            elif at in single:
                found += self._read(_single(at))
            else:
                return found, any(number > at for number in (*single, *together))

    def add(self, entry: Any) -> bool:
        """Decide entry number ``known``, and know it. False: another process has decided it already; ``news`` gives it."""
        number = self.known
        hidden = self._hidden([entry])
        try:
            os.link(hidden, self.folder / _single(number))
        except FileExistsError:
            return False
        except OSError as error:
            raise LedgerBroken(
                f"{self.folder}: {error}. A ledger needs a file system with hard links, as local disks and network mounts "
                "have; name a folder on one, which all workers reach, with ledger=..."
            ) from error
        finally:
            hidden.unlink(missing_ok=True)
        if any(first <= number < behind for first, behind in self._there()[1].items()):
            return False  # decided long ago, and put together with others: this process must have been stopped
        _to_disk(self.folder)
        self.known += 1
        if self.known % TOGETHER == 0 and self.known > _APART:
            self._put_together(self.known - _APART)
        return True

    def _put_together(self, before: int) -> None:
        """Put together all whole blocks of single entries before a number. Every process that does it writes the same."""
        single, _ = self._there()
        for first in sorted(single):
            block = range(first, first + TOGETHER)
            if first % TOGETHER == 0 and block[-1] < before and all(number in single for number in block):
                hidden = self._hidden([entry for number in block for entry in self._read(_single(number))])
                os.replace(hidden, self.folder / _together(first, first + TOGETHER))
                _to_disk(self.folder)
                for number in block:
                    (self.folder / _single(number)).unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the ledger, which is needed no more. A reader that is ending may write at this moment."""
        for _ in range(_LOOKS):
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                return

    def _there(self) -> tuple[set[int], dict[int, int]]:
        """Return the numbers of single entries; for entries put together, the first number with the number after the last."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return set(), {}
        except OSError as error:
            raise LedgerBroken(f"the ledger {self.folder} cannot be read: {error}") from error
        matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
        return (
            {int(match[1]) for match in matches if match[2] is None},
            {int(match[1]): int(match[2]) + 1 for match in matches if match[2] is not None},
        )

    def _read(self, name: str) -> list[Any]:
        path = self.folder / name
        for last in (False, True):
            try:
                return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            except FileNotFoundError as error:
                # The entry may have been put together with others a moment ago.
                match = _NAME.fullmatch(name)
                assert match is not None
                number = int(match[1])
                first = number - number % TOGETHER
                if last or match[2] is not None or not (self.folder / _together(first, first + TOGETHER)).exists():
                    raise LedgerBroken(f"{path} is gone: {error}") from error
                return self._read(_together(first, first + TOGETHER))[number - first : number - first + 1]
            except (OSError, ValueError) as error:
                raise LedgerBroken(f"{path} cannot be read: {error}") from error
        raise AssertionError

    def _hidden(self, entries: list[Any]) -> Path:
        """Write entries to disk under a name that no reader looks for. Their rows go out later, so a power failure must not lose
        them."""
        path = self.folder / f".{uuid.uuid4().hex}"
        try:
            # Later the folder exists, or was forgotten, and a reader that is ending must not bring it back.
            if not self.known:
                self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as out:
                out.writelines(json.dumps(entry) + "\n" for entry in entries)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise LedgerBroken(
                f"the ledger {self.folder} cannot be written: {error}. The workers need a folder that they may write to and "
                "that all of them reach; name one with ledger=..."
            ) from error
        return path


class HasLedger:
    """Base of readers that have a ledger (see ``flux.source`` for ``prepare`` and ``forget``). The folder ``ledgers`` has the
    ledgers of all queries; that of one query is named by an id that is settled at the query's first start. ``own``: the folder
    is there for ledgers alone."""

    def __init__(self, ledgers: str, own: bool = False) -> None:
        self.ledgers, self.own, self.id = ledgers, own, ""

    @property
    def ledger(self) -> Path:
        return Path(self.ledgers) / self.id

    def prepare(self, kept: Any) -> Any:
        self.id = str(uuid.uuid4()) if kept is None else str(kept["ledger"])
        return {"ledger": self.id}

    def forget(self) -> None:
        Ledger(self.ledger).forget()
        if self.own:
            try:
                os.rmdir(self.ledgers)
            except OSError:
                pass  # ledgers of other queries are in it, or it was never made


def ledger_folder(given: Any, what: str) -> str:
    asked = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(asked, str) or not asked or "://" in asked:
        raise UsageError(
            f"{what}: ledger must be the path of a folder on a disk or network mount that all workers reach, got {given!r}"
        )
    return os.path.abspath(os.path.expanduser(asked))


def _single(number: int) -> str:
    return f"{number:012}.json"


def _together(first: int, behind: int) -> str:
    return f"{first:012}-{behind - 1:012}.json"


def _to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
