"""A client that follows a result at gateways on real sockets, one of which ends meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from flux.client import Client, GatewayRefused
from flux.client import client as module
from flux.gateway.tokens import TokenRegister
from flux.outputs.catalogue import OutputCatalogue
from flux.vault.location import Folder
from tests.flux.live_gateways import LiveGateway
from tests.flux.results import opened_sink, results, written


def test_a_client_goes_over_to_another_gateway_and_gets_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    folder = tmp_path / "location"
    folder.mkdir(mode=0o700)
    sink = opened_sink(folder)
    token = TokenRegister(Folder(folder)).make(["read"], ["delays"])
    first, second = LiveGateway(folder), LiveGateway(folder)
    try:
        with Client([first.url, second.url], token, timeout=120) as client:
            written(sink, 0, results(1, 2))
            page = client.rows("delays", wait="10s", limit=1)
            assert (page.rows, page.missed) == ([{"value": 1}], [])
            following = client.follow("delays", page.cursor)
            assert next(following).rows == [{"value": 2}]
            first.close(hurried=True)
            written(sink, 1, results(3))
            page = next(following)
            assert page.rows == [{"value": 3}]
            assert client.rows("delays", page.cursor).rows == []
            with pytest.raises(GatewayRefused, match="expected a cursor"):
                client.rows("delays", "nonsense")
            OutputCatalogue(Folder(folder)).remove("delays")
            with pytest.raises(GatewayRefused) as refused:
                next(following)
            assert refused.value.code == "no_such_query"
    finally:
        first.close()
        second.close()
        sink.close()
