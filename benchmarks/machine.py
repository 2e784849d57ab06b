"""Speed of this machine and its Python at the moment: figures of other days, machines and builds compare only beside these.

Two costs decide most of the cost of small batches, and both vary by half and more: the interpreter's between builds of the same
Python, and that of waking up on a virtual machine between days.
"""

from __future__ import annotations

import platform
import time
from functools import cache

#: Times that each measurement is made. The least counts, because every disturbance adds.
TIMES = 8
OBJECTS, WAKE_UPS = 50_000, 40
WAKE_UP_EVERY_S = 0.002


@cache
def about() -> dict[str, str | float]:
    """Measure the machine, once in a process, before there is load.

    ``python`` is its version and compiler. ``interpreter_ns`` is the time to make an object and call its method: loop,
    attributes and a dictionary. ``wake_up_us`` is the CPU time of a thread that sleeps and goes on."""
    return {
        "python": f"{platform.python_version()} ({platform.python_compiler()})",
        "interpreter_ns": round(min(_objects() for _ in range(TIMES)) / OBJECTS * 1e9),
        "wake_up_us": round(min(_wake_ups() for _ in range(TIMES)) / WAKE_UPS * 1e6),
    }


class _Object:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def plus(self, more: int) -> int:
        return self.value + more


def _objects() -> float:
    began, found = time.perf_counter(), {}
    for number in range(OBJECTS):
        found[number & 1023] = _Object(number).plus(number)
    return time.perf_counter() - began


def _wake_ups() -> float:
    began = time.process_time()
    for _ in range(WAKE_UPS):
        time.sleep(WAKE_UP_EVERY_S)
    return time.process_time() - began
