"""The archive of Spark's classes, which makes a JVM begin faster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spark_integration.service import class_archive
from spark_integration.service.class_archive import archive_path, java_options, made_beside
from spark_integration.service.command import IDLE_JVM

pytestmark = pytest.mark.spark


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flux"


def test_a_jvm_begins_with_the_archive_that_is_there(cache: Path) -> None:
    path = archive_path()
    assert path is not None
    assert path.parent == cache
    assert java_options() == ""
    path.write_bytes(b"classes")
    assert f"-XX:SharedArchiveFile={path}" in java_options()


def test_an_empty_archive_says_that_this_java_makes_none(cache: Path) -> None:
    path = archive_path()
    assert path is not None
    path.touch()
    assert java_options() == ""
    with made_beside(IDLE_JVM, 0.0):
        time.sleep(0.1)
    assert os.listdir(cache) == [path.name]


def test_a_folder_that_others_may_write_to_has_none(cache: Path) -> None:
    path = archive_path()
    assert path is not None
    path.write_bytes(b"classes")
    cache.chmod(0o777)
    assert (archive_path(), java_options()) == (None, "")


def test_another_java_has_another_archive(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = archive_path()
    java = tmp_path / "java17" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java17"))
    assert archive_path() != before


def test_the_making_of_an_archive_ends_with_its_service(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def slow(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(100)"], **more))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr("spark_integration.service.class_archive.subprocess.Popen", slow)
    with made_beside(IDLE_JVM, 0.0):
        end = time.monotonic() + 20
        while not started and time.monotonic() < end:
            time.sleep(0.01)
    assert started, "no archive is begun within 20 s"
    assert started[0].returncode is not None


@pytest.mark.long
def test_a_jvm_takes_half_the_time_with_an_archive(cache: Path) -> None:
    path = archive_path()
    assert path is not None
    made = [sys.executable, "-m", "spark_integration.service.class_archive", str(path), IDLE_JVM]
    with subprocess.Popen(made, stdin=subprocess.PIPE) as process:
        assert process.wait(class_archive.MAKES_S) == 0
    began = (
        "import psutil, sys; from pyspark.sql import SparkSession; "
        "SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false')"
        ".config('spark.driver.extraJavaOptions', sys.argv[1]).getOrCreate(); "
        "print(sum(sum(each.cpu_times()[:2]) for each in psutil.Process().children(recursive=True)))"
    )

    def cpu_s(options: str) -> float:
        found = subprocess.run([sys.executable, "-c", began, options], capture_output=True, text=True, check=True)
        return float(found.stdout.split()[-1])

    assert cpu_s(f"{IDLE_JVM} {java_options()}") < 0.7 * cpu_s(IDLE_JVM)
