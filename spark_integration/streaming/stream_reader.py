"""The output of a running query as a stream of Spark's (design: readers).

Offsets are positions: {partition: number of its next batch}. Batch n of a partition is the same in every replica, so a
batch that Spark runs again after a failure has the same rows. Spark calls ``commit`` for batches that it has processed for
good, and the workers forget these.

The reader lives in a process of its own on the driver's machine. It finds the query by its connection file; tasks go
straight to the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from controller.operate.client import QueryClient, RequestRefused, choose
from controller.operate.request_handler import masked
from controller.operate.requests import GetOutput, OutputPlace
from flux.errors import FluxError, QueryFailed, QueryTimeout, UsageError
from flux.shell.output_loops import Puller
from flux.shell.process import Rendezvous, Stopped
from flux.shell.transport import Keys
from flux.tasks.output_pull import OutputPull, OutputSurvey
from spark_integration.schema import for_spark, recast

#: Bytes of one answer to a task.
ANSWER_BYTES = 4 << 20
#: Time that workers may take to report their positions, and that a task may wait for a batch: longer than a take-over, and
#: than a repair of a partition whose only replica has to be restored.
PATIENCE_S = 60.0
#: Longest wait of a task before it looks again.
LOOK_S = 0.5


@dataclass(frozen=True)
class StreamedOutput:
    """An output of a query, and the way to it."""

    #: Id of the query.
    query: str
    #: Name and id of the query, for messages.
    called: str
    #: Number and name of the stage, and its number of partitions.
    stage: int
    stage_name: str
    partitions: int
    schema: pa.Schema
    rendezvous: Rendezvous
    #: Longest time without an answer of the controller, in seconds.
    silence_max_s: float

    def puller(self) -> Puller:
        return Puller(self.rendezvous, self.schema, self.silence_max_s)


def find_output(options: Mapping[str, str]) -> StreamedOutput:
    """Find the output that the options of ``readStream`` name. FluxError names the missing part."""
    query, stage = options_of(options)
    connection = choose(query)
    with QueryClient(connection) as client:
        try:
            place = client.ask(GetOutput(stage=stage), OutputPlace)
        except RequestRefused as refused:
            raise UsageError(f"query {query}: {refused}") from refused
    keys = Keys(place.public_key, place.private_key) if place.public_key else None
    schema = pa.ipc.read_schema(pa.py_buffer(place.schema))
    rendezvous = Rendezvous(place.endpoint, keys, masked(place.masked, connection.secret, place.nonce))
    called = f"{place.name} ({place.id})" if place.name else place.id
    return StreamedOutput(
        place.id, called, place.stage, place.stage_name, place.partitions, schema, rendezvous, place.silence_max_s
    )  # fmt: skip


def options_of(options: Mapping[str, str]) -> tuple[str, str | None]:
    """Return query and stage. UsageError for other options, and for a missing query."""
    given = {name.lower(): value for name, value in options.items()}
    query, stage = given.pop("query", ""), given.pop("stage", None)
    if given:
        raise UsageError(
            f'readStream.format("flux") does not know the option {", ".join(sorted(given))}; there are query (name or id of '
            "a running query) and stage (the one whose output is read, if the query keeps that of several)"
        )
    if not query.strip():
        raise UsageError('readStream.format("flux") needs .option("query", name): the name or id of a running query')
    return query, stage


def spark_schema(options: Mapping[str, str]) -> StructType:
    """Return the schema of the output that the options name."""
    output = find_output(options)
    return for_spark(output.schema, f"the output of stage {output.stage_name}")[0]


@dataclass
class OutputRange(InputPartition):  # type: ignore[misc]
    """The batches of one partition from ``start`` to below ``end``."""

    partition: int
    start: int
    end: int
    #: Endpoint of the partition's primary when the slice was planned.
    endpoint: str | None
    output: StreamedOutput = field(repr=False)

    def __repr__(self) -> str:
        return f"Slice(partition={self.partition}, start={self.start}, end={self.end})"


class FluxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reader that Spark calls, in its process and in tasks. It asks the workers rarely: each question is one more way there
    and back."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = dict(options)
        self._schema = to_arrow_schema(schema, timezone="UTC").remove_metadata()
        self._output: StreamedOutput | None = None
        self._puller: Puller | None = None
        self._survey: OutputSurvey | None = None
        self._acknowledged: dict[int, int] = {}
        self._last: dict[int, int] | None = None  # where availableNow ends

    # ---- in the process on the driver's machine

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the first positions that no reader has acknowledged."""
        survey = self._asked()
        return offset_of(self._found(), {partition: part.left for partition, part in survey.parts.items()})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        output = self._found()
        begun = positions_of(start, output)
        latest = self._asked().latest(begun)
        if self._last is not None:
            latest = {
                partition: max(min(end, self._last[partition]), begun[partition]) for partition, end in latest.items()
            }
        return offset_of(output, latest)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = {partition: part.end for partition, part in self._asked().parts.items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OutputRange]:
        output = self._found()
        begun, ends = positions_of(start, output), positions_of(end, output)
        where: Callable[[int], str | None] = self._survey.endpoint if self._survey is not None else lambda _: None
        return [
            OutputRange(partition, begun[partition], ends[partition], where(partition), output)
            for partition in begun
            if begun[partition] < ends[partition]
        ]

    def commit(self, end: dict[str, Any]) -> None:
        """Acknowledge batches at once, and again with each survey: a lost message does no harm."""
        output = self._found()
        self._acknowledged = positions_of(end, output)
        if self._survey is not None and self._puller is not None:
            for partition, below in self._acknowledged.items():
                self._survey.acknowledge(partition, below)
            self._puller.say(self._survey.last_words())

    def stop(self) -> None:
        if self._puller is not None:
            self._puller.close()
            self._puller = None

    def _found(self) -> StreamedOutput:
        if self._output is None:
            self._output = find_output(self._options)
        return self._output

    def _asked(self) -> OutputSurvey:
        """Ask the workers for their positions."""
        output = self._found()
        if self._puller is None:
            self._puller = output.puller()
        begun = self._acknowledged or dict.fromkeys(range(output.partitions), 0)
        table = None if self._survey is None else self._survey.table
        survey = OutputSurvey(output.stage, begun, table)
        try:
            self._puller.until_over(survey, PATIENCE_S)
        except Stopped:
            raise over(output) from None
        self._survey = survey
        return survey

    # ---- in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, OutputRange)
        return (recast(batch, self._schema) for batch in batches_of(partition))


def batches_of(part: OutputRange) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a slice in order. They can be read again: nothing is acknowledged."""
    output, puller = part.output, part.output.puller()
    where = {part.partition: part.endpoint} if part.endpoint is not None else None
    pulling = OutputPull(
        output.stage, {part.partition: part.start}, ANSWER_BYTES, {part.partition: part.end}, acknowledging=False, where=where
    )  # fmt: skip
    try:
        silent_at = time.monotonic() + PATIENCE_S
        while not pulling.over:
            if (got := pulling.take()) is not None:
                silent_at = time.monotonic() + PATIENCE_S
                yield got.batch
            elif time.monotonic() > silent_at:
                raise QueryTimeout(
                    f"partition {part.partition} of stage {output.stage_name} of query {output.called} has given no batch "
                    f"{pulling.parts[part.partition].position} for {PATIENCE_S:g} s, although it was there"
                )
            else:
                puller.turn(pulling, LOOK_S)
    except Stopped:
        raise over(output) from None
    finally:
        puller.close()


def over(output: StreamedOutput) -> FluxError:
    return QueryFailed(
        f"query {output.called} has ended, and its output went with it. Where it was started with a checkpointLocation, start "
        "it again, and then this stream: both go on where they were"
    )


# ---- offsets


def offset_of(output: StreamedOutput, positions: Mapping[int, int]) -> dict[str, Any]:
    """Make the offset that Spark keeps in its checkpoint."""
    return {"query": output.query, "stage": output.stage_name, "next": {str(p): at for p, at in positions.items()}}


def positions_of(offset: Any, output: StreamedOutput) -> dict[int, int]:
    """Read an offset. UsageError: it belongs to another query, or is no offset."""
    given = offset if isinstance(offset, dict) else {}
    of, stage, at = given.get("query"), given.get("stage"), given.get("next")
    if isinstance(of, str) and (of, stage) != (output.query, output.stage_name):
        raise UsageError(
            f"this checkpoint of Spark's is of stage {stage} of query {of}, and the query that runs now is {output.called} with "
            f"the output of stage {output.stage_name}. A query keeps its id when it is started again with its "
            "checkpointLocation; else begin with a new checkpoint here, too"
        )
    wanted = {str(partition): partition for partition in range(output.partitions)}
    if (
        not isinstance(of, str)
        or not isinstance(at, dict)
        or set(at) != set(wanted)
        or not all(map(_is_position, at.values()))
    ):
        raise UsageError(
            f"an offset of this stream has the position of each of {output.partitions} partitions, and Spark's checkpoint has "
            f"{offset!r}: it is of another source, or damaged"
        )
    return {wanted[partition]: position for partition, position in at.items()}


def _is_position(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0
