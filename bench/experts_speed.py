"""A layer with many small experts next to layers with few: forward and backward at the same active width.

    python bench/experts_speed.py --out bench/results/experts-h200.json

The layer is Qwen3-30B-A3B's: hidden 2048, experts of 768 of which a token uses 8, attention with 32 heads. A token's
FLOPs do not depend on the number of experts but for the router, so `promised` is the tokens/s of 16 experts divided by
the ratio of active FLOPs, and `share` the part of it that a layer reaches. Gradients are added to fp32 buffers as in
training, and the router has its balance loss. The kernels of one pass are listed by kind. On a CPU, tiny sizes show
only that the script works.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainyard import devices, models
from trainyard.families.builtin.qwen3_moe import Qwen3MoeConfig
from trainyard.families.flops import layer_flops
from trainyard.metrics.kernel_profile import kernel_kind
from trainyard.models.init import initial_values
from trainyard.train.optim.gradient_sync import accumulate_into

GPU = torch.cuda.is_available()
FULL = {"hidden": 2048, "ffn": 768, "heads": 32, "kv_heads": 4, "head_dim": 128}
TINY = {"hidden": 64, "ffn": 32, "heads": 4, "kv_heads": 2, "head_dim": 16}
EXPERTS = (16, 64, 128)


class Layer:
    """A block with its gradient buffers, and what to feed it."""

    def __init__(self, experts: int, batch: int, seq_len: int) -> None:
        sizes = {**(FULL if GPU else TINY), "experts": experts, "top_k": 8, "balance_loss": 0.001}
        self.config = Qwen3MoeConfig.model_validate(
            {"family": "qwen3_moe", "vocab": 512, "layers": 1, "max_positions": seq_len, **sizes}
        )
        self.tokens, self.seq_len = batch * seq_len, seq_len
        device = devices.select("auto")
        kernels, handle = device.kernels(), device.torch_device
        blueprint = models.blueprint_of(self.config)
        model = models.build_model(self.config, handle, kernels=kernels)
        values = initial_values(blueprint, 0, handle)
        models.fill_parameters(model, values)
        self.block = model.layers["0"].train()
        for parameter in self.block.parameters():
            parameter.data = parameter.data.bfloat16()
            buffer = torch.zeros_like(parameter, dtype=torch.float32)
            accumulate_into(parameter, buffer, None)
            kernels.wgrad_buffers[parameter] = buffer
        tokens = torch.zeros(batch, seq_len, dtype=torch.int32, device=handle)
        self.inputs = model.block_inputs({"tokens": tokens})
        shape = (batch, seq_len, self.config.hidden)
        self.x, self.dy = (torch.randn(shape, device=handle, dtype=torch.bfloat16) for _ in range(2))
        self.x.requires_grad_()

    def step(self) -> None:
        self.x.grad = None
        self.block(self.x, *self.inputs).backward(self.dy)

    @property
    def flops(self) -> float:
        """Of forward and backward, without masked pairs of tokens."""
        blueprint = models.blueprint_of(self.config)
        return 3 * layer_flops(self.config, blueprint, self.seq_len)[0] * self.tokens / self.seq_len


def milliseconds(layer: Layer) -> float:
    """Median time of a step."""
    if not GPU:
        start = time.perf_counter()
        layer.step()
        return (time.perf_counter() - start) * 1000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    layer.step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def kernels_of(layer: Layer) -> dict[str, dict[str, float]]:
    """Milliseconds in the kernels of a step: by kind, and the longest ones by name."""
    activity = ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU
    with profile(activities=[activity]) as trace:
        layer.step()
        if GPU:
            torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = {}
    for event in trace.key_averages():
        value = (event.self_device_time_total if GPU else event.self_cpu_time_total) / 1000
        kinds[kernel_kind(event.key)] += value
        names[event.key[:90]] = round(value, 3)
    longest = sorted(names, key=lambda name: -names[name])[:16]
    return {
        "kinds_ms": {kind: round(value, 3) for kind, value in sorted(kinds.items(), key=lambda item: -item[1])},
        "kernels_ms": {name: names[name] for name in longest},
    }


def measure(batch: int, seq_len: int, repeats: int) -> list[dict[str, Any]]:
    """All numbers of experts in turn in each round, so that a clock that changes counts for all."""
    layers = {experts: Layer(experts, batch, seq_len) for experts in EXPERTS}
    for layer in layers.values():
        for _ in range(3):
            layer.step()
    times: dict[int, list[float]] = {experts: [] for experts in EXPERTS}
    for _ in range(repeats):
        for experts, layer in layers.items():
            times[experts].append(milliseconds(layer))
    results = []
    first = layers[EXPERTS[0]]
    base = first.tokens / statistics.median(times[EXPERTS[0]])
    for experts, layer in layers.items():
        median = statistics.median(times[experts])
        speed, promised = layer.tokens / median, base * first.flops / layer.flops
        results.append(
            {
                "experts": experts,
                "tokens": layer.tokens,
                "milliseconds": round(median, 3),
                "tokens_per_second": round(1000 * speed),
                "promised": round(1000 * promised),
                "share": round(speed / promised, 3),
                "tflops": round(layer.flops / median / 1e9, 1),
                "weights": sum(parameter.numel() for parameter in layer.block.parameters()),
                **kernels_of(layer),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 8, 16] if GPU else [2], help="samples of a step")
    parser.add_argument("--seq-len", type=int, default=4096 if GPU else 64)
    parser.add_argument("--repeats", type=int, default=20 if GPU else 2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = [row for batch in arguments.batch for row in measure(batch, arguments.seq_len, arguments.repeats)]
    if arguments.out:
        device = devices.select("auto").describe()
        arguments.out.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "layers": results}, indent=1)
        )


if __name__ == "__main__":
    main()
