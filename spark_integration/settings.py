"""``spark.flux.*`` of a session, and the task slots of its cluster (design: settings, task-slots)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark import SparkConf
from pyspark.sql import SparkSession

from controller.text import count
from flux.dataflow.plan import Plan
from flux.errors import UsageError
from flux.replica.kinds import replicated
from flux.settings import PREFIX, Settings
from flux.vault.location import Place

#: Master with a number of executors, each with a number of cores, on this machine.
LOCAL_CLUSTER = r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]"
#: From this number on, task slots and executors count as unlimited; Spark's own default is beyond.
UNLIMITED = 1 << 20


def context_conf(spark: SparkSession) -> SparkConf:
    """Return the configuration of the session's context, which must not be changed. The public method of the context copies it,
    with several calls to the JVM for each entry: eight hundred in all while a query starts."""
    return spark.sparkContext._conf


def given_settings(spark: SparkSession) -> dict[str, str]:
    """Return the ``spark.flux.*`` of a session."""
    # The context's own configuration has the settings given at start; the session's may have been changed since. It alone is
    # asked for these settings only: PySpark's methods make several calls to the JVM for each of all settings.
    given = context_conf(spark)._jconf.getAllWithPrefix(PREFIX)
    conf = {f"{PREFIX}{each._1()}": str(each._2()) for each in given}
    pairs = (each.partition(" -> ") for each in session_text(spark).split("\0"))
    return conf | {key: value for key, _, value in pairs if key.startswith(PREFIX)}


def session_text(spark: SparkSession) -> str:
    """Return all settings of a session, as ``key -> value`` with zero bytes between them, in two calls to the JVM."""
    return str(spark._jsparkSession.conf().getAll().mkString("\0"))


def decides_on_shared_executors(given: Mapping[str, str], options: dict[str, Any]) -> bool:
    """Tell whether the user has decided if replicas may share an executor."""
    return "replicas_allow_same_executor" in options or f"{PREFIX}replicas.allowSameExecutor" in given


def with_flushes_for(place: Place, settings: Settings, given: Mapping[str, str], options: dict[str, Any]) -> Settings:
    """Return the settings, with an interval of flushes that suits the place unless the user has set one."""
    said = "journal_flush" in options or f"{PREFIX}journal.flush" in given
    return settings if said else replace(settings, journal_flush=place.flush_s)


def is_local(spark: SparkSession) -> bool:
    return str(spark.sparkContext.master).startswith("local")


def is_encrypted(spark: SparkSession, settings: Settings) -> bool:
    if settings.encrypt not in ("auto", "true", "false"):
        raise UsageError(f"spark.flux.encrypt must be true, false or auto, got {settings.encrypt!r}")
    return settings.encrypt == "true" or (settings.encrypt == "auto" and not is_local(spark))


def is_case_sensitive(spark: SparkSession) -> bool:
    """Tell whether the session tells column names apart by upper and lower case."""
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def ignored_files(spark: SparkSession) -> tuple[bool, bool]:
    """Tell whether the session leaves out missing files, and whether it leaves out corrupt ones."""
    missing, corrupt = (
        str(spark.conf.get(f"spark.sql.files.ignore{kind}Files", "false")).lower() == "true"
        for kind in ("Missing", "Corrupt")
    )
    return missing, corrupt


def has_one_executor(spark: SparkSession) -> bool:
    """Tell whether the driver is the executor: master local, local[N], local[N,F]."""
    return re.fullmatch(r"local(\[.*\])?", str(spark.sparkContext.master)) is not None


def grows_on_demand(spark: SparkSession) -> bool:
    """Tell whether Spark gets more executors when tasks wait (dynamic allocation)."""
    conf = context_conf(spark)
    return str(conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true" and not has_one_executor(spark)


def executors_at_most(spark: SparkSession) -> int | None:
    """Return the largest number of executors. None: there is no limit, or it is not known."""
    context = spark.sparkContext
    if has_one_executor(spark):
        return 1
    limits = []
    if match := re.fullmatch(LOCAL_CLUSTER, str(context.master)):
        limits.append(int(match[1]))
    limit = "spark.dynamicAllocation.maxExecutors" if grows_on_demand(spark) else "spark.executor.instances"
    if (given := context_conf(spark).get(limit)) is not None and int(given) < UNLIMITED:
        limits.append(int(given))
    return min(limits, default=None)


def task_slots(spark: SparkSession) -> int:
    """Return the number of tasks that can run at once when every executor is there; UNLIMITED if Spark gets executors on
    demand without limit."""
    executors = executors_at_most(spark)
    if executors is None and grows_on_demand(spark):
        return UNLIMITED
    return max(_cores(spark, executors) // _cores_per_task(spark), 1)


def slots_at_first(spark: SparkSession) -> int:
    """Return the number of tasks that can run at once without asking Spark for more executors."""
    conf = context_conf(spark)
    keys = ("dynamicAllocation.initialExecutors", "dynamicAllocation.minExecutors", "executor.instances")
    executors = max(int(conf.get(f"spark.{key}", "0") or 0) for key in keys)
    return max(_cores(spark, executors) // _cores_per_task(spark), live_slots(spark))


def _cores_per_task(spark: SparkSession) -> int:
    return int(context_conf(spark).get("spark.task.cpus", "1") or 1)


def live_slots(spark: SparkSession) -> int:
    """Return the number of tasks that can run at once on the executors that are there and are not to go."""
    context = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def failures_at_most(spark: SparkSession) -> int:
    """Return the number of failures of a task with which its job fails."""
    context = spark.sparkContext
    if has_one_executor(spark):
        match = re.fullmatch(r"local\[[^,]+,\s*(\d+)\]", str(context.master))
        return int(match[1]) if match else 1
    return int(context_conf(spark).get("spark.task.maxFailures", "4") or 4)


def _cores(spark: SparkSession, executors: int | None) -> int:
    """Return the cores of this number of executors; None: their number is not known, and Spark's own guess counts."""
    context = spark.sparkContext
    master = str(context.master)
    if match := re.fullmatch(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?", master):
        return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)
    if executors is None:
        return int(context.defaultParallelism)
    match = re.fullmatch(LOCAL_CLUSTER, master)
    return executors * int(match[2] if match else context_conf(spark).get("spark.executor.cores", "1") or 1)


@dataclass(frozen=True)
class Need:
    """Task slots that a query needs at once: its workers, and one for the Spark tasks that feed it or fetch from it."""

    #: Workers, a slot for each.
    workers: int
    #: 1 if Spark tasks feed the query or fetch from it, otherwise 0.
    spark_tasks: int


@dataclass(frozen=True)
class Room:
    """Largest number of workers that a query may have, with the arithmetic."""

    workers: int
    arithmetic: str


@dataclass(frozen=True)
class OtherQueries:
    """Other queries of the session, as far as task slots are concerned."""

    #: Task slots that the workers of each query hold, by the query's name.
    held: Mapping[str, int] = field(default_factory=dict)
    #: A query whose Spark tasks still have to read its input or to fetch its output. Such tasks need a slot now and then: one
    #: slot for those of all queries together.
    feeding: str | None = None

    @property
    def slots(self) -> int:
        return sum(self.held.values())


def room_for_workers(need: Need, slots: int, others: OtherQueries) -> Room:
    """Return the number of workers that fit beside the other queries."""
    kept = _kept(need.spark_tasks, others)
    workers = max(slots - kept - others.slots, 0)
    feeding = f", {_kept_for(need.spark_tasks, others)}" if kept else ""
    return Room(
        workers,
        f"{slots} task slots exist{_held(others)}{feeding}: there is room for {count(workers, 'worker')}. Give the cluster more "
        "executor cores first",
    )


def _held(others: OtherQueries) -> str:
    return "".join(f", {count} held by query {name}" for name, count in others.held.items())


def _kept(own: int, others: OtherQueries) -> int:
    """Return the number of slots that workers must leave free."""
    return max(own, int(others.feeding is not None))


def _kept_for(own: int, others: OtherQueries) -> str:
    whose = "" if own else f" of query {others.feeding}"
    return f"1 for the Spark tasks{whose} that read the input or fetch the output"


def count_slots(
    wanted_workers: int,
    spark_tasks: bool,
    slots: int,
    others: OtherQueries,
    replicas: int = 1,
    at_first: int | None = None,
) -> Need:
    """Count the task slots of a query. UsageError with the arithmetic in it if there are too few.

    ``spark_tasks``: Spark tasks feed the query or fetch from it. Each of ``replicas`` of a partition needs a worker of its own.
    ``at_first`` is the number of slots that exist now, if more come on demand; ``slots`` is their number in the end."""
    own = 1 if spark_tasks else 0  # slots for the Spark tasks of this query
    kept = _kept(own, others)  # slots for the Spark tasks of all queries
    free = slots - others.slots  # in the end
    free_now = free if at_first is None else at_first - others.slots
    # Half of the slots for Spark tasks, if there are any: one slot is enough for them, but they would read one after the other.
    default = free_now // 2 if spark_tasks else free_now - kept
    workers = wanted_workers or max(default, replicas, 1)
    if workers + kept > free:
        feeding = f" + {_kept_for(own, others)}" if kept else ""
        raise UsageError(
            f"too few task slots: {count(workers, 'worker')}{feeding} = {count(workers + kept, 'slot')} needed; "
            f"existing: {slots}{_held(others)}, free: {max(free, 0)}. Give the cluster more executor cores (for example master "
            f"local[{workers + kept + slots - free}]), or set spark.flux.workers lower"
        )
    return Need(workers, own)


def check_replicas(plan: Plan, workers: int, executors: int | None) -> None:
    """Raise UsageError if there are certainly too few workers, or executors, for all replicas. ``executors`` is the largest
    number of them, None if it is not known."""
    apart = not plan.settings.same_executor
    for stage in plan.stages:
        if stage.replicas > workers:
            raise UsageError(
                f"stage {stage.name} wants replicas={stage.replicas}, each in a worker of its own, and the query has "
                f"{count(workers, 'worker')}: set spark.flux.workers to {stage.replicas} or more, or replicas lower"
            )
        if apart and executors is not None and stage.replicas > executors:
            raise UsageError(
                f"stage {stage.name} wants replicas={stage.replicas} on different executors, and there are not more than "
                f"{executors}: use more executors, or fewer replicas, or set "
                "spark.flux.replicas.allowSameExecutor to true"
            )


def one_executor_warning(plan: Plan, master: str, failures: int) -> str:
    """Warn of replicas that are all in the one executor of ``master``; empty if there are none."""
    stages = [stage.name for stage in plan.stages if replicated(stage) and not stage.collects]
    if not stages:
        return ""
    cores = re.fullmatch(r"local\[([^,]+).*\]", master)
    hint = "" if failures > 1 else f", if Spark may start its task again, as in local[{cores[1] if cores else 1},8]"
    return (
        f"master {master} has one executor, and all replicas of {', '.join(stages)} are in it: good for trying things out. They "
        f"go with the executor; from a Python worker that dies they take over{hint}"
    )
