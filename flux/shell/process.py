"""The common part of the loops of workers and ingress tasks: the link to the controller, and how they begin and end.

A process also changes two habits while Flux runs in it: free memory is kept (``keep``, ``give_back``), and Python collects
garbage more rarely (``short_collections``, ``usual_collections``).
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flux.errors import ProtocolError, QueryFailed, QueryTimeout
from flux.shell.transport import Keys, Sockets
from flux.wire.codec import decode_command
from flux.wire.control import FromController, Register, Rejected, Stop, ToController, Welcome
from flux.wire.frames import encode

#: Parameters of mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Larger pieces have memory of their own, which is returned.
LARGEST_BYTES = 1 << 30


def keep(nbytes: int) -> bool:
    """Keep up to ``nbytes`` of free memory at the end of the heap (design: kept-memory). Return whether the allocator has
    accepted the settings; with 0 bytes they are left alone. Only glibc has such settings; elsewhere nothing changes.

    C's allocator returns a large piece to the operating system as soon as it is free, and asks for another one for the next
    batch. The first touch of fresh memory takes longer than filling it, several times as long in a virtual machine, where the
    host has to find it first; and a moved state needs a few times its size. So free memory is kept until the worker ends."""
    libc = _glibc()
    if libc is None or nbytes <= 0:
        return False
    # One heap for all threads: heaps of other threads are small, and larger pieces of theirs are mapped anew each time.
    wanted = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, LARGEST_BYTES), (_TRIM_THRESHOLD, nbytes))
    return all(libc.mallopt(name, value) == 1 for name, value in wanted)


def give_back() -> None:
    """Return free memory to the operating system: Spark may use the process for something else."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return None
    return libc


#: Seconds after which a registration is repeated until it is answered.
REGISTER_EVERY_S = 0.5
#: Seconds after a silence that is too long, in which messages that have come meanwhile are still read: this process itself may
#: have stood still, stopped or in a long step of the user's code.
GRACE_S = 2.0
#: With more objects than this, modules are loaded, and not only the objects of one task: a look through them takes a hundredth
#: of a second.
LOADED = 50_000
#: Number of new objects after which Python looks for garbage among them; Python's own value is about 700.
YOUNG = 50_000
#: After this many seconds Python looks at fewer new objects, too, from its own threshold on: three objects that refer to each
#: other may hold a batch of megabytes, and the memory is not large enough for fifty thousand such batches.
GARBAGE_EVERY_S, FEW = 1.0, 700

_found: list[int] = []  # the thresholds of this process before ``short_collections``


@dataclass(frozen=True)
class Rendezvous:
    """The address of a query's controller, and the means to talk to it. It travels with the tasks that Spark ships."""

    endpoint: str
    #: CURVE keys; None: the query is not encrypted.
    keys: Keys | None
    #: The plan's secret, by which processes of the query prove that they belong to it.
    secret: bytes = field(repr=False)
    #: Address for lifelines; empty: there is none.
    lifeline: str = ""


class ControllerLink:
    """Link to the controller. It registers, and hears commands; it raises QueryTimeout if the controller is silent for too
    long."""

    def __init__(self, sockets: Sockets, rendezvous: Rendezvous, silence_max_s: float) -> None:
        self.link = sockets.link(rendezvous.endpoint, sealed=True)
        self.about: Register | None = None
        self.malformed = 0
        self._silence_max_s = silence_max_s
        self._heard = time.monotonic()
        self._silent_since: float | None = None  # when the silence was first noticed; nothing was heard after that

    def report(self, message: ToController) -> None:
        self.link.send([encode(message)])

    def register_again(self, node: int) -> None:
        """Register again: ZeroMQ has connected anew after a break, and the controller does not know this connection."""
        assert self.about is not None
        self.report(msgspec.structs.replace(self.about, node=node))

    def commands(self) -> Iterator[FromController]:
        """Yield the commands that have come. Unreadable ones are left out and counted."""
        for frames in self.link.receive():
            try:
                command = decode_command(frames[0])
            except ProtocolError:
                self.malformed += 1
                continue
            self._heard, self._silent_since = time.monotonic(), None
            yield command

    def newly_malformed(self) -> int:
        """Return the number of unreadable commands since the last call."""
        count, self.malformed = self.malformed + self.link.refused, 0
        self.link.refused = 0
        return count

    def check(self, now: float) -> None:
        """Raise QueryTimeout after too long a silence. To be called between two readings of commands."""
        if now - self._heard <= self._silence_max_s:
            return
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= GRACE_S:
            why = self.link.problem or "the driver is gone or cannot be reached"
            raise QueryTimeout(
                f"nothing heard from the controller at {self.link.endpoint} for {self._silence_max_s:g} s "
                f"(spark.flux.controller.timeout): {why}"
            )


def register(
    sockets: Sockets, control: ControllerLink, rendezvous: Rendezvous, **about: Any
) -> tuple[Welcome, list[FromController]]:
    """Repeat Register until it is answered; returns the answer and the commands that came with it, in order."""
    message = control.about = Register(host=socket.gethostname(), pid=os.getpid(), **about)
    asked = 0.0
    while True:
        now = time.monotonic()
        control.check(now)
        if now - asked >= REGISTER_EVERY_S:
            if asked and port_closed(rendezvous.endpoint):
                raise Stopped("the query ended before this process could register")
            asked = now
            control.report(message)
        if control.link in sockets.wait(REGISTER_EVERY_S / 2):
            commands = list(control.commands())
            for command in commands:
                refuse_rejected(command)
            welcomes = [command for command in commands if isinstance(command, Welcome)]
            if welcomes:
                return welcomes[-1], [command for command in commands if not isinstance(command, Welcome)]


def port_closed(endpoint: str) -> bool:
    """Return whether no process listens at an endpoint any more. The port was open before any process was told its address."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # unknown: the time limit decides
    return False


def short_collections() -> None:
    """Leave all present objects out of Python's garbage collections, for as long as this process lives: modules and
    compiled kernels are some hundred thousand objects, and a look through all of them would hold up every partition for
    a tenth of a second. Garbage of an earlier task is collected first, as Spark may use a process again. Batches of
    rows that come one by one are many objects, and none of them is garbage: fewer looks for it halve the cost of such rows."""
    much = len(gc.get_objects()) > LOADED
    gc.collect()
    if much:  # else there are only the task's own objects, which must not stay for ever
        gc.freeze()
    _found[:] = gc.get_threshold()
    young, *older = _found
    if 0 < young < YOUNG:
        gc.set_threshold(YOUNG, *older)


def look_for_garbage() -> None:
    """Make Python look for garbage. To be called every ``GARBAGE_EVERY_S``. Python decides how far it looks, as always; it is
    only told to begin."""
    young, *older = gc.get_threshold()
    if young != YOUNG or gc.get_count()[0] <= FEW:
        return
    gc.set_threshold(FEW, *older)
    for _ in range(2):  # a collection begins when an object is made, or a loop goes round
        _ = set()
    gc.set_threshold(young, *older)


def usual_collections() -> None:
    """End ``short_collections``: Spark may use the process for something else."""
    if _found and gc.get_threshold()[0] == YOUNG:
        gc.set_threshold(*_found)


class Stopped(Exception):
    """End of a process because the controller sent Stop."""


def refuse_rejected(command: FromController) -> None:
    if isinstance(command, Rejected):
        raise QueryFailed(f"the controller refuses this process: {command.reason}")
    if isinstance(command, Stop):
        raise Stopped(command.reason)
