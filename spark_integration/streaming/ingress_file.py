"""The ingress file, in which the streaming queries of a program find the inputs of a running query that they write into
(design: micro-batches).

It lies beside the connection file, readable by its owner only, and has everything that an ingress task gets besides its
rows: the plan without code, the address of the controller and the secret of the workers. Spark makes the writers of a
streaming query in Python processes of its own on the host of the driver, which know nothing of the driver's memory.
"""

from __future__ import annotations

import os
import pickle
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from pyspark import cloudpickle

from controller.operate import connection_file
from controller.operate.client import QueryClient, choose
from controller.operate.connection_file import QueryConnection
from controller.operate.requests import GetStatus, Status
from flux.dataflow.plan import Plan, StreamSourcePlan
from flux.errors import FluxError, UsageError
from flux.shell.process import Rendezvous
from flux.vault.plan_without_code import without_code

VERSION = 1
#: Longest wait for a query that starts, and time between two looks.
START_S, LOOK_S = 120.0, 0.2
BYTES_MAX = 1 << 26


@dataclass(frozen=True)
class Inputs:
    """Content of the file: everything that an ingress task needs."""

    version: int
    #: Name of the query, or its id.
    name: str
    plan: Plan
    rendezvous: Rendezvous

    def source(self, name: str | None) -> StreamSourcePlan:
        """Return the input of that name; None: the only one. UsageError lists the inputs."""
        inputs = [source for source in self.plan.sources if isinstance(source, StreamSourcePlan) and source.written]
        meant = [source for source in inputs if name in (None, source.name)]
        if len(meant) == 1:
            return meant[0]
        names = ", ".join(repr(source.name) for source in inputs)
        if name is None:
            raise UsageError(f"query {self.name} has several inputs: say option('input', ...) with one of {names}")
        raise UsageError(
            f"query {self.name} has no input {name!r} that a streaming query can write into; it has {names}"
        )


def write(plan: Plan, name: str | None, rendezvous: Rendezvous) -> Path:
    """Make the file; the caller removes it when the query ends. Raises OSError, or UsageError if other users could write
    there."""
    folder = connection_file.folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    connection_file.check_folder(folder)
    path = _path(folder, plan.query)
    data = cloudpickle.dumps(Inputs(VERSION, name or plan.query, without_code(plan), rendezvous))
    path.unlink(missing_ok=True)  # left by an earlier life
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
    return path


def find(query: str) -> Inputs:
    """Read the file of the running query of that name or id. UsageError or Unreachable: there is none, or nothing can be
    written into it."""
    connection = choose(query)
    path = _path(connection_file.folder(), connection.id)
    end = time.monotonic() + START_S
    while not os.path.lexists(path) and time.monotonic() < end and _starts(connection):
        time.sleep(LOOK_S)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise UsageError(
            f"query {connection.name or connection.id} has no input that a streaming query can write into: begin its flow with "
            "flux.stream('user BIGINT, ...'), the schema of what will come"
        ) from None
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        # The file is unpickled: no other user may have written it.
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise UsageError(f"{path} is not a file of this user's alone; remove it, and start the query again")
        if about.st_size > BYTES_MAX:
            raise UsageError(f"{path} is not an ingress file: {about.st_size} bytes")
        inputs = pickle.loads(file.read())
    if not isinstance(inputs, Inputs) or inputs.version != VERSION:
        raise UsageError(f"{path} was written by another release of Flux; start the query again")
    return inputs


def _starts(connection: QueryConnection) -> bool:
    """Tell whether the query waits for its workers: before they are there, nothing can be written into it."""
    try:
        with QueryClient(connection) as client:
            return client.ask(GetStatus(), Status).phase == "starting"
    except FluxError:
        return False


def _path(folder: Path, query: str) -> Path:
    return folder / f"{query}{connection_file.INGRESS}"
