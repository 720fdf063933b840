"""Forward and input gradient of linear layers with frozen matrices, at the shapes of Llama 3.1 8B.

    python bench/frozen_linear.py --out bench/results/frozen-linear-h200.json

Storages: bf16; fp8 dynamic, a bf16 matrix that is quantized at each use; fp8 stored, with gradients in e5m2 and in
bf16; nf4. `dequantize` is that of nf4 alone. On a CPU, tiny sizes with the reference kernels show only that the script
works.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.frozen_linear import FrozenMatrix, frozen_linear, quantize_frozen
from trainyard.kernels.nf4 import dequantize_nf4, quantize_nf4

GPU = torch.cuda.is_available()
MATRICES = {"qkv": (6144, 4096), "attention output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TINY_MATRICES = {"qkv": (192, 128), "down": (128, 448)}


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time."""
    for _ in range(3 if GPU else 1):
        work()
    times = []
    for _ in range(repeats):
        if GPU:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def peak_bytes(work: Callable[[], object]) -> int:
    """Largest memory besides what exists before."""
    if not GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(rows: int, columns: int, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    device, reference = "cuda" if GPU else "cpu", not GPU
    weight = (torch.randn(rows, columns, device=device) * columns**-0.5).bfloat16()
    x = torch.randn(tokens, columns, device=device).bfloat16().requires_grad_()
    dy = torch.randn(tokens, rows, device=device).bfloat16()
    nf4 = quantize_nf4(weight)
    storages: dict[str, tuple[FrozenMatrix, Fp8Options | None]] = {
        "bf16": (weight, None),
        "fp8 dynamic": (weight, Fp8Options()),
        "fp8 stored": (quantize_frozen(weight, "tensor"), Fp8Options()),
        "fp8 stored, rows": (quantize_frozen(weight, "row"), Fp8Options("row")),
        "fp8 stored, bf16 gradients": (quantize_frozen(weight, "tensor"), Fp8Options(grad_format="bf16")),
        "nf4": (nf4, None),
    }
    results = {}
    exact: list[torch.Tensor] = []
    for name, (matrix, fp8) in storages.items():

        def forward(matrix: FrozenMatrix = matrix, fp8: Fp8Options | None = fp8) -> torch.Tensor:
            return frozen_linear(x, matrix, None, fp8, reference)

        def both(forward: Callable[[], torch.Tensor] = forward) -> list[torch.Tensor]:
            y = forward()
            return [y.detach(), *torch.autograd.grad(y, x, dy)]

        outputs = both()
        exact = exact or outputs
        y_error, dx_error = (float((a - e).norm() / e.norm()) for a, e in zip(outputs, exact, strict=True))
        del outputs
        tensors = (matrix,) if isinstance(matrix, torch.Tensor) else matrix
        results[name] = {
            "forward_ms": milliseconds(forward, repeats),
            "forward_dgrad_ms": milliseconds(both, repeats),
            "bytes_per_weight": sum(tensor.nbytes for tensor in tensors) / weight.numel(),
            "peak_mib": peak_bytes(both) / 2**20,
            "y_error": y_error,
            "dx_error": dx_error,
        }
    results["nf4"]["dequantize_ms"] = milliseconds(_dequantize(nf4), repeats)
    return results


def _dequantize(matrix: Any) -> Callable[[], object]:
    if not GPU:
        return lambda: dequantize_nf4(matrix, torch.bfloat16)
    from trainyard.kernels.triton import nf4 as kernels

    out = dequantize_nf4(matrix, torch.bfloat16)
    ours = torch.empty_like(out)
    kernels.dequantize(*matrix, ours)
    assert torch.equal(ours, out)
    return lambda: kernels.dequantize(*matrix, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384] if GPU else [64])
    parser.add_argument("--repeats", type=int, default=30 if GPU else 3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if GPU else "cpu"
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "tokens": {}}
    for tokens in arguments.tokens:
        rows = results["tokens"][tokens] = {}
        for name, shape in (MATRICES if GPU else TINY_MATRICES).items():
            rows[name] = measure(*shape, tokens, arguments.repeats)
            base = rows[name]["bf16"]["forward_dgrad_ms"]
            for storage, row in rows[name].items():
                figures = "  ".join(f"{key} {value:.3f}" for key, value in row.items())
                ratio = row["forward_dgrad_ms"] / base
                print(f"{tokens:6} {name:17} {storage:27} {ratio:5.2f} x bf16  {figures}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
