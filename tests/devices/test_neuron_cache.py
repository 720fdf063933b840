"""Inspecting and repairing the compile cache of neuronx-cc, with directories in its exact layout."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from trainyard.core.errors import UserError
from trainyard.devices.neuron.compile_cache import (
    DEFAULT_DIR,
    NeuronCacheEntry,
    cache_location,
    clear_locks,
    damaged_entries,
    entry_problems,
    list_entries,
    remove_entries,
    stale_locks,
)

COMPILER = "neuronxcc-2.21.33363.0+82129205"
FLAGS = ["--model-type=transformer", "--auto-cast=none"]
GRAPH = {"model.hlo_module.pb": "graph", "compile_flags.json": json.dumps(FLAGS)}
DONE = {**GRAPH, "model.neff": "code", "model.done": ""}
FAILED = {**GRAPH, "model.log": "x" * 9000 + "\n[LUR015] Compiler generated too many instructions\n"}
LOCKED = {**GRAPH, "model.hlo_module.pb.lock": ""}
NAMES = {"success": "MODULE_1+00000001", "failed": "MODULE_2+00000001", "locked": "MODULE_3+00000001"}
HOUR = 3600.0


def no_processes() -> list[str]:
    return []


def add_entry(root: Path, name: str, files: dict[str, str], age: float = 0.0) -> Path:
    path = root / COMPILER / name
    path.mkdir(parents=True)
    for file, text in files.items():
        (path / file).write_text(text)
        os.utime(path / file, (time.time() - age,) * 2)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    add_entry(tmp_path, NAMES["success"], DONE)
    add_entry(tmp_path, NAMES["failed"], FAILED)
    add_entry(tmp_path, NAMES["locked"], LOCKED, age=2 * HOUR)
    add_entry(tmp_path, "MODULE_02e0833b58066ea94f2c+d41d8cd9", {"model.hlo.pb": "older"})
    return tmp_path


def by_state(cache: Path) -> dict[str, NeuronCacheEntry]:
    return {entry.state: entry for entry in list_entries(cache)}


def test_states_of_entries(cache: Path) -> None:
    found = by_state(cache)
    assert sorted(found) == ["empty", "failed", "locked", "success"]
    done, failed, empty = found["success"], found["failed"], found["empty"]
    assert (done.compiler_version, done.flags_hash) == ("2.21.33363.0+82129205", "00000001")
    assert done.flags == tuple(FLAGS)
    assert done.size_bytes == sum(map(len, DONE.values()))
    assert abs(done.modified_at - time.time()) < 60
    assert failed.log_tail.endswith("[LUR015] Compiler generated too many instructions")
    assert len(failed.log_tail) < 5000
    assert empty.flags == ()
    assert [lock.name for lock in found["locked"].locks] == ["model.hlo_module.pb.lock"]


def test_unrelated_files_are_ignored(cache: Path) -> None:
    before = list_entries(cache)
    (cache / "README").write_text("mine")
    (cache / "other" / NAMES["success"]).mkdir(parents=True)
    (cache / COMPILER / "lost+found").mkdir()
    (cache / COMPILER / "MODULE_nonsense").mkdir()
    (cache / COMPILER / "MODULE_9+00000009").write_text("a file")
    (cache / COMPILER / ".removed-abc").mkdir()
    assert list_entries(cache) == before


def test_damaged_entry_is_listed_with_its_problems(tmp_path: Path) -> None:
    path = add_entry(tmp_path, "MODULE_7+00000007", {**GRAPH, "compile_flags.json": "[broken", "model.neff": ""})
    (path / "model.log").symlink_to(tmp_path / "nowhere")
    (path / "sub").mkdir()
    (entry,) = list_entries(tmp_path)
    assert entry.flags == ()
    assert entry.log_tail == ""
    assert entry_problems(entry) == ["model.neff without model.done: truncated", "model.neff is empty"]


def test_paths_that_are_not_a_cache(tmp_path: Path) -> None:
    assert list_entries(tmp_path / "nothing") == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a directory"):
        list_entries(tmp_path / "file")
    with pytest.raises(UserError, match="s3://bucket/cache: only directories"):
        list_entries("s3://bucket/cache")


@pytest.mark.parametrize(
    ("state", "problems"),
    [
        ("success", []),
        ("empty", []),
        ("failed", ["failed, and will not be retried"]),
        ("locked", ["locked"]),
    ],
)
def test_entry_problems(cache: Path, state: str, problems: list[str]) -> None:
    assert entry_problems(by_state(cache)[state]) == problems


def test_damaged_entries_are_removed_and_others_kept(cache: Path) -> None:
    removed = remove_entries(damaged_entries(list_entries(cache)), no_processes)
    assert [entry.key for entry in removed] == [NAMES["failed"]]
    assert {entry.state for entry in list_entries(cache)} == {"success", "locked", "empty"}
    assert sorted(path.name for path in (cache / COMPILER).iterdir()) == sorted(
        [NAMES["success"], NAMES["locked"], "MODULE_02e0833b58066ea94f2c+d41d8cd9"]
    )


def test_entry_being_compiled_is_not_removed_without_force(tmp_path: Path) -> None:
    path = add_entry(tmp_path, "MODULE_2+00000001", FAILED | LOCKED, age=2 * HOUR)
    with (path / "model.hlo_module.pb.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_entries(list_entries(tmp_path), no_processes) == []
        assert damaged_entries(list_entries(tmp_path)) == []
    assert remove_entries(list_entries(tmp_path), lambda: [f"neuronx-cc compile model.{path.name}.hlo.pb"]) == []
    assert len(remove_entries(list_entries(tmp_path), no_processes)) == 1


@pytest.mark.parametrize(("minutes", "cleared"), [(60, 1), (150, 0)])
def test_clear_locks_by_age(cache: Path, minutes: float, cleared: int) -> None:
    assert len(clear_locks(list_entries(cache), minutes, running=no_processes)) == cleared
    assert ("empty" if cleared else "locked") in [
        entry.state for entry in list_entries(cache) if entry.key == NAMES["locked"]
    ]


@pytest.mark.parametrize("function", ["flock", "lockf"])
def test_clear_locks_keeps_a_lock_held_by_a_process(cache: Path, function: str) -> None:
    (lock,) = by_state(cache)["locked"].locks
    script = f"import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.{function}(f, 2); print(); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert clear_locks(list_entries(cache), 0, running=no_processes) == []
    holder.communicate("")
    assert clear_locks(list_entries(cache), 0, running=no_processes) == [lock]
    assert not lock.exists()


def test_lock_of_a_running_compiler_is_not_stale(cache: Path) -> None:
    """A real process names the entry on its command line, as the compiler does. The name is unique: processes of
    other tests may run at the same time."""
    path = add_entry(cache, f"MODULE_{uuid4().hex}+00000001", LOCKED)
    (entry,) = [entry for entry in list_entries(cache) if entry.path == path]
    compiler = subprocess.Popen(
        [sys.executable, "-c", "input()", f"/tmp/model.{entry.key}.hlo.pb"], stdin=subprocess.PIPE, text=True
    )
    try:
        assert stale_locks(entry, 0) == []
    finally:
        compiler.communicate("\n")
    assert stale_locks(entry, 0) == entry.locks


def test_clear_locks_with_force(cache: Path) -> None:
    add_entry(cache, "MODULE_4+00000001", LOCKED)
    assert len(clear_locks(list_entries(cache), running=no_processes)) == 1
    assert len(clear_locks(list_entries(cache), force=True)) == 1


@pytest.mark.parametrize(
    ("environ", "location"),
    [
        ({}, DEFAULT_DIR),
        ({"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"}, "s3://bucket/cache"),
        ({"NEURON_COMPILE_CACHE_URL": "/a", "NEURON_CC_FLAGS": "-O1 --cache_dir=/b"}, "/b"),
        ({"NEURON_CC_FLAGS": "--cache_dir /b -O1"}, "/b"),
        ({"NEURON_CC_FLAGS": "--cache_dir", "NEURON_COMPILE_CACHE_URL": "/a"}, "/a"),
    ],
)
def test_cache_location(environ: dict[str, str], location: str) -> None:
    assert cache_location(environ) == location
