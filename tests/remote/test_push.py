"""`trainyard push`: real clients, a Hub and an S3 server on the loopback."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Call, call, fail, succeed  # noqa: F401 (a fixture)
from tests.support.hub_server import HubServer, hub_server, use_hub
from tests.support.s3_server import s3_server
from tests.support.web_server import status
from trainyard.cli import main
from trainyard.dashboard.model_card import MARKER
from trainyard.families.model_config import first_model_difference
from trainyard.formats.hf import CHECKSUM_FILE
from trainyard.formats.registry import open_weights
from trainyard.remote.local_copies import forget_sources
from trainyard.remote.manifest import MANIFEST_FILE

GOOD_TOKEN = "hf_goodgoodgoodgoodgoodgood"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints and evaluations."""
    directory = tmp_path_factory.mktemp("runs")
    overrides = (
        *("train.steps=4", "train.global_batch=2", "data.seq_len=32", "model.hidden=32", "model.layers=1"),
        *("model.heads=2", "checkpoint.every=2", "evaluate.every=2", "data.validation_fraction=0.1", "log.every=1"),
        *("device.name=cpu", "log.loggers=[]", f"log.directory={directory}", "log.name=small"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["trainyard", "train", *overrides])
        with pytest.raises(SystemExit) as caught:
            main.main()
    assert caught.value.code == 0
    return directory / "small"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        use_hub(monkeypatch, server, tmp_path / "home")
        monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
        yield server
        forget_sources()


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server():
        yield fsspec.filesystem("s3")


def test_a_run_becomes_a_model_on_the_hub(call: Call, hub: HubServer, run: Path, tmp_path: Path) -> None:  # noqa: F811
    code, out, error = call("push", run, "hf://me/small", "--dtype", "bf16")
    assert (code, error) == (0, "")
    repo = hub.repos["models/me/small"]
    assert repo.private
    assert repo.messages == ["Step 4 of small"]
    assert f"{hub.url}/me/small/commit/{repo.branches['main']}" in out
    files = repo.commits[repo.branches["main"]]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    card = files["README.md"].decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["type"] == "loss"
    assert "license" not in metadata
    for text in ("## Training", "| steps | 4 of 4 |", "| tokens | 256 |", "## Plan and measurement", "## Evaluation"):
        assert text in card, text
    assert str(run.parent) not in card
    # What was pushed is what transformers and trainyard read
    code, _, error = call("get", "hf://me/small", "back")
    assert code == 0, error
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert sum(weights.numel() for weights in loaded.parameters()) > 0
    assert AutoTokenizer.from_pretrained(tmp_path / "back").decode([97]) == "a"
    assert first_model_difference(open_weights("hf://me/small").weights.model, open_weights(run).weights.model) is None


def test_a_second_push_keeps_an_edited_card_and_deletes_old_shards(call: Call, hub: HubServer, run: Path) -> None:  # noqa: F811
    own = {"README.md": b"# my own card", "model-00001-of-00002.safetensors": bytes(2000), "notes.txt": b"keep"}
    repo = hub.add("me/edited", own)
    out = call("push", run / "model", "hf://me/edited", "--no-plan")
    assert out[0] == 0, out
    assert "has a README.md of its own, which stays" in out[1]
    files = repo.commits[repo.branches["main"]]
    assert files["README.md"] == b"# my own card"
    assert files["notes.txt"] == b"keep"
    assert "model-00001-of-00002.safetensors" not in files
    assert "model.safetensors" in files
    repo.commit({**files, "README.md": f"{MARKER}\nold".encode()})
    assert call("push", run / "model", "hf://me/edited", "--no-plan")[0] == 0
    assert b"A llama model" in repo.commits[repo.branches["main"]]["README.md"]


def test_a_failed_push_commits_nothing(
    call: Call,  # noqa: F811
    hub: HubServer,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo = hub.add("me/model", {"README.md": b"x"})
    before = dict(repo.branches)
    hub.tokens.clear()
    fail(call("push", run / "model", "hf://me/model", "--no-plan"), "hf://me/model: the Hub refuses the token")
    monkeypatch.delenv("HF_TOKEN")
    fail(call("push", run / "model", "hf://me/model", "--no-plan"), "hf://me/model: pushing needs a token with write")
    fail(call("push", run / "model", "hf://datasets/me/model"), ".*expected hf://OWNER/NAME")
    assert repo.branches == before


def test_a_dry_run_prints_the_card(call: Call, hub: HubServer, run: Path) -> None:  # noqa: F811
    out = succeed(call("push", run, "hf://me/dry", "--dry-run", "--no-plan"))
    assert MARKER in out
    assert "models/me/dry" not in hub.repos


def test_a_run_goes_to_s3_with_its_manifest_last_and_back(call: Call, s3: Any, run: Path, tmp_path: Path) -> None:  # noqa: F811
    url = f"s3://yard/{tmp_path.name}/run"
    (run / "checkpoints" / "step_00000009").mkdir(exist_ok=True)  # a checkpoint that was never completed
    (run / "checkpoints" / "step_00000009" / "rank_00000.safetensors").write_bytes(b"half")
    out = call("push", run, url)
    assert out[0] == 0, out
    names = {path.partition("/run/")[2] for path in s3.find(url.removeprefix("s3://"))}
    assert {MANIFEST_FILE, "config.yaml", "metrics.jsonl", "checkpoints/step_00000004/complete.json"} <= names
    assert not [name for name in names if "step_00000009" in name]
    manifest = json.loads(s3.cat(f"{url}/{MANIFEST_FILE}"))["files"]
    assert manifest.keys() == names - {MANIFEST_FILE}
    assert open_weights(url).format == "native"  # read in place
    fail(call("push", run, url), f"{url}: already exists and is not empty; --overwrite replaces it")
    succeed(call("get", url, "back"))
    for name in manifest:
        assert (tmp_path / "back" / name).read_bytes() == (run / name).read_bytes(), name
    s3.rm(f"{url}/metrics.jsonl")
    fail(call("get", url, "half"), ".*metrics.jsonl: missing or of another size than trainyard-manifest.json says")
    assert call("push", run, url, "--overwrite")[0] == 0
    s3.pipe(f"{url}/metrics.jsonl", bytes(len((run / "metrics.jsonl").read_bytes())))
    fail(call("get", url, "half"), ".*its sha256 is")


def test_half_an_upload_is_not_complete(
    call: Call,  # noqa: F811
    s3: Any,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server refuses everything after some files. What is there has no manifest, and no checkpoint looks complete
    without its shards."""
    from moto.s3.exceptions import AccessDeniedByLock
    from moto.s3.models import S3Backend

    url, count, put = f"s3://yard/{tmp_path.name}/half", [0], S3Backend.put_object

    def refuse(self: Any, *arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > 5:
            raise AccessDeniedByLock
        return put(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(S3Backend, "put_object", refuse)
        fail(call("push", run, url), f"{url}: cannot be written: .*; it is not complete; run the command again")
    s3.invalidate_cache()
    names = {path.partition("/half/")[2] for path in s3.find(url.removeprefix("s3://"))}
    assert len(names) > 1
    assert not any(name.endswith("complete.json") for name in names)
    fail(call("get", url, "copy"), f"{url}: an upload that did not finish: {len(names) - 1} of .* files arrived; ")
    fail(call("get", f"{url}/checkpoints", "copy"), ".*/half/checkpoints: an upload that did not finish: ")
    fail(call("convert", f"{url}/checkpoints", "copy"), ".*/half/checkpoints: an upload that did not finish: ")
    assert not (tmp_path / "copy").exists()
    succeed(call("push", run, url))  # continues without --overwrite
    succeed(call("get", url, "copy"))
    succeed(call("get", f"{url}/model", "copy-of-model"))
    fail(call("push", run, url), ".*already exists and is not empty; --overwrite replaces it")


STEP = "checkpoints/step_00000004"


@pytest.mark.parametrize(
    ("file", "place"),
    [
        (f"{STEP}/rank_00000.safetensors", -1),  # a weight
        (f"{STEP}/rank_00000.safetensors", 100),  # the header
        (f"{STEP}/complete.json", 50),
        (f"{STEP}/tokenizer.json", 50),
        ("model/model.safetensors", -1),
        ("model/model.safetensors", 100),
        ("model/config.json", b"1e-05"),
        ("model/tokenizer.json", 50),
    ],
)
def test_a_damaged_file_is_not_uploaded(
    call: Call,  # noqa: F811
    hub: HubServer,
    s3: Any,
    run: Path,
    tmp_path: Path,
    file: str,
    place: int | bytes,
) -> None:
    """One flipped bit: no command that reads the file, uploads it or says that it is good, succeeds."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    directory = (copy / file).parent
    data = bytearray((copy / file).read_bytes())
    data[place if isinstance(place, int) else data.index(place)] ^= 2
    (copy / file).write_bytes(data)
    url = f"s3://yard/{tmp_path.name}/damaged"
    message = f".*{file}: .*(checksum|not a readable)"
    for source, target in ((copy, url), (directory, url), (directory, "hf://me/damaged")):
        for option in ([], ["--dry-run"]):
            fail(call("push", source, target, "--no-plan", *option), message)
    code, _, error = call("inspect", directory, "--check")
    assert code == 2
    assert re.search(message, error)
    assert not s3.exists(url)
    assert "models/me/damaged" not in hub.repos


def test_an_edited_export_is_uploaded_without_its_old_checksum(call: Call, s3: Any, run: Path, tmp_path: Path) -> None:  # noqa: F811
    """A user may change what text generation uses; the message says how. The file is one that sha256sum checks."""
    shutil.copytree(run / "model", tmp_path / "model")
    sha256sum = ["sha256sum", "--check", "--strict", CHECKSUM_FILE]
    checked = subprocess.run(sha256sum, cwd=tmp_path / "model", check=True, capture_output=True, text=True).stdout
    others = {path.name for path in run.joinpath("model").iterdir()} - {"model.safetensors", CHECKSUM_FILE}
    assert {line.removesuffix(": OK") for line in checked.splitlines()} == others
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.5}')
    url = f"s3://yard/{tmp_path.name}/edited"
    fail(call("push", "model", url), "model/generation_config.json: .*; if you edited it, remove its line there")
    assert "note: model/generation_config.json: its checksum differs" in succeed(call("convert", "model", "new"))
    lines = (tmp_path / "model" / CHECKSUM_FILE).read_text().splitlines(keepends=True)
    kept = "".join(line for line in lines if "generation_config.json" not in line)
    (tmp_path / "model" / CHECKSUM_FILE).write_text(kept)
    succeed(call("push", "model", url))
    succeed(call("get", url, "back"))
    assert "all values are finite; all checksums agree" in succeed(call("inspect", "back", "--check"))


def test_a_reader_never_takes_a_replaced_upload_for_complete(
    call: Call,  # noqa: F811
    s3: Any,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While --overwrite replaces files, the store has no manifest that calls them complete."""
    from moto.s3.models import S3Backend

    url, put = f"s3://yard/{tmp_path.name}/twice", S3Backend.put_object
    succeed(call("push", run, url))
    seen: list[bool] = []

    def look(self: Any, bucket: str, name: str, *arguments: Any, **options: Any) -> Any:
        if not name.endswith(MANIFEST_FILE):
            key = self.buckets[bucket].keys.get(f"{tmp_path.name}/twice/{MANIFEST_FILE}")
            seen.append(bool(key) and json.loads(key.value)["complete"])
        return put(self, bucket, name, *arguments, **options)

    monkeypatch.setattr(S3Backend, "put_object", look)
    succeed(call("push", run, url, "--overwrite"))
    assert seen
    assert not any(seen)
    assert json.loads(s3.cat(f"{url}/{MANIFEST_FILE}"))["complete"]


def test_the_hub_is_busy_for_a_moment(call: Call, hub: HubServer, run: Path) -> None:  # noqa: F811
    hub.faults.extend([status(503), status(502)])
    code, _, error = call("push", run / "model", "hf://me/busy", "--no-plan")
    assert (code, error) == (0, "")
