"""A cluster before anything starts: its task slots and executors, and places for all copies."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import dataframe

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import Plan
from flux.settings import Settings
from spark_integration.query import running_queries as active
from spark_integration.settings import (
    UNLIMITED,
    OtherQueries,
    check_replicas,
    count_slots,
    executors_at_most,
    failures_at_most,
    grows_on_demand,
    one_executor_warning,
    slots_at_first,
    task_slots,
)

SCHEMA = pa.schema([("k", pa.int64())])
ON_DEMAND = {"spark.dynamicAllocation.enabled": "true", "spark.executor.cores": "4"}


def session(master: str, live: int, conf: dict[str, str]) -> Any:
    manager = SimpleNamespace(defaultResourceProfile=lambda: None)
    scala = SimpleNamespace(maxNumConcurrentTasks=lambda _: live, resourceProfileManager=lambda: manager)
    context = SimpleNamespace(master=master, _conf=conf, defaultParallelism=2, _jsc=SimpleNamespace(sc=lambda: scala))
    return SimpleNamespace(sparkContext=context)


def plan(replicas: int, **options: Any) -> Plan:
    @flux.stage(key="k", partitions=2, replicas=replicas)
    class Delays(flux.Aggregate):
        n = flux.count()

    return compile_plan([Delays(dataframe(SCHEMA))], Settings.of(None, **options), lambda s: s, "q", b"s")


@pytest.mark.parametrize(
    ("master", "conf", "executors", "slots"),
    [
        ("local", {}, 1, 1),
        ("local[3]", {}, 1, 3),
        ("local[3, 8]", {"spark.executor.instances": "5"}, 1, 3),
        ("local-cluster[3,2,1024]", {}, 3, 6),
        ("local-cluster[3,2,1024]", ON_DEMAND, 3, 6),
        ("yarn", {"spark.executor.instances": "5", "spark.executor.cores": "4", "spark.task.cpus": "2"}, 5, 10),
        ("yarn", ON_DEMAND, None, UNLIMITED),
        ("yarn", ON_DEMAND | {"spark.dynamicAllocation.maxExecutors": str((1 << 31) - 1)}, None, UNLIMITED),
        ("yarn", ON_DEMAND | {"spark.executor.instances": "2"}, None, UNLIMITED),
        ("yarn", ON_DEMAND | {"spark.dynamicAllocation.maxExecutors": "3"}, 3, 12),
        ("spark://host:7077", {}, None, 2),
    ],
)
def test_slots_and_executors_are_those_that_there_can_be(
    master: str, conf: dict[str, str], executors: int | None, slots: int
) -> None:
    spark = session(master, 0, conf)
    assert (executors_at_most(spark), task_slots(spark)) == (executors, slots)


def test_with_dynamic_allocation_the_default_goes_by_what_is_there_at_first_and_more_may_be_asked_for() -> None:
    spark = session("yarn", 2, ON_DEMAND)
    assert grows_on_demand(spark)
    assert not grows_on_demand(session("local[4]", 4, ON_DEMAND))
    assert slots_at_first(spark) == 2
    assert slots_at_first(session("yarn", 0, ON_DEMAND | {"spark.dynamicAllocation.initialExecutors": "3"})) == 12
    assert count_slots(0, True, UNLIMITED, OtherQueries(), replicas=2, at_first=0).workers == 2
    assert count_slots(0, True, UNLIMITED, OtherQueries(), replicas=2, at_first=12).workers == 6
    assert count_slots(64, True, UNLIMITED, OtherQueries({"x": 9}), replicas=2, at_first=0).workers == 64


def test_there_are_as_many_workers_as_copies_if_there_is_room() -> None:
    assert count_slots(0, True, 3, OtherQueries(), replicas=2).workers == 2  # the README's first example on local[3]
    with pytest.raises(flux.UsageError, match=r"2 workers \+ 1 for .* = 3 slots needed; existing: 2, .*local\[3\]"):
        count_slots(0, True, 2, OtherQueries(), replicas=2)


def test_copies_without_a_place_are_refused_before_anything_starts() -> None:
    check_replicas(plan(2), workers=3, executors=3)
    check_replicas(plan(2), workers=2, executors=None)
    check_replicas(plan(3, replicas_allow_same_executor=True), workers=3, executors=1)
    for replicas, workers, executors, options, message in (
        (
            2,
            1,
            3,
            {},
            r"stage Delays wants replicas=2, .* the query has 1 worker: set spark\.flux\.workers to 2 or more",
        ),
        (3, 2, 1, {"replicas_allow_same_executor": True}, r"stage Delays wants replicas=3, .* the query has 2 workers"),
        (2, 3, 1, {}, r"stage Delays wants replicas=2 on different executors, and there are not more than 1"),
    ):
        with pytest.raises(flux.UsageError, match=message):
            check_replicas(plan(replicas, **options), workers, executors)


def test_a_line_says_what_copies_in_one_executor_are_good_for() -> None:
    assert one_executor_warning(plan(1), "local[3]", 1) == ""
    assert one_executor_warning(plan(2), "local[3]", 1) == (
        "master local[3] has one executor, and all replicas of Delays are in it: good for trying things out. They go with the "
        "executor; from a Python worker that dies they take over, if Spark may start its task again, as in local[3,8]"
    )
    assert one_executor_warning(plan(2), "local[3,8]", 8).endswith("from a Python worker that dies they take over")


@pytest.mark.parametrize(
    ("master", "conf", "failures"),
    [("local[3]", {}, 1), ("local[*,8]", {}, 8), ("yarn", {}, 4), ("yarn", {"spark.task.maxFailures": "20"}, 20)],
)
def test_a_task_may_fail_as_often_as_spark_says(master: str, conf: dict[str, str], failures: int) -> None:
    assert failures_at_most(session(master, 0, conf)) == failures


def test_what_is_being_started_at_once_shares_the_slots() -> None:
    """Compiling a plan takes seconds; the query that was counted first keeps its slots."""
    five = partial(count_slots, 0, True, 5)
    with active.claimed("a", "first", lambda others: five(others, replicas=2)) as need:
        assert need.workers == 2
        assert active.others().held == {"first": 2}
        assert active.others(than="a") == OtherQueries(), "it is no other to itself"
        with active.claimed("b", None, lambda others: five(others, replicas=2)) as other:
            assert other.workers == 2
            with pytest.raises(flux.UsageError, match="2 held by query first, 2 held by query b, free: 1"):  # noqa: SIM117
                with active.claimed("c", None, lambda others: five(others, replicas=2)):
                    pytest.fail("there is no room")
        assert active.others().held == {"first": 2}
    assert active.others() == OtherQueries()
