"""An object store on loopback that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import s3fs
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Gives the environment of who speaks with it."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()


def make_bucket(name: str, environment: Mapping[str, str]) -> str:
    """Returns its URL. environment: this process's, too."""
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(endpoint_url=environment["AWS_ENDPOINT_URL"]).mkdir(name)
    return f"s3://{name}"
