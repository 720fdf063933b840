"""bf16 matrix multiplication and attention on this CPU: torch's kernels, kernels/bf16_cpu.py, and fp32; one thread.

    python bench/bf16_cpu.py [--out FILE]

`trainyard train` uses kernels/bf16_cpu.py only if torch has no fast bf16 kernels (`fast_bf16`, printed first).
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard import compat
from trainyard.kernels import bf16_cpu

MEASURE_S = 1.0


def matmul_case(side: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    return partial(torch.mm, a, b)


def attention_case(tokens: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Four heads of size 64, forward and backward."""
    q, k, v = (torch.randn(1, 4, tokens, 64).to(dtype).requires_grad_() for _ in range(3))

    def work() -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(torch.ones_like(out))
        return out

    return work


CASES: dict[str, Callable[[torch.dtype], Callable[[], Tensor]]] = {
    "matmul 128 x 128 x 128": partial(matmul_case, 128),
    "matmul 512 x 512 x 512": partial(matmul_case, 512),
    "attention over 256 tokens": partial(attention_case, 256),
}


def best_ms(work: Callable[[], Tensor]) -> float:
    """Return the best time of the runs that fit in MEASURE_S seconds, without the first."""
    work()
    best, stop = float("inf"), time.perf_counter() + MEASURE_S
    while True:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > stop:
            return round(best * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    half = torch.bfloat16
    machine = {"machine": platform.machine(), "torch": torch.__version__, "fast_bf16": compat.has_fast_bf16_matmul()}
    print(machine, flush=True)
    rows = {name: {"fp32": best_ms(make(torch.float32)), "torch": best_ms(make(half))} for name, make in CASES.items()}
    bf16_cpu.install()
    for name, make in CASES.items():
        rows[name]["ours"] = best_ms(make(half))
        print(f"{name:28}" + "".join(f"  {who} {found:10.3f} ms" for who, found in rows[name].items()), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine, "milliseconds": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
