"""``flux serve`` in a process of its own, with its gateways and workers, to be killed and started again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from benchmarks.ports import free_port
from flux.errors import FluxError
from flux.gateway.tokens import TokenRegister
from flux.vault.location import place_of

#: Longest wait for a service to begin, and to end: on a machine under load, loading Spark takes minutes.
BEGINS_S, ENDS_S = 300.0, 90.0
#: The program from which Spark's Python workers are forked.
DAEMON = "spark_integration.daemon"


class ServiceProcess:
    """``flux serve`` on a location of its own below ``folder``, and a token that may do everything.

    options  more options of the command"""

    def __init__(self, folder: Path, gateways: int, master: str, replicas: int, *options: str) -> None:
        location = folder / "location"
        location.mkdir(mode=0o700)
        self.token = TokenRegister(place_of(str(location))).make(["admin"], ["*"])
        port = free_port()
        self.urls = [f"http://127.0.0.1:{port + number}" for number in range(gateways)]
        self.command = ["serve", "--location", str(location), "--http", f"127.0.0.1:{port}"]
        self.command += ["--gateways", str(gateways), "--master", master, "--replicas", str(replicas), *options]
        self.command += ["--conf", f"spark.flux.workers.timeout={BEGINS_S:.0f}s"]
        self.start()

    def start(self) -> None:
        """Start it, again if it has ended, and wait until all gateways answer. FluxError: it ended, or one does not answer."""
        self.launch()
        self.wait_until_it_answers()

    def launch(self, told: int | None = None) -> None:
        """Start its process, and wait for nothing. ``told``: the descriptor of a file for the lines that it prints."""
        there = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        self.process = subprocess.Popen([sys.executable, "-m", "flux", *self.command], env=there, stderr=told)

    def wait_until_it_answers(self) -> None:
        """Wait until all gateways and the service answer. FluxError: the process ended, or one of them does not answer."""
        end = time.monotonic() + BEGINS_S
        try:
            for url in self.urls:
                while not self._answers(url):
                    if self.process.poll() is not None:
                        raise FluxError(f"the service ended with {self.process.returncode} before {url} answered")
                    if time.monotonic() > end:
                        raise FluxError(f"the gateway at {url} has not answered within {BEGINS_S:g} s")
                    time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def _answers(self, url: str) -> bool:
        """Return whether the service answers behind a gateway. It alone can tell that a query is unknown."""
        try:
            found = httpx.delete(f"{url}/v1/queries/none", headers={"Authorization": f"Bearer {self.token}"})
        except httpx.TransportError:
            return False
        return found.status_code == 404

    def kill_a_gateway(self) -> int:
        """Kill the first gateway, and return the id of its process. The service starts another one in its place."""
        return self._kill(is_gateway, "gateway")

    def kill_a_worker(self) -> int:
        """Kill the first worker, and return the id of its process."""
        return self._kill(is_worker, "worker")

    def _kill(self, is_wanted: Callable[[psutil.Process], bool], name: str) -> int:
        for each in psutil.Process(self.process.pid).children(recursive=True):
            if is_wanted(each):
                each.kill()
                return int(each.pid)
        raise FluxError(f"the service (process {self.process.pid}) has no {name} to kill")

    def close(self) -> None:
        """End it by a signal, as an operator would, and kill the processes of it that are left."""
        try:
            started = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        self.process.terminate()
        try:
            self.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(started, timeout=10)
        for each in left:
            each.kill()


def is_gateway(process: psutil.Process) -> bool:
    """Return whether a process is a gateway that runs."""
    try:
        return list(process.cmdline()[1:4]) == ["-m", "flux", "gateway"]
    except psutil.Error:  # it has ended meanwhile
        return False


def is_worker(process: psutil.Process) -> bool:
    """Return whether a process is a worker that runs: one of Spark's Python workers that has sockets of a query."""
    try:
        if DAEMON not in process.cmdline():
            return False
        return any(path.read_text().startswith("ZMQbg") for path in Path(f"/proc/{process.pid}/task").glob("*/comm"))
    except (psutil.Error, OSError):
        return False
