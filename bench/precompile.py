"""Gain of precompilation on a CPU: two compilers against one, and the first step of a run with and without it.

    python bench/precompile.py [--rounds N] [--models NAME...] [--out FILE]

- workers: seconds from the first graph given to a compiler until the last one is done, with one worker and with two,
  for a Llama and a GPT of a few blocks; each from an empty cache, each compiler with one thread. Ratio of the sums.
- start: seconds from the start of `trainyard train` to the end of its first step, with an empty cache and after
  precompile, for the last model.

Each round compiles everything four times. That takes minutes and needs an otherwise idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainyard.config.load import dump, parse
from trainyard.config.schema import Config
from trainyard.preflight.precompile.precompile import PrecompiledGraph, precompile
from trainyard.train.compile import inductor_cache

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "vocab": 512, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 192},
    "gpt": {"family": "gpt", "vocab": 512, "hidden": 64, "layers": 2, "heads": 4, "ffn": 256},
}


def make_config(model: dict[str, Any]) -> Config:
    return parse(
        {
            "model": {**model, "max_positions": 64},
            "data": {"source": "synthetic", "seq_len": 64, "validation_fraction": 0.1},
            "train": {"steps": 2, "global_batch": 4, "micro_batch": 4},
            "evaluate": {"every": 2, "batches": 1},
            "checkpoint": {"export_hf": False},
            "log": {"loggers": []},
            "compile": {"enabled": True},
            "device": {"name": "cpu", "threads": 1},
        }
    )


def time_compilation(config: Config, workers: int, cache: Path) -> dict[str, float]:
    """Compile with an empty cache; returns the total seconds and those of each graph."""
    os.environ[inductor_cache.CACHE_VARIABLE] = str(cache)
    os.environ.pop(inductor_cache.TORCH_CACHE_VARIABLE, None)
    times: list[float] = []
    report = precompile(config, 1, 1, workers, on_graph=lambda graph: times.append(time.monotonic()))
    graphs: list[PrecompiledGraph] = list(report.graphs.values())
    assert not report.failed_graphs
    assert not report.problems
    assert all(graph.state == "compiled" for graph in graphs)
    return {"seconds": times[-1] - times[0], **{graph.name: graph.seconds for graph in graphs}}


def time_first_step(config: Config, cache: Path) -> float:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "run.yaml"
        file.write_text(dump(config))
        command = [sys.executable, "-m", "trainyard", "train", str(file), f"log.directory={directory}"]
        environment = {name: value for name, value in os.environ.items() if name != inductor_cache.TORCH_CACHE_VARIABLE}
        environment |= {inductor_cache.CACHE_VARIABLE: str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(directory).glob("*/metrics.jsonl")
        return float(json.loads(metrics.read_text().splitlines()[0])["seconds_from_start"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = {name: MODELS[name] for name in options.models}
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        found: dict[str, Any] = {"load": os.getloadavg()[0]}
        for workers in (1, 2):
            for name, model in chosen.items():
                with tempfile.TemporaryDirectory() as cache:
                    found[f"{name}, {workers} workers"] = time_compilation(make_config(model), workers, Path(cache))
                    if workers == 2:
                        found["start after precompile"] = time_first_step(make_config(model), Path(cache))
                        last = model
        with tempfile.TemporaryDirectory() as cache:
            found["start with an empty cache"] = time_first_step(make_config(last), Path(cache))
        one, two = (sum(found[f"{name}, {count} workers"]["seconds"] for name in chosen) for count in (1, 2))
        found["ratio"] = one / two
        rounds.append(found)
        print(json.dumps(found, indent=1), flush=True)
    summary = {
        "workers": statistics.median(found["ratio"] for found in rounds),
        "start": statistics.median(
            found["start with an empty cache"] / found["start after precompile"] for found in rounds
        ),
        "cores": len(os.sched_getaffinity(0)),
        "rounds": rounds,
    }
    print(
        f"two workers are {summary['workers']:.2f} times as fast as one; the first step is {summary['start']:.2f} "
        "times as soon after precompile"
    )
    if options.out:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
