"""Documents that a location has lost: an error that says so, and no empty location."""

from __future__ import annotations

from pathlib import Path

import pytest

from flux.errors import QueryFailed
from flux.eventlog.streams import NoSuchStream, StreamCatalogue, StreamDefinition
from flux.gateway.serve import http_options, run
from flux.registry.definitions import PLAN
from flux.registry.query_catalogue import QueryCatalogue
from flux.vault.location import Folder


def registered(folder: Path) -> StreamCatalogue:
    folder.chmod(0o700)
    streams = StreamCatalogue(Folder(folder))
    streams.register(StreamDefinition(name="clicks", schema="n BIGINT"))
    return streams


def test_streams_without_their_document_are_an_error(tmp_path: Path) -> None:
    streams = registered(tmp_path)
    kept = (tmp_path / "streams.json").read_bytes()
    (tmp_path / "streams.json").unlink()
    for ask in (
        streams.all,
        lambda: streams.get("clicks"),
        lambda: streams.register(StreamDefinition(name="b", schema="n INT")),
    ):
        with pytest.raises(
            QueryFailed, match=r"streams\.json is missing, .* has lost it. Restore streams\.json from a copy"
        ):
            ask()
    (tmp_path / "streams.json").write_bytes(kept)
    assert list(streams.all()) == ["clicks"]


def test_a_gateway_does_not_begin_without_them(tmp_path: Path) -> None:
    registered(tmp_path)
    (tmp_path / "streams.json").unlink()
    with pytest.raises(QueryFailed, match=r"streams\.json is missing"):
        run(str(tmp_path), http_options("127.0.0.1:1"))


def test_a_plan_without_its_registry_is_an_error(tmp_path: Path) -> None:
    """Refuse such a plan: a service would begin without queries otherwise, and give up all state."""
    registered(tmp_path)
    queries = QueryCatalogue(Folder(tmp_path))
    assert queries.all() == {}
    (tmp_path / PLAN).mkdir()
    assert queries.claim() == 1
    (tmp_path / PLAN / "journal").touch()
    assert queries.claim() == 2
    (tmp_path / "queries.json").unlink()
    for ask in (queries.all, queries.claim):
        with pytest.raises(QueryFailed, match=r"queries\.json is missing"):
            ask()


def test_a_location_whose_last_stream_is_gone_is_whole(tmp_path: Path) -> None:
    streams = registered(tmp_path)
    streams.remove("clicks")
    assert (tmp_path / "streams.json").exists()
    (tmp_path / "streams.json").unlink()
    assert streams.all() == {}
    with pytest.raises(NoSuchStream):
        streams.get("clicks")
