"""Decoding on one GPU at the shapes of DeepSeek-Coder 1.3B: each kernel, and a whole step captured as a graph.

    python bench/decode_kernels.py --out bench/results/decode-h200.json

A kernel runs once per layer with weights or caches of its own, in a captured graph, so that nothing is in the L2 cache
and launches overlap as they do in a model. `torch` is the same work in torch's own kernels, measured the same way.
The step is the real model with a KV cache of 1024 positions: the prompt has 512 tokens (random keys and values: only
time is measured) and 128 new tokens follow, each the most likely one.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

from trainyard import models
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.kernels import reference
from trainyard.kernels.reference import Kernels
from trainyard.kernels.triton.decode.decode_attention import decode_attention
from trainyard.kernels.triton.decode.greedy_tokens import greedy_tokens
from trainyard.kernels.triton.decode.ops import DecodeKernels
from trainyard.kernels.triton.decode.skinny_linear import skinny_linear
from trainyard.models.base import TransformerStage
from trainyard.models.rank_model import fill_parameters

CONFIG = LlamaConfig(
    family="llama", vocab=32256, hidden=2048, layers=24, heads=16, ffn=5504, max_positions=16384, rope_theta=100000.0
)
PROMPT, NEW_TOKENS, MAX_SEQ_LEN = 512, 128, 1032
MATMULS = {  # name: (rows of W, columns of W, RMSNorm before, activation, residual after)
    "qkv": (6144, 2048, True, "none", False),
    "attention output": (2048, 2048, False, "none", True),
    "gate_up": (11008, 2048, True, "swiglu", False),
    "down": (2048, 5504, False, "none", True),
    "vocabulary": (32256, 2048, True, "none", False),
}


def capture(work: Callable[[], object]) -> Callable[[], None]:
    """Run once to compile, then capture a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def microseconds(work: Callable[[], object], repeats: int = 30) -> float:
    """Median time on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) * 1000


def for_each(call: Callable[..., Tensor], weights: list[Tensor]) -> None:
    for weight in weights:
        call(weight=weight)


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def measure_product(name: str, batch: int, layers: int) -> dict[str, float]:
    rows, columns, has_norm, activation, has_residual = MATMULS[name]
    weights = [random(rows, columns, scale=columns**-0.5) for _ in range(layers)]
    x, norm_weight = random(batch, columns), random(columns) if has_norm else None
    residual = random(batch, rows) if has_residual else None
    us, outputs = [], []
    for function in (skinny_linear, reference.skinny_linear):
        call = partial(
            function, x, bias=None, residual=residual, norm_weight=norm_weight, eps=1e-6, activation=activation
        )
        outputs.append(call(weight=weights[0]).float())
        us.append(microseconds(capture(partial(for_each, call, weights))) / layers)
    assert (outputs[0] - outputs[1]).norm() / outputs[1].norm() < 0.01, name
    return {"us": us[0], "gb_per_s": rows * columns * 2 / us[0] / 1000, "torch_us": us[1]}


def measure_attention(batch: int, layers: int, length: int) -> dict[str, float]:
    heads, size = CONFIG.heads, CONFIG.head_size
    caches = [[random(batch, heads, MAX_SEQ_LEN, size) for _ in range(2)] for _ in range(layers)]
    q, k, v = random(batch, 1, 3 * heads, size).transpose(1, 2).chunk(3, 1)
    angle = random(batch, 1, 1, size // 2, dtype=torch.float32).repeat(1, 1, 1, 2)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    expected = reference.decode_attention(q, k, v, *(x.clone() for x in caches[0]), lengths, cos, sin).float()
    actual = decode_attention(q, k, v, *caches[0], lengths, cos, sin).float()
    assert (expected - actual).norm() / expected.norm() < 0.01
    ours = microseconds(capture(lambda: [decode_attention(q, k, v, *c, lengths, cos, sin) for c in caches])) / layers
    return {"us": ours, "gb_per_s": batch * heads * length * size * 4 / ours / 1000}


def measure_greedy(batch: int) -> dict[str, float]:
    logits = random(batch, CONFIG.vocab)
    assert torch.equal(greedy_tokens(logits), logits.argmax(-1))
    ours = microseconds(capture(lambda: [greedy_tokens(logits) for _ in range(8)])) / 8
    theirs = microseconds(capture(lambda: [logits.argmax(-1) for _ in range(8)])) / 8
    return {"us": ours, "torch_us": theirs}


class CachedAttention(nn.Module):
    """Attention of one token per slot over a layer's cache, in place of the model's attention."""

    def __init__(self, kernels: Kernels, slots: int, lengths: Tensor) -> None:
        super().__init__()
        shape = (slots, CONFIG.num_kv_heads, MAX_SEQ_LEN, CONFIG.head_size)
        self.kernels, self.lengths = kernels, lengths
        self.k_cache, self.v_cache = random(*shape), random(*shape)

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents_BT: Tensor | None) -> Tensor:
        return self.kernels.decode_attention(q_BHTK, k_BGTK, v_BGTK, self.k_cache, self.v_cache, self.lengths)


class DecodeStep:
    """One captured step of a batch: tokens and lengths change in place."""

    def __init__(self, parameters: dict[str, Tensor], kernels: Kernels, batch: int) -> None:
        self.model: TransformerStage = models.build_model(CONFIG, "cuda", kernels=kernels)
        fill_parameters(self.model, lambda name: parameters[name], torch.bfloat16)
        self.kernels = kernels
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
        for block in self.model.layers.values():
            block.attention.core_attention = CachedAttention(kernels, batch, self.lengths)

        position = torch.arange(MAX_SEQ_LEN, device="cuda")[:, None]
        self.angles = torch.cat(self.model.block_inputs({"position_ids": position})[:2], -1)

    def logits(self) -> Tensor:
        batch = {"tokens": self.tokens}
        inputs = (*self.angles.index_select(0, self.lengths).chunk(2, -1), None)
        x = self.model.embed(batch, *inputs)
        for block in self.model.layers.values():
            x = block(x, *inputs)
        output = self.model.head(x, batch)
        return self.kernels.linear(output.hidden_for_head(), output.weight, output.bias)[:, 0]

    def __call__(self) -> None:
        self.tokens.copy_(self.kernels.greedy_tokens(self.logits())[:, None])
        self.lengths.add_(1)


def random_parameters() -> dict[str, Tensor]:
    shapes = {name: p.shape for name, p in models.build_model(CONFIG).named_parameters()}
    return {
        name: random(*shape, scale=shape[-1] ** -0.5) if len(shape) > 1 else 1 + random(*shape, scale=0.1)
        for name, shape in shapes.items()
    }


def check_logits(parameters: dict[str, Tensor], tokens: int = 24) -> float:
    """Relative error of the logits, decoded token by token, against one pass of the reference over all tokens in
    fp32; relative to the error of the same pass in bf16."""
    token_ids = torch.randint(0, CONFIG.vocab, (2, tokens), device="cuda")
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = fill_parameters(models.build_model(CONFIG, "cuda"), lambda name: parameters[name], dtype)
        logits.append(model({"tokens": token_ids}).logits().float())
        del model
    step = DecodeStep(parameters, DecodeKernels(), 2)
    decoded = []
    for position in range(tokens):
        step.tokens.copy_(token_ids[:, position : position + 1])
        decoded.append(step.logits().float())
        step.lengths.add_(1)
    error, bf16_error = ((x - logits[0]).norm() / logits[0].norm() for x in (torch.stack(decoded, 1), logits[1]))
    return float(error / bf16_error)


def measure_step(parameters: dict[str, Tensor], batch: int, kernels: Kernels) -> dict[str, float]:
    step = DecodeStep(parameters, kernels, batch)
    replay = capture(step)

    def generate() -> None:
        step.lengths.fill_(PROMPT)
        for _ in range(NEW_TOKENS):
            replay()

    us = microseconds(generate, repeats=5) / NEW_TOKENS
    weight_bytes = 2 * sum(x.numel() for name, x in parameters.items() if name != "embedding.weight")
    mean_length = PROMPT + NEW_TOKENS // 2
    cache_bytes = 4 * batch * mean_length * CONFIG.layers * CONFIG.num_kv_heads * CONFIG.head_size
    return {
        "us": us, "tokens_per_s": batch / us * 1e6, "gb_per_s": (weight_bytes + cache_bytes) / us / 1000
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "prompt": PROMPT, "new_tokens": NEW_TOKENS, "kernels": {}, "step": {},
    }  # fmt: skip
    for batch in arguments.batch:
        rows = {name: measure_product(name, batch, 4 if name == "vocabulary" else 24) for name in MATMULS}
        rows["attention"] = measure_attention(batch, 24 if batch < 16 else 8, PROMPT + NEW_TOKENS // 2)
        rows["greedy tokens"] = measure_greedy(batch)
        results["kernels"][batch] = rows
        for name, row in rows.items():
            print(f"batch {batch:3} {name:18}", *(f"{key} {value:8.1f}" for key, value in row.items()), flush=True)
    parameters = random_parameters()
    results["logit_error_over_bf16_error"] = check_logits(parameters)
    print(f"error of the logits over that of plain bf16: {results['logit_error_over_bf16_error']:.2f}", flush=True)
    for batch in arguments.batch:
        results["step"][batch] = row = measure_step(parameters, batch, DecodeKernels())
        print(f"batch {batch:3} step", *(f"{key} {value:8.1f}" for key, value in row.items()), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
