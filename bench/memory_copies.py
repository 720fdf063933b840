"""What copies of the training state in host memory cost: the median step of one run without them and with them.

    sudo python bench/memory_copies.py [--out bench/results/memory-copies-cpu.json]

Two nodes of a Slurm cluster in network namespaces of this machine (tests/support/slurm_cluster.py), one rank each, so
that every copy goes to the other node. The model has 10 million weights: 40 MiB of weights and 80 MiB of moments.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from tests.support.slurm_cluster import SlurmCluster, exit_on_sigterm, missing_for_cluster, temporary_cluster

STEPS, WARM_UP = 45, 5
MODEL = [
    "model.hidden=256",
    "model.layers=8",
    "model.heads=8",
    "model.kv_heads=8",
    "model.ffn=1024",
    "model.vocab=4096",
]
TRAIN = [
    *("tiny-llama", *MODEL, "data.source=synthetic", "data.seq_len=64", "data.validation_fraction=0"),
    *("train.global_batch=4", "train.micro_batch=2", f"train.steps={STEPS}", "layout.zero=1", "log.every=1"),
    *("checkpoint.every=1000", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"),
]
INTERVALS = (0, 10, 2, 1)
"""Steps between copies; 0: none."""


def step_ms(cluster: SlurmCluster, directory: Path, every: int) -> list[float]:
    command = [sys.executable, "-m", "trainyard", "train", *TRAIN, f"checkpoint.memory_every={every}"]
    srun = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", *command, f"log.directory={directory}"]
    subprocess.run(srun, env=cluster.environment, stdout=subprocess.DEVNULL, timeout=300, check=True)
    (metrics,) = directory.glob("*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["ms_per_iteration"] for record in records if "loss" in record and record["step"] > WARM_UP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if reason := missing_for_cluster():
        raise SystemExit(f"no Slurm cluster: {reason}")
    exit_on_sigterm()
    with temporary_cluster(2) as cluster:
        result = {}
        for every in INTERVALS:
            times = step_ms(cluster, cluster.directory / f"every-{every}", every)
            result[str(every)] = {"median_ms": statistics.median(times), "mean_ms": statistics.fmean(times)}
            print(f"copy every {every or 'never':>5}: median {statistics.median(times):.0f} ms, mean", end=" ")
            print(f"{statistics.fmean(times):.0f} ms a step", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
