"""A thread beside a worker's loop that reports a long step of the user's code (design: long-step).

It looks now and then, and reports only a step that takes long. It needs the interpreter lock: a step that holds the lock is
reported by numbers alone (``flux.shell.liveness_thread``). The loop's link to the controller is used under ``quiet``, which the
loop holds wherever it may use the link itself, and gives up while it applies steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flux.operators.user_code import described, encodable
from flux.replica.step_queue import ReplicaStep
from flux.wire.control import InStep
from flux.wire.pulse import IN_STEP, KIND, PARTITION, STEP, WHAT
from flux.worker.core import WorkerCore
from partitioning.ids import PartitionKey

log = logging.getLogger("flux")

#: Seconds between two looks; a step that is seen twice has taken at least this long.
LOOK_S = 0.5
#: Characters of a row that are shown.
ROW_CHARACTERS = 500


class StepWatch:
    """A watch over the steps of one worker. ``say`` sends a report to the controller."""

    def __init__(self, core: WorkerCore, say: Callable[[InStep], None], step_timeout_s: float) -> None:
        self.quiet = threading.Lock()
        self._core = core
        self._say = say
        self._every_s = min(LOOK_S, step_timeout_s / 4)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flux-steps", daemon=True)

    def start(self) -> None:
        """Start the thread. Called by the loop's thread, which holds ``quiet`` from now on."""
        self.quiet.acquire()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        before: tuple[int, ...] | None = None
        while not self._over.wait(self._every_s):
            step = self._step()
            if step is not None and step == before:
                try:
                    self._tell(step)
                except Exception as error:  # and goes on: the report of the next step may succeed
                    log.warning("a step that takes long cannot be told: %s", described(error))
            before = step

    def _step(self) -> tuple[int, ...] | None:
        note = self._core.note
        return (note[WHAT], note[PARTITION], note[STEP]) if note[KIND] == IN_STEP else None

    def _tell(self, step: tuple[int, ...]) -> None:
        stage, partition, number = step
        replica = self._core.replicas.get(PartitionKey(stage, partition))
        if replica is None:
            return
        under_way = replica.under_way
        if under_way is None:
            return
        message = InStep(
            node=self._core.worker, stage=stage, partition=partition, step=number, method=replica.context._flux_method,
            row=first_row(under_way),
        )  # fmt: skip
        # Not while the loop goes on: then the step is over, and there is nothing to report.
        if self.quiet.acquire(blocking=False):
            try:
                if self._step() == step:
                    self._say(message)
            finally:
                self.quiet.release()


def first_row(step: ReplicaStep) -> str:
    """Return the first row of a step as text. Empty if there is no row, or a row without a text, as one
    with bytes that are no UTF-8."""
    if step.rows is None or not step.rows.num_rows:
        return ""
    try:
        text = encodable(str(step.rows.slice(0, 1).to_pylist()[0]))
    except Exception:
        return ""
    return text if len(text) <= ROW_CHARACTERS else text[:ROW_CHARACTERS] + "..."
