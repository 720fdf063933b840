"""What `trainyard submit` costs: its time next to that of sbatch with the script that it wrote, turn by turn.

    sudo python bench/submit.py [--out bench/results/submit-cpu.json]

On a real Slurm cluster in network namespaces of this machine (tests/support/slurm_cluster.py). The jobs begin later, so
that nothing runs beside the measurement.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.support.slurm_cluster import SlurmCluster, exit_on_sigterm, missing_for_cluster, temporary_cluster

ROUNDS = 7


def seconds(command: list[str], cluster: SlurmCluster) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=cluster.environment, stdout=subprocess.DEVNULL, timeout=60, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if reason := missing_for_cluster():
        raise SystemExit(f"no Slurm cluster: {reason}")
    exit_on_sigterm()
    with temporary_cluster(4) as cluster:
        ours, theirs = [], []
        for number in range(ROUNDS):
            runs = cluster.directory / f"runs-{number}"
            options = ["--nodes", "4", "--nproc", "1", "--sbatch=--begin=now+1hour", f"log.directory={runs}"]
            submit = [sys.executable, "-m", "trainyard", "submit", "tiny-llama", "--smoke", "train.global_batch=8"]
            ours.append(seconds([*submit, *options], cluster))
            theirs.append(seconds(["sbatch", str(runs / "tiny-llama-smoke/train.sbatch")], cluster))
        result = {"submit_s": statistics.median(ours), "sbatch_s": statistics.median(theirs), "rounds": ROUNDS}
        print(f"trainyard submit {result['submit_s']:.2f} s, sbatch {result['sbatch_s']:.2f} s (medians of {ROUNDS})")
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
