"""The parts of kafka-python that Flux uses, in one place: its messages, made from Kafka's own schemas, and its logins.

Its connections and its consumer are not used: they make an object per record, and read TLS in pieces of 4 KiB.
"""

from __future__ import annotations

import functools
import io
from types import SimpleNamespace
from typing import Any

from flux.connectors.kafka.errors import BrokerBroken
from flux.errors import UsageError

#: Most bytes in front of an answer: its number, and fields that are not known to us.
_HEAD_MAX = 1024


@functools.cache
def library() -> Any:
    """Return kafka-python's messages and logins. UsageError says how to install it."""
    try:
        from kafka import errors
        from kafka.net.sasl import get_sasl_mechanism
        from kafka.protocol.admin import DescribeConfigsRequest, DescribeProducersRequest
        from kafka.protocol.broker_version_data import BrokerVersionData
        from kafka.protocol.consumer import (
            FetchRequest,
            ListOffsetsRequest,
            OffsetCommitRequest,
            OffsetFetchRequest,
        )
        from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest, MetadataRequest
        from kafka.protocol.producer import (
            AddOffsetsToTxnRequest,
            AddPartitionsToTxnRequest,
            EndTxnRequest,
            InitProducerIdRequest,
            ProduceRequest,
            TxnOffsetCommitRequest,
        )
        from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest
    except ImportError as error:
        raise UsageError(
            f"flux.kafka needs kafka-python 3, which is missing here ({error}): pip install 'flux-exchange[kafka]', on the "
            "driver and on the executors"
        ) from error
    return SimpleNamespace(
        AddOffsetsToTxn=AddOffsetsToTxnRequest,
        AddPartitionsToTxn=AddPartitionsToTxnRequest,
        ApiVersions=ApiVersionsRequest,
        BrokerVersionData=BrokerVersionData,
        DescribeConfigs=DescribeConfigsRequest,
        DescribeProducers=DescribeProducersRequest,
        EndTxn=EndTxnRequest,
        Fetch=FetchRequest,
        FindCoordinator=FindCoordinatorRequest,
        InitProducerId=InitProducerIdRequest,
        ListOffsets=ListOffsetsRequest,
        Metadata=MetadataRequest,
        OffsetCommit=OffsetCommitRequest,
        OffsetFetch=OffsetFetchRequest,
        Produce=ProduceRequest,
        SaslAuthenticate=SaslAuthenticateRequest,
        SaslHandshake=SaslHandshakeRequest,
        TxnOffsetCommit=TxnOffsetCommitRequest,
        errors=errors,
        mechanism=get_sasl_mechanism,
    )


def to_bytes(message: Any, version: int, number: int, client: str) -> bytearray:
    """Encode a request for the wire."""
    message.API_VERSION = version
    if message.header is None:
        message.with_header(correlation_id=number, client_id=client)
    else:  # of a request that is used again
        message.header.correlation_id = number
    encoded: bytearray = message.encode(framed=True, header=True)
    return encoded


def from_bytes(message: Any, answer: memoryview) -> tuple[int, Any]:
    """Decode the number of the request that is answered, and the answer. BrokerBroken: the bytes are no answer to
    ``message``."""
    kind = message.header.get_response_class()
    try:
        size = _head_bytes(kind)
        if size == _TAGGED_HEAD and answer[size - 1]:  # it has tags, which are left out
            head = io.BytesIO(bytes(answer[:_HEAD_MAX]))
            kind.parse_header(head)
            size = head.tell()
        return int.from_bytes(answer[:4], "big", signed=True), kind.decode(answer[size:])
    except Exception as error:  # kafka-python raises many errors for bytes that are no answer
        raise BrokerBroken(f"the answer to {message.name} cannot be read: {type(error).__name__}: {error}") from error


#: Size of the head of an answer in newer versions, if no tag follows: the number of the request and the count of tags.
_TAGGED_HEAD = 5


@functools.cache
def _head_bytes(kind: Any) -> int:
    """Return the size of the head of an answer without tags."""
    head = io.BytesIO(bytes(_TAGGED_HEAD))
    kind.parse_header(head)
    return head.tell()


def error_of(code: int) -> Any:
    """Return the class of kafka-python for an error code."""
    return library().errors.for_code(code)
