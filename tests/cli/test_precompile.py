"""`trainyard precompile` end to end: afterwards training compiles nothing, whatever happened to the cache.

Real inductor compiles, with a C++ compiler that does not optimize. All tests share one cache.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import configs
from tests.support.compiler import install_unoptimized_compiler
from tests.support.forkserver import ForkServer
from trainyard.compat import GraphRequest
from trainyard.config.load import dump
from trainyard.config.recipes import recipe_names
from trainyard.preflight.precompile.collect_graphs import GraphCollector
from trainyard.train.compile import inductor_cache

TIMEOUT_S = 900.0
PROBES = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainyard-tests" / "probes"
ONE_RANK = ["--nproc", "1"]
FOUR_RANKS = [
    *("layout.tp=2", "layout.pp=2", "train.global_batch=8", "evaluate.every=1", "data.validation_fraction=0.1"),
    *("--nproc", "4"),
]


class Cache:
    """Runs commands with a cache directory and a compiler that does not optimize."""

    def __init__(self, cli: ForkServer, path: Path, bin_dir: Path) -> None:
        self.cli, self.path = cli, path
        removed = {inductor_cache.TORCH_CACHE_VARIABLE}
        self.environment = {name: value for name, value in os.environ.items() if name not in removed} | {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TRAINYARD_CACHE": str(path),
            "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        }

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.cli.run(args, env=self.environment | variables, timeout=TIMEOUT_S)

    def train(self, file: Path, directory: Path, args: Sequence[str]) -> tuple[str, list[float]]:
        """What the run prints about compiling, and its losses."""
        done = self.run("train", str(file), *args, f"log.directory={directory}")
        assert done.returncode == 0, done.stdout + done.stderr
        compiled = [line for line in done.stdout.splitlines() if line.startswith("Compiled")]
        (metrics,) = directory.glob("*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return "\n".join(compiled), [record["loss"] for record in records if "loss" in record]


def copy_cpu_probes(source: Path, target: Path) -> None:
    """Copy the libraries with which inductor probes the CPU's instruction set: they take longer than a graph."""
    for path in source.glob("*/*/*.so"):
        if not path.name.endswith(".main.so"):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def totals(done: subprocess.CompletedProcess[str]) -> tuple[int, ...]:
    """Graphs, successful and failed compilations."""
    found = re.findall(r"^Total (?:graphs|successful compilations|failed compilations): (\d+)$", done.stdout, re.M)
    assert len(found) == 3, done.stdout + done.stderr
    return tuple(map(int, found))


@pytest.fixture(scope="module")
def bin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bin")
    install_unoptimized_compiler(directory)
    return directory


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    config = configs.tiny_config(
        "llama",
        train={"steps": 3},
        recompute={
            "kind": "attention"
        },  # torch would save its random state for attention, and not find the graph again
        compile={"enabled": True},
        log={"name": "small"},
    )
    path.write_text(dump(config))
    return path


@pytest.fixture(scope="module")
def cache(cli: ForkServer, tmp_path_factory: pytest.TempPathFactory, bin_dir: Path, file: Path) -> Cache:
    """A cache in which the run is precompiled for one rank."""
    cache = Cache(cli, tmp_path_factory.mktemp("cache"), bin_dir)
    copy_cpu_probes(PROBES, cache.path)
    done = cache.run("precompile", str(file), *ONE_RANK, "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    copy_cpu_probes(cache.path, PROBES)
    assert totals(done) == (3, 3, 0), done.stdout  # block forward, block backward, loss
    return cache


@pytest.fixture(scope="module")
def expected(file: Path, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    return cache.train(file, tmp_path_factory.mktemp("run"), ONE_RANK)


@pytest.mark.nightly
def test_one_rank_compiles_nothing(expected: tuple[str, list[float]]) -> None:
    compiled, losses = expected
    assert compiled == "Compiled 0 graphs, 3 from cache"
    assert len(losses) == 3


@pytest.mark.nightly
def test_four_ranks_compile_nothing(file: Path, cache: Cache, tmp_path: Path) -> None:
    """Neither in the first step nor in evaluation, which runs after each step, on any rank."""
    done = cache.run("precompile", str(file), *FOUR_RANKS, "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert totals(done) == (4, 4, 0), done.stdout  # block forward, block backward, evaluation, loss
    compiled, losses = cache.train(file, tmp_path, FOUR_RANKS)
    assert compiled == "Compiled 0 graphs, 10 from cache"  # two graphs of a block on each rank, the loss on two
    assert len(losses) == 3


@pytest.mark.nightly
def test_second_precompile_finds_everything(file: Path, cache: Cache) -> None:
    done = cache.run("precompile", str(file), *ONE_RANK)
    assert done.returncode == 0, done.stderr
    assert totals(done) == (3, 3, 0)
    assert "3 found in the cache, 0 compiled" in done.stdout


@pytest.mark.nightly
def test_archive_serves_another_machine(
    file: Path, cache: Cache, bin_dir: Path, expected: tuple[str, list[float]], tmp_path: Path
) -> None:
    packed = cache.run("cache", "pack", str(tmp_path / "run.tar"), "--run", "small")
    assert packed.returncode == 0, packed.stderr
    other = Cache(cache.cli, tmp_path / "other", bin_dir)
    unpacked = other.run("cache", "unpack", str(tmp_path / "run.tar"))
    assert unpacked.returncode == 0, unpacked.stderr
    assert other.train(file, tmp_path / "runs", ONE_RANK) == expected
    assert "train: llama.forward, backward" in other.run("cache", "ls").stdout
    assert "0 damaged" in other.run("cache", "verify").stdout


@pytest.mark.nightly
def test_failures_and_kills_do_not_spoil_the_cache(
    file: Path, cache: Cache, bin_dir: Path, expected: tuple[str, list[float]], tmp_path: Path
) -> None:
    other = Cache(cache.cli, tmp_path / "cache", bin_dir)
    copy_cpu_probes(cache.path, other.path)
    done = other.run("precompile", str(file), "--workers", "2", FAIL="yes")
    assert done.returncode == 1, done.stdout + done.stderr
    assert totals(done) == (3, 0, 3)
    logs = re.findall(r"^  log: (.*)$", done.stdout, re.M)
    assert len(logs) == 3
    assert all("no kernels today" in Path(log).read_text() for log in logs)

    rng = random.Random(7)
    for command in (["precompile", str(file)], ["train", str(file), f"log.directory={tmp_path}"]):
        process = cache.cli.start(command, env=other.environment)
        time.sleep(rng.uniform(6, 16))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = other.run("precompile", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert totals(done) == (3, 3, 0)
    assert other.train(file, tmp_path / "runs", ONE_RANK) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", recipe_names())
def test_run_of_every_recipe_compiles_nothing(cli: ForkServer, bin_dir: Path, tmp_path: Path, recipe: str) -> None:
    """As shipped, at --smoke size on four ranks: the layout keeps as many axes of the recipe as fit. Recipes do not
    enable compilation: precompile implies it."""
    cache = Cache(cli, tmp_path / "cache", bin_dir)
    copy_cpu_probes(PROBES, cache.path)
    done = cache.run("precompile", recipe, "--smoke", "--nproc", "4", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train with compile.enabled=true" in done.stdout
    args = ["--smoke", "compile.enabled=true", "--nproc", "4"]
    compiled, _ = cache.train(Path(recipe), tmp_path / "runs", args)
    assert re.fullmatch(r"Compiled 0 graphs, \d+ from cache", compiled), compiled


def test_graph_whose_second_trace_differs_fails_with_a_log_that_says_how(tmp_path: Path) -> None:
    """Guards against "compiled, but not found" with a log that does not exist."""
    messages: list[dict[str, Any]] = []
    graphs = GraphCollector(tmp_path, 1, fork_safe=True, send=messages.append)
    graphs.key_parts = {"[abc] gm: the graph", "[def] example_inputs[19]: torch.Size([s13])"}
    parts = ("[abc] gm: the graph", "[xyz] example_inputs[19]: torch.Size([s64])")
    request = GraphRequest("fkey", "llama.forward", is_backward=True, key_parts=parts)
    graphs.report_unknown_key(request)
    assert messages[-1]["state"] == "failed"
    text = Path(messages[-1]["log"]).read_text()
    assert "s64" in text
    assert "the graph" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["compile.enabled=false"], "compile.enabled=false: this run compiles nothing"),
        (["layout.tp=3"], "layout.tp=3"),
        (["--nproc", "2", "layout.pp=3"], "layout.pp=3"),
    ],
)
def test_user_mistakes_are_one_line(
    cli: ForkServer, bin_dir: Path, file: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    done = Cache(cli, tmp_path, bin_dir).run("precompile", str(file), *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
