"""The Spark jobs behind a query, each in a thread of its own: one for the workers, one per DataFrame that is read."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import SparkSession

from flux.dataflow.user_code import text_of

log = logging.getLogger("flux")

#: Remedy for executors that do not find Flux itself.
OTHER_PYTHON = (
    ". Spark's workers run the Python that PYSPARK_PYTHON names, and Flux is not installed there: set it to the Python that "
    "has Flux, before the session is made"
)
#: Remedy for executors that do not find a module of the program.
OTHER_MODULES = (
    ". The executors do not find it. Ship it before the query is started, with spark.sparkContext.addPyFile(path) or "
    "spark-submit --py-files (a .py file, or a package as .zip), or install it for the Python that PYSPARK_PYTHON names, or name "
    "the folder that has it in spark.executorEnv.PYTHONPATH before the session is made"
)
OTHER_CODE = (
    ". The executors have another version of this module than the program: ship the same one with "
    "spark.sparkContext.addPyFile(path), or install it there"
)


class Jobs:
    """Spark jobs of one group: ``run`` them, ``join`` them, or ``cancel`` the rest."""

    def __init__(self, spark: SparkSession, group: str) -> None:
        self._context = spark.sparkContext
        self._group = group
        self._threads: list[threading.Thread] = []

    def run(
        self, what: str, action: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[str, str], None]
    ) -> None:
        """Run the action in the background. ``done`` gets its result, ``failed`` its description and the reason."""

        def body() -> None:
            self._context.setJobGroup(self._group, what, interruptOnCancel=True)
            try:
                result = action()
            except Exception as error:
                failed(what, reason_of(error))
            else:
                done(result)

        thread = InheritableThread(target=body, name=f"{self._group} {what}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout: float) -> list[str]:
        """Wait for the jobs. Returns the names of those that are still running after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def cancel(self) -> None:
        """Cancel the jobs. If Spark was stopped, its jobs have ended with it."""
        try:
            self._context.cancelJobGroup(self._group)
        except (Py4JError, AttributeError, OSError) as error:
            log.debug("jobs of %s are not cancelled: %s", self._group, error)


def reason_of(error: BaseException) -> str:
    """Return the line of a Spark exception that a person needs: the last of the Python traceback inside it, if there is one."""
    line = line_of((isinstance(error, CapturedException) and error._desc) or text_of(error)) or type(error).__name__
    return line + remedy_of(line)


def remedy_of(line: str) -> str:
    """Return a remedy for a task that failed because its executor lacks a module: another attempt would fail like it. Empty
    for any other failure."""
    if re.search(r"No module named '(flux|spark_integration)\b|spark_integration\.daemon's stdout", line):
        return OTHER_PYTHON
    if re.search(r"\bModuleNotFoundError: No module named '", line):
        return OTHER_MODULES
    return OTHER_CODE if re.search(r"\bAttributeError: Can't get attribute '.*' on <module '", line) else ""


def line_of(text: str) -> str:
    """Return that line of an exception's text."""
    lines = [line.strip(" \t:") for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    raised = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception", "Failed", "Timeout"))]
    return (raised[-1] if raised else lines[0] if lines else "")[:2000]
