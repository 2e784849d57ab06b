"""Files of the modules that the program has imported: an addition from a file that has changed since is refused (design:
additions).

Program and workers import a module once, and keep it. Behind a changed file they would run the old code, and a worker that starts
later the new one, so that replicas of one partition would differ.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable

from flux.errors import UsageError


class ModuleHasChanged(UsageError):
    """Refusal of an addition from a file that has changed since its import. ``module`` is the name of the module."""

    def __init__(self, module: str, message: str) -> None:
        super().__init__(message)
        self.module = module


#: By module, its file and the digest of it when the module was first seen here; all queries of a program share its modules.
_seen: dict[str, tuple[str, bytes]] = {}
#: The number of modules, and the name of the newest one, at the last call of ``note_imported``.
_noted: tuple[int, str] = (0, "")


def note_imported() -> None:
    """Note the files of modules that are new since the last call, but for installed packages and the standard library."""
    global _noted
    now = len(sys.modules), next(reversed(sys.modules))
    if now == _noted:
        return
    _noted = now
    paths = sysconfig.get_paths()
    installed = tuple(paths[kind] + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in _seen or not isinstance(file, str) or file.startswith(installed) or name == "__main__":
            continue
        digest = _digest(file)
        if digest is not None:
            _seen[name] = file, digest


def check_unchanged(names: Iterable[str], what: str) -> None:
    """Raise ModuleHasChanged if the file of one of these modules is another one than when the module was noted. Other names are
    passed over."""
    for name in sorted(_seen.keys() & set(names)):
        file, digest = _seen[name]
        if _digest(file) != digest:
            raise ModuleHasChanged(
                name,
                f"{what}: {file} has changed since module {name} was imported. Program and workers keep the module as it was, "
                "and a worker that starts later would import the new one. Put the new code into a module of another name and "
                f"leave {name} as it was, or start the query anew in a new program",
            )


def _digest(file: str) -> bytes | None:
    """Return a digest of a file; None: there is no such file, as of a module within an archive."""
    try:
        with open(file, "rb") as read:
            return hashlib.file_digest(read, "sha256").digest()
    except OSError:
        return None
