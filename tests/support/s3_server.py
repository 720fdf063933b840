"""A real server that speaks S3, on the loopback."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import fsspec
import pytest


@contextmanager
def s3_server(bucket: str = "yard") -> Iterator[str]:
    """The URL of an S3 server with a bucket, configured in fsspec as a user would."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    address, port = server.get_host_and_port()
    url = f"http://{address}:{port}"
    urlopen(Request(f"{url}/moto-api/reset", method="POST")).close()  # moto keeps its buckets when a server stops
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {"endpoint_url": url, "key": "fake", "secret": "fake"})
        fsspec.core.url_to_fs(f"s3://{bucket}")[0].mkdir(bucket)
        yield url
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
