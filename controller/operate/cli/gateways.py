"""Commands around gateways: one that runs a gateway, its tokens, and a client's streams and pushes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from controller.operate.cli.output import document, outcome, show
from flux.errors import UsageError

Location = Annotated[str, typer.Option("--location", help="Directory or URI of the streams; gateways share it.")]
Url = Annotated[
    str, typer.Option("--url", envvar="FLUX_GATEWAY", help="Address of a gateway, or several with commas between.")
]
Token = Annotated[str, typer.Option("--token", envvar="FLUX_TOKEN", help="Token; better in the environment.")]
WebhooksTo = Annotated[
    list[str] | None,
    typer.Option("--webhooks-to", metavar="NETWORK", help="Private network that webhooks may reach; several times."),
]
LOCAL = "http://127.0.0.1:8080"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def gateway(
    location: Location,
    http: Annotated[str, typer.Option("--http", metavar="HOST:PORT", help="Port to listen on.")] = "127.0.0.1:8080",
    address: Annotated[
        str | None, typer.Option("--address", help="URL under which clients reach it, if it is not that of the port.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option("--certificate", help="TLS: file with the certificates.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="TLS: file with the private key.")] = None,
    trust: Annotated[
        Path | None, typer.Option("--trust", help="TLS: file with the certificates of other gateways to trust.")
    ] = None,
    webhooks_to: WebhooksTo = None,
    attached: Annotated[bool, typer.Option("--attached", hidden=True, help="End when standard input ends.")] = False,
) -> None:
    """Run a gateway: it takes events over HTTP and answers when they are on disk."""
    from flux.gateway.serve import http_options, run

    with outcome(False):
        run(location, http_options(http, certificate, key, address, trust), attached, webhooks_to or ())


def token(
    location: Location,
    right: Annotated[
        list[str] | None, typer.Option("--right", help="push, read, query or admin; several times.")
    ] = None,
    stream: Annotated[
        list[str] | None, typer.Option("--stream", help="Stream it is for; several times. Default: all.")
    ] = None,
    events_per_s: Annotated[
        int, typer.Option("--events-per-s", min=0, help="Events that it may push in a second at a gateway; 0: any.")
    ] = 0,
    bytes_per_s: Annotated[
        int, typer.Option("--bytes-per-s", min=0, help="Bytes that it may push in a second at a gateway; 0: any.")
    ] = 0,
    revoke: Annotated[str | None, typer.Option("--revoke", metavar="ID", help="Forget the token with this id.")] = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it once, list tokens (without --right), or revoke one."""
    from flux.gateway.tokens import TokenRegister
    from flux.vault.location import place_of

    with outcome(as_json):
        register = TokenRegister(place_of(location, "location"))
        if revoke is not None:
            register.revoke(revoke)
        elif right:
            made = register.make(right, stream or ["*"], events_per_s, bytes_per_s)  # type: ignore[arg-type]
            if as_json:
                document({"token": made})
            else:
                print(made)
        else:
            grants = register.all()
            if as_json:
                document([{"id": each.id, "rights": each.rights, "streams": each.streams} for each in grants])
                return
            table = Table("token", "rights", "streams")
            for each in grants:
                table.add_row(each.id, ", ".join(each.rights), ", ".join(each.streams))
            show(table)


def streams(
    url: Url = LOCAL,
    token: Token = "",
    register: Annotated[str | None, typer.Option("--register", metavar="NAME", help="Register a stream.")] = None,
    schema: Annotated[str, typer.Option("--schema", help="With --register: columns in DDL.")] = "infer",
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="Remove a stream and its events.")
    ] = None,
    cascade: Annotated[bool, typer.Option("--cascade", help="With --remove: also if queries read it.")] = False,
    as_json: Json = False,
) -> None:
    """List the streams of a gateway, register one, or remove one."""
    with outcome(as_json), client_of(url, token) as client:
        if register is not None:
            client.register_stream(register, schema)
        if remove is not None:
            client.remove_stream(remove, cascade)
        found = client.streams()
        if as_json:
            document(found)
            return
        table = Table("stream", "columns", "time", "partitions", "retain", "read by")
        for each in found:
            retain = f"{each['retain']['time']}, {each['retain']['bytes']:,} bytes"
            table.add_row(
                each["name"], each["schema"], each["time"] or "of arrival", str(each["partitions"]), retain,
                ", ".join(each["readers"]),
            )  # fmt: skip
        show(table)


def verify(location: Location, as_json: Json = False) -> None:
    """Read all events of all streams at a location, and name damaged logs."""
    from flux.eventlog.verification import verified
    from flux.vault.location import there

    with outcome(as_json):
        found = verified(there(location))
        if as_json:
            document([each._asdict() for each in found])
        else:
            table = Table("stream", "log", "first", "next", "bytes", "damage")
            for each in found:
                table.add_row(
                    each.stream, str(each.log), f"{each.first:,}", f"{each.next:,}", f"{each.bytes:,}", each.damage
                )
            show(table)
    if any(each.damage for each in found):
        raise typer.Exit(1)


#: Bytes of lines that go into one request.
_REQUEST_BYTES = 1 << 20


def push(
    stream: Annotated[str, typer.Argument(help="Stream to push to.")],
    file: Annotated[str, typer.Argument(help="File with one JSON object a line; - is standard input.")] = "-",
    url: Url = LOCAL,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Push lines of JSON to a stream; each line counts once, whatever gateway fails meanwhile."""
    with outcome(as_json), client_of(url, token) as client:
        pushed = requests = 0
        try:
            source = sys.stdin.buffer if file == "-" else open(file, "rb")  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from error
        with source:
            while lines := source.readlines(_REQUEST_BYTES):
                body = b"".join(lines)
                if not body.strip():
                    continue
                pushed += client.push_events(stream, body)["rows"]
                requests += 1
        if as_json:
            document({"stream": stream, "rows": pushed, "requests": requests})
        else:
            events, of_requests = ("event" if pushed == 1 else "events"), ("request" if requests == 1 else "requests")
            show(f"{pushed:,} {events} in {requests:,} {of_requests} on disk")


def client_of(url: str, token: str) -> Any:
    """Return a client of the gateways of a command. UsageError: there is no token."""
    from flux.client import Client

    if not token:
        raise UsageError("a token is needed: --token, or FLUX_TOKEN in the environment; flux token makes one")
    return Client([each.strip() for each in url.split(",")], token)
