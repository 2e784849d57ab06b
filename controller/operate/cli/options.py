"""The options that commands share, each said once, and the decorators by which a command gets them.

A command takes a ``Call`` first, then the options of its own; the shared ones come behind them, and are in the ``Call``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from controller.operate.cli.output import outcome
from controller.operate.client import Client, choose

_NAMED: dict[str, Any] = {
    "show_default": False,
    "help": "Name, id or beginning of the id; needed if several queries run.",
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Query = Annotated[str | None, typer.Argument(metavar="QUERY", **_NAMED)]
QueryOption = Annotated[str | None, typer.Option("--query", "-q", **_NAMED)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the change is done.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Longest wait in seconds; the change goes on after that.")]


@dataclass(frozen=True)
class Call:
    """The conversation with the query that is meant, and what the shared options say: in which form the outcome is
    reported; of a change, whether to wait for its end, for how long, and whether it is confirmed already."""

    client: Client
    as_json: bool
    wait: bool = True
    timeout: float = 0.0
    yes: bool = False


Command = Callable[..., None]


def shows(command: Command) -> Command:
    """A command that changes nothing."""
    return _with_options(command, query=(Query, None), as_json=(Json, False))


def changes(query: Any = QueryOption, timeout: float = 600, confirmed: bool = False) -> Callable[[Command], Command]:
    """A command that changes something. ``query``: how the query is named; ``timeout``: the default, in seconds;
    ``confirmed``: it asks first, and ``--yes`` says so beforehand."""
    yes = {"yes": (Yes, False)} if confirmed else {}

    def decorate(command: Command) -> Command:
        return _with_options(
            command, query=(query, None), **yes, wait=(Wait, True), timeout=(Timeout, timeout), as_json=(Json, False)
        )

    return decorate


def _with_options(command: Command, **shared: tuple[Any, Any]) -> Command:
    """``shared``: the type and the default of each option, by name."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        said = {name: given.pop(name) for name in shared}
        query = said.pop("query")
        with outcome(said["as_json"]), Client(choose(query)) as client:
            command(Call(client, **said), **given)

    # The command line is made from the signature; types are resolved here, where those of the command are known.
    types = get_type_hints(command, include_extras=True)
    _, *own = inspect.signature(command).parameters.values()
    parameters = [parameter.replace(annotation=types[parameter.name]) for parameter in own]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters += [inspect.Parameter(n, kind, default=d, annotation=t) for n, (t, d) in shared.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
