"""Models, tokenizers and data from the Hub: the real client of huggingface_hub against a server on the loopback."""

import gc
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import snapshot_download

from tests.cli.conftest import Call, call, fail, succeed  # noqa: F401 (a fixture)
from tests.formats.test_nxd import RandomWeights, llama
from tests.support.hub_server import HubServer, Repo, hub_environment, hub_server, use_hub
from tests.support.web_server import ServedFile, cut_after, status
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import TokenizerSpec, hf_tokenizer_files, load_tokenizer
from trainyard.families.hf_config import from_hf
from trainyard.formats.hf import hf_tensors, write_hf
from trainyard.formats.registry import open_weights
from trainyard.remote.local_copies import forget_sources, local_inputs, local_weights

ROOT = Path(__file__).parents[2]
GOOD_TOKEN = "hf_goodgoodgoodgoodgoodgood"


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A Hugging Face model in two shards, with a tokenizer, and files that nobody needs."""
    directory = tmp_path_factory.mktemp("model") / "hf"
    weights = RandomWeights(llama(layers=1, vocab=512, hidden=64, ffn=128, max_positions=64))
    write_hf(directory, weights, torch.float32, 150_000, hf_tokenizer_files(TokenizerSpec("bytes")))
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert "model.safetensors.index.json" in files
    return {**files, "README.md": b"# card", "pytorch_model.bin": bytes(5000), "original/weights.pth": bytes(5000)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        use_hub(monkeypatch, server, tmp_path / "home")
        yield server
        forget_sources()


@pytest.fixture
def repo(hub: HubServer, model_files: dict[str, bytes]) -> Repo:
    return hub.add("own/model", model_files)


def downloaded(hub: HubServer) -> int:
    return sum(hub.cdn.sent.values())


def test_a_name_of_the_hub_is_weights_tokenizer_and_configuration(
    hub: HubServer, repo: Repo, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    model = from_hf("own/model")
    assert model.layers == 1
    assert downloaded(hub) == 0  # config.json alone, which is not in LFS
    tokenizer = load_tokenizer(TokenizerSpec("hf://own/model@main"))
    assert tokenizer.decode(tokenizer.encode(["two"])[0].tolist()) == "two"
    opened = open_weights("own/model")
    for name, content in model_files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    reference = open_weights(tmp_path).weights
    for piece in unfused_tensors(reference.model).values():
        assert opened.weights.read(piece).equal(reference.read(piece))
    snapshot = local_weights("own/model")
    names = {path.name for path in snapshot.rglob("*")}
    assert "pytorch_model.bin" not in names  # a pickle, while there are safetensors
    assert "README.md" not in names
    # Other programs find the files in the cache, with huggingface_hub's own check of completeness
    cached = snapshot_download("own/model", local_files_only=True, allow_patterns=["*.json", "model*.safetensors"])
    assert Path(cached) == snapshot


def test_pickles_are_read_only_without_safetensors_and_never_executed(hub: HubServer, repo: Repo) -> None:
    content = repo.commits[repo.branches["main"]]
    files = {name: data for name, data in content.items() if "safetensors" not in name}

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch executed",)

    buffer = io.BytesIO()
    torch.save({"evil": Evil()}, buffer)
    hub.add("own/pickle", {**files, "pytorch_model.bin": buffer.getvalue()})
    with pytest.raises(UserError, match=r"posix.system|os.system"):
        open_weights("own/pickle")
    assert not Path("executed").exists()


def test_a_revision_is_pinned_and_the_cache_serves_without_a_network(
    hub: HubServer, repo: Repo, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = repo.branches["main"]
    snapshot = local_weights("own/model")
    repo.commit({**model_files, "config.json": model_files["config.json"].replace(b"{", b"{ ", 1)})
    assert local_weights("own/model") == snapshot  # the same process sees one version
    forget_sources()
    before = downloaded(hub)
    assert local_weights("own/model").name == repo.branches["main"] != first
    assert downloaded(hub) == before  # the weights are the same blobs
    assert local_weights(f"hf://own/model@{first}").name == first
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    forget_sources()
    assert local_weights("own/model").name == repo.branches["main"]
    with pytest.raises(UserError, match=r"own/other: HF_HUB_OFFLINE is set, and .* has no complete copy"):
        local_weights("hf://own/other")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://own/nothing", "hf://own/nothing: no such repository, or a private one: check the name, or set HF_TOKEN"),
        ("own/nothing", "own/nothing: no such path here; as a name on the Hub: hf://own/nothing: no such repository"),
        ("hf://own/model@v9", "hf://own/model@v9: no branch, tag or commit v9; has: main, old"),
        ("hf://own/model/missing", "no such file or directory in the repository; has: "),
        (
            "hf://own/gated",
            r"gated, and there is no token; accept its license at http://.*/own/gated, then set HF_TOKEN",
        ),
        ("hf://own/private", "no such repository, or a private one"),
        ("hf://own/empty", "hf://own/empty: has neither model.safetensors nor pytorch_model.bin; has: notes.txt"),
        ("hf://own/half", "has no model-00002-of-00002.safetensors, although model.safetensors.index.json names it"),
        ("hf://a b", "expected hf://OWNER/NAME"),
    ],
)
def test_errors_name_the_repository_what_is_missing_and_the_next_step(
    call: Call,  # noqa: F811
    hub: HubServer,
    repo: Repo,
    model_files: dict[str, bytes],
    source: str,
    message: str,
) -> None:
    repo.commit(model_files, "old")
    hub.add("own/gated", model_files, gated=True)
    hub.add("own/private", model_files, private=True)
    hub.add("own/empty", {"notes.txt": b"", "config.json": b"{}"})
    shards = [name for name in model_files if name.startswith("model-")]
    assert len(shards) > 2 or "model-00002-of-00002.safetensors" in model_files
    hub.add("own/half", {name: data for name, data in model_files.items() if "-00002-" not in name})
    message = message.replace("00002-of-00002", f"00002-of-{len(shards):05d}")
    fail(call("inspect", source), f".*{message}")


def test_a_token_opens_gated_and_private_repositories_and_stays_secret(
    call: Call,  # noqa: F811
    hub: HubServer,
    model_files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    hub.add("own/gated", model_files, gated=True)
    hub.add("own/private", model_files, private=True)
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    succeed(call("inspect", "hf://own/private"))
    message = "hf://own/gated: its license is not accepted yet with this token; accept it at http://.*/own/gated"
    fail(call("inspect", "hf://own/gated"), message)
    hub.accepted.add(GOOD_TOKEN)
    succeed(call("inspect", "hf://own/gated"))
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrongwrongwrong")
    fail(call("inspect", "hf://own/private2"), ".*no such repository, or the token has no access to it")
    assert all("Authorization" not in headers for _, _, headers in hub.cdn.requests)  # the CDN gets no token
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert GOOD_TOKEN.encode() not in path.read_bytes(), path


def test_a_transfer_that_breaks_continues_and_a_wrong_hash_is_never_used(hub: HubServer, repo: Repo) -> None:
    hub.faults.extend([status(503), status(429, Retry_After="0")])
    hub.cdn.faults.extend([cut_after(70_000), status(500), cut_after(1000)])
    local_weights("own/model")
    config = repo.commits[repo.branches["main"]]["config.json"]
    good = bytes(90_000)
    hub.add("own/single", {"config.json": config, "model.safetensors": good})
    hub.cdn.files[f"/{hashlib.sha256(good).hexdigest()}"] = ServedFile(bytes(89_999) + b"x")
    with pytest.raises(UserError, match=r"own/single: model.safetensors: its sha256 is"):
        local_weights("own/single")
    blobs = Path(os.environ["HF_HOME"]) / "hub" / "models--own--single"
    assert not list(blobs.rglob("*.safetensors"))
    hub.cdn.files.clear()
    local_weights("own/single")


def test_data_sets_of_the_hub_are_inputs(call: Call, hub: HubServer, repo: Repo, tmp_path: Path) -> None:  # noqa: F811
    lines = b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(100))
    other = b'{"text": "other"}\n'
    hub.add("own/text", {"data/a.jsonl": lines, "data/b.jsonl": other, "extra/c.jsonl": b"{"}, "datasets")
    options = ("--tokenizer", "own/model", "--append-eod", "--workers", "1")
    out = call("data", "tokenize", "--input", "hf://datasets/own/text/data/*.jsonl", "--output-prefix", "one", *options)
    assert "101 documents" in out[1], out
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl").write_bytes(other)
    call("data", "tokenize", "--input", "?.jsonl", "--output-prefix", "two", "--tokenizer", "bytes", "--append-eod")
    assert (tmp_path / "one_text_document.bin").read_bytes() == (tmp_path / "two_text_document.bin").read_bytes()
    message = "hf://datasets/own/text@main/data/c: no such file; has: data/a.jsonl, data/b.jsonl"
    command = ("data", "tokenize", "--input", "hf://datasets/own/text@main/data/c", "--output-prefix", "x", *options)
    fail(call(*command), message)


def test_nxd_converter_takes_names_of_the_hub(call: Call, hub: HubServer, repo: Repo, tmp_path: Path) -> None:  # noqa: F811
    flags = ["--hf_model_name", "own/model", "--output_dir", "nxd", "--tp_size", "2"]
    succeed(call("convert-nxd", *flags, "--convert_from_full_state"))
    succeed(call("convert", "nxd/model", "back", "--to", "hf"))
    expected, found = (
        dict(hf_tensors(open_weights("own/model").weights)),
        dict(hf_tensors(open_weights("back").weights)),
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    fail(call("convert-nxd", *flags, "--convert_to_full_state"), ".*: not with --convert_to_full_state; only with")
    fail(call("convert-nxd", "--hf_model_name", "own/none", *flags[2:], "--convert_from_full_state"), "own/none")


def test_get_takes_data_sets_of_the_hub(call: Call, hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    hub.add("own/text", {"data/a.jsonl": b"a" * 3000, "data/b.jsonl": b"b", "README.md": b"c"}, "datasets")
    assert call("get", "hf://datasets/own/text")[0] == 0
    assert (tmp_path / "text" / "data" / "a.jsonl").read_bytes() == b"a" * 3000
    assert call("get", "hf://datasets/own/text/data/b.jsonl", "one")[0] == 0
    assert (tmp_path / "one").read_bytes() == b"b"


@pytest.mark.parametrize("source", ["hf://own/small", "hf://own/small@v2", "hf://datasets/own/small"])
def test_a_server_that_does_not_say_what_is_missing(call: Call, hub: HubServer, source: str) -> None:  # noqa: F811
    """HF_ENDPOINT is some other server. The client's own text has two URLs and none of the user's words."""
    hub.always = status(404)
    _, _, error = result = call("get", source, "x")
    fail(result, f"{source}: no such repository, revision or file at {hub.url} .HTTP 404")
    assert "developer.mozilla.org" not in error
    assert "/api/" not in error


def test_commands_take_names_of_the_hub(call: Call, hub: HubServer, repo: Repo, tmp_path: Path) -> None:  # noqa: F811
    out = call("generate", "own/model", "-p", "ab", "-n", "2", "--device", "cpu", "--json")
    assert out[0] == 0, out
    succeed(call("convert", "hf://own/model@main", "copy", "--check-bits"))
    assert (tmp_path / "copy" / "tokenizer.json").is_file()
    (tmp_path / "valid.txt").write_text("some text to evaluate " * 20)
    code, out_text, _ = call("eval", "own/model", "valid.txt", "data.seq_len=32", "device.name=cpu", "--json")
    assert code == 0
    local = json.loads(call("eval", "copy", "valid.txt", "data.seq_len=32", "device.name=cpu", "--json")[1])
    assert json.loads(out_text)["results"][0]["loss"] == local["results"][0]["loss"]


def test_a_run_starts_from_the_hub_and_resumes_after_the_branch_moved(
    call: Call,  # noqa: F811
    hub: HubServer,
    repo: Repo,
    model_files: dict[str, bytes],
    tmp_path: Path,
) -> None:
    config = {
        "model": {"from_hf": "own/model"},
        "data": {"source": "text", "tokenizer": "own/model", "seq_len": 16, "paths": ["text.txt"]},
        "train": {"steps": 2, "global_batch": 2},
        "checkpoint": {"init_from": "own/model", "every": 1, "resume": "auto"},
        "device": {"name": "cpu"},
        "log": {"loggers": []},
    }
    (tmp_path / "text.txt").write_text("a few words to train on " * 50)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code, _, error = call("train", "run.yaml")
    assert code == 0, error
    stored = yaml.safe_load((tmp_path / "runs" / "run" / "config.yaml").read_text())
    assert stored["model"]["layers"] == 1
    assert stored["checkpoint"]["init_from"] == "own/model"
    tokenizer = json.loads(model_files["tokenizer.json"])
    tokenizer["model"]["vocab"] = dict(reversed(list(tokenizer["model"]["vocab"].items())))
    repo.commit({**model_files, "tokenizer.json": json.dumps(tokenizer).encode() + b"\n"})
    forget_sources()
    fail(call("train", "run.yaml", "train.steps=3"), "own/model/tokenizer.json: its contents changed since")
    repo.commit(model_files)
    forget_sources()
    gc.collect()  # the command that failed in this process holds the lock of the run
    code, _, error = call("train", "run.yaml", "train.steps=3")
    assert code == 0, error


def test_only_one_process_of_a_host_downloads(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    """Ranks of a job, each a process of its own with only the user's variables set."""
    hub.cdn.bytes_per_second = 3_000_000
    code = (
        "from trainyard.remote.local_copies import local_weights, local_config; "
        "print(local_weights('own/model')); print(local_config('own/model'))"
    )
    environment = {**os.environ, **hub_environment(hub, tmp_path / "ranks"), "PYTHONPATH": str(ROOT)}
    world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**environment, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = {rank.communicate(timeout=240)[0] for rank in ranks}
    assert len(outputs) == 1
    assert all(rank.returncode == 0 for rank in ranks)
    files = repo.commits[repo.branches["main"]]
    shards = sum(len(data) for name, data in files.items() if name.startswith("model-"))
    assert shards <= downloaded(hub) < shards * 1.2 + 100_000
    asked = [path for _, path, _ in hub.requests if path == "/api/models/own/model"]
    assert len(asked) <= 2  # of huggingface_hub and of trainyard, in one process


def test_get_uses_only_the_environment(
    hub: HubServer, repo: Repo, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    environment = {**os.environ, **hub_environment(hub, tmp_path / "other"), "PYTHONPATH": str(ROOT)}

    def get(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainyard", "get", *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)

    result = get("own/model", "model")
    assert result.returncode == 0, result.stderr
    got = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert got == {name: data for name, data in model_files.items() if name in got}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < got.keys()
    assert not {"README.md", "pytorch_model.bin"} & got.keys()
    assert "complete already" in get("own/model", "model").stdout
    (tmp_path / "model" / "config.json").write_bytes(b"x" * len(model_files["config.json"]))
    assert "config.json differs; --overwrite replaces it" in get("own/model", "model").stderr
    assert get("own/model", "model", "--overwrite", "--all").returncode == 0
    assert (tmp_path / "model" / "original" / "weights.pth").is_file()
    assert (tmp_path / "model" / "config.json").read_bytes() == model_files["config.json"]
    assert get(f"{hub.url}/own/model/blob/main/README.md", ".").returncode == 0
    assert (tmp_path / "README.md").read_bytes() == b"# card"


def test_half_a_data_set_in_the_cache_is_not_used(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "hf://datasets/own/text/*.txt"
    hub.add("own/text", {"a.txt": bytes(5000), "b.txt": bytes(6000)}, "datasets")
    snapshot_download("own/text", repo_type="dataset", allow_patterns=["a.txt"])  # by another program
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no complete copy"):
        local_inputs([source])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    paths = local_inputs([source])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert local_inputs([source]) == paths
    Path(paths[1]).unlink()  # as if the links of the commit had been made only in part
    with pytest.raises(UserError, match="no complete copy"):
        local_inputs([source])


def test_a_model_in_a_subdirectory(call: Call, hub: HubServer, repo: Repo, tmp_path: Path) -> None:  # noqa: F811
    hub.add("own/many", {f"one/{name}": data for name, data in repo.commits[repo.branches["main"]].items()})
    succeed(call("convert", "hf://own/many/one", "copy", "--check-bits"))
    assert from_hf(tmp_path / "copy").layers == 1


def test_names_of_a_server_never_lead_out_of_the_cache(call: Call, hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    hub.add("own/evil", {"../../evil.txt": b"x", "config.json": b"{}", "tokenizer.json": b"{}"})
    fail(call("get", "own/evil", "target", "--all"), ".*'../../evil.txt' cannot be the name of a local file")
    with pytest.raises(UserError):
        local_inputs(["hf://own/evil/../../evil.txt"])
    assert not list(tmp_path.rglob("evil.txt"))


@pytest.mark.nightly
def test_ranks_start_from_the_same_commit(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    """Two ranks give the losses of one, from weights that one of them downloaded."""
    config = {
        "model": {"from_hf": "own/model"},
        "data": {"seq_len": 16},
        "train": {"steps": 2, "global_batch": 2},
        "checkpoint": {"init_from": "own/model", "export_hf": False},
        "device": {"name": "cpu"},
        "log": {"loggers": [], "every": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    losses = []
    for ranks in (1, 2):
        home, name = tmp_path / f"home-{ranks}", f"ranks-{ranks}"
        before = downloaded(hub)
        options = ["layout.tp=2", "--nproc", "2"] if ranks == 2 else []
        command = [sys.executable, "-m", "trainyard", "train", "run.yaml", f"log.name={name}", *options]
        environment = {**os.environ, **hub_environment(hub, home), "PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        shards = sum(len(data) for path, data in repo.commits[repo.branches["main"]].items() if "model-" in path)
        assert shards <= downloaded(hub) - before < shards * 1.2 + 100_000
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
