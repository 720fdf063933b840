"""Files from S3 and the web: as inputs, weights and tokenizers, and with `trainyard get`."""

import hashlib
import io
import json
import os
import ssl
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.cli.conftest import Call, call, fail, succeed  # noqa: F401 (a fixture)
from tests.formats.test_nxd import RandomWeights, llama
from tests.support.logs import captured_log
from tests.support.s3_server import s3_server
from tests.support.web_server import ServedFile, WebServer, running, status
from trainyard.config.load import dump, parse
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import TokenizerSpec, hf_tokenizer_files, load_tokenizer
from trainyard.families.hf_config import from_hf
from trainyard.formats.hf import write_hf
from trainyard.formats.registry import open_weights
from trainyard.remote.catalog import DATASETS
from trainyard.remote.credentials import has_credentials, redact
from trainyard.remote.local_copies import forget_sources, local_inputs, local_weights


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRAINYARD_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.setattr("trainyard.remote.sources.retry.FIRST_WAIT_S", 0.02)
    monkeypatch.setattr("trainyard.remote.fetch.CHUNK_BYTES", 1 << 14)
    forget_sources()
    yield
    forget_sources()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "hf"
    files = hf_tokenizer_files(TokenizerSpec("bytes"))
    write_hf(directory, RandomWeights(llama(layers=1, vocab=512)), model_files=files)
    return directory


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server():
        yield fsspec.filesystem("s3")


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    with running(server):
        yield server


def test_weights_tokenizer_and_configuration_at_web_urls(web: WebServer, model: Path) -> None:
    for path in model.iterdir():
        web.files[f"/models/one/{path.name}"] = ServedFile(path.read_bytes())
    url = f"{web.url}/models/one"
    assert from_hf(f"{url}/config.json") == from_hf(url) == from_hf(model)
    assert load_tokenizer(TokenizerSpec(f"{url}/tokenizer.json")).vocab_size == 257
    assert load_tokenizer(TokenizerSpec(url)).vocab_size == 257
    assert open_weights(url).format == "hf"
    weights = (local_weights(url) / "model.safetensors").read_bytes()
    assert weights == (model / "model.safetensors").read_bytes()
    sent = web.sent["/models/one/model.safetensors"]
    forget_sources()
    local_weights(url)
    assert web.sent["/models/one/model.safetensors"] <= sent + 2  # asked about, not downloaded again
    web.always = status(503)
    forget_sources()
    assert (local_weights(url) / "model.safetensors").read_bytes() == weights  # the server is down
    with pytest.raises(UserError, match="503"):
        local_weights(f"{web.url}/models/two")


def test_gpt2_files_of_the_guide_are_urls(web: WebServer) -> None:
    web.files["/gpt2-vocab.json"] = ServedFile(b'{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    web.files["/gpt2-merges.txt"] = ServedFile(b"#version: 0.2\na b\n")
    spec = TokenizerSpec("gpt2", f"{web.url}/gpt2-vocab.json", f"{web.url}/gpt2-merges.txt")
    assert load_tokenizer(spec).encode(["ab"])[0].tolist() == [2]


def test_s3_directories_and_files(call: Call, s3: Any, model: Path, tmp_path: Path) -> None:  # noqa: F811
    root = f"yard/{tmp_path.name}"
    s3.put(f"{model}/", f"{root}/model/", recursive=True)
    url = f"s3://{root}/model"
    assert from_hf(url) == from_hf(model)
    assert load_tokenizer(TokenizerSpec(f"{url}/tokenizer.json")).vocab_size == 257
    assert open_weights(url).weights.model == from_hf(model)
    s3.pipe(f"{root}/text/a.jsonl", b'{"text": "a"}\n')
    s3.pipe(f"{root}/text/b.jsonl", b'{"text": "b"}\n')
    inputs = local_inputs([f"s3://{root}/text/*.jsonl", "local"])
    assert [Path(path).name for path in inputs] == ["a.jsonl", "b.jsonl", "local"]
    succeed(call("get", url, "copy"))
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {path.name for path in model.iterdir()}
    fail(call("get", f"s3://{root}/nothing", "x"), f"s3://{root}/nothing: no such file")
    fail(call("get", "s3://no-bucket-here/x", "x"), "s3://no-bucket-here/x: no such file, directory or bucket")


def test_an_s3_object_is_checked_by_its_etag(call: Call, s3: Any, tmp_path: Path) -> None:  # noqa: F811
    """An object whose bytes do not have the MD5 that its ETag says: moto lets one set it."""
    content = os.urandom(100_000)
    s3.pipe(f"yard/{tmp_path.name}/data", content)
    succeed(call("get", f"s3://yard/{tmp_path.name}/data", "data"))
    assert (tmp_path / "data").read_bytes() == content
    from moto.s3.models import s3_backends

    backend = next(iter(s3_backends.values()))["global" if "global" in next(iter(s3_backends.values())) else "aws"]
    key = backend.buckets["yard"].keys[f"{tmp_path.name}/data"]
    key._etag = hashlib.md5(b"other").hexdigest()
    fail(call("get", f"s3://yard/{tmp_path.name}/data", "again"), ".*its md5 is .* instead of")
    assert not (tmp_path / "again").exists()


def test_a_public_bucket_needs_no_credentials(
    call: Call,  # noqa: F811
    s3: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3.pipe(f"yard/{tmp_path.name}/public", b"open")
    s3.chmod(f"yard/{tmp_path.name}/public", "public-read")
    s3.pipe(f"yard/{tmp_path.name}/closed", b"closed")
    endpoint = {"endpoint_url": fsspec.config.conf["s3"]["endpoint_url"]}
    monkeypatch.setitem(fsspec.config.conf, "s3", endpoint)
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    succeed(call("get", f"s3://yard/{tmp_path.name}/public", "out"))
    assert (tmp_path / "out").read_bytes() == b"open"
    fail(call("get", f"s3://yard/{tmp_path.name}/closed", "closed"), ".*/closed: not public, and there are no credenti")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_run_starts_from_weights_in_s3(call: Call, s3: Any, model: Path, tmp_path: Path) -> None:  # noqa: F811
    s3.put(f"{model}/", f"yard/{tmp_path.name}/start/", recursive=True)
    url = f"s3://yard/{tmp_path.name}/start"
    config = {
        "model": {"from_hf": url},
        "data": {"seq_len": 16},
        "train": {"steps": 1, "global_batch": 1},
        "checkpoint": {"init_from": url},
        "device": {"name": "cpu"},
        "log": {"loggers": []},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code, _, error = call("train", "run.yaml")
    assert code == 0, error


def test_get_unpacks_and_checks(call: Call, web: WebServer, tmp_path: Path) -> None:  # noqa: F811
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("files/a.txt", "files/deep/b.txt"):
            info = tarfile.TarInfo(name)
            info.size = 5
            archive.addfile(info, io.BytesIO(b"hello"))
    web.files["/set.tar.gz"] = ServedFile(buffer.getvalue())
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    succeed(call("get", f"{web.url}/set.tar.gz", "--unpack", "--sha256", digest))
    assert (tmp_path / "set" / "files" / "deep" / "b.txt").read_text() == "hello"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
    fail(call("get", f"{web.url}/set.tar.gz", "--unpack"), ".*/set: already exists; --overwrite replaces it")
    succeed(call("get", f"{web.url}/set.tar.gz", "set", "--unpack", "--overwrite"))
    web.files["/plain"] = ServedFile(b"x")
    fail(call("get", f"{web.url}/plain", "--unpack"), "--unpack: .*/plain is not one file of .tar")
    fail(call("get", f"{web.url}/plain", "--sha256", "12"), "--sha256 12: expected 64 hexadecimal digits")
    fail(call("get", f"{web.url}/plain", "--max-size", "big"), "--max-size big: expected a size")
    web.files["/empty"] = ServedFile(b"")
    succeed(call("get", f"{web.url}/empty"))
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_redirect_to_another_host_gets_no_password(call: Call, web: WebServer, tmp_path: Path) -> None:  # noqa: F811
    other = WebServer()
    other.files["/file"] = ServedFile(b"content" * 9000)
    with running(other):
        web.always = status(302, Location=f"{other.url}/file?X-Amz-Signature=abc")
        source = web.url.replace("http://", "http://user:secret@") + "/file"
        out = succeed(call("get", source, "file"))
    assert "secret" not in out
    assert "Authorization" in web.requests[0][2]
    assert all("Authorization" not in headers for _, _, headers in other.requests)
    assert len(web.requests) < len(other.requests)  # the address that the redirect gave is asked directly
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_netrc_credentials_stay_with_their_host(
    call: Call,  # noqa: F811
    web: WebServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every range: the address that the redirect gave is asked directly, and asked for again once it has expired."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    other, content = WebServer(), os.urandom(90_000)
    other.files["/file"] = ServedFile(content)
    other.faults.extend([lambda handler: False] * 3 + [status(403)])
    with running(other):
        web.always = status(302, Location=f"{other.url}/file?X-Amz-Signature=abc")
        succeed(call("get", f"{web.url}/file", "file", "--streams", "1"))
    assert (tmp_path / "file").read_bytes() == content
    assert len(other.requests) > 4
    assert all("Authorization" in headers for _, _, headers in web.requests)
    assert all("Authorization" not in headers for _, _, headers in other.requests)
    assert len([request for request in web.requests if request[0] == "GET"]) == 2


@pytest.fixture
def https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WebServer, str]]:
    """A server with a certificate that this process trusts, and its URL."""
    server = WebServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(make_certificate(tmp_path / "certificate.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    with running(server):
        yield server, f"https://localhost:{server.server_address[1]}"


def make_certificate(path: Path) -> Path:
    """A key and a certificate for localhost that is signed with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    path.write_bytes(key.private_bytes(pem, pkcs8, plain) + certificate.public_bytes(pem))
    return path


def test_https_never_becomes_http(call: Call, web: WebServer, https: tuple[WebServer, str], tmp_path: Path) -> None:  # noqa: F811
    """A redirect to http is refused, in the first answer and in one of a later range; to https it is followed."""
    server, url = https
    content = os.urandom(90_000)
    server.files["/file"] = server.files["/moved"] = web.files["/file"] = ServedFile(content)
    to_http, to_https = (status(302, Location=f"{base}/file") for base in (web.url, url))
    server.faults.append(to_https)
    succeed(call("get", f"{url}/moved", "good"))
    assert (tmp_path / "good").read_bytes() == content
    message = f"{url}/file: redirects to {web.url}/file, which is not https"
    server.faults.append(to_http)
    fail(call("get", f"{url}/file", "bad"), message)
    server.faults.extend([lambda handler: False] * 3 + [to_http])
    fail(call("get", f"{url}/file", "bad", "--streams", "1"), message)
    assert not web.requests
    assert not (tmp_path / "bad").exists()


def test_a_busy_server_is_named_while_it_is_waited_for(
    call: Call,  # noqa: F811
    web: WebServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainyard.remote.sources.retry.REPORTED_WAIT_S", 0.5)
    web.files["/file"] = ServedFile(os.urandom(90_000))
    web.faults.extend([lambda handler: False] + [status(429, Retry_After="1")] * 6)
    messages: list[str] = []
    with captured_log(messages.append):
        succeed(call("get", f"{web.url}/file", "file"))
    assert messages == [f"{web.url}/file: HTTP 429 Too Many Requests; next attempt in 1 s"]


def test_named_data_sets(call: Call, web: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    web.files["/dump.xml.bz2"] = ServedFile(b"bz")
    for name, dataset in DATASETS.items():
        file = "dump.xml.bz2" if name == "enwiki" else "missing"
        monkeypatch.setitem(DATASETS, name, replace(dataset, sources=(f"{web.url}/{file}",)))
    listed = succeed(call("get", "--list"))
    for name, dataset in DATASETS.items():
        assert f"{name}: " in listed
        assert dataset.license in listed
        assert dataset.next_command.startswith("trainyard ")
    assert "size: 2 B; license: CC BY-SA 4.0 and GFDL" in listed
    assert "size: unknown, its source does not answer; license: in license.txt" in listed
    out = succeed(call("get", "enwiki", "wiki"))
    assert (tmp_path / "wiki" / "dump.xml.bz2").read_bytes() == b"bz"
    assert "license: CC BY-SA 4.0 and GFDL" in out
    assert "next: trainyard data extract wiki/" in out
    assert "nothing is downloaded" in succeed(call("get", "enwiki", "--dry-run"))
    fail(call("get", "enwik"), "enwik: neither a URL, nor OWNER/NAME on the Hub, nor a name of `trainyard get --list`")


SECRETS = [
    "https://user:password@host/file",
    "https://token@host/file",
    "s3://key:secret@bucket/file",
    "https://host/file?X-Amz-Algorithm=A&X-Amz-Signature=abc",
    "https://host/file?sv=1&sig=abc",
    "https://host/file?AWSAccessKeyId=1&Signature=2",
    "see https://host/file?token=abc",
    "hf_abcdefghijklmnopqrstuvwxyz",
]


@pytest.mark.parametrize("text", SECRETS)
def test_credentials_are_refused_in_configurations_and_not_printed(text: str) -> None:
    assert has_credentials(text)
    assert not has_credentials(redact(text))
    data = {"model": {"family": "llama"}, "checkpoint": {"init_from": text}, "train": {"steps": 1}}
    with pytest.raises(UserError, match=r"checkpoint.init_from: contains a password, token or signature") as caught:
        parse(data)
    assert "abc" not in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(UserError, match=r"data.paths: contains a password"):
        parse({**data, "checkpoint": {}}, [f"data.paths={json.dumps([text])}"])


@pytest.mark.parametrize(
    "text", ["hf://owner/name@main/file", "s3://bucket/key", "https://host/a?download=1", "owner/name", "a@b.c"]
)
def test_usual_sources_are_no_credentials(text: str) -> None:
    assert not has_credentials(text)
    assert redact(text) == text


def test_a_configuration_made_in_python_is_stored_without_credentials() -> None:
    model = {"family": "llama", "vocab": 8, "hidden": 8, "heads": 1, "layers": 1, "max_positions": 8, "ffn": 8}
    config = parse({"model": model, "data": {"seq_len": 8}, "train": {"steps": 1}})
    secret = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"init_from": "https://u:pw@host/x?sig=abc"})}
    )
    text = dump(secret)
    assert "pw" not in text
    assert "abc" not in text
