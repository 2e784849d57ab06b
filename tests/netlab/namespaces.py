"""Network namespaces without names: a namespace is a descriptor, and is gone with the processes that have it.

So nothing has to be removed, not even after a kill. Only single threads of this process go into a namespace; all its other
threads stay where they are.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.netlab import rtnetlink

_NEWNET = 0x40000000  # CLONE_NEWNET of linux/sched.h
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
TUN = "/dev/net/tun"


def _call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in its own thread, and return its result or raise its exception."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend([True, function()])
        except BaseException as error:
            outcome.extend([False, error])

    thread = threading.Thread(target=run, name="netlab")
    thread.start()
    thread.join()
    done, result = outcome
    if not done:
        raise result
    return result


def _new() -> int:
    """Make a namespace for the calling thread, with loopback, and return its descriptor."""
    _call("unshare", _NEWNET)
    # A reply may take another way than the packet that it answers, if only one direction of a link is delayed.
    for kind in "all", "default":
        Path(f"/proc/sys/net/ipv4/conf/{kind}/rp_filter").write_text("0")
        quiet = Path(f"/proc/sys/net/ipv6/conf/{kind}/disable_ipv6")
        if quiet.exists():
            quiet.write_text("1")
    rtnetlink.up("lo")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def why_not() -> str:
    """Return the reason why this machine has no laboratory; empty: it has one."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        os.close(_in_thread(_new))
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"this machine has no namespaces or no {TUN}: {error}"
    return ""


class Namespace:
    """A network namespace of this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.descriptor: int = _in_thread(_new)

    def enter(self) -> None:
        """Move the calling thread into the namespace, with the threads and processes that it starts."""
        _call("setns", self.descriptor, _NEWNET)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function inside. Its sockets belong to the namespace, also when they are used elsewhere."""

        def inside() -> Any:
            self.enter()
            return function(*args)

        return _in_thread(inside)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program inside, as the leader of a session. It is killed when this process ends in any way."""

        def prepare() -> None:
            self.enter()
            _call("prctl", _DEATH_SIGNAL, signal.SIGKILL)

        return subprocess.Popen(command, preexec_fn=prepare, start_new_session=True, **options)

    def close(self) -> None:
        os.close(self.descriptor)
