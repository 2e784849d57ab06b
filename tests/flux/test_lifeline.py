"""The lifeline: whose end is told at once, who cannot pretend to be a worker, and what is no use to who has heard it."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator

import pytest

from flux.shell.lifeline import STRANGERS_MAX, Lifeline, Lifelines
from flux.shell.transport import host_and_port

SECRET = b"of this query"


@pytest.fixture
def lifelines() -> Iterator[Lifelines]:
    made = Lifelines("127.0.0.1", SECRET)
    yield made
    made.close()


def looked(lifelines: Lifelines, *ends: Lifeline, seconds: float = 0.1) -> list[int]:
    """Workers whose connection has closed within so long."""
    closed: list[int] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        closed += lifelines.poll()
        for end in ends:
            end.hear()
        time.sleep(0.002)
    return closed


def test_the_end_of_a_worker_is_known_by_its_name(lifelines: Lifelines) -> None:
    ends = [Lifeline(lifelines.endpoint, SECRET, worker) for worker in (7, 1 << 40)]
    assert looked(lifelines, *ends) == []
    assert sorted(lifelines._named.values()) == [7, 1 << 40]
    ends[1].close()
    assert looked(lifelines) == [1 << 40]
    ends[0].close()
    assert looked(lifelines) == [7]


def test_a_wrong_secret_names_nobody(lifelines: Lifelines) -> None:
    end = Lifeline(lifelines.endpoint, b"guess", 7)
    assert looked(lifelines, end) == []
    assert lifelines._named == {}
    end.close()
    assert looked(lifelines) == []


class Between:
    """Passes on what a worker and its controller say, and remembers it."""

    def __init__(self, lifelines: Lifelines) -> None:
        self.lifelines = lifelines
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard = b""

    def pass_on(self) -> None:
        """The endpoint is that of the controller, as for somebody on the way."""
        plain = socket.create_connection
        try:
            socket.create_connection = lambda *_, **__: plain(self.listener.getsockname())  # type: ignore[assignment]
            end = Lifeline(self.lifelines.endpoint, SECRET, 7)
        finally:
            socket.create_connection = plain
        down, _ = self.listener.accept()
        up = plain(host_and_port(self.lifelines.endpoint))
        self.nonce = down.recv(1024)
        up.sendall(self.nonce)
        looked(self.lifelines)
        challenge = up.recv(1024)
        down.sendall(challenge)
        looked(self.lifelines, end)
        self.proof = down.recv(1024)
        up.sendall(self.proof)
        assert looked(self.lifelines) == []
        assert list(self.lifelines._named.values()) == [7]
        self.heard = self.nonce + challenge + self.proof


def test_what_was_said_on_a_lifeline_is_no_use_to_who_has_heard_it(lifelines: Lifelines) -> None:
    """Said again it used to name the worker, and its closing gave up one that lives."""
    between = Between(lifelines)
    between.pass_on()
    assert SECRET not in between.heard
    assert struct.pack("!q", 7) not in between.heard, "not even the name"
    for said in (between.nonce + between.proof, between.nonce, between.proof):
        with socket.create_connection(host_and_port(lifelines.endpoint)) as stranger:
            stranger.sendall(said)
            looked(lifelines)
            if said == between.nonce:
                stranger.sendall(between.proof)
                looked(lifelines)
        assert looked(lifelines) == []
    assert lifelines.newly_refused() == 3


def test_connections_that_say_nothing_do_not_keep_workers_out(lifelines: Lifelines) -> None:
    silent = []
    for _ in range(STRANGERS_MAX + 50):
        silent.append(socket.create_connection(host_and_port(lifelines.endpoint)))
        lifelines.poll()
    end = Lifeline(lifelines.endpoint, SECRET, 3)
    assert looked(lifelines, end) == []
    assert list(lifelines._named.values()) == [3]
    assert len(lifelines._greetings) <= STRANGERS_MAX
    for connection in silent:
        connection.close()
    assert looked(lifelines) == []
    end.close()
    assert looked(lifelines) == [3]


def test_noise_and_halves_change_nothing(lifelines: Lifelines) -> None:
    for noise in (b"", b"x", bytes(31), bytes(32), bytes(33), bytes(72), bytes(4096), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(host_and_port(lifelines.endpoint)) as stranger:
            stranger.sendall(noise)
            assert looked(lifelines, seconds=0.02) == []
    assert looked(lifelines) == []
    assert lifelines._named == {}


def test_who_answers_in_place_of_the_controller_hears_no_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        endpoint = f"tcp://127.0.0.1:{impostor.getsockname()[1]}"
        end = Lifeline(endpoint, SECRET, 7)
        connection, _ = impostor.accept()
        assert len(connection.recv(1024)) == 32
        connection.sendall(bytes(64))
        time.sleep(0.05)
        assert not end.hear(), "nothing more will be heard"
        end.close()
        assert connection.recv(1024) == b""
        connection.close()


def test_the_end_of_an_older_connection_is_not_that_of_a_worker_that_has_opened_another(lifelines: Lifelines) -> None:
    """Something between the hosts had reset the worker's end of the first; hours later the controller heard its end."""
    older, newer = (Lifeline(lifelines.endpoint, SECRET, 7) for _ in range(2))
    assert looked(lifelines, older) == []
    assert looked(lifelines, newer) == []
    assert list(lifelines._named.values()) == [7]
    older.close()
    assert looked(lifelines, newer) == []
    assert lifelines.reset() == []
    newer.close()
    assert looked(lifelines) == [7]


@pytest.mark.parametrize("reset", [False, True])
def test_an_end_that_is_read_together_with_the_newer_name_says_nothing(lifelines: Lifelines, reset: bool) -> None:
    older = Lifeline(lifelines.endpoint, SECRET, 7)
    assert looked(lifelines, older) == []
    newer = Lifeline(lifelines.endpoint, SECRET, 7)
    lifelines.poll()
    time.sleep(0.02)
    lifelines.poll()
    time.sleep(0.02)
    if reset:
        older._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    older.close()
    newer.hear()
    time.sleep(0.02)
    assert (lifelines.poll(), lifelines.reset()) == ([], [])
    assert looked(lifelines, newer) == []
    newer.close()
    assert looked(lifelines) == [7]


def test_a_host_that_cannot_be_bound_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("flux.shell.lifeline.socket.socket", Noted)
    with pytest.raises(OSError, match="assign requested address"):
        Lifelines("203.0.113.1", SECRET)  # of nobody: kept for documentation
    assert [each.fileno() for each in made] == [-1]
