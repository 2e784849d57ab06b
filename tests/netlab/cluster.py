"""Spark's standalone cluster in the laboratory: the master and the driver on the hub, a worker on each other host.

The calling thread is moved to the hub, because the driver and its JVM live there; it stays there.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pyspark
from pyspark.sql import SparkSession

from spark_integration.java import find_java
from tests.netlab.lab import HUB, Lab

ROOT = Path(__file__).parents[2]
PORT = 7077
#: Seconds until the master listens and all executors have registered.
START_S = 90.0
FOLDER = "flux-netlab-"
#: Options of JVMs that only keep processes: two cores have to do for nine of them.
IDLE_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def sweep() -> None:
    """Remove the folders of laboratories whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        pid = folder.name.removeprefix(FOLDER).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """Master, workers and a session, for a ``with`` statement."""

    def __init__(self, lab: Lab, cores: int = 2, memory_mb: int = 768) -> None:
        self._lab, self._cores, self._memory_mb = lab, cores, memory_mb
        self._hosts = [host for host in lab.addresses if host != HUB]
        sweep()
        self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-")
        self.spark: SparkSession | None = None
        lab.spaces[HUB].enter()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _program(self, host: str, main: str, *arguments: str) -> None:
        """Start a program of Spark's on a host. Its log is in the folder of the laboratory."""
        home = Path(pyspark.__file__).parent
        address = self._lab.addresses[host]
        environment = os.environ | {
            "SPARK_HOME": str(home),
            # The launcher of executors looks for the folders of a build of Spark unless it is told.
            "SPARK_SCALA_VERSION": next(home.glob("jars/spark-core_*.jar"))
            .name.removeprefix("spark-core_")
            .split("-")[0],
            "SPARK_LOCAL_IP": address,
            "SPARK_PUBLIC_DNS": address,
            "SPARK_LOCAL_DIRS": self._folder,
            "SPARK_LOG_DIR": self._folder,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [find_java(), *IDLE_JVM.split(), "-Xmx256m", *_opened(), "-cp", f"{home}/jars/*", main, *arguments]
        with open(Path(self._folder, f"{host}.log"), "ab") as said:
            self._lab.start(host, command, env=environment, cwd=self._folder, stdout=said, stderr=said)

    def _start(self) -> None:
        hub = self._lab.addresses[HUB]
        deploy = "org.apache.spark.deploy"
        at = ["--host", hub, "--port", str(PORT), "--webui-port", "0"]
        self._program(HUB, f"{deploy}.master.Master", *at)
        self._until_it_listens(hub)
        for host in self._hosts:
            size = ["--cores", str(self._cores), "--memory", f"{self._memory_mb}m", "--webui-port", "0"]
            where = ["--host", self._lab.addresses[host], "--work-dir", f"{self._folder}/{host}"]
            self._program(host, f"{deploy}.worker.Worker", *where, *size, f"spark://{hub}:{PORT}")

    def _until_it_listens(self, hub: str) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((hub, PORT), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > end:
                    log = Path(self._folder, f"{HUB}.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"Spark's master does not listen after {START_S:g} s:\n{log}") from None
            time.sleep(0.1)

    def session(self, **conf: Any) -> SparkSession:
        """Start a session with one executor on each host but the hub."""
        hub = self._lab.addresses[HUB]
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ |= {"SPARK_LOCAL_IP": hub, "SPARK_LOCAL_DIRS": self._folder}
        settings = {
            "spark.driver.host": hub,
            "spark.driver.bindAddress": hub,
            "spark.executor.memory": f"{self._memory_mb}m",
            "spark.executor.cores": self._cores,
            "spark.cores.max": self._cores * len(self._hosts),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.python.daemon.module": "spark_integration.daemon",
            "spark.driver.extraJavaOptions": IDLE_JVM,
            "spark.executor.extraJavaOptions": IDLE_JVM,
            "spark.executorEnv.PYTHONPATH": str(ROOT),
            "spark.sql.warehouse.dir": f"{self._folder}/warehouse",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{START_S:g}s",
        }
        builder = SparkSession.builder.master(f"spark://{hub}:{PORT}").appName("flux netlab")
        for key, value in (settings | conf).items():
            builder = builder.config(key, str(value))
        self.spark = builder.getOrCreate()
        self.spark.sparkContext.setLogLevel("ERROR")
        slots = self._cores * len(self._hosts)
        self.spark.range(0, slots * 4, 1, slots * 4).count()  # until executors have registered
        return self.spark

    def close(self) -> None:
        """Stop the session and remove its files. The programs end with the laboratory."""
        if self.spark is not None:
            self.spark.sparkContext.setLogLevel("OFF")
            self.spark.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened() -> list[str]:
    """Return the options by which Spark may use packages of Java's own, as its launcher gives them."""
    packages = "java.lang", "java.lang.invoke", "java.io", "java.net", "java.nio", "java.util", "java.util.concurrent"
    return [f"--add-opens=java.base/{each}=ALL-UNNAMED" for each in (*packages, "sun.nio.ch", "sun.security.action")]
