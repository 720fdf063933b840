"""What `device.batch_invariant` costs, and what it changes: training and decoding with and without it.

    python bench/batch_invariance.py --out bench/results/batch-invariance-h200.json

The shape of DeepSeek-Coder 1.3B in bf16 with random weights. `train`: tokens per second of a step of 8 samples of 4,096
tokens. `decode`: of 128 new tokens after prompts of 512 tokens, without the time to the first token. `difference`: the
log-probabilities of sampled tokens, as the sampler gave them, against those of a training batch of the same sequences:
the fraction of tokens whose bits differ, and the largest difference. On a CPU, a tiny fp32 model.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from trainyard import Trainer, devices
from trainyard.config.load import parse
from trainyard.core.constants import IGNORE_INDEX
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.inference.build_engine import EngineShape, build_engine
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.inference.scheduler import RequestScheduler
from trainyard.models import assign_parameters, blueprint_of, build_model
from trainyard.models.init import initial_values
from trainyard.parallel.process_group import Group
from trainyard.train.cross_entropy import make_head_loss

GPU = torch.cuda.is_available()
DEEPSEEK = {
    "family": "llama", "vocab": 32256, "hidden": 2048, "layers": 24, "heads": 16, "ffn": 5504, "max_positions": 16384,
    "rope_theta": 100000.0, "rope_scaling": {"kind": "linear", "factor": 4.0},
}  # fmt: skip
TINY = {
    "family": "llama", "vocab": 1000, "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 688,
    "max_positions": 1024,
}  # fmt: skip
MODEL = DEEPSEEK if GPU else TINY
DTYPE = torch.bfloat16 if GPU else torch.float32
BATCH, SEQ_LEN = (8, 4096) if GPU else (4, 256)
PROMPT, NEW_TOKENS = (512, 128) if GPU else (48, 32)
BATCHES, ROUNDS = ((1, 8, 32), 3) if GPU else ((1, 8), 2)
WARMUP_STEPS, STEPS = (3, 8) if GPU else (1, 3)
LR = 1e-4


def train(invariant: bool) -> dict[str, float]:
    config = {
        "model": MODEL,
        "data": {"source": "synthetic", "seq_len": SEQ_LEN},
        "train": {"steps": WARMUP_STEPS + STEPS, "global_batch": BATCH, "micro_batch": BATCH},
        "precision": {"kind": "bf16" if GPU else "fp32"},
        "log": {"loggers": []},
        "device": {"batch_invariant": invariant},
    }
    trainer = Trainer(parse(config))
    for model in trainer.models:
        model.train()
    times, losses = [], []
    for index in range(WARMUP_STEPS + STEPS):
        start = time.perf_counter()
        result = trainer.train_step(trainer.loader.batch(index, trainer.batch_slice), index + 1, LR)
        losses.append(float(result.loss))
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
    return {
        "tokens_per_s": round(BATCH * SEQ_LEN / statistics.median(times[WARMUP_STEPS:]), 1),
        "last_loss": losses[-1],
        "peak_gib": round(peak, 2),
    }


def parameters(config: LlamaConfig, handle: torch.device) -> dict[str, torch.Tensor]:
    blueprint = blueprint_of(config)
    values = initial_values(blueprint, 0, handle)
    return {name: values(name).to(handle, DTYPE) for name in blueprint.parameter_names()}


def generate(scheduler: RequestScheduler, prompts: list[list[int]], options: SamplingOptions) -> Any:
    """Tokens and log-probabilities of each prompt, the seconds, and those to the first token of all."""
    begin, first = time.perf_counter(), 0.0
    for index, prompt in enumerate(prompts):
        scheduler.add(Request(index, prompt, options))
    events: list[list[Any]] = [[] for _ in prompts]
    while scheduler.has_work:
        for event in scheduler.step():
            events[event.request_id].append(event)
        if not first and all(events):
            first = time.perf_counter() - begin
    return events, time.perf_counter() - begin, first


def decode(device: devices.Device, config: LlamaConfig, weights: dict[str, torch.Tensor], batch: int) -> Any:
    rows: dict[str, Any] = {}
    prompts = torch.randint(0, config.vocab, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    for name, invariant in (("default", False), ("batch_invariant", True)):
        shape = EngineShape(batch, PROMPT + NEW_TOKENS + 1, DTYPE)
        engine = build_engine(config, device, Group(), shape, weights.__getitem__, batch_invariant=invariant)
        scheduler = RequestScheduler(engine, config.vocab)
        greedy = SamplingOptions(max_new_tokens=NEW_TOKENS)
        generate(scheduler, prompts, greedy)  # compile and capture
        speeds, firsts = [], []
        for _ in range(ROUNDS):
            _, seconds, first = generate(scheduler, prompts, greedy)
            speeds.append(batch * (NEW_TOKENS - 1) / (seconds - first))
            firsts.append(first)
        sampled = SamplingOptions(temperature=1.0, max_new_tokens=NEW_TOKENS, num_logprobs=0)
        events, *_ = generate(scheduler, prompts, sampled)
        rows[name] = {
            "decode_tokens_per_s": round(statistics.median(speeds), 1),
            "first_token_ms": round(statistics.median(firsts) * 1e3, 2),
            **difference(device, config, weights, prompts, events, invariant),
        }
    return rows


@torch.no_grad()
def difference(
    device: devices.Device, config: LlamaConfig, weights: dict[str, torch.Tensor], prompts: list[list[int]],
    events: list[list[Any]], invariant: bool,
) -> dict[str, float]:  # fmt: skip
    handle = device.torch_device
    kernels = device.batch_invariant_kernels() if invariant else device.kernels()
    model = build_model(config, handle, kernels=kernels)
    assign_parameters(model, weights.__getitem__)
    text = [[*prompt, *(e.token for e in row)] for prompt, row in zip(prompts, events, strict=True)]
    tokens = torch.tensor(text, dtype=torch.int32, device=handle)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[:, PROMPT - 1 : -1] = tokens[:, PROMPT:]
    ids, key = (torch.zeros(size, dtype=torch.int32, device=handle) for size in (len(text), 2))
    output: Any = model({"tokens": tokens, "sample_ids": ids, "rng_key": key})
    head_loss = make_head_loss(kernels, None, None, device.kind.max_logits_bytes)
    trained = -head_loss(output, labels, per_token=True)[:, PROMPT - 1 : -1]  # type: ignore[call-arg]
    sampled = torch.tensor([[e.logprob for e in row] for row in events], device=handle)
    return {
        "logprobs_that_differ": round(float((trained != sampled).float().mean()), 4),
        "largest_difference": float((trained - sampled).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = devices.select("auto")
    device.prepare(False)
    config = LlamaConfig(**MODEL)  # type: ignore[arg-type]
    name = torch.cuda.get_device_name() if GPU else platform.machine()
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "decode": {}, "train": {}}
    weights = parameters(config, device.torch_device)
    for batch in BATCHES:
        results["decode"][str(batch)] = decode(device, config, weights, batch)
        print(batch, results["decode"][str(batch)], flush=True)
    weights.clear()
    for name, invariant in (("default", False), ("batch_invariant", True)):
        gc.collect()  # the first trainer
        if GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        results["train"][name] = train(invariant)
        print("train", name, results["train"][name], flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
