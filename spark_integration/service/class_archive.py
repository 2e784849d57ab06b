"""An archive of Spark's classes, with which the JVM of a service begins in half the time (design: class-archive).

A JVM loads and checks ten thousand classes until it has a session: three seconds of a processor at each start. Java can keep them
in a file as they are in memory. It checks that a file fits its release and its class path, and begins without one that does not.

The file is in the cache of the user, 130 MB for each release of Java and Spark. It is made once, by a session of its own at the
lowest priority, while a service runs; until then services begin without it. Law: a file has its name when it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("flux")

#: Seconds after the start of a service at which an archive is made: its first results go first.
AFTER_S = 20.0
#: Seconds that the making of an archive may take, at the lowest priority.
MAKES_S = 600.0
#: Warnings about an archive that does not fit would come at each start.
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"


def archive_path() -> Path | None:
    """Return the path of the archive for the present Java and Spark, whether it is there or not. None: this user has no folder
    that is closed to other writers."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flux"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return None
    if (
        found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o022
        or any(each in " '\"\\" for each in str(folder))
    ):
        return None
    made_for = _made_for()
    return None if made_for is None else folder / f"classes-{made_for}.jsa"


def _made_for() -> str | None:
    """Return a digest of the Java and the Spark that would run. None: they are not found."""
    import pyspark

    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin" / "java" if home else Path(shutil.which("java") or "java")
    jars = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent) / "jars"
    try:
        java = java.resolve(strict=True)
        told = [f"{each} {each.stat().st_mtime_ns} {each.stat().st_size}" for each in (java, jars)]
    except OSError:
        return None
    return hashlib.sha256("\n".join([pyspark.__version__, *told]).encode()).hexdigest()[:16]


def java_options() -> str:
    """Return options for a JVM that begins with the archive; empty: there is none."""
    path = archive_path()
    try:
        if path is None or not path.stat().st_size:  # an empty file: this Java makes none
            return ""
    except OSError:
        return ""
    return f"-XX:SharedArchiveFile={path} {_QUIET}"


@contextlib.contextmanager
def made_beside(jvm_options: str, after_s: float = AFTER_S) -> Iterator[None]:
    """Make the archive after a while, in a process of its own, if there is none. The process ends with the block.

    jvm_options  the options of the JVM that will use it"""
    path, over = archive_path(), threading.Event()
    if path is None or path.exists():
        yield
        return

    def make() -> None:
        if over.wait(after_s):
            return
        command = [sys.executable, "-m", "spark_integration.service.class_archive", str(path), jvm_options]
        made = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        waits = threading.Thread(target=made.wait, daemon=True)
        waits.start()
        while waits.is_alive() and not over.wait(0.5):
            pass
        if waits.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(made.pid, signal.SIGKILL)
            waits.join()
        else:
            log.info("an archive of Spark's classes was made: %s", path)

    thread = threading.Thread(target=make, name="flux-classes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def make_archive(path: Path, jvm_options: str) -> None:
    """Make an archive by a session that loads the classes of a start and of a registration."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    for left in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
        left.unlink(missing_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    options = f"{jvm_options} -XX:ArchiveClassesAtExit={half} -Xlog:disable"
    builder = SparkSession.builder.master("local[1]").appName("flux classes")
    builder = builder.config("spark.driver.extraJavaOptions", options).config("spark.ui.enabled", "false")
    session = builder.getOrCreate()
    session.sparkContext.parallelize(range(1), 1).count()
    text = "SELECT a, count(*) AS n FROM VALUES (1), (2) AS t(a) WHERE a > 1 GROUP BY a"
    assert session.sql(text).schema.names == ["a", "n"]
    gateway = SparkContext._gateway
    session.stop()
    assert gateway is not None
    gateway.shutdown()
    java = gateway.proc
    java.stdin.close()
    java.wait(MAKES_S)
    half.touch(0o600)
    with open(half, "rb") as file:
        os.fsync(file.fileno())
    half.rename(path)


def _ends_with_the_service() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)  # the JVM, too: it would write an archive that has no use


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # the JVM is in it, too, and nothing else
    os.nice(19)
    threading.Thread(target=_ends_with_the_service, daemon=True).start()
    make_archive(Path(sys.argv[1]), sys.argv[2])
