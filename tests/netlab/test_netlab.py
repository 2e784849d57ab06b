"""The laboratory itself: cuts, stalls and delays, seen by plain sockets in its namespaces."""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.netlab.forwarder import Link, Weather
from tests.netlab.lab import Lab, links_of
from tests.netlab.namespaces import why_not

REASON = why_not()
in_lab = pytest.mark.skipif(bool(REASON), reason=REASON or "it can be made here")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(("w1", "w2")) as lab:
        yield lab


def connected(lab: Lab) -> tuple[socket.socket, socket.socket]:
    """Connect w1 to w2, and return both ends."""
    listener = lab.spaces["w2"].run(socket.create_server, (lab.addresses["w2"], 0))
    with listener:
        one = lab.spaces["w1"].run(socket.create_connection, listener.getsockname(), 5)
        other, _ = listener.accept()
    for end in one, other:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(5)
    return one, other


def travel_s(sender: socket.socket, receiver: socket.socket) -> float:
    began = time.monotonic()
    sender.sendall(b"row")
    assert receiver.recv(16) == b"row"
    return time.monotonic() - began


@in_lab
def test_a_cut_stops_one_direction_until_it_is_healed_and_nothing_is_lost(lab: Lab) -> None:
    one, other = connected(lab)
    with one, other:
        travel_s(one, other)
        lab.cut("w2", "w1")
        travel_s(one, other)  # the way to w2 is open
        other.sendall(b"late")
        one.settimeout(0.25)
        with pytest.raises(TimeoutError):
            one.recv(16)
        lab.heal("w2", "w1")
        one.settimeout(5)
        assert one.recv(16) == b"late"


@in_lab
def test_a_stall_holds_rows_up_and_the_delay_of_a_link_is_that_of_its_direction(lab: Lab) -> None:
    one, other = connected(lab)
    with one, other:
        lab.weather("w1", "w2", Weather(delay_s=0.06))
        assert travel_s(one, other) >= 0.06
        lab.weather("w1", "w2", Weather())
        travel_s(one, other)
        lab.stall("w1", "w2", 0.3)
        assert travel_s(one, other) >= 0.2  # the command takes its time, too
        assert travel_s(other, one) < 0.2
    assert lab.counts()["w1", "w2"]["stalls"] == 1
    assert lab.counts()["w2", "w1"]["packets"] == 0  # acks of TCP went over the bridge


@in_lab
def test_commands_that_come_together_are_all_obeyed(lab: Lab) -> None:
    lab.weather("w1", "w2", Weather())
    forwarder = lab._forwarder
    assert forwarder is not None
    forwarder.stdin.write('{"counts": true}\n' * 3)
    forwarder.stdin.flush()
    answers, end = b"", time.monotonic() + 10
    while answers.count(b"\n") < 3 and select.select([forwarder.stdout], [], [], end - time.monotonic())[0]:
        answers += os.read(forwarder.stdout.fileno(), 65536)
    assert answers.count(b"\n") == 3


@in_lab
def test_nothing_of_the_laboratory_is_seen_outside(lab: Lab) -> None:
    mine = os.stat("/proc/self/ns/net").st_ino
    inside = {space.run(lambda: os.stat("/proc/thread-self/ns/net").st_ino) for space in lab.spaces.values()}
    assert len(inside) == 3
    assert mine not in inside
    assert not {name for _, name in socket.if_nameindex()} & {"lab", "w1", "w2", "weather"}
    routes = lab.spaces["w1"].run(Path("/proc/thread-self/net/route").read_text).splitlines()[1:]
    assert {route.split()[1][-4:] for route in routes} == {"2B0A"}, "there is a way out of it"


@in_lab
def test_a_program_on_a_host_dies_with_a_laboratory_that_is_killed() -> None:
    code = (
        "from tests.netlab.lab import Lab\n"
        "import time\n"
        "lab = Lab(('w1',))\n"
        "print(lab.start('w1', ['sleep', '60']).pid, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout is not None
            program = psutil.Process(int(maker.stdout.readline()))
            assert program.name() == "sleep"
        finally:
            maker.kill()
    program.wait(5)


def test_packets_leave_a_link_in_order_and_not_while_it_stands_still() -> None:
    link = Link(random.Random(1))
    link.become(Weather(delay_s=1.0, jitter_s=1.0), 0.0)
    for number in range(9):
        link.take(bytes([number]), number / 100)
    assert link.ready(0.99) == []
    link.stall(3.0, 1.0)
    assert link.ready(3.9) == []
    assert link.due() == 4.0
    assert link.ready(4.0) == [bytes([number]) for number in range(9)]
    link.become(Weather(loss=1.0), 4.0)
    link.take(b"x", 4.0)
    assert (link.ready(9.0), link.counts.dropped) == ([], 1)
    link.become(Weather(stall_s=0.2, every_s=5.0), 9.0)
    for moment in range(9_000, 109_000, 100):
        link.ready(moment / 1000)
    assert 10 <= link.counts.stalls <= 32  # 20 in a hundred seconds


@pytest.mark.parametrize(
    ("text", "links"),
    [("w1:w2", [("w1", "w2"), ("w2", "w1")]), ("w1>w2", [("w1", "w2")]), (" w2 > w1 ", [("w2", "w1")])],
)
def test_a_link_is_named_with_its_directions(text: str, links: list[tuple[str, str]]) -> None:
    assert links_of(text) == links


@pytest.mark.parametrize("text", ["w1", "w1:", "w1:w1", ""])
def test_a_text_that_names_no_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="w1:w2 for both"):
        links_of(text)


@in_lab
@pytest.mark.long
@pytest.mark.starts_spark
def test_a_query_in_the_laboratory_loses_nothing_by_a_cut() -> None:
    command = [sys.executable, "-m", "tests.netlab", "--cut", "w1>w2", "--for", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 lost, 0 counted twice." in done.stdout
