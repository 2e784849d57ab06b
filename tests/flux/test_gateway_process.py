"""Gateways in processes of their own: the client goes over to another one, commands push and list, TLS."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from controller.operate.cli import app
from flux.client import Client, GatewayRefused
from flux.errors import FluxError, Unreachable, UsageError
from flux.gateway import serve
from flux.gateway.serve import http_options
from tests.flux.gateway_process import GatewayProcess


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(tmp_path_factory.mktemp("location"))
    with httpx.Client() as client:  # which holds a connection open when the gateway is told to end
        assert client.get(f"{gateway.url}/v1/health").json()["status"] == "ok"
        yield gateway
        gateway.close()


def test_a_client_registers_pushes_and_removes(running: GatewayProcess) -> None:
    with Client(running.url, running.token) as client:
        client.register_stream("clicks", "user BIGINT, page STRING", partitions=2)
        assert client.push_events("clicks", [{"user": 1, "page": "a"}, {"user": 2}])["rows"] == 2
        assert client.push_events("clicks", pa.table({"user": [1, 2, 3]}))["rows"] == 3
        with pytest.raises(
            GatewayRefused, match=r"row 1, column 'user': expected int64, got 'x'\. Correct the row"
        ) as refused:
            client.push_events("clicks", [{"user": "x"}])
        assert (refused.value.code, refused.value.row, refused.value.column) == ("unfit_row", 1, "user")
        with pytest.raises(UsageError, match="expected a list of dicts"):
            client.push_events("clicks", {"user": 1})  # type: ignore[arg-type]
        client.remove_stream("clicks")
        assert client.streams() == []


def test_a_push_of_unknown_fate_counts_once_with_the_same_one_after_it(running: GatewayProcess) -> None:
    with Client(running.url, running.token) as client:
        client.register_stream("once", "n BIGINT")
        answered, client._http.request = client._http.request, lost(client)  # type: ignore[method-assign]
        client._timeout = 0.0
        with pytest.raises(Unreachable, match="no gateway has answered"):
            client.push_events("once", [{"n": 1}])
        client._http.request = answered  # type: ignore[method-assign]
        assert client.push_events("once", [{"n": 1}])["repeated"]
        assert client.push_events("once", [{"n": 1}])["first"] == 1


def lost(client: Client) -> object:
    """Make requests whose answers are lost on their way."""
    send = client._http.request

    def call(*given: object, **named: object) -> httpx.Response:
        send(*given, **named)  # type: ignore[arg-type]
        raise httpx.ReadError("the connection was reset")

    return call


def test_a_client_goes_to_the_owner_of_a_log_and_over_to_another_gateway_when_that_dies(
    running: GatewayProcess,
) -> None:
    other = GatewayProcess(running.folder)
    try:
        with Client(other.url, running.token) as first:
            first.register_stream("moving", "n BIGINT")
            first.push_events("moving", [{"n": 0}])
        with Client([running.url, other.url], running.token) as client:
            assert client.push_events("moving", [{"n": 1}])["first"] == 1
            assert client._owners == {"moving": other.url}
            other.process.send_signal(signal.SIGKILL)
            other.process.wait()
            assert client.push_events("moving", [{"n": 2}])["first"] == 2
            assert client._owners == {"moving": running.url}
    finally:
        other.process.kill()
        other.process.wait()


def test_commands_register_push_list_and_remove(running: GatewayProcess, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5000)))
    access = ["--url", running.url, "--token", running.token]
    run = CliRunner().invoke
    assert run(app, ["streams", *access, "--register", "lines", "--schema", "n BIGINT"]).exit_code == 0
    pushed = run(app, ["push", "lines", str(lines), *access, "--json"])
    assert json.loads(pushed.stdout) == {"stream": "lines", "rows": 5000, "requests": 1}
    listed = run(app, ["streams", *access, "--json"])
    assert "lines" in [each["name"] for each in json.loads(listed.stdout)]
    assert "of arrival" in run(app, ["streams", *access]).stdout
    assert run(app, ["streams", *access, "--remove", "lines"]).exit_code == 0
    assert run(app, ["push", "lines", str(lines), *access]).exit_code == 1
    assert run(app, ["push", "lines", "/no/such/file", *access]).exit_code == 2
    assert "a token is needed" in run(app, ["push", "lines", str(lines), "--url", running.url, "--token", ""]).stderr


def test_tokens_are_made_listed_and_revoked(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    run, place = CliRunner().invoke, ["token", "--location", str(tmp_path)]
    made = run(app, [*place, "--right", "push", "--stream", "clicks"]).stdout.strip()
    (listed,) = json.loads(run(app, [*place, "--json"]).stdout)
    assert listed == {"id": made.split("_")[1], "rights": ["push"], "streams": ["clicks"]}
    assert "clicks" in run(app, place).stdout
    assert run(app, [*place, "--revoke", listed["id"]]).exit_code == 0
    assert json.loads(run(app, [*place, "--json"]).stdout) == []
    refused = run(app, [*place, "--right", "write"])
    assert (refused.exit_code, "rights: expected some of push, read" in refused.stderr) == (2, True)


def test_options_of_the_port_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert http_options("[::1]:80")[:2] == ("::1", 80)
    for text in ("8080", "host:", "host:99999", ":80", "host:0", "host:²"):
        with pytest.raises(UsageError, match="expected HOST:PORT"):
            http_options(text)
    with pytest.raises(UsageError, match="belong together"):
        http_options("h:1", certificate=tmp_path)


def test_a_port_that_is_taken_is_told_before_a_gateway_does_anything(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} of 127\.0\.0\.1 cannot be used: Address already in use"):
            serve.run(str(tmp_path / "place"), http_options(f"127.0.0.1:{port}"))
    assert not (tmp_path / "place").exists(), "the location was made"


def test_a_location_that_cannot_be_used_is_told_under_the_name_of_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(UsageError, match=r"^location='.*/file': it cannot be made or read"):
        serve.run(str(tmp_path / "file"), http_options(f"127.0.0.1:{port}"))


def test_a_client_whose_clock_was_set_back_loses_no_event_silently(running: GatewayProcess) -> None:
    with Client(running.url, running.token, name="ann") as client:
        client.register_stream("clock", "n BIGINT")
        client.push_events("clock", [{"n": 1}])
        client._number -= 1_000_000_000
        with pytest.raises(FluxError, match="were not stored: client name 'ann' has a newer number"):
            client.push_events("clock", [{"n": 2}])
