"""`trainyard cache` as a user runs it, on almost empty caches."""

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from trainyard import devices
from trainyard.cli.commands.cache import app
from trainyard.core.errors import UserError
from trainyard.devices.neuron.compile_cache import list_entries
from trainyard.preflight.precompile.cache_entries import entry_hash
from trainyard.preflight.precompile.precompile import RUNS_DIR
from trainyard.train.compile import inductor_cache

GRAPH = b"a compiled graph"
KEY = "fabcdefghijklmnop"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this machine's toolchain with one graph that a run needs and one library that it does not."""
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    return fill_cache(inductor_cache.cache_dir(devices.select("cpu")))


def fill_cache(cache: Path) -> Path:
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
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(content)
    return cache


def call(*args: str) -> Result:
    result = CliRunner().invoke(app, list(args), standalone_mode=False)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exception is None, result.output
    return result


def exit_code(result: Result) -> int:
    return result.return_value or 0


def test_ls_shows_names_and_compile_times(cache: Path) -> None:
    output = call("ls", "--device", "cpu").output
    assert f"{cache}: 1 graph," in output
    assert "12.5 s" in output
    assert "train: llama.forward, backward" in output
    assert "each host" not in output


def test_ls_warns_about_unsafe_file_systems(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_cache, "file_system", lambda path: "nfs4")
    assert "on nfs4, where locks may not work across hosts" in call("ls", "--device", "cpu").output


def test_ls_lists_the_cache_of_neuronx_cc(cache: Path, tmp_path: Path) -> None:
    module = tmp_path / "neuron" / "neuronxcc-2.21.1" / "MODULE_123+d41d8cd9"
    module.mkdir(parents=True)
    (module / "model.log").write_text("failed")
    output = call("ls", "--device", "cpu", "--neuron", str(tmp_path / "neuron")).output
    assert "1 neuronx-cc graphs" in output
    assert "failed  MODULE_123+d41d8cd9  2.21.1" in output


@pytest.fixture
def neuron_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A neuronx-cc cache in use, with a compiled graph, a failed one and one with an old lock."""
    root = tmp_path / "neuron"
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(root))
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    graph = ["model.hlo_module.pb"]
    for name, files in (
        ("1", [*graph, "model.neff", "model.done"]),
        ("2", [*graph, "model.log"]),
        ("3", [*graph, "model.hlo_module.pb.lock"]),
    ):
        entry = root / "neuronxcc-2.21.1" / f"MODULE_{name}{uuid4().hex}+abcd0123"
        entry.mkdir(parents=True)
        for file in files:
            (entry / file).write_text("x")
            os.utime(entry / file, (time.time() - 7200,) * 2)
    return root


def entry_states(root: Path) -> list[str]:
    return sorted(entry.state for entry in list_entries(root))


def test_verbs_care_for_the_neuronx_cc_cache_in_use(neuron_cache: Path) -> None:
    """Without an option they find the cache that NEURON_COMPILE_CACHE_URL names, as neuronx-cc does."""
    assert f"{neuron_cache}: 1 lock removed" in call("clear-locks", "--device", "cpu").output
    assert entry_states(neuron_cache) == ["empty", "failed", "success"]
    result = call("verify", "--device", "cpu")
    assert exit_code(result) == 1
    assert "failed, and will not be retried" in result.output
    assert exit_code(call("verify", "--device", "cpu", "--remove")) == 0
    assert entry_states(neuron_cache) == ["empty", "success"]
    assert exit_code(call("verify", "--device", "cpu")) == 0


def test_clear_locks_and_verify_need_no_inductor_cache(neuron_cache: Path, cache: Path) -> None:
    """On trn1 nothing is compiled by inductor."""
    shutil.rmtree(cache)
    assert "1 lock removed" in call("clear-locks", "--device", "cpu").output
    assert exit_code(call("verify", "--device", "cpu")) == 1


def test_clean_removes_a_neuronx_cc_cache_only_if_named(neuron_cache: Path, cache: Path) -> None:
    """Others may share it, and compiling it again takes hours."""
    (lock,) = neuron_cache.rglob("*.lock")
    with lock.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="a compiler is running"):
            call("clean", "--neuron", str(neuron_cache))
    for args, message in (
        (["clean", "--neuron", str(neuron_cache), "--others"], "without --others"),
        (["clean", "--neuron", str(neuron_cache / "none")], "no such directory"),
    ):
        with pytest.raises(UserError, match=message):
            call(*args)
    assert len(entry_states(neuron_cache)) == 3
    assert "removed 3 graphs" in call("clean", "--neuron", str(neuron_cache)).output
    assert entry_states(neuron_cache) == []
    assert cache.exists()


def test_verify_and_remove_damaged_files(cache: Path) -> None:
    assert exit_code(call("verify", "--device", "cpu")) == 0
    (entry,) = cache.glob("fxgraph/*/*/*")
    entry.write_bytes(GRAPH[:5])
    result = call("verify", "--device", "cpu")
    assert exit_code(result) == 1
    assert str(entry) in result.output
    assert entry.exists()
    assert exit_code(call("verify", "--device", "cpu", "--remove")) == 0
    assert not entry.exists()
    assert "0 damaged" in call("verify", "--device", "cpu").output


@pytest.mark.parametrize(("args", "has_kernel"), [([], True), (["--run", "small"], False)])
def test_archive_contains_everything_or_one_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], has_kernel: bool
) -> None:
    call("pack", str(tmp_path / "a.tar"), "--device", "cpu", *args)
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "other"))
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    call("unpack", str(tmp_path / "a.tar"), "--device", "cpu")
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    unpacked = inductor_cache.cache_dir(devices.select("cpu"))
    assert [path.read_bytes() for path in unpacked.glob("fxgraph/*/*/*")] == [GRAPH]
    assert (unpacked / "ab/kernel.cpp").exists() == has_kernel
    assert not (unpacked / "locks").exists()
    assert "train: llama.forward, backward" in call("ls", "--device", "cpu").output


def test_user_mistakes_are_one_line(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "existing.tar").write_bytes(b"")
    for args, message in (
        (["pack", str(tmp_path / "existing.tar")], "exists; name a new file"),
        (
            ["pack", str(tmp_path / "a.tar"), "--run", "large"],
            "--run large: not precompiled here; precompiled runs: small",
        ),
        (["unpack", str(tmp_path / "none.tar")], "no such file"),
        (["unpack", str(tmp_path / "existing.tar")], "not an archive"),
    ):
        with pytest.raises(UserError, match=message):
            call(*args, "--device", "cpu")


def test_clean_others_keeps_this_toolchain(cache: Path) -> None:
    other_cache = fill_cache(cache.parent / "torch-1.0-other-12345678")
    call("clean", "--device", "cpu", "--others")
    assert cache.exists()
    assert not other_cache.exists()
    call("clean", "--device", "cpu")
    assert not cache.exists()
    assert list(cache.parent.iterdir()) == []


def test_clean_refuses_while_compiling(cache: Path) -> None:
    with (cache / "locks" / "a.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="a compiler is running"):
            call("clean", "--device", "cpu")
        assert cache.exists()
        call("clean", "--device", "cpu", "--force")
    assert not cache.exists()
