"""A session for texts alone, in which they are parsed and analysed.

The session has no temporary views, functions or variables of the user's, reads no variables out of texts, and takes no path for a
table. The analyser gets nodes of the text over empty DataFrames, and never the name of a table: so it has nothing to look up in a
catalog or in files (design: sql-own-session).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from flux.errors import UsageError
from spark_integration.jvm import frame_of, of_jvm, without_rows
from spark_integration.settings import session_text
from spark_integration.sql.text import QueryText
from spark_integration.sql.trees import sequence_of

#: The most characters of a text: Spark's parser takes seconds for more, and stack for each nesting.
TEXT_MAX = 100_000
#: Settings of the session, whatever that of the user has.
_SETTINGS = {
    "spark.sql.variable.substitute": "false",  # ${env:HOME} stays as it is written
    "spark.sql.runSQLOnFiles": "false",
    "spark.sql.parser.eagerEvalOfUnresolvedInlineTable": "false",
}


#: By session of a user, its settings and the session for texts that has them: making one takes longer than most texts.
_MADE: WeakKeyDictionary[SparkSession, tuple[str, TextSession]] = WeakKeyDictionary()


def text_session(user: SparkSession) -> TextSession:
    """Return the session for texts with the settings that the user's session has now. Texts leave nothing in it, so texts share
    one until a setting changes."""
    settings = session_text(user)
    found = _MADE.get(user)
    if found is None or found[0] != settings:
        found = _MADE[user] = settings, TextSession(user)
    return found[1]


class TextSession:
    """A session in which texts are parsed and analysed, with the settings that the user's session has now."""

    def __init__(self, user: SparkSession) -> None:
        self.spark = user.newSession()
        given = user._jsparkSession.sessionState().conf().getAllConfs()
        settings = of_jvm(user, "java.util.Properties")()
        settings.putAll(of_jvm(user, "scala.jdk.javaapi.CollectionConverters.asJava")(given))
        for name, value in _SETTINGS.items():
            settings.setProperty(name, value)
        self.spark._jsparkSession.sessionState().conf().setConf(settings)

    def parsed(self, text: QueryText) -> Any:
        """Return the tree of a text. UsageError has the words of Spark, and the place."""
        if len(text.text) > TEXT_MAX:
            raise UsageError(
                f"flux.sql: expected at most {TEXT_MAX:,} characters, got {len(text.text):,}: a flow may be given to the next "
                "text"
            )
        try:
            with self._active():
                return self.spark._jsparkSession.sessionState().sqlParser().parsePlan(text.text)
        except PySparkException as error:
            raise text.of_spark(error) from error
        except Py4JJavaError as error:
            raise _of_java(error) from error

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Make this the active session of the thread: Spark's parser goes by the settings of the active one, whosever it is."""
        sessions = of_jvm(self.spark, "org.apache.spark.sql.classic.SparkSession")
        before = sessions.getActiveSession()
        sessions.setActiveSession(self.spark._jsparkSession)
        try:
            yield
        finally:
            if before.isDefined():
                sessions.setActiveSession(before.get())
            else:
                sessions.clearActiveSession()

    def empty(self, columns: StructType) -> DataFrame:
        """Return a DataFrame of these columns without rows."""
        return without_rows(self.spark, columns)

    def over(self, node: Any, frames: Sequence[DataFrame]) -> Any:
        """Return a relation of a text over DataFrames, which take the places of the relations below it."""
        plans = [frame._jdf.queryExecution().analyzed() for frame in frames]
        return node.withNewChildren(self.sequence(plans))

    def sequence(self, elements: Sequence[Any]) -> Any:
        """Return a sequence of Scala's."""
        return sequence_of(self.spark, elements)

    def analysed(self, text: QueryText, relation: Any) -> DataFrame:
        """Return the DataFrame of a relation over DataFrames. UsageError has the words of Spark, and the place."""
        try:
            return frame_of(self.spark, relation)
        except PySparkException as error:
            raise text.of_spark(error, relation) from error
        except Py4JJavaError as error:
            raise _of_java(error) from error


def _of_java(error: Py4JJavaError) -> UsageError:
    """Make an error of one of the JVM, which is none of the analyser: a text that is nested too deeply, or a defect of Spark."""
    told = str(error.java_exception.toString())
    if "StackOverflowError" in told:
        told = "it is nested too deeply. A flow may be given to the next text under a name"
    return UsageError(f"flux.sql: Spark cannot read the text: {told:.300}")
