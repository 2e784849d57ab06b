"""``flux.datasource``: a Python data source of PySpark as a source of a flow, read inside the workers and not through the JVM.

The steps that Spark takes once on its driver are taken once here, in the program that starts the query: the data source is
made, its schema is asked, and its partitions are planned. A query that goes on from a checkpoint reads the partitions that
were planned at its first start.
"""

from __future__ import annotations

import base64
import inspect
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark import SparkContext, cloudpickle
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from flux.connectors.ledger import ledger_folder
from flux.dataflow.source import Positioned, Source, source
from flux.dataflow.source_reader import SourceReader
from flux.dataflow.threaded_reader import ThreadedReader
from flux.errors import UsageError, UserCodeError
from flux.operators.schema import parse_ddl
from flux.operators.user_code import described, text_of, user_traceback
from flux.settings import parse_seconds
from spark_integration.datasource.rows import arrow_schema, batches
from spark_integration.datasource.stream import StreamReading

#: Partitions of a data source that are read at the same time by default.
_AT_ONCE = 8
#: Time for which rows wait for more rows, in seconds: a batch source is not for users who want to see each row at once.
GATHER_S = 0.05


def datasource(
    kind: Any,
    options: Mapping[str, Any] | None = None,
    schema: Any = None,
    *,
    stream: bool = False,
    partitions: int | None = None,
    ledger: Any = None,
    commit: bool = False,
    poll: float | str = "200ms",
    name: str | None = None,
) -> Source:
    """Make the source, see ``flux.datasource``."""
    if not inspect.isclass(kind) or not issubclass(kind, DataSource):
        raise UsageError(
            f"flux.datasource wants a class derived from pyspark.sql.datasource.DataSource, got {kind!r:.100}. A name that "
            "was registered with Spark is known to Spark only: give the class"
        )
    make: Any = kind
    made = make(options=_options(options))
    columns = _schema(made, schema)
    called = name or str(made.name())
    wanted = arrow_schema(columns)
    for flag, given in (("stream", stream), ("commit", commit)):
        if not isinstance(given, bool):
            raise UsageError(f"flux.datasource: {flag} must be True or False, got {given!r:.100}")
    seconds = parse_seconds("poll", poll)
    if not seconds > 0:
        raise UsageError(f"flux.datasource: poll must be above zero, got {poll!r}")
    if not stream:
        if ledger is not None or commit:
            raise UsageError("flux.datasource: ledger and commit are for stream=True")
        reading = BatchReading(made, columns, *_planned(made, columns), _at_once(partitions))
        return source(reading, wanted, name=called)
    if not _has_stream(made):
        raise UsageError(
            f"data source {made.name()} is no stream: it defines neither streamReader(schema) nor simpleStreamReader(schema)"
            f"{'' if make.reader is DataSource.reader else '; leave stream=True out to read it once'}"
        )
    if partitions not in (None, 1):
        raise UsageError("flux.datasource: a stream is read by one worker: leave partitions out")
    if ledger is None:
        raise UsageError(
            "flux.datasource: stream=True needs ledger=..., a folder on a disk or network mount that all workers reach. The "
            "offsets at which batches end are written there before their rows are given"
        )
    place = ledger_folder(ledger, "flux.datasource")
    return source(StreamReading(made, columns, place, seconds, bool(commit)), wanted, name=called)


class BatchReading(SourceReader):
    """The reader of a source. Partition p reads ``planned[p]``, ``planned[p + partitions]`` and so
    on. A position is the index of a planned partition, and the number of its rows that come before."""

    keeps_partitions = True
    partitions: int

    def __init__(
        self, made: DataSource, schema: StructType, reader: DataSourceReader, planned: list[Any], at_once: int
    ) -> None:
        self.made, self.schema, self.reader, self.planned = made, schema, reader, planned
        self.partitions = min(at_once, len(planned))
        self._pickled = cloudpickle.dumps(reader)

    def prepare(self, kept: Any) -> Any:
        """Keep the planned partitions: planning a second time could give others, because files may have come."""
        if kept is not None:
            try:
                self.planned = pickle.loads(base64.b64decode(kept["planned"]))
            except Exception as error:
                raise UsageError(
                    f"data source {self.made.name()}: the partitions that were planned at the first start cannot be read: "
                    f"{described(error)}. Start with the code that planned them, or with another checkpointLocation"
                ) from error
            self.partitions = int(kept.get("partitions", self.partitions))
        planned = base64.b64encode(cloudpickle.dumps(self.planned)).decode()
        return {"planned": planned, "partitions": self.partitions}

    def read(self, partition: int, start: Any) -> ThreadedReader:
        index, rows = (partition, 0) if start is None else (int(start[0]), int(start[1]))
        return ThreadedReader(lambda: self._rows(index, rows), f"flux-datasource-{partition}", GATHER_S)

    def _rows(self, index: int, skip: int) -> Iterator[Positioned | float]:
        while index < len(self.planned):
            at = 0
            reader = pickle.loads(self._pickled)  # a copy of its own, as in a task of Spark: it may keep its progress
            for batch in batches(reader.read(self.planned[index]), self.schema, self.made):
                left = min(max(skip - at, 0), batch.num_rows)
                at += batch.num_rows
                if left < batch.num_rows:
                    yield Positioned(batch.slice(left), [index, at])
                else:
                    yield 0.0  # no row, but a chance to stop for a consumer that wants no more
            yield 0.0
            index, skip = index + self.partitions, 0


def _planned(made: DataSource, schema: StructType) -> tuple[DataSourceReader, list[Any]]:
    """Plan as Spark does; a data source that does not define partitions has one."""
    try:
        reader = made.reader(schema=schema)
    except NotImplementedError as error:
        instead = "; stream=True reads its streamReader" if _has_stream(made) else ""
        raise UsageError(
            f"data source {made.name()} cannot be read: it does not define reader(schema){instead}"
        ) from error
    except (Exception, SystemExit) as error:
        raise _raised(made, "reader()", error) from error
    if not isinstance(reader, DataSourceReader):
        raise UsageError(
            f"reader() of data source {made.name()} must return a DataSourceReader, got {text_of(reader, repr):.100}"
        )
    try:
        planned = reader.partitions()
    except NotImplementedError:
        planned = [InputPartition(None)]
    except (Exception, SystemExit) as error:
        raise _raised(made, "partitions()", error) from error
    if not isinstance(planned, list | tuple) or not all(isinstance(each, InputPartition) for each in planned):
        raise UsageError(
            f"partitions() of data source {made.name()} must return InputPartitions, got {text_of(planned, repr):.100}"
        )
    return reader, list(planned) or [InputPartition(None)]


def _raised(made: DataSource, method: str, error: BaseException) -> UserCodeError:
    about = f"{method} of data source {text_of(made, lambda source: source.name())} raised {described(error)}"
    return UserCodeError(about, user_traceback(error))


def _has_stream(made: DataSource) -> bool:
    kind: Any = type(made)
    return (
        kind.streamReader is not DataSource.streamReader or kind.simpleStreamReader is not DataSource.simpleStreamReader
    )


def _options(given: Mapping[str, Any] | None) -> CaseInsensitiveDict:
    """Return the options as text, as Spark passes them to data sources."""
    options = CaseInsensitiveDict()
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"flux.datasource: options must be a dict, got {type(given).__name__}")
    for key, value in (given or {}).items():
        if not isinstance(key, str) or not isinstance(value, str | bool | int | float):
            raise UsageError(
                f"flux.datasource: options are text, numbers or booleans by name, got {key!r}: {value!r:.100}"
            )
        options[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return options


def _schema(made: DataSource, given: Any) -> StructType:
    try:
        declared = made.schema() if given is None else given
    except NotImplementedError as error:
        raise UsageError(
            f"data source {made.name()} does not define schema(): define it, or say schema='name STRING, ...'"
        ) from error
    if isinstance(declared, str):
        # Spark knows more types, if there is a session.
        if SparkContext._active_spark_context is not None:
            declared = StructType.fromDDL(declared)
        else:
            declared = from_arrow_schema(parse_ddl(declared))
    if not isinstance(declared, StructType):
        raise UsageError(f"flux.datasource: a schema must be DDL or a StructType, got {type(declared).__name__}")
    return declared


def _at_once(given: Any) -> int:
    if given is None:
        return _AT_ONCE
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= 4096:
        raise UsageError(f"flux.datasource: partitions must be 1 to 4096, got {given!r}")
    return given
