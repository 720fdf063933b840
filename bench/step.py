"""One training step of trainyard and of transformers, on the same model, batch and machine, in one run.

A step is forward, loss, backward, clipping and AdamW. Both run eager and compiled, in turn, so that a slow moment of
the machine hits all of them; the median counts.

    python bench/step.py     small Llama and BERT on a CPU (bench/gpu.py has those for a GPU)

Ratios compare with transformers in the same mode, and compiled trainyard with the best of transformers.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainyard import Config, Trainer, devices
from trainyard.config.load import parse
from trainyard.families.flops import flops_per_sample
from trainyard.families.hf_config import to_hf

SMALL_LLAMA = {  # the shape of stories15M
    "model": {
        "family": "llama", "vocab": 32000, "hidden": 288, "layers": 6, "heads": 6, "ffn": 768, "max_positions": 256,
        "tie_embeddings": True,
    },
    "data": {"source": "synthetic", "seq_len": 256},
    "train": {"steps": 1, "global_batch": 8, "micro_batch": 8},
}  # fmt: skip
SMALL_BERT = {
    "model": {"family": "bert", "vocab": 30522, "hidden": 256, "layers": 4, "heads": 4, "max_positions": 512},
    "data": {"source": "synthetic", "seq_len": 128, "max_predictions": 20},
    "train": {"steps": 1, "global_batch": 16, "micro_batch": 16},
}
CASES = {"llama": SMALL_LLAMA, "bert": SMALL_BERT}


@dataclass
class StepTimer:
    name: str
    step: Callable[[], Any]
    memory: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def trainyard_step(config: Config, compiled: bool) -> StepTimer:
    trainer = Trainer(parse(config.model_dump(mode="json"), [f"compile.enabled={str(compiled).lower()}"]))
    batch = trainer.loader.batch(0)
    trainer.model.train()
    number = [0]

    def step() -> None:
        number[0] += 1
        trainer.train_step(batch, number[0], 1e-4)

    return StepTimer(f"trainyard {'compiled' if compiled else 'eager'}", step)


def transformers_step(config: Config, compiled: bool, device: torch.device) -> StepTimer:
    """The same model in transformers with torch's fused AdamW; bf16 through autocast."""
    import transformers

    data = to_hf(config.model)
    kind = {"llama": "LlamaForCausalLM", "gpt": "GPT2LMHeadModel", "bert": "BertForPreTraining"}[config.model.family]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{key: value for key, value in data.items() if "dtype" not in key})).to(device)
    model.train()
    batch = {name: tensor.to(device) for name, tensor in Trainer(config).loader.batch(0).items()}
    tokens, labels = batch["tokens"].long(), batch["labels"].long()
    inputs = {"input_ids": tokens}
    if config.model.family == "bert":
        full = torch.full_like(tokens, -100)
        for row in range(len(tokens)):
            used = labels[row] != -100
            full[row, batch["masked_positions"][row][used].long()] = labels[row][used]
        inputs |= {
            "attention_mask": batch["attention_mask"].long(),
            "token_type_ids": batch["segment_ids"].long(),
            "labels": full,
            "next_sentence_label": batch["next_sentence_labels"].long(),
        }
    else:
        inputs |= {"labels": tokens}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model, dynamic=False) if compiled else model
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=config.precision.kind != "fp32")

    def step() -> None:
        with mixed:
            loss = run(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return StepTimer(f"transformers {'compiled' if compiled else 'eager'}", step)


def time_steps(
    makers: list[Callable[[], StepTimer]], device: devices.Device, warm_up: int, rounds: int
) -> list[StepTimer]:
    sides = [maker() for maker in makers]
    for side in sides:
        for _ in range(warm_up):
            side.step()
    for _ in range(rounds):
        for side in sides:
            start = time.perf_counter()
            side.step()
            side.seconds.append(time.perf_counter() - start)
    for side in sides:
        side.memory = device.max_memory_allocated()
    torch.compiler.reset()
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="repeatable")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--only-ours", action="store_true", help="skip transformers (for memory)")
    parser.add_argument("--only-compiled", action="store_true", help="skip eager mode")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override the case")
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")
    arguments = parser.parse_args()
    device = devices.select("cpu")
    results: dict[str, Any] = {"torch": torch.__version__, "device": device.describe(), "cases": {}}
    for name in arguments.case or CASES:
        config = parse(json.loads(json.dumps(CASES[name])), arguments.set)
        flops = per_sample_flops(config)
        makers = [partial(trainyard_step, config, compiled) for compiled in (False, True)]
        if not arguments.only_ours:
            makers += [partial(transformers_step, config, compiled, device.torch_device) for compiled in (False, True)]
        if arguments.only_compiled:
            makers = makers[1::2]
        sides = time_steps(makers, device, arguments.warm_up, arguments.rounds)
        peak = device.peak_throughput(torch.float32 if config.precision.kind == "fp32" else torch.bfloat16)
        print(f"\n{name} on {device.describe()}, torch {torch.__version__}, {config.precision.kind}, "
              f"batch {config.train.global_batch} x {config.data.seq_len}")  # fmt: skip
        rows = {}
        for side in sides:
            samples = config.train.global_batch / side.median
            row = {"ms": side.median * 1000, "sequences_per_second": samples, "memory_bytes": side.memory}
            row["tokens_per_second"] = samples * config.data.seq_len
            if peak:
                row["mfu_full"] = samples * flops.full_attention / peak.flops
                row["mfu_causal"] = samples * flops.causal_attention / peak.flops
            rows[side.name] = row
            mfu = f"  MFU {row['mfu_full']:.1%} full, {row['mfu_causal']:.1%} causal attention" if peak else ""
            print(
                f"  {side.name:22} {row['ms']:9.1f} ms  {row['tokens_per_second']:10,.0f} tokens/s{mfu}"
                f"  {side.memory / 2**30:.1f} GiB"
            )
        results["cases"][name] = {"figures": rows}
        if not (arguments.only_ours or arguments.only_compiled):
            by = {side.name: side.median for side in sides}
            best = min(by["transformers eager"], by["transformers compiled"])
            ratios = {
                "eager": by["transformers eager"] / by["trainyard eager"],
                "compiled": by["transformers compiled"] / by["trainyard compiled"],
                "compiled_over_best": best / by["trainyard compiled"],
            }
            results["cases"][name]["ratios"] = ratios
            print("  ratio (above 1: trainyard is faster): " + ", ".join(f"{k} {v:.2f}x" for k, v in ratios.items()))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


def per_sample_flops(config: Config) -> Any:
    from trainyard import models

    blueprint = models.family_of(config.model).blueprint(config.model)
    return flops_per_sample(config.model, blueprint, config.data.seq_len, config.data.max_predictions)


if __name__ == "__main__":
    main()
