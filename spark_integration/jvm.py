"""Classes and static members of the JVM by name, each looked up once.

py4j asks the JVM for each part of a name, each time that the name is used: seven questions before the call of a static method of
Spark's. An analysis of a text asks for a few such names again and again, and a question takes some tenths of a millisecond.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

#: By the view of a JVM, which goes with its gateway: what py4j has given for a name. These objects hold no thread and no
#: connection of their own.
_FOUND: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def of_jvm(spark: SparkSession, name: str) -> Any:
    """Return a class, a static method or a constant by its whole name, with its package."""
    found = _FOUND.setdefault(spark._jvm, {})
    if name not in found:
        part: Any = spark._jvm
        for each in name.split("."):
            part = getattr(part, each)
        found[name] = part
    return found[name]


def without_rows(spark: SparkSession, columns: StructType) -> DataFrame:
    """Return a DataFrame of these columns without rows."""
    kind = of_jvm(spark, "org.apache.spark.sql.types.DataType.fromJson")(columns.json())
    return DataFrame(spark._jsparkSession.createDataFrame(of_jvm(spark, "java.util.ArrayList")(), kind), spark)


def frame_of(spark: SparkSession, plan: Any) -> DataFrame:
    """Return the DataFrame of one of Spark's logical plans, which Spark analyses meanwhile."""
    return DataFrame(of_jvm(spark, "org.apache.spark.sql.classic.Dataset.ofRows")(spark._jsparkSession, plan), spark)
