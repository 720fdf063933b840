"""`trainyard precompile` as its users need it: after it, training compiles nothing, whatever the cache went through.

The caches are made once for all tests of this file; each takes the C++ compiler the better part of a minute.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import configs
from trainyard.compile import inductor_cache
from trainyard.config.load import dump

pytestmark = pytest.mark.nightly

COMMAND = [sys.executable, "-m", "trainyard"]
LIMIT = 900.0
FOUR = ["layout.tp=2", "layout.pp=2", "train.global_batch=8", "evaluate.every=1", "data.validation_fraction=0.1"]
RANKS = {1: ["--nproc", "1"], 4: [*FOUR, "--nproc", "4"]}


def environment(cache: Path, **more: str) -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TRAINYARD_CACHE": str(cache)}
    ours = {
        name: value for name, value in os.environ.items() if name != inductor_cache.TORCH_CACHE_VARIABLE
    }  # torch sets it here
    return {**ours, **fixed, **more}


def run(cache: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=LIMIT, env=environment(cache, **more)
    )


def totals(done: subprocess.CompletedProcess[str]) -> tuple[int, ...]:
    """Graphs, successful and failed compilations."""
    found = re.findall(r"^Total (?:graphs|successful compilations|failed compilations): (\d+)$", done.stdout, re.M)
    assert len(found) == 3, done.stdout + done.stderr
    return tuple(map(int, found))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(
        dump(configs.tiny_config("llama", train={"steps": 3}, compile={"enabled": True}, log={"name": "small"}))
    )
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Path:
    """Where the run has been precompiled for one rank and for four."""
    path = tmp_path_factory.mktemp("cache")
    for ranks, words in RANKS.items():
        done = run(path, "precompile", str(file), *words, "--workers", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        graphs, good, failed = totals(done)
        assert (good, failed) == (graphs, 0)
        assert graphs == (3 if ranks == 1 else 4), done.stdout  # block forward, backward, [evaluated,] loss
    return path


def train(file: Path, cache: Path, directory: Path, words: Sequence[str]) -> tuple[str, list[float]]:
    """What the run says about compiling, and its losses."""
    done = run(cache, "train", str(file), *words, f"log.directory={directory}")
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("Compiled")]
    (metrics,) = directory.glob("*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return "\n".join(said), [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def expected(file: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    return train(file, cache, tmp_path_factory.mktemp("run"), RANKS[1])


def test_one_rank_compiles_nothing(expected: tuple[str, list[float]]) -> None:
    said, losses = expected
    assert said == "Compiled 0 graphs, 3 from cache"
    assert len(losses) == 3


def test_four_ranks_compile_nothing(file: Path, cache: Path, tmp_path: Path) -> None:
    """Neither in the first step nor in evaluation, which each step has here, on any rank."""
    said, losses = train(file, cache, tmp_path, RANKS[4])
    assert said == "Compiled 0 graphs, 10 from cache"  # two ranks with a block's two graphs, two with the loss as well
    assert len(losses) == 3


def test_again_all_is_found(file: Path, cache: Path) -> None:
    done = run(cache, "precompile", str(file), *RANKS[1])
    assert done.returncode == 0, done.stderr
    assert totals(done) == (3, 3, 0)
    assert "3 found in the cache, 0 compiled" in done.stdout


def test_a_pack_serves_another_machine(
    file: Path, cache: Path, expected: tuple[str, list[float]], tmp_path: Path
) -> None:
    packed = run(cache, "cache", "pack", str(tmp_path / "run.tar"), "--run", "small")
    assert packed.returncode == 0, packed.stderr
    elsewhere = tmp_path / "elsewhere"
    unpacked = run(elsewhere, "cache", "unpack", str(tmp_path / "run.tar"))
    assert unpacked.returncode == 0, unpacked.stderr
    assert train(file, elsewhere, tmp_path / "runs", RANKS[1]) == expected
    listed = run(elsewhere, "cache", "ls")
    assert "train: llama.forward, backward" in listed.stdout
    assert "0 damaged" in run(elsewhere, "cache", "verify").stdout


def failing_compiler(directory: Path) -> Path:
    """A g++ that fails for kernels while FAIL is set, and is the real one otherwise."""
    real = shutil.which("g++")
    script = directory / "g++"
    script.write_text(
        f'#!/bin/sh\ncase "$FAIL $*" in yes*.main.cpp*) echo no kernels today >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    return script


def test_neither_failures_nor_kills_spoil_the_cache(
    file: Path, cache: Path, expected: tuple[str, list[float]], tmp_path: Path
) -> None:
    mistreated, bin_ = tmp_path / "cache", tmp_path / "bin"
    bin_.mkdir()
    failing_compiler(bin_)
    path = f"{bin_}:{os.environ['PATH']}"
    # The probes of the CPU's instructions are not what is tested, and take a while.
    for source in cache.glob("*/*/*.so"):
        if not source.name.endswith(".main.so"):
            target = mistreated / source.relative_to(cache)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    done = run(mistreated, "precompile", str(file), "--workers", "2", PATH=path, FAIL="yes")
    assert done.returncode == 1, done.stdout + done.stderr
    assert totals(done) == (3, 0, 3)
    logs = re.findall(r"^  log: (.*)$", done.stdout, re.M)
    assert len(logs) == 3
    assert all("no kernels today" in Path(log).read_text() for log in logs)

    draw = random.Random(7)
    for words in (["precompile", str(file)], ["train", str(file), f"log.directory={tmp_path}"]):
        process = subprocess.Popen(
            [*COMMAND, *words],
            env=environment(mistreated, PATH=path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(draw.uniform(6, 16))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = run(mistreated, "precompile", str(file), PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert totals(done) == (3, 3, 0)
    assert train(file, mistreated, tmp_path / "runs", RANKS[1]) == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compile.enabled=false"], "compile.enabled=false: this run compiles nothing"),
        (["layout.tp=3"], "layout.tp=3"),
        (["--nproc", "2", "layout.pp=3"], "layout.pp=3"),
    ],
)
def test_mistakes_are_one_line(file: Path, tmp_path: Path, words: list[str], says: str) -> None:
    done = run(tmp_path, "precompile", str(file), *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
