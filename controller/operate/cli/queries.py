"""Commands of a client of ``flux serve``: registered queries, their results, and webhooks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from controller.operate.cli.gateways import LOCAL, Json, Token, Url, client_of
from controller.operate.cli.output import document, outcome, show
from flux.client.result_news import CorrectedResults, FollowedNews, ResultRows, TentativeResults, UndoneResults
from flux.errors import UsageError


def queries(
    url: Url = LOCAL,
    token: Token = "",
    register: Annotated[str | None, typer.Option("--register", metavar="NAME", help="Register a query.")] = None,
    sql: Annotated[
        str | None, typer.Option("--sql", help="With --register: its text, or a file with it; - is standard input.")
    ] = None,
    partitions: Annotated[int, typer.Option("--partitions", min=1, help="With --register: its partitions.")] = 1,
    availability: Annotated[
        str, typer.Option("--availability", help="With --register: tentative results within this time, as 3s.")
    ] = "",
    restart: Annotated[
        str | None,
        typer.Option("--restart", metavar="NAME", help="Start a query that has failed again, with empty state."),
    ] = None,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="Remove a query with its state and result.")
    ] = None,
    cascade: Annotated[bool, typer.Option("--cascade", help="With --remove: and all that reads it.")] = False,
    as_json: Json = False,
) -> None:
    """List the registered queries of a service, register one, start one again that has failed, or remove one."""
    with outcome(as_json), client_of(url, token) as client:
        if register is not None:
            more = {"availability": availability} if availability else {}
            client.register_query(register, _text(sql), partitions=partitions, **more)
        elif sql is not None or availability:
            raise UsageError(f"--{'sql' if sql is not None else 'availability'} belongs to --register NAME")
        if restart is not None:
            client.restart_query(restart)
        if remove is not None:
            client.remove_query(remove, cascade)
        found = client.queries()
        if as_json:
            document(found)
            return
        table = Table("query", "status", "reads", "columns", "text")
        for each in found:
            status = each["status"] + (f": {each['error']}" if each.get("error") else "")
            table.add_row(
                each["name"], status, ", ".join(each["reads"]), each["schema"], each.get("sql") or each.get("operator"),
            )  # fmt: skip
        show(table)


def _text(given: str | None) -> str:
    """Return the text of ``--sql``: itself, the content of a file, or the standard input."""
    if not given:
        raise UsageError("--register: its text is missing; --sql 'SELECT ...', --sql FILE, or --sql -")
    if given == "-":
        return sys.stdin.read()
    if given.split(maxsplit=1)[0].upper() in ("SELECT", "WITH", "FROM", "TABLE"):
        return given
    try:
        return Path(given).read_text()
    except OSError as error:
        raise UsageError(f"--sql: expected a SELECT or a file with one; {given:.100}: {error.strerror}") from error


def tail(
    query: Annotated[str, typer.Argument(help="Query or stream of results to follow.")],
    url: Url = LOCAL,
    token: Token = "",
    after: Annotated[str | None, typer.Option("--after", metavar="CURSOR", help="Begin behind this cursor.")] = None,
    limit: Annotated[int | None, typer.Option("--rows", min=1, help="End after this number of rows.")] = None,
    cursors: Annotated[
        bool, typer.Option("--cursors", help="Print the cursor behind each piece to standard error.")
    ] = False,
    tentative: Annotated[
        bool, typer.Option("--tentative", help="With results that may still change: each line has a kind.")
    ] = False,
) -> None:
    """Print rows of a result as they come, each as a line of JSON, until Ctrl-C. With --tentative a line has the kind "row",
    "tentative", "undo" or "corrected"."""
    with outcome(False), client_of(url, token) as client:
        printed = 0
        following = client.follow(query, after, tentative=True) if tentative else client.follow(query, after)
        for news in following:
            if not isinstance(news, ResultRows):
                _print(_lines(news))
                continue
            for gone in news.missed:
                rest = f"rows {gone['first']:,} to {gone['next'] - 1:,} of partition {gone['partition']}"
                print(f"flux: {rest} were removed before they were read", file=sys.stderr, flush=True)
            wanted = news.rows if limit is None else news.rows[: limit - printed]
            _print([{"kind": "row", "row": row} for row in wanted] if tentative else wanted)
            if cursors and news.rows:
                print(news.cursor, file=sys.stderr, flush=True)
            printed += len(wanted)
            if printed == limit:
                return


def _print(lines: Iterable[Any]) -> None:
    sys.stdout.write("".join(f"{json.dumps(line)}\n" for line in lines))
    sys.stdout.flush()


def _lines(news: FollowedNews) -> list[dict[str, Any]]:
    """Return news about tentative rows as the content of lines."""
    if isinstance(news, TentativeResults):
        about = {"partition": news.partition, "through": _text_of(news.through)}
        return [{"kind": "tentative", **about, "row": row} for row in news.rows]
    if isinstance(news, UndoneResults):
        return [{"kind": "undo", "partition": news.partition, "start": _text_of(news.start), "end": _text_of(news.end)}]
    if isinstance(news, CorrectedResults):
        return [{"kind": "corrected", "partition": news.partition, "through": _text_of(news.through)}]
    raise AssertionError("stable rows have lines of their own")


def _text_of(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def outputs(
    url: Url = LOCAL,
    token: Token = "",
    register: Annotated[str | None, typer.Option("--register", metavar="NAME", help="Register a webhook.")] = None,
    query: Annotated[str | None, typer.Option("--query", help="With --register: the query whose rows it gets.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="URL", help="With --register: the receiver.")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="NAME", help="Let a webhook go on that is paused.")
    ] = None,
    remove: Annotated[str | None, typer.Option("--remove", metavar="NAME", help="Remove a webhook.")] = None,
    as_json: Json = False,
) -> None:
    """List the webhooks of a service, register one, let one go on, or remove one."""
    with outcome(as_json), client_of(url, token) as client:
        if register is not None:
            if query is None or to is None:
                raise UsageError("--register NAME: --query NAME and --to URL belong to it, and one of them is missing")
            made = client.register_output(register, query, to)
            if as_json:
                document(made)
                return
            if made.get("secret"):
                show(f"its secret, which is not shown again: {made['secret']}")
        if resume is not None:
            client.resume_output(resume)
        if remove is not None:
            client.remove_output(remove)
        found = client.outputs()
        if as_json:
            document(found)
            return
        table = Table("webhook", "query", "receiver", "status", "delivery")
        for each in found:
            status = each["status"] + (f": {each['error']}" if each.get("error") else "")
            table.add_row(each["name"], each["query"], each["url"], status, f"{each['delivery']:,}")
        show(table)
