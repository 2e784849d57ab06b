"""The process of a vault: a worker's loop around ``flux.vault.vault`` (design: vault).

The process is a child of the driver, because the driver's own threads have other work and would take turns with the vault. It
ends when its standard input does, which is when the driver ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass
from io import RawIOBase

from flux.dataflow.plan import Plan
from flux.errors import FluxError, QueryFailed
from flux.shell.process import Rendezvous
from flux.shell.worker_loop import WorkerLoop
from flux.vault.directory_store import LocationGone
from flux.vault.journal import Journal, Store
from flux.vault.location import Place
from flux.vault.names import ABOUT
from flux.vault.vault import Vault
from flux.wire.control import Welcome
from flux.worker.core import WorkerCore

#: Attempts to write a removed location again, and the pause after which it must be still there.
PUT_BACK_MAX, PUT_BACK_S = 3, 0.3


@dataclass(frozen=True)
class Task:
    """The driver's input for the process of a vault."""

    plan: Plan
    rendezvous: Rendezvous
    place: Place


class VaultLoop(WorkerLoop):
    """The loop of a vault's process, with the journal and its place."""

    role = "vault"

    def __init__(self, plan: Plan, rendezvous: Rendezvous, journal: Journal, place: Place, about: bytes) -> None:
        super().__init__(plan, rendezvous)
        self._journal = journal
        self._place = place
        self._about = about

    def _warm_up(self) -> None:
        """Do nothing: a vault clusters nothing and has no tables of keys."""

    @property
    def first_epoch(self) -> int:
        return self._journal.highest + 1

    def _report_failure(self, core: WorkerCore, error: BaseException) -> None:
        if isinstance(error, LocationGone):
            error = QueryFailed(after_loss(error, self._journal, self._place, self._about))
        elif isinstance(error, OSError):
            error = QueryFailed(f"the checkpoint location {self._place} cannot be written: {error}")
        super()._report_failure(core, error)

    def _made(self, welcome: Welcome) -> WorkerCore:
        return Vault(self.plan, welcome.node, self._journal, time.perf_counter, welcome.workers).core


def after_loss(error: LocationGone, journal: Journal, place: Place, about: bytes) -> str:
    """Tell the next program that starts at the place about its loss, and return the reason for the end of the query (design:
    moved-location). A location that has moved is whole: a note at its old name gives its new path. A location that
    was removed is written again, because this process still holds everything that the query has shown."""
    if error.now is not None:
        noted = place.note_moved(f"was moved to {error.now}")
        refused = "is refused until then" if noted else "would write everything again"
        return (
            f"{error} while the query was running. All that the query has shown is in it: give it its name back and start "
            f"again, or start with checkpointLocation={error.now!r}. A start with an empty directory of the old name {refused}"
        )
    reason = "it is removed again and again"
    for _ in range(PUT_BACK_MAX):
        try:
            time.sleep(PUT_BACK_S)  # the program that removes it may not have finished
            journal.move_to(place.put_back(about))
            time.sleep(PUT_BACK_S)
            journal.check()
        except LocationGone:
            continue
        except OSError as failed:
            reason = str(failed)
            continue
        except FluxError as failed:
            reason = str(failed)
            break
        return (
            f"{error} while the query was running. All that the query has shown was written there again, so the next start "
            "goes on where this query was. To begin anew, remove it again, now that no query uses it"
        )
    noted = place.note_moved("was removed")
    return (
        f"{error} while the query was running, and could not be written again: {reason}. "
        + ("A" if noted else "Restore it from a copy: a")
        + f" start with an empty directory {'is refused, because output' if noted else 'writes again what'} has been shown"
    )


def run(task: Task) -> None:
    """Run a vault until the controller sends Stop."""
    store = task.place.store()
    try:
        journal = _read_journal(store, f"the journal in {task.place}")
        journal.keep_only(lambda key: key.stage in task.plan.stages)  # others were removed from the plan
        journal.begin()
        VaultLoop(task.plan, task.rendezvous, journal, task.place, task.place.read(ABOUT)).run(0, 0, "vault")
        with contextlib.suppress(FluxError, OSError):  # the segment before holds the same
            journal.end()
    finally:
        store.close()


def _read_journal(store: Store, where: str) -> Journal:
    """Read a journal without a look for garbage: its records are as many objects, none of which is in a cycle."""
    gc.disable()
    try:
        return Journal(store, where)
    finally:
        gc.enable()


def _ends_with(driver: int) -> None:
    while os.read(driver, 1):
        pass
    os._exit(0)


def _read(given: RawIOBase, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = given.read(nbytes - len(data))
        if not part:
            raise EOFError("the driver has ended")
        data += part
    return bytes(data)


def main() -> int:
    """Read a task from the standard input, which stays open, and run it; an error is one line of JSON on the standard output."""
    given = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    task = pickle.loads(_read(given, int.from_bytes(_read(given, 8), "little")))
    threading.Thread(target=_ends_with, args=(given.fileno(),), daemon=True).start()
    try:
        run(task)
    except (FluxError, OSError) as error:
        print(json.dumps({"kind": type(error).__name__, "message": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
