"""Ports of loopback for servers that are told theirs, and listen some seconds later."""

from __future__ import annotations

import random
import socket
from itertools import islice

#: The range of the ports. Linux gives ports from 32,768 on to sockets that name none, so no other process gets one of these by
#: chance before its server listens.
RANGE = range(15_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return ports of loopback on which no process listens."""
    found = list(islice(filter(_is_free, random.SystemRandom().sample(RANGE, len(RANGE))), count))
    if len(found) < count:
        raise OSError(
            f"expected {count} free ports of loopback in {RANGE}, and found {len(found)}: end what listens there"
        )
    return found


def free_port() -> int:
    """Return a port of loopback on which no process listens."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
