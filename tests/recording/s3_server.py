"""A server that speaks S3 on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Starts it on a free port with one bucket; credentials and address are in the environment, as a user has them."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_CONFIG_FILE", os.devnull)
        environment.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield f"http://{host}:{port}"
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()
