"""The process of an executor that forks Spark's Python workers, with Flux loaded before it forks (design: forked-ready).

``spark.python.daemon.module=spark_integration.daemon``. A worker that is forked by Spark's own daemon imports everything by
itself, and loads the compiled kernels: a second of a core, for each worker, each ingress task, and each one in place of a
process that was lost.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
import zipfile
from collections.abc import Sequence
from pathlib import Path

#: What Spark starts for its tasks. Other daemons, for sources and streaming queries, need nothing of Flux.
TASKS = "pyspark.worker"


def main(arguments: Sequence[str]) -> None:
    """In place of ``python -m pyspark.daemon``, until Spark ends it."""
    sys.path[:] = without_archives(sys.path)
    if arguments[:1] == [TASKS]:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # Spark reads a port from the standard output
                load()
        except Exception:  # what is missing is missed by the tasks that need it, in an error of their own
            traceback.print_exc()
    from pyspark import daemon

    daemon.manager()


def without_archives(path: Sequence[str]) -> list[str]:
    """``sys.path`` without the archives that Spark puts first, if the same release is installed: from an archive, Python compiles
    every module anew in each process. With them, if it is another one or none."""
    archives = [entry for entry in path if os.path.basename(entry) == "pyspark.zip" or _is_py4j(entry)]
    rest = [entry for entry in path if entry not in archives]
    archived = next((_version_in(entry) for entry in archives if entry.endswith("pyspark.zip")), None)
    found = next((_version_at(entry) for entry in rest if _version_at(entry) is not None), None)
    has_py4j = any((Path(entry) / "py4j").is_dir() for entry in rest)
    return rest if archived is not None and archived == found and has_py4j else list(path)


def load() -> None:
    """Everything that a worker needs before its first row. No thread of Python's is running afterwards."""
    gc.disable()  # nothing of what is loaded is ever garbage
    try:
        _load()
    finally:
        gc.freeze()  # so that a collection in a worker does not copy the pages that it shares with this process
        gc.enable()


def _load() -> None:
    import numpy.random
    import pyspark.worker  # noqa: F401

    import spark_integration.executor  # noqa: F401
    from flux.shell import pulse
    from partitioning.warm_up import warm_up

    warm_up()
    pulse.warm_up()
    # Otherwise all workers would draw the same numbers. Python's own generator takes care of itself.
    os.register_at_fork(after_in_child=numpy.random.seed)


def _is_py4j(entry: str) -> bool:
    return os.path.basename(entry).startswith("py4j-") and entry.endswith("-src.zip")


def _version_in(archive: str) -> bytes | None:
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.read("pyspark/version.py")
    except (OSError, KeyError, zipfile.BadZipFile):
        return None


def _version_at(folder: str) -> bytes | None:
    try:
        return (Path(folder) / "pyspark" / "version.py").read_bytes()
    except OSError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
