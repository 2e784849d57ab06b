"""``flux.to_kafka``: its options, checked where the flow is made; then a stage and a sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flux.arguments import CONVERGE, checked
from flux.connectors.kafka.client.cluster import Address, Client, addresses
from flux.connectors.kafka.client.kafka_python import library
from flux.connectors.kafka.client.security import OPTIONS, Security
from flux.connectors.kafka.formats.avro_decode import library as fastavro
from flux.connectors.kafka.formats.avro_encode import AvroValues
from flux.connectors.kafka.formats.base import READ_FORMATS
from flux.connectors.kafka.formats.text_encode import Columns
from flux.connectors.kafka.records.compression import NUMBERS
from flux.connectors.kafka.write.sequence_operator import MURMUR2, PARTITION, ROUND_ROBIN, SEQUENCE, SequenceOperator
from flux.connectors.kafka.write.sink import KafkaSink, KafkaSinkAtLeastOnce
from flux.connectors.kafka.write.tentative_records import ENDING, IN_HEADERS, IN_TOPIC, WITH_TENTATIVE
from flux.connectors.kafka.write.transactional_sink import KafkaSinkTransactional
from flux.dataflow.sink import FlowTo
from flux.errors import UsageError
from flux.settings import parse_seconds

if TYPE_CHECKING:
    from flux.dataflow.flow import Flow

PARTITIONERS = (MURMUR2, ROUND_ROBIN)
SINKS = (KafkaSink, KafkaSinkAtLeastOnce, KafkaSinkTransactional)
GUARANTEES = [kind.guarantee for kind in SINKS]


@checked("to_kafka", lambda: OPTIONS)
def to_kafka(
    flow: Flow,
    topic: str,
    bootstrap: str | Sequence[str],
    *,
    key: str | Sequence[str] | None = None,
    value: str | Sequence[str] | None = None,
    format: str = "json",
    schema: Any = None,
    schemas: Any = None,
    register_schemas: bool = False,
    headers: str | None = None,
    timestamp: str | None = None,
    partition: str | None = None,
    partitioner: str = MURMUR2,
    guarantee: str = "exactly_once",
    compression: str | None = None,
    partitions: int | None = None,
    topic_partitions: int | None = None,
    timeout: float | str = "15s",
    tentative: str | None = None,
    **security: Any,
) -> FlowTo:
    """Write the output of a flow as records of a topic, each row once, even if workers or the driver are lost meanwhile.

    key             the column that is the key of a record: text and bytes as they are, numbers as text. Several make a JSON
                    object. Without, keys are null
    value           format "json", "csv" and "avro": the columns that make the value; without, all but those of ``headers``,
                    ``timestamp`` and ``partition``. A struct column alone is the object or record itself. "raw": the column
                    that is the value, by default "value". A null there is a tombstone
    schema          format "avro": a record in Avro's JSON, as text or a dict, whose fields are the columns by name. Without, it
                    is made of the columns; with the URL of a registry, it is the newest of the subject TOPIC-value
    schemas         format "avro": the URL of a schema registry, or a function from subject and schema to an id; then the id of
                    the schema stands in front of each value. Without, values have no id in front
    register_schemas  True registers the schema; otherwise the registry must have it
    headers         a column array<struct<key string, value binary>>, or a map from text to text or bytes
    timestamp       a column with the time of each record; without, the time when it is written
    partition       a column with the partition of each record; without, ``partitioner`` chooses: "murmur2" by the key, as
                    Kafka's Java client does, rows without a key in turn; "round_robin" for all in turn
    guarantee       "exactly_once": the broker takes each row once. "at_least_once": without producer ids; headers
                    flux-partition and flux-sequence show duplicates. "transactional": once for readers with read_committed, to
                    which all records of one write become visible together, in all partitions
    compression     "gzip", "snappy", "lz4" or "zstd"
    partitions      number of writers at the same time, 1 to 4096, with an exchange of their own. With a key, all rows of a key
                    have the same writer, in order. Without, each partition of the flow's last stage writes its rows itself
    topic_partitions  number of the topic's partitions that are written, the first ones; default: all that it has now
    timeout         longest time that brokers may take to answer here, and when the query starts
    tentative       results while input is missing (``availability=``): "topic" writes them to the topic TOPIC.tentative, with
                    as many partitions, and tombstones when they are void; "headers" to the topic itself, with the header
                    flux-tentative, and the stable record again. At least once, without transactions; needs ``key``
    security        options of kafka-python, as of ``flux.kafka``

    UsageError or ``flux.KafkaError`` is raised here for a topic that is not there, a refused login
    and a broker that does not answer."""
    from flux.dataflow.flow import StageWith, stage

    library()  # UsageError if kafka-python is missing: here, and not first in a worker
    if not isinstance(topic, str) or not topic:
        raise UsageError(f"to_kafka wants the name of a topic, got {topic!r}")
    columns = _columns(key, value, format, headers, timestamp, partition)
    # The operator that numbers rows needs keys alone; a function for schemas need not be shipped with it.
    writing = replace(columns, avro=_avro(topic, format, schema, schemas, register_schemas))
    _one_of("partitioner", partitioner, PARTITIONERS)
    _one_of("guarantee", guarantee, GUARANTEES)
    if compression is not None:
        _one_of("compression", compression, [name for name in NUMBERS if name])
    if flow.stage.on_loss == CONVERGE:
        raise UsageError(
            f"stage {flow.stage.name} has on_loss={CONVERGE!r}, and to_kafka numbers rows: the numbers are a part of the "
            "state that would be lost. Leave on_loss out, or end the flow in to(sink) with a sink that defines committed()"
        )
    brokers, secured, limit = addresses(bootstrap), Security(security), parse_seconds("timeout", timeout)
    many = _topic_partitions(brokers, secured, topic, topic_partitions, limit)
    kind = next(each for each in SINKS if each.guarantee == guarantee)
    by_key = columns.key if partitions != 1 and columns.key else None
    apart = 1 if partitions is None else partitions  # if another stage reads the flow, too
    decorated = stage(key=by_key, partitions=apart, replicas=flow.stage.replicas, name=f"{flow.stage.name}.records")(
        SequenceOperator
    )
    numbered = StageWith(decorated, (columns, many, partitioner, partition), {})
    numbered.chained = partitions is None
    ended = numbered(flow)
    if tentative is None:
        return FlowTo(ended, kind(topic, brokers, secured, writing, many, compression, limit))
    shows = WITH_TENTATIVE[kind](topic, brokers, secured, writing, many, compression, limit)
    shows.tentative_topic = _tentative_topic(tentative, topic, columns, partitioner)
    if tentative == IN_TOPIC:
        _topic_partitions(brokers, secured, shows.tentative_topic, many, limit)
    return FlowTo(ended, shows)


def _tentative_topic(tentative: Any, topic: str, columns: Columns, partitioner: str) -> str:
    """Return the topic of tentative records. UsageError: they could not be taken back."""
    _one_of("tentative", tentative, (IN_TOPIC, IN_HEADERS))
    if not columns.key:
        raise UsageError(
            f"tentative={tentative!r} needs key=: a record takes the place of an earlier one by its key, so a tentative record "
            "without a key could never be taken back"
        )
    if partitioner == ROUND_ROBIN:
        raise UsageError(
            f"tentative={tentative!r} needs the records of a key in one partition, and partitioner={ROUND_ROBIN!r} spreads them"
        )
    return topic + ENDING if tentative == IN_TOPIC else topic


def _avro(topic: str, format: str, schema: Any, schemas: Any, register: Any) -> AvroValues | None:
    if format == "avro":
        fastavro()
        return AvroValues(topic, schema, schemas, register)
    for name, given in (("schema", schema), ("schemas", schemas), ("register_schemas", register or None)):
        if given is not None:
            raise UsageError(f"{name} says how values in Avro are written: it needs format='avro', not {format!r}")
    return None


def _columns(key: Any, value: Any, format: Any, headers: Any, timestamp: Any, partition: Any) -> Columns:
    _one_of("format", format, READ_FORMATS)
    for name, given in (("headers", headers), ("timestamp", timestamp), ("partition", partition)):
        if given is not None and (not isinstance(given, str) or not given):
            raise UsageError(f"{name} must be the name of a column, got {given!r}")
    names = None if value is None else _names("value", value)
    if format == "raw" and names is not None and len(names) != 1:
        raise UsageError(f"format='raw' takes the value from one column, got {value!r}")
    aside = frozenset(filter(None, (headers, timestamp, partition, PARTITION, SEQUENCE)))
    return Columns(format, () if key is None else _names("key", key), names, headers, timestamp, aside)


def _names(what: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise UsageError(f"{what} must be the name of a column, or a list of names; got {given!r}")
    return names


def _topic_partitions(brokers: Sequence[Address], security: Security, topic: str, wanted: Any, timeout: float) -> int:
    client = Client(brokers, security)
    try:
        found = len(client.partitions([topic], timeout)[topic])
    finally:
        client.close()
    if wanted is None:
        return found
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= found:
        raise UsageError(f"topic_partitions must be 1 to {found}, which topic {topic!r} has; got {wanted!r}")
    return wanted


def _one_of(what: str, given: Any, known: Sequence[str]) -> None:
    if given not in known:
        raise UsageError(f"{what} must be one of {', '.join(known)}; got {given!r}")
