"""Options that commands share, each defined once, and the decorators that add them to a command.

A command takes an ``Invocation`` first, then its own options. The shared options follow these, and are in the ``Invocation``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from controller.operate.cli.output import outcome
from controller.operate.client import QueryClient, choose
from flux.errors import UsageError

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
class Invocation:
    """One use of a command: the conversation with the chosen query, and the values of the shared options."""

    client: QueryClient
    #: Print one JSON document instead of tables.
    as_json: bool
    #: Wait until the change is done.
    wait: bool = True
    #: Longest wait, in seconds.
    timeout: float = 0.0
    #: The change is confirmed already.
    yes: bool = False


Command = Callable[..., None]


def shows(command: Command) -> Command:
    """Declare a command that changes nothing."""
    return _with_options(command, query=(Query, None), query_option=(QueryOption, None), as_json=(Json, False))


def changes(query: Any = QueryOption, timeout: float = 600, confirmed: bool = False) -> Callable[[Command], Command]:
    """Declare a command that changes a query.

    ``query`` is the argument or option that names the query, and every command has the option; ``timeout`` the default wait, in
    seconds; ``confirmed`` adds ``--yes`` to a command that asks for confirmation."""
    yes = {"yes": (Yes, False)} if confirmed else {}
    named = {"query": (query, None)} | ({} if query is QueryOption else {"query_option": (QueryOption, None)})

    def decorate(command: Command) -> Command:
        return _with_options(
            command, **named, **yes, wait=(Wait, True), timeout=(Timeout, timeout), as_json=(Json, False)
        )

    return decorate


def _one(names: set[str]) -> str | None:
    """Return the name of the query, None if none was given. UsageError for two different ones."""
    if len(names) > 1:
        raise UsageError(f"two queries are named, {' and '.join(sorted(names))}: give one, as the argument or with -q")
    return next(iter(names), None)


def _with_options(command: Command, **shared: tuple[Any, Any]) -> Command:
    """Add shared options, given by name with type and default, behind the command's own."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        said = {name: given.pop(name) for name in shared}
        names = {said.pop("query"), said.pop("query_option", None)} - {None}
        with outcome(said["as_json"]), QueryClient(choose(_one(names))) as client:
            command(Invocation(client, **said), **given)

    # Typer makes the command line from the signature. Types are resolved here, where the names of the command's module are known.
    types = get_type_hints(command, include_extras=True)
    _, *own = inspect.signature(command).parameters.values()
    parameters = [parameter.replace(annotation=types[parameter.name]) for parameter in own]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters += [inspect.Parameter(n, kind, default=d, annotation=t) for n, (t, d) in shared.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
