"""The lifeline: the end of a worker is told at once, a stranger cannot pretend to be one, and messages that a stranger
has heard are of no use to it."""

from __future__ import annotations

import itertools
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from harness import LIMIT_S

from flux.shell.lifeline import STRANGERS_MAX, Lifeline, Lifelines
from flux.shell.transport import host_and_port

SECRET = b"of this query"
#: Number of looks where nothing may happen.
LOOKS = 20


@pytest.fixture
def lifelines() -> Iterator[Lifelines]:
    made = Lifelines("127.0.0.1", SECRET)
    yield made
    made.close()


def looked(lifelines: Lifelines, *ends: Lifeline, until: Callable[[], object] | None = None) -> list[int]:
    """Look at the lifelines until ``until`` holds, or else for a while, and return the workers whose connection has
    closed meanwhile."""
    closed: list[int] = []
    limit = time.monotonic() + LIMIT_S
    for number in itertools.count():
        closed += lifelines.poll()
        for end in ends:
            end.hear()
        if number == LOOKS if until is None else until():
            return closed
        assert time.monotonic() < limit
        time.sleep(0.002)
    raise AssertionError


def named(lifelines: Lifelines, worker: int, end: Lifeline) -> bool:
    """Tell whether this connection, and no older one, has the name of the worker."""
    ours = end._connection.getsockname()
    return any(c.getpeername() == ours for c, name in lifelines._named.items() if name == worker)


def met(lifelines: Lifelines, ends: dict[int, Lifeline]) -> None:
    """Wait until all ends have named themselves; none has gone."""
    assert looked(lifelines, *ends.values(), until=lambda: all(named(lifelines, *each) for each in ends.items())) == []


def gone(lifelines: Lifelines, *ends: Lifeline) -> list[int]:
    """Wait for the next ends that go, and return their workers."""
    before = len(lifelines._named)
    return looked(lifelines, *ends, until=lambda: len(lifelines._named) < before)


def test_the_end_of_a_worker_is_known_by_its_name(lifelines: Lifelines) -> None:
    ends = {worker: Lifeline(lifelines.endpoint, SECRET, worker) for worker in (7, 1 << 40)}
    met(lifelines, ends)
    assert sorted(lifelines._named.values()) == [7, 1 << 40]
    ends[1 << 40].close()
    assert gone(lifelines) == [1 << 40]
    ends[7].close()
    assert gone(lifelines) == [7]


def test_a_process_may_have_more_files_open_than_select_can_watch(lifelines: Lifelines) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    files = []
    try:
        while not files or files[-1] < 1024:
            files.append(os.dup(0))
        end = Lifeline(lifelines.endpoint, SECRET, 4)
        assert end.raw > 1024
        lifelines.poll()
        end.hear_soon()
        met(lifelines, {4: end})
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wrong_secret_names_nobody(lifelines: Lifelines) -> None:
    end = Lifeline(lifelines.endpoint, b"guess", 7)
    assert looked(lifelines, end) == []
    assert lifelines._named == {}
    end.close()
    assert looked(lifelines) == []


def readable(connection: socket.socket, seconds: float = 0) -> bool:
    return bool(select.select([connection], [], [], seconds)[0])


class Between:
    """A relay between a worker and its controller that passes on their bytes, and remembers them."""

    def __init__(self, lifelines: Lifelines) -> None:
        self.lifelines = lifelines
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard = b""

    def pass_on(self) -> None:
        """Connect a worker through the relay. The endpoint is that of the controller, as if the relay were on the way
        to it."""
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
        looked(self.lifelines, until=lambda: readable(up))
        challenge = up.recv(1024)
        down.sendall(challenge)
        looked(self.lifelines, end, until=lambda: readable(down))
        self.proof = down.recv(1024)
        up.sendall(self.proof)
        assert looked(self.lifelines, until=lambda: self.lifelines._named) == []
        assert list(self.lifelines._named.values()) == [7]
        self.heard = self.nonce + challenge + self.proof
        self.open = end, down, up


def test_what_was_said_on_a_lifeline_is_no_use_to_who_has_heard_it(lifelines: Lifelines) -> None:
    """Refuse messages that are said again: they used to name the worker, and the end of their connection gave up a
    worker that lived."""
    between = Between(lifelines)
    between.pass_on()
    assert SECRET not in between.heard
    assert struct.pack("!q", 7) not in between.heard, "not even the name"
    for said in (between.nonce + between.proof, between.nonce, between.proof):
        with socket.create_connection(host_and_port(lifelines.endpoint)) as stranger:
            stranger.sendall(said)
            if said == between.nonce:
                looked(lifelines, until=lambda: readable(stranger))
                stranger.sendall(between.proof)
            assert looked(lifelines, until=lambda: lifelines.refused) == []
        assert looked(lifelines) == []
        assert lifelines.newly_refused() == 1
    for each in (*between.open, between.listener):
        each.close()


def test_connections_that_say_nothing_do_not_keep_workers_out(lifelines: Lifelines) -> None:
    silent = []
    for _ in range(STRANGERS_MAX + 50):
        silent.append(socket.create_connection(host_and_port(lifelines.endpoint)))
        lifelines.poll()
    end = Lifeline(lifelines.endpoint, SECRET, 3)
    met(lifelines, {3: end})
    assert len(lifelines._greetings) <= STRANGERS_MAX
    for connection in silent:
        connection.close()
    assert looked(lifelines) == []
    end.close()
    assert gone(lifelines) == [3]


def test_noise_and_halves_change_nothing(lifelines: Lifelines) -> None:
    for noise in (b"", b"x", bytes(31), bytes(32), bytes(33), bytes(72), bytes(4096), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(host_and_port(lifelines.endpoint)) as stranger:
            stranger.sendall(noise)
            assert looked(lifelines) == []
    assert looked(lifelines) == []
    assert lifelines._named == {}


def test_who_answers_in_place_of_the_controller_hears_no_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        endpoint = f"tcp://127.0.0.1:{impostor.getsockname()[1]}"
        end = Lifeline(endpoint, SECRET, 7)
        connection, _ = impostor.accept()
        assert len(connection.recv(1024)) == 32
        connection.sendall(bytes(64))
        assert readable(end._connection, LIMIT_S)
        assert not end.hear(), "nothing more will be heard"
        end.close()
        assert connection.recv(1024) == b""
        connection.close()


def test_the_end_of_an_older_connection_is_not_that_of_a_worker_that_has_opened_another(lifelines: Lifelines) -> None:
    """Keep the worker: something between the hosts had reset the worker's end of the first connection, and hours later
    the controller heard of its end."""
    older, newer = (Lifeline(lifelines.endpoint, SECRET, 7) for _ in range(2))
    met(lifelines, {7: older})
    met(lifelines, {7: newer})
    assert list(lifelines._named.values()) == [7]
    older.close()
    assert looked(lifelines, newer) == []
    assert lifelines.reset() == []
    newer.close()
    assert gone(lifelines) == [7]


@pytest.mark.parametrize("reset", [False, True])
def test_an_end_that_is_read_together_with_the_newer_name_says_nothing(lifelines: Lifelines, reset: bool) -> None:
    older = Lifeline(lifelines.endpoint, SECRET, 7)
    met(lifelines, {7: older})
    newer = Lifeline(lifelines.endpoint, SECRET, 7)
    looked(lifelines, until=lambda: readable(newer._connection))
    ends = [*lifelines._named, *lifelines._greetings]
    if reset:
        older._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    older.close()
    newer.hear()
    assert [readable(end, LIMIT_S) for end in ends] == [True, True]
    assert (lifelines.poll(), lifelines.reset()) == ([], [])
    assert looked(lifelines, newer) == []
    newer.close()
    assert gone(lifelines) == [7]


def test_a_host_that_cannot_be_bound_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("flux.shell.lifeline.socket.socket", Noted)
    with pytest.raises(OSError, match="assign requested address"):
        Lifelines("203.0.113.1", SECRET)  # an address that no machine has: kept for documentation
    assert [each.fileno() for each in made] == [-1]
