"""A server with the protocol of S3 on this machine, for tests."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "kept"


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Serve an S3 store with one empty bucket; yield its endpoint, a host and a port."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        endpoint = "{}:{}".format(*server.get_host_and_port())
        boto3.client(
            "s3", endpoint_url=f"http://{endpoint}", aws_access_key_id="user", aws_secret_access_key="secret",
            region_name="us-east-1",
        ).create_bucket(Bucket=BUCKET)  # fmt: skip
        yield endpoint
    finally:
        server.stop()


def uri_in(endpoint: str, bucket: str = BUCKET) -> str:
    """Return the URI of a prefix that is in use nowhere else."""
    about = f"scheme=http&region=us-east-1&endpoint_override={endpoint}"
    return f"s3://user:secret@{bucket}/{uuid.uuid4().hex}?{about}"
