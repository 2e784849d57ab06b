"""A sign of life that needs no interpreter lock (design: pulse): it tells a worker that is busy from one that is stopped.

One call of the user's code may hold the interpreter lock for seconds, and no Python thread can say anything meanwhile.
So a compiled thread sends, a few times a second, the notes that the worker's loop has made in a piece of memory: the number of
its turns, and its present work. A process that is stopped sends nothing, whatever its work was. A note costs the loop a few
stores of numbers. Pulses go over the lifeline, in records of a fixed size, behind the name (``flux.shell.lifeline``).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit, types

from flux.wire.pulse import OVER, STEP, Note, Pulse

_RECORD = struct.Struct("=5q")
RECORD_BYTES = _RECORD.size
#: The number of tries of a send that fails, because a signal may have broken it off; on a lost connection every try fails.
TRIES = 20
_MSG_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


def parse(data: bytes) -> tuple[list[Pulse], bytes]:
    """Return the pulses of whole records, and the bytes of the next record that have come."""
    whole = len(data) - len(data) % RECORD_BYTES
    return [Pulse(*record) for record in _RECORD.iter_unpack(data[:whole])], data[whole:]


_send = types.ExternalFunction("send", types.intp(types.int32, types.uintp, types.uintp, types.int32))
_poll = types.ExternalFunction("poll", types.int32(types.uintp, types.uintp, types.int32))


@njit(cache=True, nogil=True)
def _beat(fd: Any, memory: Any, waiting: Any, every_ms: Any, flags: Any) -> None:
    """Send pulses until the connection is closed or ``memory`` says that it is over. ``waiting`` is a struct pollfd without
    events, which is woken when the connection hangs up."""
    size = np.uint64(RECORD_BYTES)
    start = np.uint64(memory.ctypes.data) + np.uint64(8)
    tries, sent = 0, np.uint64(0)
    while memory[0] == 0 and tries < TRIES:
        done = _send(fd, start + sent, size - sent, flags)
        if done < 0:
            tries += 1
        else:
            tries, sent = 0, sent + np.uint64(done)
            if sent == size:
                sent = np.uint64(0)
        if sent == 0 or done < 0:
            waiting[0] = fd
            waiting[1] = 0
            _poll(np.uint64(waiting.ctypes.data), np.uint64(1), np.int32(every_ms if done >= 0 else 10))


class LivenessThread:
    """The sender of a worker's pulses, made once per worker. The worker's loop writes ``note``, which is sent while it
    ``beats``."""

    def __init__(self, every_s: float) -> None:
        self._every_ms = np.int32(max(round(every_s * 1e3), 1))
        self._memory = np.zeros(STEP + 1, np.int64)
        self.note: Note = self._memory.data  # type: ignore[assignment]
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def beats(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, connection: socket.socket) -> None:
        """Beat over a connection until it breaks, or until ``stop``, which shuts it down. Its owner closes it."""
        self._connection = connection
        connection.setblocking(True)
        given = (
            np.int32(connection.fileno()),
            self._memory,
            np.zeros(2, np.int32),
            self._every_ms,
            np.int32(_MSG_NOSIGNAL),
        )
        self._thread = threading.Thread(target=_beat, args=given, name="flux-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._memory[OVER] = 1
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            if self._thread is not None:
                self._thread.join()
        self._connection = self._thread = None
        self._memory[OVER] = 0


def warm_up() -> None:
    """Compile the thread's loop, or load it from the disk cache."""
    memory = np.zeros(STEP + 1, np.int64)
    memory[OVER] = 1
    _beat(np.int32(-1), memory, np.zeros(2, np.int32), np.int32(1), np.int32(0))


def records(*pulses: Pulse) -> Iterator[bytes]:
    """Return pulses as they travel."""
    return (_RECORD.pack(*pulse) for pulse in pulses)
