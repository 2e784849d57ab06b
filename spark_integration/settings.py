"""``spark.flux.*`` of a session, and the task slots of its cluster (DESIGN 1, 2)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from controller.wording import count
from flux.errors import UsageError
from flux.settings import PREFIX, Settings


def read_settings(spark: SparkSession, options: dict[str, Any]) -> Settings:
    # The context's own configuration holds what was given at start; the session's may have been changed since.
    conf = {key: value for key, value in spark.sparkContext.getConf().getAll() if key.startswith(PREFIX)}
    conf.update({key: value for key, value in spark.conf.getAll.items() if key.startswith(PREFIX)})
    return Settings.of(conf, **options)


def is_local(spark: SparkSession) -> bool:
    return str(spark.sparkContext.master).startswith("local")


def is_case_sensitive(spark: SparkSession) -> bool:
    """Whether the session tells column names apart by upper and lower case."""
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def task_slots(spark: SparkSession) -> int:
    """How many tasks can run at once when every executor is there."""
    context = spark.sparkContext
    per_task = int(context.getConf().get("spark.task.cpus", "1"))
    return max(_cores(spark) // per_task, 1)


def live_slots(spark: SparkSession) -> int:
    """How many tasks can run at once on the executors that are there and are not to go."""
    context = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def _cores(spark: SparkSession) -> int:
    context = spark.sparkContext
    conf = context.getConf()
    master = str(context.master)
    if match := re.fullmatch(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?", master):
        return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)
    if match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(match[1]) * int(match[2])
    instances = conf.get("spark.executor.instances") or conf.get("spark.dynamicAllocation.maxExecutors")
    if instances is not None and int(instances) < 1 << 20:
        return int(instances) * int(conf.get("spark.executor.cores", "1") or 1)
    return int(context.defaultParallelism)


@dataclass(frozen=True)
class Need:
    """Task slots that a query needs at once: its workers, and one for the Spark tasks that feed it or fetch from it."""

    workers: int
    others: int


@dataclass(frozen=True)
class Room:
    """So many workers a query may have at most, and why not more."""

    workers: int
    arithmetic: str


def room_for_workers(need: Need, slots: int, taken: dict[str, int]) -> Room:
    """``taken``: slots held by other queries, by name."""
    workers = max(slots - need.others - sum(taken.values()), 0)
    feeding = f", {need.others} for the Spark tasks that read the input or fetch the output" if need.others else ""
    return Room(
        workers,
        f"{slots} task slots exist{_held(taken)}{feeding}: there is room for {count(workers, 'worker')}. Give the cluster more "
        "executor cores first",
    )


def _held(taken: dict[str, int]) -> str:
    return "".join(f", {count} held by query {name}" for name, count in taken.items())


def count_slots(wanted_workers: int, spark_tasks: bool, slots: int, taken: dict[str, int]) -> Need:
    """UsageError with the arithmetic in it if there are too few. ``taken``: slots held by other queries, by name."""
    others = 1 if spark_tasks else 0
    free = slots - sum(taken.values())
    default = free // 2 if spark_tasks else free
    workers = wanted_workers or max(default, 1)
    if workers + others > free:
        held = _held(taken)
        feeding = " + 1 for the Spark tasks that read the input or fetch the output" if others else ""
        raise UsageError(
            f"too few task slots: {count(workers, 'worker')}{feeding} = {count(workers + others, 'slot')} needed; "
            f"existing: {slots}{held}, free: {max(free, 0)}. Give the cluster more executor cores (for example master "
            f"local[{workers + others + slots - free}]), or set spark.flux.workers lower"
        )
    return Need(workers, others)
