"""Gateways as processes of a service: each is started again when it ends, and ends with the service."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Sequence

from flux.gateway.serve import STOP_S

log = logging.getLogger("flux")

#: Seconds between two starts of a gateway that ends again and again, at first and at most.
AGAIN_S, AGAIN_MAX_S = 0.2, 10.0
#: A gateway that ran for this time is started again at once.
_STEADY_S = 30.0
#: Seconds that a gateway has to end, beyond those for its open requests.
_END_S = 5.0


class AttachedGateway:
    """One gateway. Its standard input is a pipe from this process: when that ends, so does the gateway, also after a SIGKILL."""

    def __init__(self, location: str, http: str, more: Sequence[str] = ()) -> None:
        self.http = http
        self._command = [
            sys.executable, "-m", "flux", "gateway", "--location", location, "--http", http, "--attached", *more,
        ]  # fmt: skip
        self._wait_s, self._at = AGAIN_S, time.monotonic()
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        self._began = time.monotonic()
        # A group of its own, so that Ctrl-C in a terminal ends the service, which then ends its gateways.
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def look(self) -> None:
        """Start the gateway again if it has ended, after a pause that grows while it ends soon."""
        code = self._process.poll()
        now = time.monotonic()
        if code is None or now < self._at:
            return
        if now - self._began > _STEADY_S:
            self._wait_s = AGAIN_S
        log.warning("the gateway at %s has ended with code %s and is started again", self.http, code)
        self._close_pipe()
        self._process = self._started()
        self._at, self._wait_s = now + self._wait_s, min(2 * self._wait_s, AGAIN_MAX_S)

    def end(self) -> None:
        """Ask the gateway to end."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait until it has ended; it is killed if it does not."""
        try:
            self._process.wait(STOP_S + _END_S)
        except subprocess.TimeoutExpired:
            log.warning("the gateway at %s has not ended within %g s and is killed", self.http, STOP_S + _END_S)
            self._process.kill()
            self._process.wait()
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
