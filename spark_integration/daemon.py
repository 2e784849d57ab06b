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
import tempfile
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Module that Spark starts for its tasks. Other daemons, for sources and streaming queries, need nothing of Flux.
TASKS = "pyspark.worker"
#: Last bytes of the output during loading that are passed on: Spark does not read the pipe yet, and a pipe holds 64 KiB.
SAID_BYTES = 16_384


def main(arguments: Sequence[str]) -> None:
    """Run in place of ``python -m pyspark.daemon``, until Spark ends the process."""
    sys.path[:] = without_archives(sys.path)
    if arguments[:1] == [TASKS]:
        with set_aside():
            try:
                load()
            except BaseException:  # a missing module is an error of the tasks that need it
                traceback.print_exc()
    from pyspark import daemon

    daemon.manager()


def without_archives(path: Sequence[str]) -> list[str]:
    """Return ``sys.path`` without the archives that Spark puts first, if the same releases are installed and come next: from
    an archive, Python compiles every module anew in each process. If other releases are installed, or none, the archives
    stay."""
    archives = {"pyspark": "", "py4j": ""}
    for entry in path:
        name = os.path.basename(entry)
        if name == "pyspark.zip":
            archives["pyspark"] = entry
        elif name.startswith("py4j-") and name.endswith("-src.zip"):
            archives["py4j"] = entry
    rest = [entry for entry in path if entry not in archives.values()]
    for package, archive in archives.items():
        archived = _version_in(archive, package)
        if archived is None or archived != _version_at(rest, package):
            return list(path)
    return rest


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Hold back everything that is written to standard output and standard error meanwhile, also by libraries, and write it to
    standard error afterwards: Spark reads a number from standard output, and reads standard error only then."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, old in zip((1, 2), kept, strict=True):
                os.dup2(old, fd)
                os.close(old)
            file.seek(max(file.seek(0, os.SEEK_END) - SAID_BYTES, 0))
            os.write(2, file.read())


def load() -> None:
    """Load everything that a worker needs before its first row. No thread of Python's is running afterwards."""
    gc.disable()  # nothing that is loaded here is ever garbage
    try:
        _load()
    finally:
        gc.freeze()  # so that a collection in a worker does not copy the pages that it shares with this process
        gc.enable()


def _load() -> None:
    import numpy.random
    import pyspark.worker  # noqa: F401

    import spark_integration.tasks.entry_points  # noqa: F401
    from flux.shell import liveness_thread
    from partitioning.warm_up import is_warm, warm_up

    # Without this, all workers would draw the same numbers. Python's own generator seeds itself after a fork.
    os.register_at_fork(after_in_child=numpy.random.seed)
    if is_warm():  # compiling takes long, and all tasks of the executor would wait for it
        warm_up()
        liveness_thread.warm_up()


def _version_in(archive: str, package: str) -> bytes | None:
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.read(f"{package}/version.py")
    except (OSError, KeyError, zipfile.BadZipFile):
        return None


def _version_at(path: Sequence[str], package: str) -> bytes | None:
    """Return the version of the package that Python would import."""
    for entry in path:
        where = Path(entry) / package
        if where.is_dir() or where.with_suffix(".py").exists():
            try:
                return (where / "version.py").read_bytes()
            except OSError:
                return None
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
