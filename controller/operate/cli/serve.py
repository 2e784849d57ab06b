"""Commands at the location of a service: the service itself, and the end of a reader that does not come back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import flux
from controller.operate.cli.gateways import Location, WebhooksTo
from controller.operate.cli.output import outcome, show
from flux.errors import UsageError


def serve(
    location: Annotated[
        str | None,
        typer.Option(
            "--location", help="Directory or URI of everything that lasts. Default: a folder that ends with it."
        ),
    ] = None,
    http: Annotated[
        str, typer.Option("--http", metavar="HOST:PORT", help="Port of the first gateway; others have the next ones.")
    ] = "127.0.0.1:8080",
    gateways: Annotated[int, typer.Option("--gateways", min=1, max=64, help="Processes that speak HTTP.")] = 1,
    master: Annotated[
        str, typer.Option("--master", help="Master of Spark, as in local[4,1000] or spark://host:7077.")
    ] = "local[4,1000]",
    workers: Annotated[int, typer.Option("--workers", min=0, max=4096, help="Workers; 0: one for each task slot.")] = 0,
    replicas: Annotated[int, typer.Option("--replicas", min=1, max=3, help="Replicas of each partition.")] = 1,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="MODULE:NAME", help="Operator that a registration may name; several times."),
    ] = None,
    queries_max: Annotated[int, typer.Option("--max-queries", min=1, help="Queries that may be registered.")] = 1000,
    state_bytes: Annotated[
        int,
        typer.Option(
            "--state-bytes", min=0, help="State of all queries; at twice as much the largest fails. 0: no bound."
        ),
    ] = 0,
    give_up: Annotated[
        list[str] | None,
        typer.Option(
            "--give-up", metavar="STREAM", help="Stream whose log is damaged: its queries are FAILED; several times."
        ),
    ] = None,
    certificate: Annotated[Path | None, typer.Option("--certificate", help="TLS: file with the certificates.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="TLS: file with the private key.")] = None,
    webhooks_to: WebhooksTo = None,
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="Setting of Spark or of spark.flux.*; several times."),
    ] = None,
) -> None:
    """Run a service: streams, queries in SQL and their results over HTTP, until SIGTERM or Ctrl-C."""
    with outcome(False):
        from flux.gateway.serve import http_options
        from flux.gateway.webhooks.target import networks_of

        settings = dict(map(_setting, conf or []))
        http_options(http, certificate, key)
        networks_of(webhooks_to or ())
        more = [word for network in webhooks_to or () for word in ("--webhooks-to", network)]
        if certificate is not None:  # gateways pass pushes on to each other, too
            more += ["--certificate", str(certificate), "--key", str(key), "--trust", str(certificate)]
        flux._run_service(
            master, settings, location, http, gateways, tuple(allow or ()), tuple(more), queries_max,
            tuple(give_up or ()), {"workers": workers, "replicas": replicas, "state_bytes": state_bytes},
        )  # fmt: skip


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--conf: expected KEY=VALUE, got {text!r:.100}")
    return key, value


def forget(
    stream: Annotated[str, typer.Argument(help="Stream that it reads.")],
    reader: Annotated[str, typer.Argument(help="Reader, as flux streams lists it.")],
    location: Location,
) -> None:
    """Forget a query that reads a stream and does not come back: its events are kept for it no longer."""
    from flux.eventlog.streams import ReaderPositions, StreamCatalogue
    from flux.registry.query_catalogue import QueryCatalogue, served_queries
    from flux.vault.location import there

    with outcome(False):
        place = there(location)
        catalogue = StreamCatalogue(place)
        positions = ReaderPositions(catalogue.readers_place(catalogue.get(stream)))
        known = positions.names()
        if reader not in known:
            raise UsageError(f"stream {stream!r} has no reader {reader!r:.200}; it has {', '.join(known) or 'none'}")
        if served := served_queries(reader, stream, QueryCatalogue(place).all()):
            raise UsageError(
                f"the service reads stream {stream!r} for {', '.join(served[:10])}: remove these queries first"
            )
        positions.forget(reader)
        show(f"{reader} is forgotten")
