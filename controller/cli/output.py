"""What all commands print alike: tables for people on stdout, one JSON document instead with --json, errors and progress
on stderr, and exit codes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, RenderableType

from controller.client import RequestRefused
from flux.errors import FluxError, Unreachable, UsageError

REFUSED, USAGE, UNREACHABLE = 1, 2, 3
#: Of what is not a terminal: no line of a table is broken, so that it can be searched.
WIDE = 200

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Query = Annotated[
    str | None,
    typer.Argument(
        metavar="[QUERY]", show_default=False, help="Name, id or beginning of the id; needed if several are running."
    ),
]
QueryOption = Annotated[
    str | None,
    typer.Option("--query", "-q", show_default=False, help="Name, id or beginning of the id, if several are running."),
]


def console(stderr: bool = False) -> Console:
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE)


def show(*parts: RenderableType) -> None:
    console().print(*parts, sep="\n")


def plain(answer: msgspec.Struct) -> dict[str, Any]:
    """An answer without what belongs to the wire."""
    fields: dict[str, Any] = msgspec.to_builtins(answer)
    return {key: value for key, value in fields.items() if key not in ("type", "number")}


def document(content: Any) -> None:
    print(json.dumps(content))


@contextmanager
def outcome(as_json: bool) -> Iterator[None]:
    """Errors of ours become one line on stderr (with --json a document as well) and the exit code."""
    try:
        yield
    except FluxError as error:
        code, kind = _meaning(error)
        print(f"flux: {error}", file=sys.stderr)
        if as_json:
            document({"error": {"kind": kind, "message": str(error)}})
        raise typer.Exit(code) from None


def _meaning(error: FluxError) -> tuple[int, str]:
    match error:
        case Unreachable():
            return UNREACHABLE, "unreachable"
        case UsageError():
            return USAGE, "usage"
        case RequestRefused():
            return REFUSED, "refused"
    return REFUSED, "failed"
