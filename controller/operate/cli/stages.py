"""Commands about the plan of a running query: its versions, and stages that come and go."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from controller.operate.cli import tables
from controller.operate.cli.change import finish
from controller.operate.cli.options import Invocation, changes, shows
from controller.operate.cli.output import document, plain, show
from controller.operate.requests import Accepted, AddFlow, GetPlanStatus, PlanStatus, RemoveStage, RestartStage, Status


@shows
def plan(call: Invocation) -> None:
    """Show the plan of a query: stages and sources with the version that brought them, versions, and stages that have failed."""
    answer = call.client.ask(GetPlanStatus(), PlanStatus)
    if call.as_json:
        document(plain(answer))
        return
    show(_parts(answer), *_versions(answer), *_failed(answer))
    for change in answer.changes:
        show(f"under way: {change}")


def _parts(answer: PlanStatus) -> Group:
    made = tables.table("stage or source", ">since version", "state", "~reads")
    failed = {each.stage for each in answer.failed}
    for part in answer.parts:
        state = "FAILED" if part.name in failed else "source" if part.source else "running"
        made.add_row(part.name, str(part.since), state, ", ".join(part.reads))
    there = {part.name for part in answer.parts}
    for stage in answer.failed:
        if stage.stage not in there:
            made.add_row(stage.stage, "", "FAILED", "")
    sealed = ", sealed: it takes no additions" if answer.sealed else ""
    return Group(Text(f"version {answer.version}{sealed}", style="bold"), made)


def _versions(answer: PlanStatus) -> list[Any]:
    if not answer.versions:
        return []
    made = tables.table(">version", "since", "~added", "~removed")
    for each in answer.versions:
        at = tables.moment(each.at) if each.at else "beginning"
        made.add_row(str(each.version), at, ", ".join(each.added), ", ".join(each.removed))
    return ["", made]


def _failed(answer: PlanStatus) -> list[Any]:
    shown: list[Any] = []
    for each in answer.failed:
        because = "" if each.because_of == each.stage else f", because {each.because_of} has failed"
        shown += ["", Text(f"{each.stage} FAILED at {tables.moment(each.at)}{because}", style="bold red")]
        if each.because_of == each.stage:
            shown += [text for text in (each.error, each.traceback) if text]
    return shown


@changes(timeout=60)
def add(
    call: Invocation,
    flow: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FLOW",
            help="A flow in a module that the program of the query can import, or a function of the query that returns one.",
        ),
    ],
) -> None:
    """Add a flow to a running query: its program imports the module, and each process confirms."""
    request = call.client.ask(AddFlow(target=flow), Accepted).request
    finish(call, f"adding {flow}", request, lambda status: f"{flow} is added: {_version(status)}")


@changes(timeout=60)
def remove(
    call: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the stage or source, as in flux plan.")],
    cascade: Annotated[bool, typer.Option("--cascade", help="With all stages that depend on it.")] = False,
) -> None:
    """Remove a stage or a source from a running query, or a stage that has failed from the list."""
    request = call.client.ask(RemoveStage(name=name, cascade=cascade), Accepted).request
    finish(call, f"removing {name}", request, lambda status: f"{name} is removed: {_version(status)}")


@changes(timeout=60)
def restart(
    call: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a stage that has failed, as in flux plan.")],
) -> None:
    """Begin a failed stage anew, empty, with the rows from now on, and the stages that depended on it."""
    request = call.client.ask(RestartStage(name=name), Accepted).request
    finish(call, f"restarting {name}", request, lambda status: f"{name} begins anew: {_version(status)}")


def _version(status: Status) -> str:
    return f"version {status.plan} of the plan"
