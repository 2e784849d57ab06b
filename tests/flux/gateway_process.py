"""A gateway in a process of its own, that is killed and started again, and clients that push to it meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from benchmarks.serve import STARTS_S, GatewayUnderLoad
from flux.client import Client
from flux.gateway.tokens import TokenRegister
from flux.vault.location import Folder


class GatewayProcess(GatewayUnderLoad):
    """A process of ``flux gateway`` on a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        #: May do everything.
        self.token = TokenRegister(Folder(folder)).make(["admin"], ["*"])
        super().__init__(folder)

    def kill(self) -> None:
        """Kill the gateway, and start it again."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=STARTS_S)
        self.start()

    def close(self) -> None:
        """End the gateway by a signal, and assert that it ends well."""
        self.process.terminate()
        assert self.process.wait(timeout=STARTS_S) in (0, -signal.SIGTERM)


class Pusher(threading.Thread):
    """A client that pushes numbered rows to a stream until it is told to stop."""

    def __init__(self, url: str, token: str, stream: str, who: int) -> None:
        super().__init__(name=f"pusher-{who}", daemon=True)
        self._client = Client(url, token, timeout=2 * STARTS_S)
        self._stream, self.who = stream, who
        #: ``pushed`` is the number of rows that were answered.
        self.pushed, self.error = 0, ""
        self._stop_asked = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self._client:
                while not self._stop_asked.is_set():
                    rows = [{"who": self.who, "n": self.pushed + each} for each in range(7)]
                    self._client.push_events(self._stream, rows)
                    self.pushed += len(rows)
        except Exception as error:
            self.error = repr(error)

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(3 * STARTS_S)
        assert not self.is_alive()
        assert not self.error, self.error


def kill_while_pushing(gateway: GatewayProcess, stream: str, kills: int, rows_between: int = 100) -> list[Pusher]:
    """Kill a gateway while three clients push, each time after some more rows of each. Returns the clients, which have
    stopped."""
    pushers = [Pusher(gateway.url, gateway.token, stream, who) for who in range(3)]
    for _ in range(kills):
        wanted = [each.pushed + rows_between for each in pushers]
        end = time.monotonic() + 3 * STARTS_S
        while any(each.pushed < least and not each.error for each, least in zip(pushers, wanted, strict=True)):
            assert time.monotonic() < end, "the clients do not come on"
            time.sleep(0.002)
        gateway.kill()
    for each in pushers:
        each.stop()
    return pushers
