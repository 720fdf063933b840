"""Servers of S3, the Hub and the web for bench/kills.py, in their own process: one with threads cannot be forked."""

import contextlib
import io
import json
import os
import signal
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen
from xml.etree import ElementTree

from trainyard.remote.manifest import MANIFEST_FILE

BUCKET = "yard"
HUB_TOKEN = "hf_goodgoodgoodgoodgoodgood"
State = dict[str, str]
"""Digest of every file, temporary ones included, by its name."""


@dataclass
class Servers:
    """Their URLs."""

    s3: str
    hub: str
    web: str


@contextlib.contextmanager
def local_servers() -> Iterator[Servers]:
    """Servers of S3, the Hub and the web in a process of their own. Commands of this process' forks use them."""
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(receive)
        with contextlib.suppress(BaseException):
            _serve(send)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        servers = Servers(**json.loads(pipe.readline()))
    use_servers(servers)
    try:
        yield servers
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve(send: int) -> None:
    from tests.support.hub_server import hub_server
    from tests.support.s3_server import s3_server
    from tests.support.web_server import ServedFile, WebServer, running

    web, parent = WebServer(), os.getppid()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for index in range(6):
            content = bytes(range(index, index + 100)) * 3000
            (member := tarfile.TarInfo(f"part-{index}")).size = len(content)
            tar.addfile(member, io.BytesIO(content))
    web.files["/data.tar"] = ServedFile(archive.getvalue())
    with s3_server(BUCKET) as s3, hub_server() as hub, running(web):
        os.write(send, json.dumps({"s3": s3, "hub": hub.url, "web": web.url}).encode() + b"\n")
        while os.getppid() == parent:
            time.sleep(0.5)


UNCHECKED_SIGNATURE = (
    "AWS4-HMAC-SHA256 Credential=fake/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
"""The server wants one, and accepts any."""


def use_servers(servers: Servers) -> None:
    """Configure the clients in this process, and thereby in its forks."""
    import fsspec
    from huggingface_hub import constants

    fsspec.config.conf["s3"] = {"endpoint_url": servers.s3, "key": "fake", "secret": "fake"}
    os.environ |= {"HF_ENDPOINT": servers.hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": HUB_TOKEN}
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": "home", "TRAINYARD_DOWNLOADS": "home/downloads"}
    constants.ENDPOINT = servers.hub
    constants.HUGGINGFACE_CO_URL_TEMPLATE = servers.hub + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE, constants.HF_TOKEN_PATH = "home/hub", "home/token"
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True


def stored_objects(servers: Servers, prefix: str) -> State:
    """The objects of a prefix, in a plain request: the S3 client has threads, which this process must not have."""
    with urlopen(f"{servers.s3}/{BUCKET}?list-type=2&prefix={quote(prefix)}") as answer:
        tree = ElementTree.fromstring(answer.read())
    texts = {kind: [e.text or "" for e in tree.iter() if e.tag.endswith("}" + kind)] for kind in ("Key", "ETag")}
    found = {key.removeprefix(prefix): etag for key, etag in zip(texts["Key"], texts["ETag"], strict=True)}
    if MANIFEST_FILE in found:
        url = f"{servers.s3}/{BUCKET}/{quote(prefix)}{MANIFEST_FILE}"
        with urlopen(Request(url, headers={"Authorization": UNCHECKED_SIGNATURE})) as answer:
            if not json.loads(answer.read())["complete"]:  # written first, so that readers know of the upload
                found["incomplete"] = found.pop(MANIFEST_FILE)
    return found


def put_object(path: Path, key: str) -> None:
    """Upload a file, in a fork: the S3 client has threads."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            import fsspec

            fsspec.filesystem("s3").put_file(str(path), f"{BUCKET}/{key}")
            os._exit(0)
        os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"{key}: cannot be uploaded")


def hub_files(servers: Servers, repo: str) -> State:
    """The files of the latest commit, without the one that the Hub itself adds to a new repository."""
    request = Request(f"{servers.hub}/api/models/{repo}/tree/main?recursive=true")
    request.add_header("Authorization", f"Bearer {HUB_TOKEN}")
    try:
        with urlopen(request) as answer:
            files = {entry["path"]: entry["oid"] for entry in json.loads(answer.read())}
            files.pop(".gitattributes", None)
            return files | {"README.md": "has the name of the model"} if files else {}
    except OSError:
        return {}
