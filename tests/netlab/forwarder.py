"""A forwarder of IP packets among hosts, with delay, jitter, loss and stalls for each direction of each link.

Each host has a TUN device in its namespace: packets that a host routes into its device are read here, wait for their time, and
are written into the device of the other host. So TCP itself reacts. (The kernels of small virtual machines have no netem.)

The forwarder is a separate process: ``python -m tests.netlab.forwarder ADDRESS=DESCRIPTOR...``. Commands are lines of JSON on its
standard input, each with the link; the process ends with its standard input.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field

#: Bytes that wait for one link; more are dropped, as at a switch whose memory is full.
WAITING_MAX = 16 << 20
#: Packets that are read from one device before the other devices have a turn.
TURN = 64
LARGEST = 65536


@dataclass
class Weather:
    """The condition of one direction of a link, in seconds."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    #: A share of the packets.
    loss: float = 0.0
    #: The link stands still for ``stall_s``, every ``every_s`` on average, at times of Poisson's.
    stall_s: float = 0.0
    every_s: float = 0.0


@dataclass
class Counts:
    """The traffic of one direction of a link since its start."""

    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    stalls: int = 0


class Link:
    """One direction of a link, as a state machine: packets come in with the time, and leave in the same order."""

    def __init__(self, chance: random.Random) -> None:
        self.counts = Counts()
        self._weather = Weather()
        self._chance = chance
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._waiting_bytes = 0
        self._still_until = 0.0
        self._next_stall = float("inf")

    def become(self, weather: Weather, now: float) -> None:
        """Take another condition. Stalls under way go on."""
        self._weather = weather
        self._next_stall = now + self._pause() if weather.stall_s else float("inf")

    def stall(self, seconds: float, now: float) -> None:
        """Stand still from now on."""
        self._still_until = max(self._still_until, now + seconds)
        self.counts.stalls += 1

    def _pause(self) -> float:
        return self._chance.expovariate(1 / self._weather.every_s)

    def take(self, packet: bytes, now: float) -> None:
        weather = self._weather
        if (weather.loss and self._chance.random() < weather.loss) or self._waiting_bytes > WAITING_MAX:
            self.counts.dropped += 1
            return
        late = weather.delay_s + (weather.jitter_s * self._chance.random() if weather.jitter_s else 0.0)
        due = max(now + late, self._waiting[-1][0] if self._waiting else 0.0)
        self._waiting.append((due, packet))
        self._waiting_bytes += len(packet)

    def ready(self, now: float) -> list[bytes]:
        """Return the packets whose time has come."""
        while now >= self._next_stall:
            self.stall(self._next_stall + self._weather.stall_s - now, now)
            self._next_stall += self._weather.stall_s + self._pause()
        packets: list[bytes] = []
        while self._waiting and self._waiting[0][0] <= now and now >= self._still_until:
            packets.append(self._waiting.popleft()[1])
        if packets:
            self.counts.packets += len(packets)
            nbytes = sum(map(len, packets))
            self.counts.bytes += nbytes
            self._waiting_bytes -= nbytes
        return packets

    def due(self) -> float:
        """Return the time at which a packet leaves next."""
        return max(self._waiting[0][0], self._still_until) if self._waiting else float("inf")


@dataclass
class Forwarder:
    """The links among hosts, by the addresses of their packets; ``devices`` are descriptors by address."""

    devices: dict[bytes, int]
    links: dict[tuple[bytes, bytes], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for a in self.devices:
            for b in self.devices:
                if a != b:
                    self.links[a, b] = Link(random.Random(f"{a.hex()}{b.hex()}"))

    def read(self, device: int, now: float) -> None:
        """Take packets that a host has sent."""
        for _ in range(TURN):
            try:
                packet = os.read(device, LARGEST)
            except BlockingIOError:
                return
            link = self.links.get((packet[12:16], packet[16:20])) if packet[0] >> 4 == 4 else None
            if link is not None:
                link.take(packet, now)

    def write(self, now: float) -> float:
        """Hand over the packets whose time has come, and return the time of the next one."""
        due = float("inf")
        for (_, to), link in self.links.items():
            for packet in link.ready(now):
                try:
                    os.write(self.devices[to], packet)
                except OSError:
                    link.counts.dropped += 1
            due = min(due, link.due())
        return due

    def obey(self, line: str, now: float) -> None:
        """Carry out a command."""
        command = json.loads(line)
        if "link" not in command:
            said = {
                f"{socket.inet_ntoa(a)}>{socket.inet_ntoa(b)}": asdict(link.counts)
                for (a, b), link in self.links.items()
            }
            print(json.dumps(said), flush=True)
            return
        a, b = (socket.inet_aton(address) for address in command["link"])
        if "stall" in command:
            self.links[a, b].stall(command["stall"], now)
        else:
            self.links[a, b].become(Weather(**command["weather"]), now)


def main(hosts: list[str]) -> None:
    devices = {socket.inet_aton(address): int(number) for address, _, number in (host.partition("=") for host in hosts)}
    for device in devices.values():
        os.set_blocking(device, False)
    forwarder = Forwarder(devices)
    commands, due = b"", float("inf")
    while True:
        now = time.monotonic()
        readable, _, _ = select.select([0, *devices.values()], [], [], min(max(due - now, 0.0), 1.0))
        now = time.monotonic()
        for descriptor in readable:
            if descriptor:
                forwarder.read(descriptor, now)
            elif said := os.read(0, LARGEST):  # with a buffer, lines that come together would wait for the next one
                *lines, commands = (commands + said).split(b"\n")
                for line in lines:
                    forwarder.obey(line.decode(), now)
            else:
                return
        due = forwarder.write(time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1:])
