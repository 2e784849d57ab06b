"""Where the user's code went wrong, in the user's own words: files and lines, without those of this project."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("flux")

#: Longer ones are cut in the middle: they travel in a message, and people read them.
TRACEBACK_CHARS_MAX = 8_000
_ROOT = str(Path(__file__).resolve().parents[2])
_OURS = tuple(
    os.path.join(_ROOT, package) + os.sep for package in ("flux", "partitioning", "controller", "spark_integration")
)


def user_traceback(error: BaseException) -> str:
    """As Python prints it, with its causes, but only the frames of others than this project. Empty where there are none:
    then the message says all."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    if not _keep_others(shown):
        return ""
    return shortened("".join(shown.format()).rstrip())


def shortened(text: str) -> str:
    if len(text) <= TRACEBACK_CHARS_MAX:
        return text
    half = TRACEBACK_CHARS_MAX // 2
    return f"{text[:half]}\n  ... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def _keep_others(shown: traceback.TracebackException | None) -> bool:
    """Whether any frame is left."""
    if shown is None:
        return False
    shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if not f.filename.startswith(_OURS)])
    chained = [shown.__cause__, shown.__context__, *(shown.exceptions or ())]
    return any([bool(shown.stack), *map(_keep_others, chained)])


def closed(what: str, close: Callable[[], Any], level: int = logging.WARNING) -> None:
    """Close something of the user's at the end of its life. What it raises is logged: nothing depends on it any more."""
    try:
        close()
    except BaseException as error:
        log.log(level, "%s: close() raised %s: %s\n%s", what, type(error).__name__, error, user_traceback(error))
