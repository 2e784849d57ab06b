"""A network of hosts, each a separate namespace, on one bridge; links between hosts are cut, delayed and stalled.

The bridge is in a namespace, too, which is the host ``hub``: no packet can leave the laboratory, and nothing of the machine's own
network is changed. A cut is a blackhole route of the sender, so each direction is cut by itself. Weather goes through the
``forwarder``, whose processes and devices exist from the first use on.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from types import TracebackType
from typing import Any

from tests.netlab import rtnetlink
from tests.netlab.forwarder import Weather
from tests.netlab.namespaces import TUN, Namespace

HUB, HOSTS = "hub", ("w1", "w2", "w3")
#: The addresses of the laboratory exist in its namespaces only.
NETWORK, BITS = "10.43.0.", 24
#: Largest packet on the bridge and through the forwarder: equal, so that a connection may change from one to the other.
MTU = 9000
_SET_DEVICE, _TUN_FLAGS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI of linux/if_tun.h


def links_of(text: str) -> list[tuple[str, str]]:
    """Return the directions that a text names: ``w1:w2`` is both, ``w1>w2`` is one. ValueError: it is neither."""
    for sign in ":>":
        a, found, b = text.partition(sign)
        if found and a.strip() and b.strip() and a.strip() != b.strip():
            a, b = a.strip(), b.strip()
            return [(a, b)] if sign == ">" else [(a, b), (b, a)]
    raise ValueError(f"a link is written w1:w2 for both directions or w1>w2 for one, not {text!r}")


class Lab:
    """A laboratory. Use it in a ``with`` block; at the end its programs are killed and its namespaces are given up."""

    def __init__(self, hosts: tuple[str, ...] = HOSTS) -> None:
        self.spaces: dict[str, Namespace] = {}
        self.addresses = {name: f"{NETWORK}{number}" for number, name in enumerate((HUB, *hosts), 1)}
        self._programs: list[subprocess.Popen[Any]] = []
        self._forwarder: subprocess.Popen[str] | None = None
        self._weather: set[tuple[str, str]] = set()  # directions that go through the forwarder
        try:
            for name in self.addresses:
                self.spaces[name] = Namespace(name)
            self.spaces[HUB].run(self._cable)
            for name in hosts:
                self.spaces[name].run(self._plug, name)
        except BaseException:
            self.close()
            raise

    def _cable(self) -> None:
        rtnetlink.bridge("lab")
        for name, space in self.spaces.items():
            if name != HUB:
                rtnetlink.veth(name, "eth0", space.descriptor)
                rtnetlink.up(name, MTU, "lab")
        rtnetlink.address("lab", self.addresses[HUB], BITS)
        rtnetlink.up("lab", MTU)

    def _plug(self, name: str) -> None:
        rtnetlink.address("eth0", self.addresses[name], BITS)
        rtnetlink.up("eth0", MTU)

    # ---- faults of links; ``a`` sends, ``b`` receives

    def cut(self, a: str, b: str) -> None:
        """Drop all packets from ``a`` to ``b``."""
        self.spaces[a].run(rtnetlink.blackhole, self.addresses[b])

    def heal(self, a: str, b: str) -> None:
        """Take back a cut; the weather of the link stays."""
        if (a, b) in self._weather:
            self.spaces[a].run(rtnetlink.route, self.addresses[b], "weather", self.addresses[a])
        else:
            self.spaces[a].run(rtnetlink.no_route, self.addresses[b])

    def weather(self, a: str, b: str, weather: Weather) -> None:
        """Give a link a condition, which holds until another one is given."""
        self._tell(link=[self.addresses[a], self.addresses[b]], weather=asdict(weather))
        self._weather.add((a, b))
        self.heal(a, b)

    def stall(self, a: str, b: str, seconds: float) -> None:
        """Let a link stand still once: packets wait, and none is lost."""
        if (a, b) not in self._weather:
            self.weather(a, b, Weather())
        self._tell(link=[self.addresses[a], self.addresses[b]], stall=seconds)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the directions between any two hosts that are not the hub."""
        hosts = [name for name in self.spaces if name != HUB]
        yield from ((a, b) for a in hosts for b in hosts if a != b)

    def counts(self) -> dict[tuple[str, str], dict[str, int]]:
        """Return packets, bytes, dropped packets and stalls of each direction that has had weather."""
        if self._forwarder is None:
            return {}
        self._tell(counts=True)
        assert self._forwarder.stdout is not None
        names = {address: name for name, address in self.addresses.items()}
        said = json.loads(self._forwarder.stdout.readline())
        return {(names[a], names[b]): counts for (a, _, b), counts in ((key.partition(">"), said[key]) for key in said)}

    def _tell(self, **command: Any) -> None:
        if self._forwarder is None:
            self._forwarder = self._start_forwarder()
        assert self._forwarder.stdin is not None
        self._forwarder.stdin.write(json.dumps(command) + "\n")
        self._forwarder.stdin.flush()

    def _start_forwarder(self) -> subprocess.Popen[str]:
        devices = {self.addresses[name]: space.run(_device) for name, space in self.spaces.items()}
        try:
            command = [sys.executable, "-m", "tests.netlab.forwarder", *(f"{a}={d}" for a, d in devices.items())]
            return self.start(
                HUB, command, pass_fds=tuple(devices.values()), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        finally:
            for descriptor in devices.values():
                os.close(descriptor)

    # ---- programs

    def start(self, host: str, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host. It does not outlive the laboratory."""
        program = self.spaces[host].start(command, **options)
        self._programs.append(program)
        return program

    def close(self) -> None:
        """Kill the programs, with all that they have started in their sessions, and give up the namespaces."""
        for program in reversed(self._programs):
            try:
                os.killpg(program.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            program.wait(10)
        for space in self.spaces.values():
            space.close()
        self._programs, self.spaces = [], {}

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _device() -> int:
    """Make the TUN device of a host, and return its descriptor."""
    descriptor = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(descriptor, _SET_DEVICE, struct.pack("16sH22x", b"weather", _TUN_FLAGS))
    rtnetlink.up("weather", MTU)
    return descriptor
