"""Gateways as processes of a service: each is started again when it ends, and ends with the service (design: service)."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from flux.errors import QueryFailed
from flux.gateway.serve import STOP_S

log = logging.getLogger("flux")

#: Seconds between the end of a gateway and its next start: at first, and at most while it ends again and again.
AGAIN_S, AGAIN_MAX_S = 0.2, 10.0
#: A gateway that ran for this time is started again after the first pause.
STEADY_S = 30.0
#: Seconds until a gateway listens, which loads Arrow first, and between two looks.
OPENS_S, _LOOK_S = 120.0, 0.05
#: Seconds that a gateway has to end, beyond those for its open requests.
_END_S = 5.0


def started_gateway(location: str, http: str, more: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a gateway. Its standard input is a pipe from this process: when that ends, so does the gateway, also after a SIGKILL.
    It has a group of its own, so that Ctrl-C in a terminal ends the service, which then ends its gateways."""
    command = [sys.executable, "-m", "flux", "gateway", "--location", location, "--http", http, "--attached", *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)


class AttachedGateway:
    """One gateway. ``start`` starts its process; ``clock`` returns seconds."""

    def __init__(
        self, http: str, start: Callable[[], subprocess.Popen[bytes]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.http = http
        self._start, self._clock = start, clock
        self._process = start()
        self._began = clock()
        #: The pause before the next start, and the time of that; None: the process runs.
        self._pause_s = AGAIN_S
        self._again_at: float | None = None

    @property
    def process_id(self) -> int:
        return self._process.pid

    def wait_until_it_listens(self) -> None:
        """Wait until the port is open. QueryFailed: it is not within ``OPENS_S`` seconds, or the gateway has ended."""
        host, _, port = self.http.rpartition(":")
        end = self._clock() + OPENS_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=1):
                return
            code = self._process.poll()
            if code is not None:
                raise QueryFailed(
                    f"the gateway at {self.http} has ended with code {code} at its start; it has said why"
                )
            if self._clock() > end:
                raise QueryFailed(f"the gateway at {self.http} does not listen after {OPENS_S:g} s")
            time.sleep(_LOOK_S)

    def look(self) -> None:
        """Start the gateway again if it has ended, after a pause that grows while it ends soon."""
        code = self._process.poll()
        if code is None:
            return
        now = self._clock()
        if self._again_at is None:
            if now - self._began > STEADY_S:
                self._pause_s = AGAIN_S
            log.warning(
                "the gateway at %s has ended with code %s, and is started again in %g s", self.http, code, self._pause_s
            )
            self._close_pipe()
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, AGAIN_MAX_S)
        elif now >= self._again_at:
            self._again_at = None
            self._process, self._began = self._start(), now

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
