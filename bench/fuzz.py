"""Fuzzes `trainyard`: every key with every kind of bad value, damaged files of every format, wrong command lines.

    python bench/fuzz.py [--inputs 10000] [--seed 0] [--workers 2] [--out bench/results/fuzz-cpu.json]

Each input is a command (tests/fuzz/inputs.py). It must end within 30 s and 4 GiB, without traceback or signal, and an
error must be one line. Prints what did not, and counts by part. Fewer than 10,000 inputs are a sample of the keys.
"""

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import Phase

from tests.fuzz.corpus import write_corpus
from tests.fuzz.fuzzer import LIMIT_S, MEMORY_GIB, Fuzzer
from tests.fuzz.inputs import explore, key_inputs, parts, run_key
from tests.support.forkserver import ForkServer


def run_share(root: Path, worker: int, workers: int, inputs: int, seed: int) -> dict[str, Any]:
    """The share of one worker: counts by part, failures, and the longest input in seconds."""
    server = ForkServer()
    fuzzer = Fuzzer(server, root / "corpus", root / f"scratch-{worker}")
    counts: dict[str, dict[str, int]] = {}
    failures: list[str] = []
    every = parts()
    all_keys = random.Random(seed).sample(found := list(key_inputs()), min(len(found), inputs * 7 // 10))
    keys, per_part = all_keys[worker::workers], (inputs - len(all_keys)) // len(every) + 1

    def guarded(run: Any, *arguments: Any) -> None:
        try:
            run(*arguments)
        except AssertionError as error:
            failures.append(str(error))
            print(f"FAILED {error}", flush=True)

    def count(name: str, run: Any) -> None:
        before = fuzzer.inputs, fuzzer.refused
        run()
        counts[name] = {"inputs": fuzzer.inputs - before[0], "refused": fuzzer.refused - before[1]}
        print(f"{name}: {counts[name]}", flush=True)

    count("keys", lambda: [guarded(run_key, fuzzer, case) for case in keys])
    for name in sorted(every)[worker::workers]:
        recorded = partial(guarded, every[name])
        count(name, partial(explore, fuzzer, recorded, per_part, seed, [Phase.generate]))
    server.close()
    return {"counts": counts, "failures": failures, "slowest_s": fuzzer.slowest_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        root = Path(name)
        server = ForkServer()
        write_corpus(root / "corpus", server)
        server.close()
        shares = [
            (root, worker, arguments.workers, arguments.inputs, arguments.seed) for worker in range(arguments.workers)
        ]
        with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
            results = pool.starmap(run_share, shares)
    counts: dict[str, dict[str, int]] = {}
    for result in results:
        for part, numbers in result["counts"].items():
            counts[part] = {key: value + counts.get(part, {}).get(key, 0) for key, value in numbers.items()}
    failures = [failure for result in results for failure in result["failures"]]
    summary = {
        "seed": arguments.seed,
        "inputs": sum(numbers["inputs"] for numbers in counts.values()),
        "refused": sum(numbers["refused"] for numbers in counts.values()),
        "failures": len(failures),
        "limit_s": LIMIT_S,
        "memory_gib": MEMORY_GIB,
        "slowest_s": round(max(result["slowest_s"] for result in results), 1),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "parts": counts,
    }
    print(f"{summary['inputs']} inputs, seed {arguments.seed}: {len(failures)} failures, {summary['refused']} refused")
    if arguments.out:
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
