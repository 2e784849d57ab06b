"""Functions that users give: their names, the arguments that they take, and whether they return anything."""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType
from typing import Any


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
