"""Profile a training step on a GPU by kind of kernel.

    python bench/gpu_profile.py --case deepseek-1.3b [KEY=VALUE ...]

Runs the real Trainer, warms up, then traces steps with torch's profiler.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from gpu import CASES
from torch.profiler import ProfilerActivity, profile

from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.metrics.kernel_profile import kernel_kind, time_by_kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), default="deepseek-1.3b")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--top", type=int, default=25, help="kernels to list")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = parse(json.loads(json.dumps(CASES[arguments.case])), arguments.overrides)
    trainer = Trainer(config)
    for model in trainer.models:
        model.train()
    batches = [trainer.loader.batch(number) for number in range(arguments.steps)]
    start = time.perf_counter()
    for number in range(4 * arguments.steps):  # the same batches, so that every shape is captured
        trainer.train_step(batches[number % arguments.steps], number + 1, 1e-4)
    trainer.device.synchronize()
    print(f"warm-up {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    for number, batch in enumerate(batches):
        trainer.train_step(batch, number + 1, 1e-4)
    sent = time.perf_counter() - start
    trainer.device.synchronize()
    wall = (time.perf_counter() - start) / arguments.steps
    print(f"{wall * 1000:.1f} ms per step without the profiler (host done after {sent / arguments.steps * 1000:.1f})")
    samples = config.train.global_batch / wall
    print(f"{samples * config.data.seq_len:,.0f} tokens/s, {samples:,.1f} sequences/s")
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for number, batch in enumerate(batches):
            trainer.train_step(batch, number + 1, 1e-4)
        trainer.device.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in traced.events():
        if event.device_type.name == "CUDA":
            kernels[event.name][0] += event.device_time_total / 1000 / arguments.steps
            kernels[event.name][1] += 1 / arguments.steps
    kinds = time_by_kind({name: milliseconds for name, (milliseconds, _) in kernels.items()})
    total = sum(kinds.values())
    for kind, milliseconds in kinds.items():
        print(f"  {kind:16} {milliseconds:9.2f} ms  {milliseconds / total:6.1%}")
    print(f"  {'all kernels':16} {total:9.2f} ms")
    for name, (milliseconds, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[: arguments.top]:
        print(
            f"    {milliseconds:8.2f} ms {count:7.1f} x {milliseconds / count * 1000:8.1f} us"
            f"  [{kernel_kind(name)}] {name[:90]}"
        )
    if arguments.out:
        result: dict[str, Any] = {
            "case": arguments.case,
            "overrides": arguments.overrides,
            "device": trainer.device.describe(),
            "torch": torch.__version__,
            "ms_per_step": wall * 1000,
            "tokens_per_second": samples * config.data.seq_len,
            "kinds_ms": kinds,
            "memory_bytes": trainer.device.max_memory_allocated(),
        }
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
