"""Tracebacks of wrong calls, as a program prints them that does not catch the error: without the frames of this project.

A ``UsageError`` is about a call of the user's, so the line of that call is the place to look at. The frames below
it, down to the check that failed, hide that line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[1])
#: Beginnings of the paths of this project's files.
OURS = tuple(
    os.path.join(_ROOT, package) + os.sep for package in ("flux", "partitioning", "controller", "spark_integration")
)

_before: Any = None  # the hook that was in place before, which prints


def print_shortened() -> None:
    """Have the interpreter print each ``UsageError`` without the frames of this project. To be called before one is raised; the
    hook that is in place then does the printing."""
    global _before
    if sys.excepthook is not _print:
        _before, sys.excepthook = sys.excepthook, _print


def _print(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    from flux.errors import UsageError

    if isinstance(error, UsageError):
        for each in _chain(error):
            each.__traceback__ = without_ours(each.__traceback__)
        traceback = error.__traceback__
    _before(kind, error, traceback)


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Return the frames outside this project alone, or all frames if there are none outside."""
    kept = []
    rest = traceback
    while rest is not None:
        if not rest.tb_frame.f_code.co_filename.startswith(OURS):
            kept.append(rest)
        rest = rest.tb_next
    if not kept:
        return traceback
    made: TracebackType | None = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and the errors that led to it, each once."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and not any(each is known for known in found):
            found.append(each)
            waiting += [each.__cause__, each.__context__]
    return found
