"""What is used of kafka-python, in one place: its messages, made from Kafka's own schemas, and its logins.

Its connections and its consumer are not: they hand out an object per record, and read TLS in pieces of 4 KiB.
"""

from __future__ import annotations

import functools
import io
from types import SimpleNamespace
from typing import Any

from flux.errors import UsageError
from flux.kafka.errors import BrokerBroken

#: More cannot be in front of an answer: its number, and fields that are not known to us.
_HEAD_MAX = 1024


@functools.cache
def library() -> Any:
    """kafka-python's messages and logins. UsageError says how to install it."""
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
    """A request as it goes onto the wire."""
    message.API_VERSION = version
    if message.header is None:
        message.with_header(correlation_id=number, client_id=client)
    else:  # of a request that is used again
        message.header.correlation_id = number
    encoded: bytearray = message.encode(framed=True, header=True)
    return encoded


def from_bytes(message: Any, answer: memoryview) -> tuple[int, Any]:
    """The number of the request that is answered, and the answer. BrokerBroken if that is no answer to ``message``."""
    kind = message.header.get_response_class()
    try:
        size = _head_bytes(kind)
        if size == _TAGGED_HEAD and answer[size - 1]:  # with tags, which are left out
            head = io.BytesIO(bytes(answer[:_HEAD_MAX]))
            kind.parse_header(head)
            size = head.tell()
        return int.from_bytes(answer[:4], "big", signed=True), kind.decode(answer[size:])
    except Exception as error:  # whatever their code raises for bytes that make no sense
        raise BrokerBroken(f"the answer to {message.name} cannot be read: {type(error).__name__}: {error}") from error


#: Of the head of an answer in newer versions, if no tag follows: a number and how many tags there are.
_TAGGED_HEAD = 5


@functools.cache
def _head_bytes(kind: Any) -> int:
    """Of the head of an answer without tags."""
    head = io.BytesIO(bytes(_TAGGED_HEAD))
    kind.parse_header(head)
    return head.tell()


def error_of(code: int) -> Any:
    """The class of kafka-python for an error code."""
    return library().errors.for_code(code)
