"""Text about the user's code and objects: errors with their files and lines, without the frames of this project. And facts about
functions that users give: their names, the arguments that they take, and whether they return anything.

Nothing here raises, and every text can be encoded as UTF-8. An exception whose ``__str__`` raises, or half of a surrogate in a
file name of ``os.fsdecode``, must not turn the report of an error into an error of its own: the thread that reports would end,
and the query would wait for its report for ever.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import operator
import sys
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

from flux.tracebacks import OURS

log = logging.getLogger("flux")

#: Longer texts are cut in the middle: they travel in a message, and people read them.
TRACEBACK_CHARS_MAX = 8_000


def encodable(text: str) -> str:
    """Return the text with each half of a surrogate written as an escape, such as ``\\udcff``: UTF-8 has no bytes for it."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def text_of(value: Any, render: Callable[[Any], str] = str) -> str:
    """Return the text that ``render``, ``str`` or ``repr``, makes of an object of the user's. If it raises, say so instead."""
    try:
        return encodable(render(value))
    except BaseException as error:  # an error of the user's code, also sys.exit()
        return f"<no text: {render.__name__}() of this {type(value).__name__} raised {type(error).__name__}>"


def described(error: BaseException) -> str:
    """Return type and text of an exception, as the last line of a traceback has them."""
    return f"{type(error).__name__}: {shortened(text_of(error))}"


def user_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, with its causes, but without the frames of this project. Empty if no frames are
    left: then the message says all."""
    try:
        shown = traceback.TracebackException.from_exception(error, compact=True)
        if not _keep_others(shown):
            return ""
        return shortened(encodable("".join(shown.format()).rstrip()))
    except BaseException as failed:  # a chain of causes that is too deep, or attributes of the user's that raise
        return f"<no traceback: formatting it raised {type(failed).__name__}>"


def raised_by_user(error: BaseException) -> bool:
    """Return whether a frame outside this project was on the way of the exception, its causes aside."""
    return any(not frame.filename.startswith(OURS) for frame in traceback.extract_tb(error.__traceback__))


def shortened(text: str) -> str:
    if len(text) <= TRACEBACK_CHARS_MAX:
        return text
    half = TRACEBACK_CHARS_MAX // 2
    return f"{text[:half]}\n  ... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def _keep_others(shown: traceback.TracebackException | None) -> bool:
    """Remove the frames of this project, also from the causes. Return whether any frame is left."""
    if shown is None:
        return False
    shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if not f.filename.startswith(OURS)])
    chained = [shown.__cause__, shown.__context__, *(shown.exceptions or ())]
    return any([bool(shown.stack), *map(_keep_others, chained)])


def closed(what: str, close: Callable[[], Any], level: int = logging.WARNING) -> None:
    """Close something of the user's at the end of its life. An error is logged: nothing depends on the object any more."""
    try:
        close()
    except BaseException as error:
        log.log(level, "%s: close() raised %s\n%s", what, described(error), user_traceback(error))


# ---- functions


def named(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function; None: it is unknown, as for some functions that are written in C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def takes(signature: inspect.Signature, arguments: int) -> bool:
    """Return whether a function can be called with this number of arguments."""
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def gives_nothing(function: Any) -> bool:
    """Return whether a function certainly returns None from each call: it has no ``return`` with a value, and no ``yield``. A
    function that always raises is not among them."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):  # a method has the code of its function
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and not code.co_flags & _GIVES_LATER and _only_none(code)


@functools.lru_cache(1000)  # each method of a flow that is being written compiles all stages again
def _only_none(code: CodeType) -> bool:
    """Return whether each return of a function is one of None."""
    found = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "NOP")]
    returns = [at for at, each in enumerate(found) if each.opname in ("RETURN_VALUE", "RETURN_CONST")]
    return bool(returns) and all(_is_none(found, at) for at in returns)


#: Flags of code that gives its values later: generators and coroutines.
_GIVES_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_none(found: list[dis.Instruction], at: int) -> bool:
    """Return whether a return instruction returns None in any case, whichever instructions came before."""
    if found[at].opname == "RETURN_CONST":
        return found[at].argval is None
    before = found[at - 1]
    return before.opname == "LOAD_CONST" and before.argval is None and not found[at].is_jump_target


def importable(made: Any) -> bool:
    """Return whether another process finds this very object by module and name."""
    name = str(made.__module__)
    by_value: set[str] = set()
    for pickler in ("cloudpickle", "pyspark.cloudpickle"):
        listed = getattr(sys.modules.get(pickler), "list_registry_pickle_by_value", set)
        by_value |= listed()
    if name == "__main__" or any(name == shipped or name.startswith(f"{shipped}.") for shipped in by_value):
        return False
    try:
        return operator.attrgetter(made.__qualname__)(sys.modules.get(name)) is made
    except AttributeError:
        return False
