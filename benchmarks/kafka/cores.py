"""Cores that processes use during a measurement, and the end of a JVM's compilation.

If broker, load and the measured system share a few cores, these figures say more than times do: cores that one of them leaves
are used by the others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

#: Beginnings of the names that a JVM gives to its compilers' threads.
_COMPILERS = ("C1 Comp", "C2 Comp")
#: A JVM whose compilers use less than this share of a core, over these seconds, has compiled its code.
QUIET, QUIET_OVER_S = 0.05, 3.0
#: Process ids of roots. Their descendants count, too.
Roots = Callable[[], Sequence[int]]


class Meter:
    """CPU seconds of groups of processes between calls of ``mark``. The use of a process that ends in between is missing, so
    mark before killing one. ``beside`` gives roots whose families do not count."""

    def __init__(self, groups: Mapping[str, Roots], beside: Roots = tuple) -> None:
        self._groups, self._beside = groups, beside
        self._used = dict.fromkeys(groups, 0.0)
        self._last: dict[str, dict[psutil.Process, float]] = {}
        self._took = dict.fromkeys(groups, 0.0)
        self._at: dict[str, float] = {}

    def mark(self) -> None:
        others = families(self._beside())
        members = {}
        for name, roots in self._groups.items():
            mine = roots()
            members[name] = [each for each in families(mine) if each not in others or each.pid in mine]
        # Each group by its own clock, and only when all processes are found: with few cores, finding them takes seconds.
        for name, some in members.items():
            now = time.monotonic()
            found = {each: cpu_s(each) for each in some}
            if name in self._last:
                before = self._last[name]
                self._used[name] += sum(max(used - before.get(each, 0.0), 0.0) for each, used in found.items())
                self._took[name] += now - self._at[name]
            self._last[name], self._at[name] = found, now

    def cores(self) -> dict[str, float | None]:
        """Return the average use of each group, from the first mark to the last; None: there were no processes."""
        return {
            name: round(used / self._took[name], 3) if self._took[name] > 0 and self._last[name] else None
            for name, used in self._used.items()
        }


def families(roots: Sequence[int]) -> set[psutil.Process]:
    """Return the processes and their descendants."""
    found: set[psutil.Process] = set()
    for pid in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {root, *root.children(recursive=True)}
    return found


def cpu_s(process: psutil.Process) -> float:
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return 0.0


def compile_s(pid: int) -> float | None:
    """Return the CPU seconds of a JVM's compilers until now; None: the threads have no such names here."""
    tasks = Path(f"/proc/{pid}/task")
    total, found = 0.0, False
    with contextlib.suppress(OSError, psutil.NoSuchProcess):
        for thread in psutil.Process(pid).threads():
            with contextlib.suppress(OSError):  # the thread has ended
                if (tasks / str(thread.id) / "comm").read_text().startswith(_COMPILERS):
                    total, found = total + thread.user_time + thread.system_time, True
    return total if found else None


def await_compiled(pid: int | None, least_s: float, most_s: float) -> float:
    """Wait at least ``least_s``, and on until the compilers of a JVM are quiet. Return the time that it took."""
    began = time.monotonic()
    time.sleep(least_s)
    used = None if pid is None else compile_s(pid)
    while used is not None and pid is not None and time.monotonic() - began < most_s:
        before, at = used, time.monotonic()
        time.sleep(QUIET_OVER_S)
        used = compile_s(pid)
        if used is None or (used - before) / (time.monotonic() - at) < QUIET:
            break
    return time.monotonic() - began
