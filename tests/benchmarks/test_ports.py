"""Ports for servers that listen later: free ones, each once, and none that a socket without a name could get meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks import ports


def test_ports_are_free_and_below_those_of_sockets_without_one() -> None:
    found = ports.free_ports(20)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(found)) == 20
    assert max(found) < lowest


def test_a_port_with_a_listener_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "RANGE", range(port, port + 1))
        with pytest.raises(OSError, match="expected 1 free ports of loopback"):
            ports.free_port()
