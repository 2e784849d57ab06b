"""Connections of a gateway: the one that waits longest makes room, slow and large heads are refused. Failures name no path."""

from __future__ import annotations

import errno
import json
import logging
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from flux.client import Client
from flux.gateway.connections import CONNECTIONS_MAX, OTHER_FILES, ConnectionBook, bounds, room_for_connections
from flux.gateway.problems import described, failure_of
from flux.gateway.tokens import TokenRegister
from flux.vault.directory_store import LocationGone, TakenOver
from flux.vault.location import Folder
from tests.flux.gateway_process import GatewayProcess
from tests.flux.live_gateways import LiveGateway

#: Connections of a narrow gateway, and idle ones of the long test.
MOST, IDLE = 8, 10_000


class Line:
    """A connection of a book."""

    def close_for_room(self) -> None:
        raise AssertionError("the book closes nothing")


def test_the_connection_that_waits_longest_makes_room() -> None:
    book, lines = ConnectionBook(2), [Line() for _ in range(5)]
    assert [book.opened(line) for line in lines[:2]] == [None, None]
    book.began(lines[0])
    assert book.opened(lines[2]) is lines[1], "the other one has a request under way"
    assert book.opened(lines[3]) is lines[2], "none was closed yet, and each makes room once"
    book.began(lines[3])
    assert book.opened(lines[4]) is lines[4], "all others have a request under way"
    book.closed(lines[1])
    assert len(book) == 2


def test_a_connection_waits_anew_after_an_answer() -> None:
    book, lines = ConnectionBook(2), [Line() for _ in range(3)]
    book.opened(lines[0])
    book.began(lines[0])
    book.opened(lines[1])
    book.ended(lines[0])
    assert book.opened(lines[2]) is lines[1]
    book.closed(lines[0])
    book.ended(lines[0])
    assert len(book) == 1, "a connection that was closed meanwhile does not come back"


def test_the_files_of_a_process_leave_room_for_connections() -> None:
    assert 256 <= room_for_connections() <= 8192


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[tuple[LiveGateway, str]]:
    """Yield a gateway with room for a few connections, which waits a short time for a head; and a token."""
    folder = tmp_path / "location"
    folder.mkdir(mode=0o700)
    token = TokenRegister(Folder(folder)).make(["admin"], ["*"])
    gateway = LiveGateway(folder, most=MOST, head_s=0.3)
    yield gateway, token
    gateway.close()


def connected(gateway: LiveGateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=30)


def refusal(connection: socket.socket) -> tuple[int, str]:
    """Return status and code of the answer after which the gateway closes the connection."""
    came = b""
    while part := connection.recv(4096):
        came += part
    head, _, content = came.partition(b"\r\n\r\n")
    assert b"Connection: close" in head
    return int(head.split()[1]), json.loads(content)["error"]["code"]


@pytest.mark.parametrize("begun", [b"", b"GET /v1/health HT", b"GET /v1/health HTTP/1.1\r\nHost: here\r\nA: b"])
def test_a_head_that_is_not_whole_in_time_is_given_up(narrow: tuple[LiveGateway, str], begun: bytes) -> None:
    with connected(narrow[0]) as slow:
        slow.sendall(begun)
        assert refusal(slow) == (408, "slow_head")


def test_the_head_of_a_second_request_is_bounded_too(narrow: tuple[LiveGateway, str]) -> None:
    whole = b"GET /v1/health HTTP/1.1\r\nHost: here\r\n\r\n"
    with connected(narrow[0]) as slow:
        slow.sendall(whole + whole[:20])  # pipelined: the second one is there before the first is answered
        answer = slow.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert refusal(slow) == (408, "slow_head")


def test_a_head_that_is_too_large_is_refused_in_the_form_of_all_errors(narrow: tuple[LiveGateway, str]) -> None:
    with connected(narrow[0]) as large:
        large.sendall(b"GET /v1/health HTTP/1.1\r\n" + b"A: " + b"b" * 40_000)
        assert refusal(large) == (400, "malformed")
    with connected(narrow[0]) as nonsense:
        nonsense.sendall(b"\x16\x03\x01\r\n\r\n")
        assert refusal(nonsense) == (400, "malformed")


def test_idle_connections_make_room_for_a_request(narrow: tuple[LiveGateway, str]) -> None:
    idle = [connected(narrow[0]) for _ in range(3 * MOST)]
    assert httpx.get(f"{narrow[0].url}/v1/health").status_code == 200
    assert refusal(idle[0]) == (429, "busy")
    for each in idle:
        each.close()


def test_a_gateway_speaks_no_websocket_and_bounds_its_backlog() -> None:
    made = bounds(most=3)
    assert (made["ws"], made["http"].book.most) == ("none", 3)
    assert made["http"].book is not bounds(most=3)["http"].book, "each gateway counts its own connections"


# ---- failures


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "no space", "/secret/log"), "the disk of the location is full"),
        (OSError(errno.EROFS, "read-only", "/secret/log"), "the location cannot be written"),
        (FileNotFoundError(errno.ENOENT, "none", "/secret/log"), "the location, or a part of it, is gone"),
        (OSError(errno.EIO, "broken", "/secret/log"), "the location cannot be used"),
        (TakenOver("/secret/log", of_log=True), "another gateway has taken over the log"),
        (LocationGone("/secret"), "the location, or a part of it, is gone"),
        (ValueError("/secret"), "the gateway has failed"),
    ],
)
def test_a_failure_is_described_without_its_path(error: Exception, words: str) -> None:
    assert described(error) == words


def test_the_same_failure_has_the_same_id_and_another_one_another(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flux.gateway"):
        ids = [failure_of(OSError(errno.EIO, "broken", path), "here") for path in ("/a", "/a", "/b")]
    assert (ids[0] == ids[1], ids[0] == ids[2]) == (True, False)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"failure {ids[0]}",
        f"failure {ids[2]}",
    ]
    assert "'/a'" in caplog.records[0].getMessage()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_thousand_idle_connections_keep_no_push_out(tmp_path: Path) -> None:
    idle: list[socket.socket] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 1000:
        pytest.skip(f"a process may have {hard:,} files here, fewer than the connections of this test")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, IDLE + 1000), hard))
    gateway = GatewayProcess(tmp_path / "location")
    watched = psutil.Process(gateway.process.pid)
    before = watched.memory_info().rss
    try:
        with Client(gateway.url, gateway.token) as client:
            client.register_stream("clicks", "n BIGINT")
            for n in range(IDLE):
                idle.append(socket.create_connection(("127.0.0.1", gateway.port), timeout=60))
                if n % 1000 == 0:
                    assert client.push_events("clicks", [{"n": n}])["rows"] == 1
        assert watched.num_fds() <= CONNECTIONS_MAX + OTHER_FILES, (
            "connections that are being accepted count among the others"
        )
        assert watched.memory_info().rss - before < 512 << 20
    finally:
        for each in idle:
            each.close()
        gateway.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
