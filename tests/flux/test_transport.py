"""Sockets that cannot be bound or connected leave nothing open behind: the thread that tried can end."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from harness import LIMIT_S

from flux.shell import transport
from flux.shell.transport import BURST, Keys, Sockets
from flux.wire.bundle import MESSAGES_MAX, PREFIX

SECRET = b"of this query"
#: Address for documentation (RFC 5737): no machine has it.
NOBODYS = "203.0.113.7"


@pytest.mark.parametrize("keys", [None, Keys.make()], ids=["plain", "curve"])
@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        (lambda sockets: sockets.port(NOBODYS), "assign requested address"),
        (lambda sockets: sockets.port("no such host"), "not known|No address|Temporary failure"),
        (lambda sockets: sockets.link("tcp://127.0.0.1:no"), "Invalid argument"),
    ],
    ids=["address", "name", "endpoint"],
)
def test_sockets_can_be_closed_after_one_could_not_be_opened(
    attempt: Callable[[Sockets], Any], reason: str, keys: Keys | None
) -> None:
    said: list[str] = []

    def tries() -> None:
        sockets = Sockets(keys, SECRET)
        try:
            attempt(sockets)
        except (zmq.ZMQError, OSError) as error:
            said.append(str(error))
            kept.append(error)  # with its frames, so that nothing is closed by being forgotten
        sockets.close()

    kept: list[Exception] = []
    thread = threading.Thread(target=tries, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert re.search(reason, *said)


def test_other_ports_and_links_work_after_one_could_not_be_opened() -> None:
    sockets = Sockets(None, SECRET)
    with pytest.raises(zmq.ZMQError):
        sockets.port(NOBODYS)
    port = sockets.port("127.0.0.1")
    with pytest.raises(zmq.ZMQError):
        sockets.link("tcp://127.0.0.1:no")
    link = sockets.link(port.endpoint)
    link.send([b"hello"])
    heard: list[bytes] = []
    end = time.monotonic() + LIMIT_S
    while not heard and time.monotonic() < end:
        for ready in sockets.wait(0.02):
            heard += [bytes(frames[0]) for _, frames in ready.receive()] if ready is port else list(ready.receive())
    sockets.close()
    assert heard == [b"hello"]


FLOODED = """
import time
from flux.shell import transport
transport.PROBE_S = 1  # at once, in whole seconds
ports, links = (transport.Sockets(None, b"secret") for _ in range(2))
port = ports.port("127.0.0.1", waiting_max=4)
link = links.link(port.endpoint)
while not link.ready:
    for both in (ports, links):
        for ready in both.wait(0.01):
            assert list(ready.receive()) == []
for _ in range(1000):
    link.send([bytes(10_000)])
while not ports.wait(0.01):
    links.wait(0.01)
link.raw.linger = 0
links.close()
time.sleep(2.5)
assert list(port.receive())
ports.close()
"""


def test_a_port_whose_thread_is_busy_outlives_one_that_sends_more_than_may_wait_and_goes() -> None:
    """Run the port in a process of its own: ZeroMQ ended the process, by an assertion, when it probed the
    connection."""
    done = subprocess.run([sys.executable, "-c", FLOODED], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_has_lost_all_links_sleeps_until_it_dials_again() -> None:
    """Sleep: a process without links kept a core busy."""
    with socket.create_server(("127.0.0.1", 0)) as once:
        endpoint = f"tcp://127.0.0.1:{once.getsockname()[1]}"
    sockets = Sockets(None, SECRET)
    sockets.link(endpoint)
    began = time.monotonic()
    for _ in range(40):
        sockets.wait(0.05)
    assert time.monotonic() - began > 0.2
    sockets.close()


def test_messages_that_are_sent_together_come_one_by_one_and_a_damaged_bundle_is_refused_alone() -> None:
    sockets = Sockets(None, SECRET)
    port = sockets.port("127.0.0.1")
    link = sockets.link(port.endpoint)
    messages = [[b"first", b"rows"], [b"second"], [b"third", bytes(1 << 20)], [b"fourth"]]
    at_port: list[list[bytes]] = []
    at_link: list[list[bytes]] = []
    link.send_all(messages)  # those before the handshake is over wait for it
    end = time.monotonic() + LIMIT_S
    while len(at_link) < len(messages) and time.monotonic() < end:
        for ready in sockets.wait(0.02):
            if ready is link:
                at_link += [[bytes(frame) for frame in frames] for frames in ready.receive()]
                continue
            for connection, frames in ready.receive():
                at_port.append([bytes(frame) for frame in frames])
                if len(at_port) == len(messages):
                    link.send([PREFIX + b"not a directory"])
                    link.send_all(messages)
                if len(at_port) == 2 * len(messages):
                    port.send_all(connection, messages)
    refused = port.refused
    sockets.close()
    assert (at_port, at_link, refused) == (2 * messages, messages, 1)


def test_small_messages_get_through_to_one_that_accepts_no_large_ones() -> None:
    """Bundle messages up to the limit of the receiver: all together were larger, and it cut the connection, again and
    again."""
    sockets = Sockets(None, SECRET, 64 << 10)
    port = sockets.port("127.0.0.1")
    link = sockets.link(port.endpoint)
    messages = [[b"%d" % number, bytes(2000)] for number in range(60)]
    heard: list[bytes] = []
    link.send_all(messages[:1])
    end = time.monotonic() + LIMIT_S
    while len(heard) < len(messages) and time.monotonic() < end:
        for ready in sockets.wait(0.02):
            if ready is link:
                list(ready.receive())
                continue
            heard += [bytes(frames[0]) for _, frames in ready.receive()]
            if len(heard) == 1:
                link.send_all(messages[1:])
    sockets.close()
    assert heard == [frames[0] for frames in messages]


def test_one_look_at_a_port_takes_a_bounded_number_of_messages_however_they_travel() -> None:
    sockets = Sockets(None, SECRET)
    port = sockets.port("127.0.0.1")
    link = sockets.link(port.endpoint)
    looks: list[int] = []
    sent = 0
    end = time.monotonic() + LIMIT_S
    while sum(looks) < 40 * MESSAGES_MAX and time.monotonic() < end:
        for ready in sockets.wait(0.02):
            looks.append(len(list(ready.receive())))
        if link.ready and not sent:
            sent = 40 * MESSAGES_MAX
            for _ in range(40):
                link.send_all([[b"word"]] * MESSAGES_MAX)
            time.sleep(0.2)  # so that all of them wait
    sockets.close()
    assert sum(looks) == sent
    assert max(looks) < BURST + MESSAGES_MAX


def test_a_link_dials_again_soon_if_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners with a full queue drop new connections, as a link that is down does. The kernel would dial again after one
    second, then after two, then after four."""
    monkeypatch.setattr(transport, "CONNECT_MS", 100)
    with socket.socket() as deaf, ExitStack() as fill:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(2):
            caller = fill.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(deaf.getsockname())
        sockets = Sockets(None, b"secret")
        dialled: list[Any] = []
        monkeypatch.setattr(
            Sockets, "dial", lambda own, link, dial=Sockets.dial: dialled.append(link) or dial(own, link)
        )
        try:
            sockets.link(f"tcp://127.0.0.1:{deaf.getsockname()[1]}")
            limit = time.monotonic() + LIMIT_S
            while len(dialled) < 3 and time.monotonic() < limit:
                sockets.wait(0.1)
        finally:
            sockets.close()
    assert len(dialled) >= 3
