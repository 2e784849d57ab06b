"""Output that all commands share: tables for people on stdout, or one JSON document with --json; errors and progress on stderr;
exit codes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
import typer.core
from rich.console import Console, RenderableType

from controller.operate.client import RequestRefused
from flux.errors import FluxError, Unreachable, UsageError

REFUSED, USAGE, UNREACHABLE = 1, 2, 3
#: Base of everything that the parser of the command line refuses.
_BadUsage: Any = typer.BadParameter.__base__
#: Width of the output if it goes to no terminal: no line of a table is broken, so that the output can be searched.
WIDE = 200


def console(stderr: bool = False) -> Console:
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE)


def show(*parts: RenderableType) -> None:
    console().print(*parts, sep="\n")


def plain(answer: msgspec.Struct) -> dict[str, Any]:
    """Convert an answer to a dict, without the fields that belong to the wire."""
    fields: dict[str, Any] = msgspec.to_builtins(answer)
    return {key: value for key, value in fields.items() if key not in ("type", "number")}


def document(content: Any) -> None:
    print(json.dumps(content))


@contextmanager
def outcome(as_json: bool) -> Iterator[None]:
    """Turn an error of Flux into one line on stderr (with --json also a document) and an exit code."""
    try:
        yield
    except FluxError as error:
        code, kind = _meaning(error)
        print(f"flux: {error}", file=sys.stderr)
        if as_json:
            document({"error": {"kind": kind, "message": str(error)}})
        raise typer.Exit(code) from None


class Commands(typer.core.TyperGroup):
    """The root of all commands. With --json, arguments that do not parse give a document, too."""

    _as_json = False

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        self._as_json = "--json" in args
        with self._usage():
            return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: Any) -> Any:
        with self._usage():
            return super().invoke(ctx)

    @contextmanager
    def _usage(self) -> Iterator[None]:
        try:
            yield
        except _BadUsage as error:
            if self._as_json:
                document({"error": {"kind": "usage", "message": error.format_message()}})
            raise  # typer prints the same on stderr, and ends with 2


def _meaning(error: FluxError) -> tuple[int, str]:
    match error:
        case Unreachable():
            return UNREACHABLE, "unreachable"
        case UsageError():
            return USAGE, "usage"
        case RequestRefused():
            return REFUSED, "refused"
    return REFUSED, "failed"
