"""A command that ends when its descendants have: ``python tests/waited.py COMMAND...``, with the exit code of the command.

The JVM of a Spark session outlives the test process that began it, and executors outlive their JVM. The work of such orphans
counts in no process that a parent waits for, although it is as much as that of the tests. Here they come to this process, which
waits for them, so the work of this process (``os.wait4``) is that of all of them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

#: From <linux/prctl.h>: orphans among the descendants become children of this process.
PR_SET_CHILD_SUBREAPER = 36
#: How long orphans may take to end by themselves. A JVM ends as soon as the pipe to its Python process is closed.
GONE_S = 20.0
LOOK_EACH_S = 0.05


def main(command: list[str]) -> int:
    """Run the command, and wait for all that it leaves."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except AttributeError:  # not Linux: orphans go to the first process of the system, uncounted
        pass
    # Ctrl-C goes to the command, too, which ends in its own way. A handler is not inherited, as an ignored signal would be.
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while (ended := os.wait())[0] != process.pid:
        pass
    end = time.monotonic() + GONE_S
    while time.monotonic() < end and not all_gone():
        time.sleep(LOOK_EACH_S)
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


def all_gone() -> bool:
    """Take note of orphans that have ended; return whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
