"""Links between processes as ZeroMQ gives them: in order within a connection, in any order between connections.

A link is a DEALER that talks to a ROUTER. When its connection breaks, the DEALER connects again by itself, and the ROUTER
sees a new identity; the sender is told nothing. All messages under way in either direction are lost. Messages still in
the queue of the DEALER are not: they go out under the new identity.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.faults import Faults
from tests.simulation.world import World

Identity = tuple[int, int]
#: Called with the identity of the connection on which a message came, and the message.
ToServer = Callable[[Identity, Any], None]
ToClient = Callable[[Any], None]


def garble(frame: bytes, rng: random.Random) -> bytes:
    """Turn a frame into bytes that no reader takes for a message."""
    kind = rng.randrange(3)
    if kind == 0:
        return frame[: rng.randrange(len(frame))]
    if kind == 1:
        return bytes(255 - byte for byte in frame)
    return frame + bytes([rng.randrange(256)])


@dataclass(slots=True, eq=False)
class _Flying:
    """A message under way."""

    content: Any
    generation: int
    lost: bool = False


class Link:
    """A connection of a client to a server, which breaks, is cut, and comes back."""

    def __init__(
        self, network: Network, number: int, to_server: ToServer, to_client: ToClient, data: bool, ends: tuple[int, int]
    ) -> None:
        """Connect a client to a server. ``ends``: the nodes of both."""
        self.network = network
        self._ends, self._back = ends, ends[::-1]
        self.number = number
        self.data = data
        self.generation = 0
        self._to_server, self._to_client = to_server, to_client
        self._up: list[_Flying] = []
        self._down: list[_Flying] = []
        self._up_at = self._down_at = (
            0.0  # nothing arrives before this: keeps the order of a connection, and makes cuts
        )
        self.closed = False

    @property
    def identity(self) -> Identity:
        return (self.number, self.generation)

    def send(self, content: Any) -> None:
        """Send a message from the client to the server."""
        flying = _Flying(content, self.generation, self._loses())
        self._up.append(flying)
        self._up_at = max(self._up_at, self.network.arrival(), self.network.severed.get(self._ends, 0.0))
        self.network.world.at(self._up_at, self._arrive_up, flying)

    def reply(self, identity: Identity, content: Any, delay_s: float = 0.0) -> None:
        """Send a message from the server to the client. A message to a connection that is gone is dropped."""
        if identity != self.identity or self.closed:
            return
        flying = _Flying(content, self.generation, self._loses())
        self._down.append(flying)
        arrival = self.network.arrival() + delay_s
        self._down_at = max(self._down_at, arrival, self.network.severed.get(self._back, 0.0))
        self.network.world.at(self._down_at, self._arrive_down, flying)

    def _loses(self) -> bool:
        lost = self.data and self.network.calm is False and self.network.loses()
        if lost:
            self.network.counts["messages lost alone"] += 1
            self.network.disturbed()
        return lost

    def _arrive_up(self, flying: _Flying) -> None:
        self._up.remove(flying)
        if not flying.lost:
            self._to_server((self.number, flying.generation), flying.content)

    def _arrive_down(self, flying: _Flying) -> None:
        self._down.remove(flying)
        if not flying.lost and not self.closed:
            self._to_client(flying.content)

    def cut_up(self, seconds: float) -> None:
        self._up_at = max(self._up_at, self.network.world.now + seconds)
        self.network.disturbed(self._up_at)

    def cut_down(self, seconds: float) -> None:
        self._down_at = max(self._down_at, self.network.world.now + seconds)
        self.network.disturbed(self._down_at)

    def cut(self, seconds: float) -> None:
        """Hold up all messages in one direction for a while; messages sent meanwhile come late."""
        if self.network.world.random.random() < 0.5:
            self.cut_up(seconds)
        else:
            self.cut_down(seconds)

    def abandon(self) -> None:
        """Close the link of a dead client: the messages that the client had not yet written are lost."""
        self.closed = True
        written = self.network.world.random.randint(0, len(self._up))
        for flying in self._up[written:]:
            flying.lost = True

    def break_(self) -> None:
        self.network.counts["connections lost"] += 1
        if any(not flying.lost for flying in self._up + self._down):
            self.network.counts["connections lost with messages under way"] += 1
        self.generation += 1
        self.network.disturbed()
        unwritten = self.network.world.random.randint(0, len(self._up))
        for index, flying in enumerate(self._up):
            if index >= len(self._up) - unwritten:
                flying.generation = self.generation
            else:
                flying.lost = True
        for flying in self._down:
            flying.lost = True


class Network:
    """All links between processes, and the faults that strike them."""

    def __init__(self, world: World, faults: Faults, counts: Counter[str]) -> None:
        self.world = world
        self.faults = faults
        self.counts = counts
        self.calm = False
        self.links: list[Link] = []
        #: The end of the cut from one node to another, by sender and receiver.
        self.severed: dict[tuple[int, int], float] = {}
        self.disturbed_until = world.now  # when the effects of all faults end

    def link(self, to_server: ToServer, to_client: ToClient, data: bool, ends: tuple[int, int] = (-1, -1)) -> Link:
        """Add a link. ``data``: the link is between workers, where also a single message may be lost, and not to the
        controller. ``ends``: the nodes of client and server."""
        link = Link(self, len(self.links), to_server, to_client, data, ends)
        self.links.append(link)
        return link

    def of(self, identity: Identity) -> Link:
        return self.links[identity[0]]

    def arrival(self) -> float:
        delay = self.world.random.expovariate(1.0) * self.faults.delay_s
        if not self.calm and self.world.chance(self.faults.spike_probability):
            delay *= self.faults.spike
            self.disturbed(self.world.now + delay)
        return self.world.now + delay

    def disturbed(self, until: float = 0.0) -> None:
        """Note a fault with effects until the given time."""
        self.disturbed_until = max(self.disturbed_until, until, self.world.now)

    def loses(self) -> bool:
        return self.world.chance(self.faults.loss_probability)

    def _some(self, data: bool | None = None) -> Link | None:
        alive = [link for link in self.links if not link.closed and data in (None, link.data)]
        return self.world.random.choice(alive) if alive else None

    def break_one(self) -> None:
        link = self._some(data=True)
        if link is not None:
            link.break_()

    def break_control(self) -> None:
        link = self._some(data=False)
        if link is not None:
            self.counts["connections to the controller lost"] += 1
            link.break_()

    def cut_one(self) -> None:
        link = self._some()
        if link is not None:
            self.counts["cuts in one direction"] += 1
            link.cut(self.world.random.random() * self.faults.cut_s)

    def sever(self, sender: int, receiver: int, seconds: float) -> None:
        """Hold up all messages from one node to another; messages sent meanwhile come late."""
        until = self.world.now + seconds
        self.severed[sender, receiver] = max(until, self.severed.get((sender, receiver), 0.0))
        self.disturbed(until)

    def cut_off(self, sender: int, receiver: int) -> bool:
        """Tell whether the way from one node to another is cut now."""
        return self.severed.get((sender, receiver), 0.0) > self.world.now

    def cut_some(self, links: list[Link], seconds: float) -> None:
        """Hold up the messages from the clients of about half of these links."""
        for link in links:
            if self.world.random.random() < 0.5:
                link.cut_up(seconds)
