"""The Spark session of the benchmarks: real executors on this machine."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from pyspark.sql import SparkSession

#: Options for JVMs that only keep the workers' processes. Optimising their code and collecting their garbage in many threads
#: would take the cores from the workers for seconds, whenever an executor starts.
IDLE_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def start(
    executors: int, cores: int, memory_mb: int = 2048, idle_jvm: bool = False, **conf: Any
) -> tuple[SparkSession, float]:
    """Start a ``local-cluster`` of executors. Return the session, and the time of its start in seconds.

    ``idle_jvm``: no row passes a JVM, neither in Flux nor in the Spark query that it is compared with."""
    started = time.perf_counter()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(f"local-cluster[{executors},{cores},{memory_mb}]")
        .appName("flux bench")
        .config("spark.ui.enabled", "false")
        .config("spark.python.daemon.module", "spark_integration.daemon")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.executor.memory", f"{memory_mb}m")
    )
    if idle_jvm:
        conf = {"spark.driver.extraJavaOptions": IDLE_JVM, "spark.executor.extraJavaOptions": IDLE_JVM} | conf
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.range(0, executors * cores * 4, 1, executors * cores * 4).count()  # until executors have registered
    return spark, time.perf_counter() - started
