"""Tokens per second and peak memory of LoRA and QLoRA on one GPU, next to transformers + PEFT + Liger in the same run.

    python bench/lora_speed.py --out bench/results/lora-h200.json      every case, each in its own process
    python bench/lora_speed.py --case bf16-8x2048 --set compile.enabled=true
    python bench/lora_speed.py --tiny                                  shows that it works, on a CPU too

The shape of Llama 3.1 8B with random weights, adapters of rank 16 on all linear layers, random tokens, AdamW. `sft` and
`pretrain` train all weights of the shape of Llama 3.2 1B, on packed conversations and on plain tokens. Times are the
median of the steps after the first ones; `peak_gib` is the memory of tensors in these steps, `peak_gib_with_loading`
that of the process. Peers run if they can be imported: transformers, peft and liger_kernel, and bitsandbytes for nf4.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
GPU = torch.cuda.is_available()
RANK, LR = 16, 1e-4
WARMUP_STEPS, STEPS = 4, 12
LLAMA_8B = {
    "family": "llama", "vocab": 128_256, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14_336,
    "max_positions": 8192, "rope_theta": 500_000.0,
}  # fmt: skip
LLAMA_1B = {**LLAMA_8B, "hidden": 2048, "layers": 16, "ffn": 8192, "tie_embeddings": True}
TINY = {
    "family": "llama", "vocab": 512, "hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 256,
    "max_positions": 2048,
}  # fmt: skip
FULL = {"recompute": {"kind": "full"}}
SELECTIVE = {"recompute": {"kind": "selective", "modules": ["norm", "activation"]}}
LORA: dict[str, Any] = {"lora": {"rank": RANK}}
CASES: dict[str, dict[str, Any]] = {
    "bf16-8x2048": {"batch": 8, **LORA},
    "bf16-2x2048": {"batch": 2, **LORA},
    "bf16-2x2048-selective": {"batch": 2, **LORA, **SELECTIVE},
    "bf16-2x2048-full": {"batch": 2, **LORA, **FULL},
    "fp8-8x2048": {"batch": 8, **LORA, "precision": {"kind": "fp8"}},
    "base-fp8-8x2048": {"batch": 8, "lora": {"rank": RANK, "base": "fp8"}},
    "base-and-head-fp8-8x2048": {
        "batch": 8,
        "lora": {"rank": RANK, "base": "fp8"},
        "precision": {"kind": "fp8", "head_dtype": "fp8"},
    },
    "base-nf4-2x2048-full": {"batch": 2, "lora": {"rank": RANK, "base": "nf4"}, **FULL},
    "sft": {
        "batch": 8,
        "model": LLAMA_1B,
        "data": {"source": "bench.packing_speed:make_conversations", "packing": True},
    },
    "pretrain": {"batch": 8, "model": LLAMA_1B},
}
PEERS: dict[str, dict[str, Any]] = {
    "peer-bf16-8x2048": {"batch": 8},
    "peer-bf16-2x2048": {"batch": 2},
    "peer-bf16-2x2048-full": {"batch": 2, "recompute": True},
    "peer-nf4-2x2048-full": {"batch": 2, "recompute": True, "nf4": True},
}
COMPARED = {
    "bf16-8x2048": "peer-bf16-8x2048",
    "bf16-2x2048": "peer-bf16-2x2048",
    "bf16-2x2048-full": "peer-bf16-2x2048-full",
    "fp8-8x2048": "peer-bf16-8x2048",
    "base-fp8-8x2048": "peer-bf16-8x2048",
    "base-and-head-fp8-8x2048": "peer-bf16-8x2048",
    "base-nf4-2x2048-full": "peer-nf4-2x2048-full",
    "sft": "pretrain",
}
"""What each case is divided by."""


def measure(step: Callable[[int], float], tokens: int) -> dict[str, float]:
    """`step` trains one step and returns its loss, which waits for the device."""
    times, losses = [], []
    for index in range(WARMUP_STEPS + STEPS):
        if index == WARMUP_STEPS and GPU:
            loading = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(step(index))
        times.append(time.perf_counter() - start)
    result = {"tokens_per_s": tokens / statistics.median(times[WARMUP_STEPS:]), "last_loss": losses[-1]}
    if GPU:
        peak = torch.cuda.max_memory_allocated()
        result |= {"peak_gib": peak / 2**30, "peak_gib_with_loading": max(loading, peak) / 2**30}
    return result


def run_ours(case: dict[str, Any], tiny: bool, overrides: list[str]) -> dict[str, float]:
    from trainyard import Trainer
    from trainyard.config.load import parse

    sections = {key: value for key, value in case.items() if key != "batch"}
    batch, seq_len = (2, 64) if tiny else (case["batch"], 2048)
    if "packing" in (data := sections.get("data", {})):
        seq_len = 2048  # that of bench/packing_speed.py
    base: dict[str, Any] = {
        "model": LLAMA_8B,
        "precision": {"kind": "bf16"},
        "log": {"loggers": []},
        **sections,
        "data": {"source": "synthetic", "seq_len": seq_len, **data},
        "train": {"steps": WARMUP_STEPS + STEPS, "global_batch": batch, "micro_batch": batch},
    }
    trainer = Trainer(parse({**base, "model": TINY} if tiny else base, overrides))
    for model in trainer.models:
        model.train()

    def step(index: int) -> float:
        result = trainer.train_step(trainer.loader.batch(index, trainer.batch_slice), index + 1, LR)
        return float(result.loss)

    return measure(step, batch * seq_len)


def run_peer(case: dict[str, Any], tiny: bool) -> dict[str, float]:
    """transformers' Llama with Liger's kernels and PEFT's adapters in fp32, torch's fused AdamW and clipping."""
    import transformers
    from peft import LoraConfig, get_peft_model

    device, shape = "cuda" if GPU else "cpu", TINY if tiny else LLAMA_8B
    batch, seq_len = (2, 64) if tiny else (case["batch"], 2048)
    if GPU:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=shape["max_positions"], attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if case.get("nf4"):
        _quantize_linears(model.model, device)
    if case.get("recompute"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(trained, lr=LR, fused=GPU)
    tokens = torch.randint(shape["vocab"], (batch, seq_len), device=device)
    model.train()

    def step(index: int) -> float:
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return measure(step, batch * seq_len)


def _quantize_linears(module: torch.nn.Module, device: str) -> None:
    import bitsandbytes as bnb

    for name, child in list(module.named_children()):
        if not isinstance(child, torch.nn.Linear):
            _quantize_linears(child, device)
            continue
        linear = bnb.nn.Linear4bit(
            child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        weight = child.weight.data.cpu()
        linear.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
        setattr(module, name, linear.to(device))


def peer_packages(case: dict[str, Any]) -> list[str]:
    """Those that cannot be imported."""
    names = ["transformers", "peft", *(["liger_kernel"] if GPU else []), *(["bitsandbytes"] if case.get("nf4") else [])]
    return [name for name in names if find_spec(name) is None]


def run_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case in a process of its own."""
    if name in PEERS and (missing := peer_packages(PEERS[name])):
        return {"skipped": f"no {', '.join(missing)}"}
    command = [sys.executable, __file__, "--case", name, "--child", *(["--tiny"] if options.tiny else [])]
    command += [argument for override in options.set for argument in ("--set", override)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*CASES, *PEERS], help="default: all")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="keys of our configuration")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.path.insert(0, str(ROOT))
        name = options.case[0]
        ours = name in CASES
        result = run_ours(CASES[name], options.tiny, options.set) if ours else run_peer(PEERS[name], options.tiny)
        print(json.dumps({key: round(value, 3) for key, value in result.items()}))
        return
    names = options.case or [*CASES, *([] if options.only_ours else PEERS)]
    device = torch.cuda.get_device_name() if GPU else platform.machine()
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "set": options.set, "cases": {}}
    cases = results["cases"]
    for name in names:
        cases[name] = run_case(name, options)
        print(f"{name:24} " + "  ".join(f"{key} {value}" for key, value in cases[name].items()), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, other in COMPARED.items():
        speeds = [cases.get(case, {}).get("tokens_per_s") for case in (name, other)]
        if all(speeds):
            cases[name]["ratio"] = round(speeds[0] / speeds[1], 2)
            print(f"{name} / {other}: {cases[name]['ratio']}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
