"""Hides Spark's own progress bar while queries run, and shows it again after the last. It would stay on the console for as
long as a query runs, and say nothing: it counts tasks that have ended, and workers do not end.

Spark has no public way to do that. In a release of Spark where the way used here does not work, the bar stays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

log = logging.getLogger("flux")

_lock = threading.Lock()
_queries = 0
_put_away = False

FAILURES = (Py4JError, AttributeError, TypeError, OSError)


def put_bar_away(spark: SparkSession) -> None:
    """Hide the bar. Each query calls this once, and ``put_bar_back`` at its end."""
    global _queries, _put_away
    with _lock:
        _queries += 1
        if _queries == 1:
            _put_away = _attempt(lambda: _stop(spark))


def put_bar_back(spark: SparkSession) -> None:
    global _queries, _put_away
    with _lock:
        _queries -= 1
        if _queries == 0 and _put_away:
            _put_away = False
            _attempt(lambda: _start(spark))


def _stop(spark: SparkSession) -> bool:
    """Stop the bar. False: there is none."""
    context = spark.sparkContext._jsc.sc()
    bar = context.progressBar()
    if not bar.isDefined():
        return False
    bar.get().finishAll()
    bar.get().stop()
    _field(context).set(context, spark._jvm.scala.Option.empty())
    return True


def _start(spark: SparkSession) -> bool:
    context = spark.sparkContext._jsc.sc()
    if context.isStopped():
        return False
    made = spark._jvm.org.apache.spark.ui.ConsoleProgressBar(context)
    _field(context).set(context, spark._jvm.scala.Option.apply(made))
    return True


def _field(context: Any) -> Any:
    field = context.getClass().getDeclaredField("_progressBar")
    field.setAccessible(True)
    return field


def _attempt(change: Callable[[], bool]) -> bool:
    try:
        return change()
    except FAILURES as error:
        log.debug("Spark's progress bar is left as it is: %s", error)
        return False
