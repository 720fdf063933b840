"""`trainyard cache` as a person uses it, on caches that hold next to nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trainyard import devices
from trainyard.cli.cache import app
from trainyard.compile import inductor_cache
from trainyard.core.errors import UserError
from trainyard.precompile.cache_entries import entry_hash
from trainyard.precompile.precompile import RUNS_DIR

GRAPH = b"what torch keeps of a graph"
KEY = "fabcdefghijklmnop"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this machine's toolchain with one graph, which a run needs, and one library, which it does not."""
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    return filled(inductor_cache.cache_dir(devices.select("cpu")))


def filled(place: Path) -> Path:
    entry = f"fxgraph/ab/{KEY}/{entry_hash(GRAPH)}"
    graph = {"key": KEY, "name": "train: llama.forward, backward", "state": "compiled", "seconds": 12.5}
    record = {"name": "small", "ranks": 4, "graphs": [graph], "files": [entry]}
    contents = {
        entry: GRAPH,
        "ab/kernel.cpp": b"int f();",
        "locks/a.lock": b"",
        inductor_cache.FINGERPRINT_FILE: json.dumps(inductor_cache.fingerprint(devices.select("cpu"))).encode(),
        f"{RUNS_DIR}/small-1.json": json.dumps(record).encode(),
    }
    for name, content in contents.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def call(*words: str) -> Result:
    result = CliRunner().invoke(app, list(words), standalone_mode=False)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exception is None, result.output
    return result


def code(result: Result) -> int:
    return result.return_value or 0


def test_ls_says_what_a_graph_is_and_what_it_took(place: Path) -> None:
    said = call("ls", "--device", "cpu").output
    assert f"{place}: 1 graphs" in said
    assert "12.5 s" in said
    assert "train: llama.forward, backward" in said
    assert "each host" not in said


def test_ls_says_where_hosts_do_not_share(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_cache, "file_system", lambda path: "nfs4")
    assert "on nfs4, where locks may not work across hosts" in call("ls", "--device", "cpu").output


def test_ls_lists_a_cache_of_neuronx_cc(place: Path, tmp_path: Path) -> None:
    module = tmp_path / "neuron" / "neuronxcc-2.21.1" / "MODULE_123+d41d8cd9"
    module.mkdir(parents=True)
    (module / "model.log").write_text("failed")
    said = call("ls", "--device", "cpu", "--neuron", str(tmp_path / "neuron")).output
    assert "1 neuronx-cc graphs" in said
    assert "failed  MODULE_123+d41d8cd9  2.21.1" in said


def test_verify_names_what_is_damaged_and_removes_it_when_asked(place: Path) -> None:
    assert code(call("verify", "--device", "cpu")) == 0
    (entry,) = place.glob("fxgraph/*/*/*")
    entry.write_bytes(GRAPH[:5])
    found = call("verify", "--device", "cpu")
    assert code(found) == 1
    assert str(entry) in found.output
    assert entry.exists()
    assert code(call("verify", "--device", "cpu", "--remove")) == 0
    assert not entry.exists()
    assert "0 damaged" in call("verify", "--device", "cpu").output


@pytest.mark.parametrize(("words", "kernel"), [([], True), (["--run", "small"], False)])
def test_a_pack_has_all_or_what_a_run_needs(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], kernel: bool
) -> None:
    call("pack", str(tmp_path / "a.tar"), "--device", "cpu", *words)
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "other"))
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    call("unpack", str(tmp_path / "a.tar"), "--device", "cpu")
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    there = inductor_cache.cache_dir(devices.select("cpu"))
    assert [path.read_bytes() for path in there.glob("fxgraph/*/*/*")] == [GRAPH]
    assert (there / "ab/kernel.cpp").exists() == kernel
    assert not (there / "locks").exists()
    assert "train: llama.forward, backward" in call("ls", "--device", "cpu").output


def test_mistakes_name_what_would_work(place: Path, tmp_path: Path) -> None:
    (tmp_path / "there.tar").write_bytes(b"")
    for words, says in (
        (["pack", str(tmp_path / "there.tar")], "exists; name a new file"),
        (["pack", str(tmp_path / "a.tar"), "--run", "large"], "--run large: not precompiled here; precompiled runs: small"),
        (["unpack", str(tmp_path / "none.tar")], "no such file"),
        (["unpack", str(tmp_path / "there.tar")], "not a pack"),
    ):
        with pytest.raises(UserError, match=says):
            call(*words, "--device", "cpu")


def test_clean_keeps_this_toolchain_where_others_are_meant(place: Path) -> None:
    other = filled(place.parent / "torch-1.0-other-12345678")
    call("clean", "--device", "cpu", "--others")
    assert place.exists()
    assert not other.exists()
    call("clean", "--device", "cpu")
    assert not place.exists()
    assert list(place.parent.iterdir()) == []


def test_clean_waits_for_compilers(place: Path) -> None:
    import fcntl

    with (place / "locks" / "a.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="a compiler is running"):
            call("clean", "--device", "cpu")
        assert place.exists()
        call("clean", "--device", "cpu", "--force")
    assert not place.exists()
